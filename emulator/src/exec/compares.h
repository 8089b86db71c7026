// Comparisons and class tests to lane masks.
#pragma once

#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

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

}  // namespace
}  // namespace emulator::VARIANT
