// Flat addresses: global memory, LDS or scratch, by aperture.
#pragma once

#include "exec/lds.h"
#include "exec/scratch.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

// Lanes by aperture; `low` gets the offsets within LDS or private memory.
struct Split {
    uint64_t global = 0, lds = 0, scratch = 0;
    uint64_t address[kLanes];
    uint32_t low[kLanes];

    Split(const Wave& w, const Inst& i) {
        global_addresses(w, i, address);
        const uint64_t exec = w.exec();
        uint64_t shared = 0, priv = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint64_t high = address[lane] >> 32;
            shared |= static_cast<uint64_t>(high == kSharedBase >> 32) << lane;
            priv |= static_cast<uint64_t>(high == kPrivateBase >> 32) << lane;
            low[lane] = static_cast<uint32_t>(address[lane]);
        }
        lds = exec & shared;
        scratch = exec & priv;
        global = exec & ~shared & ~priv;
    }
};

template <class S>
void flat_load(Wave& w, const Inst& i) {
    const Split to(w, i);
    Row* rows = &w.v[i.dst[0].index];
    if (to.global) global_read<S>(w, i, to.address, to.global, rows);
    if (to.lds) {
        const uint64_t good = lds_lanes(w, i, to.low, to.lds, S::bytes, Access::load);
        const uint8_t* lds = w.group->lds.data();
        S::load(rows, good, [&](int lane) { return lds + to.low[lane]; });
        zero_rows(rows, S::rows, to.lds & ~good);
    }
    if (to.scratch) {
        const uint64_t good = scratch_lanes(w, i, to.low, to.scratch, S::bytes, Access::load);
        scratch_read<S>(w, to.low, good, rows);
        zero_rows(rows, S::rows, to.scratch & ~good);
    }
}

template <class S>
void flat_store(Wave& w, const Inst& i) {
    const Split to(w, i);
    const Row* rows = &w.v[i.src[1].index];
    if (to.global) global_write<S>(w, i, to.address, to.global, rows);
    if (to.lds) {
        const uint64_t good = lds_lanes(w, i, to.low, to.lds, S::bytes, Access::store);
        uint8_t* lds = w.group->lds.data();
        S::store(rows, good, [&](int lane) { return lds + to.low[lane]; });
    }
    if (to.scratch) {
        const uint64_t good = scratch_lanes(w, i, to.low, to.scratch, S::bytes, Access::store);
        scratch_write<S>(w, to.low, good, rows);
    }
}

template <class T, class Operation>
void flat_atomic(Wave& w, const Inst& i) {
    const Split to(w, i);
    constexpr int n = sizeof(T) / 4;
    if (to.global) global_exchange<T, Operation>(w, i, to.address, to.global);
    const uint64_t other = to.lds | to.scratch;
    if (!other) return;
    uint64_t good = 0;
    if (to.lds) good |= lds_lanes(w, i, to.low, to.lds, sizeof(T), Access::atomic);
    if (to.scratch) good |= scratch_lanes(w, i, to.low, to.scratch, sizeof(T), Access::atomic);
    const Row* data = &w.v[i.src[1].index];
    const Row* data1 = i.src[1].dwords > n ? data + n : nullptr;
    each_lane(other, [&](int lane) {
        T before = 0;
        if (good >> lane & 1 && to.low[lane] % sizeof(T) == 0) {
            uint32_t parts[n];
            uint8_t* at[n];
            for (int d = 0; d < n; ++d) {
                at[d] = to.lds >> lane & 1 ? w.group->lds.data() + to.low[lane] + 4 * d
                                           : scratch_at(w, to.low[lane] + 4 * d, lane);
                parts[d] = read<uint32_t>(at[d]);
            }
            std::memcpy(&before, parts, sizeof before);
            const T after = Operation::apply(before, data_of<T>(data, lane),
                                             data1 ? data_of<T>(data1, lane) : T{0});
            std::memcpy(parts, &after, sizeof after);
            for (int d = 0; d < n; ++d) write(at[d], parts[d]);
        }
        if (i.dst[0].dwords) put(&w.v[i.dst[0].index], lane, before);
    });
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
