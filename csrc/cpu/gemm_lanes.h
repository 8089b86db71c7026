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
    static constexpr bool kDecodeTiles = false;

    static void Enter() {}
    static void Leave() {}

    // m is a multiple of 8, n of 16. Strides: a in bytes, b and c in words. The sum of this call
    // is formed apart and then added to C, which keeps the rounding error of long sums small.
    static void Multiply(int m, int n, int blocks, const char* const* a, int64_t a_stride,
                         int steps, const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                         bool accumulate) {
        constexpr int kRows = Vec::kLanes == 16 ? 8 : 4;
        constexpr int kVecs = Vec::kLanes == 16 ? 1 : 2;
        for (int j = 0; j < n;) {
            const bool wide = n - j >= 2 * kVecs * Vec::kLanes && Vec::kLanes == 16;
            for (int i = 0; i < m; i += kRows) {
                if (wide)
                    Tile<kRows, 2 * kVecs>(i, j, blocks, a, a_stride, steps, b, b_stride, c,
                                           c_stride, accumulate);
                else
                    Tile<kRows, kVecs>(i, j, blocks, a, a_stride, steps, b, b_stride, c, c_stride,
                                       accumulate);
            }
            j += (wide ? 2 : 1) * kVecs * Vec::kLanes;
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
