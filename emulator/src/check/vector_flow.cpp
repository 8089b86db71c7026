#include <bit>

#include "check/undefined.h"
#include "machine/lanes.h"

namespace emulator {
namespace {

uint32_t value32(const Wave& wave, const Operand& operand) {
    if (operand.kind == Kind::scalar) return wave.s[operand.index];
    if (operand.kind == Kind::constant) return static_cast<uint32_t>(operand.value);
    return 0;
}

// Lanes in which all sources of a vector instruction are defined; `write` loses the lanes that
// a DPP instruction leaves alone.
uint64_t sources(const Wave& wave, const State& st, const Inst& inst, const Info& in,
                 uint64_t& write) {
    uint64_t good = kAll;
    for (uint16_t r : in.scalar_src)
        if (st.s[r] != ~0u) good = 0;
    for (uint16_t r : in.mask_src) good &= st.pair(r);
    if (!inst.dpp) {
        for (uint16_t r : in.vector_src) good &= st.v[r];
        return good;
    }
    const uint64_t exec = wave.exec();
    const DppLanes& dpp = dpp_lanes(inst.dpp_ctrl);
    uint64_t first = kAll, valid = 0, moved = 0;
    for (int r = inst.src[0].index; r < inst.src[0].index + inst.src[0].dwords; ++r)
        first &= st.v[r];
    for (int lane = 0; lane < kLanes; ++lane) {
        const int from = dpp.from[lane];
        if (from < 0 || !(exec >> from & 1)) continue;
        valid |= 1ull << lane;
        moved |= (first >> from & 1) << lane;
    }
    for (size_t n = 1; n < 3; ++n)
        if (inst.src[n].kind == Kind::vector)
            for (int r = inst.src[n].index; r < inst.src[n].index + inst.src[n].dwords; ++r)
                good &= st.v[r];
    for (int lane = 0; lane < kLanes; ++lane)
        if (!(inst.row_mask >> lane / 16 & 1) || !(inst.bank_mask >> (lane / 4 & 3) & 1))
            write &= ~(1ull << lane);
    if (!inst.bound_ctrl) write &= valid;
    return good & (moved | ~valid);
}

// Lanes in which what one half of the result takes from a source is defined.
uint64_t half_source(const State& st, const Operand& src, Halves halves, int half) {
    if (src.kind != Kind::vector && src.kind != Kind::scalar) return kAll;
    int first = 0, last = src.dwords - 1;
    if (src.dwords == 2) {
        const bool high =
            halves == Halves::packed ? (half ? src.op_sel_hi : src.op_sel) : half != 0;
        const bool one = halves == Halves::apart || halves == Halves::packed ||
                         (halves == Halves::upwards && half == 0) ||
                         (halves == Halves::downwards && half == 1);
        if (one) first = last = high;
    }
    uint64_t good = kAll;
    for (int k = first; k <= last; ++k) {
        if (src.kind == Kind::vector)
            good &= st.v[src.index + k];
        else if (st.s[src.index + k] != ~0u)
            good = 0;
    }
    return good;
}

void half_flow(const Wave& wave, State& st, const Inst& inst, const Info& in) {
    const uint64_t exec = wave.exec();
    uint64_t good[2] = {kAll, kAll};
    for (int half = 0; half < 2; ++half)
        for (const Operand& src : inst.src) good[half] &= half_source(st, src, in.halves, half);
    if (inst.reads_dst)
        for (int half = 0; half < 2; ++half) good[half] &= st.v[in.vector_dst[half]];
    for (int half = 0; half < 2; ++half) {
        uint64_t& lanes = st.v[in.vector_dst[half]];
        lanes = (lanes & ~exec) | (good[half] & exec);
    }
    if (in.mask_dst < 0) return;
    const uint64_t bits = good[1] | ~exec;
    st.set_pair(in.mask_dst, bits);
}

}  // namespace

void vector_flow(Reporter& report, const Wave& wave, State& st, const Inst& inst, const Info& in) {
    uint64_t write = wave.exec();
    switch (in.rule) {
        case Rule::vector:
        case Rule::compare: {
            if (in.halves != Halves::both) return half_flow(wave, st, inst, in);
            const uint64_t good = sources(wave, st, inst, in, write);
            for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~write) | (good & write);
            for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
            if (in.mask_dst >= 0) {  // inactive lanes become zero
                const uint64_t bits = good | ~wave.exec();
                st.set_pair(in.mask_dst, bits);
                if (inst.writes_exec || in.mask_dst == kExec) {
                    st.set_pair(kExec, bits);
                    steer(report, wave, st, inst);
                }
            }
            return;
        }
        case Rule::select: {
            const Operand& mask = inst.src[2];
            const Bits chosen = bits_of(wave, st, mask);
            auto lanes_of = [&](const Operand& operand) {
                if (operand.kind == Kind::vector) return st.v[operand.index];
                if (operand.kind == Kind::scalar) return st.s[operand.index] == ~0u ? kAll : 0;
                return kAll;
            };
            const uint64_t good = chosen.defined & ((chosen.value & lanes_of(inst.src[1])) |
                                                    (~chosen.value & lanes_of(inst.src[0])));
            for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~write) | (good & write);
            return;
        }
        case Rule::first_lane: {
            const int lane = write ? std::countr_zero(write) : 0;
            bool good = true;
            for (uint16_t r : in.vector_src) good &= st.v[r] >> lane & 1;
            for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
            return;
        }
        case Rule::read_lane: {
            const int lane = static_cast<int>(value32(wave, inst.src[1]) & 63);
            bool good = true;
            for (uint16_t r : in.vector_src) good &= st.v[r] >> lane & 1;
            for (uint16_t r : in.scalar_src) good &= st.s[r] == ~0u;
            for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
            return;
        }
        case Rule::write_lane: {
            const int lane = static_cast<int>(value32(wave, inst.src[1]) & 63);
            bool good = true;
            for (uint16_t r : in.scalar_src) good &= st.s[r] == ~0u;
            for (uint16_t r : in.vector_dst)
                st.v[r] = (st.v[r] & ~(1ull << lane)) | static_cast<uint64_t>(good) << lane;
            return;
        }
        case Rule::matrix:
            matrix_flow(st, inst, in);
            return;
        default:
            return;
    }
}

void lane_flow(const Wave& wave, State& st, const Inst& inst, const Info& in) {
    const uint64_t exec = wave.exec();
    uint64_t good = 0;
    if (in.rule == Rule::swizzle) {
        const uint64_t from = st.v[inst.src[0].index] | ~exec;  // inactive lanes give zero
        for (int lane = 0; lane < kLanes; ++lane)
            good |= (from >> swizzle_source(inst.imm, lane) & 1) << lane;
    } else {
        const uint64_t data = st.v[inst.src[1].index], address = st.v[inst.src[0].index];
        const uint32_t* to = wave.v[inst.src[0].index];
        if (in.rule == Rule::bpermute) {
            for (int lane = 0; lane < kLanes; ++lane)
                good |=
                    ((data | ~exec) >> ((to[lane] + static_cast<uint32_t>(inst.imm)) >> 2 & 63) & 1)
                    << lane;
            good &= address;
        } else if ((exec & ~address) == 0) {
            good = kAll;  // lanes that nobody pushes to get zero
            for (uint64_t left = exec; left; left &= left - 1) {
                const int lane = std::countr_zero(left);
                const int target =
                    static_cast<int>((to[lane] + static_cast<uint32_t>(inst.imm)) >> 2 & 63);
                good = (good & ~(1ull << target)) | (data >> lane & 1) << target;
            }
        }
    }
    st.loaded[0] = good;
}

}  // namespace emulator
