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

// Two probabilities on their way to one word.
struct Pair {
    uint32_t half[2], odd[2], word;
};

template <Rounding kMode>
struct Bf16 {
    template <class Accumulator>
    static LITE_DEVICE void Multiply(Half4 a, Half4 b, Accumulator& c) {
        MfmaBf16(a, b, c);
    }

    // Rounds two probabilities to one word, one VALU instruction a step. Positive and no NaN,
    // except in rows whose sum is NaN anyway.
    static constexpr int kSteps = kMode == Rounding::kRtne ? 5 : kMode == Rounding::kRtna ? 3 : 1;
    template <int kStep>
    static LITE_DEVICE void Step(gfx942::Pair& x) {
        if constexpr (kStep == kSteps - 1)
            Pin(x.word = UpperHalves(x.half[0], x.half[1]));
        else if constexpr (kMode == Rounding::kRtna)
            Pin(x.half[kStep] += 0x8000u);
        else if constexpr (kStep < 2)
            Pin(x.odd[kStep] = x.half[kStep] >> 16 & 1u);
        else
            Pin(x.half[kStep - 2] += 0x7fffu + x.odd[kStep - 2]);
    }
    // Both at once.
    static LITE_DEVICE uint32_t Probabilities(float low, float high) {
        gfx942::Pair x{{Bits(low), Bits(high)}, {}, 0};
        Unroll<kSteps>([&](auto step) { Step<step>(x); });
        return x.word;
    }
    // Two outputs.
    static LITE_DEVICE uint32_t Pair(float low, float high) { return RoundPair<kMode>(low, high); }
    // Two numbers that need no rounding, or NaN.
    static LITE_DEVICE uint32_t Exact(float low, float high) {
        return UpperHalves(Bits(low), Bits(high));
    }
    static LITE_DEVICE float ToFloat(uint32_t half) { return FromBits(half << 16); }
};

struct Fp16 {
    template <class Accumulator>
    static LITE_DEVICE void Multiply(Half4 a, Half4 b, Accumulator& c) {
        MfmaFp16(a, b, c);
    }

    // Likewise. Below 2^-14 a probability has fewer bits, below 2^-25 none.
    static constexpr int kSteps = 3;
    template <int kStep>
    static LITE_DEVICE void Step(gfx942::Pair& x) {
        if constexpr (kStep < 2) {
            const auto half = static_cast<_Float16>(FromBits(x.half[kStep]));
            Pin(x.half[kStep] = __builtin_bit_cast(uint16_t, half));
        } else {
            Pin(x.word = LowerHalves(x.half[0], x.half[1]));
        }
    }
    static LITE_DEVICE uint32_t Probabilities(float low, float high) { return Pair(low, high); }
    static LITE_DEVICE uint32_t Pair(float low, float high) {
        const Fp16x2 both = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
        return __builtin_bit_cast(uint32_t, both);
    }
    // v_cvt_pkrtz_f16_f32, which has nothing to cut off.
    static LITE_DEVICE uint32_t Exact(float low, float high) {
        return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(low, high));
    }
    static LITE_DEVICE float ToFloat(uint32_t half) {
        return __builtin_bit_cast(_Float16, static_cast<uint16_t>(half));
    }
};

// As variants.def names them.
using Bf16Rtne = Bf16<Rounding::kRtne>;
using Bf16Rtna = Bf16<Rounding::kRtna>;
using Bf16Rtz = Bf16<Rounding::kRtz>;

// The positive factor of raw scores; their sign, or a scale of 0, is in the queries (qk.h:
// LoadQueries).
LITE_DEVICE float Factor(float scale_log2) {
    return scale_log2 == 0.0f ? 1.0f : __builtin_fabsf(scale_log2);
}

}  // namespace liteattention::gfx942
