// Phase load_k: four waves copy one K block from memory to LDS.
#pragma once

#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

// The keys of one (batch, kv head).
struct KSource {
    const char* base;    // key 0
    uint32_t row_bytes;  // from key to key, below 4 GiB (geometry.h: kMaxKRowStride)
    int32_t kv_len;
};

// What a lane keeps for copying: two registers.
template <int kDim>
struct KCopier {
    uint32_t byte;        // within its row, for even copies of D = 128 and for all of D = 64
    uint32_t second_row;  // all ones in lanes that fetch the second row of a copy

    LITE_DEVICE KCopier(uint32_t lane, uint32_t quarter) {
        const int row = static_cast<int>(quarter) * KCopyRows(kDim);
        second_row = KCopyRow(kDim, static_cast<int>(lane)) ? ~0u : 0u;
        byte = static_cast<uint32_t>(
            KCopyByte(kDim, row + KCopyRow(kDim, static_cast<int>(lane)), static_cast<int>(lane)));
    }
};

// Copies keys 64 `block` ... + 63 to `lds`. `quarter` (0..3, scalar) is this wave's share: copies
// quarter, quarter + 4, ... of the block. Rows past the end repeat the last key; its scores are
// masked. Every copy has its own 64-bit base, so no extent overflows 32 bits: 9 scalar instructions
// per copy, 16 copies per wave and K block at D = 128, beside the other group's MFMAs. Those that
// do not depend on the block are made ahead of the main loop, in up to 32 scalar registers, unless
// kFewScalars says that there are none to spare.
template <bool kFewScalars, int kDim>
LITE_DEVICE void LoadK(const KSource& k, const KCopier<kDim>& copier, int32_t block,
                       uint32_t quarter, char* lds) {
    constexpr int kRows = KCopyRows(kDim), kCopies = kKBlock / kRows / 4;
    constexpr uint32_t kRowBytes = kDim * 2;
    const int32_t last = k.kv_len - 1;
    const int32_t own = static_cast<int32_t>(quarter) * kRows;
    const int32_t own_here = kFewScalars ? ScalarHere(own) : own;
    const int32_t own_row = block * kKBlock + own_here;
    char* own_lds = lds + own_here * kDim * 2;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
        constexpr int32_t kNext = 4 * kRows;
        const int32_t in_block = own + kNext * i;
        const int32_t row = kFewScalars ? own_row + kNext * i : block * kKBlock + in_block;
        char* const to = kFewScalars ? own_lds + kNext * i * kDim * 2 : lds + in_block * kDim * 2;
        const int32_t first = row < last ? row : last;
        const char* base =
            k.base + static_cast<uint64_t>(static_cast<uint32_t>(first)) * k.row_bytes;
        if constexpr (kRows == 1) {
            // Row quarter + 4 i: its swizzle key r % 8 changes by 4 between neighbouring copies.
            CopyToLds(base, kRowBytes, copier.byte ^ (i % 2 ? 4u * kChunkBytes : 0u), (LdsVoid*)to);
        } else {
            const uint32_t step = row < last ? k.row_bytes : 0u;
            CopyToLds(base, step + kRowBytes, copier.byte + (copier.second_row & step),
                      (LdsVoid*)to);
        }
    }
}

}  // namespace liteattention::gfx942
