// The eight tile registers of AMX in plain C++, so that the amx_bf16 path can be tested on
// processors without them: LITEATTENTION_SOFT_TILES in CMakeLists.txt. Hundreds of times slower.
// Included by kernel_amx_bf16.cpp after <immintrin.h>, whose functions of the same names it hides.
//
// Every tile is 16 rows of 64 bytes, the only shape that gemm_amx.h configures. The products of a
// pair are added one after the other with one rounding each; the hardware's order inside a pair and
// its flush of denormals differ from that in the last place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace liteattention::cpu::soft_tiles {

struct Registers {
    uint8_t tile[8][16][64] = {};
    uint8_t config[64] = {};
};

inline Registers& Own() {
    static thread_local Registers registers;
    return registers;
}

inline void Load(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < 16; ++r)
        std::memcpy(Own().tile[tile][r], static_cast<const char*>(from) + r * stride, 64);
}

inline void Store(int tile, void* to, int64_t stride) {
    for (int r = 0; r < 16; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, Own().tile[tile][r], 64);
}

inline float FromBf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void Product(int to, int left, int right) {
    Registers& own = Own();
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            float sum;
            std::memcpy(&sum, own.tile[to][m] + n * 4, sizeof sum);
            for (int k = 0; k < 16; ++k) {
                uint16_t a[2], b[2];
                std::memcpy(a, own.tile[left][m] + k * 4, sizeof a);
                std::memcpy(b, own.tile[right][k] + n * 4, sizeof b);
                for (int i = 0; i < 2; ++i) sum = std::fma(FromBf16(a[i]), FromBf16(b[i]), sum);
            }
            std::memcpy(own.tile[to][m] + n * 4, &sum, sizeof sum);
        }
    }
}

}  // namespace liteattention::cpu::soft_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_storeconfig
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd(tile, from, stride) ::liteattention::cpu::soft_tiles::Load(tile, from, stride)
#define _tile_stored(tile, to, stride) ::liteattention::cpu::soft_tiles::Store(tile, to, stride)
#define _tile_zero(t) std::memset(::liteattention::cpu::soft_tiles::Own().tile[t], 0, 1024)
#define _tile_dpbf16ps(to, a, b) ::liteattention::cpu::soft_tiles::Product(to, a, b)
#define _tile_storeconfig(to) std::memcpy(to, ::liteattention::cpu::soft_tiles::Own().config, 64)
#define _tile_loadconfig(from) std::memcpy(::liteattention::cpu::soft_tiles::Own().config, from, 64)
#define _tile_release() std::memset(::liteattention::cpu::soft_tiles::Own().config, 0, 64)
