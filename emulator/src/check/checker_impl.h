// What the parts of the checker share.
#pragma once

#include <bit>
#include <cstddef>
#include <memory>
#include <vector>

#include "check/checker.h"
#include "check/instruction.h"
#include "check/lds_races.h"
#include "check/reporter.h"
#include "check/state.h"
#include "isa/decode.h"
#include "isa/text.h"
#include "machine/memory.h"

namespace emulator {

struct Checker::Impl {
    Workgroup& group;
    Memory& memory;
    GlobalAccesses* accesses;
    Reporter report;
    const Code* code = nullptr;
    std::vector<std::unique_ptr<Info>> infos;
    States states;
    const Info* info = nullptr;  // of the instruction being executed
    Inst moved;  // the instruction being executed, with the registers that M0 chose, and its Info
    Info moved_info;

    bool lds_given = false;  // its contents were put there by the host
    bool lds_ready = false;
    size_t lds_bytes = 0;
    std::vector<uint8_t> lds_defined;  // 0xff for each LDS byte that was written
    LdsRaces races;

    Impl(Workgroup& g, Memory& m, Findings& findings, GlobalAccesses* a)
        : group(g), memory(m), accesses(a), report(g, findings), races(g, states, report) {}

    State& state(const Wave& wave) {
        if (wave.id >= states.size()) states.resize(wave.id + 1u);
        auto& slot = states[wave.id];
        if (!slot) {
            slot = std::make_unique<State>();
            slot->s[kExec] = slot->s[kExec + 1] = ~0u;
        }
        return *slot;
    }

    const Info& info_of(const Wave& wave, const Inst& inst) {
        if (code != wave.code) {
            code = wave.code;
            infos.clear();
            infos.resize(code ? code->insts.size() : 0);
        }
        if (inst.index >= infos.size()) infos.resize(inst.index + 1u);
        auto& slot = infos[inst.index];
        if (!slot) slot = std::make_unique<Info>(describe(inst));
        return *slot;
    }

    void make_lds() {
        lds_ready = true;
        lds_bytes = group.lds.size();
        races.make(lds_bytes);
        lds_defined.assign(lds_bytes + 16, lds_given ? 0xff : 0);
    }

    void outside_lds(const Wave& wave, const Inst& inst, const char* does, const uint32_t* address,
                     uint64_t lanes);
    // Those of `lanes` whose address is no multiple of `bytes`, reported.
    template <class T>
    uint64_t misaligned(const Wave& wave, const Inst& inst, const char* place, const T* address,
                        uint64_t lanes, uint32_t bytes) {
        uint64_t bad = 0;
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            if (address[lane] % bytes) bad |= 1ull << lane;
        }
        if (bad)
            report(wave, inst, "misaligned", [&] {
                return to_string(inst) + place + hex(address[std::countr_zero(bad)]) + " in " +
                       lanes_text(bad);
            });
        return bad;
    }

    void move_operands(const Wave& wave, State& st, const Inst& inst, const Info& in);
    void before(const Wave& wave, const Inst& inst);
    void before(const Wave& wave, State& st, const Inst& inst, const Info& in);
    void after(const Wave& wave, const Inst& inst);
};

}  // namespace emulator
