// Which tiles a budget of softmax mass drops: the rule of liteattention_rocm/lite/budget.py, bit
// for bit. Masses become integers, so that their sums do not depend on an order.
#pragma once

#include <cmath>

#include "skip_words.h"

namespace liteattention::cpu {
namespace {  // a copy for each processor that a file is compiled for

inline constexpr uint32_t kMassUnit = 1u << 24;  // a mass of 1 as a weight

// A mass as a weight: rounded up, so that what is dropped is never more than it counts for. NaN and
// more than 1 weigh 1.
inline uint32_t Weight(float mass) {
    const float scaled = mass * static_cast<float>(kMassUnit);  // exact
    return scaled < static_cast<float>(kMassUnit) ? static_cast<uint32_t>(std::ceil(scaled))
                                                  : kMassUnit;
}

// Writes the next bitmap row of a q block of query head `head`. `mass` has a number per K block, of
// which those not in the read bitmap's row are not looked at; `weights` is work space of as many.
inline void SelectTiles(const LiteParams& lite, int64_t head, const uint32_t* read,
                        const float* mass, int64_t k_blocks, uint32_t* weights, uint32_t* write) {
    constexpr uint32_t kFirm = ~0u;  // not to be dropped, whatever the cut
    uint32_t largest = 0;
    for (int64_t w = 0; w * 32 < k_blocks; ++w) {
        const uint32_t walked = KeptWord(lite, read, w, k_blocks);
        const uint32_t loose = lite.must_do ? walked & ~lite.must_do[w] : walked;
        for (int64_t j = w * 32; j < k_blocks && j < w * 32 + 32; ++j) {
            const uint32_t weight = walked >> (j % 32) & 1 ? Weight(mass[j]) : 0;
            if (weight > largest) largest = weight;
            weights[j] = loose >> (j % 32) & 1 ? weight : kFirm;
        }
    }
    const int64_t limit =
        lite.limits ? lite.limits[head] : static_cast<int64_t>(std::floor(lite.budget * kMassUnit));
    if (limit <= 0) largest = 0;  // no tile is lighter: all stay, also those that weigh 0
    // The largest cut for which the weights up to it stay within the limit, bit by bit from above.
    uint32_t cut = 0;
    for (uint32_t bit = kMassUnit >> 1; bit; bit >>= 1) {
        int64_t sum = 0;
        for (int64_t j = 0; j < k_blocks; ++j) sum += weights[j] <= (cut | bit) ? weights[j] : 0;
        if (sum <= limit) cut |= bit;
    }
    for (int64_t w = 0; w * 32 < k_blocks; ++w) {
        uint32_t dropped = 0;
        for (int64_t j = w * 32; j < k_blocks && j < w * 32 + 32; ++j)
            dropped |= static_cast<uint32_t>(weights[j] <= cut && weights[j] < largest) << (j % 32);
        write[w] = KeptWord(lite, read, w, k_blocks) & ~dropped;
    }
}

}  // namespace
}  // namespace liteattention::cpu
