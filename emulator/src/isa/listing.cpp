#include "isa/listing.h"

#include <cstdio>

#include "isa/matrix.h"
#include "isa/registers.h"
#include "isa/text.h"

namespace emulator {
namespace {

const char* name_of(Format format) {
    static constexpr const char* names[] = {"sop1",  "sop2",  "sopk", "sopc",    "sopp",  "smem",
                                            "vop1",  "vop2",  "vopc", "vop3",    "vop3p", "ds",
                                            "mubuf", "mtbuf", "flat", "scratch", "global"};
    return names[static_cast<int>(format)];
}

// [first, count] pairs.
std::string pairs(const std::vector<Span>& spans) {
    std::string out = "[";
    for (const Span& span : spans) {
        if (out.size() > 1) out += ',';
        out += '[' + std::to_string(span.first) + ',' + std::to_string(span.count) + ']';
    }
    return out + ']';
}

void add_operands(std::string& out, const char* key, const Operand* operands, int count) {
    out += ",\"";
    out += key;
    out += "\":[";
    for (int i = 0; i < count; ++i) {
        const Operand& operand = operands[i];
        char text[48] = "null";
        switch (operand.kind) {
            case Kind::none:
                break;
            case Kind::vector:
                std::snprintf(text, sizeof text, "[\"v\",%d,%d]", operand.index, operand.dwords);
                break;
            case Kind::scalar:
                std::snprintf(text, sizeof text, "[\"s\",%d,%d]", operand.index, operand.dwords);
                break;
            case Kind::constant:
                std::snprintf(text, sizeof text, "[\"c\",%llu]",
                              static_cast<unsigned long long>(operand.value));
                break;
            case Kind::special:
                std::snprintf(text, sizeof text, "[\"x\",%d]", operand.index);
                break;
        }
        if (i) out += ',';
        out += text;
    }
    out += ']';
}

void add(std::string& out, const Inst& inst) {
    const Registers registers = registers_of(inst);
    char head[160];
    std::snprintf(head, sizeof head,
                  "{\"offset\":%u,\"bytes\":%d,\"known\":%s,\"target\":%d,\"imm\":%d,\"passes\":%d",
                  inst.offset, inst.bytes, inst.op == Op::unknown ? "false" : "true", inst.target,
                  inst.imm, matrix_passes(inst));
    out += head;
    out += ",\"name\":\"" + std::string(inst.name) + "\",\"text\":\"" + to_string(inst) +
           "\",\"format\":\"" + name_of(inst.format) + "\",\"unit\":\"" + name_of(inst.unit) + '"';
    add_operands(out, "dst", inst.dst, 2);
    add_operands(out, "src", inst.src, 5);
    out += ",\"reads\":" + pairs(registers.reads) + ",\"writes\":" + pairs(registers.writes) +
           ",\"flags\":[";
    const std::pair<bool, const char*> flags[] = {
        {inst.reads_dst, "reads_dst"},
        {inst.sdwa, "sdwa"},
        {inst.dpp, "dpp"},
        {inst.lds, "lds"},
        {inst.offen, "offen"},
        {inst.idxen, "idxen"},
        {inst.glc, "glc"},
        {inst.op_sel_dst || (inst.sdwa && inst.dst_sel != 6), "dst_sel"}};
    const char* separator = "\"";
    for (auto [set, name] : flags) {
        if (!set) continue;
        out += separator;
        out += name;
        out += '"';
        separator = ",\"";
    }
    out += "]}";
}

}  // namespace

const char* name_of(Unit unit) {
    static constexpr const char* names[] = {"salu", "wait",  "barrier", "branch", "smem",
                                            "valu", "trans", "mfma",    "ds",     "vmem"};
    return names[static_cast<int>(unit)];
}

std::string instructions_json(const Code& code) {
    std::string out = "[";
    out.reserve(code.insts.size() * 320);
    for (const Inst& inst : code.insts) {
        if (out.size() > 1) out += ",\n";
        add(out, inst);
    }
    return out + "]";
}

}  // namespace emulator
