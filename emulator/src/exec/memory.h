// Memory instructions: which handler each has.
//
// Semantics after AMD's "Instinct MI300 Instruction Set Architecture" manual, chapters 8 to 11.
// Data is moved at once; whether a program may already touch it is the checker's business
// (check/checker.h).
#pragma once

#include "exec/buffer.h"
#include "exec/flat.h"
#include "exec/scalar_memory.h"

namespace emulator::VARIANT {
namespace {

inline void register_memory(Handler* table) {
    using namespace memory_ops;
#define SET(name, ...) table[static_cast<size_t>(Op::name)] = __VA_ARGS__;
    SET(s_waitcnt, waitcnt)
    for (Op op : {Op::s_dcache_inv, Op::s_dcache_wb, Op::s_dcache_inv_vol, Op::s_dcache_wb_vol,
                  Op::s_dcache_discard, Op::s_dcache_discard_x2, Op::buffer_wbl2, Op::buffer_inv,
                  Op::buffer_wbinvl1, Op::buffer_wbinvl1_vol, Op::ds_nop})
        table[static_cast<size_t>(op)] = nothing;
    SET(s_memtime, clock)
    SET(s_memrealtime, clock)

    SET(s_load_dword, s_load<1>)
    SET(s_load_dwordx2, s_load<2>)
    SET(s_load_dwordx4, s_load<4>)
    SET(s_load_dwordx8, s_load<8>)
    SET(s_load_dwordx16, s_load<16>)
    SET(s_buffer_load_dword, s_buffer_load<1>)
    SET(s_buffer_load_dwordx2, s_buffer_load<2>)
    SET(s_buffer_load_dwordx4, s_buffer_load<4>)
    SET(s_buffer_load_dwordx8, s_buffer_load<8>)
    SET(s_buffer_load_dwordx16, s_buffer_load<16>)

    SET(ds_read_b32, ds_read<Shape<1>>)
    SET(ds_read_b64, ds_read<Shape<2>>)
    SET(ds_read_b96, ds_read<Shape<3>>)
    SET(ds_read_b128, ds_read<Shape<4>>)
    SET(ds_read_u8, ds_read<Ubyte>)
    SET(ds_read_i8, ds_read<Sbyte>)
    SET(ds_read_u16, ds_read<Ushort>)
    SET(ds_read_i16, ds_read<Sshort>)
    SET(ds_read_u8_d16, ds_read<D16<Narrow::u8>>)
    SET(ds_read_u8_d16_hi, ds_read<D16Hi<Narrow::u8>>)
    SET(ds_read_i8_d16, ds_read<D16<Narrow::i8>>)
    SET(ds_read_i8_d16_hi, ds_read<D16Hi<Narrow::i8>>)
    SET(ds_read_u16_d16, ds_read<D16<Narrow::u16>>)
    SET(ds_read_u16_d16_hi, ds_read<D16Hi<Narrow::u16>>)
    SET(ds_read2_b32, ds_read2<1, 1>)
    SET(ds_read2_b64, ds_read2<2, 1>)
    SET(ds_read2st64_b32, ds_read2<1, 64>)
    SET(ds_read2st64_b64, ds_read2<2, 64>)
    SET(ds_write_b32, ds_write<Shape<1>>)
    SET(ds_write_b64, ds_write<Shape<2>>)
    SET(ds_write_b96, ds_write<Shape<3>>)
    SET(ds_write_b128, ds_write<Shape<4>>)
    SET(ds_write_b8, ds_write<Ubyte>)
    SET(ds_write_b16, ds_write<Ushort>)
    SET(ds_write_b8_d16_hi, ds_write<D16Hi<Narrow::u8>>)
    SET(ds_write_b16_d16_hi, ds_write<D16Hi<Narrow::u16>>)
    SET(ds_write2_b32, ds_write2<1, 1>)
    SET(ds_write2_b64, ds_write2<2, 1>)
    SET(ds_write2st64_b32, ds_write2<1, 64>)
    SET(ds_write2st64_b64, ds_write2<2, 64>)

#define DS_ATOMIC(stem, kind, Operation)                            \
    SET(ds_##stem##_##kind##32, ds_atomic<uint32_t, Operation>)     \
    SET(ds_##stem##_##kind##64, ds_atomic<uint64_t, Operation>)     \
    SET(ds_##stem##_rtn_##kind##32, ds_atomic<uint32_t, Operation>) \
    SET(ds_##stem##_rtn_##kind##64, ds_atomic<uint64_t, Operation>)
    DS_ATOMIC(add, u, Add)
    DS_ATOMIC(sub, u, Sub)
    DS_ATOMIC(rsub, u, Rsub)
    DS_ATOMIC(inc, u, Inc)
    DS_ATOMIC(dec, u, Dec)
    DS_ATOMIC(min, i, MinI)
    DS_ATOMIC(max, i, MaxI)
    DS_ATOMIC(min, u, MinU)
    DS_ATOMIC(max, u, MaxU)
    DS_ATOMIC(and, b, And)
    DS_ATOMIC(or, b, Or)
    DS_ATOMIC(xor, b, Xor)
    DS_ATOMIC(mskor, b, Mskor)
    DS_ATOMIC(cmpst, b, CmpStore)
    DS_ATOMIC(cmpst, f, CmpStoreF)
    DS_ATOMIC(add, f, AddF)
    DS_ATOMIC(min, f, MinF)
    DS_ATOMIC(max, f, MaxF)
    SET(ds_wrxchg_rtn_b32, ds_atomic<uint32_t, Swap>)
    SET(ds_wrxchg_rtn_b64, ds_atomic<uint64_t, Swap>)
    SET(ds_wrxchg2_rtn_b32, ds_wrxchg2<uint32_t, 1>)
    SET(ds_wrxchg2_rtn_b64, ds_wrxchg2<uint64_t, 1>)
    SET(ds_wrxchg2st64_rtn_b32, ds_wrxchg2<uint32_t, 64>)
    SET(ds_wrxchg2st64_rtn_b64, ds_wrxchg2<uint64_t, 64>)
    SET(ds_wrap_rtn_b32, ds_atomic<uint32_t, Wrap>)
    SET(ds_condxchg32_rtn_b64, ds_atomic<uint64_t, CondXchg32>)
    SET(ds_pk_add_f16, ds_atomic<uint32_t, PkAddF16>)
    SET(ds_pk_add_rtn_f16, ds_atomic<uint32_t, PkAddF16>)
    SET(ds_pk_add_bf16, ds_atomic<uint32_t, PkAddBf16>)
    SET(ds_pk_add_rtn_bf16, ds_atomic<uint32_t, PkAddBf16>)
    SET(ds_swizzle_b32, ds_swizzle)
    SET(ds_permute_b32, ds_permute)
    SET(ds_bpermute_b32, ds_bpermute)
    SET(ds_append, ds_append<true>)
    SET(ds_consume, ds_append<false>)
    SET(ds_read_addtid_b32, ds_read_addtid)
    SET(ds_write_addtid_b32, ds_write_addtid)

#define LOADS(p)                                            \
    SET(p##_load_ubyte, p##_load<Ubyte>)                    \
    SET(p##_load_sbyte, p##_load<Sbyte>)                    \
    SET(p##_load_ushort, p##_load<Ushort>)                  \
    SET(p##_load_sshort, p##_load<Sshort>)                  \
    SET(p##_load_dword, p##_load<Shape<1>>)                 \
    SET(p##_load_dwordx2, p##_load<Shape<2>>)               \
    SET(p##_load_dwordx3, p##_load<Shape<3>>)               \
    SET(p##_load_dwordx4, p##_load<Shape<4>>)               \
    SET(p##_load_ubyte_d16, p##_load<D16<Narrow::u8>>)      \
    SET(p##_load_ubyte_d16_hi, p##_load<D16Hi<Narrow::u8>>) \
    SET(p##_load_sbyte_d16, p##_load<D16<Narrow::i8>>)      \
    SET(p##_load_sbyte_d16_hi, p##_load<D16Hi<Narrow::i8>>) \
    SET(p##_load_short_d16, p##_load<D16<Narrow::u16>>)     \
    SET(p##_load_short_d16_hi, p##_load<D16Hi<Narrow::u16>>)
#define STORES(p)                                              \
    SET(p##_store_byte, p##_store<Ubyte>)                      \
    SET(p##_store_byte_d16_hi, p##_store<D16Hi<Narrow::u8>>)   \
    SET(p##_store_short, p##_store<Ushort>)                    \
    SET(p##_store_short_d16_hi, p##_store<D16Hi<Narrow::u16>>) \
    SET(p##_store_dword, p##_store<Shape<1>>)                  \
    SET(p##_store_dwordx2, p##_store<Shape<2>>)                \
    SET(p##_store_dwordx3, p##_store<Shape<3>>)                \
    SET(p##_store_dwordx4, p##_store<Shape<4>>)
#define BOTH(p, stem, Operation)                            \
    SET(p##_atomic_##stem, p##_atomic<uint32_t, Operation>) \
    SET(p##_atomic_##stem##_x2, p##_atomic<uint64_t, Operation>)
#define ATOMICS(p)                                      \
    BOTH(p, swap, Swap)                                 \
    BOTH(p, cmpswap, CmpSwap)                           \
    BOTH(p, add, Add)                                   \
    BOTH(p, sub, Sub)                                   \
    BOTH(p, smin, MinI)                                 \
    BOTH(p, umin, MinU)                                 \
    BOTH(p, smax, MaxI)                                 \
    BOTH(p, umax, MaxU)                                 \
    BOTH(p, and, And)                                   \
    BOTH(p, or, Or)                                     \
    BOTH(p, xor, Xor)                                   \
    BOTH(p, inc, Inc)                                   \
    BOTH(p, dec, Dec)                                   \
    SET(p##_atomic_add_f32, p##_atomic<uint32_t, AddF>) \
    SET(p##_atomic_add_f64, p##_atomic<uint64_t, AddF>) \
    SET(p##_atomic_min_f64, p##_atomic<uint64_t, MinF>) \
    SET(p##_atomic_max_f64, p##_atomic<uint64_t, MaxF>) \
    SET(p##_atomic_pk_add_f16, p##_atomic<uint32_t, PkAddF16>)
    LOADS(buffer)
    STORES(buffer)
    ATOMICS(buffer)
    SET(buffer_load_format_x, buffer_format<1, false>)
    SET(buffer_load_format_xy, buffer_format<2, false>)
    SET(buffer_load_format_xyz, buffer_format<3, false>)
    SET(buffer_load_format_xyzw, buffer_format<4, false>)
    SET(buffer_store_format_x, buffer_format<1, true>)
    SET(buffer_store_format_xy, buffer_format<2, true>)
    SET(buffer_store_format_xyz, buffer_format<3, true>)
    SET(buffer_store_format_xyzw, buffer_format<4, true>)
    LOADS(flat)
    STORES(flat)
    ATOMICS(flat)
    SET(flat_atomic_pk_add_bf16, flat_atomic<uint32_t, PkAddBf16>)
    LOADS(global)
    STORES(global)
    ATOMICS(global)
    SET(global_atomic_pk_add_bf16, global_atomic<uint32_t, PkAddBf16>)
    LOADS(scratch)
    STORES(scratch)
#define LDS_LOADS(p)                               \
    SET(p##_load_lds_ubyte, p##_load_lds<Ubyte>)   \
    SET(p##_load_lds_sbyte, p##_load_lds<Sbyte>)   \
    SET(p##_load_lds_ushort, p##_load_lds<Ushort>) \
    SET(p##_load_lds_sshort, p##_load_lds<Sshort>) \
    SET(p##_load_lds_dword, p##_load_lds<Shape<1>>)
    LDS_LOADS(global)
    LDS_LOADS(scratch)
}

}  // namespace
}  // namespace emulator::VARIANT
