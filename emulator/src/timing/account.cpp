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
        "packed stretches matrix instructions",
    };
    static_assert(sizeof names / sizeof *names == kCauses);
    return names[static_cast<size_t>(cause)];
}

void Account::idle(const State* states, size_t count, double clocks) {
    const State* blamed = states;
    for (size_t i = 1; i < count; ++i)
        if (states[i].cause < blamed->cause) blamed = states + i;
    add(*blamed, clocks);
}

void Account::add(const State& state, double clocks) {
    if (state.cause < Cause::none)
        by_instruction_[state.instruction][static_cast<size_t>(state.cause)] += clocks;
}

}  // namespace emulator::timing
