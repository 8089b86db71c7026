// Words that the checks' messages share.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace emulator {

// "lane 3" or "lanes 0 to 15 (16)".
inline std::string lanes_text(uint64_t lanes) {
    const int first = std::countr_zero(lanes), last = 63 - std::countl_zero(lanes);
    if (first == last) return "lane " + std::to_string(first);
    return "lanes " + std::to_string(first) + " to " + std::to_string(last) + " (" +
           std::to_string(std::popcount(lanes)) + ")";
}

}  // namespace emulator
