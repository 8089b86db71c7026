// Phase load_k: four waves copy one K block from memory to LDS.
#pragma once

#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

// The keys of one (batch, kv head).
struct KSource {
    const char* base;    // key 0
    uint32_t row_bytes;  // from key to key (geometry.h: kMaxKRowStride)
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

// x, not known before here if kFewScalars: the compiler would make what each copy adds to it ahead
// of the main loop, in up to 16 scalar registers.
template <bool kFewScalars>
LITE_DEVICE uint32_t Here(uint32_t x) {
    return kFewScalars ? static_cast<uint32_t>(ScalarHere(static_cast<int32_t>(x))) : x;
}

// Copies keys 64 `block` ... + 63 to `lds`, one copy at a time. `quarter` (0..3, scalar) is this
// wave's share: copies quarter, quarter + 4, ... of the block. Rows past the end repeat the last
// key; its scores are masked. A block has one 64-bit base; within it offsets stay below 2^32
// (geometry.h: kMaxKRowStride). 4 scalar instructions per copy, 16 copies per wave and K block at D
// = 128. Unless `wanted` (scalar), memory is not read and what LDS gets is meaningless.
template <int kDim, bool kFewScalars>
class KCopies {
   public:
    static constexpr int kRows = KCopyRows(kDim), kCount = kKBlock / kRows / 4;

    // In kSteps steps, each of which fits beside one MFMA.
    static constexpr int kSteps = 3;
    template <int kStep>
    LITE_DEVICE void Begin(const KSource& k, int32_t block, bool wanted, uint32_t quarter,
                           char* lds) {
        if constexpr (kStep == 0) {
            block_ = block;
            bytes_ = wanted ? kAnyBytes : 0u;
        } else if constexpr (kStep == 1) {
            const uint64_t first = static_cast<uint32_t>(block_ * kKBlock);
            from_ = DescriptorWords(k.base + first * k.row_bytes, bytes_);
        } else {
            row_bytes_ = k.row_bytes;
            // Of this block: rows of later ones may lie further away than 32 bits reach.
            const int32_t left = k.kv_len - 1 - block_ * kKBlock;
            last_ = static_cast<uint32_t>(left < kKBlock ? left : kKBlock - 1) * k.row_bytes;
            row_ = Here<kFewScalars>(quarter * kRows * k.row_bytes);
            to_ = LdsAddress(lds) + quarter * kRows * kDim * 2;
        }
    }

    // The i-th copy; they must come in order.
    template <int i>
    LITE_DEVICE void Copy(const KCopier<kDim>& copier) {
        const uint32_t first = row_ < last_ ? row_ : last_;
        constexpr uint32_t kTo = i * 4 * kRows * kDim * 2;
        if constexpr (kRows == 1) {
            // Row quarter + 4 i: its swizzle key r % 8 changes by 4 between neighbouring copies.
            CopyToLds<kTo>(from_, copier.byte ^ (i % 2 ? 4u * kChunkBytes : 0u), first, to_);
        } else {
            const uint32_t step = row_ < last_ ? row_bytes_ : 0u;
            CopyToLds<kTo>(from_, copier.byte + (copier.second_row & step), first, to_);
        }
        row_ += 4 * kRows * row_bytes_;
    }

   private:
    // More than any offset (geometry.h: kMaxKRowStride). All ones would be made by the vector ALU,
    // and CopyToLds must not have that.
    static constexpr uint32_t kAnyBytes = 0xfffffff0u;

    int32_t block_;
    uint32_t bytes_;
    Word4 from_;
    uint32_t row_bytes_, last_, row_;
    uint32_t to_;
};

template <int kDim, bool kFewScalars>
LITE_DEVICE void LoadK(const KSource& k, const KCopier<kDim>& copier, int32_t block,
                       uint32_t quarter, char* lds) {
    KCopies<kDim, kFewScalars> copies;
    Unroll<copies.kSteps>([&](auto i) { copies.template Begin<i>(k, block, true, quarter, lds); });
    Unroll<KCopies<kDim, kFewScalars>::kCount>([&](auto i) { copies.template Copy<i>(copier); });
}

// Copies a K block of V_t, which lies in one piece, to `lds`: four waves as above, 256 bytes a
// copy, a fragment (1 KiB) by the four. 4 scalar instructions per copy, 16 copies per wave and K
// block at D = 128.
template <int kDim, bool kFewScalars>
class VCopies {
    static constexpr uint32_t kCopyBytes = kCopyToLdsBytes, kBytes = kKBlock * kDim * 2;

   public:
    static constexpr int kCount = kBytes / kCopyBytes / 4;

    // In kSteps steps, as KCopies.
    static constexpr int kSteps = 2;
    template <int kStep>
    LITE_DEVICE void Begin(const char* v_t, int32_t block, uint32_t quarter, char* lds) {
        if constexpr (kStep == 0) {
            from_ = DescriptorWords(v_t + static_cast<int64_t>(block) * kBytes, kBytes);
        } else {
            at_ = Here<kFewScalars>(quarter * kCopyBytes);
            to_ = LdsAddress(lds) + at_;
        }
    }

    // Fragment `i`.
    template <int i>
    LITE_DEVICE void Copy(uint32_t lane) {
        constexpr uint32_t kTo = i * 4 * kCopyBytes;
        CopyToLds<kTo>(from_, lane * 4u, at_ + kTo, to_);
    }

   private:
    Word4 from_;
    uint32_t at_, to_;
};

}  // namespace liteattention::gfx942
