// Shapes of matrix instructions.
#pragma once

#include <cstdint>

#include "isa/inst.h"

namespace emulator {

// Passes, of four clocks each, that the matrix core takes for an instruction; 0 for one of another
// unit. From the scheduling model that LLVM has for gfx940 (SISchedule.td,
// SIDPGFX940FullSpeedModel).
int matrix_passes(const Inst& inst);

// Floating-point (or integer) operations of one matrix instruction, two per multiply-add. Half of a
// sparse one's are not carried out.
uint64_t matrix_flops(const Inst& inst);

}  // namespace emulator
