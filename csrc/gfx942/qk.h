// Phase qk: scores of one K block, S^T = K Q^T, on the matrix core.
#pragma once

#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

template <class L>
struct AccumulatorOf;
template <>
struct AccumulatorOf<Layout16> {
    using Type = Float4;
};
template <>
struct AccumulatorOf<Layout32> {
    using Type = FloatX16;
};
// One tile of results.
template <class L>
using Accumulator = typename AccumulatorOf<L>::Type;

// Fragments of 16 bytes of a row of K or Q.
template <class L, int kDim>
inline constexpr int kQkSteps = kDim / (2 * L::kDepth);

// A wave's queries as B operands: kTiles q tiles; 32 rows at D = 128: 32 VGPRs.
template <class L, int kDim, int kTiles>
struct Queries {
    Half8 fragment[kTiles][kQkSteps<L, kDim>];
};

// Scores of one K block of kKeys keys: 32 VGPRs with 32 rows.
template <class L, int kTiles, int kKeys>
struct Scores {
    Accumulator<L> tile[kKeys / L::kTile][kTiles];
};

// Loads the wave's rows from `first_row` on; rows past the end repeat the last one and are never
// stored. The sign of the scale goes into q, and a zero scale makes q zero: scores only ever meet a
// positive factor.
template <class L, int kDim, int kTiles>
LITE_DEVICE void LoadQueries(const char* base, int64_t row_bytes, int32_t first_row, int32_t q_len,
                             float scale_log2, uint32_t lane, Queries<L, kDim, kTiles>& q) {
    const uint32_t flip = scale_log2 < 0.0f ? 0x80008000u : 0u;
    const uint32_t keep = scale_log2 == 0.0f ? 0u : ~0u;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        const int32_t row = first_row + L::kTile * t + L::Col(static_cast<int>(lane));
        const int32_t clamped = row < q_len ? row : q_len - 1;
        const char* from = base + clamped * row_bytes;
#pragma unroll
        for (int s = 0; s < kQkSteps<L, kDim>; ++s) {
            const int dim = L::QkDim(s, static_cast<int>(lane), 0);
            const Word4 words = *reinterpret_cast<const UnalignedWord4*>(from + dim * 2);
            q.fragment[t][s] = __builtin_bit_cast(Half8, (words ^ flip) & keep);
        }
    }
}

// K streams from LDS through a ring of kKAhead fragments. One fragment is one 16-byte read and
// feeds 2 MFMAs per q tile (64 clocks with 32 rows). The fences keep the compiler from reading
// everything at once, for which the registers do not suffice. `k_read` is KReadByte(D, 0, 0, lane);
// what is added to it is an immediate of the read.
inline constexpr int kKAhead = 4;

using KRing = Half8[kKAhead];

template <class L, int kDim>
LITE_DEVICE Half8 KFragment(const char* k_lds, uint32_t k_read, int index) {
    constexpr int kSteps = kQkSteps<L, kDim>;
    const int t = index / kSteps, s = index % kSteps;
    const uint32_t chunk = static_cast<uint32_t>(s * L::kGroups * kChunkBytes);
    const uint32_t at = (k_read ^ chunk % 128u) + chunk / 128u * 128u + t * L::kTile * kDim * 2u;
    return *reinterpret_cast<const Half8*>(k_lds + at);
}

template <class L, int kDim>
LITE_DEVICE void StartQk(const char* k_lds, uint32_t k_read, KRing& k) {
#pragma unroll
    for (int f = 0; f < kKAhead; ++f) k[f] = KFragment<L, kDim>(k_lds, k_read, f);
    SchedulingFence();
}

template <class Number, class L, int kDim, int kTiles, int kKeys>
LITE_DEVICE void Qk(const char* k_lds, uint32_t k_read, const Queries<L, kDim, kTiles>& q, KRing& k,
                    Scores<L, kTiles, kKeys>& scores) {
    constexpr int kSteps = kQkSteps<L, kDim>, kFragments = kKeys / L::kTile * kSteps;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
        const int t = f / kSteps, s = f % kSteps;
        Half8& now = k[f % kKAhead];
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            if (s == 0) scores.tile[t][x] = Accumulator<L>{};
            Number::Multiply(Low(now), Low(q.fragment[x][s]), scores.tile[t][x]);
        }
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(High(now), High(q.fragment[x][s]), scores.tile[t][x]);
        if (f + kKAhead < kFragments) now = KFragment<L, kDim>(k_lds, k_read, f + kKAhead);
        SchedulingFence();
    }
}

}  // namespace liteattention::gfx942
