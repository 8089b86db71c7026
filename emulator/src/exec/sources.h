// Source operands of scalar and vector instructions.
//
// A source that is a plain VGPR is read in place, anything else (scalar, constant, neg, abs,
// op_sel, SDWA, DPP) is first written to a temporary of 64 lanes.
#pragma once

#include <cstring>

#include "exec/small_floats.h"
#include "machine/lanes.h"

namespace emulator::VARIANT {
namespace {

// ---- scalar operands

inline uint64_t special_value(const Wave& w, const Operand& o) {
    const auto wide = [&](uint64_t base) { return o.dwords == 2 ? base : base >> 32; };
    switch (o.index) {
        case 235:
            return wide(kSharedBase);
        case 236:
            return wide(kSharedBase | 0xffffffffull);
        case 237:
            return wide(kPrivateBase);
        case 238:
            return wide(kPrivateBase | 0xffffffffull);
        case 251:
            return w.vcc() == 0;
        case 252:
            return w.exec() == 0;
        case 253:
            return w.scc;
        default:
            fail("source operand # does not exist on gfx942", o.index);
    }
}

inline uint32_t scalar32(const Wave& w, const Operand& o) {
    if (o.kind == Kind::scalar) return w.s[o.index];
    if (o.kind == Kind::constant) return static_cast<uint32_t>(o.value);
    return static_cast<uint32_t>(special_value(w, o));
}

inline uint64_t scalar64(const Wave& w, const Operand& o) {
    if (o.kind == Kind::scalar) return w.pair(o.index);
    if (o.kind == Kind::constant) return o.value;
    return special_value(w, o);
}

// ---- data parallel primitives

// Lanes whose source lane exists and is active.
inline uint64_t dpp_valid(const DppLanes& lanes, uint64_t exec) {
    uint64_t valid = 0;
    for (int l = 0; l < kLanes; ++l) {
        const int from = lanes.from[l];
        valid |= (from >= 0 ? exec >> from & 1 : 0) << l;
    }
    return valid;
}

// Lanes that an instruction writes: EXEC, and for DPP those that its masks and bounds leave.
[[gnu::noinline]] inline uint64_t dpp_write_mask(const Wave& w, const Inst& i) {
    uint64_t mask = w.exec();
    for (int row = 0; row < 4; ++row) {
        if (!(i.row_mask >> row & 1)) mask &= ~(0xffffull << 16 * row);
        for (int bank = 0; bank < 4; ++bank)
            if (!(i.bank_mask >> bank & 1)) mask &= ~(0xfull << (16 * row + 4 * bank));
    }
    return i.bound_ctrl ? mask : mask & dpp_valid(dpp_lanes(i.dpp_ctrl), w.exec());
}

inline uint64_t write_mask(const Wave& w, const Inst& i) {
    return i.dpp ? dpp_write_mask(w, i) : w.exec();
}

inline void dpp_read(const Wave& w, const Inst& i, const uint32_t* from, uint32_t* to) {
    const DppLanes& lanes = dpp_lanes(i.dpp_ctrl);
    const uint64_t valid = dpp_valid(lanes, w.exec());
    uint32_t copy[kLanes];  // `from` may be `to`
    std::memcpy(copy, from, sizeof copy);
    for (int l = 0; l < kLanes; ++l) to[l] = copy[lanes.from[l] & 63] & (0u - (valid >> l & 1));
}

// ---- source operands of one register

inline void broadcast(uint32_t* to, uint32_t value) { LANE_LOOP to[l] = value; }

inline uint32_t sign_bit(Type type) {
    return type == Type::f16 || type == Type::b16 ? 0x8000u : 0x80000000u;
}

inline uint32_t flush32(uint32_t bits) { return bits & 0x7f800000 ? bits : bits & 0x80000000; }

inline uint32_t select_sdwa(uint32_t bits, uint32_t sel, bool sext) {
    uint32_t shift = 0, width = 32;
    if (sel < 4)
        shift = 8 * sel, width = 8;
    else if (sel < 6)
        shift = 16 * (sel - 4), width = 16;
    if (width == 32) return bits;
    const uint32_t up = bits << (32 - width - shift);
    return sext ? static_cast<uint32_t>(static_cast<int32_t>(up) >> (32 - width))
                : up >> (32 - width);
}

// Everything but a plain VGPR. `flush`: subnormal single-precision inputs count as zero.
[[gnu::noinline]] inline const uint32_t* fetch_modified(const Wave& w, const Inst& i, int n,
                                                        bool flush, Lanes& t) {
    const Operand& o = i.src[n];
    const uint32_t sign = sign_bit(o.type);
    const uint32_t keep = o.abs ? ~sign : ~0u, flip = o.neg ? sign : 0u;
    if (o.kind != Kind::vector) {
        uint32_t bits = scalar32(w, o);
        if (i.sdwa) bits = select_sdwa(bits, o.sel, o.sext);
        if (o.op_sel) bits >>= 16;
        bits = (bits & keep) ^ flip;
        broadcast(t.v, flush ? flush32(bits) : bits);
        return t.v;
    }
    const uint32_t* from = w.v[o.index];
    if (i.dpp && n == 0) {
        dpp_read(w, i, from, t.v);
        from = t.v;
    } else if (i.sdwa && o.sel != 6) {
        const uint32_t sel = o.sel;
        const bool sext = o.sext;
        LANE_LOOP t.v[l] = select_sdwa(from[l], sel, sext);
        from = t.v;
    } else if (o.op_sel) {
        LANE_LOOP t.v[l] = from[l] >> 16;
        from = t.v;
    }
    if (flush) {
        LANE_LOOP t.v[l] = flush32((from[l] & keep) ^ flip);
    } else {
        LANE_LOOP t.v[l] = (from[l] & keep) ^ flip;
    }
    return t.v;
}

inline const uint32_t* fetch(const Wave& w, const Inst& i, int n, bool flush, Lanes& t) {
    const Operand& o = i.src[n];
    if (o.kind == Kind::vector && !(o.neg | o.abs | o.op_sel | i.sdwa | i.dpp | flush)) [[likely]]
        return w.v[o.index];
    return fetch_modified(w, i, n, flush, t);
}

// Half operands become floats.
[[gnu::noinline]] inline const uint32_t* fetch_half(const Wave& w, const Inst& i, int n, Lanes& t) {
    const uint32_t* bits = fetch(w, i, n, false, t);
    if (w.mode & kDenormIn64) {
        LANE_LOOP t.v[l] = as_bits(half_to_float(bits[l] & 0xffff));
    } else {
        LANE_LOOP t.v[l] =
            as_bits(half_to_float(bits[l] & 0x7c00 ? bits[l] & 0xffff : bits[l] & 0x8000));
    }
    return t.v;
}

// ---- source operands of two registers

[[gnu::noinline]] inline void fetch_wide(const Wave& w, const Inst& i, int n, Lanes64& t) {
    const Operand& o = i.src[n];
    const uint64_t keep = o.abs ? ~(1ull << 63) : ~0ull, flip = o.neg ? 1ull << 63 : 0ull;
    if (o.kind != Kind::vector) {
        const uint64_t bits = (scalar64(w, o) & keep) ^ flip;
        LANE_LOOP t.v[l] = bits;
        return;
    }
    const uint32_t *low = w.v[o.index], *high = w.v[o.index + 1];
    Lanes a, b;
    if (i.dpp && n == 0) {
        dpp_read(w, i, low, a.v);
        dpp_read(w, i, high, b.v);
        low = a.v;
        high = b.v;
    }
    LANE_LOOP t.v[l] = ((static_cast<uint64_t>(high[l]) << 32 | low[l]) & keep) ^ flip;
}

}  // namespace
}  // namespace emulator::VARIANT
