// fp32 to bf16: bf16 is the upper half of an fp32 word, so rounding is an integer addition. Bit for
// bit what liteattention_rocm/rounding.py says.
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

}  // namespace liteattention::gfx942
