// When the registers of one wave are ready, and who made them.
#pragma once

#include <array>

#include "timing/account.h"
#include "timing/constants.h"
#include "timing/description.h"

namespace emulator::timing {

class Scoreboard {
   public:
    struct Need {
        double at = 0;  // when the last operand is ready
        Cause cause = Cause::none;
    };

    // What an instruction has to wait for: operands, and registers that a matrix instruction
    // before it still writes.
    Need need(const Description& inst, const Constants& constants) const {
        Need out;
        const auto later = [&](double at, Class from) {
            if (at > out.at) out = {at, cause_of(from)};
        };
        for (const Span& span : inst.reads) {
            const bool early = accumulates(inst, span) || flag_of_vector(inst, span);
            for (int r = span.first; r < span.first + span.count; ++r) {
                double at = early ? early_[r] : ready_[r];
                if (from_[r] == Class::matrix && inst.kind != Class::matrix)
                    at += constants.matrix_to_other - constants.matrix_to_matrix;
                later(at, from_[r]);
            }
        }
        if (inst.kind == Class::matrix) return out;
        for (const Span& span : inst.writes)
            for (int r = span.first; r < span.first + span.count; ++r)
                if (from_[r] == Class::matrix) later(ready_[r], Class::matrix);
        return out;
    }

    // The results of an instruction: for scalar registers that a vector instruction writes
    // `scalar_at`, for all else `at`; `early` for the reader that has them sooner (a matrix
    // instruction's C, a vector instruction's mask).
    void result(const Description& inst, double at, double scalar_at, double early) {
        for (const Span& span : inst.writes)
            for (int r = span.first; r < span.first + span.count; ++r) {
                ready_[r] = r >= kScalarBase ? scalar_at : at;
                early_[r] = early;
                from_[r] = inst.kind;
            }
    }

   private:
    static bool accumulates(const Description& inst, const Span& span) {
        return inst.kind == Class::matrix && inst.accumulator.count &&
               span.first == inst.accumulator.first && span.count == inst.accumulator.count;
    }
    static bool flag_of_vector(const Description& inst, const Span& span) {
        return inst.category == Category::vector && span.first >= kScalarBase;
    }
    static Cause cause_of(Class from) {
        switch (from) {
            case Class::lds:
                return Cause::needs_lds;
            case Class::memory:
                return Cause::needs_memory;
            case Class::matrix:
                return Cause::needs_matrix;
            case Class::scalar:
            case Class::scalar_memory:
                return Cause::needs_scalar;
            default:
                return Cause::needs_vector;
        }
    }

    std::array<double, kAllRegisters> ready_{}, early_{};
    std::array<Class, kAllRegisters> from_{};
};

}  // namespace emulator::timing
