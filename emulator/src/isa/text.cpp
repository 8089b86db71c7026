#include "isa/text.h"

#include <bit>
#include <cstdio>

namespace emulator {

std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::string lanes_text(uint64_t lanes) {
    const int first = std::countr_zero(lanes), last = 63 - std::countl_zero(lanes);
    if (first == last) return "lane " + std::to_string(first);
    return "lanes " + std::to_string(first) + " to " + std::to_string(last) + " (" +
           std::to_string(std::popcount(lanes)) + ")";
}

std::string register_name(const Operand& operand) {
    if (operand.kind == Kind::constant) return hex(operand.value);
    if (operand.kind == Kind::special) {
        switch (operand.index) {
            case 235:
                return "src_shared_base";
            case 236:
                return "src_shared_limit";
            case 237:
                return "src_private_base";
            case 238:
                return "src_private_limit";
            case 251:
                return "src_vccz";
            case 252:
                return "src_execz";
            case 253:
                return "src_scc";
            default:
                return "src_" + std::to_string(operand.index);
        }
    }
    const bool pair = operand.dwords == 2;
    if (operand.kind == Kind::scalar) {
        auto special = [&](const char* name, int base) {
            return pair ? std::string(name)
                        : name + std::string(operand.index == base ? "_lo" : "_hi");
        };
        if (operand.index == kM0) return "m0";
        if (operand.index >= kExec) return special("exec", kExec);
        if (operand.index == kVcc || operand.index == kVcc + 1) return special("vcc", kVcc);
        if (operand.index == 102 || operand.index == 103) return special("flat_scratch", 102);
        if (operand.index == 104 || operand.index == 105) return special("xnack_mask", 104);
    }
    const bool acc = operand.kind == Kind::vector && operand.index >= 256;
    std::string file = operand.kind == Kind::scalar ? (operand.index >= 108 ? "ttmp" : "s")
                       : acc                        ? "a"
                                                    : "v";
    int first = operand.index - (acc ? 256 : 0);
    if (file == "ttmp") first -= 108;
    if (operand.dwords <= 1) return file + std::to_string(first);
    return file + "[" + std::to_string(first) + ":" + std::to_string(first + operand.dwords - 1) +
           "]";
}

std::string register_name(bool vector, int index) {
    if (!vector && index == kScc) return "scc";
    return register_name({.kind = vector ? Kind::vector : Kind::scalar,
                          .dwords = 1,
                          .index = static_cast<uint16_t>(index)});
}

std::string to_string(const Inst& inst) {
    std::string text = inst.name;
    const char* separator = " ";
    auto add = [&](const Operand& operand) {
        if (operand.kind == Kind::none) return;
        std::string name = register_name(operand);
        if (operand.abs) name = "|" + name + "|";
        if (operand.neg) name = "-" + name;
        text += separator + name;
        separator = ", ";
    };
    add(inst.dst[0]);
    if (inst.op != Op::v_swap_b32) add(inst.dst[1]);  // else it is the source
    for (const Operand& operand : inst.src) add(operand);
    return text;
}

}  // namespace emulator
