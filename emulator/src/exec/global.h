// Global memory, and LDS-DMA from it.
#pragma once

#include "check/checker.h"
#include "count/counters.h"
#include "exec/atomics.h"
#include "machine/memory.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

// Announces an access and returns the lanes that may be carried out.
inline uint64_t global_lanes(Wave& w, const Inst& i, const uint64_t* address, uint64_t lanes,
                             uint32_t bytes, Access access, uint32_t dword = 0) {
    if (!lanes) return 0;
    if (w.counters)
        w.counters->count_global(address, lanes, bytes, access != Access::store,
                                 access != Access::load);
    if (w.check)
        lanes = w.check->global_access(w, i, address, lanes, bytes, access, dword);
    else if (w.memory)
        lanes = w.memory->inside(address, lanes, bytes);
    if (access == Access::atomic) {
        uint64_t aligned = 0;
        for (int lane = 0; lane < kLanes; ++lane)
            aligned |= static_cast<uint64_t>(address[lane] % bytes == 0) << lane;
        lanes &= aligned;
    }
    if (access != Access::load && w.memory) w.memory->mark_written(address, lanes, bytes);
    return lanes;
}

inline uint8_t* pointer(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

template <class S>
inline void global_read(Wave& w, const Inst& i, const uint64_t* address, uint64_t lanes, Row* to,
                        uint32_t dword = 0) {
    const uint64_t good = global_lanes(w, i, address, lanes, S::bytes, Access::load, dword);
    S::load(to, good, [=](int lane) { return pointer(address[lane]); });
    if (good != lanes) zero_rows(to, S::rows, lanes & ~good);
}

template <class S>
inline void global_write(Wave& w, const Inst& i, const uint64_t* address, uint64_t lanes,
                         const Row* from, uint32_t dword = 0) {
    const uint64_t good = global_lanes(w, i, address, lanes, S::bytes, Access::store, dword);
    S::store(from, good, [=](int lane) { return pointer(address[lane]); });
}

// data: cmpswap has the new value first, what it compares with second.
template <class T, class Operation>
inline void global_exchange(Wave& w, const Inst& i, const uint64_t* address, uint64_t lanes) {
    constexpr int n = sizeof(T) / 4;
    const uint64_t good = global_lanes(w, i, address, lanes, sizeof(T), Access::atomic);
    const Row* data = &w.v[i.src[1].index];
    const Row* data1 = i.src[1].dwords > n ? data + n : nullptr;
    Row* result = i.dst[0].dwords ? &w.v[i.dst[0].index] : nullptr;
    each_lane(lanes, [&](int lane) {
        T before = 0;
        if (good >> lane & 1)
            before = exchange<T, Operation>(pointer(address[lane]), data_of<T>(data, lane),
                                            data1 ? data_of<T>(data1, lane) : T{0});
        if (result) put(result, lane, before);
    });
}

inline void global_addresses(const Wave& w, const Inst& i, uint64_t* address) {
    const Row* v = &w.v[i.src[0].index];
    const int64_t offset = i.imm;
    if (i.src[3].dwords) {
        const uint64_t base = w.pair(i.src[3].index) + offset;
        for (int lane = 0; lane < kLanes; ++lane) address[lane] = base + v[0][lane];
    } else {
        for (int lane = 0; lane < kLanes; ++lane)
            address[lane] = (static_cast<uint64_t>(v[1][lane]) << 32 | v[0][lane]) + offset;
    }
}

template <class S>
void global_load(Wave& w, const Inst& i) {
    uint64_t address[kLanes];
    global_addresses(w, i, address);
    global_read<S>(w, i, address, w.exec(), &w.v[i.dst[0].index]);
}

template <class S>
void global_store(Wave& w, const Inst& i) {
    uint64_t address[kLanes];
    global_addresses(w, i, address);
    global_write<S>(w, i, address, w.exec(), &w.v[i.src[1].index]);
}

template <class T, class Operation>
void global_atomic(Wave& w, const Inst& i) {
    uint64_t address[kLanes];
    global_addresses(w, i, address);
    global_exchange<T, Operation>(w, i, address, w.exec());
}

// LDS-DMA: lane l's dword goes to M0[15:0] + instruction offset + 4 l.
inline uint32_t dma_address(const Wave& w, const Inst& i) {
    return (w.s[kM0] & 0xffff) + static_cast<uint32_t>(i.imm);
}

inline void dma_write(Wave& w, const Inst& i, uint64_t lanes, const Row& data) {
    const uint32_t to = dma_address(w, i);
    if (w.check) w.check->lds_dma(w, i, to, lanes);
    if (w.counters) w.counters->count_copy(i, to, lanes);
    const uint64_t size = w.group->lds.size();
    uint8_t* lds = w.group->lds.data();
    if (lanes == ~0ull && to + 256ull <= size) {
        std::memcpy(lds + to, data, 256);
        return;
    }
    each_lane(lanes, [&](int lane) {
        const uint64_t at = static_cast<uint64_t>(to) + 4 * lane;
        if (at + 4 <= size) write(lds + at, data[lane]);
    });
}

template <class S>
void global_load_lds(Wave& w, const Inst& i) {
    uint64_t address[kLanes];
    global_addresses(w, i, address);
    Row data[1] = {};
    global_read<S>(w, i, address, w.exec(), data);
    dma_write(w, i, w.exec(), data[0]);
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
