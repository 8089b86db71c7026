#include "isa.h"

#if defined(LITEATTENTION_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace liteattention::cpu {
namespace {

#if defined(LITEATTENTION_X86)

bool HasAmxBf16() {
#if defined(LITEATTENTION_SOFT_TILES)
    return true;
#endif
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tile = (d >> 24) & 1, bf16 = (d >> 22) & 1;
    return tile && bf16;
}

// Linux hands out the 8 KiB of tile state only to a process that asks for it.
bool MayUseTiles() {
#if defined(LITEATTENTION_SOFT_TILES)
    return true;
#elif defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023;
    constexpr int kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#endif

std::vector<Isa> Detect() {
    std::vector<Isa> isas;
#if defined(LITEATTENTION_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (bf16 && HasAmxBf16() && MayUseTiles()) isas.push_back(Isa::kAmxBf16);
    if (bf16) isas.push_back(Isa::kAvx512Bf16);
    if (avx512) isas.push_back(Isa::kAvx512);
    if (avx2) isas.push_back(Isa::kAvx2);
#endif
    isas.push_back(Isa::kPortable);
    return isas;
}

}  // namespace

const std::vector<Isa>& AvailableIsas() {
    static const std::vector<Isa> isas = Detect();
    return isas;
}

}  // namespace liteattention::cpu
