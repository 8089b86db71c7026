// A decoded gfx942 instruction.
//
// The decoder (decode.h) turns machine code into these records once per code object; everything
// that runs, checks, counts or prints instructions reads them. Registers are numbered as the
// hardware files are: VGPR v0..v255 are 0..255 and AGPR a0..a255 are 256..511 of one unified vector
// file; scalar registers have their 7-bit operand encoding (s0..s101, flat_scratch 102, xnack_mask
// 104, vcc 106, ttmp 108, m0 124, exec 126).
#pragma once

#include <cstdint>

namespace emulator {

inline constexpr int kLanes = 64;
inline constexpr int kVectorRegisters = 512;
inline constexpr int kScalarRegisters = 128;

inline constexpr int kFlatScratch = 102;
inline constexpr int kVcc = 106;
inline constexpr int kM0 = 124;
inline constexpr int kExec = 126;
inline constexpr int kScc = kScalarRegisters;  // where SCC is numbered among the scalar registers

enum class Format : uint8_t {
    sop1,
    sop2,
    sopk,
    sopc,
    sopp,
    smem,
    vop1,
    vop2,
    vopc,
    vop3,
    vop3p,
    ds,
    mubuf,
    mtbuf,
    flat,
    scratch,
    global,
};

// Which pipe executes an instruction; counters and hazard rules speak of these.
enum class Unit : uint8_t {
    salu,     // scalar arithmetic, branches, s_nop and the like
    wait,     // s_waitcnt and its relatives
    barrier,  // s_barrier
    branch,   // s_branch, s_cbranch_*, s_setpc, s_swappc, s_endpgm
    smem,
    valu,
    trans,  // quarter-rate transcendental VALU
    mfma,
    ds,    // LDS, and the cross-lane operations of the LDS unit
    vmem,  // buffer, global, flat, scratch
};

// Every instruction the emulator executes; `unknown` are those that it only decodes.
enum class Op : uint16_t {
    unknown,
#define OP(name, ...) name,
#define MEMORY(name, ...) name,
#include "isa/ops_scalar.def"
#include "isa/ops_vector.def"
#include "isa/ops_memory.def"
#undef OP
#undef MEMORY
    count,
};

// How an operand's bits are meant. It decides the width in registers, what an inline constant
// becomes, and which bit neg and abs touch.
enum class Type : uint8_t {
    none,
    b16,
    f16,  // low half of one register
    pk16,
    pkf16,  // two halves of one register
    b32,
    f32,  // one register
    b64,
    f64,
    pkf32,  // two registers; pkf32 is two floats
    b96,
    b128,
    b256,
    b512,
    b1024,
    m64,  // a lane mask: scalar register pair (vcc when the format implies it)
    s32,
    s64,  // scalar even though the instruction is a vector one (v_readlane)
};

enum class Kind : uint8_t {
    none,
    vector,    // index = 0..511
    scalar,    // index = 0..127
    constant,  // value; literal or inline constant, already converted to the operand's type
    special,   // index = operand encoding: 235..238 apertures, 251 vccz, 252 execz, 253 scc
};

struct Operand {
    Kind kind = Kind::none;
    Type type = Type::none;
    uint8_t dwords = 0;  // registers covered (0 for an absent operand)
    uint16_t index = 0;
    uint64_t value =
        0;  // constants; 64-bit types hold the whole value, MFMA SrcC one dword to splat
    // Source modifiers. For vop3p neg is neg_lo and neg_hi is separate.
    bool neg = false, abs = false, neg_hi = false;
    bool sext = false;  // SDWA
    uint8_t sel = 6;    // SDWA: 0..3 byte, 4..5 word, 6 dword
    // op_sel: vop3 = read the upper half; vop3p = half for the low result, op_sel_hi for the high
    // one.
    bool op_sel = false, op_sel_hi = false;
};

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

struct Inst {
    Handler run = nullptr;  // set when the code is bound to an instruction-set variant
    Op op = Op::unknown;
    Format format = Format::sop1;
    Unit unit = Unit::salu;
    uint8_t bytes = 4;      // size of the encoding with its literal
    uint32_t offset = 0;    // bytes from the start of the section
    uint32_t index = 0;     // position in its Code
    int32_t target = -1;    // branch: index of the target instruction
    const char* name = "";  // mnemonic without encoding suffix

    // ALU: dst[0], dst[1] (carry or mask out), src[0..2] and src[3] (mask in) in signature order.
    // Memory: dst[0] = loaded registers; src[0] address VGPRs, src[1] data0, src[2] data1,
    //         src[3] scalar base (saddr pair, srsrc quad, sbase), src[4] soffset.
    Operand dst[2], src[5];
    bool reads_dst = false;  // v_fmac, v_writelane, d16 loads, SDWA preserve, partial writes
    bool reads_scc = false, writes_scc = false;
    bool writes_exec = false;  // v_cmpx and saveexec (explicit exec destinations not included)

    int32_t imm = 0;                    // simm16, memory offset (signed where the format's is)
    uint16_t offset0 = 0, offset1 = 0;  // ds; `imm` is offset1 << 8 | offset0
    uint8_t clamp = 0, omod = 0;
    bool op_sel_dst = false;  // vop3 op_sel[3]: write the upper half
    bool offen = false, idxen = false, lds = false, glc = false, slc = false, sc1 = false,
         gds = false;
    uint8_t cbsz = 0, abid = 0, blgp = 0;  // mfma broadcast controls
    bool sdwa = false, dpp = false;
    uint8_t dst_sel = 6, dst_unused = 0;  // SDWA: unused 0 pad with zero, 1 sign extend, 2 preserve
    uint16_t dpp_ctrl = 0;
    uint8_t row_mask = 15, bank_mask = 15;
    bool bound_ctrl = false;
};

}  // namespace emulator
