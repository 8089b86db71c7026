// The same products as gemm_lanes.h on the AMX tile unit: one tile is 16 rows of 64 bytes, one
// TDPBF16PS does 16 x 16 x 32 bf16 in 16 cycles. Up to 32 x 32 of C are held in four tiles while
// two tiles of A and two of B stream by: four products for four loads.
// Included by kernel_amx_bf16.cpp only.
#pragma once

#include "bf16_pairs.h"

struct GemmAmx {
    using Element = uint16_t;
    static constexpr int kPerWord = 2;
    static constexpr int kKPad = 32;  // a tile row is 32 bf16
    static constexpr int kMPad = 16;
    static constexpr int kWords = 16;  // 32-bit words in a tile row
    static constexpr int kQTile = kMaxQTile;
    static constexpr bool kDecodeTiles = true;

    static void Pair(Vec even, Vec odd, uint32_t* to) { StorePair(even, odd, to); }

    // Sets all eight tiles to 16 rows of 64 bytes on this thread, and later puts back what was
    // there: another library may believe that its own configuration still holds.
    static void Enter() {
        _tile_storeconfig(Before());
        _tile_loadconfig(&kConfig);
    }
    static void Leave() {
        if (Before()[0] == 0)
            _tile_release();
        else
            _tile_loadconfig(Before());
    }

    // m and n are multiples of 16, steps of 16 words. Strides: a in bytes, b and c in words.
    static void Multiply(int m, int n, int blocks, const char* const* a, int64_t a_stride,
                         int steps, const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                         bool accumulate) {
        for (int i = 0; i < m; i += 32) {
            const bool two_rows = m - i > 16;
            for (int j = 0; j < n; j += 32) {
                const bool two_columns = n - j > 16;
                float* to = c + i * c_stride + j;
                const uint32_t* from = b + j;
                const int64_t skip = i * a_stride;
                if (two_rows && two_columns)
                    Tile<2, 2>(skip, blocks, a, a_stride, steps, from, b_stride, to, c_stride,
                               accumulate);
                else if (two_rows)
                    Tile<2, 1>(skip, blocks, a, a_stride, steps, from, b_stride, to, c_stride,
                               accumulate);
                else if (two_columns)
                    Tile<1, 2>(skip, blocks, a, a_stride, steps, from, b_stride, to, c_stride,
                               accumulate);
                else
                    Tile<1, 1>(skip, blocks, a, a_stride, steps, from, b_stride, to, c_stride,
                               accumulate);
            }
        }
    }

    // scores[64][16] = four tiles of 16 key rows times the query, [steps words][16]. Four products
    // run side by side: one waits 52 cycles for its predecessor, and 16 to start.
    // fetch() is called for every tile of keys.
    template <class Fetch>
    static void Scores(const char* const* keys, const int64_t* strides, int steps,
                       const uint32_t* query, float* scores, Fetch& fetch) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int s = 0; s < steps; s += kWords, query += kWords * 16) {
            _tile_loadd(6, query, 64);
            _tile_loadd(4, keys[0] + s * 4, strides[0]);
            _tile_dpbf16ps(0, 4, 6);
            fetch();
            _tile_loadd(5, keys[1] + s * 4, strides[1]);
            _tile_dpbf16ps(1, 5, 6);
            fetch();
            _tile_loadd(4, keys[2] + s * 4, strides[2]);
            _tile_dpbf16ps(2, 4, 6);
            fetch();
            _tile_loadd(5, keys[3] + s * 4, strides[3]);
            _tile_dpbf16ps(3, 5, 6);
            fetch();
        }
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + 256, 64);
        _tile_stored(2, scores + 512, 64);
        _tile_stored(3, scores + 768, 64);
    }

    // Output tiles += weights * values over `count` tiles of 16 keys. A value row is read as it
    // lies: a word holds columns 2 j and 2 j + 1 of one key, where the product wants two keys. So a
    // weight stands in the low half of its word, 0 in the high one, to give the even columns, and
    // the other way round for the odd ones. Up to 8 lanes have both in the rows of one tile, which
    // wastes nothing: weights [count][512] words, output [16][words] with rows 8 to 15 odd. More
    // lanes take a tile of either kind: output [32][words] with rows 16 to 31 odd.
    template <class Fetch>
    static void Values(bool both, int count, const uint32_t* weights, const char* const* values,
                       const int64_t* strides, int64_t words, float* output, Fetch& fetch) {
        for (int64_t j = 0; j < words; j += both ? 64 : 32) {
            const int64_t left = words - j;
            if (both && left >= 64)
                Columns<4>(count, weights, values, strides, j, words, output + j, fetch);
            else if (both && left >= 48)
                Columns<3>(count, weights, values, strides, j, words, output + j, fetch);
            else if (both && left >= 32)
                Columns<2>(count, weights, values, strides, j, words, output + j, fetch);
            else if (both)
                Columns<1>(count, weights, values, strides, j, words, output + j, fetch);
            else if (left >= 32)
                EvenOdd<2>(count, weights, values, strides, j, words, output + j, fetch);
            else
                EvenOdd<1>(count, weights, values, strides, j, words, output + j, fetch);
        }
    }

    // Columns 4 x .. 4 x + 3 of scores[16 keys][16 lanes] as rows of 16 keys.
    static void Across(const float* scores, Vec* rows) {
        __m512 a[4], t[4];
        for (int j = 0; j < 4; ++j) {
            const float* from = scores + j * 16;
            a[j] = _mm512_broadcast_f32x4(_mm_load_ps(from));
            a[j] = _mm512_mask_broadcast_f32x4(a[j], 0x00f0, _mm_load_ps(from + 4 * 16));
            a[j] = _mm512_mask_broadcast_f32x4(a[j], 0x0f00, _mm_load_ps(from + 8 * 16));
            a[j] = _mm512_mask_broadcast_f32x4(a[j], 0xf000, _mm_load_ps(from + 12 * 16));
        }
        t[0] = _mm512_unpacklo_ps(a[0], a[1]);
        t[1] = _mm512_unpackhi_ps(a[0], a[1]);
        t[2] = _mm512_unpacklo_ps(a[2], a[3]);
        t[3] = _mm512_unpackhi_ps(a[2], a[3]);
        for (int half = 0; half < 2; ++half) {
            const __m512d x = _mm512_castps_pd(t[half]), y = _mm512_castps_pd(t[half + 2]);
            rows[2 * half].v = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            rows[2 * half + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }

    // 16 weights of a lane, in the words that give even and odd columns.
    static void Weights(Vec x, uint32_t* even, uint32_t* odd) {
        const __m512i words = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v));
        _mm512_store_si512(even, words);
        _mm512_store_si512(odd, _mm512_slli_epi32(words, 16));
    }

    // Even and odd columns in turn; n (of each) is a multiple of 16.
    static void Natural(const float* even, const float* odd, int64_t n, float* to) {
        const __m512i low =
            _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i high =
            _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        for (int64_t j = 0; j < n; j += 16) {
            const __m512 a = _mm512_load_ps(even + j), b = _mm512_load_ps(odd + j);
            _mm512_store_ps(to + 2 * j, _mm512_permutex2var_ps(a, low, b));
            _mm512_store_ps(to + 2 * j + 16, _mm512_permutex2var_ps(a, high, b));
        }
    }

   private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    // In static storage: the intrinsic tells the compiler of its first 8 bytes only.
    static constexpr Config kConfig = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

    static uint8_t* Before() {
        alignas(64) static thread_local uint8_t config[64];
        return config;
    }

    // kTiles tiles of 16 words of value columns from word j on.
    template <int kTiles, class Fetch>
    static void Columns(int count, const uint32_t* weights, const char* const* values,
                        const int64_t* strides, int64_t j, int64_t words, float* to, Fetch& fetch) {
        const int64_t bytes = words * 4;
        _tile_loadd(0, to, bytes);
        if constexpr (kTiles > 1) _tile_loadd(1, to + 16, bytes);
        if constexpr (kTiles > 2) _tile_loadd(2, to + 32, bytes);
        if constexpr (kTiles > 3) _tile_loadd(3, to + 48, bytes);
        for (int t = 0; t < count; ++t, weights += 512) {
            const char* from = values[t] + j * 4;
            _tile_loadd(6, weights, 64);
            _tile_loadd(4, from, strides[t]);
            fetch();
            _tile_dpbf16ps(0, 6, 4);
            if constexpr (kTiles > 1) {
                _tile_loadd(5, from + 64, strides[t]);
                fetch();
                _tile_dpbf16ps(1, 6, 5);
            }
            if constexpr (kTiles > 2) {
                _tile_loadd(4, from + 128, strides[t]);
                fetch();
                _tile_dpbf16ps(2, 6, 4);
            }
            if constexpr (kTiles > 3) {
                _tile_loadd(5, from + 192, strides[t]);
                fetch();
                _tile_dpbf16ps(3, 6, 5);
            }
        }
        _tile_stored(0, to, bytes);
        if constexpr (kTiles > 1) _tile_stored(1, to + 16, bytes);
        if constexpr (kTiles > 2) _tile_stored(2, to + 32, bytes);
        if constexpr (kTiles > 3) _tile_stored(3, to + 48, bytes);
    }

    template <int kTiles, class Fetch>
    static void EvenOdd(int count, const uint32_t* weights, const char* const* values,
                        const int64_t* strides, int64_t j, int64_t words, float* to, Fetch& fetch) {
        const int64_t bytes = words * 4;
        float* odd = to + 16 * words;
        _tile_loadd(0, to, bytes);
        _tile_loadd(1, odd, bytes);
        if constexpr (kTiles > 1) _tile_loadd(2, to + 16, bytes);
        if constexpr (kTiles > 1) _tile_loadd(3, odd + 16, bytes);
        for (int t = 0; t < count; ++t, weights += 512) {
            const char* from = values[t] + j * 4;
            _tile_loadd(6, weights, 64);
            _tile_loadd(7, weights + 256, 64);
            _tile_loadd(4, from, strides[t]);
            fetch();
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
            if constexpr (kTiles > 1) {
                _tile_loadd(5, from + 64, strides[t]);
                fetch();
                _tile_dpbf16ps(2, 6, 5);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        _tile_stored(0, to, bytes);
        _tile_stored(1, odd, bytes);
        if constexpr (kTiles > 1) _tile_stored(2, to + 16, bytes);
        if constexpr (kTiles > 1) _tile_stored(3, odd + 16, bytes);
    }

    // Tiles 0-3: C; 4, 5: A; 6, 7: B.
    template <int kRows, int kColumns>
    static void Tile(int64_t skip, int blocks, const char* const* a, int64_t a_stride, int steps,
                     const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                     bool accumulate) {
        const int64_t c_bytes = c_stride * 4, b_bytes = b_stride * 4;
        float* c1 = c + 16 * c_stride;
        if (accumulate) {
            _tile_loadd(0, c, c_bytes);
            if constexpr (kColumns == 2) _tile_loadd(1, c + 16, c_bytes);
            if constexpr (kRows == 2) _tile_loadd(2, c1, c_bytes);
            if constexpr (kRows == 2 && kColumns == 2) _tile_loadd(3, c1 + 16, c_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int block = 0; block < blocks; ++block) {
            const char* from = a[block] + skip;
            for (int s = 0; s < steps; s += kWords, b += kWords * b_stride) {
                _tile_loadd(6, b, b_bytes);
                _tile_loadd(4, from + s * 4, a_stride);
                _tile_dpbf16ps(0, 4, 6);
                if constexpr (kColumns == 2) {
                    _tile_loadd(7, b + 16, b_bytes);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if constexpr (kRows == 2) {
                    _tile_loadd(5, from + s * 4 + 16 * a_stride, a_stride);
                    _tile_dpbf16ps(2, 5, 6);
                }
                if constexpr (kRows == 2 && kColumns == 2) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, c, c_bytes);
        if constexpr (kColumns == 2) _tile_stored(1, c + 16, c_bytes);
        if constexpr (kRows == 2) _tile_stored(2, c1, c_bytes);
        if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, c1 + 16, c_bytes);
    }
};
