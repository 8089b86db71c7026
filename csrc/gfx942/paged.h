// Keys and values of one (request, kv head), wherever they lie: in pages that a table names, or
// packed. A group of four waves copies one K block through registers to LDS: addresses are looked
// up a block before the loads, which are in flight for a whole block.
#pragma once

#include "cache.h"
#include "isa.h"
#include "mfma_layout.h"

namespace liteattention::gfx942 {

// Where keys lie. All scalar. Only keys `lowest` .. `last` are read, and only their table entries:
// what lies beyond belongs to somebody else or to nobody. A key outside repeats the nearest one
// inside; its scores are masked.
struct KeySource {
    const char* base;      // packed: of key 0
    const char* table;     // of the request; packed: not read
    uint32_t table_bytes;  // of it, up to the last key's entry; packed: 0, so that the page is 0
    uint32_t page_bytes, row_bytes;  // from page to page and from row to row
    uint32_t page_size;              // packed: not used, as every key's page is 0
    Divider pages;
    int32_t lowest, last;
};

// As they lie in memory: an fp8 cache's are half as large.
template <class Cache, int kDim>
struct KeyPieces {
    static constexpr int kElements = PieceBytes(kDim) / 2, kWords = kElements * Cache::kBytes / 4;
    uint32_t word[4][kWords];

    LITE_DEVICE void Load(int i, const char* from) {
        using Piece = uint32_t __attribute__((ext_vector_type(kWords), aligned(4)));
        const Piece piece = *reinterpret_cast<const Piece*>(from);
#pragma unroll
        for (int w = 0; w < kWords; ++w) word[i][w] = piece[w];
    }
};

// v_mad_u64_u32.
LITE_DEVICE uint64_t Bytes(uint32_t count, uint32_t each) {
    return static_cast<uint64_t>(count) * each;
}

LITE_DEVICE int32_t Clamp(int32_t x, int32_t low, int32_t high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// Where a lane's keys lie: 4 neighbours from a multiple of 4 on. Page numbers are on their way from
// the table after Find(). Each key has its own look-up, which costs 3 loads from L1 more than it
// would with one for all keys of a page, but no branch among MFMAs.
class KeyPlaces {
   public:
    // In kSteps steps, each of which fits beside one MFMA.
    static constexpr int kSteps = 6;
    template <int kStep>
    LITE_DEVICE void Find(const KeySource& source, int32_t key) {
        if constexpr (kStep < 2) {
#pragma unroll
            for (int i = 2 * kStep; i < 2 * kStep + 2; ++i)
                row_[i] = static_cast<uint32_t>(Clamp(key + i, source.lowest, source.last));
        } else {
            constexpr int i = kStep - 2;
            const uint32_t entry = Divide(row_[i], source.pages);
            page_[i] = LoadWord(source.table, source.table_bytes, entry * 4u);
            row_[i] -= entry * source.page_size;
        }
    }

    // Of key `i`, `byte` bytes into its row.
    LITE_DEVICE const char* At(const KeySource& source, uint32_t byte, int i) const {
        return source.base + byte + Bytes(page_[i], source.page_bytes) +
               Bytes(row_[i], source.row_bytes);
    }

   private:
    uint32_t page_[4];
    uint32_t row_[4];  // of the page; during Find() the key
};

// Writes a lane's piece of key `i` of its run to a block of K in LDS: `at` is the LDS byte of the
// piece of the run's first key. Conflict-free: neighbouring lanes write neighbouring pieces of a
// row. If kPadded, `keep` is all ones, or zero for pieces to be zero.
template <int i, bool kPadded, class Cache, int kDim>
LITE_DEVICE void StoreKey(const KeyPieces<Cache, kDim>& pieces, uint32_t keep, uint32_t at,
                          char* lds) {
    constexpr int kWords = PieceBytes(kDim) / 4;
    using Piece = uint32_t __attribute__((ext_vector_type(kWords)));
    Piece words;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
        words[w] = Cache::Two(pieces.word[i], w) & (kPadded ? keep : ~0u);
    *reinterpret_cast<Piece*>(lds + (at ^ i * kChunkBytes) + i * LdsDims(kDim) * 2) = words;
}

// Turns head dim `e` of a lane's pieces of V and writes it: 2 v_perm_b32 and 8 bytes. `at` is the
// LDS byte of the piece's first dim and the run.
template <int e, class L, int kKeys, class Cache, int kDim>
LITE_DEVICE void StoreDim(const KeyPieces<Cache, kDim>& pieces, uint32_t at, char* lds) {
    const auto& x = pieces.word;
    const Word2 words = {Cache::Turned(x[0], x[1], e), Cache::Turned(x[2], x[3], e)};
    // From the fifth dim on another tile, or a slot 8 further.
    constexpr uint32_t further = static_cast<uint32_t>(VLdsByte<L>(kKeys, e / 4 * 4, 0));
    *reinterpret_cast<Word2*>(lds + (at ^ e % 4 * kChunkBytes) + further) = words;
}

}  // namespace liteattention::gfx942
