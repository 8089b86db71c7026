// Last phase of attention_decode, merge_decode and merge_prefill: a row's state becomes its result.
#pragma once

#include "number.h"
#include "params.h"

namespace liteattention::gfx942 {

// What outputs are multiplied by, and the log-sum-exp in natural log.
struct RowResult {
    float scale, lse;
};

// Of a row whose scores have the maximum `max` (log2 units) and whose outputs are weighted by
// probabilities that add up to `sum`. A sink is one more score, without a value: it is added here,
// once per row. A row without any finite score gets 0 and -inf.
LITE_DEVICE RowResult Result(float max, float sum, const float* sinks, int32_t head) {
    constexpr uint32_t kMinusInfinity = 0xff800000u;
    constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
    float before = 1.0f;
    if (sinks) {
        const float sink = sinks[head] * kLog2e, top = __builtin_fmaxf(max, sink);
        const float shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));
        before = Exp2(max - shift);
        sum = sum * before + Exp2(sink - shift);
        max = top;
    }
    const float lse = (max + Log2(sum)) * kLn2;
    return {IsZero(sum) ? 0.0f : before * Rcp(sum),
            FromBits(IsZero(sum) ? kMinusInfinity : Bits(lse))};
}

// Merges 8 neighbouring outputs of one row from `parts` parts and writes them and, for `dim` 0, the
// log-sum-exp. Exact log-sum-exp merge:
//
//   M = max m_g    w_g = 2^(c (m_g - M))    out = sum w_g o_g / sum w_g l_g
//   lse = ln 2 (c M + log2 sum w_g l_g)
//
// `stats` has the row's m of the first part and `rows` further its l; `out` its outputs from `dim`
// on. Parts are `2 * rows` and `rows * D` apart. `c` is what makes m log2 units: multiplied behind
// the subtraction, as c m may be beyond fp32 or its last place large. `at` and `head` are the row's
// in the result.
template <class Number>
LITE_DEVICE void MergeRow(const RaggedParams& p, float c, int32_t parts, const float* stats,
                          const float* out, int32_t rows, int64_t at, int32_t head, int32_t dim) {
    constexpr uint32_t kMinusInfinity = 0xff800000u;
    const int64_t stride = static_cast<int64_t>(rows) * p.head_dim;
    float top = FromBits(kMinusInfinity);
#pragma unroll 4
    for (int32_t g = 0; g < parts; ++g) top = __builtin_fmaxf(top, stats[g * 2 * rows]);
    // No part saw a finite score: -inf - 0 rather than -inf + inf.
    const float shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));

    float sum = 0.0f;
    Float4 low = {}, high = {};
#pragma unroll 4  // four parts' loads in flight
    for (int32_t g = 0; g < parts; ++g) {
        const float weight = Exp2((stats[g * 2 * rows] - shift) * c);
        sum += weight * stats[g * 2 * rows + rows];
        const Float4* from = reinterpret_cast<const Float4*>(out + g * stride);
        low += from[0] * weight;
        high += from[1] * weight;
    }
    const RowResult result = Result(top * c, sum, p.sinks, head);
    low *= result.scale;
    high *= result.scale;
    uint16_t* to = p.out + at * p.out_strides.row + head * p.out_strides.head + dim;
    *reinterpret_cast<UnalignedWord4*>(to) =
        Word4{Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
              Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
    if (p.lse && dim == 0) p.lse[head * p.lse_stride + at] = result.lse;
}

}  // namespace liteattention::gfx942
