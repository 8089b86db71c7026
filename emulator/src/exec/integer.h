// Integer arithmetic and bit operations of 16, 32 and 64 bits.
#pragma once

#include <limits>

#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

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

#define CARRY(name, carry_in, expression)                                                    \
    HANDLER(name) {                                                                          \
        with_carry(w, i, carry_in, [](uint64_t a, uint64_t b, [[maybe_unused]] uint64_t c) { \
            return expression;                                                               \
        });                                                                                  \
    }

inline uint32_t sum_of_differences(uint32_t a, uint32_t b, bool masked) {
    uint32_t sum = 0;
    for (int n = 0; n < 4; ++n) {
        const int32_t x = a >> 8 * n & 255, y = b >> 8 * n & 255;
        sum += masked && y == 0 ? 0u : static_cast<uint32_t>(x > y ? x - y : y - x);
    }
    return sum;
}

// f(a, b, c, d) puts the 64-bit result into d and returns the overflow in the sign bit.
template <class F>
[[gnu::always_inline]] inline void multiply_add_wide(Wave& w, const Inst& i, F f) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, out;
    Lanes64 c, r;
    const uint32_t* a = fetch(w, i, 0, false, ta);
    const uint32_t* b = fetch(w, i, 1, false, tb);
    fetch_wide(w, i, 2, c);
    LANE_LOOP out.v[l] = f(a[l], b[l], c.v[l], r.v[l]);
    const uint64_t mask = pack_mask(out) & w.exec();
    store_wide(w, i, r);
    w.set_pair(i.dst[1].index, mask);
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

inline void register_integer(Handler* table) {
    // ---- 32-bit arithmetic
    V2_CLAMP(v_add_u32, U32, U32, U32, a + b, sat_u32(static_cast<uint64_t>(a) + b));
    V2_CLAMP(v_sub_u32, U32, U32, U32, a - b, (a < b ? 0u : a - b));
    V2_CLAMP(v_subrev_u32, U32, U32, U32, b - a, (b < a ? 0u : b - a));
    V2_CLAMP(v_add_i32, I32, U32, U32, static_cast<int32_t>(a + b),
             sat_i32(static_cast<int64_t>(static_cast<int32_t>(a)) + static_cast<int32_t>(b)));
    V2_CLAMP(v_sub_i32, I32, U32, U32, static_cast<int32_t>(a - b),
             sat_i32(static_cast<int64_t>(static_cast<int32_t>(a)) - static_cast<int32_t>(b)));
    CARRY(v_add_co_u32, false, a + b);
    CARRY(v_sub_co_u32, false, a - b);
    CARRY(v_subrev_co_u32, false, b - a);
    CARRY(v_addc_co_u32, true, a + b + c);
    CARRY(v_subb_co_u32, true, a - b - c);
    CARRY(v_subbrev_co_u32, true, b - a - c);
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
        multiply_add_wide(w, i, [](uint32_t a, uint32_t b, uint64_t c, uint64_t& d) {
            const uint64_t product = static_cast<uint64_t>(a) * b;
            d = product + c;
            return d < product ? ~0u : 0u;
        });
    };
    HANDLER(v_mad_i64_i32) {
        multiply_add_wide(w, i, [](uint32_t a, uint32_t b, uint64_t c, uint64_t& d) {
            const auto product = static_cast<uint64_t>(
                static_cast<int64_t>(static_cast<int32_t>(a)) * static_cast<int32_t>(b));
            d = product + c;
            return static_cast<uint32_t>(((product ^ d) & (c ^ d)) >> 32);
        });
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
}

}  // namespace
}  // namespace emulator::VARIANT
