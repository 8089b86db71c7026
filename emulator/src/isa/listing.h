// Decoded instructions as JSON, for the static analyses in Python (control flow, wait states).
#pragma once

#include <string>

#include "isa/decode.h"

namespace emulator {

// "[{...}, ...]", one object per instruction, in order. Keys:
//   offset, bytes     place in the text section, size of the encoding
//   name, text        mnemonic, and with operands
//   known             false: the decoder knows the name only, operands are missing
//   format, unit      names of the enumerators in inst.h
//   target            branches: index of the instruction jumped to, else -1
//   dst, src          operands in their places: null, ["v", register, count] (AGPRs from 256),
//                     ["s", register, count], ["c", value] or ["x", special source]
//   reads, writes     all registers, implied ones too: [first, count] pairs where vector registers
//                     are 0..511, scalar ones 512 + number, SCC 640
//   passes            of the matrix core, four clocks each; 0 for what is no matrix instruction
//   imm               simm16, memory offset, or ds offset1 << 8 | offset0
//   flags             of reads_dst, sdwa, dpp, lds, offen, idxen, glc, dst_sel (writes part of the
//                     register by SDWA or op_sel)
std::string instructions_json(const Code& code);

// The enumerator's name.
const char* name_of(Unit unit);

}  // namespace emulator
