// Scalar instructions: arithmetic, compares, EXEC handling, branches, hardware registers.
#pragma once

#include <bit>
#include <type_traits>

#include "exec/sources.h"
#include "isa/decode.h"

namespace emulator::VARIANT {
namespace {

inline void put32(Wave& w, const Inst& i, uint32_t value) { w.s[i.dst[0].index] = value; }
inline void put64(Wave& w, const Inst& i, uint64_t value) { w.set_pair(i.dst[0].index, value); }

inline uint64_t code_address(const Wave& w, const Inst& i) {
    return w.code->address + i.offset + i.bytes;
}

inline void jump_to_address(Wave& w, const Inst& i, uint64_t address) {
    const int32_t index = address < w.code->address ? -1 : w.code->at(address - w.code->address);
    if (index < 0) fail(i, "the target lies outside the code");
    w.pc = static_cast<uint32_t>(index);
}

inline void branch(Wave& w, const Inst& i) {
    if (i.target < 0) fail(i, "the target lies outside the code");
    w.pc = static_cast<uint32_t>(i.target);
}

// Bits shared with the sign from the top, -1 when all are.
template <class T>
inline uint32_t leading_sign_bits(T value) {
    const T folded = value < 0 ? ~value : value;
    return folded == 0 ? ~0u
                       : static_cast<uint32_t>(std::countl_zero(std::make_unsigned_t<T>(folded)));
}

template <class T>
inline T bitfield(T value, uint32_t offset, uint32_t width) {
    constexpr uint32_t bits = sizeof(T) * 8;
    if (width == 0) return 0;
    // Bits above the register count as zero, or as the sign.
    T shifted = static_cast<T>(value >> offset);
    if (width >= bits) return shifted;
    const uint32_t up = bits - width;
    return static_cast<T>(static_cast<T>(static_cast<std::make_unsigned_t<T>>(shifted) << up) >>
                          up);
}

template <class T>
inline T reverse_bits(T value) {
    T out = 0;
    for (size_t n = 0; n < sizeof(T) * 8; ++n) out |= (value >> n & 1) << (sizeof(T) * 8 - 1 - n);
    return out;
}

// Whole quads: every group of 4 lanes with one active becomes active.
template <class T>
inline T whole_quads(T value) {
    T any = (value | value >> 1 | value >> 2 | value >> 3) & static_cast<T>(0x1111111111111111ull);
    return any * 15;
}

template <class T>
inline T quad_mask(T value) {
    T out = 0;
    for (size_t n = 0; n < sizeof(T) * 2; ++n)
        out |= static_cast<T>((value >> 4 * n & 15) != 0) << n;
    return out;
}

// Hardware registers a kernel can read. The ids that depend on the placement follow the round-robin
// of workgroups over 8 XCDs; waves of a workgroup sit on the 4 SIMDs in turn.
inline uint32_t hardware_register(const Wave& w, const Inst& i, uint32_t id) {
    const uint64_t group = w.group ? w.group->linear_id : 0;
    switch (id) {
        case 1:
            return w.mode;
        case 2:
            return (w.scc ? 1u : 0u) | (w.exec() == 0 ? 1u << 9 : 0u) |
                   (w.vcc() == 0 ? 1u << 10 : 0u);
        case 3:
            return 0;  // TRAPSTS: no exception
        case 4: {      // HW_ID: wave, SIMD, CU, shader engine
            const uint32_t cu = static_cast<uint32_t>(group / 8 % 38);
            return (w.id / 4u & 15) | (w.id % 4u) << 4 | (cu % 10) << 8 | (cu / 10) << 13;
        }
        case 5:
            return 0;  // GPR_ALLOC
        case 6:        // LDS_ALLOC: size in units of 128 dwords
            return w.group ? static_cast<uint32_t>((w.group->lds.size() + 511) / 512) << 12 : 0;
        case 7:
            return 0;  // IB_STS: nothing outstanding
        case 15:       // SH_MEM_BASES
            return static_cast<uint32_t>(kSharedBase >> 48) << 16 |
                   static_cast<uint32_t>(kPrivateBase >> 48);
        case 20:
            return static_cast<uint32_t>(group % 8);  // XCC_ID
        default:
            fail(i, "hardware register # is not modelled", id);
    }
}

inline void set_hardware_register(Wave& w, const Inst& i, uint32_t value) {
    const uint32_t id = i.imm & 63, offset = i.imm >> 6 & 31, width = (i.imm >> 11 & 31) + 1;
    const uint32_t field = static_cast<uint32_t>(((1ull << width) - 1) << offset);
    if (id == 1) {
        w.mode = (w.mode & ~field) | (value << offset & field);
    } else if (id == 3 || id == 7) {
        // TRAPSTS and IB_STS: traps are not modelled
    } else {
        fail(i, "hardware register # cannot be written", id);
    }
}

// Sources a, b of 32 or 64 bits.
#define A32 [[maybe_unused]] const uint32_t a = scalar32(w, i.src[0])
#define A64 [[maybe_unused]] const uint64_t a = scalar64(w, i.src[0])
#define B32 [[maybe_unused]] const uint32_t b = scalar32(w, i.src[1])
#define B64 [[maybe_unused]] const uint64_t b = scalar64(w, i.src[1])
#define SIGNED \
    [[maybe_unused]] const int32_t sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b)

// d = expression, SCC untouched; A and B declare the sources
#define UNARY(name, A, put, expression) \
    HANDLER(name) {                     \
        A;                              \
        put(w, i, expression);          \
    }
#define BINARY(name, A, B, put, expression) \
    HANDLER(name) {                         \
        A;                                  \
        B;                                  \
        SIGNED;                             \
        put(w, i, expression);              \
    }
#define PLAIN32(name, expression) BINARY(name, A32, B32, put32, expression)
// The same; SCC = condition
#define UNARY_SCC(name, A, put, expression, condition) \
    HANDLER(name) {                                    \
        A;                                             \
        put(w, i, expression);                         \
        w.scc = condition;                             \
    }
#define BINARY_SCC(name, expression, condition) \
    HANDLER(name) {                             \
        A32;                                    \
        B32;                                    \
        SIGNED;                                 \
        put32(w, i, expression);                \
        w.scc = condition;                      \
    }
// d = expression; SCC = d != 0
#define LOGIC(name, A, B, put, expression) \
    HANDLER(name) {                        \
        A;                                 \
        B;                                 \
        const decltype(a) d = expression;  \
        put(w, i, d);                      \
        w.scc = d != 0;                    \
    }
#define LOGIC32(name, expression) LOGIC(name, A32, B32, put32, expression)
#define LOGIC64(name, expression) LOGIC(name, A64, B64, put64, expression)
#define SHIFT64(name, expression) LOGIC(name, A64, B32, put64, expression)
// SCC = condition
#define COMPARE(name, A, B, condition) \
    HANDLER(name) {                    \
        A;                             \
        B;                             \
        SIGNED;                        \
        w.scc = condition;             \
    }
#define COMPARE32(name, condition) COMPARE(name, A32, B32, condition)
#define COMPARE_K(name, condition)                                               \
    HANDLER(name) {                                                              \
        A32;                                                                     \
        [[maybe_unused]] const int32_t sa = static_cast<int32_t>(a), sb = i.imm; \
        [[maybe_unused]] const uint32_t b = static_cast<uint16_t>(i.imm);        \
        w.scc = condition;                                                       \
    }
// EXEC = expression; the destination gets the old one or the new one
#define NEW_EXEC(name, result, expression)              \
    HANDLER(name) {                                     \
        A64;                                            \
        const uint64_t exec = w.exec(), d = expression; \
        put64(w, i, result);                            \
        w.set_pair(kExec, d);                           \
        w.scc = d != 0;                                 \
    }
#define SAVE_EXEC(name, expression) NEW_EXEC(name, exec, expression)
#define WRITE_EXEC(name, expression) NEW_EXEC(name, d, expression)
#define NOTHING(name) \
    HANDLER(name) {}
#define BRANCH_IF(name, condition)   \
    HANDLER(name) {                  \
        if (condition) branch(w, i); \
    }

inline void register_salu(Handler* table) {
    // ---- SOP2
    BINARY_SCC(s_add_u32, a + b, a + b < a);
    BINARY_SCC(s_sub_u32, a - b, a < b);
    HANDLER(s_add_i32) {
        A32;
        B32;
        SIGNED;
        int32_t d;
        w.scc = __builtin_add_overflow(sa, sb, &d);
        put32(w, i, static_cast<uint32_t>(d));
    };
    HANDLER(s_sub_i32) {
        A32;
        B32;
        SIGNED;
        int32_t d;
        w.scc = __builtin_sub_overflow(sa, sb, &d);
        put32(w, i, static_cast<uint32_t>(d));
    };
    HANDLER(s_addc_u32) {
        A32;
        B32;
        const uint64_t d = static_cast<uint64_t>(a) + b + w.scc;
        put32(w, i, static_cast<uint32_t>(d));
        w.scc = d >> 32;
    };
    HANDLER(s_subb_u32) {
        A32;
        B32;
        const uint64_t d = static_cast<uint64_t>(a) - b - w.scc;
        put32(w, i, static_cast<uint32_t>(d));
        w.scc = d >> 32 != 0;
    };
    BINARY_SCC(s_min_i32, sa < sb ? a : b, sa < sb);
    BINARY_SCC(s_min_u32, a < b ? a : b, a < b);
    BINARY_SCC(s_max_i32, sa > sb ? a : b, sa > sb);
    BINARY_SCC(s_max_u32, a > b ? a : b, a > b);
    BINARY(s_cselect_b32, A32, B32, put32, w.scc ? a : b);
    BINARY(s_cselect_b64, A64, B64, put64, w.scc ? a : b);
    LOGIC32(s_and_b32, a & b);
    LOGIC64(s_and_b64, a & b);
    LOGIC32(s_or_b32, a | b);
    LOGIC64(s_or_b64, a | b);
    LOGIC32(s_xor_b32, a ^ b);
    LOGIC64(s_xor_b64, a ^ b);
    LOGIC32(s_andn2_b32, a & ~b);
    LOGIC64(s_andn2_b64, a & ~b);
    LOGIC32(s_orn2_b32, a | ~b);
    LOGIC64(s_orn2_b64, a | ~b);
    LOGIC32(s_nand_b32, ~(a & b));
    LOGIC64(s_nand_b64, ~(a & b));
    LOGIC32(s_nor_b32, ~(a | b));
    LOGIC64(s_nor_b64, ~(a | b));
    LOGIC32(s_xnor_b32, ~(a ^ b));
    LOGIC64(s_xnor_b64, ~(a ^ b));
    LOGIC32(s_lshl_b32, a << (b & 31));
    SHIFT64(s_lshl_b64, a << (b & 63));
    LOGIC32(s_lshr_b32, a >> (b & 31));
    SHIFT64(s_lshr_b64, a >> (b & 63));
    LOGIC32(s_ashr_i32, static_cast<uint32_t>(static_cast<int32_t>(a) >> (b & 31)));
    SHIFT64(s_ashr_i64, static_cast<uint64_t>(static_cast<int64_t>(a) >> (b & 63)));
    PLAIN32(s_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31));
    BINARY(s_bfm_b64, A32, B32, put64, ((1ull << (a & 63)) - 1) << (b & 63));
    PLAIN32(s_mul_i32, a * b);
    LOGIC32(s_bfe_u32, bitfield<uint32_t>(a, b & 31, b >> 16 & 127));
    LOGIC32(s_bfe_i32, static_cast<uint32_t>(
                           bitfield<int32_t>(static_cast<int32_t>(a), b & 31, b >> 16 & 127)));
    SHIFT64(s_bfe_u64, bitfield<uint64_t>(a, b & 63, b >> 16 & 127));
    SHIFT64(s_bfe_i64, static_cast<uint64_t>(
                           bitfield<int64_t>(static_cast<int64_t>(a), b & 63, b >> 16 & 127)));
    LOGIC32(s_absdiff_i32, static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a - b : b - a);
    PLAIN32(s_mul_hi_u32, static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32));
    PLAIN32(s_mul_hi_i32, static_cast<uint32_t>(static_cast<int64_t>(sa) * sb >> 32));
#define SHIFT_ADD(name, n)                                      \
    HANDLER(name) {                                             \
        A32;                                                    \
        B32;                                                    \
        const uint64_t d = (static_cast<uint64_t>(a) << n) + b; \
        put32(w, i, static_cast<uint32_t>(d));                  \
        w.scc = d >> 32 != 0;                                   \
    }
    SHIFT_ADD(s_lshl1_add_u32, 1);
    SHIFT_ADD(s_lshl2_add_u32, 2);
    SHIFT_ADD(s_lshl3_add_u32, 3);
    SHIFT_ADD(s_lshl4_add_u32, 4);
#undef SHIFT_ADD
    PLAIN32(s_pack_ll_b32_b16, (a & 0xffff) | b << 16);
    PLAIN32(s_pack_lh_b32_b16, (a & 0xffff) | (b & 0xffff0000));
    PLAIN32(s_pack_hh_b32_b16, a >> 16 | (b & 0xffff0000));

    // ---- SOPK
    HANDLER(s_movk_i32) { put32(w, i, static_cast<uint32_t>(i.imm)); };
    HANDLER(s_cmovk_i32) {
        if (w.scc) put32(w, i, static_cast<uint32_t>(i.imm));
    };
    COMPARE_K(s_cmpk_eq_i32, sa == sb);
    COMPARE_K(s_cmpk_lg_i32, sa != sb);
    COMPARE_K(s_cmpk_gt_i32, sa > sb);
    COMPARE_K(s_cmpk_ge_i32, sa >= sb);
    COMPARE_K(s_cmpk_lt_i32, sa < sb);
    COMPARE_K(s_cmpk_le_i32, sa <= sb);
    COMPARE_K(s_cmpk_eq_u32, a == b);
    COMPARE_K(s_cmpk_lg_u32, a != b);
    COMPARE_K(s_cmpk_gt_u32, a > b);
    COMPARE_K(s_cmpk_ge_u32, a >= b);
    COMPARE_K(s_cmpk_lt_u32, a < b);
    COMPARE_K(s_cmpk_le_u32, a <= b);
    HANDLER(s_addk_i32) {
        int32_t d;
        w.scc = __builtin_add_overflow(static_cast<int32_t>(w.s[i.dst[0].index]), i.imm, &d);
        put32(w, i, static_cast<uint32_t>(d));
    };
    HANDLER(s_mulk_i32) { put32(w, i, w.s[i.dst[0].index] * static_cast<uint32_t>(i.imm)); };
    HANDLER(s_getreg_b32) {
        const uint32_t width = (i.imm >> 11 & 31) + 1;
        const uint32_t bits = hardware_register(w, i, i.imm & 63) >> (i.imm >> 6 & 31);
        put32(w, i, width == 32 ? bits : bits & ((1u << width) - 1));
    };
    HANDLER(s_setreg_b32) { set_hardware_register(w, i, scalar32(w, i.src[0])); };
    HANDLER(s_setreg_imm32_b32) { set_hardware_register(w, i, scalar32(w, i.src[0])); };
    HANDLER(s_call_b64) {
        put64(w, i, code_address(w, i));
        branch(w, i);
    };

    // ---- SOP1
    UNARY(s_mov_b32, A32, put32, a);
    UNARY(s_mov_b64, A64, put64, a);
    HANDLER(s_cmov_b32) {
        A32;
        if (w.scc) put32(w, i, a);
    };
    HANDLER(s_cmov_b64) {
        A64;
        if (w.scc) put64(w, i, a);
    };
    UNARY_SCC(s_not_b32, A32, put32, ~a, ~a != 0);
    UNARY_SCC(s_not_b64, A64, put64, ~a, ~a != 0);
    UNARY_SCC(s_wqm_b32, A32, put32, whole_quads(a), a != 0);
    UNARY_SCC(s_wqm_b64, A64, put64, whole_quads(a), a != 0);
    UNARY(s_brev_b32, A32, put32, reverse_bits(a));
    UNARY(s_brev_b64, A64, put64, reverse_bits(a));
#define COUNT(name, A, expression)             \
    HANDLER(name) {                            \
        A;                                     \
        const int d = expression;              \
        put32(w, i, static_cast<uint32_t>(d)); \
        w.scc = d != 0;                        \
    }
    COUNT(s_bcnt0_i32_b32, A32, std::popcount(~a));
    COUNT(s_bcnt0_i32_b64, A64, std::popcount(~a));
    COUNT(s_bcnt1_i32_b32, A32, std::popcount(a));
    COUNT(s_bcnt1_i32_b64, A64, std::popcount(a));
#undef COUNT
    UNARY(s_ff0_i32_b32, A32, put32, ~a ? std::countr_one(a) : ~0u);
    UNARY(s_ff0_i32_b64, A64, put32, ~a ? std::countr_one(a) : ~0u);
    UNARY(s_ff1_i32_b32, A32, put32, a ? std::countr_zero(a) : ~0u);
    UNARY(s_ff1_i32_b64, A64, put32, a ? std::countr_zero(a) : ~0u);
    UNARY(s_flbit_i32_b32, A32, put32, a ? std::countl_zero(a) : ~0u);
    UNARY(s_flbit_i32_b64, A64, put32, a ? std::countl_zero(a) : ~0u);
    UNARY(s_flbit_i32, A32, put32, leading_sign_bits(static_cast<int32_t>(a)));
    UNARY(s_flbit_i32_i64, A64, put32, leading_sign_bits(static_cast<int64_t>(a)));
    UNARY(s_sext_i32_i8, A32, put32, static_cast<uint32_t>(static_cast<int8_t>(a)));
    UNARY(s_sext_i32_i16, A32, put32, static_cast<uint32_t>(static_cast<int16_t>(a)));
    HANDLER(s_bitset0_b32) {
        A32;
        w.s[i.dst[0].index] &= ~(1u << (a & 31));
    };
    HANDLER(s_bitset1_b32) {
        A32;
        w.s[i.dst[0].index] |= 1u << (a & 31);
    };
    UNARY(s_bitset0_b64, A32, put64, w.pair(i.dst[0].index) & ~(1ull << (a & 63)));
    UNARY(s_bitset1_b64, A32, put64, w.pair(i.dst[0].index) | 1ull << (a & 63));
    HANDLER(s_getpc_b64) { put64(w, i, code_address(w, i)); };
    HANDLER(s_setpc_b64) {
        A64;
        jump_to_address(w, i, a);
    };
    HANDLER(s_swappc_b64) {
        A64;
        put64(w, i, code_address(w, i));
        jump_to_address(w, i, a);
    };
    SAVE_EXEC(s_and_saveexec_b64, a & exec);
    SAVE_EXEC(s_or_saveexec_b64, a | exec);
    SAVE_EXEC(s_xor_saveexec_b64, a ^ exec);
    SAVE_EXEC(s_andn2_saveexec_b64, a & ~exec);
    SAVE_EXEC(s_orn2_saveexec_b64, a | ~exec);
    SAVE_EXEC(s_nand_saveexec_b64, ~(a & exec));
    SAVE_EXEC(s_nor_saveexec_b64, ~(a | exec));
    SAVE_EXEC(s_xnor_saveexec_b64, ~(a ^ exec));
    SAVE_EXEC(s_andn1_saveexec_b64, ~a & exec);
    SAVE_EXEC(s_orn1_saveexec_b64, ~a | exec);
    WRITE_EXEC(s_andn1_wrexec_b64, ~a & exec);
    WRITE_EXEC(s_andn2_wrexec_b64, a & ~exec);
    UNARY_SCC(s_quadmask_b32, A32, put32, quad_mask(a), a != 0);
    UNARY_SCC(s_quadmask_b64, A64, put64, quad_mask(a), a != 0);
    // Register number plus M0.
    HANDLER(s_movrels_b32) { put32(w, i, w.s[(i.src[0].index + w.s[kM0]) & 127]); };
    HANDLER(s_movrels_b64) { put64(w, i, w.pair((i.src[0].index + w.s[kM0]) & 126)); };
    HANDLER(s_movreld_b32) {
        A32;
        w.s[(i.dst[0].index + w.s[kM0]) & 127] = a;
    };
    HANDLER(s_movreld_b64) {
        A64;
        w.set_pair((i.dst[0].index + w.s[kM0]) & 126, a);
    };
    HANDLER(s_abs_i32) {
        A32;
        const uint32_t d = static_cast<int32_t>(a) < 0 ? 0u - a : a;
        put32(w, i, d);
        w.scc = d != 0;
    };
    HANDLER(s_bitreplicate_b64_b32) {
        A32;
        uint64_t d = 0;
        for (int n = 0; n < 32; ++n) d |= static_cast<uint64_t>(a >> n & 1) * 3 << 2 * n;
        put64(w, i, d);
    };

    // ---- SOPC
    COMPARE32(s_cmp_eq_i32, a == b);
    COMPARE32(s_cmp_lg_i32, a != b);
    COMPARE32(s_cmp_gt_i32, sa > sb);
    COMPARE32(s_cmp_ge_i32, sa >= sb);
    COMPARE32(s_cmp_lt_i32, sa < sb);
    COMPARE32(s_cmp_le_i32, sa <= sb);
    COMPARE32(s_cmp_eq_u32, a == b);
    COMPARE32(s_cmp_lg_u32, a != b);
    COMPARE32(s_cmp_gt_u32, a > b);
    COMPARE32(s_cmp_ge_u32, a >= b);
    COMPARE32(s_cmp_lt_u32, a < b);
    COMPARE32(s_cmp_le_u32, a <= b);
    COMPARE32(s_bitcmp0_b32, !(a >> (b & 31) & 1));
    COMPARE32(s_bitcmp1_b32, a >> (b & 31) & 1);
    COMPARE(s_bitcmp0_b64, A64, B32, !(a >> (b & 63) & 1));
    COMPARE(s_bitcmp1_b64, A64, B32, a >> (b & 63) & 1);
    COMPARE(s_cmp_eq_u64, A64, B64, a == b);
    COMPARE(s_cmp_lg_u64, A64, B64, a != b);

    // Indexing of vector registers by M0: index in bits 7:0, which operands in bits 15:12.
    HANDLER(s_set_gpr_idx_on) {
        A32;
        w.s[kM0] = (w.s[kM0] & 0xffff0f00) | (a & 255) | static_cast<uint32_t>(i.imm & 15) << 12;
        w.mode |= kGprIndexing;
    };
    HANDLER(s_set_gpr_idx_off) { w.mode &= ~kGprIndexing; };
    HANDLER(s_set_gpr_idx_mode) {
        w.s[kM0] = (w.s[kM0] & 0xffff0fff) | static_cast<uint32_t>(i.imm & 15) << 12;
    };
    HANDLER(s_set_gpr_idx_idx) {
        A32;
        w.s[kM0] = (w.s[kM0] & 0xffffff00) | (a & 255);
    };

    // ---- SOPP
    NOTHING(s_nop);
    NOTHING(v_nop);
    NOTHING(v_clrexcp);
    NOTHING(s_sleep);
    NOTHING(s_setprio);
    NOTHING(s_wakeup);
    NOTHING(s_sethalt);
    NOTHING(s_icache_inv);
    NOTHING(s_incperflevel);
    NOTHING(s_decperflevel);
    NOTHING(s_ttracedata);
    NOTHING(s_sendmsg);
    HANDLER(s_endpgm) { w.status = Status::ended; };
    HANDLER(s_endpgm_saved) { w.status = Status::ended; };
    HANDLER(s_sendmsghalt) { w.status = Status::ended; };
    HANDLER(s_barrier) { w.status = Status::barrier; };
    HANDLER(s_trap) { fail(i, "trap #", i.imm & 255); };
    HANDLER(s_branch) { branch(w, i); };
    BRANCH_IF(s_cbranch_scc0, !w.scc);
    BRANCH_IF(s_cbranch_scc1, w.scc);
    BRANCH_IF(s_cbranch_vccz, w.vcc() == 0);
    BRANCH_IF(s_cbranch_vccnz, w.vcc() != 0);
    BRANCH_IF(s_cbranch_execz, w.exec() == 0);
    BRANCH_IF(s_cbranch_execnz, w.exec() != 0);
    // No debugger is attached.
    NOTHING(s_cbranch_cdbgsys);
    NOTHING(s_cbranch_cdbguser);
    NOTHING(s_cbranch_cdbgsys_or_user);
    NOTHING(s_cbranch_cdbgsys_and_user);
}

}  // namespace
}  // namespace emulator::VARIANT
