// Scratch: a lane's private memory.
#pragma once

#include "exec/global.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

// Bytes of one lane's private segment are swizzled in dwords: dword d of lane l at (d * 64 + l)
// * 4.
inline uint8_t* scratch_at(const Wave& w, uint32_t offset, int lane) {
    return w.scratch + (static_cast<uint64_t>(offset / 4) * kLanes + lane) * 4 + offset % 4;
}

inline uint64_t scratch_lanes(Wave& w, const Inst& i, const uint32_t* address, uint64_t lanes,
                              uint32_t bytes, Access access) {
    if (w.counters)
        w.counters->scratch_bytes += static_cast<uint64_t>(std::popcount(lanes)) * bytes;
    if (w.check) return w.check->scratch_access(w, i, address, lanes, bytes, access);
    if (!i.src[0].dwords)  // one offset for all lanes
        return static_cast<uint64_t>(address[0]) + bytes <= w.scratch_bytes ? lanes : 0;
    uint64_t good = 0;
    each_lane(lanes, [&](int lane) {
        if (static_cast<uint64_t>(address[lane]) + bytes <= w.scratch_bytes) good |= 1ull << lane;
    });
    return good;
}

inline void scratch_addresses(const Wave& w, const Inst& i, uint32_t* address) {
    const uint32_t base = static_cast<uint32_t>(i.imm) + scalar(w, i.src[3]);
    for (int lane = 0; lane < kLanes; ++lane)
        address[lane] = base + (i.src[0].dwords ? w.v[i.src[0].index][lane] : 0);
}

inline bool same_row(const Inst& i, uint32_t offset, uint64_t good) {
    return !i.src[0].dwords && good == ~0ull && offset % 4 == 0;
}

template <class S>
inline void scratch_read(Wave& w, const uint32_t* address, uint64_t good, Row* to) {
    each_lane(good, [&](int lane) {
        uint8_t bytes[S::bytes];
        for (uint32_t b = 0; b < S::bytes; ++b) bytes[b] = *scratch_at(w, address[lane] + b, lane);
        S::load(to, 1ull << lane, [&](int) { return bytes; });
    });
}

template <class S>
inline void scratch_write(Wave& w, const uint32_t* address, uint64_t good, const Row* from) {
    each_lane(good, [&](int lane) {
        uint8_t bytes[S::bytes];
        S::store(from, 1ull << lane, [&](int) { return bytes; });
        for (uint32_t b = 0; b < S::bytes; ++b) *scratch_at(w, address[lane] + b, lane) = bytes[b];
    });
}

template <class S>
void scratch_load(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    scratch_addresses(w, i, address);
    const uint64_t lanes = w.exec();
    const uint64_t good = scratch_lanes(w, i, address, lanes, S::bytes, Access::load);
    Row* to = &w.v[i.dst[0].index];
    // A spilled register lies as a row of 256 bytes.
    if (S::narrow == Narrow::none && same_row(i, address[0], good))
        std::memcpy(to, scratch_at(w, address[0], 0), sizeof(Row) * S::rows);
    else
        scratch_read<S>(w, address, good, to);
    zero_rows(to, S::rows, lanes & ~good);
}

template <class S>
void scratch_store(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    scratch_addresses(w, i, address);
    const uint64_t good = scratch_lanes(w, i, address, w.exec(), S::bytes, Access::store);
    const Row* from = &w.v[i.src[1].index];
    if (S::narrow == Narrow::none && same_row(i, address[0], good))
        std::memcpy(scratch_at(w, address[0], 0), from, sizeof(Row) * S::rows);
    else
        scratch_write<S>(w, address, good, from);
}

template <class S>
void scratch_load_lds(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    scratch_addresses(w, i, address);
    Row data[1] = {};
    scratch_read<S>(w, address, scratch_lanes(w, i, address, w.exec(), S::bytes, Access::load),
                    data);
    dma_write(w, i, w.exec(), data[0]);
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
