// The LDS of one CU: 32 banks for all, and a path to each pair of SIMDs.
#pragma once

#include <array>

#include "record/recorder.h"
#include "timing/constants.h"

namespace emulator::timing {

class Lds {
   public:
    explicit Lds(const Constants& constants) : constants_(constants) {}

    bool refuses(int simd, double now) const {
        return path_free_[pair(simd)] - now > constants_.lds_backlog;
    }
    // Issues an access. Returns when its data is there.
    double issue(int simd, const Step& step, double now);
    // A copy from memory: the banks take it in phases of 128 bytes. Counted when it is issued, not
    // when it lands: the rate is the same.
    void copy(const Step& step, double now);

    double busy() const { return busy_; }  // clk of the banks

   private:
    static size_t pair(int simd) { return static_cast<size_t>(simd / 2); }

    const Constants& constants_;
    double busy_ = 0;
    std::array<double, 2> path_free_{};
};

}  // namespace emulator::timing
