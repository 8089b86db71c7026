// Which tiles the next step computes, by their weights: the rule of
// backend/liteattention_rocm/lite/budget.py, bit for bit.
//
// Road map: a wave chooses for one q block, 64 K blocks at a time. It turns sums of attention_weigh
// into weights, finds the largest, then bit by bit from above the largest cut for which the weights
// up to it stay within the limit, 24 passes over the row; a ballot is two words of the bitmap.
// Integers throughout, so no order matters. 75,600 tokens are 1,182 weights a row: 4.7 KB, which
// L1 holds. Limits by head: one scalar load, at the place that two scalar multiplications find.
// Budget: VGPR 16, LDS 0.

#include "kept_blocks.h"

namespace liteattention::gfx942 {

// Of 64 K blocks those with a bit set in `word(place)`, in a lane each.
template <class Word>
LITE_DEVICE uint64_t TwoWords(int32_t first, int32_t words, Word word) {
    const uint64_t low = word(first);
    return first + 1 < words ? low | static_cast<uint64_t>(word(first + 1)) << 32 : low;
}

LITE_DEVICE bool HasLane(uint64_t lanes, uint32_t lane) { return lanes >> lane & 1; }

// That of this tile's query head. All scalar.
LITE_DEVICE uint32_t LimitOf(const SelectParams& p) {
    if (!p.limits) return p.limit;
    const uint32_t row = Divide(WorkgroupId(), {p.block_multiplier, p.block_shift});
    const uint32_t batch = Divide(row, {p.head_multiplier, p.head_shift});
    const uint32_t head = row - batch * static_cast<uint32_t>(p.q_heads);
    return ScalarWord(reinterpret_cast<const uint32_t*>(p.limits), static_cast<int32_t>(head));
}

LITE_DEVICE void SelectTiles(const SelectParams& p) {
    constexpr uint32_t kFirm = ~0u;  // not to be dropped, whatever the cut
    const int64_t tile = WorkgroupId();
    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const KeptWords rows(p, tile * SkipWords(p.kv_len));
    uint32_t* const write = p.write + tile * rows.words;
    uint32_t* const weights = p.weights + tile * k_blocks;
    float* const mass = p.mass ? p.mass + tile * k_blocks : nullptr;
    const uint32_t lane = ThreadId();
    const auto kept = [&](int32_t place) { return rows.Kept(place); };

    uint32_t largest = 0;
#pragma unroll 1
    for (int32_t w = 0; w < rows.words; w += 2) {
        const uint64_t walked = TwoWords(w, rows.words, kept);
        const uint64_t must = TwoWords(w, rows.words, [&](int32_t i) { return rows.MustDo(i); });
        const int32_t j = w * 32 + static_cast<int32_t>(lane);
        if (j >= k_blocks) continue;
        // Sums are below 2^32 (kRowGuard), which rounding up must not pass.
        const uint32_t sum = weights[j];
        const uint32_t up = sum / kMassParts + (sum % kMassParts != 0);
        const uint32_t weight = up < kMassUnit ? up : kMassUnit;
        weights[j] = HasLane(walked & ~must, lane) ? weight : kFirm;
        if (mass) mass[j] = static_cast<float>(weight) * (1.0f / kMassUnit);
        largest = weight > largest ? weight : largest;
    }
    largest = LastLane(OverWave(largest, [](uint32_t a, uint32_t b) { return a > b ? a : b; }));

    const uint32_t limit = LimitOf(p);
    if (static_cast<int32_t>(limit) <= 0) largest = 0;  // no tile is lighter: all stay

    uint32_t cut = 0;
#pragma unroll 1
    for (uint32_t bit = kMassUnit >> 1; bit; bit >>= 1) {
        uint32_t sum = 0;
        for (int32_t j = static_cast<int32_t>(lane); j < k_blocks; j += kWaveSize) {
            sum += weights[j] <= (cut | bit) ? weights[j] : 0;
            sum = sum < kMassUnit ? sum : kMassUnit;  // more than any limit
        }
        sum = LastLane(OverWave(sum, [](uint32_t a, uint32_t b) { return a + b; }));
        if (sum <= limit) cut |= bit;
    }

#pragma unroll 1
    for (int32_t w = 0; w < rows.words; w += 2) {
        const int32_t j = w * 32 + static_cast<int32_t>(lane);
        const uint32_t weight = j < k_blocks ? weights[j] : kFirm;
        const uint64_t dropped = Lanes(weight <= cut && weight < largest);
        const uint64_t next = TwoWords(w, rows.words, kept) & ~dropped;
        if (w + static_cast<int32_t>(lane) < rows.words && lane < 2)
            write[w + static_cast<int32_t>(lane)] = static_cast<uint32_t>(next >> 32 * lane);
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_SELECT_TILES(name) \
    LITE_KERNEL(kSelectThreads, 8) name(const SelectParams p) { SelectTiles(p); }
#include "variants.def"
