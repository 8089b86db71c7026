// Which registers an instruction reads and writes, implied ones too.
#pragma once

#include <vector>

#include "isa/inst.h"

namespace emulator {

inline constexpr int kScalarBase = kVectorRegisters;
// Vector registers are 0..511, scalar ones kScalarBase + number, SCC the last.
inline constexpr int kAllRegisters = kScalarBase + kScc + 1;

struct Span {
    int first, count;
};

struct Registers {
    std::vector<Span> reads, writes;
};

Registers registers_of(const Inst& inst);

}  // namespace emulator
