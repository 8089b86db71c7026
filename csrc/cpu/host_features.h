// Which vector instructions the processor has and the system saves, asked of them directly:
// __builtin_cpu_supports says no to everything where a compiler's run-time lacks the answer.
#pragma once

#include <cpuid.h>

namespace liteattention {

struct HostFeatures {
    bool avx2 = false;         // AVX2, FMA, F16C
    bool avx512 = false;       // also AVX-512 F, BW, DQ, VL
    bool avx512_bf16 = false;  // also AVX-512-BF16
    bool amx_bf16 = false;     // AMX-TILE and AMX-BF16; a process must also ask for their state
};

inline HostFeatures DetectHostFeatures() {
    HostFeatures found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    const auto all = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
    constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, kFma | kOsxsave | kAvx | kF16c)) return found;
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kYmmState = 0x6, kZmmState = 0xe6;
    if (!all(low, kYmmState) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    constexpr unsigned kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30,
                       kVl = 1u << 31;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    found.avx2 = all(b, kAvx2);
    found.avx512 = found.avx2 && all(low, kZmmState) && all(b, kF | kDq | kBw | kVl);
    const bool tiles = all(d, kAmxBf16 | kAmxTile);
    constexpr unsigned kBf16 = 1u << 5;
    found.avx512_bf16 = found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && all(a, kBf16);
    found.amx_bf16 = found.avx512_bf16 && tiles;
    return found;
}

}  // namespace liteattention
