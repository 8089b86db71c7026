// Matrix instructions: D = A B + C of one wave, EXEC ignored.
//
// Layout (AMD matrix instruction calculator), l = lane, M = N rows and columns, n = values a lane
// gives to A and to B:
//   A: row l % M, block (l / M) % blocks, k = n * (l / (M * blocks)) + j, j = 0..n-1
//   B: column l % N, the rest as A
//   C, D of 4 bytes, register r: column l % N; 4 rows lie in 4 registers, then come the lane
//   groups:
//     16x16: row 4 (l / 16) + r % 4, block r / 4      4x4: row r, block l / 4
//     32x32: row 8 (r % 16 / 4) + 4 (l / 32) + r % 4, block r / 16
//   C, D of 8 bytes: 16x16 row 4 r + l / 16; 4x4 row l / 16, block l / 4 % 4
// So a row of D is a run of N lanes of one register, which is how it is computed.
//
// Order of summation: C first, then k ascending, each product added with one rounding (fused) to
// nearest even in the accumulator's type. The hardware's internal order and widths are not
// published. 8- and 16-bit products are exact in single precision, so that variants without an FMA
// multiply and add: the same result except for products below 2^-126. Subnormal inputs and results
// count, and MODE has no say: AMD documents a flush of 16-bit ones for CDNA2 only.
#pragma once

#include "exec/results.h"

namespace emulator::VARIANT {
namespace {

enum class Matrix : uint8_t { f32, xf32, f16, bf16, fp8, bf8, i8, f64 };

inline constexpr int matrix_bits(Matrix t) {
    switch (t) {
        case Matrix::f16:
        case Matrix::bf16:
            return 16;
        case Matrix::fp8:
        case Matrix::bf8:
        case Matrix::i8:
            return 8;
        case Matrix::f64:
            return 64;
        default:
            return 32;
    }
}

template <Matrix kType>
using Element = std::conditional_t<kType == Matrix::f64, double,
                                   std::conditional_t<kType == Matrix::i8, int32_t, float>>;

// Vectors of the host's width.
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
template <class T, int kBytes = kVectorBytes>
struct VectorOf {
    typedef T type __attribute__((vector_size(kBytes)));
};

// The value in the low bits of each element, U being unsigned integers and V the elements' type.
template <Matrix kType, class V, class U>
[[gnu::always_inline]] inline V matrix_values(U bits) {
    using I = typename VectorOf<int32_t, sizeof(U)>::type;
    using F = typename VectorOf<float, sizeof(U)>::type;
    if constexpr (kType == Matrix::bf16) {
        return (V)(bits << 16);
    } else if constexpr (kType == Matrix::i8) {
        return (I)(bits << 24) >> 24;
    } else if constexpr (kType == Matrix::xf32) {
        return (V)(bits & 0xffffe000u);  // 10 bits of mantissa
    } else if constexpr (kType == Matrix::f32) {
        return (V)bits;
    } else {
        // As half_to_float and from_8bit do.
        constexpr bool half = kType == Matrix::f16;
        constexpr int mantissa = half ? 10 : kType == Matrix::fp8 ? 3 : 2;
        constexpr int bias = half ? 15 : 1 << (6 - mantissa);
        constexpr float unit = 1.0f / (1 << (bias - 1)) / (1 << mantissa);
        constexpr uint32_t sign = half ? 0x8000 : 0x80;
        const I magnitude = (I)(bits & (sign - 1));
        const I normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
        const I small = (I)(__builtin_convertvector(magnitude, F) * unit);
        I value = magnitude >= 1 << mantissa ? normal : small;
        if constexpr (half) value = magnitude >= 0x7c00 ? normal | 0x7f800000 : value;
        value |= (I)((bits & sign) << (half ? 16 : 24));
        if constexpr (!half) value = (bits & 0xff) == 0x80 ? (I)(bits & 0) + 0x7fc00000 : value;
        return (V)value;
    }
}

template <Matrix kType>
[[gnu::always_inline]] inline Element<kType> matrix_value(uint32_t bits) {
    using U = VectorOf<uint32_t, 16>::type;
    using V = typename VectorOf<Element<kType>, 16>::type;
    return matrix_values<kType, V>(U{bits, bits, bits, bits})[0];
}

// to[(block * K + k) * kSide + row] from the registers of A or B. `lane_of(l)` is the lane that
// lane l reads: a permutation of groups of 16 lanes.
template <Matrix kType, int kSide, int kDepth, int kBlocks>
inline void unpack(const Wave& w, const Operand& o, const int* group, Element<kType>* to) {
    constexpr int bits = matrix_bits(kType), lanes = kSide < 16 ? kSide : 16;
    constexpr int values = kSide * kDepth * kBlocks / kLanes;
    if (o.kind != Kind::vector) fail("matrix operand must be vector registers");
    for (int run = 0; run < kLanes / lanes; ++run) {
        const int first = run * lanes;
        const int from = group[first / 16] * 16 + first % 16;
        const int block = first / kSide % kBlocks, row = first % kSide;
        const int depth = values * (first / (kSide * kBlocks));
        for (int j = 0; j < values; ++j) {
            Element<kType>* const out = to + (block * kDepth + depth + j) * kSide + row;
            if constexpr (bits == 64) {
                const uint32_t *low = w.v[o.index] + from, *high = w.v[o.index + 1] + from;
                for (int l = 0; l < lanes; ++l)
                    out[l] = as_double(static_cast<uint64_t>(high[l]) << 32 | low[l]);
            } else {
                constexpr int bytes = lanes * 4 < kVectorBytes ? lanes * 4 : kVectorBytes;
                using U = typename VectorOf<uint32_t, bytes>::type;
                using V = typename VectorOf<Element<kType>, bytes>::type;
                const uint32_t* const in = w.v[o.index + j * bits / 32] + from;
                const int shift = j * bits % 32;
                for (int l = 0; l < lanes; l += bytes / 4) {
                    U raw;
                    std::memcpy(&raw, in + l, sizeof raw);
                    const V value = matrix_values<kType, V>(raw >> shift);
                    std::memcpy(out + l, &value, sizeof value);
                }
            }
        }
    }
}

// sum += a * b; a is one number.
template <Matrix kType, class V, class T>
[[gnu::always_inline]] inline V multiply_add(T a, V b, V sum) {
    if constexpr (kType == Matrix::i8) {
        return sum + a * b;
#if defined(__AVX512F__)
    } else if constexpr (sizeof(V) == 64 && kType == Matrix::f64) {
        return _mm512_fmadd_pd(_mm512_set1_pd(a), b, sum);
    } else if constexpr (sizeof(V) == 64) {
        return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum);
#endif
#if defined(__FMA__)
    } else if constexpr (sizeof(V) == 32 && kType == Matrix::f64) {
        return _mm256_fmadd_pd(_mm256_set1_pd(a), b, sum);
    } else if constexpr (sizeof(V) == 32) {
        return _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum);
    } else if constexpr (kType != Matrix::f64) {
        return _mm_fmadd_ps(_mm_set1_ps(a), b, sum);
#else
    } else if constexpr (matrix_bits(kType) < 32) {
        return a * b + sum;
#endif
    } else {
        for (size_t n = 0; n < sizeof(V) / sizeof(T); ++n) {
            if constexpr (kType == Matrix::f64)
                sum[n] = __builtin_fma(a, b[n], sum[n]);
            else
                sum[n] = __builtin_fmaf(a, b[n], sum[n]);
        }
        return sum;
    }
}

// Where row i of block b of C and D begins.
struct Place {
    int reg, lane;
};
template <int kSide, bool kWide>
constexpr Place place_of(int i, int b) {
    if constexpr (kWide) {
        if (kSide == 16) return {2 * (i / 4), 16 * (i % 4)};
        return {0, 16 * i + 4 * b};
    } else {
        if (kSide == 16) return {4 * b + i % 4, 16 * (i / 4)};
        if (kSide == 32) return {16 * b + 4 * (i / 8) + i % 4, 32 * (i / 4 % 2)};
        return {i, 4 * b};
    }
}

// B's lane groups by BLGP, each 16 lanes.
inline constexpr int kBroadcastB[8][4] = {{0, 1, 2, 3}, {0, 1, 0, 1}, {2, 3, 2, 3}, {1, 2, 3, 0},
                                          {0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}};

template <Matrix kA, Matrix kB, int kSide, int kDepth, int kBlocks>
inline void multiply(Wave& w, const Inst& i) {
    using T = Element<kA>;
    constexpr bool wide = kA == Matrix::f64;
    using V = typename VectorOf<T, (kSide * sizeof(T) < kVectorBytes ? kSide * sizeof(T)
                                                                     : kVectorBytes)>::type;
    constexpr int kWidth = sizeof(V) / sizeof(T), kVectors = kSide / kWidth;
    // Eight sums hide the latency of the additions.
    constexpr int kRows = kVectors >= 8 ? 1 : 8 / kVectors < kSide ? 8 / kVectors : kSide;
    alignas(64) T a[kBlocks * kDepth * kSide];
    alignas(64) T b[kBlocks * kDepth * kSide];
    unpack<kA, kSide, kDepth, kBlocks>(w, i.src[0], kBroadcastB[0], a);
    unpack<kB, kSide, kDepth, kBlocks>(w, i.src[1], kBroadcastB[wide ? 0 : i.blgp], b);
    if constexpr (wide) {  // BLGP negates A, B, C
        if (i.blgp & 1)
            for (T& x : a) x = -x;
        if (i.blgp & 2)
            for (T& x : b) x = -x;
    }
    const Operand& c = i.src[2];
    const bool splat = c.kind != Kind::vector;
    const uint64_t constant = splat ? scalar64(w, c) : 0;
    // Rows are stored before the next ones are loaded, so C must not change under them: LLVM lets
    // the result of a 4-register instruction overlap its addend, as v[2:5] and v[0:3].
    const uint32_t (*from)[kLanes] = splat ? nullptr : &w.v[c.index];
    alignas(64) uint32_t kept[kSide * kSide * kBlocks / kLanes * (wide ? 2 : 1)][kLanes];
    if (!splat && c.index != i.dst[0].index) {
        std::memcpy(kept, from, sizeof kept);
        from = kept;
    }
    const int broadcast = (1 << i.cbsz) - 1;
    for (int block = 0; block < kBlocks; ++block) {
        const int block_a = wide ? block : ((block & ~broadcast) | (i.abid & broadcast)) % kBlocks;
        const T* const left = a + block_a * kDepth * kSide;
        const T* const right = b + block * kDepth * kSide;
        for (int row = 0; row < kSide; row += kRows) {
            V sum[kRows][kVectors] = {};
            for (int r = 0; r < kRows; ++r) {
                const Place p = place_of<kSide, wide>(row + r, block);
                if constexpr (wide) {
                    alignas(64) T line[kSide];
                    for (int l = 0; l < kSide; ++l) {
                        const uint64_t bits =
                            splat ? constant
                                  : static_cast<uint64_t>(from[p.reg + 1][p.lane + l]) << 32 |
                                        from[p.reg][p.lane + l];
                        line[l] = i.blgp & 4 ? -as_double(bits) : as_double(bits);
                    }
                    std::memcpy(sum[r], line, sizeof line);
                } else if (splat) {
                    const T value = std::bit_cast<T>(static_cast<uint32_t>(constant));
                    for (V& v : sum[r])
                        for (int l = 0; l < kWidth; ++l) v[l] = value;
                } else {
                    std::memcpy(sum[r], from[p.reg] + p.lane, kSide * sizeof(T));
                }
            }
            for (int k = 0; k < kDepth; ++k) {
                V line[kVectors];
                std::memcpy(line, right + k * kSide, sizeof line);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const T x = left[k * kSide + row + r];
#pragma GCC unroll 8
                    for (int n = 0; n < kVectors; ++n)
                        sum[r][n] = multiply_add<kA>(x, line[n], sum[r][n]);
                }
            }
            for (int r = 0; r < kRows; ++r) {
                const Place p = place_of<kSide, wide>(row + r, block);
                if constexpr (wide) {
                    alignas(64) uint64_t line[kSide];
                    std::memcpy(line, sum[r], sizeof line);
                    for (int l = 0; l < kSide; ++l) {
                        w.v[i.dst[0].index + p.reg][p.lane + l] = static_cast<uint32_t>(line[l]);
                        w.v[i.dst[0].index + p.reg + 1][p.lane + l] =
                            static_cast<uint32_t>(line[l] >> 32);
                    }
                } else {
                    std::memcpy(w.v[i.dst[0].index + p.reg] + p.lane, sum[r], kSide * sizeof(T));
                }
            }
        }
    }
}

// Structured sparsity: of 4 neighbouring k, A holds 2; src2 gives their positions, 2 bits each.
// A lane has values / 2 pairs for twice as many k as it has values. CBSZ = 0: ABID chooses which
// part of src2 holds this instruction's positions; otherwise the lowest.
template <Matrix kA, Matrix kB, int kSide, int kDepth>
inline void multiply_sparse(Wave& w, const Inst& i) {
    using T = Element<kA>;
    constexpr int bits = matrix_bits(kA), values = kSide * kDepth / 2 / kLanes;
    using V = typename VectorOf<T>::type;
    constexpr int kVectors = kSide * static_cast<int>(sizeof(T)) / kVectorBytes;
    alignas(64) T b[kDepth * kSide];
    unpack<kB, kSide, kDepth, 1>(w, i.src[1], kBroadcastB[0], b);
    const int sets = 32 / (2 * values);
    const int shift = i.cbsz == 0 ? (i.abid & (sets - 1)) * 2 * values : 0;
    for (int row = 0; row < kSide; ++row) {
        const Place p = place_of<kSide, false>(row, 0);
        V sum[kVectors];
        std::memcpy(sum, w.v[i.dst[0].index + p.reg] + p.lane, sizeof sum);
        for (int lane = row; lane < kLanes; lane += kSide) {
            const uint32_t positions = w.v[i.src[2].index][lane] >> shift;
            for (int j = 0; j < values; ++j) {
                const uint32_t x = w.v[i.src[0].index + j * bits / 32][lane] >> j * bits % 32;
                const T a = matrix_value<kA>(x);
                const int k = 2 * values * (lane / kSide) + 4 * (j / 2) +
                              static_cast<int>(positions >> 2 * j & 3);
                V line[kVectors];
                std::memcpy(line, b + k * kSide, sizeof line);
                for (int n = 0; n < kVectors; ++n) sum[n] = multiply_add<kA>(a, line[n], sum[n]);
            }
        }
        std::memcpy(w.v[i.dst[0].index + p.reg] + p.lane, sum, sizeof sum);
    }
}

inline void register_mfma(Handler* table) {
#define MFMA(name, ...)                                                          \
    table[static_cast<size_t>(Op::v_mfma_##name)] = [](Wave& w, const Inst& i) { \
        multiply<__VA_ARGS__>(w, i);                                             \
    }
#define SMFMAC(name, ...)                                                          \
    table[static_cast<size_t>(Op::v_smfmac_##name)] = [](Wave& w, const Inst& i) { \
        multiply_sparse<__VA_ARGS__>(w, i);                                        \
    }
    MFMA(f32_32x32x1_2b_f32, Matrix::f32, Matrix::f32, 32, 1, 2);
    MFMA(f32_16x16x1_4b_f32, Matrix::f32, Matrix::f32, 16, 1, 4);
    MFMA(f32_4x4x1_16b_f32, Matrix::f32, Matrix::f32, 4, 1, 16);
    MFMA(f32_32x32x2_f32, Matrix::f32, Matrix::f32, 32, 2, 1);
    MFMA(f32_16x16x4_f32, Matrix::f32, Matrix::f32, 16, 4, 1);
    MFMA(f32_16x16x8_xf32, Matrix::xf32, Matrix::xf32, 16, 8, 1);
    MFMA(f32_32x32x4_xf32, Matrix::xf32, Matrix::xf32, 32, 4, 1);
    MFMA(f32_32x32x4_2b_f16, Matrix::f16, Matrix::f16, 32, 4, 2);
    MFMA(f32_16x16x4_4b_f16, Matrix::f16, Matrix::f16, 16, 4, 4);
    MFMA(f32_4x4x4_16b_f16, Matrix::f16, Matrix::f16, 4, 4, 16);
    MFMA(f32_32x32x8_f16, Matrix::f16, Matrix::f16, 32, 8, 1);
    MFMA(f32_16x16x16_f16, Matrix::f16, Matrix::f16, 16, 16, 1);
    MFMA(f32_32x32x4_2b_bf16, Matrix::bf16, Matrix::bf16, 32, 4, 2);
    MFMA(f32_16x16x4_4b_bf16, Matrix::bf16, Matrix::bf16, 16, 4, 4);
    MFMA(f32_4x4x4_16b_bf16, Matrix::bf16, Matrix::bf16, 4, 4, 16);
    MFMA(f32_32x32x8_bf16, Matrix::bf16, Matrix::bf16, 32, 8, 1);
    MFMA(f32_16x16x16_bf16, Matrix::bf16, Matrix::bf16, 16, 16, 1);
    MFMA(i32_32x32x4_2b_i8, Matrix::i8, Matrix::i8, 32, 4, 2);
    MFMA(i32_16x16x4_4b_i8, Matrix::i8, Matrix::i8, 16, 4, 4);
    MFMA(i32_4x4x4_16b_i8, Matrix::i8, Matrix::i8, 4, 4, 16);
    MFMA(i32_32x32x16_i8, Matrix::i8, Matrix::i8, 32, 16, 1);
    MFMA(i32_16x16x32_i8, Matrix::i8, Matrix::i8, 16, 32, 1);
    MFMA(f64_16x16x4_f64, Matrix::f64, Matrix::f64, 16, 4, 1);
    MFMA(f64_4x4x4_4b_f64, Matrix::f64, Matrix::f64, 4, 4, 4);
    MFMA(f32_16x16x32_bf8_bf8, Matrix::bf8, Matrix::bf8, 16, 32, 1);
    MFMA(f32_16x16x32_bf8_fp8, Matrix::bf8, Matrix::fp8, 16, 32, 1);
    MFMA(f32_16x16x32_fp8_bf8, Matrix::fp8, Matrix::bf8, 16, 32, 1);
    MFMA(f32_16x16x32_fp8_fp8, Matrix::fp8, Matrix::fp8, 16, 32, 1);
    MFMA(f32_32x32x16_bf8_bf8, Matrix::bf8, Matrix::bf8, 32, 16, 1);
    MFMA(f32_32x32x16_bf8_fp8, Matrix::bf8, Matrix::fp8, 32, 16, 1);
    MFMA(f32_32x32x16_fp8_bf8, Matrix::fp8, Matrix::bf8, 32, 16, 1);
    MFMA(f32_32x32x16_fp8_fp8, Matrix::fp8, Matrix::fp8, 32, 16, 1);
    SMFMAC(f32_16x16x32_f16, Matrix::f16, Matrix::f16, 16, 32);
    SMFMAC(f32_32x32x16_f16, Matrix::f16, Matrix::f16, 32, 16);
    SMFMAC(f32_16x16x32_bf16, Matrix::bf16, Matrix::bf16, 16, 32);
    SMFMAC(f32_32x32x16_bf16, Matrix::bf16, Matrix::bf16, 32, 16);
    SMFMAC(i32_16x16x64_i8, Matrix::i8, Matrix::i8, 16, 64);
    SMFMAC(i32_32x32x32_i8, Matrix::i8, Matrix::i8, 32, 32);
    SMFMAC(f32_16x16x64_bf8_bf8, Matrix::bf8, Matrix::bf8, 16, 64);
    SMFMAC(f32_16x16x64_bf8_fp8, Matrix::bf8, Matrix::fp8, 16, 64);
    SMFMAC(f32_16x16x64_fp8_bf8, Matrix::fp8, Matrix::bf8, 16, 64);
    SMFMAC(f32_16x16x64_fp8_fp8, Matrix::fp8, Matrix::fp8, 16, 64);
    SMFMAC(f32_32x32x32_bf8_bf8, Matrix::bf8, Matrix::bf8, 32, 32);
    SMFMAC(f32_32x32x32_bf8_fp8, Matrix::bf8, Matrix::fp8, 32, 32);
    SMFMAC(f32_32x32x32_fp8_bf8, Matrix::fp8, Matrix::bf8, 32, 32);
    SMFMAC(f32_32x32x32_fp8_fp8, Matrix::fp8, Matrix::fp8, 32, 32);
#undef MFMA
#undef SMFMAC
}

}  // namespace
}  // namespace emulator::VARIANT
