// Atomic arithmetic. apply(memory, data, data1) is the new value of memory; for compare-and-swap
// data1 is what is compared with when the instruction says so (CmpStore, CmpSwap).
#pragma once

#include <type_traits>

#include "exec/rows.h"

namespace emulator::VARIANT {
namespace {
namespace memory_ops {

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

}  // namespace memory_ops
}  // namespace
}  // namespace emulator::VARIANT
