// What a running wave and its workgroup consist of.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "isa/inst.h"

namespace emulator {

class Checker;  // check/checker.h: the proofs made while running; absent with checks off
class Memory;   // memory.h: table of global allocations
struct Code;    // isa/decode.h
struct Workgroup;
struct Counters;  // count/counters.h

// Apertures of flat addresses: 4 GiB windows above every host address. The high halves are what
// src_shared_base and src_private_base read as.
inline constexpr uint64_t kSharedBase = 0x0001'0000'0000'0000;
inline constexpr uint64_t kPrivateBase = 0x0002'0000'0000'0000;

// MODE, bit 27: vector operands are indexed by M0 (s_set_gpr_idx_on).
inline constexpr uint32_t kGprIndexing = 1u << 27;

enum class Status : uint8_t { running, barrier, ended };

// One wave of 64 lanes. Key: (workgroup, wave id); owner: its Workgroup; lifetime: one launch.
struct alignas(64) Wave {
    uint32_t v[kVectorRegisters][kLanes];
    alignas(8) uint32_t s[kScalarRegisters];
    uint32_t pc = 0;  // index of the next instruction in code->insts
    bool scc = false;
    Status status = Status::running;
    uint32_t mode = 0;  // MODE register: FP_ROUND [3:0], FP_DENORM [7:4], DX10_CLAMP 8, IEEE 9
    uint16_t id = 0;    // wave number within the workgroup
    const Code* code = nullptr;
    Workgroup* group = nullptr;
    Memory* memory = nullptr;
    Checker* check = nullptr;      // null: checks off
    Counters* counters = nullptr;  // null: not counted
    uint8_t* scratch =
        nullptr;  // this wave's private memory: dword d of lane l at (d * 64 + l) * 4
    uint32_t scratch_bytes = 0;  // private segment size of one lane
    uint64_t executed = 0;       // instructions so far

    uint64_t exec() const { return pair(kExec); }
    uint64_t vcc() const { return pair(kVcc); }
    uint64_t pair(int index) const {
        uint64_t value;
        std::memcpy(&value, &s[index], sizeof value);
        return value;
    }
    void set_pair(int index, uint64_t value) { std::memcpy(&s[index], &value, sizeof value); }
};

// One workgroup. Owner: the thread that runs it; lifetime: from its first to its last instruction.
struct Workgroup {
    uint32_t id[3] = {0, 0, 0};
    uint64_t linear_id = 0;
    std::vector<uint8_t> lds;  // allocated size, bytes; accesses beyond read 0 and write nothing
    std::vector<Wave*> waves;
};

}  // namespace emulator
