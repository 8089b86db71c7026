// How a cache holds keys and values, and how words of its rows become words of 16-bit numbers,
// which is what the matrix core multiplies: as the queries' own numbers, or as e4m3fnuz, the fp8 of
// gfx942. Every e4m3fnuz number is one of bf16 and of fp16, so nothing is rounded; NaN (0x80) stays
// NaN. The scales of an fp8 cache are factors of scores and outputs; they are numbers in the
// arguments, or lie in memory, where every launch reads them once (params.h).
#pragma once

#include "isa.h"
#include "number.h"
#include "params.h"

namespace liteattention::gfx942 {

template <class Number>
struct SameCache {
    static constexpr int kBytes = 2;  // of an element

    // Elements 2 i and 2 i + 1 of a row.
    template <class Words>
    static LITE_DEVICE uint32_t Two(const Words& row, int i) {
        return row[i];
    }
    // Element i of two rows, `low`'s below `high`'s.
    template <class Words>
    static LITE_DEVICE uint32_t Turned(const Words& low, const Words& high, int i) {
        return i % 2 ? UpperHalves(low[i / 2], high[i / 2]) : LowerHalves(low[i / 2], high[i / 2]);
    }
};

// Half a vector instruction per element more: v_cvt_pk_f32_fp8, which all uses of a pair share.
template <class Number>
struct Fp8Cache {
    static constexpr int kBytes = 1;

    template <class Words>
    static LITE_DEVICE uint32_t Two(const Words& row, int i) {
        const Float2 both = FromFp8(row[i / 2], i % 2);
        return Number::Exact(both[0], both[1]);
    }
    template <class Words>
    static LITE_DEVICE uint32_t Turned(const Words& low, const Words& high, int i) {
        const Float2 a = FromFp8(low[i / 4], i / 2 % 2), b = FromFp8(high[i / 4], i / 2 % 2);
        return Number::Exact(a[i % 2], b[i % 2]);
    }
};

// A scale that lies at `at`, else `number`. Scalar.
LITE_DEVICE float ScaleOf(const float* at, float number) {
    return at ? FromBits(Uniform(Bits(*at))) : number;
}

// What makes scores of products. Scalar.
struct ScoreFactors {
    float scale_log2, cap_factor;  // params.h
};
template <class Cache>
LITE_DEVICE ScoreFactors ScoreFactorsOf(const RaggedParams& p) {
    if constexpr (Cache::kBytes == 1) {
        if (p.k_scale_at) {
            const double scale = p.scale_wide * static_cast<double>(ScaleOf(p.k_scale_at, 1.0f));
            const auto scalar = [](double x) {
                return FromBits(Uniform(Bits(static_cast<float>(x))));
            };
            return {scalar(scale), scalar(scale * p.cap_ratio)};
        }
    }
    return {p.scale_log2, p.cap_factor};
}

}  // namespace liteattention::gfx942
