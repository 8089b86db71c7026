#include "isa.h"

#if defined(LITEATTENTION_X86)
#include "host_features.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace liteattention::cpu {
namespace {

#if defined(LITEATTENTION_X86)

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
    HostFeatures host = DetectHostFeatures();
#if defined(LITEATTENTION_SOFT_TILES)
    host.amx_bf16 = host.avx512_bf16;
#endif
    if (host.amx_bf16 && MayUseTiles()) isas.push_back(Isa::kAmxBf16);
    if (host.avx512_bf16) isas.push_back(Isa::kAvx512Bf16);
    if (host.avx512) isas.push_back(Isa::kAvx512);
    if (host.avx2) isas.push_back(Isa::kAvx2);
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
