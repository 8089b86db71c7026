// The steps of a division. v_div_scale brings denominator and numerator where the refinement of a
// quotient neither over- nor underflows; the mask output makes v_div_fmas undo it: it multiplies by
// 2^64 (2^128 for double) when the quotient is large and divides by it when it is small. The
// manual's text has the wrong sign for a subnormal reciprocal with a subnormal quotient (scaling a
// denominator of 2^127 up would overflow) and gives v_div_fmas one direction only; here both are
// such that divisions come out right.
#pragma once

#include "exec/float_functions.h"
#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

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

inline void register_division(Handler* table) {
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

    V3(v_div_fixup_f16, F16Keep, F16, F16, F16, div_fixup(a, b, c));
    V3(v_div_fixup_legacy_f16, F16, F16, F16, F16, div_fixup(a, b, c));
}

}  // namespace
}  // namespace emulator::VARIANT
