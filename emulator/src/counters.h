// What a launch executed.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "inst.h"

namespace emulator {

// Key: one workgroup, summed over a launch; owner: the running thread.
struct Counters {
    // Executed wave instructions by position in the code; classes are summed up from this.
    std::vector<uint64_t> executed;
    // Extra LDS cycles by position in the code: phases * (ways - 1), CDNA3 banking (32 banks of 4
    // bytes).
    std::vector<uint64_t> bank_conflicts, lds_phases;
    uint64_t lds_bytes = 0, global_load_bytes = 0, global_store_bytes = 0, smem_bytes = 0,
             lds_dma_bytes = 0, scratch_bytes = 0;
    // 128-byte lines asked of L1 by vector memory instructions, and distinct lines per instruction.
    uint64_t vmem_lines = 0;
    uint64_t barriers = 0;  // s_barrier instructions, per wave
    uint64_t flops = 0;     // of MFMA, 2 per multiply-add

    void add(const Counters& other);

    // One access of an LDS instruction (read2 and write2 make two): phases and conflicts of its
    // banks.
    void count_lds(const Inst& inst, const uint32_t* address, uint64_t lanes, uint32_t bytes,
                   bool write);
    // One access of a vector memory instruction to global memory; load, store or both (atomic).
    void count_global(const uint64_t* address, uint64_t lanes, uint32_t bytes, bool load,
                      bool store);
};

}  // namespace emulator
