// Last phase of attention_decode and merge_decode: a row's state becomes its result.
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

}  // namespace liteattention::gfx942
