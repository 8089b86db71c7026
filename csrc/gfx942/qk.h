// Phase qk: scores of one K block, S^T = K Q^T, on the matrix core.
#pragma once

#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

// A wave's queries as B operands: kTiles q tiles x D/32 fragments; 3 tiles at D = 128: 48 VGPRs.
template <int kDim, int kTiles = kQTiles>
struct Queries {
    Half8 fragment[kTiles][kDim / 32];
};

// Scores of one K block of kKeys keys: 48 VGPRs with 3 q tiles.
template <int kTiles = kQTiles, int kKeys = kKBlock>
struct ScoresOf {
    Float4 tile[kKeys / kTile][kTiles];
};
using Scores = ScoresOf<>;

// Loads 48 rows from `first_row` on; rows past the end repeat the last one and are never stored.
// The sign of the scale goes into q, and a zero scale makes q zero: scores only ever meet a
// positive factor.
template <int kDim>
LITE_DEVICE void LoadQueries(const char* base, int64_t row_bytes, int32_t first_row, int32_t q_len,
                             float scale_log2, uint32_t lane, Queries<kDim>& q) {
    const uint32_t flip = scale_log2 < 0.0f ? 0x80008000u : 0u;
    const uint32_t keep = scale_log2 == 0.0f ? 0u : ~0u;
#pragma unroll
    for (int t = 0; t < kQTiles; ++t) {
        const int32_t row = first_row + kTile * t + Col(static_cast<int>(lane));
        const int32_t clamped = row < q_len ? row : q_len - 1;
        const char* from = base + clamped * row_bytes;
#pragma unroll
        for (int s = 0; s < kDim / 32; ++s) {
            const int dim = QkDim(s, static_cast<int>(lane), 0);
            const Word4 words = *reinterpret_cast<const UnalignedWord4*>(from + dim * 2);
            q.fragment[t][s] = __builtin_bit_cast(Half8, (words ^ flip) & keep);
        }
    }
}

// K streams from LDS through a ring of kKAhead fragments. One fragment is one 16-byte read and
// feeds 2 MFMAs per q tile (3 of them: 96 clocks). The fences keep the compiler from reading
// everything at once, for which the registers do not suffice. `k_read` is KReadByte(D, 0, 0, lane);
// what is added to it is an immediate of the read.
inline constexpr int kKAhead = 3;

using KRing = Half8[kKAhead];

template <int kDim>
LITE_DEVICE Half8 KFragment(const char* k_lds, uint32_t k_read, int index) {
    const int t = index / (kDim / 32), s = index % (kDim / 32);
    const uint32_t at = (k_read ^ (s % 2 * 64u)) + s / 2 * 128u + t * kTile * kDim * 2u;
    return *reinterpret_cast<const Half8*>(k_lds + at);
}

template <int kDim>
LITE_DEVICE void StartQk(const char* k_lds, uint32_t k_read, KRing& k) {
#pragma unroll
    for (int f = 0; f < kKAhead; ++f) k[f] = KFragment<kDim>(k_lds, k_read, f);
    SchedulingFence();
}

template <class Number, int kDim, int kTiles, int kKeys>
LITE_DEVICE void Qk(const char* k_lds, uint32_t k_read, const Queries<kDim, kTiles>& q, KRing& k,
                    ScoresOf<kTiles, kKeys>& scores) {
    constexpr int kSteps = kDim / 32, kFragments = kKeys / kTile * kSteps;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
        const int t = f / kSteps, s = f % kSteps;
        Half8& now = k[f % kKAhead];
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            if (s == 0) scores.tile[t][x] = Float4{};
            Number::Multiply(Low(now), Low(q.fragment[x][s]), scores.tile[t][x]);
        }
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(High(now), High(q.fragment[x][s]), scores.tile[t][x]);
        if (f + kKAhead < kFragments) now = KFragment<kDim>(k_lds, k_read, f + kKAhead);
        SchedulingFence();
    }
}

}  // namespace liteattention::gfx942
