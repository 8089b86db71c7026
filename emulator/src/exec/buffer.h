// Buffers: addresses from a resource in scalar registers.
#pragma once

#include "exec/global.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

// One instruction's addresses from the buffer resource. Manual, "Buffer Addressing" and "Range
// Checking" (the GFX9 rules): with stride 0, or when no index takes part, num_records counts bytes
// and an element is out of range when offset >= num_records - soffset, so soffset does take part;
// else num_records counts records, and an element is out when its index >= num_records or, within
// the record, its offset >= stride. Each dword of a load or store is checked by itself; formatted
// accesses and atomics are out as a whole. Out of range loads return 0, stores do nothing. An
// element that is only partly inside counts as outside.
struct Buffer {
    uint64_t base, soffset;
    uint64_t stride, records;
    bool swizzle, structured;
    uint32_t index_stride;
    uint64_t offset[kLanes], index[kLanes];

    Buffer(const Wave& w, const Inst& i) {
        const uint32_t* d = &w.s[i.src[3].index];
        base = d[0] | static_cast<uint64_t>(d[1] & 0xffff) << 32;
        stride = d[1] >> 16 & 0x3fff;
        swizzle = d[1] >> 31;
        records = d[2];
        const bool add_tid = d[3] >> 23 & 1;
        if (add_tid) stride |= (d[3] >> 15 & 15) << 14;  // the data format field extends the stride
        index_stride = 8u << (d[3] >> 21 & 3);
        soffset = scalar(w, i.src[4]);
        structured = stride != 0 && (i.idxen || add_tid);
        const Row* v = &w.v[i.src[0].index];
        const uint64_t imm = static_cast<uint64_t>(i.imm);
        if (i.offen) {
            const Row& from = v[i.idxen ? 1 : 0];
            for (int lane = 0; lane < kLanes; ++lane) offset[lane] = imm + from[lane];
        } else {
            for (int lane = 0; lane < kLanes; ++lane) offset[lane] = imm;
        }
        if (structured || i.idxen)
            for (int lane = 0; lane < kLanes; ++lane)
                index[lane] = (i.idxen ? v[0][lane] : 0) + (add_tid ? lane : 0);
    }

    bool plain() const { return !structured; }

    // Raw: every active lane's whole access in range, so that one pass suffices.
    bool all_inside(uint64_t lanes, uint32_t bytes) const {
        if (records < soffset + bytes) return lanes == 0;
        const uint64_t limit = records - soffset - bytes;
        uint64_t highest = 0;
        if (lanes == ~0ull) {
            for (int lane = 0; lane < kLanes; ++lane)
                highest = offset[lane] > highest ? offset[lane] : highest;
        } else {
            each_lane(lanes, [&](int l) { highest = offset[l] > highest ? offset[l] : highest; });
        }
        return highest <= limit;
    }

    bool in_range(int lane, uint32_t at, uint32_t bytes) const {
        const uint64_t end = offset[lane] + at + bytes;
        if (!structured) return end + soffset <= records;
        return index[lane] < records && end <= stride;
    }

    uint64_t address(int lane, uint32_t at) const {
        const uint64_t within = offset[lane] + at;
        if (!structured) return base + soffset + within;
        if (!swizzle) return base + soffset + within + stride * index[lane];
        // Elements of 4 bytes, interleaved over index_stride records.
        const uint64_t outer = index[lane] / index_stride, inner = index[lane] % index_stride;
        return base + soffset + (outer * stride + within / 4 * 4) * index_stride + inner * 4 +
               within % 4;
    }

    // Addresses of the lanes' bytes [at, at + bytes), and which of them are in range.
    uint64_t part(uint64_t lanes, uint32_t at, uint32_t bytes, uint64_t* out) const {
        uint64_t good = 0;
        each_lane(lanes, [&](int lane) {
            out[lane] = address(lane, at);
            if (in_range(lane, at, bytes)) good |= 1ull << lane;
        });
        return good;
    }
};

template <class S>
inline void buffer_read(Wave& w, const Inst& i, Row* to) {
    const Buffer buffer(w, i);
    const uint64_t lanes = w.exec();
    uint64_t address[kLanes];
    if (buffer.plain() && buffer.all_inside(lanes, S::bytes)) {
        const uint64_t base = buffer.base + buffer.soffset;
        for (int lane = 0; lane < kLanes; ++lane) address[lane] = base + buffer.offset[lane];
        global_read<S>(w, i, address, lanes, to);
        return;
    }
    if constexpr (S::narrow != Narrow::none) {
        const uint64_t good = buffer.part(lanes, 0, S::bytes, address);
        zero_rows(to, 1, lanes & ~good);
        global_read<S>(w, i, address, good, to);
    } else {
        for (int d = 0; d < S::rows; ++d) {
            const uint64_t good = buffer.part(lanes, 4 * d, 4, address);
            zero_rows(to + d, 1, lanes & ~good);
            global_read<Shape<1>>(w, i, address, good, to + d, d);
        }
    }
}

template <class S>
void buffer_load(Wave& w, const Inst& i) {
    if constexpr (S::rows == 1 && !S::d16) {
        if (i.lds) {
            Row data[1] = {};
            buffer_read<S>(w, i, data);
            dma_write(w, i, w.exec(), data[0]);
            return;
        }
    }
    buffer_read<S>(w, i, &w.v[i.dst[0].index]);
}

template <class S>
void buffer_store(Wave& w, const Inst& i) {
    const Buffer buffer(w, i);
    const uint64_t lanes = w.exec();
    const Row* from = &w.v[i.src[1].index];
    uint64_t address[kLanes];
    if (buffer.plain() && buffer.all_inside(lanes, S::bytes)) {
        const uint64_t base = buffer.base + buffer.soffset;
        for (int lane = 0; lane < kLanes; ++lane) address[lane] = base + buffer.offset[lane];
        global_write<S>(w, i, address, lanes, from);
        return;
    }
    if constexpr (S::narrow != Narrow::none) {
        global_write<S>(w, i, address, buffer.part(lanes, 0, S::bytes, address), from);
    } else {
        for (int d = 0; d < S::rows; ++d) {
            const uint64_t good = buffer.part(lanes, 4 * d, 4, address);
            global_write<Shape<1>>(w, i, address, good, from + d, d);
        }
    }
}

// Formatted accesses of 32-bit components, as compilers use them: as plain dwords, all or nothing.
template <int N, bool Store>
void buffer_format(Wave& w, const Inst& i) {
    const Buffer buffer(w, i);
    const uint64_t lanes = w.exec();
    uint64_t address[kLanes];
    uint64_t good = buffer.part(lanes, 0, 4 * N, address);
    for (int d = 0; d < N; ++d) {
        buffer.part(good, 4 * d, 4, address);
        if constexpr (Store) {
            global_write<Shape<1>>(w, i, address, good, &w.v[i.src[1].index + d], d);
        } else {
            Row* to = &w.v[i.dst[0].index + d];
            zero_rows(to, 1, lanes & ~good);
            global_read<Shape<1>>(w, i, address, good, to, d);
        }
    }
}

template <class T, class Operation>
void buffer_atomic(Wave& w, const Inst& i) {
    const Buffer buffer(w, i);
    const uint64_t lanes = w.exec();
    uint64_t address[kLanes] = {};
    const uint64_t good = buffer.part(lanes, 0, sizeof(T), address);
    global_exchange<T, Operation>(w, i, address, good);
    if (i.dst[0].dwords) zero_rows(&w.v[i.dst[0].index], sizeof(T) / 4, lanes & ~good);
}

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
