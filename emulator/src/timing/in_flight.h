// vmcnt and lgkmcnt of one wave.
#pragma once

#include <algorithm>
#include <deque>

namespace emulator::timing {

// Accesses under way. They retire in the order of their issue: one that is done early waits for
// those before it.
class InFlight {
   public:
    // Adds an access that is done at a time; returns when it retires.
    double add(double done) {
        last_ = std::max(last_, done);
        retire_.push_back(last_);
        return last_;
    }
    int left(double now) {
        while (!retire_.empty() && retire_.front() <= now) retire_.pop_front();
        return static_cast<int>(retire_.size());
    }

   private:
    std::deque<double> retire_;
    double last_ = 0;
};

}  // namespace emulator::timing
