// Half precision and the 8-bit floats: conversions, and sums in wider types that round once.
#pragma once

#include <cmath>

#include "exec/values.h"

namespace emulator::VARIANT {
namespace {

// ---- half precision

// Exact. Subnormals go through an integer conversion: a multiplication that meets a subnormal
// single costs x86 over a hundred cycles.
inline float half_to_float(uint32_t half) {
    const uint32_t magnitude = half & 0x7fff;
    const uint32_t normal = (magnitude << 13) + 0x38000000u;
    const uint32_t small =
        as_bits(static_cast<float>(static_cast<int32_t>(magnitude & 0x3ff)) * 0x1p-24f);
    uint32_t bits = pick(magnitude >= 0x400, normal, small);
    bits |= magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    return as_float(bits | (half & 0x8000) << 16);
}

// Round to nearest even.
inline uint32_t float_to_half(float value) {
    const uint32_t all = as_bits(value), u = all & 0x7fffffff;
    const uint32_t normal = (u - 0x38000000u + 0xfffu + (u >> 13 & 1)) >> 13;
    const uint32_t small = as_bits(as_float(u) + 0.5f) - 0x3f000000u;  // the adder rounds at 2^-24
    uint32_t half = pick(u < 0x38800000, small, normal);
    half = u >= 0x47800000 ? 0x7c00 : half;
    half = u > 0x7f800000 ? 0x7e00 | (u >> 13 & 0x1ff) : half;
    return half | (all >> 16 & 0x8000);
}

// Any rounding of MODE: 0 nearest even, 1 up, 2 down, 3 towards zero.
inline uint32_t float_to_half(float value, uint32_t rounding) {
    if (rounding == 0) return float_to_half(value);
    const uint32_t all = as_bits(value), sign = all >> 16 & 0x8000, u = all & 0x7fffffff;
    if (u > 0x7f800000) return sign | 0x7e00 | (u >> 13 & 0x1ff);
    if (u == 0x7f800000) return sign | 0x7c00;
    const bool away = rounding == (sign ? 2u : 1u);
    if (u >= 0x47800000) return sign | (away ? 0x7c00 : 0x7bff);
    const int exponent = static_cast<int>(u >> 23) - 127;
    const int shift = exponent >= -14 ? 13 : exponent >= -25 ? -1 - exponent : 25;
    const uint32_t mantissa = (u & 0x7fffff) | (u >> 23 ? 0x800000u : 0u);
    uint32_t half = mantissa >> shift;
    const bool inexact = mantissa & ((1u << shift) - 1);
    if (exponent >= -14) half += static_cast<uint32_t>(exponent + 14) << 10;
    if (inexact && away) ++half;
    return sign | half;
}

// To single precision so that a second rounding, to half, comes out as if there had been one:
// inexact results get an odd last bit.
inline float round_to_odd(double value) {
    const float nearest = static_cast<float>(value);
    uint32_t bits = as_bits(nearest);
    const double back = nearest;
    const bool inexact = back != value && value == value;
    const bool larger = std::fabs(back) > std::fabs(value);
    bits = inexact ? (bits - (larger ? 1u : 0u)) | 1u : bits;
    return as_float(bits);
}

// `value` is a rounded result and `error` the sign of what the exact one has more: the neighbour of
// the exact result with an odd last bit, from which a second rounding is right.
inline double to_odd(double value, double error) {
    uint64_t bits = as_bits(value);
    const bool fix = error != 0 && std::fabs(value) < 1e300;  // false when NaN
    const bool down = (error < 0) != (value < 0);
    bits = fix ? (bits - (down ? 1u : 0u)) | 1u : bits;
    return as_double(bits);
}

// a * b + c of single values in double precision, rounded to odd: the product is exact, the sum's
// error (two-sum) decides.
inline double fma_to_odd(float a, float b, float c) {
    const double product = static_cast<double>(a) * b, addend = c, sum = product + addend;
    const double t = sum - product, error = (product - (sum - t)) + (addend - t);
    return to_odd(sum, error);
}

// The same of double values, in double precision.
inline double fma_to_odd(double a, double b, double c) {
    const double product = a * b, rest = __builtin_fma(a, b, -product);
    const double sum = product + c, t = sum - product;
    const double lost = (product - (sum - t)) + (c - t), result = __builtin_fma(a, b, c);
    return to_odd(result, (sum - result) + (lost + rest));
}

// a * b + c of half values, to be rounded to half.
inline float fma_for_half(float a, float b, float c) { return round_to_odd(fma_to_odd(a, b, c)); }

// ---- 8-bit floats of gfx942: no infinity, no -0; 0x80 is the NaN. fp8 is 1-4-3 with bias 8,
// bf8 is 1-5-2 with bias 16.
template <int kMantissaBits>
inline float from_8bit(uint32_t byte) {
    constexpr int bias = 1 << (6 - kMantissaBits);
    constexpr float last = 1.0f / (1 << (bias - 1)) / (1 << kMantissaBits);  // a subnormal's unit
    const uint32_t magnitude = byte & 0x7f;
    const uint32_t normal = (magnitude << (23 - kMantissaBits)) + ((127u - bias) << 23);
    const uint32_t small = as_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * last);
    uint32_t bits = pick(magnitude >= (1u << kMantissaBits), normal, small);
    bits |= (byte & 0x80) << 24;
    bits = (byte & 0xff) == 0x80 ? 0x7fc00000u : bits;
    return as_float(bits);
}

// To nearest even, or with `random` added below the last bit and cut. What overflows becomes NaN,
// or the largest value under MODE.FP16_OVFL.
template <int kMantissaBits>
inline uint32_t to_8bit(float x, bool saturate, bool stochastic, uint32_t random) {
    constexpr int exponent_bits = 7 - kMantissaBits, bias = 1 << (exponent_bits - 1);
    const uint32_t sign = as_bits(x) >> 24 & 0x80, u = as_bits(x) & 0x7fffffff;
    if (u > 0x7f800000) return 0x80;
    if (u == 0x7f800000) return saturate ? sign | 0x7f : 0x80;
    const int exponent = static_cast<int>(u >> 23) - 127;
    const uint64_t mantissa = (u & 0x7fffff) | (u >> 23 ? 0x800000u : 0u);
    int shift = 23 - kMantissaBits;
    const bool subnormal = exponent < 1 - bias;
    if (subnormal) shift += 1 - bias - exponent;
    if (shift > 40) shift = 40;
    uint64_t rounded;
    if (stochastic)
        rounded = (mantissa + (shift <= 32 ? random >> (32 - shift)
                                           : static_cast<uint64_t>(random) << (shift - 32))) >>
                  shift;
    else
        rounded = (mantissa + ((1ull << (shift - 1)) - 1) + (mantissa >> shift & 1)) >> shift;
    // With the hidden bit counted in the exponent field of a normal number.
    const uint64_t code =
        rounded + (subnormal ? 0 : static_cast<uint64_t>(exponent + bias - 1) << kMantissaBits);
    if (code > 0x7f) return saturate ? sign | 0x7f : 0x80;
    return code == 0 ? 0 : sign | static_cast<uint32_t>(code);
}

}  // namespace
}  // namespace emulator::VARIANT
