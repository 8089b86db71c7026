// Pairs of bf16 along the summed dimension, as VDPBF16PS and TDPBF16PS take them.
// Included by kernel files only, after vec_avx512.h.
#pragma once

// Word i = even lane i in the low half, odd lane i in the high half; nearest, ties to even.
static inline void StorePair(Vec even, Vec odd, uint32_t* to) {
    // 0, 16, 1, 17, ...: the conversion leaves all even lanes below all odd ones.
    alignas(64) static constexpr uint16_t kInterleave[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
    const __m512i order = _mm512_load_si512(kInterleave);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}
