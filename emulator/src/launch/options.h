// How launches run: checks, counters, host threads, order of waves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace emulator {

// Which wave of a workgroup runs next. Results of race-free kernels do not depend on it.
struct Order {
    enum class Kind : uint8_t { round_robin, random, first_ahead, last_ahead };
    Kind kind = Kind::round_robin;
    uint32_t quantum = 64;  // instructions in a row
    uint64_t seed = 0;

    // "round-robin", "round-robin:QUANTUM", "random:SEED", "first-ahead" or "last-ahead" (the lower
    // or upper half of the waves runs as far ahead as barriers permit). Throws
    // std::invalid_argument.
    static Order parse(const std::string& text);
};

struct Options {
    bool check = true;
    bool count = true;     // counters; the time they cost is small, but not nothing
    unsigned threads = 0;  // host threads that run workgroups; 0: one per host core
    Order order;
    std::string variant;  // of the instruction handlers; "" is the best one
    // Instructions that one workgroup may execute before it counts as hanging.
    uint64_t steps = uint64_t{1} << 32;
    // The workgroup whose instruction streams the report keeps, which needs the counters. The
    // launching thread sets it, not a name.
    std::optional<uint64_t> record;

    // Sets the option of that name from text. Throws std::invalid_argument.
    void set(const std::string& name, const std::string& value);
    // LITEATTENTION_EMULATOR_CHECK, _COUNT, _THREADS, _ORDER, _VARIANT and _STEPS.
    static Options from_environment();
};

}  // namespace emulator
