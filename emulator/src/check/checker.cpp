#include "check/checker.h"

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>

#include "check/checker_impl.h"
#include "check/undefined.h"

namespace emulator {
namespace {

void memory_sources(Reporter& report, const Wave& wave, State& st, const Inst& inst,
                    const Info& in) {
    const uint64_t exec = wave.exec();
    if (!exec) return;
    for (uint16_t r : in.scalar_src)
        need_scalar(report, wave, st, inst, r,
                    r == kM0 ? "the LDS address" : "part of the address");
    const Operand& address = inst.src[0];
    for (int k = 0; k < address.dwords; ++k)
        need_vector(report, wave, st, inst, address.index + k, exec, "the address");
}

}  // namespace

// `inst` with the registers that M0 makes of its operands'.
void Checker::Impl::move_operands(const Wave& wave, State& st, const Inst& inst, const Info& in) {
    const uint32_t m0 = wave.s[kM0];
    moved = inst;
    need_scalar(report, wave, st, inst, kM0, "a register's number");
    if (in.relative) {
        Operand& o =
            std::string_view(inst.name).starts_with("s_movrels") ? moved.src[0] : moved.dst[0];
        o.index = static_cast<uint16_t>((o.index + m0) & (o.dwords == 2 ? 126 : 127));
    } else {
        const auto move = [&](Operand& o, int bit) {
            if (o.kind == Kind::vector && (m0 >> bit & 1))
                o.index = static_cast<uint16_t>((o.index + (m0 & 255)) & 511);
        };
        for (int n = 0; n < 3; ++n) move(moved.src[n], 12 + n);
        move(moved.dst[0], 15);
    }
    moved_info = describe(moved);
}

void Checker::Impl::before(const Wave& wave, const Inst& inst) {
    State& st = state(wave);
    const Info& in = info_of(wave, inst);
    if (in.relative || (in.indexed && (wave.mode & kGprIndexing))) [[unlikely]] {
        move_operands(wave, st, inst, in);
        return before(wave, st, moved, moved_info);
    }
    before(wave, st, inst, in);
}

void Checker::Impl::before(const Wave& wave, State& st, const Inst& inst, const Info& in) {
    info = &in;
    if (st.in_flight.any() && !in.touches.empty()) st.in_flight.check(wave, inst, in, report);
    if (in.simple) {
        uint64_t good = kAll;
        const uint64_t exec = wave.exec();
        for (uint16_t r : in.vector_src) good &= st.v[r];
        for (uint16_t r : in.scalar_src)
            if (st.s[r] != ~0u) good = 0;
        for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~exec) | (good & exec);
        return;
    }
    switch (in.rule) {
        case Rule::none:
            return;
        case Rule::memory:
            memory_sources(report, wave, st, inst, in);
            std::fill(st.loaded, st.loaded + 16, kAll);
            st.lds_op = st.dma_op = 0;
            return;
        case Rule::permute:
        case Rule::bpermute:
        case Rule::swizzle:
            lane_flow(wave, st, inst, in);
            st.lds_op = 0;
            return;
        case Rule::scalar_memory:
            for (uint16_t r : in.scalar_src)
                need_scalar(report, wave, st, inst, r, "part of the address");
            std::fill(st.loaded, st.loaded + 16, kAll);
            return;
        case Rule::branch_scc:
            need_scalar(report, wave, st, inst, kScc, "the branch condition");
            return;
        case Rule::branch_vcc: {
            const uint64_t known = st.pair(kVcc);
            if (known == kAll || (known & wave.vcc())) return;  // one set bit decides
            need_scalar(report, wave, st, inst, kVcc, "the branch condition");
            need_scalar(report, wave, st, inst, kVcc + 1, "the branch condition");
            return;
        }
        case Rule::branch_exec:
            return;  // reported where EXEC was written
        case Rule::jump:
            for (uint16_t r : in.scalar_src)
                need_scalar(report, wave, st, inst, r, "the branch target");
            for (uint16_t r : in.scalar_dst) st.s[r] = ~0u;
            return;
        case Rule::vector:
        case Rule::compare:
        case Rule::select:
        case Rule::first_lane:
        case Rule::read_lane:
        case Rule::write_lane:
        case Rule::matrix:
            vector_flow(report, wave, st, inst, in);
            return;
        default:
            scalar_flow(report, wave, st, inst, in);
            return;
    }
}

void Checker::Impl::after(const Wave& wave, const Inst& inst) {
    const Info& in = *info;
    if (in.rule < Rule::permute) return;
    if (!(in.counts_vm | in.counts_ds | in.counts_smem)) return;
    State& st = *states[wave.id];
    if (in.counts_smem) {
        for (size_t k = 0; k < in.scalar_dst.size(); ++k)
            st.s[in.scalar_dst[k]] = st.loaded[std::min<size_t>(k, 15)] ? ~0u : 0u;
    } else {
        const uint64_t exec = wave.exec();
        for (size_t k = 0; k < in.vector_dst.size(); ++k) {
            uint64_t& lanes = st.v[in.vector_dst[k]];
            lanes = (lanes & ~exec) | (st.loaded[std::min<size_t>(k, 15)] & exec);
        }
    }
    st.in_flight.issue(inst, in, st.lds_op, st.dma_op);
}

Checker::Checker(Workgroup& group, Memory& memory, Findings& findings, GlobalAccesses* accesses)
    : impl_(std::make_unique<Impl>(group, memory, findings, accesses)) {}
Checker::~Checker() = default;

void Checker::define_scalar(Wave& wave, int first, int count) {
    State& st = impl_->state(wave);
    for (int r = first; r < first + count && r <= kScalarRegisters; ++r) st.s[r] = ~0u;
    if (first + count >= kScalarRegisters) st.s[kScc] = ~0u;
}

void Checker::define_vector(Wave& wave, int first, int count) {
    State& st = impl_->state(wave);
    for (int r = first; r < first + count && r < kVectorRegisters; ++r) st.v[r] = kAll;
}

void Checker::define_lds() {
    impl_->lds_given = true;
    std::fill(impl_->lds_defined.begin(), impl_->lds_defined.end(), 0xff);
}

void Checker::before(Wave& wave, const Inst& inst) { impl_->before(wave, inst); }
void Checker::after(Wave& wave, const Inst& inst) { impl_->after(wave, inst); }

void Checker::wait(Wave& wave, int vmcnt, int lgkmcnt, int) {
    InFlight& in_flight = impl_->state(wave).in_flight;
    // The largest count of either field means no wait.
    if (vmcnt < 63) in_flight.retire_vm(static_cast<size_t>(vmcnt));
    if (lgkmcnt < 15) in_flight.retire_lgkm(static_cast<size_t>(lgkmcnt));
}

void Checker::arrive(Wave& wave) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    ++st.barriers;
    LdsRaces::arrive(st);
    for (const Wave* other : c.group.waves) {
        const State& o = c.state(*other);
        if (!o.ended || o.barriers >= st.barriers || !wave.code) continue;
        c.report(wave, wave.code->insts[wave.pc - 1], "barrier divergence", [&] {
            return "wave " + std::to_string(wave.id) + " is at its barrier number " +
                   std::to_string(st.barriers) + ", wave " + std::to_string(other->id) +
                   " ended after " + std::to_string(o.barriers);
        });
        break;
    }
}

void Checker::release() { impl_->races.release(); }

void Checker::end(Wave& wave) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    st.ended = true;
    LdsRaces::end(st);
    for (const Wave* other : c.group.waves) {
        const State& o = c.state(*other);
        if (o.barriers <= st.barriers || !wave.code) continue;
        c.report(wave, wave.code->insts[wave.pc - 1], "barrier divergence", [&] {
            return "wave " + std::to_string(wave.id) + " ends after " +
                   std::to_string(st.barriers) + " barriers, wave " + std::to_string(other->id) +
                   " is at barrier number " + std::to_string(o.barriers);
        });
        break;
    }
}

}  // namespace emulator
