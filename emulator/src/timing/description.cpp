#include "timing/description.h"

#include <algorithm>
#include <string_view>

#include "isa/matrix.h"

namespace emulator::timing {
namespace {

Class class_of(const Inst& inst) {
    const std::string_view name = inst.name;
    if (name == "s_nop" || name == "v_nop") return Class::nop;
    if (name == "s_sleep") return Class::sleep;
    if (name == "s_setprio") return Class::priority;
    if (name == "s_endpgm") return Class::end;
    if (name.starts_with("v_pk_") && name.ends_with("_f32")) return Class::packed;
    switch (inst.unit) {
        case Unit::salu:
            return Class::scalar;
        case Unit::wait:
            return Class::wait;
        case Unit::barrier:
            return Class::barrier;
        case Unit::branch:
            return Class::branch;
        case Unit::smem:
            return Class::scalar_memory;
        case Unit::valu:
            return Class::vector;
        case Unit::trans:
            return Class::trans;
        case Unit::mfma:
            return Class::matrix;
        case Unit::ds:
            return Class::lds;
        case Unit::vmem:
            return Class::memory;
    }
    return Class::scalar;
}

Category category_of(Class kind) {
    switch (kind) {
        case Class::vector:
        case Class::packed:
        case Class::trans:
        case Class::matrix:
            return Category::vector;
        case Class::memory:
            return Category::memory;
        case Class::scalar:
        case Class::scalar_memory:
            return Category::scalar;
        case Class::lds:
            return Category::lds;
        case Class::branch:
            return Category::branch;
        default:
            return Category::none;
    }
}

bool is_vector(const Span& span) { return span.first < kScalarBase; }

// s_waitcnt of gfx9: vmcnt in bits 3:0 and 15:14, lgkmcnt in 11:8; all ones ask for nothing.
void read_counts(const Inst& inst, Description& out) {
    if (std::string_view(inst.name) != "s_waitcnt") return;
    const int field = inst.imm & 0xffff;
    const int vector = (field & 15) | field >> 14 << 4, lds = field >> 8 & 15;
    if (vector != 63) out.vector_count = vector;
    if (lds != 15) out.lds_count = lds;
}

}  // namespace

std::vector<Description> describe(const Code& code, uint32_t accum_offset) {
    // AGPRs are the vector registers from accum_offset on, by another name.
    const auto unify = [&](Span& span) {
        if (accum_offset && span.first >= 256 && is_vector(span))
            span.first = span.first - 256 + static_cast<int>(accum_offset);
    };
    std::vector<Description> out;
    out.reserve(code.insts.size());
    for (const Inst& inst : code.insts) {
        Description& it = out.emplace_back();
        it.kind = class_of(inst);
        it.category = category_of(it.kind);
        it.bytes = inst.bytes;
        it.misaligned = inst.bytes == 8 && inst.offset % 8 == 4;
        it.immediate = inst.imm & 0xffff;
        it.passes = matrix_passes(inst);
        Registers registers = registers_of(inst);
        it.reads = std::move(registers.reads);
        it.writes = std::move(registers.writes);
        // Vector instructions have EXEC early: it delays none of them.
        if (it.kind != Class::scalar)
            std::erase_if(it.reads, [](const Span& s) { return s.first == kScalarBase + kExec; });
        for (Span& span : it.reads) unify(span);
        for (Span& span : it.writes) unify(span);
        if (it.kind == Class::matrix) {
            const Operand &d = inst.dst[0], &c = inst.src[2];
            if (c.kind == Kind::vector && c.index == d.index && c.dwords == d.dwords) {
                it.accumulator = {d.index, d.dwords};
                unify(it.accumulator);
            }
        }
        if (it.kind == Class::wait) read_counts(inst, it);
        if (it.kind == Class::branch)
            it.conditional = std::string_view(inst.name).starts_with("s_cbranch");
        if (it.kind == Class::memory) {
            it.to_lds = inst.lds;
            it.flat = inst.format == Format::flat;
            it.store = std::string_view(inst.name).find("store") != std::string_view::npos;
        }
        it.writes_scalar = it.category == Category::vector &&
                           std::any_of(it.writes.begin(), it.writes.end(),
                                       [](const Span& span) { return !is_vector(span); });
    }
    return out;
}

}  // namespace emulator::timing
