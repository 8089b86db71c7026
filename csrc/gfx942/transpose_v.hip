// V -> V_t: transposes and packs the values of one K block of one (batch, kv head), so that the PV
// product loads both operands of two MFMAs with one 16-byte load per lane (mfma_layout.h). Keys
// past the end become zeros: 0 * V stays 0 in the last K block.
//
// Road map: 256 threads read 64 keys x D, 16 bytes each and whole rows at a time, into LDS; after a
// barrier every thread gathers two neighbouring head dims of 8 keys (8 dword reads) and writes the
// two lanes' 16 bytes they make, 32 bytes in one piece.
//
// LDS: 64 rows of D * 2 + 16 bytes. The 16 bytes shift every fourth row by half the banks, which
// leaves a two-way conflict in the gather. Budget: VGPR 24, LDS 17408 (9216 at D = 64).

#include "isa.h"
#include "mfma_layout.h"
#include "params.h"

namespace liteattention::gfx942 {

template <int kDim>
LITE_DEVICE void TransposeV(const TransposeVParams& p) {
    using L = Layout32;
    constexpr int kRowBytes = kDim * 2 + 16, kRowChunks = kDim / 8;
    __shared__ __attribute__((aligned(16))) char tile[kKBlock * kRowBytes];

    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const uint32_t id = WorkgroupId(), thread = ThreadId();
    const uint32_t head_index = id / static_cast<uint32_t>(k_blocks);
    const int64_t block = id % static_cast<uint32_t>(k_blocks);
    const int64_t head = head_index % static_cast<uint32_t>(p.kv_heads);
    const int64_t batch = head_index / static_cast<uint32_t>(p.kv_heads);
    const char* from =
        reinterpret_cast<const char*>(p.v + batch * p.v_strides.batch + head * p.v_strides.head);

#pragma unroll
    for (int i = 0; i < kKBlock * kRowChunks / kTransposeThreads; ++i) {
        const uint32_t chunk = i * kTransposeThreads + thread;
        const uint32_t key = chunk / kRowChunks, byte = chunk % kRowChunks * 16u;
        const int64_t row = block * kKBlock + key;
        Word4 words = {};
        if (row < p.kv_len)
            words =
                *reinterpret_cast<const UnalignedWord4*>(from + row * p.v_strides.seq * 2 + byte);
        *reinterpret_cast<Word4*>(tile + key * kRowBytes + byte) = words;
    }
    Barrier();

    constexpr int kItems = kDim / L::kTile * kVtPairs<L> * kWaveSize / 2;
    char* to = reinterpret_cast<char*>(p.v_t) +
               (static_cast<int64_t>(head_index) * k_blocks + block) * (kKBlock * kDim * 2);
#pragma unroll
    for (int i = 0; i < kItems / kTransposeThreads; ++i) {
        const int item = i * kTransposeThreads + static_cast<int>(thread);
        const int fragment = item / (kWaveSize / 2), lane = item % (kWaveSize / 2) * 2;
        const int out_tile = fragment / kVtPairs<L>, pair = fragment % kVtPairs<L>;
        const char* column = tile + VtDim<L>(out_tile, lane) * 2;
        uint32_t both[8];  // two head dims of 8 keys
#pragma unroll
        for (int e = 0; e < 8; ++e)
            both[e] =
                *reinterpret_cast<const uint32_t*>(column + VtKey<L>(pair, lane, e) * kRowBytes);
        Word4 even, odd;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            even[e] = LowerHalves(both[2 * e], both[2 * e + 1]);
            odd[e] = UpperHalves(both[2 * e], both[2 * e + 1]);
        }
        Word4* at = reinterpret_cast<Word4*>(to + VtElement<L>(out_tile, pair, lane, 0) * 2);
        at[0] = even;
        at[1] = odd;
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_TRANSPOSE_V(name, kDim) \
    LITE_KERNEL(kTransposeThreads, 2) name(const TransposeVParams p) { TransposeV<kDim>(p); }
#include "variants.def"
