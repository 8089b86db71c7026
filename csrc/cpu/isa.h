// Which instruction-set paths this processor can run.
#pragma once

#include <vector>

namespace liteattention::cpu {

enum class Isa { kAmxBf16, kAvx512Bf16, kAvx512, kAvx2, kPortable };

struct IsaName {
    Isa isa;
    const char* name;
};

inline constexpr IsaName kIsaNames[] = {
    {Isa::kAmxBf16, "amx_bf16"}, {Isa::kAvx512Bf16, "avx512_bf16"}, {Isa::kAvx512, "avx512"},
    {Isa::kAvx2, "avx2"},        {Isa::kPortable, "portable"},
};

// Paths of this build that this processor (and its operating system) can run, best first.
// Detected once per process; asks the kernel for the AMX tile registers as a side effect.
const std::vector<Isa>& AvailableIsas();

}  // namespace liteattention::cpu
