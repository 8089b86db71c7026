// One LiteAttention step: attention over the kept K blocks of a skip bitmap, and the bitmap of the
// next step. D = 64 and 128, any Sq and Skv.
//
// Road map: as attention_dense.hip, but the sequence of K blocks is what the bitmap keeps
// (kept_blocks.h): a block that is not kept costs a zero bit. The waves' votes (skip_vote.h) meet
// in the next step's bitmap, which the workgroup clears first. A workgroup has one tile or, by
// the step's order, none; nothing is split. Budget: VGPR 196, LDS 65536 (32768 at
// D = 64).

#include "skip_vote.h"

namespace liteattention::gfx942 {

template <class Number, int kDim>
LITE_DEVICE void AttentionLite(const LiteParams& p) {
    __shared__ __attribute__((aligned(16))) char lds[kAttentionLds<kDim>];

    if (!HasTile(p)) return;
    const WaveId me;
    const Tile tile = LiteTile(p);
    const int64_t bitmap = TileIndex(p, tile) * SkipWords(p.kv_len);
    ClearVotes(p, bitmap);
    WaitLoads();
    Barrier();

    VotedBlocks blocks(p, bitmap);
    if (!blocks.Has(0)) {
        const WaveRows rows = RowsOf(p, tile, me);
        StoreNothing<kDim>(rows.out, p.out_strides.seq * 2, rows.lse, rows.count, me.lane);
        return;
    }
    WaveStatistics stats;
    WaveOutputs<kDim> out{};
    Attend<Number, kDim>(ArgumentAgain<LiteParams>(), tile, me, lds, blocks, stats, out);
    blocks.Flush();
    const LiteParams& again = ArgumentAgain<LiteParams>();
    StoreTile<Number, kDim>(again, LiteTile(again), me.Again(), stats, out);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_LITE(name, Number, kDim) \
    LITE_KERNEL(kDenseThreads, 2) name(const LiteParams p) { AttentionLite<Number, kDim>(p); }
#include "variants.def"
