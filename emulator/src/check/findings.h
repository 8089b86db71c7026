// What the checkers found: one entry per kind and instruction, with a count.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace emulator {

struct Finding {
    std::string kind;     // e.g. "in-flight register", "LDS race", "out of bounds"
    std::string detail;   // what happened, with registers, addresses, lanes
    uint32_t offset = 0;  // of the instruction, bytes from the start of the text section
    uint32_t wave = 0;
    uint64_t workgroup = 0;
    uint64_t count = 1;  // further occurrences at the same instruction are only counted
};

// Key: one launch; owner: the launch; safe to add to from several threads.
class Findings {
   public:
    void add(Finding finding) {
        std::lock_guard lock(mutex_);
        auto [at, fresh] = by_place_.try_emplace({finding.kind, finding.offset}, finding);
        if (!fresh) ++at->second.count;
    }
    bool empty() const { return by_place_.empty(); }
    const std::map<std::pair<std::string, uint32_t>, Finding>& all() const { return by_place_; }

   private:
    std::mutex mutex_;
    std::map<std::pair<std::string, uint32_t>, Finding> by_place_;
};

}  // namespace emulator
