// vmcnt and lgkmcnt of one wave.
#pragma once

#include <deque>

namespace emulator::timing {

// Accesses under way. They retire in the order of their issue: one that is done early waits for
// those before it.
class InFlight {
   public:
    void add(double done) { done_.push_back(done); }
    int left(double now) {
        while (!done_.empty() && done_.front() <= now) done_.pop_front();
        return static_cast<int>(done_.size());
    }

   private:
    std::deque<double> done_;
};

}  // namespace emulator::timing
