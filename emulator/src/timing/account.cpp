#include "timing/account.h"

namespace emulator::timing {

const char* name_of(Cause cause) {
    static constexpr const char* names[] = {
        "transcendental holds the port",
        "packed holds the port",
        "packed keeps the matrix core",
        "vector holds the port",
        "matrix issue holds the port",
        "operand from LDS",
        "operand from memory",
        "operand from the matrix core",
        "operand from a vector instruction",
        "operand from a scalar instruction",
        "transcendental work",
        "packed work",
        "vector work",
        "packed waits for the matrix core",
        "other wave issues",
        "LDS issue",
        "memory issue",
        "scalar work",
        "branch",
        "nop",
        "matrix issue",
        "wait for memory",
        "wait for LDS",
        "barrier",
        "ended",
    };
    static_assert(sizeof names / sizeof *names == kCauses);
    return names[static_cast<size_t>(cause)];
}

void Account::idle(const State* states, size_t count) {
    const State* blamed = states;
    for (size_t i = 1; i < count; ++i)
        if (states[i].cause < blamed->cause) blamed = states + i;
    if (blamed->cause < Cause::none)
        ++idle_[blamed->instruction][static_cast<size_t>(blamed->cause)];
}

}  // namespace emulator::timing
