// map() runs a function of one lane's values over 64 lanes in a plain loop that the compiler
// vectorises. The result goes straight to the VGPR when EXEC is all ones and nothing modifies it.
// Source and destination registers overlap only lane by lane, so in-place work is safe.
#pragma once

#include <cfenv>
#include <tuple>
#include <type_traits>
#include <utility>

#include "exec/results.h"

namespace emulator::VARIANT {
namespace {

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

// ---- handlers by one expression of sources a, b, c; D, A, B, C are operand types

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

}  // namespace
}  // namespace emulator::VARIANT
