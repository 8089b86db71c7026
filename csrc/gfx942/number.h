// What the kernels need to know of a 16-bit number format: how to multiply two tiles of it and how
// to round fp32 to it. bf16 is the upper half of an fp32 word, so its rounding is an integer
// addition, bit for bit what liteattention_rocm/rounding.py says. fp16 is rounded by
// v_cvt_f16_f32, to nearest even; beyond 65504 lies infinity.
#pragma once

#include "isa.h"

namespace liteattention::gfx942 {

enum class Rounding { kRtne, kRtna, kRtz };

// The word whose upper half is x rounded to nearest even; x is no NaN. 2 VALU instructions.
LITE_DEVICE uint32_t RoundEven(float x) { return Bits(x) + 0x7fffu + (Bits(x) >> 16 & 1u); }

// The word whose upper half is x rounded as named. NaN stays NaN: quiet, sign and upper payload
// kept. Tested on the bits, since the compiler is told that arithmetic meets no NaN.
template <Rounding kMode>
LITE_DEVICE uint32_t Round(float x) {
    const uint32_t bits = Bits(x);
    const uint32_t rounded = kMode == Rounding::kRtne   ? RoundEven(x)
                             : kMode == Rounding::kRtna ? bits + 0x8000u
                                                        : bits;
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
}

template <Rounding kMode>
LITE_DEVICE uint32_t RoundPair(float low, float high) {
    return UpperHalves(Round<kMode>(low), Round<kMode>(high));
}

template <Rounding kMode>
struct Bf16 {
    static LITE_DEVICE void Multiply(Half4 a, Half4 b, Float4& c) { MfmaBf16(a, b, c); }

    // Two probabilities, to nearest even. 5 VALU instructions.
    static LITE_DEVICE uint32_t Probabilities(float low, float high) {
        return UpperHalves(RoundEven(low), RoundEven(high));
    }
    // Two outputs.
    static LITE_DEVICE uint32_t Pair(float low, float high) { return RoundPair<kMode>(low, high); }
};

struct Fp16 {
    static LITE_DEVICE void Multiply(Half4 a, Half4 b, Float4& c) { MfmaFp16(a, b, c); }

    // 3 VALU instructions. Below 2^-14 a probability has fewer bits, below 2^-25 none.
    static LITE_DEVICE uint32_t Probabilities(float low, float high) { return Pair(low, high); }
    static LITE_DEVICE uint32_t Pair(float low, float high) {
        const Fp16x2 both = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
        return __builtin_bit_cast(uint32_t, both);
    }
};

// As variants.def names them.
using Bf16Rtne = Bf16<Rounding::kRtne>;
using Bf16Rtna = Bf16<Rounding::kRtna>;
using Bf16Rtz = Bf16<Rounding::kRtz>;

}  // namespace liteattention::gfx942
