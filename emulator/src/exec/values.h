// What all handlers stand on: a wave's 64 values of one operand, their bits, the fields of MODE.
#pragma once

#include <bit>
#include <cstdint>

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
inline constexpr uint32_t kDx10Clamp = 0x100;
inline constexpr uint32_t kFp16Overflow = 1u << 23;  // MODE: clamp instead of overflowing

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

// Begins the handler of an operation, a lambda of the wave `w` and the instruction `i`.
#define HANDLER(name)                      \
    table[static_cast<size_t>(Op::name)] = \
        []([[maybe_unused]] Wave& w, [[maybe_unused]] const Inst& i)

}  // namespace
}  // namespace emulator::VARIANT
