// Picks the next wave of a workgroup and how long it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "launch/options.h"
#include "machine/wave.h"

namespace emulator {

// One per running workgroup.
class Scheduler {
   public:
    Scheduler(const Order& order, const std::vector<Wave*>& waves, uint64_t workgroup)
        : order_(order), waves_(waves), random_(order.seed * 0x9e3779b97f4a7c15 + workgroup) {}

    // Null when no wave can run.
    Wave* next(uint64_t& quantum);

   private:
    Wave* rotate(size_t begin, size_t end);
    Wave* ahead(size_t begin, size_t end, size_t other_begin, size_t other_end);

    Order order_;
    const std::vector<Wave*>& waves_;
    uint64_t random_;
    size_t last_ = SIZE_MAX;
    uint64_t since_other_ = 0;
};

}  // namespace emulator
