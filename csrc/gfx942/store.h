// Last phase: normalise and write out, or write a part's state for merge_parts.
#pragma once

#include "mfma_layout.h"
#include "number.h"
#include "softmax.h"

namespace liteattention::gfx942 {

inline constexpr float kLn2 = 0.6931471805599453f;

// Adds up the four quads of a column.
LITE_DEVICE float TotalSum(float sum, uint32_t across) {
    sum += Xor16(sum);
    return sum + FromLane(across, sum);
}

// Outputs of one q tile to `row` (this lane's query), 16 bytes a store: tiles 2u and 2u + 1 hold 8
// neighbouring head dims.
template <class Number, int kDim, int kTiles>
LITE_DEVICE void StoreRow(char* row, float scale, int x, uint32_t lane,
                          const Outputs<kDim, kTiles>& out) {
#pragma unroll
    for (int u = 0; u < kDim / 32; ++u) {
        const Float4 low = out.tile[2 * u][x] * scale, high = out.tile[2 * u + 1][x] * scale;
        const Word4 words = {Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
                             Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
        const int dim = OutDim(2 * u, 4 * Quad(static_cast<int>(lane)));
        *reinterpret_cast<UnalignedWord4*>(row + dim * 2) = words;
    }
}

// Writes the rows of `out` that exist and, if `lse` is not null, their log-sum-exp in natural log.
// A row without any finite score gets 0 and -inf. `out_rows` points at the wave's first row,
// `rows` counts those that exist; `lse` likewise.
template <class Number, int kDim>
LITE_DEVICE void StoreResult(char* out_rows, int64_t row_bytes, float* lse, int32_t rows, float c,
                             uint32_t lane, uint32_t across, const Statistics& stats,
                             const Outputs<kDim>& out) {
#pragma unroll
    for (int x = 0; x < kQTiles; ++x) {
        const int32_t row = kTile * x + Col(static_cast<int>(lane));
        const float sum = TotalSum(stats.sum[x], across);
        const float scale = IsZero(sum) ? 0.0f : Rcp(sum);
        if (row >= rows) continue;
        StoreRow<Number, kDim>(out_rows + row * row_bytes, scale, x, lane, out);
        if (lse && Quad(static_cast<int>(lane)) == 0) {
            const float value = (stats.max[x] * c + Log2(sum)) * kLn2;
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

// Writes all 48 rows of a part: outputs not normalised, maxima in log2 units, sums. `part_out` and
// `part_stats` point at the wave's first row.
template <int kDim>
LITE_DEVICE void StorePart(float* part_out, float* part_stats, float c, uint32_t lane,
                           uint32_t across, const Statistics& stats, const Outputs<kDim>& out) {
#pragma unroll
    for (int x = 0; x < kQTiles; ++x) {
        const int32_t row = kTile * x + Col(static_cast<int>(lane));
        const float sum = TotalSum(stats.sum[x], across);
        if (Quad(static_cast<int>(lane)) == 0) {
            part_stats[row] = stats.max[x] * c;
            part_stats[kQBlock + row] = sum;
        }
#pragma unroll
        for (int t = 0; t < kDim / kTile; ++t) {
            const int dim = OutDim(t, 4 * Quad(static_cast<int>(lane)));
            *reinterpret_cast<Float4*>(part_out + row * kDim + dim) = out.tile[t][x];
        }
    }
}

}  // namespace liteattention::gfx942
