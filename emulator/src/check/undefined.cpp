#include "check/undefined.h"

#include <bit>
#include <string>

#include "isa/text.h"

namespace emulator {
namespace {

void undefined(Reporter& report, const Wave& wave, const Inst& inst, const std::string& what) {
    report(wave, inst, "undefined value", [&] { return what + " (" + to_string(inst) + ")"; });
}

}  // namespace

void need_scalar(Reporter& report, const Wave& wave, State& st, const Inst& inst, int index,
                 const char* role) {
    if (st.s[index] == ~0u) return;
    undefined(report, wave, inst,
              register_name(false, index) + " is undefined and used as " + role);
    st.s[index] = ~0u;  // reported once; do not follow it further
}

void need_vector(Reporter& report, const Wave& wave, State& st, const Inst& inst, int index,
                 uint64_t lanes, const char* role) {
    const uint64_t bad = lanes & ~st.v[index];
    if (!bad) return;
    undefined(report, wave, inst,
              register_name(true, index) + " is undefined in " + lanes_text(bad) + " and used as " +
                  role);
    st.v[index] |= bad;
}

Bits bits_of(const Wave& wave, const State& st, const Operand& operand) {
    if (operand.kind == Kind::scalar) {
        if (operand.dwords == 2) return {wave.pair(operand.index), st.pair(operand.index)};
        return {wave.s[operand.index], st.s[operand.index] | ~0ull << 32};
    }
    if (operand.kind == Kind::constant) return {operand.value, kAll};
    if (operand.index == 253) return {wave.scc, st.s[kScc] ? kAll : 0};
    return {0, kAll};
}

void steer(Reporter& report, const Wave& wave, State& st, const Inst& inst) {
    need_scalar(report, wave, st, inst, kExec, "the lanes to execute");
    need_scalar(report, wave, st, inst, kExec + 1, "the lanes to execute");
}

uint64_t data_defined(const State& st, const Inst& inst, uint32_t dword, uint32_t count,
                      bool atomic) {
    uint64_t good = kAll;
    auto take = [&](const Operand& data, uint32_t from, uint32_t to) {
        for (uint32_t k = from; k < to && k < data.dwords; ++k) good &= st.v[data.index + k];
    };
    if (atomic) {
        take(inst.src[1], 0, 64);
        take(inst.src[2], 0, 64);
        return good;
    }
    const uint32_t first = inst.src[1].dwords;
    if (dword < first)
        take(inst.src[1], dword, dword + count);
    else
        take(inst.src[2], dword - first, dword - first + count);
    return good;
}

}  // namespace emulator
