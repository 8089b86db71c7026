// Copies new rows of k and v into the pages of a cache (params.h: WriteKvParams).
//
// Road map: a thread moves 8 elements of k and 8 of v; neighbouring threads move neighbouring
// elements of a row, then the next head. Nothing is shared. Two rows with one slot leave either of
// them. Budget: VGPR 40, LDS 0.

#include "cache.h"
#include "hip_shim.h"
#include "isa.h"
#include "number.h"
#include "params.h"

namespace liteattention::gfx942 {

// What a cache gets of 8 elements: the same bits, of whatever numbers,
struct SameBits {
    using Stored = UnalignedWord4;
    static constexpr int kBytes = 2;  // of an element
    static LITE_DEVICE float Scale(const float*, float) { return 1.0f; }
    static LITE_DEVICE Word4 Store(Word4 row, float) { return row; }
};

// or e4m3fnuz, divided as IEEE 754 says. NaN is looked for in the bits (number.h).
template <class Number>
struct Fp8 {
    using Stored = Word2 __attribute__((aligned(4)));
    static constexpr int kBytes = 1;
    static LITE_DEVICE float Scale(const float* at, float number) { return ScaleOf(at, number); }
    static LITE_DEVICE Word2 Store(Word4 row, float scale) {
        constexpr float kLargest = 240.0f;
        Word2 stored;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t word = row[2 * i + e / 2];
                const float number = Number::ToFloat(e % 2 ? word >> 16 : word & 0xffffu) / scale;
                const float limited = Clamped(number, kLargest);
                const bool is_nan = (Bits(number) & 0x7fffffffu) > 0x7f800000u;
                x[e] = FromBits(is_nan ? 0x7fc00000u : Bits(limited));
            }
            stored[i] = ToFp8(x);
        }
        return stored;
    }
};

template <class Cache>
LITE_DEVICE void WriteKv(const WriteKvParams& p) {
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const uint32_t id = WorkgroupId() * kWriteKvThreads + ThreadId();
    const int64_t dim = id % row_threads * kMergeVector;
    const uint32_t item = id / row_threads;
    const int64_t head = item % static_cast<uint32_t>(p.kv_heads);
    const int64_t row = item / static_cast<uint32_t>(p.kv_heads);
    if (row >= p.rows) return;

    const int64_t slot = p.wide ? static_cast<const int64_t*>(p.slots)[row]
                                : static_cast<const int32_t*>(p.slots)[row];
    if (slot < 0) return;
    const uint32_t page = Divide(static_cast<uint32_t>(slot), {p.page_multiplier, p.page_shift});
    const uint32_t in_page =
        static_cast<uint32_t>(slot) - page * static_cast<uint32_t>(p.page_size);

    const auto from = [&](const uint16_t* base, const RowStrides& s) {
        return *reinterpret_cast<const UnalignedWord4*>(base + row * s.row + head * s.head + dim);
    };
    const auto to = [&](void* base, const PageStrides& s) -> typename Cache::Stored& {
        const int64_t at = page * s.page + in_page * s.row + head * s.head + dim;
        return *reinterpret_cast<typename Cache::Stored*>(static_cast<char*>(base) +
                                                          at * Cache::kBytes);
    };
    const float k_scale = Cache::Scale(p.k_scale_at, p.k_scale);
    const float v_scale = Cache::Scale(p.v_scale_at, p.v_scale);
    const Word4 key = from(p.k, p.k_strides), value = from(p.v, p.v_strides);
    to(p.k_cache, p.k_cache_strides) = Cache::Store(key, k_scale);
    to(p.v_cache, p.v_cache_strides) = Cache::Store(value, v_scale);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_WRITE_KV(name) \
    LITE_KERNEL(kWriteKvThreads, 4) name(const WriteKvParams p) { WriteKv<SameBits>(p); }
#define LITE_WRITE_KV_FP8(name, Number) \
    LITE_KERNEL(kWriteKvThreads, 4) name(const WriteKvParams p) { WriteKv<Fp8<Number>>(p); }
#include "variants.def"
