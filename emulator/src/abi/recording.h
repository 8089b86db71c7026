// What a thread's launches are to record, and the recording of its latest one.
#pragma once

#include <string>

#include "isa/decode.h"
#include "launch/options.h"
#include "launch/report.h"

namespace emulator {

// The options, with the workgroup that the calling thread wants recorded of a kernel (of bare code:
// an empty name).
Options recording(Options options, const std::string& kernel);

// Drops the latest recording, where the thread has not asked for one of certain kernels.
void forget_recording();
// Moves the report's recording, if it has one, to where lae_recording finds it.
void keep_recording(Report& report, const CodeObject& object, const Kernel& kernel);
void keep_recording(Report& report, const Code& code);  // of bare code

}  // namespace emulator
