// The vector port of one SIMD, its transcendental unit and its matrix core: what co-issues.
//
// Every vector instruction goes through the port. A matrix instruction leaves it after four clk and
// runs on, so that others hide behind it; a transcendental one holds it to its end. Packed fp32
// uses what the matrix core needs: beside another wave's matrix instruction it stretches that one,
// and its own wave's it waits for. Measured in streams of a million instructions (tingqli/pyhip,
// mfma-valu-coissue.md).
#pragma once

#include <array>
#include <cstdint>

#include "timing/account.h"
#include "timing/constants.h"
#include "timing/description.h"

namespace emulator::timing {

class VectorPorts {
   public:
    explicit VectorPorts(const Constants& constants) : constants_(constants) {}

    // Why an instruction of a wave cannot issue at `now`; Cause::none when it can.
    Cause refuses(const Description& inst, int wave, double now);
    // Issues it. Returns how long its wave issues nothing else.
    double issue(const Description& inst, int wave, double now);

    bool matrix_busy(double now) const { return matrix_free_ > now; }
    // clk by which packed instructions have stretched matrix ones so far.
    double stretched() const { return stretched_; }

   private:
    double issue_matrix(const Description& inst, int wave, double now);
    double issue_packed(const Description& inst, int wave, double now);
    double behind_trans(const Description& inst, int wave) const;
    void hold(Class kind, int wave, double until);

    const Constants& constants_;
    double port_free_ = 0, trans_free_ = 0, matrix_free_ = 0;
    // Behind a packed instruction: of any wave, of a wave's own.
    double matrix_allowed_ = 0;
    std::array<double, kMostWavesOfSimd * kSimds> matrix_allowed_of_wave_{};
    Class port_class_ = Class::vector;
    int port_wave_ = -1, matrix_wave_ = -1;
    int kept_waiting_ = -1;  // wave whose matrix instruction waits for another's packed one to end
    double stretched_ = 0;
};

}  // namespace emulator::timing
