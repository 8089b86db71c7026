#include "timing/vector_ports.h"

#include <algorithm>

namespace emulator::timing {
namespace {

Cause cause_of_port(Class holder) {
    switch (holder) {
        case Class::trans:
            return Cause::port_trans;
        case Class::packed:
            return Cause::port_packed;
        case Class::matrix:
            return Cause::port_matrix;
        default:
            return Cause::port_vector;
    }
}

}  // namespace

Cause VectorPorts::refuses(const Description& inst, int wave, double now) {
    if (port_free_ > now) return cause_of_port(port_class_);
    switch (inst.kind) {
        case Class::matrix:
            if (matrix_free_ > now) return Cause::matrix_busy;
            if (matrix_allowed_ > now) kept_waiting_ = wave;
            if (std::max(matrix_allowed_, matrix_allowed_of_wave_[wave]) > now)
                return Cause::packed_ahead;
            return Cause::none;
        case Class::packed: {
            // One packed instruction after the other must not keep the other wave's matrix
            // instruction for ever.
            const bool fair = kept_waiting_ < 0 || kept_waiting_ == wave;
            const bool idle_enough = matrix_free_ <= now || matrix_wave_ != wave;
            return fair && idle_enough ? Cause::none : Cause::packed_behind;
        }
        case Class::trans:
            return trans_free_ > now ? Cause::port_trans : Cause::none;
        default:
            return Cause::none;
    }
}

double VectorPorts::issue(const Description& inst, int wave, double now) {
    // What waited for the port issues when it became free, be it within a clk: fractions add up.
    now = port_free_ > now - 1 ? port_free_ : now;
    switch (inst.kind) {
        case Class::matrix:
            return issue_matrix(inst, wave, now);
        case Class::packed:
            return issue_packed(inst, wave, now);
        case Class::trans:
            trans_free_ = now + constants_.trans_issue;
            hold(inst.kind, wave, trans_free_);
            return constants_.trans_issue;
        default:
            hold(inst.kind, wave, now + constants_.valu_issue + behind_trans(inst, wave));
            return constants_.valu_issue;
    }
}

double VectorPorts::behind_trans(const Description& inst, int wave) const {
    const bool behind = port_class_ == Class::trans && port_wave_ != wave;
    return behind && inst.bytes == 8 ? constants_.wide_behind_trans : 0;
}

double VectorPorts::issue_matrix(const Description& inst, int wave, double now) {
    matrix_free_ = now + inst.passes * constants_.matrix_pass;
    matrix_wave_ = wave;
    kept_waiting_ = -1;
    hold(inst.kind, wave, now + constants_.matrix_issue);
    return constants_.matrix_issue;
}

double VectorPorts::issue_packed(const Description& inst, int wave, double now) {
    const double taken = constants_.packed_issue + behind_trans(inst, wave);
    if (matrix_free_ > now) {
        matrix_free_ += constants_.packed_stretch;
        stretched_ += constants_.packed_stretch;
    } else {
        matrix_allowed_ = now + constants_.packed_stretch;
    }
    if (matrix_wave_ == wave) matrix_allowed_of_wave_[wave] = now + constants_.packed_same_wave;
    hold(Class::packed, wave, now + taken);
    return constants_.packed_issue;
}

void VectorPorts::hold(Class kind, int wave, double until) {
    port_free_ = until;
    port_class_ = kind;
    port_wave_ = wave;
}

}  // namespace emulator::timing
