// Runs a kernel over a grid: initial registers, interleaving of waves, barriers, host threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loader/code_object.h"
#include "count/counters.h"
#include "check/findings.h"
#include "check/global_races.h"
#include "machine/memory.h"
#include "machine/wave.h"

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

    // Sets the option of that name from text. Throws std::invalid_argument.
    void set(const std::string& name, const std::string& value);
    // LITEATTENTION_EMULATOR_CHECK, _COUNT, _THREADS, _ORDER, _VARIANT and _STEPS.
    static Options from_environment();
};

struct Launch {
    const CodeObject* object = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t grid[3] = {1, 1, 1};    // workgroups
    uint32_t block[3] = {1, 1, 1};   // work-items
    uint32_t dynamic_lds = 0;        // bytes
    std::vector<uint8_t> arguments;  // explicit ones, laid out as the kernel's metadata says
};

// What a launch did. Owner: the caller.
struct Report {
    Findings findings;
    Counters counters;
    bool checked = false;
    StoredBytes stored;  // to global memory; empty without checks
    uint64_t workgroups = 0, waves = 0, instructions = 0;
    double seconds = 0;  // host wall time
    unsigned threads = 0;

    // One line per finding, with kernel, place and instruction; "" without findings.
    std::string text(const CodeObject& object, const Kernel& kernel) const;
};

// Every reason why a launch cannot run, one per line; "" when it can.
std::string objections(const Launch& launch);

// Runs the whole grid and returns when it is done. `launch` must be without objections and its
// object bound. Memory may be shared by several launches at a time.
void run(const Launch& launch, Memory& memory, const Options& options, Report& report);

// One workgroup over bare code from its first instruction to s_endpgm, with registers given and
// returned: a bench for single instructions. Waves carry v, s, scc and mode on entry and exit.
void run_bare(const CodeObject* object, const Code& code, std::vector<Wave*> waves,
              std::vector<uint8_t>& lds, Memory& memory, const Options& options, Report& report);

// Handlers of a variant for CodeObject::bind, and the one for instructions without handler.
const Handler* handlers_of(const Options& options);
void trap(Wave& wave, const Inst& inst);

}  // namespace emulator
