// How many K blocks each tile of a LiteAttention step keeps, and an order without tiles, for
// plan_lpt.hip and pack_lists.hip.
//
// Road map: a thread a tile; the words of its row of the bitmap, one after the other.
// Budget: VGPR 6, LDS 0.

#include "isa.h"
#include "params.h"

namespace liteattention::gfx942 {

// K blocks of a tile, (skip | must_do) & ~must_skip.
LITE_DEVICE int32_t KeptBlocks(const CountParams& p, int64_t tile) {
    const uint32_t* words = p.skip + tile * p.words;
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

LITE_DEVICE void CountTiles(const CountParams& p) {
    const int32_t own =
        static_cast<int32_t>(WorkgroupId()) * kPlanThreads + static_cast<int32_t>(ThreadId());
    if (own < p.tiles) p.counts[own] = KeptBlocks(p, own);
    if (own < p.positions) p.order[own] = -1;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_COUNT_TILES(name) \
    LITE_KERNEL(kPlanThreads, 4) name(const CountParams p) { CountTiles(p); }
#include "variants.def"
