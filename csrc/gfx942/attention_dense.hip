// Dense attention: out = softmax(scale Q K^T) V, bf16 and fp16, D = 64 and 128, any Sq, Skv >= 1.
//
// Road map: a workgroup computes one tile over all K blocks, or over one part of them (params.h);
// attention.h is how. Budget: VGPR 168, LDS 65536 (32768 at D = 64).
//
// At D = 64 two workgroups share a compute unit, four waves a SIMD: there softmax is longer than
// the products, and what one workgroup waits for the other fills. That leaves each 128 registers,
// of which the kernel uses 115, and half of the LDS. Modelled, clk per 32x32x8: 45.2 -> 41.3.

#include "attention.h"

namespace liteattention::gfx942 {

// K blocks now .. end - 1, one after the other. The last one of the sequence is the only one that
// can be ragged.
struct AllBlocks {
    static constexpr bool kRaggedLast = true, kFewScalars = false;
    int32_t now, end;

    LITE_DEVICE bool Has(int32_t i) const { return now < end - i; }
    LITE_DEVICE int32_t At(int32_t i) const { return now + i; }
    static constexpr int kSteps = 1;
    template <int kStep>
    LITE_DEVICE void Advance() {
        ++now;
    }
    LITE_DEVICE uint64_t Look(const float (&)[kQTiles], const WaveStatistics&, float) { return 0; }
    LITE_DEVICE void Decide(const WaveStatistics&, const WaveScores&) {}
    static constexpr bool kLeavesOut = false, kShared = true;  // at D = 64
    LITE_DEVICE bool LeftOut() const { return false; }
};

struct Assignment {
    Tile tile;
    AllBlocks blocks;
    int32_t slot;  // tail tile * splits + part, or -1 for a whole tile
};

LITE_DEVICE Assignment Assign(const DenseParams& p, uint32_t id) {
    const uint32_t q_blocks = static_cast<uint32_t>(QBlocks(p.q_len));
    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const uint32_t rows = static_cast<uint32_t>(p.batch * p.q_heads);
    const uint32_t whole = static_cast<uint32_t>(p.whole_tiles);
    uint32_t position = id;
    int32_t begin = 0, end = k_blocks, slot = -1;
    if (id >= whole) {
        const uint32_t splits = static_cast<uint32_t>(p.splits);
        const TailPart tail = TailPartOf(id - whole, rows * q_blocks - whole, splits);
        const int32_t part = static_cast<int32_t>(tail.part);
        position = whole + tail.tile;
        begin = PartBegin(part, p.splits, k_blocks);
        end = PartBegin(part + 1, p.splits, k_blocks);
        slot = static_cast<int32_t>(tail.tile * splits + tail.part);
    }
    const uint32_t tile = TileOf(static_cast<Mapping>(p.mapping), position, rows, q_blocks);
    const uint32_t row = tile / q_blocks, heads = static_cast<uint32_t>(p.q_heads);
    // Divisions run on the vector ALU: back to scalars.
    Assignment a;
    a.tile.q_block = UniformInt(tile % q_blocks);
    a.tile.q_head = UniformInt(row % heads);
    a.tile.batch = UniformInt(row / heads);
    a.blocks.now = UniformInt(static_cast<uint32_t>(begin));
    a.blocks.end = UniformInt(static_cast<uint32_t>(end));
    a.slot = UniformInt(static_cast<uint32_t>(slot));
    return a;
}

template <class Number, int kDim>
LITE_DEVICE void AttentionDense(const DenseParams& p) {
    __shared__ __attribute__((aligned(16))) char lds[kAttentionLds<kDim>];
    const WaveId me;
    Assignment a = Assign(p, WorkgroupId());
    WaveStatistics stats;
    WaveOutputs<kDim> out{};
    Attend<Number, kDim>(p, a.tile, me, lds, a.blocks, stats, out);
    const WaveId later = me.Again();
    if (a.slot < 0) {
        StoreTile<Number, kDim>(p, a.tile, later, stats, out);
    } else {
        StorePartOf<kDim>(p, a.slot, later, stats, out);
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_DENSE(name, Number, kDim)                               \
    LITE_KERNEL(kDenseThreads, kDim == 64 ? 4 : 2) name(const DenseParams p) { \
        AttentionDense<Number, kDim>(p);                                       \
    }
#include "variants.def"
