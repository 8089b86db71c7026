// Memory instructions: scalar loads, LDS, buffers, flat / global / scratch, waits and cache
// control.
//
// Semantics after AMD's "Instinct MI300 Instruction Set Architecture" manual, chapters 8 to 11.
// Data is moved at once; whether a program may already touch it is the checker's business
// (checker.h). SRAM ECC is always on in gfx942: a d16 load writes its whole register, the other
// half as zero.
#pragma once

#include <time.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "check/checker.h"
#include "count/counters.h"
#include "isa/inst.h"
#include "machine/memory.h"
#include "machine/wave.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

using Row = uint32_t[kLanes];
using Quad = uint32_t __attribute__((vector_size(16)));

inline int first_lane(uint64_t lanes) { return std::countr_zero(lanes); }

template <class F>
inline void each_lane(uint64_t lanes, F&& f) {
    for (; lanes; lanes &= lanes - 1) f(first_lane(lanes));
}

template <class T>
inline T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class T>
inline void write(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

// A 32-bit scalar source: register or constant.
inline uint32_t scalar(const Wave& w, const Operand& operand) {
    if (operand.kind == Kind::scalar) return w.s[operand.index];
    if (operand.kind == Kind::constant) return static_cast<uint32_t>(operand.value);
    return 0;
}

// ---- Moving data between lanes' addresses and registers -----------------------------------------

// Loads N dwords of each lane into rows[0..N); at(lane) is where they lie. Four lanes at a time are
// transposed in registers: 64 x 16 bytes take about 30 ns against 80 ns element by element.
template <int N, class At>
inline void load_rows(Row* rows, uint64_t lanes, At at) {
    if (lanes != ~0ull || N == 3) {
        each_lane(lanes, [&](int lane) {
            const uint8_t* from = at(lane);
            for (int i = 0; i < N; ++i) rows[i][lane] = read<uint32_t>(from + 4 * i);
        });
        return;
    }
    for (int lane = 0; lane < kLanes; lane += 4) {
        if constexpr (N == 1) {
            for (int i = 0; i < 4; ++i) rows[0][lane + i] = read<uint32_t>(at(lane + i));
        } else if constexpr (N == 2) {
            using Half = uint64_t __attribute__((vector_size(16)));
            const Half x = {read<uint64_t>(at(lane)), read<uint64_t>(at(lane + 1))};
            const Half y = {read<uint64_t>(at(lane + 2)), read<uint64_t>(at(lane + 3))};
            const Quad a = reinterpret_cast<Quad>(x), b = reinterpret_cast<Quad>(y);
            const Quad low = __builtin_shufflevector(a, b, 0, 2, 4, 6);
            const Quad high = __builtin_shufflevector(a, b, 1, 3, 5, 7);
            std::memcpy(&rows[0][lane], &low, 16);
            std::memcpy(&rows[1][lane], &high, 16);
        } else if constexpr (N == 4) {
            const Quad a = read<Quad>(at(lane)), b = read<Quad>(at(lane + 1));
            const Quad c = read<Quad>(at(lane + 2)), d = read<Quad>(at(lane + 3));
            const Quad ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            const Quad ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            const Quad cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            const Quad cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            const Quad out[4] = {__builtin_shufflevector(ab0, cd0, 0, 1, 4, 5),
                                 __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7),
                                 __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5),
                                 __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7)};
            for (int i = 0; i < 4; ++i) std::memcpy(&rows[i][lane], &out[i], 16);
        }
    }
}

template <int N, class At>
inline void store_rows(const Row* rows, uint64_t lanes, At at) {
    if (lanes != ~0ull || N == 3) {
        each_lane(lanes, [&](int lane) {
            uint8_t* to = at(lane);
            for (int i = 0; i < N; ++i) write(to + 4 * i, rows[i][lane]);
        });
        return;
    }
    for (int lane = 0; lane < kLanes; lane += 4) {
        if constexpr (N == 1) {
            for (int i = 0; i < 4; ++i) write(at(lane + i), rows[0][lane + i]);
        } else if constexpr (N == 2) {
            for (int i = 0; i < 4; ++i)
                write(at(lane + i),
                      static_cast<uint64_t>(rows[1][lane + i]) << 32 | rows[0][lane + i]);
        } else if constexpr (N == 4) {
            Quad r[4];
            for (int i = 0; i < 4; ++i) std::memcpy(&r[i], &rows[i][lane], 16);
            const Quad ab0 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
            const Quad ab1 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
            const Quad cd0 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
            const Quad cd1 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
            write(at(lane + 0), __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
            write(at(lane + 1), __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
            write(at(lane + 2), __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
            write(at(lane + 3), __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
        }
    }
}

// What an instruction moves per lane. `rows` registers in 4 * rows bytes of memory, or for the
// narrow ones `bytes` of memory and one register.
enum class Narrow : uint8_t { none, u8, i8, u16, i16 };

template <int Rows_, Narrow Kind_ = Narrow::none, bool High_ = false, bool D16_ = false>
struct Shape {
    static constexpr int rows = Rows_;
    static constexpr Narrow narrow = Kind_;
    static constexpr bool high = High_, d16 = D16_;
    static constexpr uint32_t bytes = Kind_ == Narrow::none                        ? 4 * Rows_
                                      : Kind_ == Narrow::u8 || Kind_ == Narrow::i8 ? 1
                                                                                   : 2;
    static uint32_t widen(const uint8_t* at) {
        uint32_t value = 0;
        if constexpr (narrow == Narrow::u8) value = read<uint8_t>(at);
        if constexpr (narrow == Narrow::i8) value = static_cast<uint32_t>(read<int8_t>(at));
        if constexpr (narrow == Narrow::u16) value = read<uint16_t>(at);
        if constexpr (narrow == Narrow::i16) value = static_cast<uint32_t>(read<int16_t>(at));
        if constexpr (d16) value = high ? value << 16 : value & 0xffff;
        return value;
    }
    template <class At>
    static void load(Row* to, uint64_t lanes, At at) {
        if constexpr (narrow == Narrow::none)
            load_rows<rows>(to, lanes, at);
        else
            each_lane(lanes, [&](int lane) { to[0][lane] = widen(at(lane)); });
    }
    template <class At>
    static void store(const Row* from, uint64_t lanes, At at) {
        if constexpr (narrow == Narrow::none) {
            store_rows<rows>(from, lanes, at);
        } else {
            each_lane(lanes, [&](int lane) {
                const uint32_t value = from[0][lane] >> (high ? 16 : 0);
                if constexpr (bytes == 1)
                    write(at(lane), static_cast<uint8_t>(value));
                else
                    write(at(lane), static_cast<uint16_t>(value));
            });
        }
    }
};

using Ubyte = Shape<1, Narrow::u8>;
using Sbyte = Shape<1, Narrow::i8>;
using Ushort = Shape<1, Narrow::u16>;
using Sshort = Shape<1, Narrow::i16>;
template <Narrow K>
using D16 = Shape<1, K, false, true>;
template <Narrow K>
using D16Hi = Shape<1, K, true, true>;

// ---- Atomic arithmetic
// --------------------------------------------------------------------------- apply(memory, data,
// data1): the new value of memory. For compare-and-swap data1 is what is compared with when the
// instruction says so (see the two callers).

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline double as_double(uint64_t bits) { return std::bit_cast<double>(bits); }

inline uint32_t bf16_round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (value != value) return (bits >> 16 | 0x40) & 0xffff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint32_t pk_add_bf16(uint32_t a, uint32_t b) {
    const uint32_t low = bf16_round(as_float(a << 16) + as_float(b << 16));
    return low | bf16_round(as_float(a & 0xffff0000) + as_float(b & 0xffff0000)) << 16;
}

inline uint32_t pk_add_f16(uint32_t a, uint32_t b) {
    uint32_t out = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const _Float16 x = std::bit_cast<_Float16>(static_cast<uint16_t>(a >> shift));
        const _Float16 y = std::bit_cast<_Float16>(static_cast<uint16_t>(b >> shift));
        const _Float16 sum = static_cast<_Float16>(static_cast<float>(x) + static_cast<float>(y));
        out |= static_cast<uint32_t>(std::bit_cast<uint16_t>(sum)) << shift;
    }
    return out;
}

#define ATOMIC(name, expression)                                     \
    struct name {                                                    \
        template <class T>                                           \
        static T apply(T memory, T data, [[maybe_unused]] T data1) { \
            using S [[maybe_unused]] = std::make_signed_t<T>;        \
            return static_cast<T>(expression);                       \
        }                                                            \
    };
ATOMIC(Add, memory + data)
ATOMIC(Sub, memory - data)
ATOMIC(Rsub, data - memory)
ATOMIC(Inc, memory >= data ? 0 : memory + 1)
ATOMIC(Dec, memory == 0 || memory > data ? data : memory - 1)
ATOMIC(MinI, static_cast<S>(data) < static_cast<S>(memory) ? data : memory)
ATOMIC(MaxI, static_cast<S>(data) > static_cast<S>(memory) ? data : memory)
ATOMIC(MinU, data < memory ? data : memory)
ATOMIC(MaxU, data > memory ? data : memory)
ATOMIC(And, memory& data)
ATOMIC(Or, memory | data)
ATOMIC(Xor, memory ^ data)
ATOMIC(Swap, (static_cast<void>(memory), data))
ATOMIC(Mskor, (memory & ~data) | data1)
ATOMIC(Wrap, memory >= data ? memory - data : memory + data1)
ATOMIC(CmpStore, memory == data ? data1 : memory)  // ds: compare with data0, write data1
ATOMIC(CmpSwap, memory == data1 ? data : memory)   // vmem: write the first, compare with the second
#undef ATOMIC

// Per dword: bit 31 of the data enables writing its lower 31 bits.
struct CondXchg32 {
    static uint64_t apply(uint64_t memory, uint64_t data, uint64_t) {
        for (int shift = 0; shift < 64; shift += 32)
            if (data >> (shift + 31) & 1)
                memory = (memory & ~(0xffffffffull << shift)) | (data & (0x7fffffffull << shift));
        return memory;
    }
};

template <class F>
struct OfFloat {
    static uint32_t apply(uint32_t memory, uint32_t data, uint32_t data1) {
        return F::of(memory, data, data1, as_float(memory), as_float(data));
    }
    static uint64_t apply(uint64_t memory, uint64_t data, uint64_t data1) {
        return F::of(memory, data, data1, as_double(memory), as_double(data));
    }
};
struct AddF : OfFloat<AddF> {
    template <class T, class V>
    static T of(T, T, T, V x, V y) {
        return std::bit_cast<T>(static_cast<V>(x + y));
    }
};
struct MinF : OfFloat<MinF> {
    template <class T, class V>
    static T of(T memory, T data, T, V x, V y) {
        return x != x || y < x ? data : memory;
    }
};
struct MaxF : OfFloat<MaxF> {
    template <class T, class V>
    static T of(T memory, T data, T, V x, V y) {
        return x != x || y > x ? data : memory;
    }
};
struct CmpStoreF : OfFloat<CmpStoreF> {
    template <class T, class V>
    static T of(T memory, T, T data1, V x, V y) {
        return x == y ? data1 : memory;
    }
};
struct PkAddF16 {
    static uint32_t apply(uint32_t memory, uint32_t data, uint32_t) {
        return pk_add_f16(memory, data);
    }
};
struct PkAddBf16 {
    static uint32_t apply(uint32_t memory, uint32_t data, uint32_t) {
        return pk_add_bf16(memory, data);
    }
};

template <class T>
inline T data_of(const Row* rows, int lane) {
    if constexpr (sizeof(T) == 4)
        return rows[0][lane];
    else
        return static_cast<uint64_t>(rows[1][lane]) << 32 | rows[0][lane];
}

template <class T>
inline void put(Row* rows, int lane, T value) {
    rows[0][lane] = static_cast<uint32_t>(value);
    if constexpr (sizeof(T) == 8) rows[1][lane] = static_cast<uint32_t>(value >> 32);
}

// Device memory is shared by workgroups in several host threads: the exchange must be a real one.
template <class T, class Operation>
inline T exchange(uint8_t* at, T data, T data1) {
    T* place = reinterpret_cast<T*>(at);
    T before = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(place, &before, Operation::apply(before, data, data1), true,
                                        __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    return before;
}

// ---- Waits, cache control, clocks
// ------------------------------------------------------------------

void waitcnt(Wave& w, const Inst& i) {
    if (!w.check) return;
    const int imm = i.imm & 0xffff;
    w.check->wait(w, (imm & 15) | (imm >> 14 & 3) << 4, imm >> 8 & 15, imm >> 4 & 7);
}

void nothing(Wave&, const Inst&) {}

// Both count what a wave has executed: a clock that runs in programs alike on every host.
void clock(Wave& w, const Inst& i) { w.set_pair(i.dst[0].index, w.executed); }

// ---- Scalar memory
// -----------------------------------------------------------------------------------

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

// ---- LDS
// -------------------------------------------------------------------------------------------------

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

inline void zero_rows(Row* rows, int count, uint64_t lanes) {
    for (int r = 0; r < count; ++r) each_lane(lanes, [&](int lane) { rows[r][lane] = 0; });
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

// ---- Global memory
// ---------------------------------------------------------------------------------------

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

// ---- Scratch
// ---------------------------------------------------------------------------------------------

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

// ---- Flat
// ------------------------------------------------------------------------------------------------

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

// ---- Buffers
// ---------------------------------------------------------------------------------------------

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
#undef DS_ATOMIC
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
#undef LDS_LOADS
#undef ATOMICS
#undef BOTH
#undef STORES
#undef LOADS
#undef SET
}

}  // namespace
}  // namespace emulator::VARIANT
