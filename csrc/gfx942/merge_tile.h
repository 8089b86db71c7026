// Rows of a tile that was computed in parts along the keys: exact log-sum-exp merge of G partial
// outputs.
//
//   M = max m_g    w_g = 2^(c (m_g - M))    out = sum w_g o_g / sum w_g l_g
//   lse = ln 2 (c M + log2 sum w_g l_g)
//
// m are raw scores, c their factor: c m may be beyond fp32, or its last place large. Parts lie as
// StorePart (store.h) leaves them, part g in slot `slot(g)`.
#pragma once

#include "number.h"
#include "params.h"

namespace liteattention::gfx942 {

// What the parts of a row are weighted by.
struct PartScale {
    float top, shift, c;

    template <class SlotOf>
    LITE_DEVICE PartScale(const float* row_stats, int32_t parts, SlotOf slot, float factor)
        : top(FromBits(kMinusInfinity)), c(factor) {
        for (int32_t g = 0; g < parts; ++g)
            top = __builtin_fmaxf(top, row_stats[int64_t{slot(g)} * 2 * kQBlock]);
        // No part saw a finite score: -inf - 0 rather than -inf + inf.
        shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));
    }
    LITE_DEVICE float Weight(float max) const { return Exp2((max - shift) * c); }

    static constexpr uint32_t kMinusInfinity = 0xff800000u;
};

// Merges 8 outputs of row `row` from head dim `dim` on into `out`, and the log-sum-exp, in natural
// log, into `lse`, unless that is null.
template <class Number, class SlotOf>
LITE_DEVICE void MergeTileRow(const float* part_out, const float* part_stats, int32_t parts,
                              SlotOf slot, uint32_t row, int32_t head_dim, uint32_t dim, float c,
                              uint16_t* out, float* lse) {
    const float* const stats = part_stats + row;
    const PartScale scale(stats, parts, slot, c);
    float sum = 0.0f;
    Float4 low = {}, high = {};
    for (int32_t g = 0; g < parts; ++g) {
        const int64_t at = slot(g);
        const float weight = scale.Weight(stats[at * 2 * kQBlock]);
        sum += weight * stats[at * 2 * kQBlock + kQBlock];
        const auto* from =
            reinterpret_cast<const Float4*>(part_out + (at * kQBlock + row) * head_dim + dim);
        low += from[0] * weight;
        high += from[1] * weight;
    }
    const float norm = IsZero(sum) ? 0.0f : Rcp(sum);
    low *= norm;
    high *= norm;
    *reinterpret_cast<UnalignedWord4*>(out) =
        Word4{Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
              Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
    if (lse) {
        const float value = (scale.top * c + Log2(sum)) * 0.6931471805599453f;
        *lse = FromBits(IsZero(sum) ? PartScale::kMinusInfinity : Bits(value));
    }
}

// Merges those rows of `tile` that workgroup `group` of the tile's owns, a thread 8 neighbouring
// outputs of one.
template <class Number, class Params, class SlotOf>
LITE_DEVICE void MergeTile(const Params& p, uint32_t tile, uint32_t group, int32_t parts,
                           SlotOf slot) {
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const uint32_t row = group * (kMergeThreads / row_threads) + ThreadId() / row_threads;
    const uint32_t dim = ThreadId() % row_threads * kMergeVector;

    const uint32_t q_blocks = static_cast<uint32_t>(QBlocks(p.q_len));
    const uint32_t q_index = tile / q_blocks;
    const int32_t q_row = static_cast<int32_t>(tile % q_blocks * kQBlock + row);
    if (q_row >= p.q_len) return;

    const int64_t batch = q_index / static_cast<uint32_t>(p.q_heads);
    const int64_t head = q_index % static_cast<uint32_t>(p.q_heads);
    uint16_t* const out = p.out + batch * p.out_strides.batch + q_row * p.out_strides.seq +
                          head * p.out_strides.head + dim;
    float* const lse =
        p.lse && dim == 0 ? p.lse + static_cast<int64_t>(q_index) * p.q_len + q_row : nullptr;
    MergeTileRow<Number>(p.part_out, p.part_stats, parts, slot, row, p.head_dim, dim,
                         Factor(p.scale_log2), out, lse);
}

}  // namespace liteattention::gfx942
