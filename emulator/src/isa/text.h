// Instructions, registers and numbers as text.
#pragma once

#include <cstdint>
#include <string>

#include "isa/inst.h"

namespace emulator {

// "v_add_f32 v1, v2, s3"-like text: mnemonic without encoding suffix, then the operands.
std::string to_string(const Inst& inst);

// "s[2:3]", "vcc", "src_scc", or a constant's value.
std::string register_name(const Operand& operand);
// Of one register: "v3", "a3", "vcc_lo"; scalar kScc is "scc".
std::string register_name(bool vector, int index);

std::string hex(uint64_t value);         // "0x2a"
std::string lanes_text(uint64_t lanes);  // "lane 3" or "lanes 0 to 15 (16)"

}  // namespace emulator
