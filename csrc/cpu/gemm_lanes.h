// The small matrix products of the kernel on vector lanes: C[m][n] (+)= sum over blocks and steps
// of A[block][m][step] * B[block * steps + step][n]. One A word is broadcast against a row of B;
// a word is an fp32 (OpFp32) or a pair of bf16 along the summed dimension (OpBf16Pairs).
// Included by kernel files only, after their Vec.
#pragma once

struct OpFp32 {
    using Element = float;
    static constexpr int kPerWord = 1;
    static Vec Mac(Vec acc, uint32_t a, const uint32_t* b) {
        float x;
        std::memcpy(&x, &a, sizeof x);
        return Vec::MulAdd(Vec::Set(x), Vec::Load(reinterpret_cast<const float*>(b)), acc);
    }
};

template <class Op>
struct GemmLanes {
    using Element = typename Op::Element;
    static constexpr int kPerWord = Op::kPerWord;
    static constexpr int kKPad = 8;  // head dims are multiples of 8 already
    static constexpr int kMPad = 8;
    static constexpr int kQTile = kMaxQTile / 2;
    static constexpr bool kDecodeTiles = false;

    static void Enter() {}
    static void Leave() {}

    // m is a multiple of 8, n of 16. Strides: a in bytes, b and c in words. The sum of this call
    // is formed apart and then added to C, which keeps the rounding error of long sums small.
    //
    // With 16 lanes, four rows of A stay in the L1 cache while B streams by from L2, 64 lanes at a
    // time: 8 loads for 16 products. The other way round columns of B would have to stay, which at
    // row pitches of a power of two share a part of L1's sets: 5 to 15 % slower on Zen 4. Narrower
    // registers take B's columns one cache line or less at a time, and those must stay.
    static void Multiply(int m, int n, int blocks, const char* const* a, int64_t a_stride,
                         int steps, const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                         bool accumulate) {
        const auto tile = [&](auto rows, auto vecs, int i, int j) {
            Tile<rows.value, vecs.value>(i, j, blocks, a, a_stride, steps, b, b_stride, c, c_stride,
                                         accumulate);
        };
        constexpr std::integral_constant<int, 1> k1;
        constexpr std::integral_constant<int, 2> k2;
        constexpr std::integral_constant<int, 4> k4;
        constexpr std::integral_constant<int, 8> k8;
        if constexpr (Vec::kLanes == 16) {
            const int whole = n / 64 * 64;
            for (int i = 0; i < m; i += 4)
                for (int j = 0; j < whole; j += 64) tile(k4, k4, i, j);
            for (int i = 0; i < m && n - whole >= 32; i += 8) tile(k8, k2, i, whole);
            for (int i = 0; i < m && n % 32; i += 8) tile(k8, k1, i, n - 16);
        } else {
            for (int j = 0; j < n; j += 2 * Vec::kLanes)
                for (int i = 0; i < m; i += 4) tile(k4, k2, i, j);
        }
    }

   private:
    template <int kRows, int kVecs>
    static void Tile(int i, int j, int blocks, const char* const* a, int64_t a_stride, int steps,
                     const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                     bool accumulate) {
        Vec acc[kRows][kVecs];
        for (int r = 0; r < kRows; ++r)
            for (int x = 0; x < kVecs; ++x) acc[r][x] = Vec::Set(0.0f);
        const uint32_t* row = b + j;
        for (int block = 0; block < blocks; ++block) {
            const char* from = a[block] + i * a_stride;
            for (int s = 0; s < steps; ++s, row += b_stride) {
                for (int r = 0; r < kRows; ++r) {
                    uint32_t word;
                    std::memcpy(&word, from + r * a_stride + s * 4, sizeof word);
                    for (int x = 0; x < kVecs; ++x)
                        acc[r][x] = Op::Mac(acc[r][x], word, row + x * Vec::kLanes);
                }
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int x = 0; x < kVecs; ++x) {
                float* to = c + (i + r) * c_stride + j + x * Vec::kLanes;
                (accumulate ? Vec::Load(to) + acc[r][x] : acc[r][x]).Store(to);
            }
        }
    }
};
