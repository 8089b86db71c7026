// Moves, selects, byte permutations, and access to single lanes.
#pragma once

#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

inline void conditional_move(Wave& w, const Inst& i) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    Lanes ta, tb, r;
    const uint32_t* a = fetch(w, i, 0, false, ta);
    const uint32_t* b = fetch(w, i, 1, false, tb);
    const uint64_t mask = scalar64(w, i.src[2]);
    const bool direct = w.exec() == kAllLanes && !(i.sdwa | i.dpp);
    uint32_t* const to = direct ? w.v[i.dst[0].index] : r.v;
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l)
            to[32 * h + l] = (bits >> l & 1) ? b[32 * h + l] : a[32 * h + l];
    }
    if (!direct) store_modified(w, i, r, Result::bits);
}

inline void move_pair(Wave& w, const Inst& i) {
    if (w.mode & kGprIndexing) [[unlikely]]
        return run_special(w, i, 0);
    const Operand& o = i.src[0];
    if (i.dpp || w.exec() != kAllLanes) return map<U64, U64>(w, i, [](uint64_t a) { return a; });
    uint32_t *const low = w.v[i.dst[0].index], *const high = w.v[i.dst[0].index + 1];
    if (o.kind == Kind::vector) {  // the pairs may share a register
        Lanes copy;
        std::memcpy(copy.v, w.v[o.index + 1], sizeof copy.v);
        std::memmove(low, w.v[o.index], sizeof copy.v);
        std::memcpy(high, copy.v, sizeof copy.v);
    } else {
        const uint64_t value = scalar64(w, o);
        broadcast(low, static_cast<uint32_t>(value));
        broadcast(high, static_cast<uint32_t>(value >> 32));
    }
}

inline int first_lane(uint64_t exec) { return exec ? std::countr_zero(exec) : 0; }

// Byte permutation of {src0, src1} by the selector bytes of src2.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r = 0;
    for (int n = 0; n < 4; ++n) {
        const uint32_t s = selector >> 8 * n & 255;
        uint32_t byte = (s & 4 ? a : b) >> 8 * (s & 3) & 255;
        const uint32_t sign = (s & 2 ? a : b) >> (s & 1 ? 31 : 15) & 1 ? 255 : 0;
        byte = s >= 8 ? sign : byte;
        byte = s == 12 ? 0 : byte;
        byte = s > 12 ? 255 : byte;
        r |= byte << 8 * n;
    }
    return r;
}
inline void permute_bytes(Wave& w, const Inst& i) {
    const Operand& o = i.src[2];
    if (o.kind == Kind::vector)
        return map<U32, U32, U32, U32>(
            w, i, [](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c); });
    const uint32_t selector = scalar32(w, o);
    if (selector & 0xf8f8f8f8)
        return map<U32, U32, U32>(w, i,
                                  [=](uint32_t a, uint32_t b) { return permute(a, b, selector); });
    // All four bytes come from the registers: each is one shift and mask, the same in every lane.
    const uint32_t s0 = selector & 7, s1 = selector >> 8 & 7, s2 = selector >> 16 & 7,
                   s3 = selector >> 24;
    const uint32_t m0 = s0 & 4 ? ~0u : 0, m1 = s1 & 4 ? ~0u : 0, m2 = s2 & 4 ? ~0u : 0,
                   m3 = s3 & 4 ? ~0u : 0;
    const uint32_t r0 = 8 * (s0 & 3), r1 = 8 * (s1 & 3), r2 = 8 * (s2 & 3), r3 = 8 * (s3 & 3);
    map<U32, U32, U32>(w, i, [=](uint32_t a, uint32_t b) {
        const uint32_t x0 = ((a & m0) | (b & ~m0)) >> r0 & 255,
                       x1 = ((a & m1) | (b & ~m1)) >> r1 & 255;
        const uint32_t x2 = ((a & m2) | (b & ~m2)) >> r2 & 255,
                       x3 = ((a & m3) | (b & ~m3)) >> r3 & 255;
        return x0 | x1 << 8 | x2 << 16 | x3 << 24;
    });
}

inline void register_moves(Handler* table) {
    V1(v_mov_b32, U32, U32, a);
    HANDLER(v_mov_b64) { move_pair(w, i); };
    V1(v_accvgpr_read_b32, U32, U32, a);
    V1(v_accvgpr_write_b32, U32, U32, a);
    V1(v_accvgpr_mov_b32, U32, U32, a);
    HANDLER(v_cndmask_b32) { conditional_move(w, i); };
    HANDLER(v_perm_b32) { permute_bytes(w, i); };
    HANDLER(v_swap_b32) {
        if (w.mode & kGprIndexing) [[unlikely]]
            return run_special(w, i, 0);
        Lanes a, b;
        uint32_t *x = w.v[i.dst[0].index], *y = w.v[i.src[0].index];
        std::memcpy(a.v, x, sizeof a.v);
        std::memcpy(b.v, y, sizeof b.v);
        merge(x, b.v, w.exec());
        merge(y, a.v, w.exec());
    };
    HANDLER(v_readfirstlane_b32) {
        const Operand& o = i.src[0];
        w.s[i.dst[0].index] =
            o.kind == Kind::vector ? w.v[o.index][first_lane(w.exec())] : scalar32(w, o);
    };
    HANDLER(v_readlane_b32) {
        const Operand& o = i.src[0];
        const uint32_t lane = scalar32(w, i.src[1]) & 63;
        w.s[i.dst[0].index] = o.kind == Kind::vector ? w.v[o.index][lane] : scalar32(w, o);
    };
    HANDLER(v_writelane_b32) {
        w.v[i.dst[0].index][scalar32(w, i.src[1]) & 63] = scalar32(w, i.src[0]);
    };
}

}  // namespace
}  // namespace emulator::VARIANT
