// Which XCD computes a q block of a LiteAttention step, and when: longest processing time first.
//
// Hardware deals workgroups to XCDs round robin, whatever they have to do. So each XCD gets a run
// of tiles with an eighth of the work, which is K blocks kept, and takes the longest of them first,
// so that no long one starts last. A run's last tiles, as many as fill its compute units a few
// times, are ordered together, whatever their heads. Those before them go head after head, as a
// head's keys then stay in the XCD's L2; all are ordered together if the run has more tiles than
// the XCD has positions. Ties by ascending tile: nothing depends on timing.
//
// Up to 4,096 tiles on a whole MI300X are pack_lists.hip's.
//
// Road map: each workgroup adds up what count_tiles has counted and finds where runs begin. Then a
// thread ranks one tile, as the number of tiles that come before it: n^2 comparisons within a head
// and within a run's end, with counts that all lanes share in scalar registers, but no atomics.
// Budget: VGPR 54, LDS 64.

#include "lpt.h"

namespace liteattention::gfx942 {

LITE_DEVICE void PlanLpt(const PlanParams& p) {
    __shared__ int32_t begins[kXcds + 1];
    FindRuns<kPlanThreads>(p, begins);

    const int32_t asked =
        static_cast<int32_t>(WorkgroupId()) * kPlanThreads + static_cast<int32_t>(ThreadId());
    const int32_t own = asked < p.tiles ? asked : p.tiles - 1;
    int32_t xcd = 0;
    for (int32_t x = 1; x < kXcds; ++x) xcd += begins[x] <= own ? 1 : 0;
    const int32_t rank = Run(p, begins, xcd).Rank(p, own);
    if (asked < p.tiles) p.order[PositionOf(begins, p.slots, xcd, rank)] = own;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_PLAN_LPT(name) \
    LITE_KERNEL(kPlanThreads, 4) name(const PlanParams p) { PlanLpt(p); }
#include "variants.def"
