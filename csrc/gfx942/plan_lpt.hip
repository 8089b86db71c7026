// Longest-processing-time order: the q blocks of each (batch, q head), most kept K blocks first,
// ties by ascending q block, so that no long block starts last. Equals a stable descending sort.
//
// Road map: a workgroup ranks 256 q blocks of one row, a thread each. The row's K block counts are
// made 1024 at a time in LDS; a thread's rank is the number of q blocks that come before its own.
// n^2 comparisons, but no atomics and no order that depends on timing: 128k rows are 342 q blocks,
// 1.5 passes of LDS reads that all lanes share. Budget: VGPR 32, LDS 4096.

#include "isa.h"
#include "params.h"

namespace liteattention::gfx942 {

inline constexpr int kPlanChunk = 1024;

LITE_DEVICE int32_t KeptBlocks(const PlanParams& p, int64_t q_index) {
    const uint32_t* words = p.skip + q_index * p.words;
    const uint32_t tail = ~0u >> (-static_cast<uint32_t>(p.k_blocks) % 32u);
    int32_t kept = 0;
    for (int32_t w = 0; w < p.words; ++w) {
        uint32_t bits = words[w];
        if (p.must_do) bits |= p.must_do[w];
        if (p.must_skip) bits &= ~p.must_skip[w];
        if (w == p.words - 1) bits &= tail;
        kept += __builtin_popcount(bits);
    }
    return kept;
}

LITE_DEVICE void PlanLpt(const PlanParams& p) {
    __shared__ int32_t counts[kPlanChunk];
    const int32_t groups = static_cast<int32_t>(CeilDiv(p.q_blocks, kPlanThreads));
    const int64_t row = WorkgroupId() / static_cast<uint32_t>(groups);
    const int32_t thread = static_cast<int32_t>(ThreadId());
    const int32_t own =
        static_cast<int32_t>(WorkgroupId() % static_cast<uint32_t>(groups)) * kPlanThreads + thread;
    const int64_t first = row * p.q_blocks;
    const bool exists = own < p.q_blocks;
    const int32_t mine = exists ? KeptBlocks(p, first + own) : 0;

    int32_t rank = 0;
    for (int32_t begin = 0; begin < p.q_blocks; begin += kPlanChunk) {
        const int32_t left = p.q_blocks - begin, size = left < kPlanChunk ? left : kPlanChunk;
        for (int32_t i = thread; i < size; i += kPlanThreads)
            counts[i] = KeptBlocks(p, first + begin + i);
        Barrier();
        for (int32_t i = 0; i < size; ++i) {
            const int32_t theirs = counts[i];
            rank += theirs > mine || (theirs == mine && begin + i < own) ? 1 : 0;
        }
        Barrier();
    }
    if (exists) p.order[first + rank] = own;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_PLAN_LPT(name) \
    LITE_KERNEL(kPlanThreads, 4) name(const PlanParams p) { PlanLpt(p); }
#include "variants.def"
