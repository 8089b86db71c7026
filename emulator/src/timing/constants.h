// The model's constants by name; constants.def has their values, ranges and sources.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace emulator::timing {

inline constexpr int kSimds = 4, kMostWavesOfSimd = 8;

struct Constants {
#define CONSTANT(name, value, unit, low, high, source) double name = value;
#include "timing/constants.def"
#undef CONSTANT

    // From values in the order of the table. Throws std::invalid_argument for another number.
    static Constants of(std::span<const double> values);
};

struct Entry {
    const char *name, *unit, *source;
    double value, low, high;
};

const std::vector<Entry>& table();

}  // namespace emulator::timing
