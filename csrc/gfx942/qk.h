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

// Fragments of 16 bytes of a row of K or Q; the last one may be half zero.
template <class L, int kDim>
inline constexpr int kQkSteps = (kDim + 2 * L::kDepth - 1) / (2 * L::kDepth);

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

// Result tiles that the products alternate between: an MFMA never waits for the sum of the one
// before. With two q tiles those alternate already.
template <int kTiles>
inline constexpr int kAbreast = kTiles == 1 ? 2 : 1;

// Which result tile and which step of its contraction the f-th fragment of `steps` a tile is for.
struct Place {
    int tile, step;
};
constexpr Place PlaceOf(int f, int steps, int abreast) {
    const int set = abreast * steps;
    return {f / set * abreast + f % abreast, f % set / abreast};
}

// The f-th fragment of a K block.
template <class L, int kDim, int kTiles>
LITE_DEVICE Half8 KFragment(const char* k_lds, uint32_t k_read, int f) {
    const Place at = PlaceOf(f, kQkSteps<L, kDim>, kAbreast<kTiles>);
    const uint32_t chunk = static_cast<uint32_t>(at.step * L::kGroups * kChunkBytes);
    const uint32_t byte = (k_read ^ chunk % 128u) + chunk / 128u * 128u +
                          static_cast<uint32_t>(at.tile * L::kTile * LdsDims(kDim) * 2);
    return *reinterpret_cast<const Half8*>(k_lds + byte);
}

template <class L, int kDim, int kTiles, int kAhead>
LITE_DEVICE void StartQk(const char* k_lds, uint32_t k_read, Half8 (&k)[kAhead]) {
#pragma unroll
    for (int f = 0; f < kAhead; ++f) k[f] = KFragment<L, kDim, kTiles>(k_lds, k_read, f);
    SchedulingFence();
}

// How many MFMAs, or pairs of them with two q tiles, a wave runs per K block; `beside` is called
// after each.
template <class L, int kDim, int kKeys>
inline constexpr int kQkSlots = 2 * kKeys / L::kTile * kQkSteps<L, kDim>;

// The product, with a ring `k` that holds the first kAhead fragments. Calls beside(i) in slot i.
template <class Number, class L, int kDim, int kTiles, int kKeys, int kAhead, class Beside>
LITE_DEVICE void Qk(const char* k_lds, uint32_t k_read, const Queries<L, kDim, kTiles>& q,
                    Half8 (&k)[kAhead], Scores<L, kTiles, kKeys>& scores, Beside beside) {
    constexpr int kSteps = kQkSteps<L, kDim>, kFragments = kKeys / L::kTile * kSteps;
    constexpr int kSide = kAbreast<kTiles>;
    Unroll<kQkSlots<L, kDim, kKeys>>([&](auto slot) {
        constexpr bool high = slot % (2 * kSide) >= kSide;
        constexpr int f = slot / (2 * kSide) * kSide + slot % kSide;
        constexpr Place at = PlaceOf(f, kSteps, kSide);
        Half8& now = k[f % kAhead];
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            auto& sum = scores.tile[at.tile][x];
            const Half8& query = q.fragment[x][at.step];
            if constexpr (at.step == 0 && !high) sum = Accumulator<L>{};
            Number::Multiply(high ? High(now) : Low(now), high ? High(query) : Low(query), sum);
        }
        if constexpr (high && f + kAhead < kFragments)
            now = KFragment<L, kDim, kTiles>(k_lds, k_read, f + kAhead);
        beside(slot);
        SchedulingFence();
    });
}

}  // namespace liteattention::gfx942
