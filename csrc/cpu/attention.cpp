// Host side of the CPU engine: cuts a request into q blocks, orders them longest first, packs
// keys and values, and hands q blocks to threads.

#include "attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "buffer_cache.h"
#include "kernel.h"
#include "thread_pool.h"

namespace liteattention::cpu {
namespace {

// Packed keys and values held at once. Heads beyond it are done in a further pass, so that a
// long video does not need a second copy of all its keys and values.
constexpr size_t kPackedBudget = size_t{192} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The part of a request that is worked on at once: a run of (batch, kv head) pairs.
struct Pass {
    int64_t kv_begin;
    int64_t kv_end;
};

struct QBlock {
    int64_t head_index;  // batch * q_heads + head
    int64_t block;
    int64_t work;  // K blocks to walk
};

// Longest first, stable. A counting sort: work is at most k_blocks.
void OrderLongestFirst(std::vector<QBlock>& blocks, int64_t max_work) {
    std::vector<size_t> start(static_cast<size_t>(max_work) + 2, 0);
    for (const QBlock& b : blocks) ++start[static_cast<size_t>(max_work - b.work) + 1];
    for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
    std::vector<QBlock> ordered(blocks.size());
    for (const QBlock& b : blocks) ordered[start[static_cast<size_t>(max_work - b.work)]++] = b;
    blocks.swap(ordered);
}

int64_t KeptBlocks(const LiteParams& lite, const uint32_t* row, int64_t k_blocks) {
    int64_t count = 0;
    for (int64_t w = 0; w * 32 < k_blocks; ++w)
        count += __builtin_popcount(KeptWord(lite, row, w, k_blocks));
    return count;
}

// K blocks that the causal mask leaves to the rows up to `row_end`.
int64_t VisibleBlocks(const AttentionParams& p, int64_t row_end) {
    const int64_t keys = p.causal ? std::min(p.kv_len, row_end + p.kv_len - p.q_len) : p.kv_len;
    return keys <= 0 ? 0 : CeilDiv(keys, kKBlock);
}

}  // namespace

void Attention(const AttentionParams& p, const LiteParams* lite, Isa isa) {
    const Kernel& kernel = SelectKernel(isa, p.dtype);
    const int64_t k_blocks = CeilDiv(p.kv_len, kKBlock);
    const int64_t words = CeilDiv(k_blocks, 32);
    const int64_t q_block = lite ? lite->q_block : kQItem;
    const int64_t q_blocks = CeilDiv(p.q_len, q_block);
    const int64_t group = p.q_heads / p.kv_heads;
    const int threads = std::max(1, p.threads);

    // With K read in place only its last block may need packing.
    const bool k_direct = kernel.k_direct(p);
    const int64_t k_packed_first = k_direct ? p.kv_len / kKBlock : 0;
    const size_t k_block_bytes = kernel.k_block_bytes(p), v_block_bytes = kernel.v_block_bytes(p);
    const size_t k_bytes = static_cast<size_t>(k_blocks - k_packed_first) * k_block_bytes;
    const size_t v_bytes = static_cast<size_t>(k_blocks) * v_block_bytes;
    const size_t head_bytes = k_bytes + v_bytes;
    const size_t scratch_bytes = (kernel.scratch_bytes(p) + kAlign - 1) / kAlign * kAlign;

    const int64_t kv_total = p.batch * p.kv_heads;
    const int64_t kv_per_pass = std::clamp<int64_t>(
        static_cast<int64_t>(kPackedBudget / std::max<size_t>(head_bytes, 1)), 1, kv_total);
    BufferCache::Buffer buffer =
        BufferCache::Instance().Take(static_cast<size_t>(kv_per_pass) * head_bytes +
                                     static_cast<size_t>(threads) * scratch_bytes);
    char* packed = buffer.data.get();
    char* scratch = packed + static_cast<size_t>(kv_per_pass) * head_bytes;

    for (Pass pass{0, 0}; pass.kv_begin < kv_total; pass.kv_begin = pass.kv_end) {
        pass.kv_end = std::min(kv_total, pass.kv_begin + kv_per_pass);

        std::vector<QBlock> blocks;
        blocks.reserve(static_cast<size_t>((pass.kv_end - pass.kv_begin) * group * q_blocks));
        for (int64_t kv = pass.kv_begin; kv < pass.kv_end; ++kv) {
            const int64_t batch = kv / p.kv_heads, kv_head = kv % p.kv_heads;
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                for (int64_t b = 0; b < q_blocks; ++b) {
                    const int64_t index = batch * p.q_heads + head;
                    const int64_t row_end = std::min(p.q_len, (b + 1) * q_block);
                    const int64_t work =
                        lite ? KeptBlocks(*lite, lite->read + (index * q_blocks + b) * words,
                                          k_blocks)
                             : VisibleBlocks(p, row_end);
                    blocks.push_back({index, b, work});
                }
            }
        }
        OrderLongestFirst(blocks, k_blocks);

        std::atomic<int64_t> next_pack{0};
        const int64_t pack_total = (pass.kv_end - pass.kv_begin) * k_blocks;
        ParallelRun(threads, [&](int) {
            constexpr int64_t kBatch = 8;  // K blocks packed per claim
            for (;;) {
                const int64_t begin = next_pack.fetch_add(kBatch, std::memory_order_relaxed);
                if (begin >= pack_total) return;
                for (int64_t i = begin; i < std::min(pack_total, begin + kBatch); ++i) {
                    const int64_t kv = pass.kv_begin + i / k_blocks, block = i % k_blocks;
                    const int64_t batch = kv / p.kv_heads, kv_head = kv % p.kv_heads;
                    char* home = packed + static_cast<size_t>(kv - pass.kv_begin) * head_bytes;
                    kernel.pack_v(p, batch, kv_head, block,
                                  home + static_cast<size_t>(block) * v_block_bytes);
                    if (block >= k_packed_first)
                        kernel.pack_k(
                            p, batch, kv_head, block,
                            home + v_bytes +
                                static_cast<size_t>(block - k_packed_first) * k_block_bytes);
                }
            }
        });

        std::atomic<size_t> next{0};
        ParallelRun(threads, [&](int thread) {
            char* own = scratch + static_cast<size_t>(thread) * scratch_bytes;
            kernel.enter();
            for (;;) {
                const size_t i = next.fetch_add(1, std::memory_order_relaxed);
                if (i >= blocks.size()) break;
                const QBlock& block = blocks[i];
                const int64_t batch = block.head_index / p.q_heads;
                const int64_t head = block.head_index % p.q_heads;
                const int64_t kv = batch * p.kv_heads + head / group;
                const char* home = packed + static_cast<size_t>(kv - pass.kv_begin) * head_bytes;
                const int64_t row = (block.head_index * q_blocks + block.block) * words;
                QBlockTask task{};
                task.params = &p;
                task.lite = lite;
                task.batch = batch;
                task.head = head;
                task.row_begin = block.block * q_block;
                task.row_end = std::min(p.q_len, task.row_begin + q_block);
                task.v_packed = home;
                task.k_packed = home + v_bytes;
                task.read = lite ? lite->read + row : nullptr;
                task.write = lite ? lite->write + row : nullptr;
                kernel.run(task, own);
            }
            kernel.leave();
        });
    }
    BufferCache::Instance().Give(std::move(buffer));
}

}  // namespace liteattention::cpu
