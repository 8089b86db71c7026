// What the model knows of an instruction before it runs.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/decode.h"
#include "isa/registers.h"

namespace emulator::timing {

// What decides how an instruction issues.
enum class Class : uint8_t {
    scalar,
    vector,
    packed,  // two fp32 results
    trans,
    matrix,
    lds,
    memory,  // vector memory
    scalar_memory,
    wait,
    barrier,
    branch,
    nop,
    sleep,
    priority,
    end,
};

// A SIMD issues at most one instruction of each category per clk. Waits and the like belong to
// none.
enum class Category : uint8_t { vector, memory, scalar, lds, branch, none };
inline constexpr int kCategories = static_cast<int>(Category::none);

inline constexpr int kUncounted = 1 << 20;  // a wait that does not ask for a counter

struct Description {
    Class kind = Class::scalar;
    Category category = Category::none;
    std::vector<Span> reads, writes;
    Span accumulator{0, 0};  // matrix: C, where it is the registers that D is
    int passes = 0;          // matrix
    int immediate = 0;       // of s_nop, s_sleep, s_setprio
    int vector_count = kUncounted, lds_count = kUncounted;  // s_waitcnt: at most so many left
    uint8_t bytes = 4;                                      // of its encoding
    bool misaligned = false;                                // 8 bytes at PC % 8 = 4
    bool conditional = false;                               // a branch that may not be taken
    bool store = false, to_lds = false, flat = false;       // vector memory
    bool writes_scalar = false;                             // a vector instruction that does
};

// By instruction. `accum_offset`: which vector register the first AGPR is, 0 when not known.
std::vector<Description> describe(const Code& code, uint32_t accum_offset);

}  // namespace emulator::timing
