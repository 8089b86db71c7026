// Where the clocks of the matrix cores went in which they did no work of their own.
//
// In each clk that a SIMD's matrix core is idle, every wave of the SIMD is in some state. One of
// them gets the clk: a wave that has a matrix instruction ready or waiting for operands before one
// that does vector work, that before one that waits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator::timing {

// Why a wave issues nothing, in the order of blame: the first that applies to a wave of the SIMD.
enum class Cause : uint8_t {
    // a matrix instruction is next, and the vector port holds
    port_trans,
    port_packed,
    packed_ahead,  // a packed instruction that has just issued keeps the matrix core
    port_vector,
    port_matrix,  // another matrix instruction, not at its end yet
    // an operand is on its way
    needs_lds,
    needs_memory,
    needs_matrix,
    needs_vector,
    needs_scalar,
    // the wave works on something else
    trans,
    packed,
    vector,
    packed_behind,  // a packed instruction waits for the matrix core
    other_port,     // the SIMD issues for another wave
    lds_issue,      // LDS instructions, and their queue
    memory_issue,   // vector memory instructions, and their queue
    scalar,
    branch,
    nop,
    matrix,  // around a matrix instruction's own issue
    // the wave waits
    wait_memory,
    wait_lds,
    barrier,
    ended,
    // a matrix instruction takes longer for a packed one beside it
    stretch,
    none,
    matrix_busy,
};
inline constexpr size_t kCauses = static_cast<size_t>(Cause::none);

const char* name_of(Cause cause);

// Of one wave in one clk.
struct State {
    Cause cause = Cause::ended;
    uint32_t instruction = 0;
};

class Account {
   public:
    explicit Account(size_t instructions) : by_instruction_(instructions) {}

    // A matrix core was idle for `clocks`; the states of its SIMD's waves.
    void idle(const State* states, size_t count, double clocks);
    void add(const State& state, double clocks);

    // clk by instruction and cause.
    const std::vector<std::array<double, kCauses>>& by_instruction() const {
        return by_instruction_;
    }

   private:
    std::vector<std::array<double, kCauses>> by_instruction_;
};

}  // namespace emulator::timing
