// Scalar loads, waits, cache control and clocks.
#pragma once

#include "check/checker.h"
#include "count/counters.h"
#include "exec/rows.h"
#include "machine/memory.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

void waitcnt(Wave& w, const Inst& i) {
    if (!w.check) return;
    const int imm = i.imm & 0xffff;
    w.check->wait(w, (imm & 15) | (imm >> 14 & 3) << 4, imm >> 8 & 15, imm >> 4 & 7);
}

void nothing(Wave&, const Inst&) {}

// Both count what a wave has executed: a clock that runs in programs alike on every host.
void clock(Wave& w, const Inst& i) { w.set_pair(i.dst[0].index, w.executed); }

template <int N>
void s_load(Wave& w, const Inst& i) {
    uint64_t address = w.pair(i.src[3].index) + static_cast<int64_t>(i.imm) + scalar(w, i.src[4]);
    if (w.counters) w.counters->smem_bytes += 4 * N;
    uint32_t* to = &w.s[i.dst[0].index];
    const bool good = w.check    ? w.check->scalar_access(w, i, address, N)
                      : w.memory ? w.memory->contains(address & ~3ull, 4 * N)
                                 : true;
    address &= ~3ull;  // the two low bits are ignored; the checker speaks of them
    if (good)
        std::memcpy(to, reinterpret_cast<const void*>(address), 4 * N);
    else
        std::memset(to, 0, 4 * N);
}

// Range check of the manual's scalar buffer loads: by dword, num_records * max(stride, 1) bytes.
template <int N>
void s_buffer_load(Wave& w, const Inst& i) {
    uint32_t v[4];
    std::memcpy(v, &w.s[i.src[3].index], sizeof v);
    const uint64_t base = v[0] | static_cast<uint64_t>(v[1] & 0xffff) << 32;
    const uint64_t stride = v[1] >> 16 & 0x3fff;
    const uint64_t limit = v[2] * (stride ? stride : 1);
    const uint64_t offset =
        (static_cast<uint64_t>(static_cast<uint32_t>(i.imm)) + scalar(w, i.src[4])) & ~3ull;
    if (w.counters) w.counters->smem_bytes += 4 * N;
    uint32_t out[N] = {};
    for (int d = 0; d < N; ++d) {
        if (offset + 4 * d + 4 > limit) continue;
        const uint64_t address = (base & ~3ull) + offset + 4 * d;
        const bool good = w.check    ? w.check->scalar_access(w, i, address, 1, d)
                          : w.memory ? w.memory->contains(address, 4)
                                     : true;
        if (good) std::memcpy(&out[d], reinterpret_cast<const void*>(address), 4);
    }
    std::memcpy(&w.s[i.dst[0].index], out, sizeof out);
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
