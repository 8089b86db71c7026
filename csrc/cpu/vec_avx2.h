// 8 fp32 lanes in one AVX register (AVX2, FMA, F16C). Included by kernel files only.
#pragma once

#include <immintrin.h>

struct Vec {
    static constexpr int kLanes = 8;
    __m256 v;

    static Vec Load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec Set(float x) { return {_mm256_set1_ps(x)}; }
    void Store(float* p) const { _mm256_storeu_ps(p, v); }
    friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
    float Sum() const {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    // Returns b where either is NaN.
    static Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
    static Vec MulAdd(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    // Lanes where a <= b; false for NaN.
    static uint32_t LessEqual(Vec a, Vec b) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)));
    }
    static uint32_t Equal(Vec a, Vec b) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
    }
    // yes where the lane's bit is set, else no.
    static Vec Select(uint32_t lanes, Vec yes, Vec no) {
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit);
        return {_mm256_blendv_ps(no.v, yes.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)))};
    }
    // Splits x into an integer and a rest in [-0.5, 0.5].
    static void Split(Vec x, Vec* whole, Vec* rest) {
        whole->v = _mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        rest->v = _mm256_sub_ps(x.v, whole->v);
    }
    // p * 2^whole for whole <= 0, exactly 0 below the normal range.
    static Vec Scale(Vec p, Vec whole) {
        const __m256i n = _mm256_cvtps_epi32(whole.v);
        const __m256i biased = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
        const __m256 scaled = _mm256_mul_ps(p.v, _mm256_castsi256_ps(biased));
        const __m256 normal = _mm256_cmp_ps(whole.v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
        return {_mm256_and_ps(scaled, normal)};  // NaN is kept: "not less than"
    }
    static Vec FromBf16(const uint16_t* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
    }
    static Vec FromFp16(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    float Largest() const {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    // Word c of each group of four lanes in all four.
    static void Spread(Vec x, Vec* to) {
        to[0].v = _mm256_permute_ps(x.v, 0x00);
        to[1].v = _mm256_permute_ps(x.v, 0x55);
        to[2].v = _mm256_permute_ps(x.v, 0xaa);
        to[3].v = _mm256_permute_ps(x.v, 0xff);
    }
    // Transposes rows[0 .. 3] inside each group of four lanes.
    static void Turn(Vec* rows) {
        __m256d t[4];
        for (int i = 0; i < 2; ++i) {
            const __m256 a = rows[2 * i].v, b = rows[2 * i + 1].v;
            t[2 * i] = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
            t[2 * i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
        }
        for (int i = 0; i < 2; ++i) {
            rows[2 * i].v = _mm256_castpd_ps(_mm256_unpacklo_pd(t[i], t[2 + i]));
            rows[2 * i + 1].v = _mm256_castpd_ps(_mm256_unpackhi_pd(t[i], t[2 + i]));
        }
    }
    // The sums of the groups of parts[g] as group g.
    static Vec Join(const Vec* parts) {
        return {_mm256_add_ps(_mm256_permute2f128_ps(parts[0].v, parts[1].v, 0x20),
                              _mm256_permute2f128_ps(parts[0].v, parts[1].v, 0x31))};
    }
    void ToFp16(uint16_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

static inline void Transpose8x8(const uint32_t* src, int64_t src_stride, uint32_t* dst,
                                int64_t dst_stride) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i)
        r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i * src_stride));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + c * dst_stride),
                            _mm256_permute2x128_si256(r[c], r[4 + c], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + (4 + c) * dst_stride),
                            _mm256_permute2x128_si256(r[c], r[4 + c], 0x31));
    }
}

// Transposes 16 rows of 16 words at `src` (row stride in words) into `dst`.
static inline void Transpose16x16(const uint32_t* src, int64_t src_stride, uint32_t* dst,
                                  int64_t dst_stride) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8)
            Transpose8x8(src + i * src_stride + j, src_stride, dst + j * dst_stride + i,
                         dst_stride);
}
