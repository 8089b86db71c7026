#include "loader/code_object.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "isa/text.h"

namespace emulator {

const Kernel* CodeObject::kernel(const std::string& name) const {
    for (const Kernel& kernel : kernels_)
        if (kernel.name == name) return &kernel;
    return nullptr;
}

std::string CodeObject::describe(uint32_t offset) const {
    const Kernel* inside = nullptr;
    for (const Kernel& kernel : kernels_)
        if (kernel.entry <= offset) inside = &kernel;
    std::string text =
        (inside ? inside->name : "text") + "+" + hex(offset - (inside ? inside->entry : 0));
    const std::string where = line(offset);
    if (!where.empty()) text += " (" + where + ")";
    const int32_t index = code_.at(offset);
    if (index >= 0) text += ": " + to_string(code_.insts[index]);
    return text;
}

void CodeObject::bind(const Handler* handlers, Handler trap) {
    for (Inst& inst : code_.insts) {
        const Handler handler =
            inst.op == Op::unknown ? nullptr : handlers[static_cast<size_t>(inst.op)];
        inst.run = handler ? handler : trap;
    }
    for (Kernel& kernel : kernels_) {
        std::set<std::string> missing;
        for (const uint32_t index : reachable(kernel)) {
            const Inst& inst = code_.insts[index];
            if (inst.run == trap) missing.insert(inst.name);
            auto names = [&](const Operand& operand) {
                if (operand.kind != Kind::vector) return;
                const uint32_t end = operand.index % 256u + operand.dwords;
                uint32_t& highest = operand.index < 256 ? kernel.named_vgprs : kernel.named_agprs;
                highest = std::max(highest, end);
            };
            for (const Operand& operand : inst.dst) names(operand);
            for (const Operand& operand : inst.src) names(operand);
        }
        kernel.unimplemented.assign(missing.begin(), missing.end());
        if (kernel.named_agprs && kernel.named_vgprs > kernel.accum_offset())
            kernel.unified = unify(kernel);
    }
}

// A copy of the code in which AGPR n is VGPR accum_offset + n, as the hardware's one file has them.
// Only kernels that name a register by both names need it.
std::shared_ptr<const Code> CodeObject::unify(const Kernel& kernel) const {
    auto code = std::make_shared<Code>(code_);
    const auto move = [&](Operand& operand) {
        if (operand.kind == Kind::vector && operand.index >= 256)
            operand.index = static_cast<uint16_t>(operand.index - 256 + kernel.accum_offset());
    };
    for (const uint32_t index : reachable(kernel)) {
        for (Operand& operand : code->insts[index].dst) move(operand);
        for (Operand& operand : code->insts[index].src) move(operand);
    }
    return code;
}

std::vector<uint32_t> CodeObject::reachable(const Kernel& kernel) const {
    const size_t count = code_.insts.size();
    std::vector<bool> seen(count, false);
    std::vector<uint32_t> open;
    auto visit = [&](int64_t index) {
        if (index < 0 || index >= static_cast<int64_t>(count) || seen[index]) return;
        seen[index] = true;
        open.push_back(static_cast<uint32_t>(index));
    };
    visit(code_.at(kernel.entry));
    if (kernel.preload_dwords) visit(code_.at(kernel.entry + 256));
    while (!open.empty()) {
        const uint32_t index = open.back();
        open.pop_back();
        const Inst& inst = code_.insts[index];
        const std::string_view name = inst.name;
        visit(inst.target);
        // Calls and far branches: s_getpc_b64 and then s_add_u32 with the distance.
        if (name == "s_getpc_b64")
            for (uint32_t i = index + 1; i < count && i < index + 4; ++i) {
                const Inst& add = code_.insts[i];
                if (std::string_view(add.name) != "s_add_u32" || add.src[1].kind != Kind::constant)
                    continue;
                const int64_t to =
                    int64_t{inst.offset} + 4 + static_cast<int32_t>(add.src[1].value);
                if (to >= 0 && to < static_cast<int64_t>(text_bytes_)) visit(code_.at(to));
                break;
            }
        if (name != "s_endpgm" && name != "s_branch" && name != "s_setpc_b64") visit(index + 1);
    }
    std::vector<uint32_t> indices;
    for (uint32_t i = 0; i < count; ++i)
        if (seen[i]) indices.push_back(i);
    return indices;
}

}  // namespace emulator
