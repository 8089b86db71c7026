// Functions of one lane that the floating-point instructions are made of.
//
// Numerics follow AMD's "Instinct MI300 Instruction Set Architecture" manual: IEEE arithmetic with
// the rounding and subnormal handling of MODE. Where the hardware is specified by an error bound
// only (v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin, v_cos) the correctly rounded value is returned,
// or one within 0.501 ulp; single-precision ones flush subnormal inputs and results, as the
// hardware does whatever MODE says, half and double ones do not.
#pragma once

#include <cmath>
#include <limits>

#include "exec/sources.h"

namespace emulator::VARIANT {
namespace {

inline bool is_nan(uint32_t bits) { return static_cast<int32_t>(bits & 0x7fffffff) > 0x7f800000; }
inline bool is_signaling(uint32_t bits) {
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffff);
    return (magnitude > 0x7f800000) & (magnitude < 0x7fc00000);
}

// IEEE-mode minimum and maximum: a signalling NaN comes back quiet, a quiet one loses against a
// number, -0 is less than +0. Comparisons are false for NaN, which leaves src1.
inline float min32(float a, float b) {
    const uint32_t x = as_bits(a), y = as_bits(b);
    uint32_t r = as_bits(a < b ? a : b);
    r = a == b ? x | y : r;  // zeros of either sign, or the same bits
    r = b != b ? x : r;
    r = is_signaling(y) ? y | 0x400000 : r;
    r = is_signaling(x) ? x | 0x400000 : r;
    return as_float(r);
}
inline float max32(float a, float b) {
    const uint32_t x = as_bits(a), y = as_bits(b);
    uint32_t r = as_bits(a > b ? a : b);
    r = a == b ? x & y : r;
    r = b != b ? x : r;
    r = is_signaling(y) ? y | 0x400000 : r;
    r = is_signaling(x) ? x | 0x400000 : r;
    return as_float(r);
}
// Halves are floats here; a signalling one has lost its mark only in the bit that moved along.
inline double quiet(double x) { return as_double(as_bits(x) | (x != x ? 1ull << 51 : 0ull)); }
inline bool is_signaling(double x) { return x != x && !(as_bits(x) >> 51 & 1); }
inline double min64(double a, double b) {
    if (is_signaling(a)) return quiet(a);
    if (is_signaling(b)) return quiet(b);
    if (b != b) return a;
    if (a != a) return b;
    return a < b ? a : a > b ? b : as_double(as_bits(a) | as_bits(b));
}
inline double max64(double a, double b) {
    if (is_signaling(a)) return quiet(a);
    if (is_signaling(b)) return quiet(b);
    if (b != b) return a;
    if (a != a) return b;
    return a > b ? a : a < b ? b : as_double(as_bits(a) & as_bits(b));
}
// The middle one; a NaN among them makes it the minimum of the others.
inline float med32(float a, float b, float c) {
    const float low = min32(a, b), high = max32(a, b);
    const float middle = max32(low, min32(high, c));
    const bool nan = (a != a) | (b != b) | (c != c);
    return nan ? min32(min32(a, b), c) : middle;
}
// Quiets signalling NaNs; the host's roundings differ in that.
inline float quieted(float x) {
    const uint32_t bits = as_bits(x);
    return as_float(bits | (is_nan(bits) ? 0x400000u : 0u));
}

// x - floor(x), below 1.
inline float fract32(float x) {
    const float r = x - std::floor(x);
    return r < 1.0f                  ? r
           : x != x || std::isinf(x) ? std::numeric_limits<float>::quiet_NaN()
                                     : 0x1.fffffep-1f;
}
inline float fract16(float x) {  // below 1 in half precision
    const float r = x - std::floor(x);
    return r != r ? r : r < 0x1.ffcp-1f ? r : 0x1.ffcp-1f;
}
inline double fract64(double x) {
    const double r = x - std::floor(x);
    return r != r ? r : r < 0x1.fffffffffffffp-1 ? r : 0x1.fffffffffffffp-1;
}

// a * 2^n, rounded once: in double precision the product is exact.
inline float ldexp32(float a, int32_t n) {
    const int64_t power = clamped(n, -320, 320);
    const double scale = as_double(static_cast<uint64_t>(power + 1023) << 52);
    return quieted(static_cast<float>(static_cast<double>(a) * scale));
}
inline double ldexp64(double a, int32_t n) { return quiet(std::ldexp(a, clamped(n, -4200, 4200))); }

inline int exponent32(float x) { return static_cast<int>(as_bits(x) >> 23 & 255); }
inline int exponent64(double x) { return static_cast<int>(as_bits(x) >> 52 & 2047); }

inline int32_t frexp_exponent(double x) {
    if (x != x || std::isinf(x) || x == 0) return 0;
    int n;
    std::frexp(x, &n);
    return n;
}
inline double frexp_mantissa(double x) {
    if (x != x || std::isinf(x) || x == 0) return quiet(x);
    int n;
    return std::frexp(x, &n);
}

inline float flushed(float x) { return as_float(flush32(as_bits(x))); }

// 2^x. n = round(x); Taylor polynomial of degree 10 for 2^(x-n), |x-n| <= 1/2: its remainder is
// below 2.3e-13, so the result is within 0.500004 ulp before flushing.
inline float exp2_lane(float x) {
    const float above = pick(x > -200.0f, x, -200.0f),
                bounded = pick(above < 200.0f, above, 200.0f);
    const double shift = 0x1.8p52;
    const double y = bounded, moved = y + shift, f = y - (moved - shift);
    double p = 7.0549116208011234e-9;  // ln(2)^k / k!, k = 10 .. 0
    p = p * f + 1.0178086009239699e-7;
    p = p * f + 1.3215486790144307e-6;
    p = p * f + 1.5252733804059840e-5;
    p = p * f + 1.5403530393381606e-4;
    p = p * f + 1.3333558146428443e-3;
    p = p * f + 9.6181291076284772e-3;
    p = p * f + 5.5504108664821580e-2;
    p = p * f + 2.4022650695910071e-1;
    p = p * f + 6.9314718055994531e-1;
    p = p * f + 1.0;
    const uint64_t power = as_bits(moved) << 52;  // the low bits of `moved` hold n
    const double scaled = as_double(as_bits(p) + power);
    float r = static_cast<float>(scaled);
    r = pick(x < -126.0f, 0.0f, r);
    r = pick(x >= 128.0f, std::numeric_limits<float>::infinity(), r);
    return pick(x != x, quieted(x), r);
}

// log2(x) of a positive normal double: x = 2^n m, m in [sqrt(1/2), sqrt(2)); with
// s = (m-1)/(m+1), log2(m) = 2/ln(2) (s + s^3/3 + ...), |s| <= 0.1716: ten terms leave 1e-17.
inline double log2_positive(double x) {
    const uint64_t bits = as_bits(x);
    const uint64_t above = bits - 0x3fe6a09e667f3bcdull;  // sqrt(1/2)
    const int64_t n = static_cast<int64_t>(above) >> 52;
    const double m = as_double(bits - (static_cast<uint64_t>(n) << 52));
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 19;
    p = p * z + 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    p = p * z + 1.0;
    return static_cast<double>(static_cast<int32_t>(n)) + 2.8853900817779268 * s * p;
}

inline float log2_lane(float x) {
    const double y = pick(x > 0.0f, x, 1.0f);
    float r = static_cast<float>(log2_positive(y));
    r = pick(x == std::numeric_limits<float>::infinity(), x, r);
    r = pick(x == 0.0f, -std::numeric_limits<float>::infinity(), r);
    r = pick(x < 0.0f, std::numeric_limits<float>::quiet_NaN(), r);
    return pick(x != x, quieted(x), r);
}

inline float rcp_lane(float x) { return 1.0f / x; }
inline float rsq_lane(float x) {
    const double y = x;
    return static_cast<float>(1.0 / std::sqrt(y));
}
// The input counts turns; outside of +-256 of them the result is that of 0.
inline double sin_turns(double x) {
    if (x != x || std::isinf(x)) return std::numeric_limits<double>::quiet_NaN();
    if (std::fabs(x) > 256) return 0;
    const double r = x - std::round(x);  // exact
    return r == 0                ? std::copysign(0.0, x)
           : std::fabs(r) == 0.5 ? 0.0
                                 : std::sin(r * 6.283185307179586476925);
}
inline double cos_turns(double x) {
    if (x != x || std::isinf(x)) return std::numeric_limits<double>::quiet_NaN();
    if (std::fabs(x) > 256) return 1;
    const double r = std::fabs(x - std::round(x));
    return r == 0.25 ? 0.0 : std::cos(r * 6.283185307179586476925);
}

// Class bits: 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -subnormal, 5 -0, 6 +0,
// Mantissa bits of 2/pi for argument reduction: 1201 of them, most significant first, as 32-bit
// words.
inline constexpr uint32_t kTwoOverPi[] = {
    0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab, 0xdebbc561,
    0xb7246e3a, 0x424dd2e0, 0x06492eea, 0x09d1921c, 0xfe1deb1c, 0xb129a73e, 0xe88235f5, 0x2ebb4484,
    0xe99c7026, 0xb45f7e41, 0x3991d639, 0x835339f4, 0x9c845f8b, 0xbdf9283b, 0x1ff897ff, 0xde05980f,
    0xef2f118b, 0x5a0a6d1f, 0x6d367ecf, 0x27cb09b7, 0x4f463f66, 0x9e5fea2d, 0x7527bac7, 0xebe5f17b,
    0x3d0739f7, 0x8a5292ea, 0x6bfb5fb1, 0x1f8d5d08, 0x56033046, 0xfc7b6bab, 0xf0cfbc21};

// 53 bits of 2/pi, chosen by the exponent of src0 and the segment number src1.
inline double trig_preop(double a, uint32_t segment) {
    int shift = static_cast<int>(segment & 31) * 53;
    const int exponent = exponent64(a);
    if (exponent > 1077) shift += exponent - 1077;
    uint64_t bits = 0;
    for (int n = 0; n < 53; ++n) {
        const int at = shift + n;
        const bool bit = at < 1201 && (kTwoOverPi[at / 32] >> (31 - at % 32) & 1);
        bits = bits << 1 | bit;
    }
    int scale = -53 - shift;
    if (exponent >= 1968) scale += 128;
    return std::ldexp(static_cast<double>(bits), scale);
}

// Cube map face, its coordinates and twice its major axis.
struct CubeFace {
    float id, sc, tc, ma;
};
inline CubeFace cube_face(float x, float y, float z) {
    const float ax = std::fabs(x), ay = std::fabs(y), az = std::fabs(z);
    if (az >= ax && az >= ay) return {z < 0 ? 5.0f : 4.0f, z < 0 ? -x : x, -y, 2 * z};
    if (ay >= ax) return {y < 0 ? 3.0f : 2.0f, x, y < 0 ? -z : z, 2 * y};
    return {x < 0 ? 1.0f : 0.0f, x < 0 ? z : -z, -y, 2 * x};
}

}  // namespace
}  // namespace emulator::VARIANT
