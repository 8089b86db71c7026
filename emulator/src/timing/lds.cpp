#include "timing/lds.h"

#include <algorithm>

namespace emulator::timing {

double Lds::issue(int simd, const Step& step, double now) {
    double& path = path_free_[pair(simd)];
    const bool shared = path_free_[1 - pair(simd)] > now;  // banks serve the pairs in turn
    const double start = std::max(now, path);
    const double phases = (step.phases + step.conflicts) * constants_.lds_phase;
    busy_ += phases;
    // Bytes leave while the banks go on: the slower of both decides.
    const double taken =
        std::max(step.bytes / constants_.lds_pair_bytes, phases * (shared ? 2 : 1));
    path = start + taken;
    const double there = path + constants_.lds_latency;
    return step.conflicts ? std::max(there, start + constants_.lds_conflict_latency) : there;
}

void Lds::copy(const Step& step, double now) {
    const double phases = (step.bytes + 127) / 128 * constants_.lds_phase;
    busy_ += phases;
    for (double& path : path_free_) path = std::max(path, now) + phases;
}

}  // namespace emulator::timing
