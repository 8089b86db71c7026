// One LiteAttention step with a budget: attention over the kept K blocks of a skip bitmap, and the
// weight of each of their tiles. D = 64 and 128, any Sq and Skv.
//
// Road map: as attention_lite.hip, but instead of voting on the tiles it weighs them (weigh.h), and
// select_tiles.hip then chooses. All kept tiles are computed: outputs are those of threshold -inf,
// bit for bit. Budget: VGPR 184, LDS 65536 (32768 at D = 64).

#include "weigh.h"

namespace liteattention::gfx942 {

template <class Number, int kDim>
LITE_DEVICE void AttentionWeigh(const WeighParams& p) {
    __shared__ __attribute__((aligned(16))) char lds[kAttentionLds<kDim>];

    if (!HasTile(p)) return;
    const WaveId me;
    const Tile tile = LiteTile(p);
    const int64_t index = TileIndex(p, tile);
    const ListPart part = PartHere(p);
    uint32_t* const row = WeightsOf(p, index, part, me);
    ClearWeights(p, part, me, row);
    WaitLoads();
    Barrier();

    WeighedBlocks blocks(p, tile, index, part, row, me);
    if (!blocks.Has(0)) {
        const WaveRows rows = RowsOf(p, tile, me);
        StoreNothing<kDim>(rows.out, p.out_strides.seq * 2, rows.lse, rows.count, me.lane);
        return;
    }
    WaveStatistics stats;
    WaveOutputs<kDim> out{};
    Attend<Number, kDim>(ArgumentAgain<WeighParams>(), tile, me, lds, blocks, stats, out);
    blocks.Flush();
    const WeighParams& again = ArgumentAgain<WeighParams>();
    const WaveId later = me.Again();
    const int64_t slot = PartHere(again).slot;
    if (slot < 0) {
        StoreTile<Number, kDim>(again, LiteTile(again), later, stats, out);
    } else {
        StorePartOf<kDim>(again, slot, later, stats, out);
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_WEIGH(name, Number, kDim) \
    LITE_KERNEL(kDenseThreads, 2) name(const WeighParams p) { AttentionWeigh<Number, kDim>(p); }
#include "variants.def"
