// Vector instructions except the matrix ones.
//
// Numerics follow AMD's "Instinct MI300 Instruction Set Architecture" manual: IEEE arithmetic with
// the rounding and subnormal handling of MODE. Where the hardware is specified by an error bound
// only (v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin, v_cos) the correctly rounded value is returned,
// or one within 0.501 ulp; single-precision ones flush subnormal inputs and results, as the
// hardware does whatever MODE says, half and double ones do not.
#pragma once

#include "exec/common.h"

namespace emulator::VARIANT {
namespace {

// ---- lane functions

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
template <class T>
inline T lesser(T a, T b) {
    return a < b ? a : b;
}
template <class T>
inline T greater(T a, T b) {
    return a > b ? a : b;
}
template <class T>
inline T middle(T a, T b, T c) {
    return greater(lesser(a, b), lesser(greater(a, b), c));
}

template <class T>
inline T clamped(T value, T low, T high) {
    const bool below = value<low, above = value> high;  // NaN passes
    const T bounded = below ? low : value;
    return above ? high : bounded;
}

// Saturating, towards zero, NaN to 0.
inline int32_t to_int(float x) {
    const bool low = x < -0x1p31f, high = x >= 0x1p31f, nan = x != x;
    const float inside = pick(low | high | nan, 0.0f, x);
    uint32_t r = static_cast<uint32_t>(static_cast<int32_t>(inside));
    r = pick(high, 0x7fffffffu, r);
    return static_cast<int32_t>(pick(low, 0x80000000u, r));
}
inline uint32_t to_unsigned(float x) {
    const bool positive = x > 0.0f, high = x >= 0x1p32f, upper = x >= 0x1p31f;
    const float moved = pick(upper, x - 0x1p31f, x);
    const float inside = pick(positive & !high, moved, 0.0f);
    const uint32_t r =
        static_cast<uint32_t>(static_cast<int32_t>(inside)) ^ (upper ? 0x80000000u : 0u);
    return pick(high, 0xffffffffu, pick(positive, r, 0u));
}
inline int32_t to_int(double x) {
    if (x != x) return 0;
    return static_cast<int32_t>(clamped(x, -2147483648.0, 2147483647.0));
}
inline uint32_t to_unsigned(double x) {
    if (!(x > 0)) return 0;
    return x >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(x);
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
// 7 +subnormal, 8 +normal, 9 +inf.
template <int kExponentBits, int kMantissaBits>
inline bool has_class(uint64_t bits, uint32_t mask) {
    const uint64_t mantissa = bits & ((1ull << kMantissaBits) - 1);
    const uint64_t top = (1ull << kExponentBits) - 1, exponent = bits >> kMantissaBits & top;
    const bool negative = bits >> (kExponentBits + kMantissaBits) & 1;
    uint32_t number = negative ? 3 : 8;
    if (exponent == top)
        number = mantissa ? (mantissa >> (kMantissaBits - 1) & 1) : negative ? 2u : 9u;
    else if (exponent == 0)
        number = mantissa ? (negative ? 4u : 7u) : negative ? 5u : 6u;
    return mask >> number & 1;
}

// ---- division helpers
//
// v_div_scale brings denominator and numerator where the refinement of a quotient neither over- nor
// underflows; the mask output makes v_div_fmas undo it: it multiplies by 2^64 (2^128 for double)
// when the quotient is large and divides by it when it is small. The manual's text has the wrong
// sign for a subnormal reciprocal with a subnormal quotient (scaling a denominator of 2^127 up
// would overflow) and gives v_div_fmas one direction only; here both are such that divisions come
// out right.

inline float div_scale32(float a, float denominator, float numerator, bool& flag) {
    flag = false;
    const int d = exponent32(denominator), n = exponent32(numerator);
    const bool is_denominator = as_bits(a) == as_bits(denominator);
    const bool is_numerator = as_bits(a) == as_bits(numerator);
    // Subnormal by exponent of the reciprocal or the quotient.
    const bool tiny_reciprocal =
        flushed(static_cast<float>(1.0 / denominator)) == 0.0f && !std::isinf(denominator);
    const bool tiny_quotient = std::fabs(static_cast<double>(numerator) / denominator) < 0x1p-126;
    if (numerator == 0.0f || denominator == 0.0f) return std::numeric_limits<float>::quiet_NaN();
    if (n - d >= 96) {
        flag = true;
        return is_denominator ? ldexp32(a, 64) : a;
    }
    if (d == 0) return ldexp32(a, 64);
    if (tiny_reciprocal && tiny_quotient) {
        flag = true;
        return is_denominator ? ldexp32(a, -64) : a;
    }
    if (tiny_reciprocal) return ldexp32(a, -64);
    if (tiny_quotient) {
        flag = true;
        return is_numerator ? ldexp32(a, 64) : a;
    }
    return n <= 23 ? ldexp32(a, 64) : a;
}
inline double div_scale64(double a, double denominator, double numerator, bool& flag) {
    flag = false;
    const int d = exponent64(denominator), n = exponent64(numerator);
    const bool is_denominator = as_bits(a) == as_bits(denominator);
    const bool is_numerator = as_bits(a) == as_bits(numerator);
    const auto tiny = [](double x) { return std::fabs(x) < 0x1p-1022; };
    const bool tiny_reciprocal = tiny(1.0 / denominator) && !std::isinf(denominator);
    const bool tiny_quotient = tiny(numerator / denominator);
    if (numerator == 0 || denominator == 0) return std::numeric_limits<double>::quiet_NaN();
    if (n - d >= 768) {
        flag = true;
        return is_denominator ? ldexp64(a, 128) : a;
    }
    if (d == 0) return ldexp64(a, 128);
    if (tiny_reciprocal && tiny_quotient) {
        flag = true;
        return is_denominator ? ldexp64(a, -128) : a;
    }
    if (tiny_reciprocal) return ldexp64(a, -128);
    if (tiny_quotient) {
        flag = true;
        return is_numerator ? ldexp64(a, 128) : a;
    }
    return n <= 53 ? ldexp64(a, 128) : a;
}

template <class T>
inline T div_fixup(T quotient, T denominator, T numerator) {
    const bool negative = std::signbit(denominator) != std::signbit(numerator);
    const T sign = negative ? T(-1) : T(1), infinity = std::numeric_limits<T>::infinity();
    if (numerator != numerator) return numerator + T(0);
    if (denominator != denominator) return denominator + T(0);
    if ((denominator == 0 && numerator == 0) || (std::isinf(denominator) && std::isinf(numerator)))
        return -std::numeric_limits<T>::quiet_NaN();
    if (denominator == 0 || std::isinf(numerator)) return sign * infinity;
    if (std::isinf(denominator) || numerator == 0) return sign * T(0);
    return std::copysign(quotient, sign);
}
// Quotients that under- or overflow for certain, by exponents: the refinement leaves zero or NaN
// there.
inline float div_fixup32(float q, float d, float n) {
    const bool ordinary =
        n == n && d == d && n != 0.0f && d != 0.0f && !std::isinf(n) && !std::isinf(d);
    const int difference = exponent32(n) - exponent32(d);
    const float sign = std::signbit(n) != std::signbit(d) ? -1.0f : 1.0f;
    if (ordinary && difference < -150) return sign * 0.0f;
    if (ordinary && difference > 128) return sign * std::numeric_limits<float>::infinity();
    return div_fixup(q, d, n);
}
inline double div_fixup64(double q, double d, double n) {
    const bool ordinary = n == n && d == d && n != 0 && d != 0 && !std::isinf(n) && !std::isinf(d);
    const int difference = exponent64(n) - exponent64(d);
    const double sign = std::signbit(n) != std::signbit(d) ? -1.0 : 1.0;
    if (ordinary && difference < -1075) return sign * 0.0;
    if (ordinary && difference > 1024) return sign * std::numeric_limits<double>::infinity();
    return div_fixup(q, d, n);
}

// ---- handlers that map() does not cover

// A comparison of one lane -> mask; v_cmpx writes EXEC as well.
template <class A, class B, class F>
[[gnu::always_inline]] inline void compare(Wave& w, const Inst& i, F f) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Temporary<A> ta;
    Temporary<B> tb;
    const Reader<A> a = reader<A>(w, i, 0, ta);
    const Reader<B> b = reader<B>(w, i, 1, tb);
    Lanes t;
    LANE_LOOP t.v[l] = f(a[l], b[l]) ? ~0u : 0u;
    const uint64_t mask = pack_mask(t) & write_mask(w, i);
    w.set_pair(i.dst[0].index, mask);
    if (i.writes_exec) w.set_pair(kExec, mask);
}

// f(a, b, carry in) of 64 bits: bit 32 is the carry or borrow out.
template <class F>
[[gnu::always_inline]] inline void with_carry(Wave& w, const Inst& i, bool carry_in, F f) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, in, out, r;
    const uint32_t* a = fetch(w, i, 0, false, ta);
    const uint32_t* b = fetch(w, i, 1, false, tb);
    expand_mask(carry_in ? scalar64(w, i.src[2]) : 0, in.v);
    LANE_LOOP {
        const uint64_t d = f(static_cast<uint64_t>(a[l]), static_cast<uint64_t>(b[l]),
                             static_cast<uint64_t>(in.v[l] & 1));
        r.v[l] = static_cast<uint32_t>(d);
        out.v[l] = 0u - static_cast<uint32_t>(d >> 32 & 1);
    }
    const uint64_t mask = pack_mask(out) & write_mask(w, i);
    store_modified(w, i, r, Result::bits);
    w.set_pair(i.dst[1].index, mask);
}

inline void conditional_move(Wave& w, const Inst& i) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, r;
    const uint32_t* a = fetch(w, i, 0, false, ta);
    const uint32_t* b = fetch(w, i, 1, false, tb);
    const uint64_t mask = scalar64(w, i.src[2]);
    const bool direct = w.exec() == kAllLanes && !(i.sdwa | i.dpp);
    uint32_t* const to = direct ? w.v[i.dst[0].index] : r.v;
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l)
            to[32 * h + l] = (bits >> l & 1) ? b[32 * h + l] : a[32 * h + l];
    }
    if (!direct) store_modified(w, i, r, Result::bits);
}

inline void move_pair(Wave& w, const Inst& i) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    const Operand& o = i.src[0];
    if (i.dpp || w.exec() != kAllLanes) return map<U64, U64>(w, i, [](uint64_t a) { return a; });
    uint32_t *const low = w.v[i.dst[0].index], *const high = w.v[i.dst[0].index + 1];
    if (o.kind == Kind::vector) {  // the pairs may share a register
        Lanes copy;
        std::memcpy(copy.v, w.v[o.index + 1], sizeof copy.v);
        std::memmove(low, w.v[o.index], sizeof copy.v);
        std::memcpy(high, copy.v, sizeof copy.v);
    } else {
        const uint64_t value = scalar64(w, o);
        broadcast(low, static_cast<uint32_t>(value));
        broadcast(high, static_cast<uint32_t>(value >> 32));
    }
}

inline int first_lane(uint64_t exec) { return exec ? std::countr_zero(exec) : 0; }

// The halves that op_sel and op_sel_hi choose, negated as neg and neg_hi say, 16 bits each.
[[gnu::noinline]] inline void fetch_packed(const Wave& w, const Inst& i, int n, Lanes& low,
                                           Lanes& high) {
    const Operand& o = i.src[n];
    const uint32_t shift_low = o.op_sel ? 16 : 0, shift_high = o.op_sel_hi ? 16 : 0;
    const bool floating = o.type == Type::pkf16;
    const uint32_t flip_low = floating && o.neg ? 0x8000 : 0;
    const uint32_t flip_high = floating && o.neg_hi ? 0x8000 : 0;
    Lanes t;
    const uint32_t* from = t.v;
    if (o.kind == Kind::vector) {
        from = w.v[o.index];
        if (i.dpp && n == 0) {
            dpp_read(w, i, from, t.v);
            from = t.v;
        }
    } else {
        broadcast(t.v, scalar32(w, o));
    }
    LANE_LOOP low.v[l] = (from[l] >> shift_low & 0xffff) ^ flip_low;
    LANE_LOOP high.v[l] = (from[l] >> shift_high & 0xffff) ^ flip_high;
}

// Both halves of packed 16-bit integers. f gets and returns 32-bit values; T says how they extend.
template <class T, size_t kSources, class F>
[[gnu::always_inline]] inline void packed(Wave& w, const Inst& i, F f) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes low[3], high[3], r;
    for (size_t n = 0; n < kSources; ++n) fetch_packed(w, i, static_cast<int>(n), low[n], high[n]);
    LANE_LOOP {
        uint32_t x, y;
        if constexpr (kSources == 2) {
            x = T::put(f(T::get(low[0].v[l]), T::get(low[1].v[l])));
            y = T::put(f(T::get(high[0].v[l]), T::get(high[1].v[l])));
        } else {
            x = T::put(f(T::get(low[0].v[l]), T::get(low[1].v[l]), T::get(low[2].v[l])));
            y = T::put(f(T::get(high[0].v[l]), T::get(high[1].v[l]), T::get(high[2].v[l])));
        }
        r.v[l] = x | y << 16;
    }
    store_modified(w, i, r, Result::bits);
}

[[gnu::noinline]] inline void halves_to_floats(const Wave& w, Lanes& t) {
    const bool keep = w.mode & kDenormIn64;
    LANE_LOOP t.v[l] = as_bits(half_to_float(keep || (t.v[l] & 0x7c00) ? t.v[l] : t.v[l] & 0x8000));
}

template <size_t kSources, class F>
[[gnu::always_inline]] inline void packed_half(Wave& w, const Inst& i, F f) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes low[3], high[3], x, y;
    for (size_t n = 0; n < kSources; ++n) {
        fetch_packed(w, i, static_cast<int>(n), low[n], high[n]);
        halves_to_floats(w, low[n]);
        halves_to_floats(w, high[n]);
    }
    const auto run = [&](Lanes* in, Lanes& out) {
        LANE_LOOP {
            if constexpr (kSources == 2)
                out.v[l] = as_bits(f(as_float(in[0].v[l]), as_float(in[1].v[l])));
            else
                out.v[l] =
                    as_bits(f(as_float(in[0].v[l]), as_float(in[1].v[l]), as_float(in[2].v[l])));
        }
    };
    run(low, x);
    run(high, y);
    to_halves(w, i, x);
    to_halves(w, i, y);
    LANE_LOOP x.v[l] = (x.v[l] & 0xffff) | y.v[l] << 16;
    store_modified(w, i, x, Result::bits);
}

// The two floats of a packed operand, as op_sel and op_sel_hi choose them.
inline void fetch_float_pair(const Wave& w, const Inst& i, int n, Lanes* t, const uint32_t** at) {
    const Operand& o = i.src[n];
    const bool select[2] = {o.op_sel, o.op_sel_hi}, negate[2] = {o.neg, o.neg_hi};
    const bool flush = !(w.mode & kDenormIn32);
    for (int h = 0; h < 2; ++h) {
        const uint32_t flip = negate[h] ? 0x80000000u : 0u;
        if (o.kind == Kind::vector) {
            const uint32_t* from = w.v[o.index + select[h]];
            if (!flip && !flush) {
                at[h] = from;
                continue;
            }
            uint32_t* const to = t[h].v;
            LANE_LOOP to[l] = (flush ? flush32(from[l]) : from[l]) ^ flip;
        } else {
            const uint64_t both = o.kind == Kind::scalar ? w.pair(o.index) : scalar64(w, o);
            const uint32_t bits = static_cast<uint32_t>(select[h] ? both >> 32 : both);
            broadcast(t[h].v, (flush ? flush32(bits) : bits) ^ flip);
        }
        at[h] = t[h].v;
    }
}

template <size_t kSources, class F>
[[gnu::always_inline]] inline void packed_float(Wave& w, const Inst& i, F f) {
    if (w.mode & (kGprIndexing | kRound32)) [[unlikely]]
        return run_special(w, i, kRound32);
    Lanes t[kSources][2], r[2];
    const uint32_t* at[3][2] = {};
    for (size_t n = 0; n < kSources; ++n) fetch_float_pair(w, i, static_cast<int>(n), t[n], at[n]);
    const bool direct = w.exec() == kAllLanes && !i.clamp && (w.mode & kDenormOut32);
    uint32_t* const low = direct ? w.v[i.dst[0].index] : r[0].v;
    uint32_t* const high = direct ? w.v[i.dst[0].index + 1] : r[1].v;
    const uint32_t *a0 = at[0][0], *a1 = at[0][1], *b0 = at[1][0], *b1 = at[1][1];
    const uint32_t *c0 = at[2][0], *c1 = at[2][1];
    LANE_LOOP {
        float x, y;
        if constexpr (kSources == 2) {
            x = f(as_float(a0[l]), as_float(b0[l]));
            y = f(as_float(a1[l]), as_float(b1[l]));
        } else {
            x = f(as_float(a0[l]), as_float(b0[l]), as_float(c0[l]));
            y = f(as_float(a1[l]), as_float(b1[l]), as_float(c1[l]));
        }
        low[l] = as_bits(x);
        high[l] = as_bits(y);
    }
    if (!direct) {
        Inst upper = i;
        ++upper.dst[0].index;
        store_modified(w, i, r[0], Result::f32);
        store_modified(w, upper, r[1], Result::f32);
    }
}

// The low result takes src0's half by op_sel, the high one src1's.
inline void packed_move(Wave& w, const Inst& i) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes r[2];
    for (int h = 0; h < 2; ++h) {
        const Operand& o = i.src[h];
        if (o.kind == Kind::vector) {
            std::memcpy(r[h].v, w.v[o.index + o.op_sel], sizeof r[h].v);
        } else {
            const uint64_t both = o.kind == Kind::scalar ? w.pair(o.index) : scalar64(w, o);
            broadcast(r[h].v, static_cast<uint32_t>(o.op_sel ? both >> 32 : both));
        }
    }
    for (int h = 0; h < 2; ++h) merge(w.v[i.dst[0].index + h], r[h].v, w.exec());
}

// fma of operands that are single (op_sel_hi clear) or half precision (set; op_sel = upper half).
// neg_hi is the absolute value here.
enum class Mix : uint8_t { full, low, high };
inline void mixed_fma(Wave& w, const Inst& i, Mix kind) {
    if (w.mode & (kGprIndexing | kRound32)) [[unlikely]]
        return run_special(w, i, kRound32);
    Lanes in[3], r;
    const bool flush32_in = !(w.mode & kDenormIn32), flush16_in = !(w.mode & kDenormIn64);
    for (int n = 0; n < 3; ++n) {
        const Operand& o = i.src[n];
        uint32_t* const t = in[n].v;
        if (o.kind == Kind::vector) {
            std::memcpy(t, w.v[o.index], sizeof in[n].v);
        } else {
            uint32_t bits = scalar32(w, o);
            // An inline constant is of the width that the operand is read with.
            if (o.kind == Kind::constant && o.op_sel_hi && bits >= 0x38000000u)
                bits = float_to_half(as_float(bits));
            broadcast(t, bits);
        }
        const uint32_t keep = o.neg_hi ? 0x7fffffff : ~0u, flip = o.neg ? 0x80000000u : 0;
        if (o.op_sel_hi) {
            const uint32_t shift = o.op_sel ? 16 : 0;
            LANE_LOOP {
                const uint32_t half = t[l] >> shift & 0xffff;
                t[l] =
                    as_bits(half_to_float(flush16_in && !(half & 0x7c00) ? half & 0x8000 : half));
            }
        } else if (flush32_in) {
            LANE_LOOP t[l] = flush32(t[l]);
        }
        LANE_LOOP t[l] = (t[l] & keep) ^ flip;
    }
    LANE_LOOP r.v[l] =
        as_bits(__builtin_fmaf(as_float(in[0].v[l]), as_float(in[1].v[l]), as_float(in[2].v[l])));
    if (kind == Mix::full) return store_modified(w, i, r, Result::f32);
    to_halves(w, i, r);
    const uint32_t* const old = w.v[i.dst[0].index];
    if (kind == Mix::low) {
        LANE_LOOP r.v[l] = (r.v[l] & 0xffff) | (old[l] & 0xffff0000);
    } else {
        LANE_LOOP r.v[l] = r.v[l] << 16 | (old[l] & 0xffff);
    }
    store_modified(w, i, r, Result::bits);
}

// Byte permutation of {src0, src1} by the selector bytes of src2.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r = 0;
    for (int n = 0; n < 4; ++n) {
        const uint32_t s = selector >> 8 * n & 255;
        uint32_t byte = (s & 4 ? a : b) >> 8 * (s & 3) & 255;
        const uint32_t sign = (s & 2 ? a : b) >> (s & 1 ? 31 : 15) & 1 ? 255 : 0;
        byte = s >= 8 ? sign : byte;
        byte = s == 12 ? 0 : byte;
        byte = s > 12 ? 255 : byte;
        r |= byte << 8 * n;
    }
    return r;
}
inline void permute_bytes(Wave& w, const Inst& i) {
    const Operand& o = i.src[2];
    if (o.kind == Kind::vector)
        return map<U32, U32, U32, U32>(
            w, i, [](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c); });
    const uint32_t selector = scalar32(w, o);
    if (selector & 0xf8f8f8f8)
        return map<U32, U32, U32>(w, i,
                                  [=](uint32_t a, uint32_t b) { return permute(a, b, selector); });
    // All four bytes come from the registers: each is one shift and mask, the same in every lane.
    const uint32_t s0 = selector & 7, s1 = selector >> 8 & 7, s2 = selector >> 16 & 7,
                   s3 = selector >> 24;
    const uint32_t m0 = s0 & 4 ? ~0u : 0, m1 = s1 & 4 ? ~0u : 0, m2 = s2 & 4 ? ~0u : 0,
                   m3 = s3 & 4 ? ~0u : 0;
    const uint32_t r0 = 8 * (s0 & 3), r1 = 8 * (s1 & 3), r2 = 8 * (s2 & 3), r3 = 8 * (s3 & 3);
    map<U32, U32, U32>(w, i, [=](uint32_t a, uint32_t b) {
        const uint32_t x0 = ((a & m0) | (b & ~m0)) >> r0 & 255,
                       x1 = ((a & m1) | (b & ~m1)) >> r1 & 255;
        const uint32_t x2 = ((a & m2) | (b & ~m2)) >> r2 & 255,
                       x3 = ((a & m3) | (b & ~m3)) >> r3 & 255;
        return x0 | x1 << 8 | x2 << 16 | x3 << 24;
    });
}

inline uint32_t sum_of_differences(uint32_t a, uint32_t b, bool masked) {
    uint32_t sum = 0;
    for (int n = 0; n < 4; ++n) {
        const int32_t x = a >> 8 * n & 255, y = b >> 8 * n & 255;
        sum += masked && y == 0 ? 0u : static_cast<uint32_t>(x > y ? x - y : y - x);
    }
    return sum;
}

// Four sums over 4 bytes of src0, each starting one byte later, against src1; added to src2's
// parts.
inline uint64_t four_sums(uint64_t a, uint32_t b, uint64_t c, bool masked) {
    uint64_t r = 0;
    for (int n = 0; n < 4; ++n) {
        const uint64_t sum = sum_of_differences(static_cast<uint32_t>(a >> 8 * n), b, masked) +
                             (c >> 16 * n & 0xffff);
        r |= (sum > 0xffff ? 0xffff : sum) << 16 * n;
    }
    return r;
}

inline int32_t nibble(uint32_t x, int n) { return static_cast<int32_t>(x << (28 - 4 * n)) >> 28; }

inline int64_t dot_signed(uint32_t a, uint32_t b, int bits) {
    int64_t sum = 0;
    for (int at = 0; at < 32; at += bits) {
        const int32_t x = static_cast<int32_t>(a << (32 - bits - at)) >> (32 - bits);
        const int32_t y = static_cast<int32_t>(b << (32 - bits - at)) >> (32 - bits);
        sum += static_cast<int64_t>(x) * y;
    }
    return sum;
}
inline uint64_t dot_unsigned(uint32_t a, uint32_t b, int bits) {
    uint64_t sum = 0;
    for (int at = 0; at < 32; at += bits) {
        const uint64_t x = a << (32 - bits - at) >> (32 - bits),
                       y = b << (32 - bits - at) >> (32 - bits);
        sum += x * y;
    }
    return sum;
}

// Integer dot products; op_sel may swap the halves of 16-bit ones.
template <bool kSigned>
inline void dot_integer(Wave& w, const Inst& i, int bits, bool accumulate) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, tc, r;
    const uint32_t *a, *b;
    if (bits == 16 && !accumulate) {
        Lanes low, high;
        fetch_packed(w, i, 0, low, high);
        LANE_LOOP ta.v[l] = low.v[l] | high.v[l] << 16;
        fetch_packed(w, i, 1, low, high);
        LANE_LOOP tb.v[l] = low.v[l] | high.v[l] << 16;
        a = ta.v;
        b = tb.v;
    } else {
        Inst plain = i;  // op_sel_hi is set by default and means nothing here
        for (Operand& o : plain.src) o.op_sel = o.neg = o.abs = false;
        a = fetch(w, plain, 0, false, ta);
        b = fetch(w, plain, 1, false, tb);
    }
    const uint32_t* const c = accumulate ? w.v[i.dst[0].index] : fetch(w, i, 2, false, tc);
    for (int l = 0; l < kLanes; ++l) {
        if constexpr (kSigned) {
            const int64_t d = dot_signed(a[l], b[l], bits) + static_cast<int32_t>(c[l]);
            r.v[l] = static_cast<uint32_t>(
                i.clamp ? clamped<int64_t>(d, std::numeric_limits<int32_t>::min(), 0x7fffffff) : d);
        } else {
            const uint64_t d = dot_unsigned(a[l], b[l], bits) + c[l];
            r.v[l] = static_cast<uint32_t>(i.clamp && d > 0xffffffffu ? 0xffffffffu : d);
        }
    }
    store_modified(w, i, r, Result::bits);
}

// a.lo * b.lo + c, then + a.hi * b.hi, each fused in single precision. The hardware's own order of
// the two is not published.
inline void dot_half(Wave& w, const Inst& i, bool accumulate) {
    if (w.mode & (kGprIndexing | kRound32)) [[unlikely]]
        return run_special(w, i, kRound32);
    Lanes al, ah, bl, bh, tc, r;
    Inst plain = i;
    if (accumulate)
        for (Operand& o : plain.src) o.op_sel_hi = true, o.neg_hi = o.neg;
    fetch_packed(w, plain, 0, al, ah);
    fetch_packed(w, plain, 1, bl, bh);
    for (Lanes* t : {&al, &ah, &bl, &bh}) halves_to_floats(w, *t);
    const uint32_t* c;
    if (accumulate) {
        c = w.v[i.dst[0].index];
    } else {
        c = fetch(w, i, 2, !(w.mode & kDenormIn32), tc);
    }
    LANE_LOOP {
        const float first = __builtin_fmaf(as_float(al.v[l]), as_float(bl.v[l]), as_float(c[l]));
        r.v[l] = as_bits(__builtin_fmaf(as_float(ah.v[l]), as_float(bh.v[l]), first));
    }
    store_modified(w, i, r, Result::f32);
}

// Two values to the halves or bytes of one register.
template <class A, class B, class F>
[[gnu::always_inline]] inline void pack_two(Wave& w, const Inst& i, F f) {
    map<U32, A, B>(w, i, f);
}

inline uint32_t norm16(float x, bool is_signed) {
    if (x != x) return 0;
    const float scaled =
        is_signed ? clamped(x, -1.0f, 1.0f) * 32767.0f : clamped(x, 0.0f, 1.0f) * 65535.0f;
    return static_cast<uint32_t>(static_cast<int32_t>(std::rint(scaled))) & 0xffff;
}

inline uint32_t to_byte(float x) {
    if (x != x) return 0;
    return static_cast<uint32_t>(std::rint(clamped(x, 0.0f, 255.0f)));
}

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

#define HANDLER(name)                      \
    table[static_cast<size_t>(Op::name)] = \
        []([[maybe_unused]] Wave& w, [[maybe_unused]] const Inst& i)
#define V1(name, D, A, expression)                                          \
    HANDLER(name) {                                                         \
        map<D, A>(w, i, [](A::Value a) -> D::Value { return expression; }); \
    }
#define V2(name, D, A, B, expression)                                                           \
    HANDLER(name) {                                                                             \
        map<D, A, B>(w, i,                                                                      \
                     []([[maybe_unused]] A::Value a, [[maybe_unused]] B::Value b) -> D::Value { \
                         return expression;                                                     \
                     });                                                                        \
    }
#define V3(name, D, A, B, C, expression)                                                      \
    HANDLER(name) {                                                                           \
        map<D, A, B, C>(                                                                      \
            w, i, [](A::Value a, B::Value b, C::Value c) -> D::Value { return expression; }); \
    }
// With a saturating form under the clamp bit.
#define V2_CLAMP(name, D, A, B, expression, saturated)                                         \
    HANDLER(name) {                                                                            \
        if (i.clamp)                                                                           \
            return map<D, A, B>(w, i,                                                          \
                                [](A::Value a, B::Value b) -> D::Value { return saturated; }); \
        map<D, A, B>(w, i, [](A::Value a, B::Value b) -> D::Value { return expression; });     \
    }
#define V3_CLAMP(name, D, A, B, C, expression, saturated)                                        \
    HANDLER(name) {                                                                              \
        if (i.clamp)                                                                             \
            return map<D, A, B, C>(                                                              \
                w, i, [](A::Value a, B::Value b, C::Value c) -> D::Value { return saturated; }); \
        map<D, A, B, C>(                                                                         \
            w, i, [](A::Value a, B::Value b, C::Value c) -> D::Value { return expression; });    \
    }
#define CMP(name, A, B, condition)                                             \
    HANDLER(v_cmp_##name) {                                                    \
        compare<A, B>(w, i, [](A::Value a, B::Value b) { return condition; }); \
    };                                                                         \
    table[static_cast<size_t>(Op::v_cmpx_##name)] = table[static_cast<size_t>(Op::v_cmp_##name)]
#define CMP_INTEGER(type, T)                        \
    CMP(lt_##type, T, T, a < b);                    \
    CMP(eq_##type, T, T, a == b);                   \
    CMP(le_##type, T, T, a <= b);                   \
    CMP(gt_##type, T, T, a > b);                    \
    CMP(ne_##type, T, T, a != b);                   \
    CMP(ge_##type, T, T, a >= b);                   \
    CMP(f_##type, T, T, ((void)a, (void)b, false)); \
    CMP(t_##type, T, T, ((void)a, (void)b, true))
#define CMP_FLOAT(type, T)                          \
    CMP(lt_##type, T, T, a < b);                    \
    CMP(eq_##type, T, T, a == b);                   \
    CMP(le_##type, T, T, a <= b);                   \
    CMP(gt_##type, T, T, a > b);                    \
    CMP(lg_##type, T, T, (a < b) | (a > b));        \
    CMP(ge_##type, T, T, a >= b);                   \
    CMP(o_##type, T, T, (a == a) & (b == b));       \
    CMP(u_##type, T, T, (a != a) | (b != b));       \
    CMP(nge_##type, T, T, !(a >= b));               \
    CMP(nlg_##type, T, T, !((a < b) | (a > b)));    \
    CMP(ngt_##type, T, T, !(a > b));                \
    CMP(nle_##type, T, T, !(a <= b));               \
    CMP(neq_##type, T, T, a != b);                  \
    CMP(nlt_##type, T, T, !(a < b));                \
    CMP(f_##type, T, T, ((void)a, (void)b, false)); \
    CMP(tru_##type, T, T, ((void)a, (void)b, true))

inline uint32_t sat_u32(uint64_t x) {
    return x > 0xffffffffu ? 0xffffffffu : static_cast<uint32_t>(x);
}
inline int32_t sat_i32(int64_t x) {
    return static_cast<int32_t>(
        clamped<int64_t>(x, std::numeric_limits<int32_t>::min(), 0x7fffffff));
}
inline int32_t sat_i16(int32_t x) { return clamped(x, -32768, 32767); }
inline uint32_t sat_u16(uint32_t x) { return x > 0xffff ? 0xffff : x; }
inline int32_t i24(uint32_t x) { return static_cast<int32_t>(x << 8) >> 8; }
inline uint32_t u24(uint32_t x) { return x & 0xffffff; }
inline uint32_t below_lane(int l, bool high) {
    const uint64_t mask = (1ull << l) - 1;
    return static_cast<uint32_t>(high ? mask >> 32 : mask);
}

// v_rndne goes to the nearest even number whatever the rounding of MODE, which `kRounding` hides.
template <uint32_t kRounding, class F>
[[gnu::always_inline]] inline void nearest_whole(Wave& w, F f) {
    const uint32_t mode = w.mode;
    w.mode = mode & ~kRounding;
    f();
    w.mode = mode;
}

inline void count_below(Wave& w, const Inst& i, bool high) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, r;
    const uint32_t* a = fetch(w, i, 0, false, ta);
    const uint32_t* b = fetch(w, i, 1, false, tb);
    for (int l = 0; l < kLanes; ++l)
        r.v[l] = b[l] + static_cast<uint32_t>(std::popcount(a[l] & below_lane(l, high)));
    store_modified(w, i, r, Result::bits);
}

inline void register_moves(Handler* table) {
    V1(v_mov_b32, U32, U32, a);
    HANDLER(v_mov_b64) { move_pair(w, i); };
    V1(v_accvgpr_read_b32, U32, U32, a);
    V1(v_accvgpr_write_b32, U32, U32, a);
    V1(v_accvgpr_mov_b32, U32, U32, a);
    HANDLER(v_cndmask_b32) { conditional_move(w, i); };
    HANDLER(v_pk_mov_b32) { packed_move(w, i); };
    HANDLER(v_perm_b32) { permute_bytes(w, i); };
    HANDLER(v_swap_b32) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes a, b;
        uint32_t *x = w.v[i.dst[0].index], *y = w.v[i.src[0].index];
        std::memcpy(a.v, x, sizeof a.v);
        std::memcpy(b.v, y, sizeof b.v);
        merge(x, b.v, w.exec());
        merge(y, a.v, w.exec());
    };
    HANDLER(v_readfirstlane_b32) {
        const Operand& o = i.src[0];
        w.s[i.dst[0].index] =
            o.kind == Kind::vector ? w.v[o.index][first_lane(w.exec())] : scalar32(w, o);
    };
    HANDLER(v_readlane_b32) {
        const Operand& o = i.src[0];
        const uint32_t lane = scalar32(w, i.src[1]) & 63;
        w.s[i.dst[0].index] = o.kind == Kind::vector ? w.v[o.index][lane] : scalar32(w, o);
    };
    HANDLER(v_writelane_b32) {
        w.v[i.dst[0].index][scalar32(w, i.src[1]) & 63] = scalar32(w, i.src[0]);
    };
}

inline void register_integer(Handler* table) {
    // ---- 32-bit arithmetic
    V2_CLAMP(v_add_u32, U32, U32, U32, a + b, sat_u32(static_cast<uint64_t>(a) + b));
    V2_CLAMP(v_sub_u32, U32, U32, U32, a - b, (a < b ? 0u : a - b));
    V2_CLAMP(v_subrev_u32, U32, U32, U32, b - a, (b < a ? 0u : b - a));
    V2_CLAMP(v_add_i32, I32, U32, U32, static_cast<int32_t>(a + b),
             sat_i32(static_cast<int64_t>(static_cast<int32_t>(a)) + static_cast<int32_t>(b)));
    V2_CLAMP(v_sub_i32, I32, U32, U32, static_cast<int32_t>(a - b),
             sat_i32(static_cast<int64_t>(static_cast<int32_t>(a)) - static_cast<int32_t>(b)));
    HANDLER(v_add_co_u32) {
        with_carry(w, i, false, [](uint64_t a, uint64_t b, uint64_t) { return a + b; });
    };
    HANDLER(v_sub_co_u32) {
        with_carry(w, i, false, [](uint64_t a, uint64_t b, uint64_t) { return a - b; });
    };
    HANDLER(v_subrev_co_u32) {
        with_carry(w, i, false, [](uint64_t a, uint64_t b, uint64_t) { return b - a; });
    };
    HANDLER(v_addc_co_u32) {
        with_carry(w, i, true, [](uint64_t a, uint64_t b, uint64_t c) { return a + b + c; });
    };
    HANDLER(v_subb_co_u32) {
        with_carry(w, i, true, [](uint64_t a, uint64_t b, uint64_t c) { return a - b - c; });
    };
    HANDLER(v_subbrev_co_u32) {
        with_carry(w, i, true, [](uint64_t a, uint64_t b, uint64_t c) { return b - a - c; });
    };
    V2(v_mul_lo_u32, U32, U32, U32, a * b);
    V2(v_mul_hi_u32, U32, U32, U32, static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32));
    V2(v_mul_hi_i32, I32, I32, I32, static_cast<int32_t>(static_cast<int64_t>(a) * b >> 32));
    V2(v_mul_i32_i24, U32, U32, U32, static_cast<uint32_t>(i24(a)) * static_cast<uint32_t>(i24(b)));
    V2(v_mul_hi_i32_i24, I32, U32, U32,
       static_cast<int32_t>(static_cast<int64_t>(i24(a)) * i24(b) >> 32));
    V2(v_mul_u32_u24, U32, U32, U32, u24(a) * u24(b));
    V2(v_mul_hi_u32_u24, U32, U32, U32,
       static_cast<uint32_t>(static_cast<uint64_t>(u24(a)) * u24(b) >> 32));
    V3_CLAMP(v_mad_i32_i24, U32, U32, U32, U32,
             static_cast<uint32_t>(i24(a)) * static_cast<uint32_t>(i24(b)) + c,
             static_cast<uint32_t>(
                 sat_i32(static_cast<int64_t>(i24(a)) * i24(b) + static_cast<int32_t>(c))));
    V3_CLAMP(v_mad_u32_u24, U32, U32, U32, U32, u24(a) * u24(b) + c,
             sat_u32(static_cast<uint64_t>(u24(a)) * u24(b) + c));
    V3_CLAMP(v_mad_u32_u16, U32, U16, U16, U32, a * b + c,
             sat_u32(static_cast<uint64_t>(a) * b + c));
    V3_CLAMP(v_mad_i32_i16, I32, I16, I16, I32,
             static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b) +
                                  static_cast<uint32_t>(c)),
             sat_i32(static_cast<int64_t>(a) * b + c));
    V2(v_min_i32, I32, I32, I32, lesser(a, b));
    V2(v_max_i32, I32, I32, I32, greater(a, b));
    V2(v_min_u32, U32, U32, U32, lesser(a, b));
    V2(v_max_u32, U32, U32, U32, greater(a, b));
    V3(v_min3_i32, I32, I32, I32, I32, lesser(lesser(a, b), c));
    V3(v_max3_i32, I32, I32, I32, I32, greater(greater(a, b), c));
    V3(v_med3_i32, I32, I32, I32, I32, middle(a, b, c));
    V3(v_min3_u32, U32, U32, U32, U32, lesser(lesser(a, b), c));
    V3(v_max3_u32, U32, U32, U32, U32, greater(greater(a, b), c));
    V3(v_med3_u32, U32, U32, U32, U32, middle(a, b, c));
    // ---- bits
    V2(v_and_b32, U32, U32, U32, a & b);
    V2(v_or_b32, U32, U32, U32, a | b);
    V2(v_xor_b32, U32, U32, U32, a ^ b);
    V2(v_xnor_b32, U32, U32, U32, ~(a ^ b));
    V1(v_not_b32, U32, U32, ~a);
    V2(v_lshlrev_b32, U32, U32, U32, b << (a & 31));
    V2(v_lshrrev_b32, U32, U32, U32, b >> (a & 31));
    V2(v_ashrrev_i32, I32, U32, I32, b >> (a & 31));
    V3(v_lshl_add_u32, U32, U32, U32, U32, (a << (b & 31)) + c);
    V3(v_add_lshl_u32, U32, U32, U32, U32, (a + b) << (c & 31));
    V3(v_add3_u32, U32, U32, U32, U32, a + b + c);
    V3(v_lshl_or_b32, U32, U32, U32, U32, a << (b & 31) | c);
    V3(v_and_or_b32, U32, U32, U32, U32, (a & b) | c);
    V3(v_or3_b32, U32, U32, U32, U32, a | b | c);
    V3(v_xad_u32, U32, U32, U32, U32, (a ^ b) + c);
    V3(v_bfe_u32, U32, U32, U32, U32, a >> (b & 31) & ((1u << (c & 31)) - 1));
    V3(v_bfe_i32, I32, I32, U32, U32,
       ((c & 31) == 0 ? 0
                      : static_cast<int32_t>(static_cast<uint32_t>(a >> (b & 31))
                                             << ((32 - (c & 31)) & 31)) >>
                            ((32 - (c & 31)) & 31)));
    V3(v_bfi_b32, U32, U32, U32, U32, (a & b) | (~a & c));
    V2(v_bfm_b32, U32, U32, U32, ((1u << (a & 31)) - 1) << (b & 31));
    V3(v_alignbit_b32, U32, U32, U32, U32,
       static_cast<uint32_t>((static_cast<uint64_t>(a) << 32 | b) >> (c & 31)));
    V3(v_alignbyte_b32, U32, U32, U32, U32,
       static_cast<uint32_t>((static_cast<uint64_t>(a) << 32 | b) >> 8 * (c & 3)));
    V1(v_bfrev_b32, U32, U32,
       __builtin_bswap32((a & 0x01010101) << 7 | (a & 0x02020202) << 5 | (a & 0x04040404) << 3 |
                         (a & 0x08080808) << 1 | (a & 0x10101010) >> 1 | (a & 0x20202020) >> 3 |
                         (a & 0x40404040) >> 5 | (a & 0x80808080) >> 7));
    V1(v_ffbh_u32, U32, U32, (a ? static_cast<uint32_t>(std::countl_zero(a)) : ~0u));
    V1(v_ffbl_b32, U32, U32, (a ? static_cast<uint32_t>(std::countr_zero(a)) : ~0u));
    V1(v_ffbh_i32, U32, I32,
       ((a ^ a >> 31) ? static_cast<uint32_t>(std::countl_zero(static_cast<uint32_t>(a ^ a >> 31)))
                      : ~0u));
    V2(v_bcnt_u32_b32, U32, U32, U32, static_cast<uint32_t>(std::popcount(a)) + b);
    HANDLER(v_mbcnt_lo_u32_b32) { count_below(w, i, false); };
    HANDLER(v_mbcnt_hi_u32_b32) { count_below(w, i, true); };
    V3(v_sad_u8, U32, U32, U32, U32, sum_of_differences(a, b, false) + c);
    V3(v_sad_hi_u8, U32, U32, U32, U32, (sum_of_differences(a, b, false) << 16) + c);
    V3(v_msad_u8, U32, U32, U32, U32, sum_of_differences(a, b, true) + c);
    V3(v_sad_u16, U32, U32, U32, U32,
       ((a & 0xffff) > (b & 0xffff) ? (a & 0xffff) - (b & 0xffff) : (b & 0xffff) - (a & 0xffff)) +
           (a >> 16 > b >> 16 ? (a >> 16) - (b >> 16) : (b >> 16) - (a >> 16)) + c);
    V3(v_sad_u32, U32, U32, U32, U32, (a > b ? a - b : b - a) + c);
    V3(v_lerp_u8, U32, U32, U32, U32,
       (((a & 255) + (b & 255) + (c & 1)) >> 1) |
           (((a >> 8 & 255) + (b >> 8 & 255) + (c >> 8 & 1)) >> 1) << 8 |
           (((a >> 16 & 255) + (b >> 16 & 255) + (c >> 16 & 1)) >> 1) << 16 |
           (((a >> 24) + (b >> 24) + (c >> 24 & 1)) >> 1) << 24);
    V3(v_qsad_pk_u16_u8, U64, U64, U32, U64, four_sums(a, b, c, false));
    V3(v_mqsad_pk_u16_u8, U64, U64, U32, U64, four_sums(a, b, c, true));
    HANDLER(v_mqsad_u32_u8) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes64 a;
        Lanes tb, r[4];
        fetch_wide(w, i, 0, a);
        const uint32_t* b = fetch(w, i, 1, false, tb);
        if (i.src[2].kind != Kind::vector) fail(i, "src2 must be vector registers");
        for (int n = 0; n < 4; ++n)
            for (int l = 0; l < kLanes; ++l)
                r[n].v[l] = w.v[i.src[2].index + n][l] +
                            sum_of_differences(static_cast<uint32_t>(a.v[l] >> 8 * n), b[l], true);
        for (int n = 0; n < 4; ++n) merge(w.v[i.dst[0].index + n], r[n].v, w.exec());
    };
    // ---- 64-bit
    V3(v_lshl_add_u64, U64, U64, U32, U64, (a << (b & 7)) + c);
    V2(v_lshlrev_b64, U64, U32, U64, b << (a & 63));
    V2(v_lshrrev_b64, U64, U32, U64, b >> (a & 63));
    V2(v_ashrrev_i64, I64, U32, I64, b >> (a & 63));
    HANDLER(v_mad_u64_u32) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes ta, tb, out;
        Lanes64 c, r;
        const uint32_t* a = fetch(w, i, 0, false, ta);
        const uint32_t* b = fetch(w, i, 1, false, tb);
        fetch_wide(w, i, 2, c);
        LANE_LOOP {
            const uint64_t product = static_cast<uint64_t>(a[l]) * b[l], d = product + c.v[l];
            r.v[l] = d;
            out.v[l] = d < product ? ~0u : 0u;
        }
        const uint64_t mask = pack_mask(out) & w.exec();
        store_wide(w, i, r);
        w.set_pair(i.dst[1].index, mask);
    };
    HANDLER(v_mad_i64_i32) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes ta, tb, out;
        Lanes64 c, r;
        const uint32_t* a = fetch(w, i, 0, false, ta);
        const uint32_t* b = fetch(w, i, 1, false, tb);
        fetch_wide(w, i, 2, c);
        LANE_LOOP {
            const uint64_t product = static_cast<uint64_t>(
                static_cast<int64_t>(static_cast<int32_t>(a[l])) * static_cast<int32_t>(b[l]));
            const uint64_t d = product + c.v[l];
            r.v[l] = d;
            out.v[l] =
                static_cast<uint32_t>(((product ^ d) & (c.v[l] ^ d)) >> 32);  // signed overflow
        }
        const uint64_t mask = pack_mask(out) & w.exec();
        store_wide(w, i, r);
        w.set_pair(i.dst[1].index, mask);
    };
    // ---- 16-bit; VOP1/2 results clear the upper half, VOP3-only ones (but the legacy) keep it
    V2_CLAMP(v_add_u16, U16, U16, U16, a + b, sat_u16(a + b));
    V2_CLAMP(v_sub_u16, U16, U16, U16, a - b, (a < b ? 0u : a - b));
    V2_CLAMP(v_subrev_u16, U16, U16, U16, b - a, (b < a ? 0u : b - a));
    V2(v_mul_lo_u16, U16, U16, U16, a * b);
    V2(v_lshlrev_b16, U16, U16, U16, b << (a & 15));
    V2(v_lshrrev_b16, U16, U16, U16, b >> (a & 15));
    V2(v_ashrrev_i16, I16, U16, I16, b >> (a & 15));
    V2(v_max_u16, U16, U16, U16, greater(a, b));
    V2(v_min_u16, U16, U16, U16, lesser(a, b));
    V2(v_max_i16, I16, I16, I16, greater(a, b));
    V2(v_min_i16, I16, I16, I16, lesser(a, b));
    V2_CLAMP(v_add_i16, I16Keep, I16, I16, a + b, sat_i16(a + b));
    V2_CLAMP(v_sub_i16, I16Keep, I16, I16, a - b, sat_i16(a - b));
    V3_CLAMP(v_mad_u16, U16Keep, U16, U16, U16, a * b + c,
             sat_u16(sat_u32(static_cast<uint64_t>(a) * b + c)));
    V3_CLAMP(v_mad_i16, I16Keep, I16, I16, I16, a * b + c, sat_i16(a * b + c));
    V3_CLAMP(v_mad_legacy_u16, U16, U16, U16, U16, a * b + c,
             sat_u16(sat_u32(static_cast<uint64_t>(a) * b + c)));
    V3_CLAMP(v_mad_legacy_i16, I16, I16, I16, I16, a * b + c, sat_i16(a * b + c));
    V3(v_min3_i16, I16Keep, I16, I16, I16, lesser(lesser(a, b), c));
    V3(v_max3_i16, I16Keep, I16, I16, I16, greater(greater(a, b), c));
    V3(v_med3_i16, I16Keep, I16, I16, I16, middle(a, b, c));
    V3(v_min3_u16, U16Keep, U16, U16, U16, lesser(lesser(a, b), c));
    V3(v_max3_u16, U16Keep, U16, U16, U16, greater(greater(a, b), c));
    V3(v_med3_u16, U16Keep, U16, U16, U16, middle(a, b, c));
    V2(v_pack_b32_f16, U32, U16, U16, a | b << 16);
    V1(v_sat_pk_u8_i16, U32, U32,
       static_cast<uint32_t>(clamped<int32_t>(static_cast<int16_t>(a), 0, 255)) |
           static_cast<uint32_t>(clamped<int32_t>(static_cast<int16_t>(a >> 16), 0, 255)) << 8);
    V2(v_cvt_pk_u16_u32, U32, U32, U32, sat_u16(a) | sat_u16(b) << 16);
    V2(v_cvt_pk_i16_i32, U32, I32, I32,
       (static_cast<uint32_t>(sat_i16(a)) & 0xffff) | static_cast<uint32_t>(sat_i16(b)) << 16);
    // ---- packed 16-bit
#define PK2(name, T, expression)                                                           \
    HANDLER(name) {                                                                        \
        packed<T, 2>(w, i, [](T::Value a, T::Value b) -> T::Value { return expression; }); \
    }
#define PK2_CLAMP(name, T, expression, saturated)                                              \
    HANDLER(name) {                                                                            \
        if (i.clamp)                                                                           \
            return packed<T, 2>(w, i,                                                          \
                                [](T::Value a, T::Value b) -> T::Value { return saturated; }); \
        packed<T, 2>(w, i, [](T::Value a, T::Value b) -> T::Value { return expression; });     \
    }
#define PK3_CLAMP(name, T, expression, saturated)                                                \
    HANDLER(name) {                                                                              \
        if (i.clamp)                                                                             \
            return packed<T, 3>(                                                                 \
                w, i, [](T::Value a, T::Value b, T::Value c) -> T::Value { return saturated; }); \
        packed<T, 3>(w, i,                                                                       \
                     [](T::Value a, T::Value b, T::Value c) -> T::Value { return expression; }); \
    }
    PK3_CLAMP(v_pk_mad_i16, I16, a * b + c, sat_i16(a * b + c));
    PK3_CLAMP(v_pk_mad_u16, U16, a * b + c, sat_u16(sat_u32(static_cast<uint64_t>(a) * b + c)));
    PK2(v_pk_mul_lo_u16, U16, a * b);
    PK2_CLAMP(v_pk_add_i16, I16, a + b, sat_i16(a + b));
    PK2_CLAMP(v_pk_sub_i16, I16, a - b, sat_i16(a - b));
    PK2_CLAMP(v_pk_add_u16, U16, a + b, sat_u16(a + b));
    PK2_CLAMP(v_pk_sub_u16, U16, a - b, (a < b ? 0u : a - b));
    PK2(v_pk_lshlrev_b16, U16, b << (a & 15));
    PK2(v_pk_lshrrev_b16, U16, b >> (a & 15));
    PK2(v_pk_ashrrev_i16, I16, b >> (a & 15));
    PK2(v_pk_max_i16, I16, greater(a, b));
    PK2(v_pk_min_i16, I16, lesser(a, b));
    PK2(v_pk_max_u16, U16, greater(a, b));
    PK2(v_pk_min_u16, U16, lesser(a, b));
#undef PK2
#undef PK2_CLAMP
#undef PK3_CLAMP
    // ---- dot products
    HANDLER(v_dot2_i32_i16) { dot_integer<true>(w, i, 16, false); };
    HANDLER(v_dot2_u32_u16) { dot_integer<false>(w, i, 16, false); };
    HANDLER(v_dot4_i32_i8) { dot_integer<true>(w, i, 8, false); };
    HANDLER(v_dot4_u32_u8) { dot_integer<false>(w, i, 8, false); };
    HANDLER(v_dot8_i32_i4) { dot_integer<true>(w, i, 4, false); };
    HANDLER(v_dot8_u32_u4) { dot_integer<false>(w, i, 4, false); };
    HANDLER(v_dot2c_i32_i16) { dot_integer<true>(w, i, 16, true); };
    HANDLER(v_dot4c_i32_i8) { dot_integer<true>(w, i, 8, true); };
    HANDLER(v_dot8c_i32_i4) { dot_integer<true>(w, i, 4, true); };
    HANDLER(v_dot2_f32_f16) { dot_half(w, i, false); };
    HANDLER(v_dot2c_f32_f16) { dot_half(w, i, true); };
}

inline void register_float(Handler* table) {
    V2(v_add_f32, F32, F32, F32, a + b);
    V2(v_sub_f32, F32, F32, F32, a - b);
    V2(v_subrev_f32, F32, F32, F32, b - a);
    V2(v_mul_f32, F32, F32, F32, a * b);
    V2(v_mul_legacy_f32, F32, F32, F32, (a == 0.0f || b == 0.0f ? 0.0f : a * b));
    V2(v_min_f32, F32, F32, F32, min32(a, b));
    V2(v_max_f32, F32, F32, F32, max32(a, b));
    V3(v_min3_f32, F32, F32, F32, F32, min32(min32(a, b), c));
    V3(v_max3_f32, F32, F32, F32, F32, max32(max32(a, b), c));
    V3(v_med3_f32, F32, F32, F32, F32, med32(a, b, c));
    V3(v_fma_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    V3(v_fmac_f32, F32, F32, F32, Old<F32>, __builtin_fmaf(a, b, c));
    V3(v_fmamk_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    V3(v_fmaak_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    HANDLER(v_pk_fma_f32) {
        packed_float<3>(w, i, [](float a, float b, float c) { return __builtin_fmaf(a, b, c); });
    };
    HANDLER(v_pk_mul_f32) {
        packed_float<2>(w, i, [](float a, float b) { return a * b; });
    };
    HANDLER(v_pk_add_f32) {
        packed_float<2>(w, i, [](float a, float b) { return a + b; });
    };
    HANDLER(v_fma_mix_f32) { mixed_fma(w, i, Mix::full); };
    HANDLER(v_fma_mixlo_f16) { mixed_fma(w, i, Mix::low); };
    HANDLER(v_fma_mixhi_f16) { mixed_fma(w, i, Mix::high); };
    V2(v_ldexp_f32, F32, F32, I32, ldexp32(a, b));
    V1(v_trunc_f32, F32, F32, std::trunc(a));
    V1(v_ceil_f32, F32, F32, std::ceil(a));
    HANDLER(v_rndne_f32) {
        nearest_whole<kRound32>(
            w, [&] { map<F32, F32>(w, i, [](float a) { return __builtin_nearbyintf(a); }); });
    };
    V1(v_floor_f32, F32, F32, std::floor(a));
    V1(v_fract_f32, F32, F32, fract32(a));
    V1(v_exp_f32, F32, F32, exp2_lane(flushed(a)));
    V1(v_log_f32, F32, F32, log2_lane(flushed(a)));
    V1(v_exp_legacy_f32, F32, F32, exp2_lane(flushed(a)));
    V1(v_log_legacy_f32, F32, F32, log2_lane(flushed(a)));
    V1(v_rcp_f32, F32, F32, flushed(rcp_lane(flushed(a))));
    V1(v_rcp_iflag_f32, F32, F32, flushed(rcp_lane(flushed(a))));
    V1(v_rsq_f32, F32, F32, rsq_lane(flushed(a)));
    V1(v_sqrt_f32, F32, F32, __builtin_sqrtf(flushed(a)));
    V1(v_sin_f32, F32, F32, flushed(static_cast<float>(sin_turns(flushed(a)))));
    V1(v_cos_f32, F32, F32, flushed(static_cast<float>(cos_turns(flushed(a)))));
    V1(v_frexp_mant_f32, F32, F32, static_cast<float>(frexp_mantissa(a)));
    V1(v_frexp_exp_i32_f32, I32, F32, frexp_exponent(a));
    V3(v_cubeid_f32, F32, F32, F32, F32, cube_face(a, b, c).id);
    V3(v_cubesc_f32, F32, F32, F32, F32, cube_face(a, b, c).sc);
    V3(v_cubetc_f32, F32, F32, F32, F32, cube_face(a, b, c).tc);
    V3(v_cubema_f32, F32, F32, F32, F32, cube_face(a, b, c).ma);
    V3(v_div_fixup_f32, F32, F32, F32, F32, div_fixup32(a, b, c));
    HANDLER(v_div_fmas_f32) {
        if (w.mode & (kGprIndexing | kRound32)) [[unlikely]]
            return run_special(w, i, kRound32);
        Lanes ta, tb, tc, r;
        const bool flush = !(w.mode & kDenormIn32);
        const uint32_t *a = fetch(w, i, 0, flush, ta), *b = fetch(w, i, 1, flush, tb),
                       *c = fetch(w, i, 2, flush, tc);
        const uint64_t mask = scalar64(w, i.src[3]);
        for (int l = 0; l < kLanes; ++l) {
            // Scaled before the one rounding: the result may be subnormal.
            const float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
            const double scale = exponent32(z) > 127 ? 0x1p64 : 0x1p-64;
            r.v[l] = as_bits(mask >> l & 1 ? static_cast<float>(fma_to_odd(x, y, z) * scale)
                                           : __builtin_fmaf(x, y, z));
        }
        store_modified(w, i, r, Result::f32);
    };
    HANDLER(v_div_scale_f32) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes ta, tb, tc, r, out;
        const uint32_t *a = fetch(w, i, 0, false, ta), *b = fetch(w, i, 1, false, tb),
                       *c = fetch(w, i, 2, false, tc);
        for (int l = 0; l < kLanes; ++l) {
            bool flag;
            r.v[l] = as_bits(div_scale32(as_float(a[l]), as_float(b[l]), as_float(c[l]), flag));
            out.v[l] = flag ? ~0u : 0u;
        }
        const uint64_t mask = pack_mask(out) & w.exec();
        store_modified(w, i, r, Result::f32);
        w.set_pair(i.dst[1].index, mask);
    };

    // ---- double
    V2(v_add_f64, F64, F64, F64, a + b);
    V2(v_mul_f64, F64, F64, F64, a * b);
    V2(v_min_f64, F64, F64, F64, min64(a, b));
    V2(v_max_f64, F64, F64, F64, max64(a, b));
    V3(v_fma_f64, F64, F64, F64, F64, __builtin_fma(a, b, c));
    V3(v_fmac_f64, F64, F64, F64, Old<F64>, __builtin_fma(a, b, c));
    V2(v_ldexp_f64, F64, F64, I32, ldexp64(a, b));
    V1(v_trunc_f64, F64, F64, std::trunc(a));
    V1(v_ceil_f64, F64, F64, std::ceil(a));
    HANDLER(v_rndne_f64) {
        nearest_whole<kRound64>(
            w, [&] { map<F64, F64>(w, i, [](double a) { return __builtin_nearbyint(a); }); });
    };
    V1(v_floor_f64, F64, F64, std::floor(a));
    V1(v_fract_f64, F64, F64, fract64(a));
    V1(v_rcp_f64, F64, F64, 1.0 / a);
    V1(v_rsq_f64, F64, F64, static_cast<double>(1.0L / std::sqrt(static_cast<long double>(a))));
    V1(v_sqrt_f64, F64, F64, __builtin_sqrt(a));
    V1(v_frexp_mant_f64, F64, F64, frexp_mantissa(a));
    V1(v_frexp_exp_i32_f64, I32, F64, frexp_exponent(a));
    V2(v_trig_preop_f64, F64, F64, U32, trig_preop(a, b));
    V3(v_div_fixup_f64, F64, F64, F64, F64, div_fixup64(a, b, c));
    HANDLER(v_div_fmas_f64) {
        if (w.mode & (kGprIndexing | kRound64)) [[unlikely]]
            return run_special(w, i, kRound64);
        Lanes64 a, b, c, r;
        fetch_wide(w, i, 0, a);
        fetch_wide(w, i, 1, b);
        fetch_wide(w, i, 2, c);
        const uint64_t mask = scalar64(w, i.src[3]);
        for (int l = 0; l < kLanes; ++l) {
            const double x = as_double(a.v[l]), y = as_double(b.v[l]), z = as_double(c.v[l]);
            double d = __builtin_fma(x, y, z);
            if (mask >> l & 1) {
                const int scale = exponent64(z) > 1023 ? 128 : -128;
                const double scaled = ldexp64(d, scale);
                // A subnormal result is rounded in scaling, and only then.
                d = std::fabs(scaled) <= 0x1p-1022 ? ldexp64(fma_to_odd(x, y, z), scale) : scaled;
            }
            r.v[l] = as_bits(d);
        }
        store_double(w, i, r);
    };
    HANDLER(v_div_scale_f64) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes64 a, b, c, r;
        Lanes out;
        fetch_wide(w, i, 0, a);
        fetch_wide(w, i, 1, b);
        fetch_wide(w, i, 2, c);
        for (int l = 0; l < kLanes; ++l) {
            bool flag;
            r.v[l] =
                as_bits(div_scale64(as_double(a.v[l]), as_double(b.v[l]), as_double(c.v[l]), flag));
            out.v[l] = flag ? ~0u : 0u;
        }
        const uint64_t mask = pack_mask(out) & w.exec();
        store_double(w, i, r);
        w.set_pair(i.dst[1].index, mask);
    };

    // ---- half; values are floats until they are stored
    V2(v_add_f16, F16, F16, F16, a + b);
    V2(v_sub_f16, F16, F16, F16, a - b);
    V2(v_subrev_f16, F16, F16, F16, b - a);
    V2(v_mul_f16, F16, F16, F16, a * b);
    V2(v_min_f16, F16, F16, F16, min32(a, b));
    V2(v_max_f16, F16, F16, F16, max32(a, b));
    V3(v_min3_f16, F16Keep, F16, F16, F16, min32(min32(a, b), c));
    V3(v_max3_f16, F16Keep, F16, F16, F16, max32(max32(a, b), c));
    V3(v_med3_f16, F16Keep, F16, F16, F16, med32(a, b, c));
    V3(v_fma_f16, F16Keep, F16, F16, F16, fma_for_half(a, b, c));
    V3(v_fma_legacy_f16, F16, F16, F16, F16, fma_for_half(a, b, c));
    // Not fused: the product is rounded to half first.
    V3(v_mad_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_mad_legacy_f16, F16, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_mac_f16, F16Keep, F16, F16, Old<F16>, half_to_float(float_to_half(a * b)) + c);
    V3(v_madmk_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_madak_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V2(v_ldexp_f16, F16, F16, I16, ldexp32(a, b));
    V1(v_trunc_f16, F16, F16, std::trunc(a));
    V1(v_ceil_f16, F16, F16, std::ceil(a));
    V1(v_rndne_f16, F16, F16, __builtin_nearbyintf(a));
    V1(v_floor_f16, F16, F16, std::floor(a));
    V1(v_fract_f16, F16, F16, fract16(a));
    // Correct to 24 bits first; a second rounding can only matter where that lands on a midpoint.
    V1(v_exp_f16, F16, F16, exp2_lane(a));
    V1(v_log_f16, F16, F16, log2_lane(a));
    V1(v_rcp_f16, F16, F16, rcp_lane(a));
    V1(v_rsq_f16, F16, F16, rsq_lane(a));
    V1(v_sqrt_f16, F16, F16, __builtin_sqrtf(a));
    V1(v_sin_f16, F16, F16, static_cast<float>(sin_turns(a)));
    V1(v_cos_f16, F16, F16, static_cast<float>(cos_turns(a)));
    V1(v_frexp_mant_f16, F16, F16, static_cast<float>(frexp_mantissa(a)));
    V1(v_frexp_exp_i16_f16, I16, F16, frexp_exponent(a));
    V3(v_div_fixup_f16, F16Keep, F16, F16, F16, div_fixup(a, b, c));
    V3(v_div_fixup_legacy_f16, F16, F16, F16, F16, div_fixup(a, b, c));
    HANDLER(v_pk_fma_f16) {
        packed_half<3>(w, i, [](float a, float b, float c) { return fma_for_half(a, b, c); });
    };
    HANDLER(v_pk_add_f16) {
        packed_half<2>(w, i, [](float a, float b) { return a + b; });
    };
    HANDLER(v_pk_mul_f16) {
        packed_half<2>(w, i, [](float a, float b) { return a * b; });
    };
    HANDLER(v_pk_min_f16) {
        packed_half<2>(w, i, [](float a, float b) { return min32(a, b); });
    };
    HANDLER(v_pk_max_f16) {
        packed_half<2>(w, i, [](float a, float b) { return max32(a, b); });
    };
    HANDLER(v_pk_fmac_f16) {
        Inst three = i;
        three.src[2] = i.dst[0];
        three.src[2].type = Type::pkf16;
        for (Operand& o : three.src) o.op_sel_hi = true, o.neg_hi = o.neg;
        packed_half<3>(w, three, [](float a, float b, float c) { return fma_for_half(a, b, c); });
    };
}

inline void register_conversions(Handler* table) {
    V1(v_cvt_f32_i32, F32, I32, static_cast<float>(a));
    V1(v_cvt_f32_u32, F32, U32, static_cast<float>(a));
    V1(v_cvt_i32_f32, I32, F32, to_int(a));
    V1(v_cvt_u32_f32, U32, F32, to_unsigned(a));
    V1(v_cvt_rpi_i32_f32, I32, F32, to_int(std::floor(static_cast<double>(a) + 0.5)));
    V1(v_cvt_flr_i32_f32, I32, F32, to_int(std::floor(a)));
    V1(v_cvt_off_f32_i4, F32, U32, static_cast<float>(nibble(a, 0)) * 0.0625f);
    V1(v_cvt_f32_ubyte0, F32, U32, static_cast<float>(static_cast<int32_t>(a & 255)));
    V1(v_cvt_f32_ubyte1, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 8 & 255)));
    V1(v_cvt_f32_ubyte2, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 16 & 255)));
    V1(v_cvt_f32_ubyte3, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 24)));
    V1(v_cvt_f64_i32, F64, I32, static_cast<double>(a));
    V1(v_cvt_f64_u32, F64, U32, static_cast<double>(a));
    V1(v_cvt_i32_f64, I32, F64, to_int(a));
    V1(v_cvt_u32_f64, U32, F64, to_unsigned(a));
    V1(v_cvt_f32_f64, F32, F64, static_cast<float>(a));
    V1(v_cvt_f64_f32, F64, F32, static_cast<double>(a));
    V1(v_cvt_f16_f32, F16, F32, a);
    V1(v_cvt_f32_f16, F32, F16, quieted(a));
    V1(v_cvt_f16_u16, F16, U16, static_cast<float>(static_cast<int32_t>(a)));
    V1(v_cvt_f16_i16, F16, I16, static_cast<float>(a));
    V1(v_cvt_u16_f16, U16, F16,
       (a > 0.0f ? static_cast<uint32_t>(static_cast<int32_t>(lesser(a, 65535.0f))) : 0u));
    V1(v_cvt_i16_f16, I16, F16,
       (a == a ? static_cast<int32_t>(clamped(a, -32768.0f, 32767.0f)) : 0));
    V1(v_cvt_norm_i16_f16, U16, F16, norm16(a, true));
    V1(v_cvt_norm_u16_f16, U16, F16, norm16(a, false));
    V2(v_cvt_pknorm_i16_f32, U32, F32, F32, norm16(a, true) | norm16(b, true) << 16);
    V2(v_cvt_pknorm_u16_f32, U32, F32, F32, norm16(a, false) | norm16(b, false) << 16);
    V2(v_cvt_pknorm_i16_f16, U32, F16, F16, norm16(a, true) | norm16(b, true) << 16);
    V2(v_cvt_pknorm_u16_f16, U32, F16, F16, norm16(a, false) | norm16(b, false) << 16);
    V2(v_cvt_pkrtz_f16_f32, U32, F32, F32, float_to_half(a, 3) | float_to_half(b, 3) << 16);
    V3(v_cvt_pk_u8_f32, U32, F32, U32, U32,
       (c & ~(255u << 8 * (b & 3))) | to_byte(a) << 8 * (b & 3));
    HANDLER(v_cvt_pkaccum_u8_f32) {
        map<U32, F32, U32, Old<U32>>(w, i, [](float a, uint32_t b, uint32_t c) {
            return (c & ~(255u << 8 * (b & 3))) | to_byte(a) << 8 * (b & 3);
        });
    };
    V1(v_cvt_f32_fp8, F32, U32, from_8bit<3>(a & 255));
    V1(v_cvt_f32_bf8, F32, U32, from_8bit<2>(a & 255));
#define TWO_FLOATS(name, mantissa)                                                          \
    HANDLER(name) {                                                                         \
        map<U64, U32>(w, i, [](uint32_t a) {                                                \
            return static_cast<uint64_t>(as_bits(from_8bit<mantissa>(a & 255))) |           \
                   static_cast<uint64_t>(as_bits(from_8bit<mantissa>(a >> 8 & 255))) << 32; \
        });                                                                                 \
    }
    TWO_FLOATS(v_cvt_pk_f32_fp8, 3);
    TWO_FLOATS(v_cvt_pk_f32_bf8, 2);
#undef TWO_FLOATS
#define TO_8BIT(name, mantissa)                                   \
    HANDLER(name) {                                               \
        const bool saturate = w.mode & kFp16Overflow;             \
        map<U16Keep, F32, F32>(w, i, [=](float a, float b) {      \
            return to_8bit<mantissa>(a, saturate, false, 0) |     \
                   to_8bit<mantissa>(b, saturate, false, 0) << 8; \
        });                                                       \
    }
    TO_8BIT(v_cvt_pk_fp8_f32, 3);
    TO_8BIT(v_cvt_pk_bf8_f32, 2);
#undef TO_8BIT
    // Into the byte that op_sel[3:2] names.
#define TO_8BIT_RANDOM(name, mantissa)                                                          \
    HANDLER(name) {                                                                             \
        const bool saturate = w.mode & kFp16Overflow;                                           \
        Inst whole = i;                                                                         \
        const uint32_t shift = 8u * (2u * i.op_sel_dst + i.src[2].op_sel);                      \
        whole.op_sel_dst = false;                                                               \
        map<U32, F32, U32, Old<U32>>(w, whole, [=](float a, uint32_t b, uint32_t old) {         \
            return (old & ~(255u << shift)) | to_8bit<mantissa>(a, saturate, true, b) << shift; \
        });                                                                                     \
    }
    TO_8BIT_RANDOM(v_cvt_sr_fp8_f32, 3);
    TO_8BIT_RANDOM(v_cvt_sr_bf8_f32, 2);
#undef TO_8BIT_RANDOM
}

inline void register_compares(Handler* table) {
    CMP_INTEGER(i32, I32);
    CMP_INTEGER(u32, U32);
    CMP_INTEGER(i64, I64);
    CMP_INTEGER(u64, U64);
    CMP_INTEGER(i16, I16);
    CMP_INTEGER(u16, U16);
    CMP_FLOAT(f32, F32);
    CMP_FLOAT(f64, F64);
    CMP_FLOAT(f16, F16);
    CMP(class_f32, U32, U32, (has_class<8, 23>(a, b)));
    CMP(class_f64, U64, U32, (has_class<11, 52>(a, b)));
    CMP(class_f16, U16, U32, (has_class<5, 10>(a, b)));
}

inline void register_valu(Handler* table) {
    register_moves(table);
    register_integer(table);
    register_float(table);
    register_conversions(table);
    register_compares(table);
}

#undef HANDLER
#undef V1
#undef V2
#undef V3
#undef V2_CLAMP
#undef V3_CLAMP
#undef CMP
#undef CMP_INTEGER
#undef CMP_FLOAT

}  // namespace
}  // namespace emulator::VARIANT
