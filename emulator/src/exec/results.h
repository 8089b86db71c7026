// Results of vector instructions: clamped, scaled and flushed, merged under EXEC into registers,
// and lane masks.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "exec/sources.h"

namespace emulator::VARIANT {
namespace {

// to[l] = from[l] in the lanes of the mask.
inline void merge(uint32_t* to, const uint32_t* from, uint64_t mask) {
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
        uint32_t* const t = to + 32 * h;
        const uint32_t* const f = from + 32 * h;
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l) t[l] = (bits >> l & 1) ? f[l] : t[l];
    }
}

enum class Result : uint8_t { bits, f32, f16, b16, b16_keep, f16_keep };

// Clamp to [0, 1]; NaN becomes 0 when MODE.DX10_CLAMP is set.
inline float clamp01(float x, bool dx10) {
    const float r = x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
    return x != x && !dx10 ? x : r;
}

inline float output_scale(uint8_t omod) {
    return omod == 1 ? 2.0f : omod == 2 ? 4.0f : omod == 3 ? 0.5f : 1.0f;
}

// Result of 32 (or, in the low half, 16) bits per lane from `r` to the destination. Halves come as
// halves, already scaled and clamped.
[[gnu::noinline]] inline void store_modified(Wave& w, const Inst& i, Lanes& r, Result kind) {
    uint32_t* const to = w.v[i.dst[0].index];
    if (kind == Result::f32) {
        if (i.omod) {
            const float scale = output_scale(i.omod);
            LANE_LOOP r.v[l] = as_bits(as_float(r.v[l]) * scale);
        }
        if (i.clamp) {
            const bool dx10 = w.mode & kDx10Clamp;
            LANE_LOOP r.v[l] = as_bits(clamp01(as_float(r.v[l]), dx10));
        }
        if (!(w.mode & kDenormOut32)) {
            LANE_LOOP r.v[l] = flush32(r.v[l]);
        }
    }
    if (i.sdwa && i.dst_sel != 6) {
        const uint32_t width = i.dst_sel < 4 ? 8 : 16;
        const uint32_t shift = i.dst_sel < 4 ? 8u * i.dst_sel : 16u * (i.dst_sel - 4u);
        const uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
        for (int l = 0; l < kLanes; ++l) {
            const uint32_t bits = r.v[l] << shift & field;
            if (i.dst_unused == 2) {
                r.v[l] = (to[l] & ~field) | bits;
            } else if (i.dst_unused == 1) {  // sign above, zeros below
                const uint32_t up = bits << (32 - width - shift);
                r.v[l] = static_cast<uint32_t>(static_cast<int32_t>(up) >> (32 - width - shift)) &
                         ~((1u << shift) - 1);
            } else {
                r.v[l] = bits;
            }
        }
    } else if (kind == Result::b16_keep || kind == Result::f16_keep || i.op_sel_dst) {
        if (i.op_sel_dst) {
            LANE_LOOP r.v[l] = r.v[l] << 16 | (to[l] & 0xffff);
        } else {
            LANE_LOOP r.v[l] = (r.v[l] & 0xffff) | (to[l] & 0xffff0000);
        }
    }
    merge(to, r.v, write_mask(w, i));
}

// Floats to halves, scaled, clamped and rounded by MODE.
[[gnu::noinline]] inline void to_halves(const Wave& w, const Inst& i, Lanes& r) {
    if (i.omod) {
        const float scale = output_scale(i.omod);
        LANE_LOOP r.v[l] = as_bits(as_float(r.v[l]) * scale);
    }
    if (i.clamp) {
        const bool dx10 = w.mode & kDx10Clamp;
        LANE_LOOP r.v[l] = as_bits(clamp01(as_float(r.v[l]), dx10));
    }
    const uint32_t rounding = (w.mode & kRound64) >> 2;
    if (rounding == 0) {
        LANE_LOOP r.v[l] = float_to_half(as_float(r.v[l]));
    } else {
        for (int l = 0; l < kLanes; ++l) r.v[l] = float_to_half(as_float(r.v[l]), rounding);
    }
    if (!(w.mode & kDenormOut64)) {
        LANE_LOOP r.v[l] = r.v[l] & 0x7c00 ? r.v[l] : r.v[l] & 0x8000;
    }
}

[[gnu::noinline]] inline void store_wide(Wave& w, const Inst& i, const Lanes64& r) {
    const int index = i.dst[0].index;
    Lanes low, high;
    LANE_LOOP low.v[l] = static_cast<uint32_t>(r.v[l]);
    LANE_LOOP high.v[l] = static_cast<uint32_t>(r.v[l] >> 32);
    const uint64_t mask = write_mask(w, i);
    merge(w.v[index], low.v, mask);
    merge(w.v[index + 1], high.v, mask);
}

[[gnu::noinline]] inline void store_double(Wave& w, const Inst& i, Lanes64& r) {
    if (i.omod | i.clamp) {
        const double scale = output_scale(i.omod);
        const bool dx10 = w.mode & kDx10Clamp, clamp = i.clamp;
        for (int l = 0; l < kLanes; ++l) {
            double x = as_double(r.v[l]) * scale;
            if (clamp && (x == x || dx10)) x = x > 0 ? (x < 1 ? x : 1) : 0;
            r.v[l] = as_bits(x);
        }
    }
    if (!(w.mode & kDenormOut64))
        LANE_LOOP r.v[l] = r.v[l] & 0x7ff0000000000000ull ? r.v[l] : r.v[l] & 1ull << 63;
    store_wide(w, i, r);
}

// ---- lane masks

// Bit l = bit 31 of v[l].
inline uint64_t pack_mask(const Lanes& t) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    for (int c = 0; c < 4; ++c) {
        const __m512i x = _mm512_load_si512(t.v + 16 * c);
        mask |= static_cast<uint64_t>(_mm512_cmplt_epi32_mask(x, _mm512_setzero_si512())) << 16 * c;
    }
#elif defined(__AVX2__)
    for (int c = 0; c < 8; ++c) {
        const __m256 x = _mm256_load_ps(reinterpret_cast<const float*>(t.v + 8 * c));
        mask |= static_cast<uint64_t>(_mm256_movemask_ps(x)) << 8 * c;
    }
#else
    for (int l = 0; l < kLanes; ++l) mask |= static_cast<uint64_t>(t.v[l] >> 31) << l;
#endif
    return mask;
}

// v[l] = all ones where bit l is set.
inline void expand_mask(uint64_t mask, uint32_t* v) {
    const uint32_t half[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
    for (int h = 0; h < 2; ++h) {
        const uint32_t bits = half[h];
#pragma GCC ivdep
        for (int l = 0; l < 32; ++l) v[32 * h + l] = 0u - (bits >> l & 1);
    }
}

}  // namespace
}  // namespace emulator::VARIANT
