#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "buffer_cache.h"
#include "skip_words.h"
#include "thread_pool.h"

namespace liteattention::cpu {
namespace {

// Packed keys and values held at once: a long video must not need a second copy of all of its own.
constexpr size_t kPackedBudget = size_t{192} << 20;
// A key of a decoded part costs as much as this many lanes of a q tile: it has to be fetched.
constexpr int64_t kDecodeCost = 10;
// Work (about 2 cycles a piece) that one thread does sooner than two can be brought together.
constexpr int64_t kOneThreadCost = 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t Align(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

struct Keys {
    int64_t begin, end;
};

// Keys that some row of [row_begin, row_end) sees.
Keys Visible(const AttentionParams& p, int64_t row_begin, int64_t row_end) {
    const int64_t offset = p.kv_len - p.q_len;
    const int64_t begin = p.window ? std::max<int64_t>(0, row_begin + offset - p.window + 1) : 0;
    const int64_t end = p.Bounded() ? std::min(p.kv_len, p.EndOf(row_end - 1)) : p.kv_len;
    return {begin, std::max(end, begin)};
}

// Which q block of the call a row is in, counted over entries and heads.
int64_t QBlock(const AttentionParams& p, const LiteParams& lite, int64_t request, int64_t head,
               int64_t row) {
    const int64_t q_blocks = CeilDiv(p.q_len, lite.q_block);
    return (request * p.q_heads + head) * q_blocks + row / lite.q_block;
}

int64_t SkipWords(const AttentionParams& p) { return CeilDiv(CeilDiv(p.kv_len, kKBlock), 32); }

int64_t KeptBlocks(const LiteParams& lite, const uint32_t* row, int64_t k_blocks) {
    int64_t count = 0;
    for (int64_t w = 0; w * 32 < k_blocks; ++w)
        count += __builtin_popcount(KeptWord(lite, row, w, k_blocks));
    return count;
}

}  // namespace

struct Schedule::Shared {
    const std::vector<AttentionParams>& requests;
    const LiteParams* lite;
    std::vector<char*> homes;  // of the units' packed values and keys
    float* parts;
    std::atomic<int64_t>* left;  // parts of a group that are still to be computed
    char* scratch;
    size_t scratch_bytes;  // of a thread
};

int32_t Schedule::AddRequest(const AttentionParams& request) {
    k_bytes_ = kernel_->k_block_bytes(request);
    v_bytes_ = kernel_->v_block_bytes(request);
    longest_ = std::max(longest_, request.kv_len);
    return requests_++;
}

void Schedule::AddUnit(const AttentionParams& p, int64_t kv_head) {
    const Keys keys = Visible(p, 0, p.q_len);
    Unit unit{};
    unit.request = requests_ - 1;
    unit.kv_head = static_cast<int32_t>(kv_head);
    unit.first_block = keys.begin / kKBlock;
    unit.blocks = CeilDiv(keys.end, kKBlock) - unit.first_block;
    // With keys read in place only the last block may need packing.
    const int64_t in_place = kernel_->k_direct(p) ? p.kv_len / kKBlock : 0;
    unit.first_key_block = std::max(in_place, unit.first_block);
    unit.key_blocks = std::max<int64_t>(0, unit.first_block + unit.blocks - unit.first_key_block);
    if (packed_bytes_ && packed_bytes_ + UnitBytes(unit) > kPackedBudget) EndPass();
    packed_bytes_ += UnitBytes(unit);
    units_.push_back(unit);
}

void Schedule::AddTiles(const AttentionParams& p, bool share, const LiteParams* lite) {
    const int32_t request = AddRequest(p);
    const int64_t group = p.q_heads / p.kv_heads, tile = lite ? lite->q_block : kQItem;
    const int64_t fit = share ? std::clamp<int64_t>(kQItem / p.q_len, 1, group) : 1;
    const int64_t heads = CeilDiv(group, CeilDiv(group, fit));
    for (int64_t first = 0; first < p.q_heads; first += group) {
        AddUnit(p, first / group);
        for (int64_t head = 0; head < group; head += heads) {
            for (int64_t row = 0; row < p.q_len; row += tile) {
                Item item{};
                item.request = request;
                item.unit = static_cast<int32_t>(units_.size() - 1);
                item.head = first + head;
                item.heads = std::min(heads, group - head);
                item.row_begin = row;
                item.row_end = std::min(p.q_len, row + tile);
                item.group = -1;
                const int64_t lanes = item.heads * (item.row_end - item.row_begin);
                const Keys keys = Visible(p, item.row_begin, item.row_end);
                item.cost = keys.end - keys.begin / kKBlock * kKBlock;
                if (lite) {
                    const int64_t at = QBlock(p, *lite, request, item.head, row) * SkipWords(p);
                    const int64_t k_blocks = CeilDiv(p.kv_len, kKBlock);
                    item.cost = KeptBlocks(*lite, lite->read + at, k_blocks) * kKBlock;
                }
                item.cost *= CeilDiv(lanes, kRowStep) * kRowStep;
                items_.push_back(item);
                ++tiles_;
            }
        }
    }
}

void Schedule::AddDecode(const AttentionParams& p) {
    const int32_t request = AddRequest(p);
    const int64_t group = p.q_heads / p.kv_heads;
    const int64_t at_once = std::min(p.q_len, int64_t{kDecodeLanes});
    const int64_t sets = CeilDiv(group, std::max<int64_t>(1, kDecodeLanes / at_once));
    const int64_t heads = CeilDiv(group, sets);
    for (int64_t first = 0; first < p.q_heads; first += group) {
        for (int64_t head = 0; head < group; head += heads) {
            for (int64_t row = 0; row < p.q_len; row += at_once) {
                Item item{};
                item.request = request;
                item.unit = -1;
                item.head = first + head;
                item.heads = std::min(heads, group - head);
                item.row_begin = row;
                item.row_end = std::min(p.q_len, row + at_once);
                const Keys keys = Visible(p, item.row_begin, item.row_end);
                AddParts(item, keys.begin / kKBlock * kKBlock, keys.end, decode_->part_words(p));
            }
        }
    }
}

void Schedule::AddParts(Item item, int64_t begin, int64_t end, int64_t part_words) {
    const int64_t first = begin / kDecodeSplit;
    const int64_t parts = std::max<int64_t>(1, CeilDiv(end, kDecodeSplit) - first);
    item.group = -1;
    if (parts > 1) {
        const int64_t words = item.heads * (item.row_end - item.row_begin) * part_words;
        item.group = static_cast<int64_t>(groups_.size());
        groups_.push_back({parts, words, part_words_});
        part_words_ += parts * words;
    }
    for (item.part = 0; item.part < parts; ++item.part) {
        item.key_begin = std::max(begin, (first + item.part) * kDecodeSplit);
        item.key_end = std::min(end, (first + item.part + 1) * kDecodeSplit);
        item.key_end = std::max(item.key_end, item.key_begin);
        item.cost = (item.key_end - item.key_begin) * kDecodeCost;
        items_.push_back(item);
    }
}

void Schedule::EndPass() {
    const size_t unit_begin = passes_.empty() ? 0 : passes_.back().unit_end;
    const size_t item_begin = passes_.empty() ? 0 : passes_.back().item_end;
    int64_t blocks = 0;
    for (size_t u = unit_begin; u < units_.size(); ++u) blocks += units_[u].blocks;
    passes_.push_back(
        {unit_begin, units_.size(), item_begin, items_.size(), packed_bytes_, blocks});
    packed_bytes_ = 0;
}

void Schedule::Finish() {
    EndPass();
    for (const Pass& pass : passes_) {
        const auto begin = items_.begin() + static_cast<std::ptrdiff_t>(pass.item_begin);
        const auto end = items_.begin() + static_cast<std::ptrdiff_t>(pass.item_end);
        std::stable_sort(begin, end, [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }
}

void Schedule::Run(const std::vector<AttentionParams>& requests, const LiteParams* lite,
                   int threads) const {
    if (requests.empty()) return;
    AttentionParams longest = requests[0];
    longest.kv_len = longest_;
    size_t scratch = 0, packed = 0;
    if (parts()) scratch = decode_->scratch_bytes(longest);
    if (tiles_) scratch = std::max(scratch, kernel_->scratch_bytes(longest));
    scratch = Align(scratch);
    for (const Pass& pass : passes_) packed = std::max(packed, Align(pass.packed_bytes));
    const size_t part_bytes = Align(static_cast<size_t>(part_words_) * 4);
    const size_t count_bytes = Align(groups_.size() * sizeof(std::atomic<int64_t>));
    BufferCache::Buffer buffer = BufferCache::Instance().Take(
        packed + part_bytes + count_bytes + static_cast<size_t>(threads) * scratch);
    char* const base = buffer.data.get();

    Shared shared{requests,
                  lite,
                  std::vector<char*>(units_.size()),
                  reinterpret_cast<float*>(base + packed),
                  reinterpret_cast<std::atomic<int64_t>*>(base + packed + part_bytes),
                  base + packed + part_bytes + count_bytes,
                  scratch};
    for (size_t g = 0; g < groups_.size(); ++g)
        new (shared.left + g) std::atomic<int64_t>(groups_[g].parts);
    for (const Pass& pass : passes_) {
        char* home = base;
        for (size_t u = pass.unit_begin; u < pass.unit_end; ++u) {
            shared.homes[u] = home;
            home += UnitBytes(units_[u]);
        }
        if (pass.packed_blocks) Pack(pass, shared, threads);
        Compute(pass, shared, threads);
    }
    BufferCache::Instance().Give(std::move(buffer));
}

void Schedule::Pack(const Pass& pass, const Shared& shared, int threads) const {
    std::vector<int64_t> before{0};  // blocks of the units before each
    for (size_t u = pass.unit_begin; u < pass.unit_end; ++u)
        before.push_back(before.back() + units_[u].blocks);
    std::atomic<int64_t> next{0};
    ParallelRun(threads, [&](int) {
        constexpr int64_t kBatch = 8;  // K blocks packed per claim
        for (;;) {
            const int64_t begin = next.fetch_add(kBatch, std::memory_order_relaxed);
            if (begin >= pass.packed_blocks) return;
            size_t u = static_cast<size_t>(std::upper_bound(before.begin(), before.end(), begin) -
                                           before.begin() - 1);
            const int64_t end = std::min(pass.packed_blocks, begin + kBatch);
            for (int64_t i = begin; i < end; ++i) {
                while (i >= before[u + 1]) ++u;
                const Unit& unit = units_[pass.unit_begin + u];
                const AttentionParams& p = shared.requests[static_cast<size_t>(unit.request)];
                const int64_t index = i - before[u], block = unit.first_block + index;
                char* to = shared.homes[pass.unit_begin + u];
                kernel_->pack_v(p, unit.kv_head, block, to + static_cast<size_t>(index) * v_bytes_);
                if (block < unit.first_key_block) continue;
                to += static_cast<size_t>(unit.blocks) * v_bytes_;
                kernel_->pack_k(p, unit.kv_head, block,
                                to + static_cast<size_t>(block - unit.first_key_block) * k_bytes_);
            }
        }
    });
}

void Schedule::Compute(const Pass& pass, const Shared& shared, int threads) const {
    int64_t cost = 0;
    for (size_t i = pass.item_begin; i < pass.item_end && cost <= kOneThreadCost; ++i)
        cost += items_[i].cost;
    std::atomic<size_t> next{pass.item_begin};
    const int64_t count = static_cast<int64_t>(pass.item_end - pass.item_begin);
    const int workers =
        cost <= kOneThreadCost ? 1 : static_cast<int>(std::min<int64_t>(threads, count));
    ParallelRun(workers, [&](int thread) {
        char* const own = shared.scratch + static_cast<size_t>(thread) * shared.scratch_bytes;
        kernel_->enter();
        const auto claim = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        const auto decoded = [&](const Item& item) {
            const AttentionParams& p = shared.requests[static_cast<size_t>(item.request)];
            DecodeTask task{&p,           item.head,      item.heads,   item.row_begin,
                            item.row_end, item.key_begin, item.key_end, nullptr};
            if (item.group >= 0) {
                const Group& group = groups_[static_cast<size_t>(item.group)];
                task.part = shared.parts + group.offset + item.part * group.part_words;
            }
            return task;
        };
        // Claimed one ahead: the keys of a decoded part are asked for while its predecessor is
        // computed.
        for (size_t i = claim(), ahead; i < pass.item_end; i = ahead) {
            ahead = claim();
            const Item& item = items_[i];
            if (item.unit >= 0) {
                RunTile(item, shared, own);
                continue;
            }
            DecodeTask task = decoded(item), after{};
            if (ahead < pass.item_end && items_[ahead].unit < 0) {
                after = decoded(items_[ahead]);
                task.next = &after;
            }
            decode_->run(task, own);
            if (item.group < 0) continue;
            const size_t g = static_cast<size_t>(item.group);
            const Group& group = groups_[g];
            if (shared.left[g].fetch_sub(1, std::memory_order_acq_rel) == 1)
                decode_->merge(task, shared.parts + group.offset, group.parts, group.part_words,
                               own);
        }
        kernel_->leave();
    });
}

void Schedule::RunTile(const Item& item, const Shared& shared, char* scratch) const {
    const AttentionParams& p = shared.requests[static_cast<size_t>(item.request)];
    const Unit& unit = units_[static_cast<size_t>(item.unit)];
    const LiteParams* lite = shared.lite;
    QBlockTask task{};
    task.params = &p;
    task.lite = lite;
    task.head = item.head;
    task.heads = item.heads;
    task.row_begin = item.row_begin;
    task.row_end = item.row_end;
    task.first_block = unit.first_block;
    task.v_packed = shared.homes[static_cast<size_t>(item.unit)];
    task.k_packed = task.v_packed + static_cast<size_t>(unit.blocks) * v_bytes_;
    if (lite) {
        const int64_t at = QBlock(p, *lite, item.request, item.head, item.row_begin);
        task.read = lite->read + at * SkipWords(p);
        task.write = lite->write + at * SkipWords(p);
        if (lite->mass) task.mass = lite->mass + at * CeilDiv(p.kv_len, kKBlock);
    }
    kernel_->run(task, scratch);
}

}  // namespace liteattention::cpu
