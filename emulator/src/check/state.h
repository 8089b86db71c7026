// What the checks follow of one wave.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "check/in_flight.h"

namespace emulator {

inline constexpr uint64_t kAll = ~0ull;

// Key: the wave's id; owner: the checker.
struct State {
    uint64_t v[kVectorRegisters] = {};      // lanes that are defined
    uint32_t s[kScalarRegisters + 1] = {};  // bits that are defined; [kScc] all or none
    uint64_t loaded[16] = {};               // lanes whose k-th loaded dword is defined
    uint32_t lds_op = 0, dma_op = 0;        // numbers of the instruction being executed
    InFlight in_flight;
    // Numbers up to which this wave's LDS and DMA operations were retired at its arrival at the
    // barrier, and at the last barrier that was released.
    uint32_t arrived_lds = 0, arrived_dma = 0, passed_lds = 0, passed_dma = 0;
    uint32_t front_lds = 0, front_dma = 0;  // first not retired at the arrival, 0 when all were
    uint64_t barriers = 0;
    bool ended = false;
    std::vector<uint64_t> scratch;  // defined lanes by byte of the private segment

    uint64_t pair(int index) const { return static_cast<uint64_t>(s[index + 1]) << 32 | s[index]; }
    void set_pair(int index, uint64_t defined) {
        s[index] = static_cast<uint32_t>(defined);
        s[index + 1] = static_cast<uint32_t>(defined >> 32);
    }
};

using States = std::vector<std::unique_ptr<State>>;  // by wave id

}  // namespace emulator
