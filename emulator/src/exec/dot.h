// Dot products of the parts of two registers.
#pragma once

#include "exec/packed.h"

namespace emulator::VARIANT {
namespace {

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

inline void register_dot(Handler* table) {
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

}  // namespace
}  // namespace emulator::VARIANT
