// Phase softmax: online softmax of one K block on the vector ALU, statistics in fp32 and log2
// units.
#pragma once

#include "mfma_layout.h"
#include "number.h"
#include "pv.h"
#include "qk.h"

namespace liteattention::gfx942 {

inline constexpr uint32_t kMinusInfinity = 0xff800000u;

// Scores within this many powers of two of zero are shifted and scaled by one instruction; beyond,
// the rounding of the shift would show (Shift).
inline constexpr float kNarrowLog2 = 4096.0f;

// The shift lags behind the maximum by this many powers of two at most, so that outputs are rarely
// rescaled: a probability is at most 256, its relative precision the same.
inline constexpr float kSlackLog2 = 8.0f;

// Per q tile; the query is the lane's column, so the groups hold equal maxima.
template <class L, int kTiles>
struct Statistics {
    float max[kTiles];  // running maximum of the raw scores; -inf before the first key
    float
        top[kTiles];  // the maximum that probabilities are relative to, 256 times smaller or equal
    float base[kTiles];  // it times c, rounded, where that is exact enough; else 0 (Shift)
    float sum[kTiles];   // of this lane's own keys: the groups are added up at the end
    uint32_t wide;       // not 0 if any lane needs the exact shift. Scalar.

    LITE_DEVICE Statistics() : wide(0) {
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            max[x] = top[x] = FromBits(kMinusInfinity);
            base[x] = 0.0f;
            sum[x] = 0.0f;
        }
    }
};

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
template <class L, int kTiles, int kKeys>
LITE_DEVICE void MaskKeys(int32_t valid, Scores<L, kTiles, kKeys>& scores) {
    // The lane is not known before here: the comparisons would be made once, ahead of the main
    // loop, and their results would take scalar registers.
    const int32_t lane_valid = valid - L::ScoreKey(0, static_cast<int>(LaneHere()), 0);
#pragma unroll
    for (int t = 0; t < kKeys / L::kTile; ++t)
#pragma unroll
        for (int i = 0; i < L::kRegisters; ++i) {
            const bool seen = L::ScoreKey(t, 0, i) < lane_valid;
#pragma unroll
            for (int x = 0; x < kTiles; ++x) {
                float score = FromBits(seen ? Bits(scores.tile[t][x][i]) : kMinusInfinity);
                Pin(score);  // one comparison's result at a time: two scalar registers
                scores.tile[t][x][i] = score;
            }
        }
}

// Maximum of a q tile's keys that this lane has; with 16 rows, that it and the quad beside it have.
template <class L, int kTiles, int kKeys>
LITE_DEVICE float LaneMaximum(const Scores<L, kTiles, kKeys>& scores, int x) {
    float top = FromBits(kMinusInfinity);
#pragma unroll
    for (int t = 0; t < kKeys / L::kTile; ++t)
#pragma unroll
        for (int i = 0; i < L::kRegisters; ++i) top = __builtin_fmaxf(top, scores.tile[t][x][i]);
    if constexpr (L::kGroups == 4) top = __builtin_fmaxf(top, Xor16(top));
    return top;
}

// Probabilities are 2^(c (score - top)). One fused multiply-add computes c score - base, base = c
// top rounded: every probability of the row, and so its sum, is off by the same factor 2^(base - c
// top), which cancels. Below 4096 that factor is within 2^-13 of 1. Beyond it, or where c top
// overflows, the subtraction comes first and is exact; such lanes have base 0.
LITE_DEVICE bool IsNarrow(float top, float c) { return __builtin_fabsf(top * c) < kNarrowLog2; }
LITE_DEVICE bool IsWide(float top, float c) {
    return !IsNarrow(top, c) && Bits(top) != kMinusInfinity;
}

// Whether a maximum is so far above what probabilities are relative to that they must be anew. A
// row decides for itself, so its result does not depend on its neighbours.
LITE_DEVICE bool Rose(float max, float top, float c) { return (max - top) * c > kSlackLog2; }

// Takes new maxima as what probabilities are relative to and shrinks outputs and sums.
template <class L, int kDim, int kTiles>
LITE_DEVICE void Shift(float c, Statistics<L, kTiles>& stats, Outputs<L, kDim, kTiles>& out) {
    bool wide = false;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const float before = stats.top[x];
        const float now = Rose(stats.max[x], before, c) ? stats.max[x] : before;
        const float base = IsNarrow(now, c) ? now * c : 0.0f;
        const bool narrow = IsNarrow(before, c) && IsNarrow(now, c);
        float shrink = Exp2(narrow ? stats.base[x] - base : (before - now) * c);
        shrink = Bits(before) == Bits(now) ? 1.0f : shrink;  // also of infinities
        stats.top[x] = now;
        stats.base[x] = base;
        stats.sum[x] *= shrink;
        Shrink(shrink, x, out);
        wide |= IsWide(now, c);
    }
    stats.wide = AnyBits(Lanes(wide));
}

// Whether two scores are shifted, scaled and added up by one packed instruction. It saves 4 clocks
// of the vector port, and takes 5 from an MFMA of the other wave. So it pays where softmax is
// longer than the products: at D = 64, 80 and 96, unless rounding takes but one instruction, or
// three where workgroups share a compute unit (kShared), and in prefill at D = 192 and 256, beside
// MFMAs of 16 clocks, if rounding takes five. Trials, modelled clk per 32x32x8: RTNE, two dense
// workgroups at D = 64 43.7 -> 41.3, prefill at D = 256 49.9 -> 48.5; RTNA, two dense 39.5 -> 41.3.
template <class L, int kDim, int kRoundingSteps, bool kShared>
constexpr bool PacksFp32() {
    if (kDim < 128) return kRoundingSteps > (kShared ? 3 : 1);
    return L::kGroups == 4 && kRoundingSteps == 5;
}

// 2^(c x - base) of a lane's kCount scores, rounded to 16 bits, and their sum, in an order that
// leaves the matrix core to the other wave of the SIMD. That wave's MFMA needs the vector port for
// 4 of 32 clocks; v_exp_f32 holds it for 16, anything else here for 4. An exponential that starts
// less than 16 clocks before the next MFMA is due delays it. So instructions come in windows of 28
// clocks: one exponential and three others, or seven others. Whatever clock the first MFMA takes,
// from the second on each falls between two windows or between two short instructions.
//
// The other instructions of a pair of scores are, in this order: two multiply-adds for scores
// kLead pairs ahead, two additions to the sum, Number::kSteps to round. If kPacked, one instruction
// for both scores does each of the first two, with the same results. Unless kFilled, windows are
// not filled up with pauses: where softmax is longer than the products, the matrix core has time to
// spare.
template <class Number, int kCount, bool kPacked, bool kFilled>
struct Exponentials {
    static constexpr int kLead = 3, kAtOnce = 2;
    static constexpr int kPrepare = kPacked ? 1 : 2, kAdd = kPacked ? 1 : 2;
    static constexpr int kOthers = kPrepare + kAdd + Number::kSteps;
    static constexpr int kBeside = 3, kWindow = 7;

    float c, base;
    Float2 sum = {};
    float x[kCount];
    Pair pair[kCount / 2];

    LITE_DEVICE Exponentials(float factor, float shift) : c(factor), base(shift) {}

    LITE_DEVICE float Run() {
        // Two exponentials precede the first others: what the lead needs stands beside them.
        Unroll<kAtOnce / 2 * kPrepare>([&](auto i) { Prepare<i>(); });
        Window<0, 0>();
        return sum[0] + sum[1];
    }

   private:
    // Shifts and scales score i, or pair i of them.
    template <int i>
    LITE_DEVICE void Prepare() {
        if constexpr (kPacked) {
            Float2 both = {x[2 * i], x[2 * i + 1]};
            both = __builtin_elementwise_fma(both, Float2{c, c}, Float2{-base, -base});
            Pin(both);
            x[2 * i] = both[0];
            x[2 * i + 1] = both[1];
        } else {
            x[i] = __builtin_fmaf(x[i], c, -base);
            Pin(x[i]);
        }
    }

    // The k-th of the other instructions.
    template <int k>
    LITE_DEVICE void Other() {
        constexpr int q = k / kOthers, step = k % kOthers;
        constexpr int round = step - kPrepare - kAdd;
        if constexpr (step < kPrepare) {
            if constexpr (q + kLead < kCount / 2) Prepare<kPrepare*(q + kLead) + step>();
        } else if constexpr (round >= 0) {
            if constexpr (round == 0)
                pair[q].half[0] = Bits(x[2 * q]), pair[q].half[1] = Bits(x[2 * q + 1]);
            Number::template Step<round>(pair[q]);
        } else if constexpr (kPacked) {
            sum += Float2{x[2 * q], x[2 * q + 1]};
            Pin(sum);
        } else {
            constexpr int half = step - kPrepare;
            float one = sum[half];
            one += x[2 * q + half];
            Pin(one);
            sum[half] = one;
        }
    }
    template <int kFrom, int kHowMany>
    LITE_DEVICE void Others() {
        Unroll<kHowMany>([&](auto i) { Other<kFrom + i>(); });
        SchedulingFence();
    }

    // Exponential e and all that follow, once the first kDone others are done.
    template <int e, int kDone>
    LITE_DEVICE void Window() {
        constexpr int kReady = e / 2 * kOthers - kDone;  // others whose exponentials are done
        if constexpr (e == kCount) {
            Others<kDone, kReady>();
        } else if constexpr (kReady >= kBeside + kWindow) {
            Others<kDone, kWindow>();
            Window<e, kDone + kWindow>();
        } else {
            constexpr int kNow = kReady < kBeside ? kReady : kBeside;
            x[e] = Exp2(x[e]);
            Pin(x[e]);
            if constexpr (e < 2) {
                Unroll<kBeside>([&](auto i) {
                    constexpr int ahead = kAtOnce / 2 * kPrepare + kBeside * e + i;
                    if constexpr (ahead < kLead * kPrepare)
                        Prepare<ahead>();
                    else if constexpr (kFilled)
                        Pause();
                });
                SchedulingFence();
            } else {
                Others<kDone, kNow>();
                if constexpr (kNow < kBeside && kFilled)
                    Unroll<kBeside - kNow>([](auto) { Pause(); });
            }
            Window<e + 1, kDone + kNow>();
        }
    }
};

// Turns scores into probabilities P^T, rounded to 16 bits, and adds them to the sums. `c` > 0;
// `across` is 4 (lane ^ 32). Calls `meanwhile(0)` before the maxima and `meanwhile(1)` while they
// pass between lanes. All that seldom happens is behind one branch. If blocks.LeftOut() is true
// afterwards, the wave leaves the K block out: no maximum has risen, nothing changes.
//
// Keys `valid` .. 63 do not exist. Where that may be so, `look_anyway` is not 0, or the K block is
// the first one that its rows meet: there maxima rise from -inf, unless every score is -inf, or
// NaN, and so hidden or NaN as it is. Either way the branch is taken. Until then the scores of
// these keys are those of the last key (load_k.h), which no maximum and no vote sees.
template <class Number, class L, int kDim, int kTiles, int kKeys, class Blocks, class Meanwhile>
LITE_DEVICE void Softmax(Scores<L, kTiles, kKeys>& scores, int32_t valid, uint32_t look_anyway,
                         float c, uint32_t across, Blocks& blocks, Statistics<L, kTiles>& stats,
                         Outputs<L, kDim, kTiles>& out, Probabilities<L, kTiles, kKeys>& probs,
                         Meanwhile meanwhile) {
    meanwhile(Constant<0>{});
    SchedulingFence();
    float top[kTiles], other[kTiles];
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        top[x] = LaneMaximum(scores, x);
        other[x] = FromLane(across, top[x]);
    }
    SchedulingFence();
    meanwhile(Constant<1>{});
    SchedulingFence();
#pragma unroll
    for (int x = 0; x < kTiles; ++x) top[x] = __builtin_fmaxf(top[x], other[x]);
    uint64_t seldom = blocks.Look(top, stats, c);
    bool rose = false;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        stats.max[x] = __builtin_fmaxf(stats.max[x], top[x]);
        rose |= Rose(stats.max[x], stats.top[x], c);
    }
    seldom |= Lanes(rose) | stats.wide | look_anyway;
    if (seldom != 0) {
        Seldom();
        if (valid < kKeys) MaskKeys(valid, scores);
        blocks.Decide(stats, scores);
        bool again = false;
#pragma unroll
        for (int x = 0; x < kTiles; ++x) {
            Pin(stats.max[x]);  // found out anew, so as not to hold a mask of lanes till here
            again |= Rose(stats.max[x], stats.top[x], c);
        }
        if (Any(again)) Shift(c, stats, out);
        SchedulingFence();
        if (stats.wide != 0) {
#pragma unroll
            for (int x = 0; x < kTiles; ++x) {
                const float exact = IsWide(stats.top[x], c) ? stats.top[x] : 0.0f;
#pragma unroll
                for (int t = 0; t < kKeys / L::kTile; ++t)
#pragma unroll
                    for (int i = 0; i < L::kRegisters; ++i) scores.tile[t][x][i] -= exact;
            }
        }
    }
    if constexpr (Blocks::kLeavesOut)
        if (blocks.LeftOut()) return;
    float own[kTiles];
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        constexpr int kRuns = kKeys / L::kTile * L::kRuns;
        constexpr bool kPacked = PacksFp32<L, kDim, Number::kSteps, Blocks::kShared>();
        Exponentials<Number, kRuns * 4, kPacked, !kPacked && kDim >= 128> exponentials(
            c, stats.base[x]);
#pragma unroll
        for (int e = 0; e < kRuns * 4; ++e)
            exponentials.x[e] = scores.tile[e / L::kRegisters][x][e % L::kRegisters];
        own[x] = exponentials.Run();
        stats.sum[x] += own[x];
        Pin(stats.sum[x]);
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
            const Word2 words = {exponentials.pair[2 * r].word, exponentials.pair[2 * r + 1].word};
            probs.operand[r][x] = __builtin_bit_cast(Half4, words);
            Pin(probs.operand[r][x]);
        }
    }
    if constexpr (requires { blocks.Weigh(own, stats, across); }) blocks.Weigh(own, stats, across);
}

}  // namespace liteattention::gfx942
