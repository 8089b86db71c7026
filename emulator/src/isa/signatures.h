// What instructions there are: by operation, and by encoding.
#pragma once

#include <string>
#include <vector>

#include "isa/inst.h"

namespace emulator {

// An operation's name, pipe and operands, as the ops_*.def files have them.
struct Signature {
    const char* name = "";
    Unit unit = Unit::salu;
    bool memory = false;
    std::vector<Type> dst, src;
    bool reads_dst = false, reads_scc = false, writes_scc = false, writes_exec = false;
    uint8_t loaded = 0, data0 = 0, data1 = 0;
};

// By Op; the first one is Op::unknown's.
const std::vector<Signature>& signatures();

// Registers that an operand of a type covers.
uint8_t dwords_of(Type type);

struct Encoded {
    const char* name = nullptr;  // null: there is no such instruction
    Op op = Op::unknown;
};

// What encodings.def has for an opcode.
const Encoded& encoded(Format format, uint32_t opcode);

}  // namespace emulator
