// What a thread's launches are to record, and the recording of its latest one.
#pragma once

#include "isa/decode.h"
#include "launch/options.h"
#include "launch/report.h"

namespace emulator {

// The options, with the workgroup that the calling thread wants recorded.
Options recording(Options options);

void forget_recording();
// Moves the report's recording, if it has one, to where lae_recording finds it.
void keep_recording(Report& report, const CodeObject& object, const Kernel& kernel);
void keep_recording(Report& report, const Code& code);  // of bare code

}  // namespace emulator
