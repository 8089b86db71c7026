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

LITE_DEVICE void StartPv(const char* v_lds, VRing& v) {
#pragma unroll
    for (int f = 0; f < kVAhead; ++f) v[f] = VFragment(v_lds, f);
    SchedulingFence();
}

// The product over a ring `v` that holds the first kAhead fragments; `fragment(f)` asks for the
// f-th. Fragment f is output tile f / pairs, operands 2 (f % pairs) and the next. Calls `beside(f)`
// among the MFMAs of each, and `near_end` when two fragments are left: what comes next issues its
// first loads there.
template <class Number, class L, int kDim, int kTiles, int kKeys, int kAhead, class Fragment,
          class Beside, class NearEnd>
LITE_DEVICE void PvFrom(Fragment fragment, const Probabilities<L, kTiles, kKeys>& probs,
                        Half8 (&v)[kAhead], Outputs<L, kDim, kTiles>& out, Beside beside,
                        NearEnd near_end) {
    constexpr int kPairs = kKeys / (2 * L::kDepth), kFragments = kDim / L::kTile * kPairs;
    static_assert(kFragments >= kAhead);
    Unroll<kFragments>([&](auto f) {
        constexpr int t = f / kPairs, pair = f % kPairs;
        Half8& now = v[f % kAhead];
        if (f == kFragments - 2) near_end();
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(Low(now), probs.operand[2 * pair][x], out.tile[t][x]);
        SchedulingFence();
        beside(f);
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(High(now), probs.operand[2 * pair + 1][x], out.tile[t][x]);
        if (f + kAhead < kFragments) now = fragment(f + kAhead);
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
