#include "timing/vector_memory.h"

#include <algorithm>

namespace emulator::timing {
const double* L1::find(uint64_t line) {
    Set& set = set_of(line);
    const auto found = set.lines.find(line);
    if (found == set.lines.end()) return nullptr;
    set.order.splice(set.order.begin(), set.order, found->second.place);
    return &found->second.at;
}

void L1::fill(uint64_t line, double at) {
    Set& set = set_of(line);
    if (set.lines.size() >= ways_) {
        set.lines.erase(set.order.back());
        set.order.pop_back();
    }
    set.order.push_front(line);
    set.lines[line] = {at, set.order.begin()};
}

double VectorMemory::load_line(uint64_t line, double start) {
    if (const double* at = cache_.find(line)) {
        ++hits_;
        return std::max(*at, start + constants_.l1_latency);
    }
    ++misses_;
    const double asked = std::max(start, behind_free_);
    behind_free_ = asked + kLineBytes / constants_.l2_bytes;
    const double there = asked + constants_.l2_latency;
    cache_.fill(line, there);
    return there;
}

double VectorMemory::issue(const Description& inst, const Step& step,
                           std::span<const uint64_t> lines, double now) {
    const double taken = std::max(constants_.vmem_issue, step.bytes / constants_.l1_bytes);
    const double start = std::max(now, free_);
    free_ = start + taken;
    busy_ += taken;
    double done = start + (inst.store ? constants_.l2_latency : constants_.l1_latency);
    if (!inst.store)
        for (const uint64_t line : lines) done = std::max(done, load_line(line, start));
    done += taken - constants_.vmem_issue;  // the last bytes, where the latency is of the first
    return inst.to_lds ? done + constants_.lds_dma_latency : done;
}

}  // namespace emulator::timing
