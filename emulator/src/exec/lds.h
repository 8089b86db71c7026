// LDS: reads, writes, atomics, and the cross-lane operations of its unit.
#pragma once

#include "check/checker.h"
#include "count/counters.h"
#include "exec/atomics.h"
#include "machine/lanes.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

// Announces an LDS access and returns the lanes that lie inside the allocation.
inline uint64_t lds_lanes(Wave& w, const Inst& i, const uint32_t* address, uint64_t lanes,
                          uint32_t bytes, Access access, uint32_t dword = 0) {
    if (w.check) w.check->lds_access(w, i, address, lanes, bytes, access, dword);
    if (w.counters) w.counters->count_lds(i, address, lanes, bytes, access == Access::store);
    const uint32_t size = static_cast<uint32_t>(w.group->lds.size());
    const uint32_t limit = size >= bytes ? size - bytes : 0;
    uint32_t highest = 0;
    if (lanes == ~0ull) {
        for (int lane = 0; lane < kLanes; ++lane)
            highest = address[lane] > highest ? address[lane] : highest;
    } else {
        each_lane(lanes,
                  [&](int lane) { highest = address[lane] > highest ? address[lane] : highest; });
    }
    if (size >= bytes && highest <= limit) return lanes;
    uint64_t good = 0;
    each_lane(lanes, [&](int lane) {
        if (size >= bytes && address[lane] <= limit) good |= 1ull << lane;
    });
    return good;
}

inline void lds_addresses(const Wave& w, const Inst& i, uint32_t offset, uint32_t* address) {
    const Row& from = w.v[i.src[0].index];
    for (int lane = 0; lane < kLanes; ++lane) address[lane] = from[lane] + offset;
}

template <class S>
inline void lds_read(Wave& w, const Inst& i, const uint32_t* address, Row* to, uint32_t dword) {
    const uint64_t lanes = w.exec();
    const uint64_t good = lds_lanes(w, i, address, lanes, S::bytes, Access::load, dword);
    const uint8_t* lds = w.group->lds.data();
    S::load(to, good, [=](int lane) { return lds + address[lane]; });
    if (good != lanes) zero_rows(to, S::rows, lanes & ~good);
}

template <class S>
inline void lds_write(Wave& w, const Inst& i, const uint32_t* address, const Row* from,
                      uint32_t dword) {
    const uint64_t good = lds_lanes(w, i, address, w.exec(), S::bytes, Access::store, dword);
    uint8_t* lds = w.group->lds.data();
    S::store(from, good, [=](int lane) { return lds + address[lane]; });
}

template <class S>
void ds_read(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    lds_addresses(w, i, i.imm, address);
    lds_read<S>(w, i, address, &w.v[i.dst[0].index], 0);
}

template <class S>
void ds_write(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    lds_addresses(w, i, i.imm, address);
    lds_write<S>(w, i, address, &w.v[i.src[1].index], 0);
}

// Two elements of N dwords; offsets count elements, or 64 elements.
template <int N, int Scale>
void ds_read2(Wave& w, const Inst& i) {
    uint32_t first[kLanes], second[kLanes];
    lds_addresses(w, i, i.offset0 * 4 * N * Scale, first);
    lds_addresses(w, i, i.offset1 * 4 * N * Scale, second);  // before a load overwrites the address
    Row* to = &w.v[i.dst[0].index];
    lds_read<Shape<N>>(w, i, first, to, 0);
    lds_read<Shape<N>>(w, i, second, to + N, N);
}

template <int N, int Scale>
void ds_write2(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    lds_addresses(w, i, i.offset0 * 4 * N * Scale, address);
    lds_write<Shape<N>>(w, i, address, &w.v[i.src[1].index], 0);
    lds_addresses(w, i, i.offset1 * 4 * N * Scale, address);
    lds_write<Shape<N>>(w, i, address, &w.v[i.src[2].index], N);
}

// A workgroup's waves run in one thread: lane after lane is atomic enough.
template <class T, class Operation>
inline void lds_atomic(Wave& w, const Inst& i, const uint32_t* address, const Row* data,
                       const Row* data1, Row* result, uint32_t dword) {
    const uint64_t lanes = w.exec();
    uint64_t good = lds_lanes(w, i, address, lanes, sizeof(T), Access::atomic, dword);
    uint8_t* lds = w.group->lds.data();
    each_lane(lanes, [&](int lane) {
        T before = 0;
        if (good >> lane & 1 && address[lane] % sizeof(T) == 0) {
            uint8_t* at = lds + address[lane];
            before = read<T>(at);
            write(at, Operation::apply(before, data_of<T>(data, lane),
                                       data1 ? data_of<T>(data1, lane) : T{0}));
        }
        if (result) put(result, lane, before);
    });
}

template <class T, class Operation>
void ds_atomic(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    lds_addresses(w, i, i.imm, address);
    const Row* data1 = i.src[2].dwords ? &w.v[i.src[2].index] : nullptr;
    Row* result = i.dst[0].dwords ? &w.v[i.dst[0].index] : nullptr;
    lds_atomic<T, Operation>(w, i, address, &w.v[i.src[1].index], data1, result, 0);
}

template <class T, int Scale>
void ds_wrxchg2(Wave& w, const Inst& i) {
    constexpr int n = sizeof(T) / 4;
    uint32_t first[kLanes], second[kLanes];
    lds_addresses(w, i, i.offset0 * sizeof(T) * Scale, first);
    lds_addresses(w, i, i.offset1 * sizeof(T) * Scale, second);
    Row data[2][n];  // the result may overwrite the data
    std::memcpy(data[0], w.v[i.src[1].index], sizeof data[0]);
    std::memcpy(data[1], w.v[i.src[2].index], sizeof data[1]);
    Row* to = &w.v[i.dst[0].index];
    lds_atomic<T, Swap>(w, i, first, data[0], nullptr, to, 0);
    lds_atomic<T, Swap>(w, i, second, data[1], nullptr, to + n, n);
}

// One atomic for the wave: the counter moves by the number of active lanes, all get its old value.
template <bool Add>
void ds_append(Wave& w, const Inst& i) {
    const uint64_t lanes = w.exec();
    uint32_t address[kLanes] = {};
    const int lane = lanes ? first_lane(lanes) : 0;
    address[lane] = (w.s[kM0] & 0xffff) + i.imm;
    const uint64_t one = lanes ? 1ull << lane : 0;
    uint32_t before = 0;
    if (lds_lanes(w, i, address, one, 4, Access::atomic)) {
        uint8_t* at = w.group->lds.data() + address[lane];
        before = read<uint32_t>(at);
        const uint32_t count = static_cast<uint32_t>(std::popcount(lanes));
        write(at, Add ? before + count : before - count);
    }
    each_lane(lanes, [&](int l) { w.v[i.dst[0].index][l] = before; });
}

void ds_read_addtid(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
        address[lane] = (w.s[kM0] & 0xffff) + i.imm + 4 * lane;
    lds_read<Shape<1>>(w, i, address, &w.v[i.dst[0].index], 0);
}

void ds_write_addtid(Wave& w, const Inst& i) {
    uint32_t address[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
        address[lane] = (w.s[kM0] & 0xffff) + i.imm + 4 * lane;
    lds_write<Shape<1>>(w, i, address, &w.v[i.src[1].index], 0);
}

void ds_bpermute(Wave& w, const Inst& i) {
    const uint64_t lanes = w.exec();
    Row from, address;
    std::memcpy(from, w.v[i.src[1].index], sizeof from);
    std::memcpy(address, w.v[i.src[0].index], sizeof address);
    if (lanes != ~0ull)  // inactive lanes give zero
        for (int lane = 0; lane < kLanes; ++lane) from[lane] = lanes >> lane & 1 ? from[lane] : 0;
    Row& to = w.v[i.dst[0].index];
    each_lane(lanes, [&](int lane) { to[lane] = from[(address[lane] + i.imm) >> 2 & 63]; });
}

void ds_permute(Wave& w, const Inst& i) {
    const uint64_t lanes = w.exec();
    const Row& from = w.v[i.src[1].index];
    const Row& address = w.v[i.src[0].index];
    Row out = {};
    each_lane(lanes, [&](int lane) { out[(address[lane] + i.imm) >> 2 & 63] = from[lane]; });
    Row& to = w.v[i.dst[0].index];
    each_lane(lanes, [&](int lane) { to[lane] = out[lane]; });
}

void ds_swizzle(Wave& w, const Inst& i) {
    const uint64_t lanes = w.exec();
    Row from;
    std::memcpy(from, w.v[i.src[0].index], sizeof from);
    Row& to = w.v[i.dst[0].index];
    each_lane(lanes, [&](int lane) {
        const int source = swizzle_source(i.imm, lane);
        to[lane] = lanes >> source & 1 ? from[source] : 0;
    });
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
