// What the checks need to know of an instruction.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/inst.h"

namespace emulator {

// How definedness flows through an instruction.
enum class Rule : uint8_t {
    none,        // nothing read or written that matters
    vector,      // lane by lane: defined when all sources are
    compare,     // the same into a lane mask
    select,      // v_cndmask: by the chosen source
    first_lane,  // v_readfirstlane
    read_lane,
    write_lane,
    matrix,  // one block: by row of A and column of B; several blocks: all or nothing
    permute,
    bpermute,
    swizzle,
    scalar,  // all or nothing
    copy,
    negate,  // bit by bit
    bit_and,
    bit_or,
    bit_andn2,
    bit_orn2,
    bit_xor,
    shift_left,
    shift_right,
    choose,    // s_cselect
    test_bit,  // s_bitcmp
    branch_scc,
    branch_vcc,
    branch_exec,
    jump,
    memory,  // VMEM and DS with addresses
    scalar_memory,
};

// Which halves of 64-bit sources the halves of a 64-bit result come from. Compilers leave the half
// of a register pair undefined that does not matter, as in a 64-bit multiply-add for its low half.
enum class Halves : uint8_t {
    both,
    upwards,    // sums, products, left shifts: the low half of the low ones only
    downwards,  // right shifts: the high half of the high ones only
    apart,      // moves
    packed,     // two floats, chosen by op_sel and op_sel_hi
};

struct Touch {
    uint8_t word;
    uint64_t mask;
};

// What the checks need to know of an instruction, made when it is first executed.
struct Info {
    Rule rule = Rule::none;
    Halves halves = Halves::both;
    bool load = false, store = false, dma = false, flat = false, counts_vm = false,
         counts_ds = false, counts_smem = false;
    bool saves_exec = false;  // s_*_saveexec
    bool indexed = false;     // its vector operands move with s_set_gpr_idx_on
    bool relative = false;    // s_movrel*: its operand's number counts from M0
    bool simple = false;      // vector rule with plain operands
    std::vector<Touch> touches;
    std::vector<uint16_t> vector_src, scalar_src, mask_src;  // registers; masks are scalar pairs
    std::vector<uint16_t> vector_dst, scalar_dst;
    int mask_dst = -1;
    int side = 0;  // of a dense matrix product of one block, 16 or 32
};

Info describe(const Inst& inst);

}  // namespace emulator
