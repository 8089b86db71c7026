// The checks made while a workgroup runs. Their rules stand in in_flight.h, lds_races.h,
// undefined.h and global_races.h; besides, accesses outside of their allocation, misaligned ones
// that fault, stores to what kernels may only read, and barriers that not all waves reach.
#pragma once

#include <cstdint>
#include <memory>

#include "check/findings.h"
#include "check/global_races.h"
#include "machine/wave.h"

namespace emulator {

class Memory;

// One per running workgroup. Owner: the thread that runs it; not shared.
class Checker {
   public:
    // `accesses`: where accesses to global memory are noted; may be null.
    Checker(Workgroup& group, Memory& memory, Findings& findings, GlobalAccesses* accesses);
    ~Checker();

    // Registers a wave starts with: everything else is undefined until written.
    void define_scalar(Wave& wave, int first, int count);
    void define_vector(Wave& wave, int first, int count);
    // All of LDS holds values that the host put there.
    void define_lds();

    // Around every instruction: in-flight and undefined registers; LDS counters.
    void before(Wave& wave, const Inst& inst);
    void after(Wave& wave, const Inst& inst);

    // A wave reaches s_barrier; all waves of the workgroup have; a wave ends.
    void arrive(Wave& wave);
    void release();
    void end(Wave& wave);

    // Called by the memory handlers with the byte addresses of the active lanes. `dword` is the
    // first of the data registers that this access loads or stores (read2 and write2 make two
    // calls).
    void lds_access(Wave& wave, const Inst& inst, const uint32_t* address, uint64_t lanes,
                    uint32_t bytes, Access access, uint32_t dword = 0);
    // LDS-DMA: lane l writes one dword at lds_address + 4 l when its data arrives (vmcnt).
    void lds_dma(Wave& wave, const Inst& inst, uint32_t lds_address, uint64_t lanes);
    // Lanes whose access lies inside an allocation, one that may be written if it stores; the
    // others are reported and must be dropped.
    uint64_t global_access(Wave& wave, const Inst& inst, const uint64_t* address, uint64_t lanes,
                           uint32_t bytes, Access access, uint32_t dword = 0);
    // Private memory: byte offsets within a lane's segment; the lanes that lie inside.
    uint64_t scratch_access(Wave& wave, const Inst& inst, const uint32_t* address, uint64_t lanes,
                            uint32_t bytes, Access access, uint32_t dword = 0);
    // Scalar load of `dwords` at `address`: false when it is outside (and must be dropped).
    bool scalar_access(Wave& wave, const Inst& inst, uint64_t address, uint32_t dwords,
                       uint32_t dword = 0);
    // s_waitcnt: at most this many operations outstanding afterwards.
    void wait(Wave& wave, int vmcnt, int lgkmcnt, int expcnt);

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace emulator
