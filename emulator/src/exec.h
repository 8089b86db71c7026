// The instruction handlers, compiled once per host instruction set.
#pragma once

#include <string>
#include <vector>

#include "inst.h"

namespace emulator {

// Handlers by Op (null: not executed) for the best variant this processor has, or a named one:
// "avx512", "avx2", "portable". Throws std::invalid_argument for one that is not available.
const Handler* handlers(const std::string& variant = "");

// Variants this build and processor offer, best first.
std::vector<std::string> variants();

}  // namespace emulator
