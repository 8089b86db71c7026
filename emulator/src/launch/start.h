// Registers that a wave starts with.
#pragma once

#include <cstdint>

#include "launch/launch.h"

namespace emulator {

// What registers and LDS hold before they are written: NaN as f32, f16 and bf16, and no address.
inline constexpr uint32_t kPoison = 0xfff5fff5;

struct Dispatch {
    const Launch& launch;
    const Options& options;
    Memory& memory;
    Report& report;
    uint64_t kernarg, packet, queue;
    uint32_t work_items, wave_count, lds_bytes;
};

// Registers that a wave starts with; see "Initial Kernel Execution State" of LLVM's guide.
void start(Wave& wave, const Dispatch& dispatch, const Workgroup& group);

}  // namespace emulator
