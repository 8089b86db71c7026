#include "check/instruction.h"

#include <string_view>

namespace emulator {
namespace {

bool starts(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
}
bool ends(std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

Rule scalar_rule(std::string_view name) {
    // Without width suffix where both widths behave alike.
    std::string_view stem = name.substr(0, name.rfind('_'));
    if (ends(stem, "_saveexec")) stem = stem.substr(0, stem.size() - 9);
    if (ends(stem, "_wrexec")) stem = stem.substr(0, stem.size() - 7);
    if (name == "s_mov_b32" || name == "s_mov_b64" || name == "s_movk_i32") return Rule::copy;
    if (stem == "s_not") return Rule::negate;
    if (stem == "s_and" || stem == "s_nand") return Rule::bit_and;
    if (stem == "s_or" || stem == "s_nor") return Rule::bit_or;
    if (stem == "s_andn2" || stem == "s_andn1") return Rule::bit_andn2;
    if (stem == "s_orn2" || stem == "s_orn1") return Rule::bit_orn2;
    if (stem == "s_xor" || stem == "s_xnor") return Rule::bit_xor;
    if (stem == "s_lshl") return Rule::shift_left;
    if (stem == "s_lshr") return Rule::shift_right;
    if (stem == "s_cselect") return Rule::choose;
    if (starts(name, "s_bitcmp")) return Rule::test_bit;
    return Rule::scalar;
}

Halves halves_of(const Inst& inst) {
    const std::string_view name = inst.name;
    if (inst.dpp || inst.dst[0].dwords != 2) return Halves::both;
    for (const char* up : {"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64"})
        if (name == up) return Halves::upwards;
    if (name == "v_lshrrev_b64" || name == "v_ashrrev_i64") return Halves::downwards;
    if (name == "v_mov_b64") return Halves::apart;
    if (inst.dst[0].type == Type::pkf32 || name == "v_pk_mov_b32") return Halves::packed;
    return Halves::both;
}

}  // namespace

Info describe(const Inst& inst) {
    Info info;
    const std::string_view name = inst.name;
    auto touch = [&](int bit) {
        const uint8_t word = static_cast<uint8_t>(bit / 64);
        for (Touch& t : info.touches)
            if (t.word == word) {
                t.mask |= 1ull << bit % 64;
                return;
            }
        info.touches.push_back({word, 1ull << bit % 64});
    };
    auto touch_scalar = [&](int index) {
        if (index < kScalarRegisters) touch(kVectorRegisters + index);
    };
    auto scalars = [&](std::vector<uint16_t>& list, int first, int count) {
        for (int r = first; r < first + count && r < kScalarRegisters; ++r) {
            list.push_back(static_cast<uint16_t>(r));
            touch_scalar(r);
        }
    };
    auto vectors = [&](std::vector<uint16_t>& list, int first, int count) {
        for (int r = first; r < first + count && r < kVectorRegisters; ++r) {
            list.push_back(static_cast<uint16_t>(r));
            touch(r);
        }
    };

    for (const Operand& src : inst.src) {
        if (src.kind == Kind::vector) {
            vectors(info.vector_src, src.index, src.dwords);
        } else if (src.kind == Kind::scalar) {
            if (src.type == Type::m64 && inst.format >= Format::vop1) {
                info.mask_src.push_back(src.index);
                touch_scalar(src.index);
                touch_scalar(src.index + 1);
            } else {
                scalars(info.scalar_src, src.index, src.dwords);
            }
        } else if (src.kind == Kind::special) {
            if (src.index == 253) info.scalar_src.push_back(kScc);
            if (src.index == 251) scalars(info.scalar_src, kVcc, 2);
        }
    }
    for (const Operand& dst : inst.dst) {
        if (dst.kind == Kind::vector) {
            vectors(info.vector_dst, dst.index, dst.dwords);
        } else if (dst.kind == Kind::scalar) {
            if (dst.type == Type::m64 && inst.format >= Format::vop1) {
                info.mask_dst = dst.index;
                touch_scalar(dst.index);
                touch_scalar(dst.index + 1);
            } else {
                scalars(info.scalar_dst, dst.index, dst.dwords);
            }
        }
    }
    if (inst.reads_scc) info.scalar_src.push_back(kScc);
    if (inst.writes_scc) info.scalar_dst.push_back(kScc);

    switch (inst.unit) {
        case Unit::wait:
        case Unit::barrier:
            break;
        case Unit::branch:
            if (starts(name, "s_cbranch_scc")) {
                info.rule = Rule::branch_scc;
            } else if (starts(name, "s_cbranch_vcc")) {
                info.rule = Rule::branch_vcc;
                touch_scalar(kVcc);
                touch_scalar(kVcc + 1);
            } else if (starts(name, "s_cbranch_exec")) {
                info.rule = Rule::branch_exec;
            } else if (!info.scalar_src.empty() || !info.scalar_dst.empty()) {
                info.rule = Rule::jump;
            }
            break;
        case Unit::salu:
            info.saves_exec = name.find("saveexec") != std::string_view::npos;
            info.relative = starts(name, "s_movrel");
            if (info.relative) touch_scalar(kM0);
            info.rule = scalar_rule(name);
            if (inst.reads_dst)
                for (uint16_t r : info.scalar_dst)
                    if (r != kScc) info.scalar_src.push_back(r);
            if (info.scalar_src.empty() && info.scalar_dst.empty()) info.rule = Rule::none;
            break;
        case Unit::smem:
            info.counts_smem = !info.scalar_dst.empty();
            info.rule = info.scalar_src.empty() && info.scalar_dst.empty() ? Rule::none
                                                                           : Rule::scalar_memory;
            break;
        case Unit::mfma:
            info.rule = Rule::matrix;
            if (starts(name, "v_mfma") && inst.blgp == 0) {
                const bool wide = name.find("_32x32x") != std::string_view::npos;
                const bool narrow = name.find("_16x16x") != std::string_view::npos;
                if (wide && inst.dst[0].dwords == 16) info.side = 32;
                if (narrow && inst.dst[0].dwords == 4) info.side = 16;
            }
            break;
        case Unit::valu:
        case Unit::trans:
            if (name == "v_readfirstlane_b32")
                info.rule = Rule::first_lane;
            else if (name == "v_readlane_b32")
                info.rule = Rule::read_lane;
            else if (name == "v_writelane_b32")
                info.rule = Rule::write_lane;
            else if (starts(name, "v_cndmask_b32") && !inst.sdwa && !inst.dpp)
                info.rule = Rule::select;
            else if (starts(name, "v_cmp"))
                info.rule = Rule::compare;
            else if (info.vector_dst.empty() && info.scalar_dst.empty() && info.mask_dst < 0)
                info.rule = Rule::none;
            else
                info.rule = Rule::vector;
            if (inst.reads_dst && info.rule == Rule::vector && !inst.dpp)
                info.vector_src.insert(info.vector_src.end(), info.vector_dst.begin(),
                                       info.vector_dst.end());
            info.indexed = info.rule != Rule::first_lane && info.rule != Rule::read_lane &&
                           info.rule != Rule::write_lane;
            if (info.rule == Rule::vector) info.halves = halves_of(inst);
            info.simple = info.rule == Rule::vector && info.halves == Halves::both && !inst.dpp &&
                          info.mask_src.empty() && info.mask_dst < 0 && info.scalar_dst.empty();
            break;
        case Unit::ds:
            info.rule = Rule::memory;
            if (name == "ds_nop") {
                info.rule = Rule::none;
                break;
            }
            if (name == "ds_permute_b32") info.rule = Rule::permute;
            if (name == "ds_bpermute_b32") info.rule = Rule::bpermute;
            if (name == "ds_swizzle_b32") info.rule = Rule::swizzle;
            info.counts_ds = true;
            info.load = !info.vector_dst.empty();
            info.store = inst.src[1].dwords != 0 && info.rule == Rule::memory;
            if (name.find("addtid") != std::string_view::npos || name == "ds_append" ||
                name == "ds_consume")
                scalars(info.scalar_src, kM0, 1);
            break;
        case Unit::vmem:
            if (info.vector_src.empty() && info.scalar_src.empty() && info.vector_dst.empty())
                break;
            info.rule = Rule::memory;
            info.counts_vm = true;
            info.load = !info.vector_dst.empty();
            info.store = inst.src[1].dwords != 0;
            info.dma = inst.lds;
            info.flat = inst.format == Format::flat;
            info.counts_ds = info.flat;
            if (info.dma) scalars(info.scalar_src, kM0, 1);
            break;
    }
    return info;
}

}  // namespace emulator
