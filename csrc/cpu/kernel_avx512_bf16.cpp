// x86-64 with AVX-512-BF16: bf16 products two at a time.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernel.h"

namespace liteattention::cpu::avx512_bf16 {

#include "vec_avx512.h"
#include "gemm_lanes.h"
#include "bf16_pairs.h"

struct OpBf16Pairs {
    using Element = uint16_t;
    static constexpr int kPerWord = 2;
    static Vec Mac(Vec acc, uint32_t a, const uint32_t* b) {
        const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)pair, (__m512bh)_mm512_loadu_si512(b))};
    }
};

struct GemmBf16Pairs : GemmLanes<OpBf16Pairs> {
    static void Pair(Vec even, Vec odd, uint32_t* to) { StorePair(even, odd, to); }
};

#include "kernel_impl.h"
#include "decode_lanes.h"

// A word is a pair of bf16: of one row's neighbours for scores, of two keys' for values.
struct PairWords {
    static constexpr int64_t kDims = 32;
    static constexpr int kKeys = 2;

    static Vec Mac(Vec acc, Vec a, Vec b) {
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
    }
    static Vec Keys(const char* row, int64_t d) {
        return Vec::Load(reinterpret_cast<const float*>(row + d * 2));
    }
    // Two vectors for 32 columns: in each group of 8 the first four, and the others.
    template <int kPanel>
    static void Values(const char* const* rows, int64_t d, Vec* to) {
        for (int x = 0; x < kPanel; x += 2) {
            const __m512i a = _mm512_loadu_si512(rows[0] + (d + x * 16) * 2);
            const __m512i b = _mm512_loadu_si512(rows[1] + (d + x * 16) * 2);
            to[x].v = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
            to[x + 1].v = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
        }
    }
    static void StoreWeights(const Vec* weight, float* to) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(weight[1].v, weight[0].v));
    }
    static void Natural(const float* from, int64_t n, float* to) {
        const __m512i low =
            _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high =
            _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int64_t d = 0; d < n; d += 32) {
            const __m512 a = _mm512_loadu_ps(from + d), b = _mm512_loadu_ps(from + d + 16);
            _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(a, low, b));
            _mm512_storeu_ps(to + d + 16, _mm512_permutex2var_ps(a, high, b));
        }
    }
};

template <DType kRow>
struct DecodeWordsOf<GemmBf16Pairs, kRow> {
    using Type = PairWords;
};

#include "decode_impl.h"

extern const Kernel kBf16 = MakeKernel<GemmBf16Pairs, DType::kBf16>();
extern const DecodeKernel kDecodeBf16 = MakeDecode<GemmBf16Pairs, DType::kBf16>();

}  // namespace liteattention::cpu::avx512_bf16
