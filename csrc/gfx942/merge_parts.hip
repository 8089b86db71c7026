// Merges the parts of split tiles: exact log-sum-exp merge of G partial outputs.
//
//   M = max m_g    w_g = 2^(c (m_g - M))    out = sum w_g o_g / sum w_g l_g
//   lse = ln 2 (c M + log2 sum w_g l_g)
//
// m are raw scores, c their factor: c m may be beyond fp32, or its last place large.
//
// Road map: a thread owns 8 neighbouring outputs of one row. It reads the row's G maxima, then per
// part the sum and 32 bytes of output. Reads of neighbouring threads are contiguous; nothing is
// shared. Budget: VGPR 32, LDS 0.

#include "number.h"
#include "params.h"

namespace liteattention::gfx942 {

template <class Number>
LITE_DEVICE void MergeParts(const MergeParams& p) {
    constexpr uint32_t kMinusInfinity = 0xff800000u;
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

    const int64_t slot = static_cast<int64_t>(tail_tile) * p.splits;
    const float* stats = p.part_stats + slot * 2 * kQBlock + row;
    const float* part = p.part_out + (slot * kQBlock + row) * p.head_dim + dim;
    const int64_t part_stride = static_cast<int64_t>(kQBlock) * p.head_dim;
    const float c = Factor(p.scale_log2);

    float top = FromBits(kMinusInfinity);
    for (int32_t g = 0; g < p.splits; ++g) top = __builtin_fmaxf(top, stats[g * 2 * kQBlock]);
    // No part saw a finite score: -inf - 0 rather than -inf + inf.
    const float shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));

    float sum = 0.0f;
    Float4 low = {}, high = {};
    for (int32_t g = 0; g < p.splits; ++g) {
        const float weight = Exp2((stats[g * 2 * kQBlock] - shift) * c);
        sum += weight * stats[g * 2 * kQBlock + kQBlock];
        const Float4* from = reinterpret_cast<const Float4*>(part + g * part_stride);
        low += from[0] * weight;
        high += from[1] * weight;
    }
    const float scale = IsZero(sum) ? 0.0f : Rcp(sum);
    low *= scale;
    high *= scale;
    const int64_t batch = q_index / static_cast<uint32_t>(p.q_heads);
    const int64_t head = q_index % static_cast<uint32_t>(p.q_heads);
    uint16_t* out = p.out + batch * p.out_strides.batch + q_row * p.out_strides.seq +
                    head * p.out_strides.head + dim;
    *reinterpret_cast<UnalignedWord4*>(out) =
        Word4{Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
              Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
    if (p.lse && dim == 0) {
        const float value = (top * c + Log2(sum)) * 0.6931471805599453f;
        p.lse[static_cast<int64_t>(q_index) * p.q_len + q_row] =
            FromBits(IsZero(sum) ? kMinusInfinity : Bits(value));
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_PARTS(name, Number) \
    LITE_KERNEL(kMergeThreads, 4) name(const MergeParams p) { MergeParts<Number>(p); }
#include "variants.def"
