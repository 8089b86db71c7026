// Merges the parts of split tiles of dense attention (merge_tile.h).
//
// Road map: a thread owns 8 neighbouring outputs of one row. It reads the row's G maxima, then per
// part the sum and 32 bytes of output. Reads of neighbouring threads are contiguous; nothing is
// shared. Budget: VGPR 32, LDS 0.

#include "merge_tile.h"

namespace liteattention::gfx942 {

template <class Number>
LITE_DEVICE void MergeParts(const MergeParams& p) {
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const uint32_t rows = kMergeThreads / row_threads, groups = kQBlock / rows;
    const uint32_t tail_tile = WorkgroupId() / groups;
    const uint32_t row = WorkgroupId() % groups * rows + ThreadId() / row_threads;
    const uint32_t dim = ThreadId() % row_threads * kMergeVector;

    const uint32_t q_blocks = static_cast<uint32_t>(QBlocks(p.q_len));
    const uint32_t tile =
        TileOf(static_cast<Mapping>(p.mapping), static_cast<uint32_t>(p.whole_tiles) + tail_tile,
               static_cast<uint32_t>(p.batch * p.q_heads), q_blocks);
    const uint32_t q_index = tile / q_blocks;
    const int32_t q_row = static_cast<int32_t>(tile % q_blocks * kQBlock + row);
    if (q_row >= p.q_len) return;

    const int64_t first = static_cast<int64_t>(tail_tile) * p.splits;
    const int64_t batch = q_index / static_cast<uint32_t>(p.q_heads);
    const int64_t head = q_index % static_cast<uint32_t>(p.q_heads);
    uint16_t* const out = p.out + batch * p.out_strides.batch + q_row * p.out_strides.seq +
                          head * p.out_strides.head + dim;
    float* const lse =
        p.lse && dim == 0 ? p.lse + static_cast<int64_t>(q_index) * p.q_len + q_row : nullptr;
    MergeTileRow<Number>(
        p.part_out, p.part_stats, p.splits, [&](int32_t g) { return first + g; }, row, p.head_dim,
        dim, Factor(p.scale_log2), out, lse);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_PARTS(name, Number) \
    LITE_KERNEL(kMergeThreads, 4) name(const MergeParams p) { MergeParts<Number>(p); }
#include "variants.def"
