// Replays the recorded streams of workgroups on one CU: four SIMDs, wave i on SIMD i % 4.
//
// Trace-driven: what is executed is fixed, the model decides when. Each clk each SIMD issues at
// most one instruction per wave and one per category. Among its waves the higher s_setprio comes
// first, then the one that did not issue last: fitted to how two waves share a SIMD in the streams
// of tingqli/pyhip, mfma-valu-coissue.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "record/recorder.h"
#include "timing/account.h"
#include "timing/constants.h"
#include "timing/description.h"

namespace emulator::timing {

struct WaveSteps {
    std::span<const Step> steps;
    std::span<const uint64_t> lines;
    size_t workgroup = 0;  // from 0: whose barriers it meets
};

// The part of a replay that is accounted for: from when a wave issues its step `begin` until it
// issues `end` (its number of steps: to the end of the replay).
struct Window {
    size_t wave = 0, begin = 0, end = 0;
};

// Vector memory accesses that issued in a window: loads to registers and LDS.
struct Flight {
    double asked = 0, fetched = 0;  // bytes: by instructions, and of lines that miss L1
    double asked_clocks = 0, fetched_clocks = 0;  // times the clk until they are there
};

struct Result {
    int64_t clocks = 0;          // of the whole replay
    int64_t begin = 0, end = 0;  // of the window
    double matrix = 0;           // clk of the matrix instructions that issued in it, of all SIMDs
    double lds_busy = 0, address_busy = 0;  // of the whole replay
    uint64_t l1_hits = 0, l1_misses = 0;
    Flight flight;                             // of the window
    std::vector<std::vector<int64_t>> issued;  // by wave and step: the clk of issue
    Account account;
};

// Throws std::invalid_argument for streams that cannot be replayed (a step of no instruction,
// lines that are not there, more than 32 waves), std::runtime_error when it does not end.
Result replay(const std::vector<Description>& code, std::span<const WaveSteps> waves,
              const Window& window, const Constants& constants);

}  // namespace emulator::timing
