// The instruction handlers, compiled once per host instruction set.
#pragma once

#include <string>
#include <vector>

#include "isa/inst.h"

namespace emulator {

// Handlers by Op (null: not executed) for the best variant this processor has, or a named one:
// "avx512", "avx2", "portable". Throws std::invalid_argument for one that is not available.
const Handler* handlers(const std::string& variant = "");

// Ends the launch with a std::runtime_error; "#" in `what` stands for `number`. Not inline: a
// handler's file must not compile the standard library's functions (see exec_impl.h).
[[noreturn]] void fail(const char* what, int64_t number = 0);
[[noreturn]] void fail(const Inst& inst, const char* what, int64_t number = 0);

// Variants this build and processor offer, best first.
std::vector<std::string> variants();

}  // namespace emulator
