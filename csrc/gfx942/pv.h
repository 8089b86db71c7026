// Phase pv: O^T += V^T P^T of one K block, on the matrix core.
#pragma once

#include "isa.h"
#include "mfma_layout.h"
#include "qk.h"

namespace liteattention::gfx942 {

// Probabilities of one K block as B operands: 16 VGPRs with 32 rows.
template <class L, int kTiles, int kKeys>
struct Probabilities {
    Half4 operand[kKeys / L::kDepth][kTiles];
};

// Output accumulators of a wave: kTiles q tiles x D/T tiles; 32 rows at D = 128: 64 VGPRs.
template <class L, int kDim, int kTiles>
struct Outputs {
    Accumulator<L> tile[kDim / L::kTile][kTiles];
};

// V_t of one K block streams from LDS through a ring of kVAhead fragments. One fragment is one
// 16-byte read and feeds 2 MFMAs (64 clocks of the matrix core). `v_lds` is this lane's slot of the
// first fragment.
inline constexpr int kVAhead = 4;

using VRing = Half8[kVAhead];

LITE_DEVICE Half8 VFragment(const char* v_lds, int index) {
    return *reinterpret_cast<const Half8*>(v_lds + index * kWaveSize * kChunkBytes);
}

// The fragment of V_t that the f-th place of the product takes.
template <class L, int kTiles, int kKeys>
constexpr int VPlace(int f) {
    constexpr int kPairs = kKeys / (2 * L::kDepth);
    const Place at = PlaceOf(f, kPairs, kAbreast<kTiles>);
    return at.tile * kPairs + at.step;
}

// As kQkSlots.
template <class L, int kDim, int kKeys>
inline constexpr int kPvSlots = 2 * kDim / L::kTile * kKeys / (2 * L::kDepth);

template <class L, int kTiles, int kKeys, int kFrom, int kTo, int kAhead, class Fragment>
LITE_DEVICE void StartPv(Fragment fragment, Half8 (&v)[kAhead]) {
#pragma unroll
    for (int f = kFrom; f < kTo; ++f) v[f] = fragment(VPlace<L, kTiles, kKeys>(f));
    SchedulingFence();
}

// The product over a ring `v` that holds the fragments of the first kAhead places; `fragment(i)`
// asks for the i-th of V_t. Calls beside(i) in slot i, as Qk does, and next(i) where the ring has
// no more use for its i-th fragment: what comes next issues its first loads there.
template <class Number, class L, int kDim, int kTiles, int kKeys, int kAhead, class Fragment,
          class Beside, class Next>
LITE_DEVICE void PvFrom(Fragment fragment, const Probabilities<L, kTiles, kKeys>& probs,
                        Half8 (&v)[kAhead], Outputs<L, kDim, kTiles>& out, Beside beside,
                        Next next) {
    constexpr int kPairs = kKeys / (2 * L::kDepth), kFragments = kDim / L::kTile * kPairs;
    constexpr int kSide = kAbreast<kTiles>;
    static_assert(kFragments >= kAhead);
    Unroll<kPvSlots<L, kDim, kKeys>>([&](auto slot) {
        constexpr bool high = slot % (2 * kSide) >= kSide;
        constexpr int f = slot / (2 * kSide) * kSide + slot % kSide;
        constexpr Place at = PlaceOf(f, kPairs, kSide);
        Half8& now = v[f % kAhead];
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(high ? High(now) : Low(now), probs.operand[2 * at.step + high][x],
                             out.tile[at.tile][x]);
        if constexpr (high && f + kAhead < kFragments)
            now = fragment(VPlace<L, kTiles, kKeys>(f + kAhead));
        else if constexpr (high)
            next(Constant<f + kAhead - kFragments>{});
        beside(slot);
        SchedulingFence();
    });
}

// Multiplies the outputs of q tile `x` by its column's factor.
template <class L, int kDim, int kTiles>
LITE_DEVICE void Shrink(float factor, int x, Outputs<L, kDim, kTiles>& out) {
#pragma unroll
    for (int t = 0; t < kDim / L::kTile; ++t) out.tile[t][x] *= factor;
}

}  // namespace liteattention::gfx942
