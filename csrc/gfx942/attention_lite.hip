// One LiteAttention step: attention over the kept K blocks of a skip bitmap, and the bitmap of the
// next step. D = 64 and 128, any Sq and Skv.
//
// Road map: as attention_dense.hip, but the sequence of K blocks is what the bitmap keeps
// (skip_vote.h): a block that is not kept costs a zero bit. The waves' votes meet in the next
// step's bitmap, which the workgroup clears first. One workgroup per tile; nothing is split, since
// the heaviest q blocks start first (plan_lpt). Budget: VGPR 194, LDS 65536 (32768 at D = 64).

#include "skip_vote.h"

namespace liteattention::gfx942 {

// q blocks are taken in `order` within their head; heads keep the mapping.
LITE_DEVICE Tile LiteTile(const LiteParams& p) {
    const uint32_t q_blocks = static_cast<uint32_t>(QBlocks(p.q_len));
    const uint32_t tile = TileOf(static_cast<Mapping>(p.mapping), WorkgroupId(),
                                 static_cast<uint32_t>(p.batch * p.q_heads), q_blocks);
    const uint32_t row = tile / q_blocks, heads = static_cast<uint32_t>(p.q_heads);
    // Divisions run on the vector ALU: back to scalars.
    Tile t;
    t.q_block = UniformInt(p.order ? static_cast<uint32_t>(p.order[tile]) : tile % q_blocks);
    t.q_head = UniformInt(row % heads);
    t.batch = UniformInt(row / heads);
    return t;
}

// Where the tile's row of a bitmap begins, in words.
LITE_DEVICE int64_t Bitmap(const LiteParams& p, const Tile& t) {
    const int64_t row = static_cast<int64_t>(t.batch) * p.q_heads + t.q_head;
    return (row * QBlocks(p.q_len) + t.q_block) * SkipWords(p.kv_len);
}

template <class Number, int kDim>
LITE_DEVICE void AttentionLite(const LiteParams& p) {
    __shared__ __attribute__((aligned(16))) char lds[kAttentionLds<kDim>];

    const WaveId me;
    const Tile tile = LiteTile(p);
    const int64_t bitmap = Bitmap(p, tile);
    SkipRows(p, bitmap).ClearVotes();
    WaitLoads();
    Barrier();

    KeptBlocks blocks(p, bitmap);
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
