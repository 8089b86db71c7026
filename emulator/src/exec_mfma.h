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
// count (CDNA2 flushes 16-bit ones, CDNA3 does not) and MODE has no say.
#pragma once

#include "exec_common.h"

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

template <Matrix kType>
[[gnu::always_inline]] inline Element<kType> matrix_value(uint32_t bits) {
    if constexpr (kType == Matrix::f16)
        return half_to_float(bits & 0xffff);
    else if constexpr (kType == Matrix::bf16)
        return as_float(bits << 16);
    else if constexpr (kType == Matrix::i8)
        return static_cast<int8_t>(bits);
    else if constexpr (kType == Matrix::fp8)
        return from_8bit<3>(bits & 255);
    else if constexpr (kType == Matrix::bf8)
        return from_8bit<2>(bits & 255);
    else if constexpr (kType == Matrix::xf32)
        return as_float(bits & 0xffffe000);  // 10 bits of mantissa
    else
        return as_float(bits);
}

// to[(block * K + k) * kSide + row] from the registers of A or B. `lane_of(l)` is the lane that
// lane l reads: a permutation of groups of 16 lanes.
template <Matrix kType, int kSide, int kDepth, int kBlocks>
inline void unpack(const Wave& w, const Operand& o, const int* group, Element<kType>* to) {
    constexpr int bits = matrix_bits(kType), lanes = kSide < 16 ? kSide : 16;
    constexpr int values = kSide * kDepth * kBlocks / kLanes;
    if (o.kind != Kind::vector) throw std::runtime_error("matrix operand must be vector registers");
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
                const uint32_t* const in = w.v[o.index + j * bits / 32] + from;
                const int shift = j * bits % 32;
                for (int l = 0; l < lanes; ++l) out[l] = matrix_value<kType>(in[l] >> shift);
            }
        }
    }
}

template <Matrix kType>
[[gnu::always_inline]] inline Element<kType> multiply_add(Element<kType> a, Element<kType> b,
                                                          Element<kType> c) {
    if constexpr (kType == Matrix::i8) {
        return static_cast<int32_t>(static_cast<uint32_t>(a * b) + static_cast<uint32_t>(c));
    } else if constexpr (kType == Matrix::f64) {
        return __builtin_fma(a, b, c);
    } else {
#ifndef __FMA__
        if constexpr (matrix_bits(kType) < 32) return a * b + c;
#endif
        return __builtin_fmaf(a, b, c);
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
    constexpr int kRows = kSide < 4 ? kSide : 4;
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
    const uint64_t constant = splat ? (c.kind == Kind::scalar ? w.s[c.index] : c.value) : 0;
    const int broadcast = (1 << i.cbsz) - 1;
    for (int block = 0; block < kBlocks; ++block) {
        const int block_a = wide ? block : ((block & ~broadcast) | (i.abid & broadcast)) % kBlocks;
        const T* const left = a + block_a * kDepth * kSide;
        const T* const right = b + block * kDepth * kSide;
        for (int row = 0; row < kSide; row += kRows) {
            alignas(64) T sum[kRows][kSide];
            for (int r = 0; r < kRows; ++r) {
                const Place p = place_of<kSide, wide>(row + r, block);
                if constexpr (wide) {
                    for (int l = 0; l < kSide; ++l) {
                        const uint64_t bits =
                            splat ? constant
                                  : static_cast<uint64_t>(w.v[c.index + p.reg + 1][p.lane + l])
                                            << 32 |
                                        w.v[c.index + p.reg][p.lane + l];
                        sum[r][l] = i.blgp & 4 ? -as_double(bits) : as_double(bits);
                    }
                } else if (splat) {
                    for (int l = 0; l < kSide; ++l)
                        sum[r][l] = std::bit_cast<T>(static_cast<uint32_t>(constant));
                } else {
                    std::memcpy(sum[r], w.v[c.index + p.reg] + p.lane, sizeof sum[r]);
                }
            }
            for (int k = 0; k < kDepth; ++k)
                for (int r = 0; r < kRows; ++r) {
                    const T x = left[k * kSide + row + r];
                    for (int l = 0; l < kSide; ++l)
                        sum[r][l] = multiply_add<kA>(x, right[k * kSide + l], sum[r][l]);
                }
            for (int r = 0; r < kRows; ++r) {
                const Place p = place_of<kSide, wide>(row + r, block);
                if constexpr (wide) {
                    for (int l = 0; l < kSide; ++l) {
                        const uint64_t bits = as_bits(sum[r][l]);
                        w.v[i.dst[0].index + p.reg][p.lane + l] = static_cast<uint32_t>(bits);
                        w.v[i.dst[0].index + p.reg + 1][p.lane + l] =
                            static_cast<uint32_t>(bits >> 32);
                    }
                } else {
                    std::memcpy(w.v[i.dst[0].index + p.reg] + p.lane, sum[r], sizeof sum[r]);
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
    alignas(64) T b[kDepth * kSide];
    unpack<kB, kSide, kDepth, 1>(w, i.src[1], kBroadcastB[0], b);
    const int sets = 32 / (2 * values);
    const int shift = i.cbsz == 0 ? (i.abid & (sets - 1)) * 2 * values : 0;
    for (int row = 0; row < kSide; ++row) {
        const Place p = place_of<kSide, false>(row, 0);
        alignas(64) T sum[kSide];
        std::memcpy(sum, w.v[i.dst[0].index + p.reg] + p.lane, sizeof sum);
        for (int lane = row; lane < kLanes; lane += kSide) {
            const uint32_t positions = w.v[i.src[2].index][lane] >> shift;
            for (int j = 0; j < values; ++j) {
                const uint32_t x = w.v[i.src[0].index + j * bits / 32][lane] >> j * bits % 32;
                const T a = matrix_value<kA>(x);
                const int k = 2 * values * (lane / kSide) + 4 * (j / 2) +
                              static_cast<int>(positions >> 2 * j & 3);
                for (int l = 0; l < kSide; ++l)
                    sum[l] = multiply_add<kA>(a, b[k * kSide + l], sum[l]);
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
