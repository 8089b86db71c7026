#include "isa/listing.h"

#include <cstdio>
#include <cstring>

#include "isa/text.h"

namespace emulator {
namespace {

constexpr int kScalarBase = kVectorRegisters;

const char* name_of(Format format) {
    static constexpr const char* names[] = {"sop1",  "sop2",  "sopk", "sopc",    "sopp",  "smem",
                                            "vop1",  "vop2",  "vopc", "vop3",    "vop3p", "ds",
                                            "mubuf", "mtbuf", "flat", "scratch", "global"};
    return names[static_cast<int>(format)];
}

// Registers as [first, count] pairs, separated by commas.
class Registers {
   public:
    void add(int first, int count) {
        if (count <= 0) return;
        char pair[32];
        std::snprintf(pair, sizeof pair, "%s[%d,%d]", text_.empty() ? "" : ",", first, count);
        text_ += pair;
    }
    void add(const Operand& operand) {
        if (operand.kind == Kind::vector) add(operand.index, operand.dwords);
        if (operand.kind == Kind::scalar) add(kScalarBase + operand.index, operand.dwords);
        if (operand.kind == Kind::special && operand.index == 251) add(kScalarBase + kVcc, 2);
        if (operand.kind == Kind::special && operand.index == 252) add(kScalarBase + kExec, 2);
        if (operand.kind == Kind::special && operand.index == 253) add(kScalarBase + kScc, 1);
    }
    const std::string& text() const { return text_; }

   private:
    std::string text_;
};

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
    const bool vector = inst.format >= Format::vop1;
    Registers reads, writes;
    for (const Operand& operand : inst.src) reads.add(operand);
    for (const Operand& operand : inst.dst) {
        writes.add(operand);
        if (inst.reads_dst) reads.add(operand);
    }
    if (inst.reads_scc) reads.add(kScalarBase + kScc, 1);
    if (inst.writes_scc) writes.add(kScalarBase + kScc, 1);
    if (inst.writes_exec) writes.add(kScalarBase + kExec, 2);
    if (vector || inst.writes_exec || starts_with(inst.name, "s_cbranch_exec"))
        reads.add(kScalarBase + kExec, 2);
    if (starts_with(inst.name, "s_cbranch_vcc")) reads.add(kScalarBase + kVcc, 2);
    if (reads_m0(inst)) reads.add(kScalarBase + kM0, 1);
    if (inst.format == Format::scratch || inst.format == Format::flat)
        reads.add(kScalarBase + kFlatScratch, 2);

    char head[160];
    std::snprintf(head, sizeof head,
                  "{\"offset\":%u,\"bytes\":%d,\"known\":%s,\"target\":%d,\"imm\":%d", inst.offset,
                  inst.bytes, inst.op == Op::unknown ? "false" : "true", inst.target, inst.imm);
    out += head;
    out += ",\"name\":\"" + std::string(inst.name) + "\",\"text\":\"" + to_string(inst) +
           "\",\"format\":\"" + name_of(inst.format) + "\",\"unit\":\"" + name_of(inst.unit) + '"';
    add_operands(out, "dst", inst.dst, 2);
    add_operands(out, "src", inst.src, 5);
    out += ",\"reads\":[" + reads.text() + "],\"writes\":[" + writes.text() + "],\"flags\":[";
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
