// Hands what the checks of a workgroup find to the launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check/findings.h"
#include "machine/wave.h"

namespace emulator {

// One per running workgroup. Owner: its checker.
class Reporter {
   public:
    Reporter(const Workgroup& group, Findings& findings) : group_(group), findings_(findings) {}

    // Text is made for the first occurrence only; the others are counted.
    template <class Text>
    void operator()(const Wave& wave, const Inst& inst, const char* kind, Text&& text) {
        Finding finding;
        finding.kind = kind;
        finding.offset = inst.offset;
        finding.wave = wave.id;
        finding.workgroup = group_.linear_id;
        const auto key = std::make_pair(std::string(kind), inst.offset);
        if (std::find(reported_.begin(), reported_.end(), key) == reported_.end()) {
            reported_.push_back(key);
            finding.detail = text();
        }
        findings_.add(std::move(finding));
    }

   private:
    const Workgroup& group_;
    Findings& findings_;
    std::vector<std::pair<std::string, uint32_t>> reported_;  // kind, byte offset
};

}  // namespace emulator
