// What a step learns by weighing: how much of the softmax mass lies in each tile (docs/budget.md).
//
// In a q block of R rows, let t(i) be the sum of exp(score) of row i over a tile's keys, and L(i)
// the same over all keys that the walk has passed once it is through with the tile. The tile's
// weight is the mean over the rows of t(i) / L(i), rounded up: an integer, so that the waves' parts
// of it add up to the same number in any order. select_tiles.hip chooses by it.
//
// Rows are guarded: where a row has more than kRowGuard of L(i) in the tile, its wave makes the
// tile weigh 1. Of a row's two lanes one then has more than half of that: only if there is such a
// lane do lanes meet, in a branch that is taken at the beginning of a walk and seldom after it.
//
// Dividing and adding up the rows can only make a tile heavier: what their roundings lose is added
// beforehand (kRoundUp). So the first tile walked, of which t = L, weighs exactly 1. A row whose L
// is NaN, or 0 (only scores of -inf so far), makes a weight of 1. Rows past the end of the sequence
// repeat the last row (qk.h) and do not count.
//
// Both groups of lanes hold keys of the same row: one exchange across them gives L. The 64 shares
// are added up in the vector ALU, 6 additions. A wave's weights of up to 32 K blocks are the lanes
// of one register, added to the tile's row in memory when the walk leaves their word.
#pragma once

#include "kept_blocks.h"

namespace liteattention::gfx942 {

// What a workgroup has of its tile's list.
LITE_DEVICE ListPart PartHere(const WeighParams& p) {
    if (!p.parts) return {0, 0, -1, 0};
    const auto at = static_cast<int32_t>(WorkgroupId());
    return __builtin_bit_cast(ListPart, ScalarWords(reinterpret_cast<const Word4*>(p.parts), at));
}
LITE_DEVICE Places PlacesOf(const WeighParams& p, int64_t bitmap, const ListPart& part) {
    const SkipRows rows(p, bitmap);
    const uint32_t all = static_cast<uint32_t>(rows.words) * 32u;
    if (part.slot < 0) return {0, all};
    return {PlaceOf(rows, static_cast<uint32_t>(part.first)),
            PlaceOf(rows, static_cast<uint32_t>(part.end))};
}

// Where a wave adds up weights: the tile's row, or, of a part, a row of its own.
LITE_DEVICE uint32_t* WeightsOf(const WeighParams& p, int64_t index, const ListPart& part,
                                const WaveId& me) {
    const int64_t k_blocks = KBlocks(p.kv_len);
    if (part.slot < 0) return p.weights + index * k_blocks;
    const int64_t row = static_cast<int64_t>(part.slot) * kWaves + static_cast<int64_t>(me.wave);
    return p.part_weights + row * k_blocks;
}

// Clears the rows that weights are added to: the workgroup one, or each wave its own. WaitLoads()
// and a barrier must follow.
LITE_DEVICE void ClearWeights(const WeighParams& p, const ListPart& part, const WaveId& me,
                              uint32_t* row) {
    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const bool whole = part.slot < 0;
    const int32_t step = whole ? kDenseThreads : kWaveSize;
#pragma unroll 1
    for (auto j = static_cast<int32_t>(whole ? me.Thread() : me.lane); j < k_blocks; j += step)
        row[j] = 0;
}

class WeighedBlocks : public KeptBlocks<WeighParams, true> {
   public:
    // `index` is the tile's number, `row` where its weights are added up.
    LITE_DEVICE WeighedBlocks(const WeighParams& p, const Tile& tile, int64_t index,
                              const ListPart& part, uint32_t* row, const WaveId& me)
        : KeptBlocks(p, index * SkipWords(p.kv_len),
                     PlacesOf(p, index * SkipWords(p.kv_len), part)),
          row_(row) {
        const int32_t left = p.q_len - tile.q_block * kQBlock;  // rows of the q block that exist
        const float mean =
            kWhole * (1.0f + kRoundUp) * Rcp(static_cast<float>(left < kQBlock ? left : kQBlock));
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            const int32_t row = static_cast<int32_t>(me.wave) * kWaveRows + L::kTile * x +
                                L::Col(static_cast<int>(me.lane));
            counts_[x] = row < left ? mean : 0.0f;
        }
    }

    // In kSteps steps, each of which fits beside one MFMA.
    template <int kStep>
    LITE_DEVICE void Advance() {
        if constexpr (kStep == 0) {
            if (LeavesWord()) {
                Seldom();
                Flush();
            }
        } else {
            Walk<kStep>();
        }
    }

    // Every tile of the list is computed. The compiler must not know: without the branch to Pv it
    // sinks Pv's MFMAs behind what stands beside them, and spills at D = 128.
    LITE_DEVICE uint64_t Look(const float (&)[kQTiles], const WaveStatistics&, float) { return 0; }
    LITE_DEVICE void Decide(const WaveStatistics&, const WaveScores&) {}
    static constexpr bool kLeavesOut = false, kShared = false;
    LITE_DEVICE bool LeftOut() const { return ScalarHere(0) != 0; }

    // `own` are the sums of a lane's probabilities of the tile, `after` the statistics with them.
    LITE_DEVICE void Weigh(const float (&own)[kQTiles], const WaveStatistics& after,
                           uint32_t across) {
        static_assert(L::kGroups == 2, "two lanes have keys of a row");
        float share = 0.0f, part[kQTiles];
        bool near = false;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            part[x] = own[x] * Rcp(TotalSum<L>(after.sum[x], across));
            share += part[x] * counts_[x];
            near |= part[x] > kRowGuard / 2;
        }
        const uint64_t lanes_near = Lanes(near);
        share = OverWave(share, [](float a, float b) { return a + b; });
        Pin(share);
        // As integers NaN is larger than any number.
        constexpr uint32_t kMost = __builtin_bit_cast(uint32_t, kWhole);
        const float weight = FromBits(Bits(share) < kMost ? Bits(share) : kMost);
        const auto rounded = static_cast<int32_t>(__builtin_ceilf(weight));
        int32_t sum = OfLane(rounded, kWaveSize - 1);
        if (lanes_near != 0) {
            Seldom();
            sum += Guarded(part, across, sum);
        }
        weights_ = WithLane(weights_, Now() & 31u, sum);
    }

    // Hands the last weights over: lane i has that of place i of the word. Lanes 32 .. 63 add 0; a
    // block that does not exist lies outside of the row.
    LITE_DEVICE void Flush() {
        const WeighParams& p = ArgumentAgain<WeighParams>();
        const int32_t block = Block((Now() & kPlace & ~31u) + LaneHere());
        const Word4 row =
            DescriptorWords(reinterpret_cast<const char*>(row_), KeptWords::Blocks(p) * 4u);
        AddWord(row, static_cast<uint32_t>(block) * 4u, static_cast<uint32_t>(weights_));
        weights_ = 0;
    }

   private:
    static constexpr float kWhole = static_cast<float>(kMassWhole);
    // Of a share, relative: more than its 5 roundings, 2 reciprocals of 1 ulp and 6 additions lose.
    static constexpr float kRoundUp = 0x1p-19f;

    // What to add to the wave's sum for a row that is to be guarded. `part` are the lanes' shares.
    LITE_DEVICE int32_t Guarded(const float (&part)[kQTiles], uint32_t across, int32_t sum) const {
        bool over = false;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x)
            over |= counts_[x] > 0.0f && TotalSum<L>(part[x], across) > kRowGuard;
        if (!Any(over)) return 0;
        constexpr auto kAll = static_cast<int32_t>(kMassWhole);
        return sum < kAll ? kAll : kAll - 1;
    }

    uint32_t* row_;
    float counts_[kQTiles];  // what a share of 1 of the row counts for: 0 if it does not exist
    int32_t weights_ = 0;    // of the word of the current block, by lane
};

}  // namespace liteattention::gfx942
