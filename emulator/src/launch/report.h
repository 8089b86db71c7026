// What a launch did.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "check/findings.h"
#include "check/global_races.h"
#include "count/counters.h"
#include "loader/code_object.h"
#include "record/recorder.h"

namespace emulator {

// Owner: the caller.
struct Report {
    Findings findings;
    Counters counters;
    bool checked = false;
    StoredBytes stored;  // to global memory; empty without checks
    uint64_t workgroups = 0, waves = 0, instructions = 0;
    double seconds = 0;  // host wall time
    unsigned threads = 0;
    std::unique_ptr<Recorder> recording;  // of the workgroup that was to be recorded, if it ran

    // One line per finding, with kernel, place and instruction; "" without findings.
    std::string text(const CodeObject& object, const Kernel& kernel) const;
};

}  // namespace emulator
