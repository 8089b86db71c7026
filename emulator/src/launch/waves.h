// Runs the waves of one workgroup.
#pragma once

#include <cstdint>

#include "check/checker.h"
#include "launch/options.h"
#include "launch/report.h"
#include "machine/wave.h"

namespace emulator {

// To their ends; false when the launch should stop. `check` and `object` may be null.
bool run_waves(Workgroup& group, Checker* check, const CodeObject* object, const Options& options,
               Report& report, uint64_t& instructions);

// Handler of instructions that have none: a finding, and the end of the launch.
void trap(Wave& wave, const Inst& inst);

}  // namespace emulator
