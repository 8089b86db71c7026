#include <string_view>

#include "check/undefined.h"

namespace emulator {
namespace {

void set_bits(Reporter& report, const Wave& wave, State& st, const Inst& inst, const Operand& dst,
              uint64_t defined_bits) {
    for (int k = 0; k < dst.dwords; ++k)
        st.s[dst.index + k] = static_cast<uint32_t>(defined_bits >> 32 * k);
    if (dst.dwords && dst.index + dst.dwords > kExec) steer(report, wave, st, inst);
}

}  // namespace

void scalar_flow(Reporter& report, const Wave& wave, State& st, const Inst& inst, const Info& in) {
    Bits a = bits_of(wave, st, inst.src[0]);
    Bits b = bits_of(wave, st, inst.src[1]);
    const Operand& dst = inst.dst[0];
    const uint64_t width = dst.dwords == 2 ? kAll : 0xffffffffull;
    uint64_t result = 0, value = 0;  // defined bits; value where they are
    if (inst.writes_exec) {
        // exec = op(src, exec), the order of operands as s_andn2 has it; dst = the old exec, or
        // the new one of s_*_wrexec
        const Bits exec = {wave.exec(), kAll};
        if (std::string_view(inst.name).starts_with("s_andn1") ||
            std::string_view(inst.name).starts_with("s_orn1"))
            b = a, a = exec;
        else
            b = exec;
    }
    switch (in.rule) {
        case Rule::copy:
            result = a.defined;
            value = a.value;
            break;
        case Rule::negate:
            result = a.defined;
            value = ~a.value;
            break;
        case Rule::bit_and:
            result = (a.defined & b.defined) | (a.defined & ~a.value) | (b.defined & ~b.value);
            value = a.value & b.value;
            break;
        case Rule::bit_andn2:
            result = (a.defined & b.defined) | (a.defined & ~a.value) | (b.defined & b.value);
            value = a.value & ~b.value;
            break;
        case Rule::bit_or:
            result = (a.defined & b.defined) | (a.defined & a.value) | (b.defined & b.value);
            value = a.value | b.value;
            break;
        case Rule::bit_orn2:
            result = (a.defined & b.defined) | (a.defined & a.value) | (b.defined & ~b.value);
            value = a.value | ~b.value;
            break;
        case Rule::bit_xor:
            result = a.defined & b.defined;
            value = a.value ^ b.value;
            break;
        case Rule::shift_left:
        case Rule::shift_right: {
            const uint64_t shift = b.value & (dst.dwords == 2 ? 63 : 31);
            if (b.defined != kAll) break;
            const uint64_t undef = ~a.defined & width;
            result = ~(in.rule == Rule::shift_left ? undef << shift : undef >> shift);
            value = in.rule == Rule::shift_left ? a.value << shift : (a.value & width) >> shift;
            break;
        }
        case Rule::choose:
            if (st.s[kScc]) result = wave.scc ? a.defined : b.defined;
            break;
        case Rule::test_bit: {
            const int bit = static_cast<int>(b.value & (inst.src[0].dwords == 2 ? 63 : 31));
            st.s[kScc] = b.defined == kAll && (a.defined >> bit & 1) ? ~0u : 0u;
            return;
        }
        default: {
            bool all = true;
            for (uint16_t r : in.scalar_src) all &= st.s[r] == ~0u;
            for (uint16_t r : in.scalar_dst) st.s[r] = all ? ~0u : 0u;
            for (uint16_t r : in.scalar_dst)
                if (r == kExec || r == kExec + 1) steer(report, wave, st, inst);
            return;
        }
    }
    if (std::string_view(inst.name).starts_with("s_nand") ||
        std::string_view(inst.name).starts_with("s_nor") ||
        std::string_view(inst.name).starts_with("s_xnor"))
        value = ~value;
    // SCC says whether the result is nonzero: known as soon as one defined bit is set.
    if (inst.writes_scc) st.s[kScc] = (~result & width) == 0 || (result & value & width) ? ~0u : 0u;
    set_bits(report, wave, st, inst, dst, in.saves_exec ? kAll : result);
    if (!inst.writes_exec && !in.saves_exec) return;
    st.set_pair(kExec, result);
    steer(report, wave, st, inst);
}

}  // namespace emulator
