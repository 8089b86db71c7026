// Kernels and reports of launches as JSON.
#pragma once

#include <string>

#include "launch/report.h"

namespace emulator {

std::string kernel_json(const Kernel& kernel);

// [[offset, "file:line"], ...] of a code object, where a line begins.
std::string lines_json(const CodeObject& object);

// {"workgroups", "waves", "instructions", "threads", "seconds", "findings": [...],
//  "counters": {...}, "executed": [[offset, unit, name, times, lds phases, bank conflicts], ...],
//  "lds_extents": [[offset, first byte, byte behind the last], ...]}
// `object` and `kernel` may be null.
std::string report_json(const Report& report, const Code& code, const CodeObject* object,
                        const Kernel* kernel);

}  // namespace emulator
