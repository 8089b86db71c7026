// LDS races.
//
// Each operation on LDS has a number. What wave w did with number n is ordered before an access by
// another wave when w had retired n (lgkmcnt; vmcnt for LDS-DMA) at its arrival at the last barrier
// that both passed. Of writes, atomics and reads of one place at least one being a write (or a
// plain access against an atomic), unordered ones are a race; bytes count, so that neighbouring
// bytes of a dword do not. A wave's own LDS operations are in order among themselves, but LDS-DMA
// is not with them: its data needs vmcnt before a ds_read, and what it overwrites must have been
// read. Stores of the same bytes by several waves are none: compilers let all waves that hold a
// copy of a value store it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check/reporter.h"
#include "check/state.h"
#include "machine/wave.h"

namespace emulator {

enum class Use : uint8_t { read, write, dma, atomic };

// One per running workgroup. Owner: its checker.
class LdsRaces {
   public:
    LdsRaces(const Workgroup& group, const States& states, Reporter& report)
        : group_(group), states_(states), report_(report) {}

    // Before the first access.
    void make(size_t bytes);
    // The number of a new operation: of those that lgkmcnt counts (one for both halves of read2 and
    // write2), and of LDS-DMA.
    uint32_t new_lds_op(const Wave& wave, State& st, const Inst& inst);
    uint32_t new_dma_op(const Wave& wave, const Inst& inst);
    // `size` bytes at address[l] of each lane l of `lanes`; `data` is the first data register of
    // them.
    void access(const Wave& wave, State& st, const Inst& inst, const uint32_t* address,
                uint64_t lanes, uint32_t size, Use use, uint32_t number, uint32_t data = 0);

    // A wave reaches s_barrier; all waves of the workgroup have; a wave ends.
    static void arrive(State& st);
    void release();
    static void end(State& st);

   private:
    struct Operation {
        uint16_t wave;
        const Inst* inst;
    };

    // Who last did what with a unit (dword or byte) of LDS: operations, 0 for never. `read` names
    // the wave only when all reads that are not yet ordered are its own, so that a wave that works
    // on data of its own between two barriers is told from sharing at a glance.
    struct Planes {
        std::vector<uint32_t> write, dma, atomic, read;     // latest of any wave
        std::vector<std::vector<uint32_t>> reads, atomics;  // latest by wave
        void make(size_t units, size_t waves) {
            write.assign(units, 0);
            dma.assign(units, 0);
            read.assign(units, 0);
            reads.assign(waves, std::vector<uint32_t>(units, 0));
        }
        void make_atomics(size_t waves) {
            atomic.assign(write.size(), 0);
            atomics.assign(waves, std::vector<uint32_t>(write.size(), 0));
        }
    };

    struct Conflict {
        uint32_t op = 0;
        bool dma = false;
        const char* did = "";
        bool own = false, stored = false;  // by this wave; by a plain store
    };

    static uint32_t new_op(std::vector<Operation>& ops, const Wave& wave, const Inst& inst);
    void make_bytes();
    void make_atomics();
    void forget(bool lds, bool dma);
    Conflict unordered(const Planes& p, size_t unit, Use use, const State& mine, uint16_t me) const;
    uint32_t joined(uint32_t before, uint32_t code) const;
    void record(Planes& p, size_t unit, Use use, uint32_t code, uint16_t me);
    void race(const Wave& wave, const Inst& inst, int lane, uint32_t address, Use use,
              const Conflict& found);
    void split(size_t dword);
    bool same_bytes(const Wave& wave, const Inst& inst, int lane, uint32_t address, uint32_t dword,
                    uint32_t from, uint32_t count) const;
    void access_slow(const Wave& wave, State& st, const Inst& inst, int lane, uint32_t address,
                     uint32_t size, Use use, uint32_t code, uint32_t data);
    template <int Each>
    bool access_quick(const uint32_t* dword, int count, Use use, uint32_t code, uint16_t me);

    const Workgroup& group_;
    const States& states_;
    Reporter& report_;
    bool bytes_ready_ = false, atomics_ready_ = false;
    Planes dwords_, bytes_;
    std::vector<Operation> lds_ops_{{}}, dma_ops_{{}};  // by number; 0 is none
    bool raced_ = false;
    uint32_t released_lds_ = 0, released_dma_ = 0;  // operations there were at the last barrier
    uint32_t safe_lds_ = 32, safe_dma_ = 32;  // table entries below are ordered before every access
};

}  // namespace emulator
