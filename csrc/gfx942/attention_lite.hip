// One LiteAttention step: attention over the kept K blocks of a skip bitmap, and the bitmap of the
// next step. D = 64 and 128, any Sq and Skv up to 64 * 32 * kMaxLiteWords keys.
//
// Road map: as attention_dense.hip, but the sequence of K blocks is what the bitmap keeps
// (skip_vote.h): a block that is not kept costs a zero bit. The waves' votes meet in LDS and leave
// as whole words after the last barrier. One workgroup per tile; nothing is split, since the
// heaviest q blocks start first (plan_lpt). Budget: VGPR 256, LDS 57344 (40960 at D = 64).

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
    __shared__ __attribute__((aligned(16))) char k_lds[2 * kKBytes<kDim>];
    __shared__ SkipWordsLds skip;
    static_assert(sizeof(k_lds) + sizeof(skip) <= kLdsBytes);

    const WaveId me;
    const Tile tile = LiteTile(p);
    LoadSkipWords(p, Bitmap(p, tile), skip);
    Barrier();

    KeptBlocks blocks(p, skip);
    if (!blocks.Has(0)) {
        const WaveRows rows = RowsOf(p, tile, me);
        StoreNothing<kDim>(rows.out, p.out_strides.seq * 2, rows.lse, rows.count, me.lane);
        StoreVotes(p, Bitmap(p, tile), me.Thread(), skip);
        return;
    }
    Statistics stats;
    Outputs<kDim> out{};
    Attend<Number, kDim>(p, tile, me, k_lds, blocks, stats, out);
    blocks.Flush();
    Barrier();
    const LiteParams& again = ArgumentAgain<LiteParams>();
    const WaveId later = me.Again();
    StoreTile<Number, kDim>(again, tile, later, stats, out);
    StoreVotes(again, Bitmap(again, tile), later.Thread(), skip);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_LITE(name, Number, kDim) \
    LITE_KERNEL(kDenseThreads, 2) name(const LiteParams p) { AttentionLite<Number, kDim>(p); }
#include "variants.def"
