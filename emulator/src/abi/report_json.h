// Kernels and reports of launches as JSON.
#pragma once

#include <string>

#include "launch/report.h"

namespace emulator {

std::string kernel_json(const Kernel& kernel);

// {"workgroups", "waves", "instructions", "threads", "seconds", "findings": [...],
//  "counters": {...}, "executed": [[offset, unit, name, times, lds phases, bank conflicts], ...],
//  "lds_extents": [[offset, first byte, byte behind the last], ...]}
// `object` and `kernel` may be null.
std::string report_json(const Report& report, const Code& code, const CodeObject* object,
                        const Kernel* kernel);

}  // namespace emulator
