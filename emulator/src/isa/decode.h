// gfx942 machine code -> Inst records. Opcode numbers come from encodings.def (made from LLVM's
// disassembler), operand types from the signatures in the ops_*.def files, field
// positions from AMD's "Instinct MI300 Instruction Set Architecture" manual, chapter 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa/inst.h"

namespace emulator {

// A decoded text section. Owner: the loaded code object; immutable after binding.
struct Code {
    std::vector<Inst> insts;
    std::vector<int32_t> index_of;  // dword offset -> instruction index, -1 inside an instruction
    uint64_t address = 0;  // where the section lies in host memory; s_getpc counts from here

    // Index of the instruction at a byte offset, -1 when there is none.
    int32_t at(uint64_t offset) const {
        return offset % 4 || offset / 4 >= index_of.size() ? -1 : index_of[offset / 4];
    }
};

// Decode `bytes` of machine code. What is no gfx942 instruction becomes one 4-byte Inst with
// op unknown and name "(invalid)"; known to the format but not executed keeps its mnemonic.
Code decode(const uint8_t* data, size_t bytes);

}  // namespace emulator
