// Memory that only one launch sees: its arguments and packets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "launch/launch.h"

namespace emulator {

class Range {
   public:
    Range(Memory& memory, const void* data, size_t bytes, Contents contents)
        : memory_(memory), begin_(reinterpret_cast<uint64_t>(data)) {
        memory_.add(begin_, bytes, contents);
    }
    ~Range() { memory_.remove(begin_); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

   private:
    Memory& memory_;
    uint64_t begin_;
};

// AQL kernel dispatch packet (HSA Platform System Architecture, 2.9.6).
struct DispatchPacket {
    uint16_t header, setup, workgroup_size[3], reserved0;
    uint32_t grid_size[3], private_bytes, lds_bytes;
    uint64_t kernel_object, kernarg, reserved1, completion_signal;
};
static_assert(sizeof(DispatchPacket) == 64);

// The kernarg segment: explicit arguments and those that the run-time adds (code object V5). A
// scalar load of three dwords may be widened to four, so that the segment ends on 16 bytes.
std::vector<uint8_t> kernarg_segment(const Launch& launch, uint64_t queue);

// Padding, and what nobody passed to a kernel without metadata of its arguments, stays undefined.
void mark_arguments(Memory& memory, const Launch& launch, uint64_t segment);

}  // namespace emulator
