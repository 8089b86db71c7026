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

extern const Kernel kBf16 = MakeKernel<GemmBf16Pairs, DType::kBf16>();

}  // namespace liteattention::cpu::avx512_bf16
