// Merges the parts of split tiles of dense attention (merge_tile.h).
//
// Road map: a thread owns 8 neighbouring outputs of one row. It reads the row's G maxima, then per
// part the sum and 32 bytes of output. Reads of neighbouring threads are contiguous; nothing is
// shared. Budget: VGPR 32, LDS 0.

#include "merge_tile.h"

namespace liteattention::gfx942 {

template <class Number>
LITE_DEVICE void MergeParts(const MergeParams& p) {
    const uint32_t groups = static_cast<uint32_t>(MergeGroups(p.head_dim));
    const uint32_t tail_tile = WorkgroupId() / groups;
    const uint32_t tile =
        TileOf(static_cast<Mapping>(p.mapping), static_cast<uint32_t>(p.whole_tiles) + tail_tile,
               static_cast<uint32_t>(p.batch * p.q_heads), static_cast<uint32_t>(QBlocks(p.q_len)));
    const int64_t first = static_cast<int64_t>(tail_tile) * p.splits;
    MergeTile<Number>(p, tile, WorkgroupId() % groups, p.splits,
                      [&](int32_t g) { return first + g; });
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_PARTS(name, Number) \
    LITE_KERNEL(kMergeThreads, 4) name(const MergeParams p) { MergeParts<Number>(p); }
#include "variants.def"
