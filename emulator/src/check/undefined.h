// Undefined values, followed per register and lane (per bit in scalar registers) and reported where
// they matter: addresses, data stored to global memory, scalar control, EXEC. Copying, spilling or
// computing with them is allowed.
#pragma once

#include <cstdint>

#include "check/state.h"

namespace emulator {

// Report what must be defined and is not; `role` says as what it is used.
void need_scalar(Reporter& report, const Wave& wave, State& st, const Inst& inst, int index,
                 const char* role);
void need_vector(Reporter& report, const Wave& wave, State& st, const Inst& inst, int index,
                 uint64_t lanes, const char* role);
// EXEC decides what runs: it must be defined.
void steer(Reporter& report, const Wave& wave, State& st, const Inst& inst);

// Value and defined bits of a scalar operand.
struct Bits {
    uint64_t value, defined;
};
Bits bits_of(const Wave& wave, const State& st, const Operand& operand);

// Lanes whose data registers for the dwords [dword, dword + count) are defined.
uint64_t data_defined(const State& st, const Inst& inst, uint32_t dword, uint32_t count,
                      bool atomic);

// What an instruction's results are, by its rule: scalar ones, vector ones, matrix products, and
// those of the LDS unit's cross-lane operations.
void scalar_flow(Reporter& report, const Wave& wave, State& st, const Inst& inst, const Info& in);
void vector_flow(Reporter& report, const Wave& wave, State& st, const Inst& inst, const Info& in);
void matrix_flow(State& st, const Inst& inst, const Info& in);
void lane_flow(const Wave& wave, State& st, const Inst& inst, const Info& in);

}  // namespace emulator
