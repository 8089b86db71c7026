// Merges the parts of the lists that pack_lists has cut: their outputs (merge_tile.h), and what
// their tiles weigh (docs/budget.md).
//
// A part's weights are shares t(i) / L(i) of what the part has seen of row i. Of all that the row
// has seen by the end, that is the share times f(i) = (sum of the part) / (sum of all parts), at
// most 1. A weight is one number for the 32 rows of a wave, so it is multiplied by the largest f of
// these rows: a tile then weighs its mass at least, as in a list that is whole, and less than it
// did in the part.
//
// A wave that guards a row leaves more than kMassWhole (geometry.h). The row's share of all that it
// has seen is at most its share in the part times f(i). So the tile weighs 1 if the largest f of
// the wave exceeds kRowGuard; else no row's share does.
//
// Road map: each compute unit in which a list begins that goes on elsewhere has a run of
// workgroups; those of other units end at once. All but the last workgroup of a run merge outputs,
// a thread 8 neighbouring ones of a row. In the last one a thread finds f of a row for each part,
// 32 rows meet in the largest, and then a thread adds up the weights of a K block, of all parts and
// waves. Blocks that a part does not have weigh 0 there. Budget: VGPR 36, LDS 4096.

#include "merge_tile.h"

namespace liteattention::gfx942 {

// Lists are cut within the units of an XCD.
inline constexpr int32_t kMostParts = kWaveSize;

// What becomes of the weights of a part's waves, each at least `least`.
struct Factors {
    float of[kMostParts][kWaves];  // 1 at most, but for what rounding adds; kMassWhole if it is NaN
    uint32_t least[kMostParts][kWaves];  // 0; kMassWhole if it is NaN

    // The part's weight of a tile in wave `w`, rounded up. What weighs nothing in the part does not
    // in the list either.
    LITE_DEVICE uint32_t Scaled(uint32_t weight, int32_t g, int32_t w) const {
        const float most = static_cast<float>(kMassWhole);
        const uint32_t plain = weight > kMassWhole ? weight - kMassWhole : weight;
        const float factor = of[g][w];
        const float scaled = __builtin_fminf(static_cast<float>(plain) * factor, most);
        const uint32_t sum =
            __builtin_elementwise_min(static_cast<uint32_t>(__builtin_ceilf(scaled)),
                                      __builtin_elementwise_max(plain, least[g][w]));
        return plain != weight && factor > kRowGuard ? kMassWhole : sum;
    }
};

template <class SlotOf>
LITE_DEVICE void FindFactors(const MergeListsParams& p, int32_t parts, SlotOf slot,
                             Factors& factors) {
    // More than two exponents off by 2^-18, two sums and a reciprocal lose.
    constexpr float kRoundUp = 1.0f + 0x1p-16f;
    const float* const stats = p.part_stats + ThreadId();
    const PartScale scale(stats, parts, slot, Factor(p.scale_log2));
    const auto sum = [&](int32_t g) {
        const int64_t at = slot(g) * 2 * kQBlock;
        return scale.Weight(stats[at]) * stats[at + kQBlock];
    };
    float all = 0.0f;
#pragma unroll 1
    for (int32_t g = 0; g < parts; ++g) all += sum(g);
    const float per_sum = Rcp(all) * kRoundUp;
#pragma unroll 1
    for (int32_t g = 0; g < parts; ++g) {
        // As integers NaN is larger than any number; that of 0 / 0 may have a sign.
        const uint32_t factor = HalfWaveMaximum(Bits(sum(g) * per_sum) & 0x7fffffffu);
        if (ThreadId() % kWaveRows != kWaveRows - 1) continue;
        const bool is_nan = factor > __builtin_bit_cast(uint32_t, 2.0f);
        const uint32_t wave = ThreadId() / kWaveRows;
        factors.of[g][wave] = is_nan ? static_cast<float>(kMassWhole) : FromBits(factor);
        factors.least[g][wave] = is_nan ? kMassWhole : 0;
    }
}

template <class Number>
LITE_DEVICE void MergeLists(const MergeListsParams& p) {
    const uint32_t groups = static_cast<uint32_t>(MergeListsGroups(p.head_dim));
    const uint32_t unit = WorkgroupId() / groups, group = WorkgroupId() % groups;
    const CutList cut = p.cuts[unit];
    if (cut.parts == 0) return;
    const auto tile = static_cast<uint32_t>(cut.tile);
    const auto slot = [&](int32_t g) { return int64_t{ListSlot(static_cast<int32_t>(unit), g)}; };

    if (group + 1 == groups) {
        __shared__ Factors factors;
        FindFactors(p, cut.parts, slot, factors);
        Barrier();
        const int64_t k_blocks = KBlocks(p.kv_len);
        uint32_t* const weights = p.weights + tile * k_blocks;
#pragma unroll 1
        for (int64_t j = ThreadId(); j < k_blocks; j += kMergeThreads) {
            uint32_t sum = 0;
#pragma unroll 1
            for (int32_t g = 0; g < cut.parts; ++g)
#pragma unroll 4
                for (int32_t w = 0; w < kWaves; ++w)
                    sum +=
                        factors.Scaled(p.part_weights[(slot(g) * kWaves + w) * k_blocks + j], g, w);
            weights[j] = sum;
        }
        return;
    }
    MergeTile<Number>(p, tile, group, cut.parts, slot);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_LISTS(name, Number) \
    LITE_KERNEL(kMergeThreads, 4) name(const MergeListsParams p) { MergeLists<Number>(p); }
#include "variants.def"
