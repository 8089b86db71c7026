// Last phase: normalise and write out, or write a part's state for merge_parts.
#pragma once

#include "mfma_layout.h"
#include "number.h"
#include "softmax.h"

namespace liteattention::gfx942 {

inline constexpr float kLn2 = 0.6931471805599453f;

// Adds up the groups of a column.
template <class L>
LITE_DEVICE float TotalSum(float sum, uint32_t across) {
    if constexpr (L::kGroups == 4) sum += Xor16(sum);
    return sum + FromLane(across, sum);
}

// Run `run` (mfma_layout.h) of a lane's outputs in q tile `x`.
template <class L, int kDim, int kTiles>
LITE_DEVICE Float4 OutputRun(const Outputs<L, kDim, kTiles>& out, int run, int x) {
    const auto& tile = out.tile[run / L::kRuns][x];
    const int i = run % L::kRuns * 4;
    return Float4{tile[i], tile[i + 1], tile[i + 2], tile[i + 3]};
}

// Outputs of one q tile to `row` (this lane's query), 16 bytes a store: two neighbouring runs. Of
// `dims` head dims, a multiple of 8.
template <class Number, class L, int kDim, int kTiles>
LITE_DEVICE void StoreRow(char* row, float scale, int x, uint32_t lane,
                          const Outputs<L, kDim, kTiles>& out, int dims = kDim) {
    constexpr int kPairs = kDim / (8 * L::kGroups);
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
        const Float4 low = OutputRun(out, 2 * u, x) * scale,
                     high = OutputRun(out, 2 * u + 1, x) * scale;
        const Word4 words = {Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
                             Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
        const int dim = L::RunDim(2 * u, static_cast<int>(lane));
        if (8 * L::kGroups * (u + 1) <= dims || dim < dims)
            *reinterpret_cast<UnalignedWord4*>(row + dim * 2) = words;
    }
}

// Writes the rows of `out` that exist and, if `lse` is not null, their log-sum-exp in natural log.
// A row without any finite score gets 0 and -inf. `out_rows` points at the wave's first row,
// `rows` counts those that exist; `lse` likewise.
template <class Number, class L, int kDim, int kTiles>
LITE_DEVICE void StoreResult(char* out_rows, int64_t row_bytes, float* lse, int32_t rows, float c,
                             uint32_t lane, uint32_t across, const Statistics<L, kTiles>& stats,
                             const Outputs<L, kDim, kTiles>& out) {
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const int32_t row = L::kTile * x + L::Col(static_cast<int>(lane));
        const float sum = TotalSum<L>(stats.sum[x], across);
        const float scale = IsZero(sum) ? 0.0f : Rcp(sum);
        if (row >= rows) continue;
        StoreRow<Number>(out_rows + row * row_bytes, scale, x, lane, out);
        if (lse && L::Group(static_cast<int>(lane)) == 0) {
            const float value = (stats.top[x] * c + Log2(sum)) * kLn2;
            lse[row] = FromBits(IsZero(sum) ? kMinusInfinity : Bits(value));
        }
    }
}

// Writes 0 and -inf: the wave's rows of a tile that attends to nothing. Arguments as StoreResult's.
// Lanes whose row does not exist write the last one once more: no branch, no loop.
template <int kDim>
LITE_DEVICE void StoreNothing(char* out_rows, int64_t row_bytes, float* lse, int32_t rows,
                              uint32_t lane) {
    constexpr int kRowLanes = kDim / 8, kRows = kWaveSize / kRowLanes;  // 16 bytes a lane
    if (rows <= 0) return;
    const int32_t last = (rows < kWaveRows ? rows : kWaveRows) - 1;
#pragma unroll
    for (int i = 0; i < kWaveRows / kRows; ++i) {
        const int32_t row = kRows * i + static_cast<int32_t>(lane / kRowLanes);
        char* to = out_rows + (row < last ? row : last) * row_bytes + lane % kRowLanes * 16;
        *reinterpret_cast<UnalignedWord4*>(to) = Word4{};
    }
    const int32_t row = static_cast<int32_t>(lane);
    if (lse) lse[row < last ? row : last] = FromBits(kMinusInfinity);
}

// Writes all rows of a wave's part: outputs not normalised, the raw score that they are relative
// to, sums. `part_out` and `part_stats` point at the wave's first row.
template <class L, int kDim, int kTiles>
LITE_DEVICE void StorePart(float* part_out, float* part_stats, uint32_t lane, uint32_t across,
                           const Statistics<L, kTiles>& stats,
                           const Outputs<L, kDim, kTiles>& out) {
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const int32_t row = L::kTile * x + L::Col(static_cast<int>(lane));
        const float sum = TotalSum<L>(stats.sum[x], across);
        if (L::Group(static_cast<int>(lane)) == 0) {
            part_stats[row] = stats.top[x];
            part_stats[kQBlock + row] = sum;
        }
#pragma unroll
        for (int run = 0; run < kDim / L::kDepth; ++run) {
            const int dim = L::RunDim(run, static_cast<int>(lane));
            *reinterpret_cast<Float4*>(part_out + row * kDim + dim) = OutputRun(out, run, x);
        }
    }
}

}  // namespace liteattention::gfx942
