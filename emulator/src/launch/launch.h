// Runs a kernel over a grid.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isa/inst.h"
#include "launch/options.h"
#include "launch/report.h"
#include "loader/code_object.h"
#include "machine/memory.h"
#include "machine/wave.h"

namespace emulator {

struct Launch {
    const CodeObject* object = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t grid[3] = {1, 1, 1};    // workgroups
    uint32_t block[3] = {1, 1, 1};   // work-items
    uint32_t dynamic_lds = 0;        // bytes
    std::vector<uint8_t> arguments;  // explicit ones, laid out as the kernel's metadata says
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

}  // namespace emulator
