// Registers in flight.
//
// A load's destination may be neither read nor overwritten before an s_waitcnt retired the load.
// vmcnt and the LDS part of lgkmcnt retire in order of issue, so that a later load of the same
// queue may overwrite; scalar loads return in any order, so that only lgkmcnt(0) retires them; flat
// operations take part in both counters and in the order of neither: only zeros retire them. Loads
// in flight at s_endpgm are no hazard: it waits for everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check/instruction.h"
#include "check/reporter.h"
#include "machine/wave.h"

namespace emulator {

// What the wait counters of one wave count. Key: its id; owner: the checker.
class InFlight {
   public:
    bool any() const { return any_; }
    // Reports an instruction that touches a register which a load in flight will write.
    void check(const Wave& wave, const Inst& inst, const Info& in, Reporter& report);
    // An instruction has been issued; its numbers among the LDS and LDS-DMA operations, 0 for none.
    void issue(const Inst& inst, const Info& in, uint32_t lds_op, uint32_t dma_op);
    // s_waitcnt: at most `left` operations of the counter outstanding afterwards.
    void retire_vm(size_t left);
    void retire_lgkm(size_t left);

    // Numbers up to which LDS and LDS-DMA operations are retired, and the first that are not (0:
    // all are).
    uint32_t retired_lds = 0, retired_dma = 0;
    uint32_t first_lds() const;
    uint32_t first_dma() const;

   private:
    // An operation that a counter still counts.
    struct Flight {
        const Inst* inst = nullptr;
        uint32_t lds_op = 0;  // its number among the LDS (ds) or LDS-DMA (vm) operations, or 0
    };

    // A flat one is in both counters. Memory and LDS answer it independently of other operations.
    struct Flat {
        const Inst* inst;
        uint32_t lds_op;
        bool vm_done, lgkm_done;
    };

    // First in, first out without moving elements.
    class Queue {
       public:
        size_t size() const { return items_.size() - head_; }
        void push(Flight flight) {
            if (head_ > 64 && head_ * 2 > items_.size()) {
                items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
                head_ = 0;
            }
            items_.push_back(flight);
        }
        Flight pop() { return items_[head_++]; }
        const Flight* begin() const { return items_.data() + head_; }
        const Flight* end() const { return items_.data() + items_.size(); }

       private:
        std::vector<Flight> items_;
        size_t head_ = 0;
    };

    static constexpr int kWords = (kVectorRegisters + kScalarRegisters) / 64;

    void mark(const Inst& inst, bool set);
    void settle();
    void retire_flats();
    template <class F>
    void each(F&& f) const {
        for (const Flight& flight : vm_) f(*flight.inst, "vmcnt");
        for (const Flight& flight : ds_) f(*flight.inst, "lgkmcnt");
        for (const Inst* inst : smem_) f(*inst, "lgkmcnt(0), scalar loads return in any order");
        for (const Flat& flat : flats_) f(*flat.inst, "vmcnt and lgkmcnt(0)");
    }

    uint64_t flight_[kWords] = {};  // registers that a load will write
    bool any_ = false, twice_ = false;
    Queue vm_, ds_;
    std::vector<const Inst*> smem_;
    std::vector<Flat> flats_;
};

}  // namespace emulator
