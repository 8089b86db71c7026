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
