#include "ragged.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "buffer_cache.h"
#include "thread_pool.h"

namespace liteattention::cpu {
namespace {

// Packed keys and values held at once; requests beyond it are done in further passes.
constexpr size_t kPackedBudget = size_t{192} << 20;
// A key of a decoded part costs as much as this many lanes of a q tile: it has to be fetched.
constexpr int64_t kDecodeCost = 10;
// Work (about 2 cycles a piece) that one thread does sooner than two can be brought together.
constexpr int64_t kOneThreadCost = 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t Align(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

const char* Offset(const void* base, int64_t elements, int64_t size) {
    return static_cast<const char*>(base) + elements * size;
}

}  // namespace

bool LengthsHold(const PagedRequests& r, int64_t max_q_len, int64_t max_kv_len) {
    if (r.q_start[0] < 0) return false;
    for (int64_t i = 0; i < r.requests; ++i) {
        const int64_t rows = int64_t{r.q_start[i + 1]} - r.q_start[i];
        if (rows < 0 || r.kv_len[i] < 0) return false;
        if (max_q_len >= 0 && rows > max_q_len) return false;
        if (max_kv_len >= 0 && r.kv_len[i] > max_kv_len) return false;
    }
    return true;
}

bool PagesHold(const PagedRequests& r, int64_t rows, int64_t pages, int64_t page_size) {
    if (r.q_start[r.requests] > rows) return false;
    for (int64_t i = 0; i < r.requests; ++i) {
        if (r.q_start[i + 1] == r.q_start[i]) continue;
        const int64_t used = CeilDiv(r.kv_len[i], page_size);
        if (used > r.width) return false;
        const int32_t* row = r.table + i * r.stride;
        // As unsigned numbers negative pages are too large as well.
        uint32_t most = 0;
        for (int64_t j = 0; j < used; ++j) most = std::max(most, static_cast<uint32_t>(row[j]));
        if (used && most >= static_cast<uint64_t>(pages)) return false;
    }
    return true;
}

RaggedPlan::RaggedPlan(const RaggedShape& shape, const int32_t* q_start, const int32_t* kv,
                       const int32_t* page_table, int64_t table_stride, Isa isa)
    : shape_(shape),
      kernel_(&SelectKernel(isa, shape.dtype)),
      decode_(&SelectDecode(isa, shape.dtype)) {
    const bool paged = shape.page_size > 0;
    requests_.reserve(static_cast<size_t>(shape.requests));
    for (int64_t i = 0; i < shape.requests; ++i) {
        Request r{};
        AttentionParams& p = r.params;
        p.batch = 1;
        p.q_heads = shape.q_heads;
        p.kv_heads = shape.kv_heads;
        p.q_len = q_start[i + 1] - q_start[i];
        p.kv_len = paged ? kv[i] : kv[i + 1] - kv[i];
        p.head_dim = shape.head_dim;
        p.dtype = shape.dtype;
        p.kv_type = shape.kv_type;
        p.rounding = shape.rounding;
        p.scale = shape.scale;
        p.v_scale = shape.v_scale;
        p.soft_cap = shape.soft_cap;
        p.causal = shape.causal;
        p.window = shape.window;
        p.page_size = shape.page_size;
        p.pages = paged ? page_table + i * table_stride : nullptr;
        r.q_start = q_start[i];
        r.kv_start = paged ? 0 : kv[i];
        if (p.q_len > 0) requests_.push_back(r);
    }
    const int64_t group = shape.q_heads / shape.kv_heads;
    size_t packed = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
        const AttentionParams& p = requests_[i].params;
        longest_ = std::max(longest_, p.kv_len);
        const bool decode = p.q_len == 1 || p.q_len * group <= kMaxDecodeLanes;
        const size_t block_bytes = kernel_->k_block_bytes(p) + kernel_->v_block_bytes(p);
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
            if (decode) {
                AddDecode(static_cast<int32_t>(i), head);
                continue;
            }
            // A pass takes what fits the budget; decoded parts go along with any.
            const size_t bytes = static_cast<size_t>(CeilDiv(p.kv_len, kKBlock)) * block_bytes;
            if (packed && packed + bytes > kPackedBudget) {
                const size_t unit_begin = passes_.empty() ? 0 : passes_.back().unit_end;
                const size_t item_begin = passes_.empty() ? 0 : passes_.back().item_end;
                passes_.push_back({unit_begin, units_.size(), item_begin, items_.size(), 0});
                packed = 0;
            }
            packed += bytes;
            AddTiles(static_cast<int32_t>(i), head);
        }
    }
    const size_t unit_begin = passes_.empty() ? 0 : passes_.back().unit_end;
    const size_t item_begin = passes_.empty() ? 0 : passes_.back().item_end;
    passes_.push_back({unit_begin, units_.size(), item_begin, items_.size(), 0});
    for (Pass& pass : passes_) {
        for (size_t u = pass.unit_begin; u < pass.unit_end; ++u)
            pass.packed_blocks += units_[u].blocks;
        const auto begin = items_.begin() + static_cast<std::ptrdiff_t>(pass.item_begin);
        const auto end = items_.begin() + static_cast<std::ptrdiff_t>(pass.item_end);
        std::stable_sort(begin, end, [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }
}

// Keys that some row of [row_begin, row_end) sees.
void RaggedPlan::Visible(const Request& r, int64_t row_begin, int64_t row_end, int64_t* begin,
                         int64_t* end) const {
    const AttentionParams& p = r.params;
    const int64_t offset = p.kv_len - p.q_len;
    *begin = p.window ? std::max<int64_t>(0, row_begin + offset - p.window + 1) : 0;
    *end = p.causal ? std::min(p.kv_len, row_end + offset) : p.kv_len;
    *end = std::max(*end, *begin);
}

void RaggedPlan::AddDecode(int32_t request, int64_t kv_head) {
    const Request& r = requests_[static_cast<size_t>(request)];
    const int64_t group = shape_.q_heads / shape_.kv_heads, rows = r.params.q_len;
    const int64_t at_once = std::min(rows, int64_t{kDecodeLanes});
    const int64_t sets = CeilDiv(group, std::max<int64_t>(1, kDecodeLanes / at_once));
    const int64_t heads = CeilDiv(group, sets);
    for (int64_t head = 0; head < group; head += heads) {
        for (int64_t row = 0; row < rows; row += at_once) {
            Item item{};
            item.request = request;
            item.unit = -1;
            item.head = kv_head * group + head;
            item.heads = std::min(heads, group - head);
            item.row_begin = row;
            item.row_end = std::min(rows, row + at_once);
            int64_t begin = 0, end = 0;
            Visible(r, item.row_begin, item.row_end, &begin, &end);
            begin = begin / kKBlock * kKBlock;
            const int64_t first = begin / kDecodeSplit;
            const int64_t parts = std::max<int64_t>(1, CeilDiv(end, kDecodeSplit) - first);
            item.group = -1;
            if (parts > 1) {
                const int64_t lanes = item.heads * (item.row_end - item.row_begin);
                const int64_t words = lanes * decode_->part_words(r.params);
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
    }
}

void RaggedPlan::AddTiles(int32_t request, int64_t kv_head) {
    const Request& r = requests_[static_cast<size_t>(request)];
    const int64_t group = shape_.q_heads / shape_.kv_heads, rows = r.params.q_len;
    int64_t begin = 0, end = 0;
    Visible(r, 0, rows, &begin, &end);
    const int64_t first = begin / kKBlock;
    Unit unit{request, static_cast<int32_t>(kv_head), first, CeilDiv(end, kKBlock) - first};
    units_.push_back(unit);
    // Short requests fill an item with several heads, which share its reads of keys and values.
    const int64_t fit = std::clamp<int64_t>(kQItem / rows, 1, group);
    const int64_t heads = CeilDiv(group, CeilDiv(group, fit));
    for (int64_t head = 0; head < group; head += heads) {
        for (int64_t row = 0; row < rows; row += kQItem) {
            Item item{};
            item.request = request;
            item.unit = static_cast<int32_t>(units_.size() - 1);
            item.head = kv_head * group + head;
            item.heads = std::min(heads, group - head);
            item.row_begin = row;
            item.row_end = std::min(rows, row + kQItem);
            item.group = -1;
            Visible(r, item.row_begin, item.row_end, &begin, &end);
            const int64_t lanes = item.heads * (item.row_end - item.row_begin);
            item.cost = (end - begin / kKBlock * kKBlock) * CeilDiv(lanes, kRowStep) * kRowStep;
            items_.push_back(item);
            ++tiles_;
        }
    }
}

void RaggedPlan::Run(const RaggedTensors& t, int threads) const {
    const int64_t size = shape_.dtype == DType::kFp32 ? 4 : 2;
    const int64_t kv_size = shape_.kv_type == KvType::kSame ? size : 1;
    if (requests_.empty()) return;

    std::vector<AttentionParams> params;
    params.reserve(requests_.size());
    for (const Request& r : requests_) {
        AttentionParams p = r.params;
        p.q = Offset(t.q, r.q_start * t.q_strides.seq, size);
        p.out = const_cast<char*>(Offset(t.out, r.q_start * t.out_strides.seq, size));
        p.k = Offset(t.k, r.kv_start * t.k_strides.seq, kv_size);
        p.v = Offset(t.v, r.kv_start * t.v_strides.seq, kv_size);
        p.lse = t.lse ? t.lse + r.q_start : nullptr;
        p.lse_head = t.lse_head;
        p.sinks = t.sinks;
        p.q_strides = t.q_strides;
        p.k_strides = t.k_strides;
        p.v_strides = t.v_strides;
        p.out_strides = t.out_strides;
        params.push_back(p);
    }
    const Kernel& kernel = *kernel_;
    const bool k_direct = kernel.k_direct(params[0]);
    const size_t k_bytes = kernel.k_block_bytes(params[0]);
    const size_t v_bytes = kernel.v_block_bytes(params[0]);
    AttentionParams longest = params[0];
    longest.kv_len = longest_;
    size_t scratch_bytes = decode_->scratch_bytes(longest);
    if (tiles_) scratch_bytes = std::max(scratch_bytes, kernel.scratch_bytes(longest));
    scratch_bytes = Align(scratch_bytes);
    int64_t blocks = 0;
    for (const Pass& pass : passes_) blocks = std::max(blocks, pass.packed_blocks);
    const size_t packed_bytes = static_cast<size_t>(blocks) * (k_bytes + v_bytes);
    const size_t part_bytes = Align(static_cast<size_t>(part_words_) * 4);
    const size_t count_bytes = Align(groups_.size() * sizeof(std::atomic<int64_t>));
    BufferCache::Buffer buffer = BufferCache::Instance().Take(
        packed_bytes + part_bytes + count_bytes + static_cast<size_t>(threads) * scratch_bytes);
    char* packed = buffer.data.get();
    float* parts = reinterpret_cast<float*>(packed + packed_bytes);
    auto* left = reinterpret_cast<std::atomic<int64_t>*>(packed + packed_bytes + part_bytes);
    for (size_t g = 0; g < groups_.size(); ++g)
        new (left + g) std::atomic<int64_t>(groups_[g].parts);
    char* scratch = packed + packed_bytes + part_bytes + count_bytes;

    std::vector<char*> homes(units_.size());
    for (const Pass& pass : passes_) {
        // The packed values of a unit, then its packed keys.
        std::vector<int64_t> before{0};
        char* home = packed;
        for (size_t u = pass.unit_begin; u < pass.unit_end; ++u) {
            homes[u] = home;
            home += static_cast<size_t>(units_[u].blocks) * (k_bytes + v_bytes);
            before.push_back(before.back() + units_[u].blocks);
        }
        if (pass.packed_blocks) {
            std::atomic<int64_t> next{0};
            ParallelRun(threads, [&](int) {
                constexpr int64_t kBatch = 8;  // K blocks packed per claim
                for (;;) {
                    const int64_t begin = next.fetch_add(kBatch, std::memory_order_relaxed);
                    if (begin >= pass.packed_blocks) return;
                    size_t u = static_cast<size_t>(
                        std::upper_bound(before.begin(), before.end(), begin) - before.begin() - 1);
                    const int64_t end = std::min(pass.packed_blocks, begin + kBatch);
                    for (int64_t i = begin; i < end; ++i) {
                        while (i >= before[u + 1]) ++u;
                        const Unit& unit = units_[pass.unit_begin + u];
                        const AttentionParams& p = params[static_cast<size_t>(unit.request)];
                        const int64_t index = i - before[u], block = unit.first_block + index;
                        char* to = homes[pass.unit_begin + u];
                        kernel.pack_v(p, 0, unit.kv_head, block,
                                      to + static_cast<size_t>(index) * v_bytes);
                        const int64_t full = k_direct ? p.kv_len / kKBlock : 0;
                        const int64_t first = std::max(full, unit.first_block);
                        if (block >= first)
                            kernel.pack_k(p, 0, unit.kv_head, block,
                                          to + static_cast<size_t>(unit.blocks) * v_bytes +
                                              static_cast<size_t>(block - first) * k_bytes);
                    }
                }
            });
        }

        int64_t cost = 0;
        for (size_t i = pass.item_begin; i < pass.item_end && cost <= kOneThreadCost; ++i)
            cost += items_[i].cost;
        std::atomic<size_t> next{pass.item_begin};
        const int64_t count = static_cast<int64_t>(pass.item_end - pass.item_begin);
        const int workers =
            cost <= kOneThreadCost ? 1 : static_cast<int>(std::min<int64_t>(threads, count));
        ParallelRun(workers, [&](int thread) {
            char* own = scratch + static_cast<size_t>(thread) * scratch_bytes;
            kernel.enter();
            const auto claim = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
            const auto decoded = [&](const Item& item) {
                const AttentionParams& p = params[static_cast<size_t>(item.request)];
                DecodeTask task{&p,           item.head,      item.heads,   item.row_begin,
                                item.row_end, item.key_begin, item.key_end, nullptr};
                if (item.group >= 0) {
                    const Group& group = groups_[static_cast<size_t>(item.group)];
                    task.part = parts + group.offset + item.part * group.part_words;
                }
                return task;
            };
            // Claimed one ahead: the keys of a decoded part are asked for while its predecessor
            // is computed.
            for (size_t i = claim(), ahead; i < pass.item_end; i = ahead) {
                ahead = claim();
                const Item& item = items_[i];
                if (item.unit >= 0) {
                    const Unit& unit = units_[static_cast<size_t>(item.unit)];
                    QBlockTask task{};
                    task.params = &params[static_cast<size_t>(item.request)];
                    task.head = item.head;
                    task.heads = item.heads;
                    task.row_begin = item.row_begin;
                    task.row_end = item.row_end;
                    task.packed_first = unit.first_block;
                    task.v_packed = homes[static_cast<size_t>(item.unit)];
                    task.k_packed = task.v_packed + static_cast<size_t>(unit.blocks) * v_bytes;
                    kernel.run(task, own);
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
                if (left[g].fetch_sub(1, std::memory_order_acq_rel) == 1)
                    decode_->merge(task, parts + group.offset, group.parts, group.part_words, own);
            }
            kernel.leave();
        });
    }
    BufferCache::Instance().Give(std::move(buffer));
}

namespace {

float ToFloat(uint16_t x, DType dtype) {
    if (dtype == DType::kBf16) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    const int exponent = x >> 10 & 31, mantissa = x & 1023;
    const float value = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
                        : exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                                   : std::ldexp(static_cast<float>(mantissa), -24);
    return x & 0x8000 ? -value : value;
}

// Nearest, ties to even, clamped to the largest finite number; NaN stays NaN.
uint8_t ToFp8(float x, KvType type) {
    const bool e4m3 = type == KvType::kFp8E4m3;
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    const float limit = e4m3 ? 448.0f : 57344.0f;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return static_cast<uint8_t>(sign | 0x7f);
    const float magnitude = std::min(std::fabs(x), limit);
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = [0.5, 1) * 2^exponent
    exponent = std::max(exponent - 1, 1 - bias);
    // In units of the last place of its binade (of the subnormals below the first one).
    int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    if (units >> (mantissa_bits + 1)) {  // rounded up to the next binade
        units >>= 1;
        ++exponent;
    }
    const int normal = units >> mantissa_bits;
    const int field = normal ? exponent + bias : 0;
    return static_cast<uint8_t>(sign | field << mantissa_bits |
                                (units & ((1 << mantissa_bits) - 1)));
}

struct Side {
    const char* from;
    char* to;
    const Strides& row;
    const Strides& cache;
    float scale;
};

void WriteRow(const KvWrite& w, const Side& side, int64_t row, int64_t slot) {
    const int64_t size = w.dtype == DType::kFp32 ? 4 : 2;
    const int64_t page = slot / w.page_size, token = slot - page * w.page_size;
    const char* from = side.from + row * side.row.seq * size;
    const int64_t at = page * side.cache.batch + token * side.cache.seq;
    if (w.kv_type == KvType::kSame) {
        char* to = side.to + at * size;
        if (side.row.head == w.head_dim && side.cache.head == w.head_dim) {
            std::memcpy(to, from, static_cast<size_t>(w.kv_heads * w.head_dim * size));
            return;
        }
        for (int64_t h = 0; h < w.kv_heads; ++h)
            std::memcpy(to + h * side.cache.head * size, from + h * side.row.head * size,
                        static_cast<size_t>(w.head_dim * size));
        return;
    }
    for (int64_t h = 0; h < w.kv_heads; ++h) {
        uint8_t* to = reinterpret_cast<uint8_t*>(side.to) + at + h * side.cache.head;
        const char* head = from + h * side.row.head * size;
        for (int64_t d = 0; d < w.head_dim; ++d) {
            float x;
            if (w.dtype == DType::kFp32) {
                std::memcpy(&x, head + d * 4, sizeof x);
            } else {
                uint16_t half;
                std::memcpy(&half, head + d * 2, sizeof half);
                x = ToFloat(half, w.dtype);
            }
            to[d] = ToFp8(x / side.scale, w.kv_type);
        }
    }
}

}  // namespace

int64_t WriteKv(const KvWrite& w, int threads) {
    const auto slot_of = [&](int64_t row) -> int64_t {
        return w.wide_slots ? static_cast<const int64_t*>(w.slots)[row]
                            : static_cast<const int32_t*>(w.slots)[row];
    };
    for (int64_t row = 0; row < w.rows; ++row)
        if (slot_of(row) >= w.pages * w.page_size) return slot_of(row);
    const Side sides[] = {
        {static_cast<const char*>(w.k), static_cast<char*>(w.k_cache), w.k_strides,
         w.k_cache_strides, static_cast<float>(w.k_scale)},
        {static_cast<const char*>(w.v), static_cast<char*>(w.v_cache), w.v_strides,
         w.v_cache_strides, static_cast<float>(w.v_scale)},
    };
    // Below about 256 KiB a second thread costs more than it copies.
    const int64_t per_thread = std::max<int64_t>(1, (1 << 16) / (w.kv_heads * w.head_dim));
    const int workers =
        static_cast<int>(std::clamp<int64_t>(w.rows / per_thread, 1, std::max(1, threads)));
    ParallelRun(workers, [&](int thread) {
        const int64_t end = w.rows * (thread + 1) / workers;
        for (int64_t row = w.rows * thread / workers; row < end; ++row) {
            const int64_t slot = slot_of(row);
            if (slot < 0) continue;
            for (const Side& side : sides) WriteRow(w, side, row, slot);
        }
    });
    return -1;
}

}  // namespace liteattention::cpu
