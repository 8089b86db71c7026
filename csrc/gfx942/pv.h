// Phase pv: O^T += V^T P^T of one K block, on the matrix core.
#pragma once

#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

// Probabilities of one K block as B operands: 24 VGPRs with 3 q tiles.
template <int kTiles = kQTiles, int kKeys = kKBlock>
struct ProbabilitiesOf {
    Half4 tile[kKeys / kTile][kTiles];
};
using Probabilities = ProbabilitiesOf<>;

// Output accumulators of a wave: kTiles q tiles x D/16 tiles; 3 q tiles at D = 128: 96 VGPRs.
template <int kDim, int kTiles = kQTiles>
struct Outputs {
    Float4 tile[kDim / kTile][kTiles];
};

// V_t of one K block streams through a ring of kVAhead fragments. One fragment is one 16-byte load
// and feeds 6 MFMAs (96 clocks of the matrix core); the eight waves read the same 128 D bytes
// within one K block, so all but the first find them in L1. StartPv fills the ring a stretch early,
// beside the softmax, where the first loads may take as long as memory takes.
inline constexpr int kVAhead = 4;

using VRing = Half8[kVAhead];

template <int kDim>
LITE_DEVICE Half8 VFragment(const char* v_t, uint32_t lane, int index) {
    return LoadBlock(v_t, kKBlock * kDim * 2, lane * 16u, index * kWaveSize * 16u);
}

template <int kDim>
LITE_DEVICE void StartPv(const char* v_t, uint32_t lane, VRing& v) {
#pragma unroll
    for (int f = 0; f < kVAhead; ++f) v[f] = VFragment<kDim>(v_t, lane, f);
    SchedulingFence();
}

// Brings V_t of one K block into L1: four waves read a dword of every 64 bytes (every 32 at D =
// 64), one load each. The result is for Discard. `active` is scalar; otherwise nothing is fetched.
template <int kDim>
LITE_DEVICE uint32_t TouchV(const char* v_t, uint32_t lane, uint32_t quarter, bool active) {
    constexpr uint32_t kBytes = kKBlock * kDim * 2;
    const uint32_t lane_offset = (quarter * kWaveSize + lane) * (kBytes / (4 * kWaveSize));
    return LoadWord(v_t, active ? kBytes : 0, lane_offset);
}

// The product over a ring `v` that holds the first kAhead fragments; `fragment(f)` asks for the
// f-th. Fragment f is output tile f / pairs, key tiles 2 (f % pairs) and the next. Calls `near_end`
// when two fragments are left: what comes next issues its first loads there.
template <class Number, int kDim, int kTiles, int kKeys, int kAhead, class Fragment, class NearEnd>
LITE_DEVICE void PvFrom(Fragment fragment, const ProbabilitiesOf<kTiles, kKeys>& probs,
                        Half8 (&v)[kAhead], Outputs<kDim, kTiles>& out, NearEnd near_end) {
    constexpr int kPairs = kKeys / kTile / 2, kFragments = kDim / kTile * kPairs;
    static_assert(kFragments >= kAhead);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
        const int t = f / kPairs, pair = f % kPairs;
        Half8& now = v[f % kAhead];
        if (f == kFragments - 2) near_end();
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(Low(now), probs.tile[2 * pair][x], out.tile[t][x]);
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
            Number::Multiply(High(now), probs.tile[2 * pair + 1][x], out.tile[t][x]);
        if (f + kAhead < kFragments) now = fragment(f + kAhead);
        SchedulingFence();
    }
}

// Likewise, V_t from memory.
template <class Number, int kDim, class NearEnd>
LITE_DEVICE void Pv(const char* v_t, uint32_t lane, const Probabilities& probs, VRing& v,
                    Outputs<kDim>& out, NearEnd near_end) {
    static_assert(VtFragment(1, 1) == kKeyTiles / 2 + 1);
    PvFrom<Number>([&](int f) { return VFragment<kDim>(v_t, lane, f); }, probs, v, out, near_end);
}

// Multiplies the outputs of q tile `x` by its column's factor.
template <int kDim, int kTiles>
LITE_DEVICE void Shrink(float factor, int x, Outputs<kDim, kTiles>& out) {
    const Float2 two = Twice(factor);
    const Float4 four = {two[0], two[1], two[0], two[1]};
#pragma unroll
    for (int t = 0; t < kDim / kTile; ++t) out.tile[t][x] *= four;
}

}  // namespace liteattention::gfx942
