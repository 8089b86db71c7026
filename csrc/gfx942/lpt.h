// What plan_lpt.hip and pack_lists.hip share: which tiles an XCD has, their order by LPT, and where
// they stand in the order of all XCDs.
#pragma once

#include "isa.h"
#include "params.h"

namespace liteattention::gfx942 {

// Of a tile, so small that eight times that of all tiles fits into 32 bits.
LITE_DEVICE uint32_t Work(const PlanParams& p, int32_t tile) {
    return (static_cast<uint32_t>(p.counts[tile] + kTileBlocks - 1) >> p.shift) + 1;
}

// Positions of an XCD that its own run leaves free.
LITE_DEVICE int32_t Free(const int32_t* begins, int32_t slots, int32_t xcd) {
    const int32_t left = slots - (begins[xcd + 1] - begins[xcd]);
    return left > 0 ? left : 0;
}

// The position of the tile of this rank in the run of `xcd`. What a run has beyond the XCD's
// positions, its shortest tiles, goes behind the runs of the others, one tile each in turn.
LITE_DEVICE int32_t PositionOf(const int32_t* begins, int32_t slots, int32_t xcd, int32_t rank) {
    if (rank < slots) return rank * kXcds + xcd;
    int32_t place = rank - slots;  // among all tiles that are beyond
#pragma unroll 1
    for (int32_t x = 0; x < xcd; ++x) {
        const int32_t beyond = begins[x + 1] - begins[x] - slots;
        place += beyond > 0 ? beyond : 0;
    }
    // How many tiles each XCD has got before: the most with which so many are placed at most.
    int32_t turns = 0, placed = 0;
#pragma unroll 1
    for (int32_t bit = 1 << 23; bit > 0; bit >>= 1) {
        int32_t sum = 0;
#pragma unroll 1
        for (int32_t x = 0; x < kXcds; ++x) {
            const int32_t free = Free(begins, slots, x);
            sum += free < turns + bit ? free : turns + bit;
        }
        if (sum <= place) {
            turns += bit;
            placed = sum;
        }
    }
    int32_t position = 0;
#pragma unroll 1
    for (int32_t x = 0; x < kXcds; ++x) {
        if (turns >= Free(begins, slots, x)) continue;
        if (placed == place) position = (begins[x + 1] - begins[x] + turns) * kXcds + x;
        ++placed;
    }
    return position;
}

// Fills `begins`: where the XCDs' runs begin, the first tile with x / 8 of the work before it. Each
// wave of the workgroup adds up its share of the tiles, and then goes through it 64 at a time. All
// threads have passed a barrier when it returns.
template <int kThreads>
LITE_DEVICE void FindRuns(const PlanParams& p, int32_t* begins) {
    constexpr int32_t kWavesHere = kThreads / kWaveSize;
    __shared__ uint32_t sums[kWavesHere];
    const int32_t lane = static_cast<int32_t>(ThreadId()) % kWaveSize;
    const int32_t wave = static_cast<int32_t>(Uniform(ThreadId() / kWaveSize));
    const int32_t rows = (p.tiles + kThreads - 1) / kThreads;
    const int32_t first = wave * rows * kWaveSize, all = first + rows * kWaveSize;
    const int32_t behind = all < p.tiles ? all : p.tiles;

    uint32_t sum = 0;
#pragma unroll 8
    for (int32_t i = first + lane; i < behind; i += kWaveSize) sum += Work(p, i);
    sum = LastLane(SumUpTo(sum));
    if (lane == 0) sums[wave] = sum;
    if (ThreadId() == 0) {
        begins[0] = 0;
        begins[kXcds] = p.tiles;
    }
    Barrier();
    uint32_t before = 0, total = 0;
    for (int32_t w = 0; w < kWavesHere; ++w) {
        const uint32_t of_wave = Uniform(sums[w]);
        before += w < wave ? of_wave : 0;
        total += of_wave;
    }
    uint32_t next = 1;
#pragma unroll 1
    while (next < kXcds && next * total <= before * kXcds) ++next;
    for (int32_t row = first; row < behind; row += kWaveSize) {
        const int32_t tile = row + lane;
        const uint32_t work = tile < behind ? Work(p, tile) : 0;
        const uint32_t end = before + SumUpTo(work), row_end = LastLane(end);
#pragma unroll 1
        for (; next < kXcds && next * total <= row_end * kXcds; ++next)
            if ((end - work) * kXcds < next * total && next * total <= end * kXcds)
                begins[next] = tile + 1;
        before = row_end;
    }
    Barrier();
}

// A run in the order of LPT: head after head, the longest tiles of each first, ties by ascending
// tile; from tile `last` on, the first of a head, all heads as one.
struct Run {
    int32_t begin, end;
    int32_t last;
    bool fits;  // as many positions as tiles: else all heads are one

    LITE_DEVICE Run(const PlanParams& p, const int32_t* begins, int32_t xcd)
        : begin(begins[xcd]), end(begins[xcd + 1]), fits(end - begin <= p.slots) {
        last = fits && end > p.together ? FirstOfHead(p, end - p.together) : 0;
    }

    static LITE_DEVICE int32_t FirstOfHead(const PlanParams& p, int32_t tile) {
        const Divider q_blocks = {p.block_multiplier, p.block_shift};
        return static_cast<int32_t>(Divide(static_cast<uint32_t>(tile), q_blocks)) * p.q_blocks;
    }

    // How many tiles of the run come before `own`, which a wave asks for 64 neighbouring tiles: its
    // tiles are compared with those from the first one's group to the last one's.
    LITE_DEVICE int32_t Rank(const PlanParams& p, int32_t own) const {
        const int32_t head = FirstOfHead(p, own);
        const bool together = own >= last;
        const int32_t group = together ? last : head;
        const int32_t low = group > begin ? group : begin,
                      high = together ? end : head + p.q_blocks;
        const int32_t mine = p.counts[own], behind_all = OfLane(high, kWaveSize - 1);
        const uint32_t size = static_cast<uint32_t>(high - low);
        int32_t rank = low - begin;
#pragma unroll 1
        for (int32_t eight = OfLane(low, 0) / 8; eight * 8 < behind_all; ++eight) {
            const Word8 theirs = ScalarWords(reinterpret_cast<const Word8*>(p.counts), eight);
#pragma unroll
            for (int32_t n = 0; n < 8; ++n) {
                const int32_t other = eight * 8 + n;
                // No && here: it would be a branch.
                const bool ahead = static_cast<int32_t>(theirs[n]) + (other < own ? 1 : 0) > mine;
                const bool within = static_cast<uint32_t>(other - low) < size;
                rank += static_cast<int32_t>(ahead & within);
            }
        }
        return rank;
    }
};

}  // namespace liteattention::gfx942
