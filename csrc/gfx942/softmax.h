// Phase softmax: online softmax of one K block on the vector ALU, statistics in fp32 and log2
// units.
#pragma once

#include "mfma_layout.h"
#include "number.h"
#include "pv.h"
#include "qk.h"

namespace liteattention::gfx942 {

inline constexpr uint32_t kMinusInfinity = 0xff800000u;

// Per q tile; the query is the lane's column, so the four quads hold equal maxima.
template <int kTiles = kQTiles>
struct StatisticsOf {
    float max[kTiles];  // running maximum of the raw scores; -inf before the first key
    float sum[kTiles];  // of this lane's own keys: the quads are added up at the end

    LITE_DEVICE StatisticsOf() {
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            max[x] = FromBits(kMinusInfinity);
            sum[x] = 0.0f;
        }
    }
};
using Statistics = StatisticsOf<>;

// A raw score x, soft-capped, in log2 units (params.h), relative error below 1e-6 at every cap. For
// w = cap_factor x up to log2(e), tanh at 1/2, 1 - 2 / (1 + 2^w) would cancel: there the score is
// the uncapped one times tanh(t) / t, minimax in w^2, relative error 1.5e-8. 12 vector and 2
// transcendental instructions.
LITE_DEVICE float CapScore(float x, float scale_log2, float cap_log2, float cap_factor) {
    const float w = cap_factor * x, square = w * w;
    float ratio = 3.5887112e-6f;
    ratio = ratio * square - 9.1922371e-5f;
    ratio = ratio * square + 1.9225504e-3f;
    ratio = ratio * square - 4.0037524e-2f;
    ratio = ratio * square + 1.0f;
    const float near = scale_log2 * x * ratio;
    const float far = cap_log2 - 2.0f * cap_log2 * Rcp(1.0f + Exp2(w));
    return square <= 2.0813690f ? near : far;
}

// Hides keys `valid`.. 63 of the block.
LITE_DEVICE void MaskKeys(int32_t valid, Scores& scores) {
    // The lane is not known before here: the 16 comparisons would be made once, ahead of the main
    // loop, and their results would take 32 scalar registers.
    const int32_t lane_valid = valid - ScoreKey(0, static_cast<int>(LaneHere()), 0);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool seen = ScoreKey(t, 0, i) < lane_valid;
#pragma unroll
            for (int x = 0; x < kQTiles; ++x)
                scores.tile[t][x][i] = FromBits(seen ? Bits(scores.tile[t][x][i]) : kMinusInfinity);
        }
}

// Maximum of a q tile's keys, the same in all four quads of a column.
template <int kTiles, int kKeys>
LITE_DEVICE float TileMaximum(const ScoresOf<kTiles, kKeys>& scores, int x, uint32_t across) {
    float top = FromBits(kMinusInfinity);
#pragma unroll
    for (int t = 0; t < kKeys / kTile; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) top = __builtin_fmaxf(top, scores.tile[t][x][i]);
    top = __builtin_fmaxf(top, Xor16(top));
    return __builtin_fmaxf(top, FromLane(across, top));
}

// Turns scores into probabilities P^T = exp2(c (S^T - max)), rounded to 16 bits, and shrinks the
// output and the sum by 2^(c (old max - new max)) where a maximum rose. The subtraction comes first
// so that the largest probability is exactly 1. `c` > 0; `across` is 4 (lane ^ 32). If
// `blocks.Vote` says false, the wave leaves the K block out: nothing changes, and the result is
// false.
template <class Number, int kDim, int kTiles, int kKeys, class Blocks>
LITE_DEVICE bool Softmax(const ScoresOf<kTiles, kKeys>& scores, float c, uint32_t across,
                         Blocks& blocks, StatisticsOf<kTiles>& stats, Outputs<kDim, kTiles>& out,
                         ProbabilitiesOf<kTiles, kKeys>& probs) {
    float top[kTiles];
#pragma unroll
    for (int x = 0; x < kTiles; ++x) top[x] = TileMaximum(scores, x, across);
    if (!blocks.Vote(top, stats, scores, c)) return false;
    bool rose = false;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        top[x] = __builtin_fmaxf(stats.max[x], top[x]);
        rose |= top[x] > stats.max[x];
    }
    if (Any(rose)) {
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            const float shrink = top[x] > stats.max[x] ? Exp2((stats.max[x] - top[x]) * c) : 1.0f;
            stats.max[x] = top[x];
            stats.sum[x] *= shrink;
            Shrink(shrink, x, out);
        }
    }
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        // No key with a finite score yet: -inf - 0 rather than -inf + inf.
        const uint32_t bits = Bits(stats.max[x]);
        const Float2 shift = Twice(FromBits(bits == kMinusInfinity ? 0u : bits));
        Float2 sum = {};
#pragma unroll
        for (int t = 0; t < kKeys / kTile; ++t) {
            Word2 packed;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Float2 score = {scores.tile[t][x][2 * i], scores.tile[t][x][2 * i + 1]};
                const Float2 power = (score - shift) * c;
                const Float2 p = {Exp2(power[0]), Exp2(power[1])};
                sum += p;
                packed[i] = Number::Probabilities(p[0], p[1]);
            }
            probs.tile[t][x] = __builtin_bit_cast(Half4, packed);
            Pin(probs.tile[t][x]);
        }
        stats.sum[x] += sum[0] + sum[1];
    }
    return true;
}

}  // namespace liteattention::gfx942
