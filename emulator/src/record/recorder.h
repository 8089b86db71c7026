// What the waves of one workgroup executed, instruction by instruction.
//
// Handlers announce accesses to the counters, which pass them on; the loop that runs a wave then
// ends the step. A workgroup runs on one thread, one wave at a time, so one step is open at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace emulator {

// One executed wave instruction. Python reads it as liteattention_emulator.recording.STEP.
struct Step {
    uint32_t index = 0;      // of the instruction in its code
    uint32_t bytes = 0;      // moved to or from global memory or LDS
    uint16_t lines = 0;      // global memory: so many of the stream's lines are this step's
    uint16_t phases = 0;     // LDS: without conflicts
    uint16_t conflicts = 0;  // LDS: further ones
    uint16_t taken = 0;      // 1: what ran next was not the following instruction
};
static_assert(sizeof(Step) == 16);

// Of one wave, in its order.
struct WaveStream {
    std::vector<Step> steps;
    std::vector<uint64_t> lines;  // of 128 bytes: address / 128, ascending within a step
};

// Key: one workgroup; owner: the report of its launch.
class Recorder {
   public:
    Recorder(uint64_t workgroup, size_t waves) : workgroup_(workgroup), streams_(waves) {}

    // Of the open step; an instruction may access the LDS twice (ds_read2).
    void lds(uint32_t bytes, int phases, int conflicts);
    void memory(uint32_t bytes, std::span<const uint64_t> lines);
    // Ends the step: a wave has executed the instruction at `index`.
    void executed(size_t wave, uint32_t index, bool taken);

    uint64_t workgroup() const { return workgroup_; }  // linear id in its grid
    const std::vector<WaveStream>& streams() const { return streams_; }

   private:
    uint64_t workgroup_;
    std::vector<WaveStream> streams_;
    Step open_;
    std::vector<uint64_t> lines_;
};

}  // namespace emulator
