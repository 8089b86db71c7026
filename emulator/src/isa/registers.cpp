#include "isa/registers.h"

#include <cstring>

namespace emulator {
namespace {

void add(std::vector<Span>& spans, const Operand& operand) {
    auto scalar = [&](int first, int count) { spans.push_back({kScalarBase + first, count}); };
    if (operand.kind == Kind::vector && operand.dwords)
        spans.push_back({operand.index, operand.dwords});
    if (operand.kind == Kind::scalar && operand.dwords) scalar(operand.index, operand.dwords);
    if (operand.kind != Kind::special) return;
    if (operand.index == 251) scalar(kVcc, 2);
    if (operand.index == 252) scalar(kExec, 2);
    if (operand.index == 253) scalar(kScc, 1);
}

bool starts_with(const char* text, const char* prefix) {
    return std::strncmp(text, prefix, std::strlen(prefix)) == 0;
}

bool reads_m0(const Inst& inst) {
    if (inst.lds || inst.gds) return true;
    for (const char* prefix : {"s_movrel", "s_sendmsg", "s_ttracedata", "v_interp", "ds_gws",
                               "ds_nop", "ds_ordered_count"})
        if (starts_with(inst.name, prefix)) return true;
    return std::strstr(inst.name, "_addtid_") != nullptr;
}

}  // namespace

Registers registers_of(const Inst& inst) {
    Registers out;
    auto reads = [&](int first, int count) { out.reads.push_back({kScalarBase + first, count}); };
    auto writes = [&](int first, int count) { out.writes.push_back({kScalarBase + first, count}); };
    for (const Operand& operand : inst.src) add(out.reads, operand);
    for (const Operand& operand : inst.dst) {
        add(out.writes, operand);
        if (inst.reads_dst) add(out.reads, operand);
    }
    if (inst.reads_scc) reads(kScc, 1);
    if (inst.writes_scc) writes(kScc, 1);
    if (inst.writes_exec) writes(kExec, 2);
    const bool vector = inst.format >= Format::vop1;
    if (vector || inst.writes_exec || starts_with(inst.name, "s_cbranch_exec")) reads(kExec, 2);
    if (starts_with(inst.name, "s_cbranch_vcc")) reads(kVcc, 2);
    if (reads_m0(inst)) reads(kM0, 1);
    if (inst.format == Format::scratch || inst.format == Format::flat) reads(kFlatScratch, 2);
    return out;
}

}  // namespace emulator
