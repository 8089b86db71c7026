#include "check/in_flight.h"

#include <algorithm>
#include <bit>
#include <string>

#include "isa/text.h"

namespace emulator {
namespace {

bool covers(const Inst& inst, int bit) {
    const Operand& dst = inst.dst[0];
    const int first = dst.kind == Kind::scalar ? kVectorRegisters + dst.index : dst.index;
    return bit >= first && bit < first + dst.dwords;
}

// Whether two loads return in order of issue.
bool one_queue(const Inst& a, const Inst& b) {
    return a.unit == b.unit && (a.unit == Unit::vmem || a.unit == Unit::ds) &&
           a.format != Format::flat && b.format != Format::flat;
}

}  // namespace

void InFlight::mark(const Inst& inst, bool set) {
    const Operand& dst = inst.dst[0];
    if (!dst.dwords) return;
    const int first = dst.kind == Kind::scalar ? kVectorRegisters + dst.index : dst.index;
    for (int r = first; r < first + dst.dwords && r < kWords * 64; ++r) {
        if (set)
            flight_[r / 64] |= 1ull << r % 64;
        else
            flight_[r / 64] &= ~(1ull << r % 64);
    }
    if (set) any_ = true;
}

// After retiring: registers that another load in flight writes stay in flight.
void InFlight::settle() {
    if (twice_) {
        twice_ = false;
        each([&](const Inst& inst, const char*) {
            twice_ |= inst.dst[0].dwords != 0;
            mark(inst, true);
        });
    }
    uint64_t any = 0;
    for (uint64_t word : flight_) any |= word;
    any_ = any != 0;
}

void InFlight::check(const Wave& wave, const Inst& inst, const Info& in, Reporter& report) {
    for (const Touch& touch : in.touches) {
        uint64_t hit = flight_[touch.word] & touch.mask;
        for (; hit; hit &= hit - 1) {
            const int bit = touch.word * 64 + std::countr_zero(hit);
            const bool vector = bit < kVectorRegisters;
            const int index = vector ? bit : bit - kVectorRegisters;
            auto reads = [&](const std::vector<uint16_t>& list) {
                return std::find(list.begin(), list.end(), index) != list.end();
            };
            bool read = reads(vector ? in.vector_src : in.scalar_src);
            if (!vector)
                for (uint16_t mask : in.mask_src) read |= index == mask || index == mask + 1;
            if (!vector && in.rule == Rule::branch_vcc) read = true;
            if (!vector && in.relative && index == kM0) read = true;
            const Inst* by = nullptr;
            const char* wait = "";
            each([&](const Inst& other, const char* how) {
                if (!covers(other, bit)) return;
                if (!read && in.load && one_queue(inst, other)) {
                    twice_ = true;
                    return;
                }
                by = &other, wait = how;
            });
            if (!by) continue;
            report(wave, inst, "in-flight register", [&] {
                return register_name(vector, index) + (read ? " is read" : " is overwritten") +
                       " by " + to_string(inst) + " while " + to_string(*by) + " at +" +
                       hex(by->offset) + " may still write it: no wait has retired it (" + wait +
                       ")";
            });
            if (in.load || in.counts_smem) twice_ = true;
            return;
        }
    }
}

void InFlight::retire_vm(size_t left) {
    if (vm_.size() <= left && (left || flats_.empty())) return;
    while (vm_.size() > left) {
        const Flight flight = vm_.pop();
        if (flight.lds_op) retired_dma = flight.lds_op;
        mark(*flight.inst, false);
    }
    if (left == 0) {
        for (Flat& flat : flats_) flat.vm_done = true;
        retire_flats();
    }
    settle();
}

void InFlight::retire_flats() {
    for (size_t k = 0; k < flats_.size();) {
        if (flats_[k].vm_done && flats_[k].lgkm_done) {
            mark(*flats_[k].inst, false);
            flats_.erase(flats_.begin() + static_cast<std::ptrdiff_t>(k));
        } else {
            ++k;
        }
    }
}

void InFlight::retire_lgkm(size_t left) {
    bool changed = false;
    uint32_t latest = retired_lds;
    while (ds_.size() > left) {
        const Flight flight = ds_.pop();
        if (flight.lds_op) latest = flight.lds_op;
        mark(*flight.inst, false);
        changed = true;
    }
    if (left == 0) {
        for (const Inst* inst : smem_) mark(*inst, false);
        changed |= !smem_.empty() || !flats_.empty();
        smem_.clear();
        for (Flat& flat : flats_) {
            if (!flat.lgkm_done) latest = std::max(latest, flat.lds_op);
            flat.lgkm_done = true;
        }
        retire_flats();
    }
    // A number says that all before it are retired as well.
    for (const Flat& flat : flats_)
        if (flat.lds_op && !flat.lgkm_done) latest = std::min(latest, flat.lds_op - 1);
    retired_lds = std::max(retired_lds, latest);
    if (changed) settle();
}

void InFlight::issue(const Inst& inst, const Info& in, uint32_t lds_op, uint32_t dma_op) {
    if (in.counts_smem) {
        mark(inst, true);
        smem_.push_back(&inst);
        return;
    }
    if (in.flat) {
        flats_.push_back({&inst, lds_op, false, false});
        // Stores that no counter can tell from later ones are forgotten, as below.
        if (flats_.size() > 64 && !flats_[0].lds_op && !flats_[0].inst->dst[0].dwords)
            flats_.erase(flats_.begin());
    } else if (in.counts_vm) {
        vm_.push({&inst, dma_op});
        // The counter ends at 63: older stores have left it, and no wait speaks of them.
        while (vm_.size() > 64 && !vm_.begin()->lds_op && !vm_.begin()->inst->dst[0].dwords)
            vm_.pop();
    }
    if (in.counts_ds && !in.flat) ds_.push({&inst, lds_op});
    if (in.load) mark(inst, true);
}

uint32_t InFlight::first_lds() const {
    uint32_t first = 0;
    for (const Flight& flight : ds_)
        if (flight.lds_op && !first) first = flight.lds_op;
    for (const Flat& flat : flats_)
        if (flat.lds_op && !flat.lgkm_done && (!first || flat.lds_op < first)) first = flat.lds_op;
    return first;
}

uint32_t InFlight::first_dma() const {
    for (const Flight& flight : vm_)
        if (flight.lds_op) return flight.lds_op;
    return 0;
}

}  // namespace emulator
