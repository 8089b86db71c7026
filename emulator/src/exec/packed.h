// Packed 16-bit integers, halves and floats, and fused multiply-adds of mixed precision.
#pragma once

#include "exec/float_functions.h"
#include "exec/integer.h"

namespace emulator::VARIANT {
namespace {

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

#define PK_FLOAT(name, packed, expression)                                                     \
    HANDLER(name) {                                                                            \
        packed(w, i, [](float a, float b, [[maybe_unused]] auto... c) { return expression; }); \
    }

inline void register_packed(Handler* table) {
    HANDLER(v_pk_mov_b32) { packed_move(w, i); };
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
    PK_FLOAT(v_pk_fma_f32, packed_float<3>, __builtin_fmaf(a, b, c...));
    PK_FLOAT(v_pk_mul_f32, packed_float<2>, a * b);
    PK_FLOAT(v_pk_add_f32, packed_float<2>, a + b);
    HANDLER(v_fma_mix_f32) { mixed_fma(w, i, Mix::full); };
    HANDLER(v_fma_mixlo_f16) { mixed_fma(w, i, Mix::low); };
    HANDLER(v_fma_mixhi_f16) { mixed_fma(w, i, Mix::high); };
    PK_FLOAT(v_pk_fma_f16, packed_half<3>, fma_for_half(a, b, c...));
    PK_FLOAT(v_pk_add_f16, packed_half<2>, a + b);
    PK_FLOAT(v_pk_mul_f16, packed_half<2>, a * b);
    PK_FLOAT(v_pk_min_f16, packed_half<2>, min32(a, b));
    PK_FLOAT(v_pk_max_f16, packed_half<2>, max32(a, b));
    HANDLER(v_pk_fmac_f16) {
        Inst three = i;
        three.src[2] = i.dst[0];
        three.src[2].type = Type::pkf16;
        for (Operand& o : three.src) o.op_sel_hi = true, o.neg_hi = o.neg;
        packed_half<3>(w, three, [](float a, float b, float c) { return fma_for_half(a, b, c); });
    };
}

}  // namespace
}  // namespace emulator::VARIANT
