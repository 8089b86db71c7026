// What a launch executed.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "isa/decode.h"

namespace emulator {

class Recorder;  // record/recorder.h

// Key: one workgroup, summed over a launch; owner: the running thread.
struct Counters {
    // Executed wave instructions by position in the code; classes are summed up from this.
    std::vector<uint64_t> executed;
    // Extra LDS cycles by position in the code: phases * (ways - 1), CDNA3 banking (32 banks of 4
    // bytes).
    std::vector<uint64_t> bank_conflicts, lds_phases;
    // LDS bytes [low, high) that an instruction touched in any of its executions, by position;
    // copies from memory to LDS have them, too. Empty where low >= high.
    struct Extent {
        uint64_t low = ~0ull, high = 0;
        void include(uint64_t begin, uint64_t end);
    };
    std::vector<Extent> lds_extents;
    uint64_t lds_bytes = 0, global_load_bytes = 0, global_store_bytes = 0, smem_bytes = 0,
             lds_dma_bytes = 0, scratch_bytes = 0;
    // 128-byte lines asked of L1 by vector memory instructions, and distinct lines per instruction.
    uint64_t vmem_lines = 0;
    // Bytes of the 64-byte pieces of memory that vector loads of a workgroup touch, each piece once
    // per workgroup: what it asks of everything behind a cache that forgets nothing.
    uint64_t distinct_load_bytes = 0;
    uint64_t barriers = 0;  // s_barrier instructions, per wave
    uint64_t flops = 0;     // of MFMA, 2 per multiply-add
    // Told of each access while a workgroup is recorded, else null.
    Recorder* recorder = nullptr;

    // All zero, for a code's instructions.
    static Counters of(const Code& code);
    void add(const Counters& other);
    // Of the matrix instructions executed; once, at the end.
    void count_flops(const Code& code);
    // A workgroup begins: what it loads is distinct from what the one before it loaded.
    void begin_workgroup();

    // One access of an LDS instruction (read2 and write2 make two): phases and conflicts of its
    // banks.
    void count_lds(const Inst& inst, const uint32_t* address, uint64_t lanes, uint32_t bytes,
                   bool write);
    // One access of a vector memory instruction to global memory; load, store or both (atomic).
    void count_global(const uint64_t* address, uint64_t lanes, uint32_t bytes, bool load,
                      bool store);
    // A copy from memory to LDS: the dword of lane l goes to byte `to` + 4 l.
    void count_copy(const Inst& inst, uint32_t to, uint64_t lanes);

   private:
    std::unordered_map<uint64_t, uint64_t> touched_;  // of this workgroup: 4 KiB page -> its pieces
};

}  // namespace emulator
