#include "timing/lds.h"

#include <algorithm>

#include "isa/inst.h"

namespace emulator::timing {
namespace {

constexpr int kExchangeBytes = 4 * kLanes, kExchangePhases = 2;

}  // namespace

double Lds::issue(int simd, const Step& step, double now) {
    double& path = path_free_[pair(simd)];
    const bool shared = path_free_[1 - pair(simd)] > now;  // banks serve the pairs in turn
    const double start = std::max(now, path);
    // Exchanges between lanes touch no bytes of the LDS: they pass as a dword of every lane.
    const bool exchange = step.bytes == 0;
    const double bytes = exchange ? kExchangeBytes : step.bytes;
    const double phases =
        (exchange ? kExchangePhases : step.phases + step.conflicts) * constants_.lds_phase;
    busy_ += phases;
    // Bytes leave while the banks go on: the slower of both decides.
    const double taken = std::max(bytes / constants_.lds_pair_bytes, phases * (shared ? 2 : 1));
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
