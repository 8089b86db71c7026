// The path of vector memory of one CU: address unit, L1, and what lies behind it.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "record/recorder.h"
#include "timing/constants.h"
#include "timing/description.h"

namespace emulator::timing {

// Least recently used lines of each set go first.
class L1 {
   public:
    L1(size_t lines, size_t sets) : ways_(lines / sets), sets_(sets) {}

    // When the line arrived or will arrive; null when it is not there.
    const double* find(uint64_t line);
    void fill(uint64_t line, double at);

   private:
    struct Line {
        double at;
        std::list<uint64_t>::iterator place;
    };
    struct Set {
        std::unordered_map<uint64_t, Line> lines;
        std::list<uint64_t> order;  // latest first
    };
    Set& set_of(uint64_t line) { return sets_[line % sets_.size()]; }

    size_t ways_;
    std::vector<Set> sets_;
};

inline constexpr double kLineBytes = 128;

class VectorMemory {
   public:
    explicit VectorMemory(const Constants& constants)
        : constants_(constants),
          cache_(static_cast<size_t>(constants.l1_lines), static_cast<size_t>(constants.l1_sets)) {}

    bool refuses(double now) const { return free_ - now > constants_.vmem_backlog; }
    // Issues an access. Returns when it is done.
    double issue(const Description& inst, const Step& step, std::span<const uint64_t> lines,
                 double now);

    uint64_t hits() const { return hits_; }
    uint64_t misses() const { return misses_; }
    double busy() const { return busy_; }  // clk of the address unit

   private:
    double load_line(uint64_t line, double start);

    const Constants& constants_;
    L1 cache_;
    double free_ = 0, behind_free_ = 0, busy_ = 0;
    uint64_t hits_ = 0, misses_ = 0;
};

}  // namespace emulator::timing
