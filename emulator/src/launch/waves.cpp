#include "launch/waves.h"

#include <string>

#include "isa/text.h"
#include "launch/scheduler.h"
#include "record/recorder.h"

namespace emulator {
namespace {

// The wave did what the machine cannot go on from.
struct Fault {
    const char* kind;
    std::string detail;
};

// Runs a wave until it waits, ends or has executed `budget` instructions; returns how many.
template <bool checked, bool counted, bool recorded>
uint64_t advance(Wave& wave, uint64_t budget) {
    const Inst* insts = wave.code->insts.data();
    const size_t size = wave.code->insts.size();
    uint64_t* executed = counted ? wave.counters->executed.data() : nullptr;
    uint64_t done = 0;
    while (done < budget) {
        const uint32_t pc = wave.pc;
        if (pc >= size) throw Fault{"left the code", "the program counter is outside the code"};
        const Inst& inst = insts[pc];
        wave.pc = pc + 1;
        if constexpr (counted) ++executed[pc];
        if constexpr (checked) wave.check->before(wave, inst);
        inst.run(wave, inst);
        if constexpr (recorded) wave.counters->recorder->executed(wave.id, pc, wave.pc != pc + 1);
        if constexpr (checked) wave.check->after(wave, inst);
        ++done;
        if (wave.status != Status::running) break;
    }
    wave.executed += done;
    return done;
}

using Advance = uint64_t (*)(Wave&, uint64_t);

template <bool checked>
Advance advance_for(const Counters* counters) {
    if (!counters) return advance<checked, false, false>;
    return counters->recorder ? advance<checked, true, true> : advance<checked, true, false>;
}

std::string place(const CodeObject* object, const Code& code, uint32_t pc) {
    if (pc >= code.insts.size()) return "outside the code";
    if (object) return object->describe(code.insts[pc].offset);
    return to_string(code.insts[pc]);
}

}  // namespace

bool run_waves(Workgroup& group, Checker* check, const CodeObject* object, const Options& options,
               Report& report, uint64_t& instructions) {
    const Counters* counters = group.waves.front()->counters;
    const Advance step = check ? advance_for<true>(counters) : advance_for<false>(counters);
    Scheduler scheduler(options.order, group.waves, group.linear_id);
    const Code& code = *group.waves.front()->code;
    Wave* current = nullptr;
    auto fail = [&](const std::string& kind, const std::string& detail) {
        Finding finding;
        finding.kind = kind;
        finding.detail = detail;
        const uint32_t pc = current ? current->pc - 1 : 0;
        if (pc < code.insts.size()) finding.offset = code.insts[pc].offset;
        finding.wave = current ? current->id : 0;
        finding.workgroup = group.linear_id;
        report.findings.add(finding);
    };
    uint64_t steps = 0;
    try {
        for (;;) {
            uint64_t quantum = 0;
            current = scheduler.next(quantum);
            if (!current) {
                bool waiting = false;
                for (Wave* wave : group.waves) waiting |= wave->status == Status::barrier;
                if (!waiting) break;
                // Every wave that has not ended waits at a barrier.
                if (check) check->release();
                for (Wave* wave : group.waves)
                    if (wave->status == Status::barrier) wave->status = Status::running;
                continue;
            }
            steps += step(*current, quantum);
            if (current->status == Status::barrier) {
                if (current->counters) ++current->counters->barriers;
                if (check) check->arrive(*current);
            } else if (current->status == Status::ended) {
                if (check) check->end(*current);
            }
            if (steps <= options.steps) continue;
            std::string where = "after " + std::to_string(steps) + " instructions of the workgroup";
            for (const Wave* wave : group.waves) {
                where += "; wave " + std::to_string(wave->id);
                if (wave->status == Status::ended)
                    where += " has ended";
                else if (wave->status == Status::barrier)
                    where += " waits behind " + place(object, code, wave->pc - 1);
                else
                    where += " is at " + place(object, code, wave->pc);
            }
            fail("hang", where);
            instructions += steps;
            return false;
        }
    } catch (const Fault& fault) {
        fail(fault.kind, fault.detail);
        instructions += steps;
        return false;
    }
    instructions += steps;
    return true;
}

void trap(Wave&, const Inst& inst) {
    throw Fault{"not emulated", std::string("instruction ") + inst.name};
}

}  // namespace emulator
