// 16 fp32 lanes in one AVX-512 register. Included by kernel files only, inside their namespace.
#pragma once

#include <immintrin.h>

struct Vec {
    static constexpr int kLanes = 16;
    __m512 v;

    static Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec Set(float x) { return {_mm512_set1_ps(x)}; }
    void Store(float* p) const { _mm512_storeu_ps(p, v); }
    friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
    float Sum() const { return _mm512_reduce_add_ps(v); }
    // Returns b where either is NaN.
    static Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Vec MulAdd(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    // Lanes where a <= b; false for NaN.
    static uint32_t LessEqual(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
    static uint32_t Equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
    // yes where the lane's bit is set, else no.
    static Vec Select(uint32_t lanes, Vec yes, Vec no) {
        return {_mm512_mask_blend_ps(static_cast<__mmask16>(lanes), no.v, yes.v)};
    }
    // Splits x into an integer and a rest in [-0.5, 0.5].
    static void Split(Vec x, Vec* whole, Vec* rest) {
        whole->v = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        rest->v = _mm512_sub_ps(x.v, whole->v);
    }
    // p * 2^whole, exactly 0 below the normal range. Such lanes are masked out: VSCALEFPS
    // underflows in microcode, which made causal tiles, whose hidden scores are -inf, three times
    // as slow.
    static Vec Scale(Vec p, Vec whole) {
        const __mmask16 normal = _mm512_cmp_ps_mask(whole.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        return {_mm512_maskz_scalef_ps(normal, p.v, whole.v)};  // NaN is kept: "not less than"
    }
    static Vec FromBf16(const uint16_t* p) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
    }
    static Vec FromFp16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    float Largest() const { return _mm512_reduce_max_ps(v); }
    // Word c of each group of four lanes in all four.
    static void Spread(Vec x, Vec* to) {
        to[0].v = _mm512_permute_ps(x.v, 0x00);
        to[1].v = _mm512_permute_ps(x.v, 0x55);
        to[2].v = _mm512_permute_ps(x.v, 0xaa);
        to[3].v = _mm512_permute_ps(x.v, 0xff);
    }
    // Transposes rows[0 .. 3] inside each group of four lanes.
    static void Turn(Vec* rows) {
        __m512d t[4];
        for (int i = 0; i < 2; ++i) {
            const __m512 a = rows[2 * i].v, b = rows[2 * i + 1].v;
            t[2 * i] = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
            t[2 * i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        }
        for (int i = 0; i < 2; ++i) {
            rows[2 * i].v = _mm512_castpd_ps(_mm512_unpacklo_pd(t[i], t[2 + i]));
            rows[2 * i + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(t[i], t[2 + i]));
        }
    }
    // The sums of the groups of parts[g] as group g.
    static Vec Join(const Vec* parts) {
        __m512 half[2];
        for (int i = 0; i < 2; ++i) {
            const __m512 a = parts[2 * i].v, b = parts[2 * i + 1].v;
            half[i] =
                _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
        return {_mm512_add_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                              _mm512_shuffle_f32x4(half[0], half[1], 0xdd))};
    }
    void ToFp16(uint16_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

// Transposes 16 rows of 16 words at `src` (row stride in words) into `dst`.
static inline void Transpose16x16(const uint32_t* src, int64_t src_stride, uint32_t* dst,
                                  int64_t dst_stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * src_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 g + c] holds, per 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i e = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i f = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(dst + c * dst_stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(dst + (8 + c) * dst_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(dst + (4 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0x88));
        _mm512_storeu_si512(dst + (12 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0xdd));
    }
}
