// Operand fetch and result store of the vector instructions, and their scalar counterparts.
//
// A vector operation is a function of one lane's values; map() runs it over 64 lanes in a plain
// loop that the compiler vectorises. A source that is a plain VGPR is read in place, anything else
// (scalar, constant, neg, abs, op_sel, SDWA, DPP) is first written to a temporary of 64 lanes; the
// result goes straight to the VGPR when EXEC is all ones and nothing modifies it. Source and
// destination registers overlap only lane by lane, so in-place work is safe.
#pragma once

#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "isa/decode.h"
#include "exec/exec.h"
#include "machine/wave.h"

namespace emulator::VARIANT {
namespace {

#define LANE_LOOP _Pragma("GCC ivdep") for (int l = 0; l < kLanes; ++l)

inline constexpr uint64_t kAllLanes = ~0ull;

// MODE register fields.
inline constexpr uint32_t kRound32 = 0x3, kRound64 = 0xc;  // 0 nearest, 1 up, 2 down, 3 to zero
inline constexpr uint32_t kDenormIn32 = 0x10, kDenormOut32 = 0x20;
inline constexpr uint32_t kDenormIn64 = 0x40, kDenormOut64 = 0x80;  // of f16, too
inline constexpr uint32_t kDx10Clamp = 0x100, kIeee = 0x200;

struct alignas(64) Lanes {
    Lanes() {}  // not zeroed
    uint32_t v[kLanes];
};
struct alignas(64) Lanes64 {
    Lanes64() {}
    uint64_t v[kLanes];
};

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline double as_double(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint64_t as_bits(double value) { return std::bit_cast<uint64_t>(value); }

// c ? x : y where both are computed: what a branch would skip (a multiplication that may raise an
// exception flag) the compiler would not vectorise.
inline uint32_t pick(bool c, uint32_t x, uint32_t y) {
    const uint32_t mask = 0u - static_cast<uint32_t>(c);
    return (x & mask) | (y & ~mask);
}
inline float pick(bool c, float x, float y) { return as_float(pick(c, as_bits(x), as_bits(y))); }

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

inline constexpr uint32_t kFp16Overflow = 1u << 23;  // MODE: clamp instead of overflowing

// ---- scalar operands

inline uint64_t special_value(const Wave& w, const Operand& o) {
    const auto wide = [&](uint64_t base) { return o.dwords == 2 ? base : base >> 32; };
    switch (o.index) {
        case 235:
            return wide(kSharedBase);
        case 236:
            return wide(kSharedBase | 0xffffffffull);
        case 237:
            return wide(kPrivateBase);
        case 238:
            return wide(kPrivateBase | 0xffffffffull);
        case 251:
            return w.vcc() == 0;
        case 252:
            return w.exec() == 0;
        case 253:
            return w.scc;
        default:
            fail("source operand # does not exist on gfx942", o.index);
    }
}

inline uint32_t scalar32(const Wave& w, const Operand& o) {
    if (o.kind == Kind::scalar) return w.s[o.index];
    if (o.kind == Kind::constant) return static_cast<uint32_t>(o.value);
    return static_cast<uint32_t>(special_value(w, o));
}

inline uint64_t scalar64(const Wave& w, const Operand& o) {
    if (o.kind == Kind::scalar) return w.pair(o.index);
    if (o.kind == Kind::constant) return o.value;
    return special_value(w, o);
}

// ---- data parallel primitives

// Where each lane reads from: a lane, or -1 when that is out of bounds.
struct DppLanes {
    int8_t from[kLanes];
};
inline DppLanes dpp_lanes(uint32_t ctrl) {
    DppLanes lanes;
    const int n = static_cast<int>(ctrl & 15);
    const auto fill = [&](auto rule) {
        for (int l = 0; l < kLanes; ++l) lanes.from[l] = static_cast<int8_t>(rule(l, l & 15));
    };
    if (ctrl <= 0xff) {  // quad_perm
        fill([=](int l, int) { return (l & ~3) | static_cast<int>(ctrl >> 2 * (l & 3) & 3); });
        return lanes;
    }
    switch (ctrl >> 4) {
        case 0x10:  // row_shl
            fill([=](int l, int at) { return at + n <= 15 ? l + n : -1; });
            return lanes;
        case 0x11:  // row_shr
            fill([=](int l, int at) { return at >= n ? l - n : -1; });
            return lanes;
        case 0x12:  // row_ror
            fill([=](int l, int at) { return (l & ~15) | ((at - n) & 15); });
            return lanes;
        case 0x15:  // row_newbcast
            fill([=](int l, int) { return (l & ~15) | n; });
            return lanes;
        default:
            break;
    }
    switch (ctrl) {
        case 0x130:
            fill([](int l, int) { return l < 63 ? l + 1 : -1; });
            break;  // wave_shl
        case 0x134:
            fill([](int l, int) { return (l + 1) & 63; });
            break;  // wave_rol
        case 0x138:
            fill([](int l, int) { return l - 1; });
            break;  // wave_shr
        case 0x13c:
            fill([](int l, int) { return (l - 1) & 63; });
            break;  // wave_ror
        case 0x140:
            fill([](int l, int) { return l ^ 15; });
            break;  // row_mirror
        case 0x141:
            fill([](int l, int) { return l ^ 7; });
            break;  // row_half_mirror
        case 0x142:
            fill([](int l, int) { return (l & ~15) - 1; });
            break;  // row_bcast:15
        case 0x143:
            fill([](int l, int) { return l >= 32 ? 31 : -1; });
            break;  // row_bcast:31
        default:
            fill([](int, int) { return -1; });
            break;
    }
    return lanes;
}

// Lanes whose source lane exists and is active.
inline uint64_t dpp_valid(const DppLanes& lanes, uint64_t exec) {
    uint64_t valid = 0;
    for (int l = 0; l < kLanes; ++l) {
        const int from = lanes.from[l];
        valid |= (from >= 0 ? exec >> from & 1 : 0) << l;
    }
    return valid;
}

// Lanes that an instruction writes: EXEC, and for DPP those that its masks and bounds leave.
[[gnu::noinline]] inline uint64_t dpp_write_mask(const Wave& w, const Inst& i) {
    uint64_t mask = w.exec();
    for (int row = 0; row < 4; ++row) {
        if (!(i.row_mask >> row & 1)) mask &= ~(0xffffull << 16 * row);
        for (int bank = 0; bank < 4; ++bank)
            if (!(i.bank_mask >> bank & 1)) mask &= ~(0xfull << (16 * row + 4 * bank));
    }
    return i.bound_ctrl ? mask : mask & dpp_valid(dpp_lanes(i.dpp_ctrl), w.exec());
}

inline uint64_t write_mask(const Wave& w, const Inst& i) {
    return i.dpp ? dpp_write_mask(w, i) : w.exec();
}

inline void dpp_read(const Wave& w, const Inst& i, const uint32_t* from, uint32_t* to) {
    const DppLanes lanes = dpp_lanes(i.dpp_ctrl);
    const uint64_t valid = dpp_valid(lanes, w.exec());
    uint32_t copy[kLanes];  // `from` may be `to`
    std::memcpy(copy, from, sizeof copy);
    for (int l = 0; l < kLanes; ++l) to[l] = copy[lanes.from[l] & 63] & (0u - (valid >> l & 1));
}

// ---- source operands of one register

inline void broadcast(uint32_t* to, uint32_t value) { LANE_LOOP to[l] = value; }

inline uint32_t sign_bit(Type type) {
    return type == Type::f16 || type == Type::b16 ? 0x8000u : 0x80000000u;
}

inline uint32_t flush32(uint32_t bits) { return bits & 0x7f800000 ? bits : bits & 0x80000000; }

inline uint32_t select_sdwa(uint32_t bits, uint32_t sel, bool sext) {
    uint32_t shift = 0, width = 32;
    if (sel < 4)
        shift = 8 * sel, width = 8;
    else if (sel < 6)
        shift = 16 * (sel - 4), width = 16;
    if (width == 32) return bits;
    const uint32_t up = bits << (32 - width - shift);
    return sext ? static_cast<uint32_t>(static_cast<int32_t>(up) >> (32 - width))
                : up >> (32 - width);
}

// Everything but a plain VGPR. `flush`: subnormal single-precision inputs count as zero.
[[gnu::noinline]] inline const uint32_t* fetch_modified(const Wave& w, const Inst& i, int n,
                                                        bool flush, Lanes& t) {
    const Operand& o = i.src[n];
    const uint32_t sign = sign_bit(o.type);
    const uint32_t keep = o.abs ? ~sign : ~0u, flip = o.neg ? sign : 0u;
    if (o.kind != Kind::vector) {
        uint32_t bits = scalar32(w, o);
        if (i.sdwa) bits = select_sdwa(bits, o.sel, o.sext);
        if (o.op_sel) bits >>= 16;
        bits = (bits & keep) ^ flip;
        broadcast(t.v, flush ? flush32(bits) : bits);
        return t.v;
    }
    const uint32_t* from = w.v[o.index];
    if (i.dpp && n == 0) {
        dpp_read(w, i, from, t.v);
        from = t.v;
    } else if (i.sdwa && o.sel != 6) {
        const uint32_t sel = o.sel;
        const bool sext = o.sext;
        LANE_LOOP t.v[l] = select_sdwa(from[l], sel, sext);
        from = t.v;
    } else if (o.op_sel) {
        LANE_LOOP t.v[l] = from[l] >> 16;
        from = t.v;
    }
    if (flush) {
        LANE_LOOP t.v[l] = flush32((from[l] & keep) ^ flip);
    } else {
        LANE_LOOP t.v[l] = (from[l] & keep) ^ flip;
    }
    return t.v;
}

inline const uint32_t* fetch(const Wave& w, const Inst& i, int n, bool flush, Lanes& t) {
    const Operand& o = i.src[n];
    if (o.kind == Kind::vector && !(o.neg | o.abs | o.op_sel | i.sdwa | i.dpp | flush)) [[likely]]
        return w.v[o.index];
    return fetch_modified(w, i, n, flush, t);
}

// Half operands become floats.
[[gnu::noinline]] inline const uint32_t* fetch_half(const Wave& w, const Inst& i, int n, Lanes& t) {
    const uint32_t* bits = fetch(w, i, n, false, t);
    if (w.mode & kDenormIn64) {
        LANE_LOOP t.v[l] = as_bits(half_to_float(bits[l] & 0xffff));
    } else {
        LANE_LOOP t.v[l] =
            as_bits(half_to_float(bits[l] & 0x7c00 ? bits[l] & 0xffff : bits[l] & 0x8000));
    }
    return t.v;
}

// ---- source operands of two registers

[[gnu::noinline]] inline void fetch_wide(const Wave& w, const Inst& i, int n, Lanes64& t) {
    const Operand& o = i.src[n];
    const uint64_t keep = o.abs ? ~(1ull << 63) : ~0ull, flip = o.neg ? 1ull << 63 : 0ull;
    if (o.kind != Kind::vector) {
        const uint64_t bits = (scalar64(w, o) & keep) ^ flip;
        LANE_LOOP t.v[l] = bits;
        return;
    }
    const uint32_t *low = w.v[o.index], *high = w.v[o.index + 1];
    Lanes a, b;
    if (i.dpp && n == 0) {
        dpp_read(w, i, low, a.v);
        dpp_read(w, i, high, b.v);
        low = a.v;
        high = b.v;
    }
    LANE_LOOP t.v[l] = ((static_cast<uint64_t>(high[l]) << 32 | low[l]) & keep) ^ flip;
}

// ---- results

// to[l] = from[l] in the lanes of the mask.
inline void merge(uint32_t* to, const uint32_t* from, uint64_t mask) {
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
        uint32_t* const t = to + 32 * h;
        const uint32_t* const f = from + 32 * h;
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l) t[l] = (bits >> l & 1) ? f[l] : t[l];
    }
}

enum class Result : uint8_t { bits, f32, f16, b16, b16_keep, f16_keep };

// Clamp to [0, 1]; NaN becomes 0 when MODE.DX10_CLAMP is set.
inline float clamp01(float x, bool dx10) {
    const float r = x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
    return x != x && !dx10 ? x : r;
}

inline float output_scale(uint8_t omod) {
    return omod == 1 ? 2.0f : omod == 2 ? 4.0f : omod == 3 ? 0.5f : 1.0f;
}

// Result of 32 (or, in the low half, 16) bits per lane from `r` to the destination. Halves come as
// halves, already scaled and clamped.
[[gnu::noinline]] inline void store_modified(Wave& w, const Inst& i, Lanes& r, Result kind) {
    uint32_t* const to = w.v[i.dst[0].index];
    if (kind == Result::f32) {
        if (i.omod) {
            const float scale = output_scale(i.omod);
            LANE_LOOP r.v[l] = as_bits(as_float(r.v[l]) * scale);
        }
        if (i.clamp) {
            const bool dx10 = w.mode & kDx10Clamp;
            LANE_LOOP r.v[l] = as_bits(clamp01(as_float(r.v[l]), dx10));
        }
        if (!(w.mode & kDenormOut32)) {
            LANE_LOOP r.v[l] = flush32(r.v[l]);
        }
    }
    if (i.sdwa && i.dst_sel != 6) {
        const uint32_t width = i.dst_sel < 4 ? 8 : 16;
        const uint32_t shift = i.dst_sel < 4 ? 8u * i.dst_sel : 16u * (i.dst_sel - 4u);
        const uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
        for (int l = 0; l < kLanes; ++l) {
            const uint32_t bits = r.v[l] << shift & field;
            if (i.dst_unused == 2) {
                r.v[l] = (to[l] & ~field) | bits;
            } else if (i.dst_unused == 1) {  // sign above, zeros below
                const uint32_t up = bits << (32 - width - shift);
                r.v[l] = static_cast<uint32_t>(static_cast<int32_t>(up) >> (32 - width - shift)) &
                         ~((1u << shift) - 1);
            } else {
                r.v[l] = bits;
            }
        }
    } else if (kind == Result::b16_keep || kind == Result::f16_keep || i.op_sel_dst) {
        if (i.op_sel_dst) {
            LANE_LOOP r.v[l] = r.v[l] << 16 | (to[l] & 0xffff);
        } else {
            LANE_LOOP r.v[l] = (r.v[l] & 0xffff) | (to[l] & 0xffff0000);
        }
    }
    merge(to, r.v, write_mask(w, i));
}

// Floats to halves, scaled, clamped and rounded by MODE.
[[gnu::noinline]] inline void to_halves(const Wave& w, const Inst& i, Lanes& r) {
    if (i.omod) {
        const float scale = output_scale(i.omod);
        LANE_LOOP r.v[l] = as_bits(as_float(r.v[l]) * scale);
    }
    if (i.clamp) {
        const bool dx10 = w.mode & kDx10Clamp;
        LANE_LOOP r.v[l] = as_bits(clamp01(as_float(r.v[l]), dx10));
    }
    const uint32_t rounding = (w.mode & kRound64) >> 2;
    if (rounding == 0) {
        LANE_LOOP r.v[l] = float_to_half(as_float(r.v[l]));
    } else {
        for (int l = 0; l < kLanes; ++l) r.v[l] = float_to_half(as_float(r.v[l]), rounding);
    }
    if (!(w.mode & kDenormOut64)) {
        LANE_LOOP r.v[l] = r.v[l] & 0x7c00 ? r.v[l] : r.v[l] & 0x8000;
    }
}

[[gnu::noinline]] inline void store_wide(Wave& w, const Inst& i, const Lanes64& r) {
    const int index = i.dst[0].index;
    Lanes low, high;
    LANE_LOOP low.v[l] = static_cast<uint32_t>(r.v[l]);
    LANE_LOOP high.v[l] = static_cast<uint32_t>(r.v[l] >> 32);
    const uint64_t mask = write_mask(w, i);
    merge(w.v[index], low.v, mask);
    merge(w.v[index + 1], high.v, mask);
}

[[gnu::noinline]] inline void store_double(Wave& w, const Inst& i, Lanes64& r) {
    if (i.omod | i.clamp) {
        const double scale = output_scale(i.omod);
        const bool dx10 = w.mode & kDx10Clamp, clamp = i.clamp;
        for (int l = 0; l < kLanes; ++l) {
            double x = as_double(r.v[l]) * scale;
            if (clamp && (x == x || dx10)) x = x > 0 ? (x < 1 ? x : 1) : 0;
            r.v[l] = as_bits(x);
        }
    }
    if (!(w.mode & kDenormOut64))
        LANE_LOOP r.v[l] = r.v[l] & 0x7ff0000000000000ull ? r.v[l] : r.v[l] & 1ull << 63;
    store_wide(w, i, r);
}

// ---- lane masks

// Bit l = bit 31 of v[l].
inline uint64_t pack_mask(const Lanes& t) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    for (int c = 0; c < 4; ++c) {
        const __m512i x = _mm512_load_si512(t.v + 16 * c);
        mask |= static_cast<uint64_t>(_mm512_cmplt_epi32_mask(x, _mm512_setzero_si512())) << 16 * c;
    }
#elif defined(__AVX2__)
    for (int c = 0; c < 8; ++c) {
        const __m256 x = _mm256_load_ps(reinterpret_cast<const float*>(t.v + 8 * c));
        mask |= static_cast<uint64_t>(_mm256_movemask_ps(x)) << 8 * c;
    }
#else
    for (int l = 0; l < kLanes; ++l) mask |= static_cast<uint64_t>(t.v[l] >> 31) << l;
#endif
    return mask;
}

// v[l] = all ones where bit l is set.
inline void expand_mask(uint64_t mask, uint32_t* v) {
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l) v[32 * h + l] = 0u - (bits >> l & 1);
    }
}

// ---- operand types of map()

struct F32 {
    using Value = float;
    static constexpr bool wide = false, half = false, f32 = true;
    static constexpr Result result = Result::f32;
    static constexpr uint32_t special = kRound32;
    static float get(uint32_t x) { return as_float(x); }
    static uint32_t put(float x) { return as_bits(x); }
};
// Bits that no mode touches.
struct U32 {
    using Value = uint32_t;
    static constexpr bool wide = false, half = false, f32 = false;
    static constexpr Result result = Result::bits;
    static constexpr uint32_t special = 0;
    static uint32_t get(uint32_t x) { return x; }
    static uint32_t put(uint32_t x) { return x; }
};
struct I32 : U32 {
    using Value = int32_t;
    static int32_t get(uint32_t x) { return static_cast<int32_t>(x); }
    static uint32_t put(int32_t x) { return static_cast<uint32_t>(x); }
};
struct U16 : U32 {  // as a destination: upper half zero
    static constexpr Result result = Result::b16;
    static uint32_t get(uint32_t x) { return x & 0xffff; }
    static uint32_t put(uint32_t x) { return x & 0xffff; }
};
struct I16 : I32 {
    static constexpr Result result = Result::b16;
    static int32_t get(uint32_t x) { return static_cast<int16_t>(x); }
    static uint32_t put(int32_t x) { return static_cast<uint32_t>(x) & 0xffff; }
};
struct U16Keep : U16 {  // upper half of the destination kept
    static constexpr Result result = Result::b16_keep;
};
struct I16Keep : I16 {
    static constexpr Result result = Result::b16_keep;
};
// Values are floats, rounded to half once more when stored: the same as one rounding to nearest,
// but not always under a directed rounding of MODE. The destination's upper half becomes zero.
struct F16 {
    using Value = float;
    static constexpr bool wide = false, half = true, f32 = false;
    static constexpr Result result = Result::f16;
    static constexpr uint32_t special = 0;
    static float get(uint32_t x) { return as_float(x); }
    static uint32_t put(float x) { return as_bits(x); }
};
struct F16Keep : F16 {
    static constexpr Result result = Result::f16_keep;
};
struct U64 {
    using Value = uint64_t;
    static constexpr bool wide = true, half = false, f32 = false;
    static constexpr uint32_t special = 0;
    static uint64_t get(uint64_t x) { return x; }
    static uint64_t put(uint64_t x) { return x; }
};
struct I64 : U64 {
    using Value = int64_t;
    static int64_t get(uint64_t x) { return static_cast<int64_t>(x); }
    static uint64_t put(int64_t x) { return static_cast<uint64_t>(x); }
};
struct F64 {
    using Value = double;
    static constexpr bool wide = true, half = false, f32 = false;
    static constexpr uint32_t special = kRound64;
    static double get(uint64_t x) { return as_double(x); }
    static uint64_t put(double x) { return as_bits(x); }
};

// Modes under which an instruction takes the long way: its operands' registers are indexed by M0,
// or the rounding is not to nearest. Runs the handler again with that part of the mode dealt with.
[[gnu::noinline]] inline void run_special(Wave& w, const Inst& i, uint32_t rounding) {
    const uint32_t mode = w.mode;
    Inst copy = i;
    if (mode & kGprIndexing) {
        const uint32_t m0 = w.s[kM0];
        const auto move = [&](Operand& o, int bit) {
            if (o.kind == Kind::vector && (m0 >> bit & 1)) o.index = (o.index + (m0 & 255)) & 511;
        };
        for (int n = 0; n < 3; ++n) move(copy.src[n], 12 + n);
        move(copy.dst[0], 15);
    }
    static constexpr int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const uint32_t way = rounding == kRound32 ? mode & 3 : rounding == kRound64 ? mode >> 2 & 3 : 0;
    w.mode = mode & ~(kGprIndexing | rounding);
    if (way) std::fesetround(modes[way]);
    i.run(w, copy);
    if (way) std::fesetround(FE_TONEAREST);
    w.mode = mode;
}

// One more source: the destination's old value, as in map<F32, F32, F32, Old<F32>>.
template <class T>
struct Old : T {
    static constexpr bool old = true;
};
template <class T>
concept ReadsDestination = requires { T::old; };

template <class T>
using Temporary = std::conditional_t<T::wide, Lanes64, Lanes>;

template <class T>
struct Reader {
    const std::conditional_t<T::wide, uint64_t, uint32_t>* at;
    [[gnu::always_inline]] typename T::Value operator[](int l) const { return T::get(at[l]); }
};

template <class T>
[[gnu::always_inline]] inline Reader<T> reader(const Wave& w, const Inst& i, int n,
                                               Temporary<T>& t) {
    if constexpr (ReadsDestination<T>) {
        const uint32_t* const old = w.v[i.dst[0].index];
        if constexpr (T::wide) {
            const uint32_t* const high = w.v[i.dst[0].index + 1];
            LANE_LOOP t.v[l] = static_cast<uint64_t>(high[l]) << 32 | old[l];
            return {t.v};
        } else if constexpr (T::half) {
            LANE_LOOP t.v[l] = as_bits(half_to_float(old[l] & 0xffff));
            return {t.v};
        } else {
            if constexpr (T::f32) {
                if (!(w.mode & kDenormIn32)) [[unlikely]] {
                    LANE_LOOP t.v[l] = flush32(old[l]);
                    return {t.v};
                }
            }
            return {old};
        }
    } else if constexpr (T::wide) {
        fetch_wide(w, i, n, t);
        return {t.v};
    } else if constexpr (T::half) {
        return {fetch_half(w, i, n, t)};
    } else {
        return {fetch(w, i, n, T::f32 && !(w.mode & kDenormIn32), t)};
    }
}

template <class D, class... S, class F, size_t... N>
[[gnu::always_inline]] inline void map_indexed(Wave& w, const Inst& i, F f,
                                               std::index_sequence<N...>) {
    if (w.mode & (kGprIndexing | D::special)) [[unlikely]]
        return run_special(w, i, D::special);
    std::tuple<Temporary<S>...> temporaries;
    [&](auto... in) __attribute__((always_inline)) {
        if constexpr (D::wide) {
            Lanes64 r;
            LANE_LOOP r.v[l] = D::put(f(in[l]...));
            if constexpr (std::is_same_v<D, F64>)
                store_double(w, i, r);
            else
                store_wide(w, i, r);
        } else {
            Lanes r;
            bool direct = w.exec() == kAllLanes && !(i.sdwa | i.dpp | i.op_sel_dst);
            if constexpr (D::f32) direct = direct && !(i.clamp | i.omod) && (w.mode & kDenormOut32);
            if constexpr (D::half || D::result == Result::b16_keep) direct = false;
            uint32_t* const to = direct ? w.v[i.dst[0].index] : r.v;
            LANE_LOOP to[l] = D::put(f(in[l]...));
            if constexpr (D::half) to_halves(w, i, r);
            if (!direct) store_modified(w, i, r, D::result);
        }
    }(reader<S>(w, i, N, std::get<N>(temporaries))...);
}

template <class D, class... S, class F>
[[gnu::always_inline]] inline void map(Wave& w, const Inst& i, F f) {
    map_indexed<D, S...>(w, i, f, std::index_sequence_for<S...>{});
}

}  // namespace
}  // namespace emulator::VARIANT
