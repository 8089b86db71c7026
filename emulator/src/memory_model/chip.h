// The memory side of an MI300X at the grain of blocks: which workgroup runs where, and what it
// reads comes from which level, with what delay. A model: nothing in it was measured by running it.
//
// Workgroup w belongs to XCD w % xcds. An XCD gives its workgroups, in order, to the slots of its
// compute units (`residency` each) as these become free. A workgroup reads equal-sized blocks one
// after the other and computes on each; the read of block i + prefetch is issued when the step on
// block i - 1 ends, and a step may begin `slack_clocks` before its block is complete, as one does
// that needs V later than K. Slots of one compute unit share its arithmetic, first come first
// served.
//
//   read -> L2 of the XCD      hit: l2_latency, at cu_rate
//           Infinity Cache     miss in L2: cache_latency, at link_rate (per XCD), cache_rate (all)
//           HBM                miss in both: hbm_latency, and at hbm_rate (all)
//
// Rates are queues: a transfer waits for the one before it. A read of a block that is still under
// way waits for it and is counted as a hit on a miss. Steps and the delays of misses, queues
// included, vary by a stated share, drawn from a hash of (seed, workgroup, step), so that a run
// depends on its seed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct ChipParameters {
#define X(name) double name = -1;
#include "memory_model/parameters.def"
#undef X
};

// "name=value" lines; each parameter once. Throws std::invalid_argument with every problem.
ChipParameters chip_parameters(const std::string& text);

// Blocks first, first + stride, ..., count of them.
struct BlockReads {
    uint64_t first, stride;
    uint32_t count;
};

struct LevelCounts {
    uint64_t reads = 0, hits = 0, hits_on_miss = 0, misses = 0;
};

// What was counted between the start of workgroup `warm_up` and the end.
struct ChipCounts {
    double clocks = 0;            // of that window
    uint64_t steps = 0;           // computed in it
    double compute_clocks = 0;    // of all compute units together
    std::vector<LevelCounts> l2;  // by XCD
    LevelCounts cache;
    uint64_t started = 0;  // workgroups, from launch on
    bool whole = true;     // the launch ran to its end
};

// Runs a launch. With `stop_at_drain` it ends when the first XCD has no workgroup left to start:
// the list is then the beginning of a longer launch, of which the end would not be typical.
ChipCounts run_chip(const ChipParameters& chip, const BlockReads* workgroups, size_t count,
                    size_t warm_up, bool stop_at_drain);

}  // namespace emulator
