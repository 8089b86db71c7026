// Copies new rows of k and v into the pages of a cache (params.h: WriteKvParams).
//
// Road map: a thread moves 16 bytes of k and 16 of v; neighbouring threads move neighbouring bytes
// of a row, then the next head. Nothing is shared. Two rows with one slot leave either of them.
// Budget: VGPR 32, LDS 0.

#include "hip_shim.h"
#include "params.h"

namespace liteattention::gfx942 {

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
    const auto to = [&](uint16_t* base, const PageStrides& s) -> UnalignedWord4& {
        return *reinterpret_cast<UnalignedWord4*>(base + page * s.page + in_page * s.row +
                                                  head * s.head + dim);
    };
    const Word4 key = from(p.k, p.k_strides), value = from(p.v, p.v_strides);
    to(p.k_cache, p.k_cache_strides) = key;
    to(p.v_cache, p.v_cache_strides) = value;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_WRITE_KV(name) \
    LITE_KERNEL(kWriteKvThreads, 4) name(const WriteKvParams p) { WriteKv(p); }
#include "variants.def"
