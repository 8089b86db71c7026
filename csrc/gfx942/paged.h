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

    // Whether 4 neighbouring keys from a multiple of 4 on always share a page. Looked at anew.
    LITE_DEVICE bool SharePages() const {
        return ScalarHere(static_cast<int32_t>(page_size)) % 4 == 0;
    }
};

// The page and the row within it of a lane's keys.
struct KeyPlaces {
    uint32_t page[4], row[4];
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

// Asks for the pages of keys `key` .. `key` + 3; `key` is a multiple of 4.
LITE_DEVICE KeyPlaces FindKeys(const KeySource& source, int32_t key) {
    const auto clamp = [&](int i) {
        return static_cast<uint32_t>(Clamp(key + i, source.lowest, source.last));
    };
    const auto load = [&](uint32_t entry) {
        return LoadWord(source.table, source.table_bytes, entry * 4u);
    };
    uint32_t entry[4], at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = clamp(i);
    entry[0] = Divide(at[0], source.pages);
    KeyPlaces places;
    places.page[0] = load(entry[0]);
    entry[1] = entry[2] = entry[3] = entry[0];
    places.page[1] = places.page[2] = places.page[3] = 0;  // not used where pages are shared
    if (!source.SharePages()) {
#pragma unroll
        for (int i = 1; i < 4; ++i) {
            entry[i] = Divide(at[i], source.pages);
            places.page[i] = load(entry[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) places.row[i] = at[i] - entry[i] * source.page_size;
    return places;
}

// Asks for a lane's pieces, `byte` bytes into each row.
template <class Pieces>
LITE_DEVICE void LoadKeys(const KeySource& source, const KeyPlaces& places, uint32_t byte,
                          Pieces& pieces) {
    const char* base = source.base + byte;
    if (source.SharePages()) {
        base += Bytes(places.page[0], source.page_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) pieces.Load(i, base + Bytes(places.row[i], source.row_bytes));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pieces.Load(i, base + Bytes(places.page[i], source.page_bytes) +
                               Bytes(places.row[i], source.row_bytes));
    }
}

// Writes a lane's pieces of K to LDS: `at` is KLdsByte of the run's first key and the piece.
// Conflict-free: neighbouring lanes write neighbouring pieces of a row.
template <class Cache, int kDim>
LITE_DEVICE void StoreK(const KeyPieces<Cache, kDim>& pieces, int32_t run, int32_t piece,
                        char* lds) {
    constexpr int kWords = PieceBytes(kDim) / 4;
    using Piece = uint32_t __attribute__((ext_vector_type(kWords)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Piece words;
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = Cache::Two(pieces.word[i], w);
        const int chunk = piece * PieceBytes(kDim) / kChunkBytes;
        const int within = piece * PieceBytes(kDim) % kChunkBytes;
        *reinterpret_cast<Piece*>(lds + KLdsByte(kDim, 4 * run + i, chunk) + within) = words;
    }
}

// Turns a lane's pieces of V and writes them: 2 v_perm_b32 and 8 bytes per head dim. `at` is
// VLdsByte of the piece's first dim and the run.
template <class L, int kKeys, class Cache, int kDim>
LITE_DEVICE void StoreV(const KeyPieces<Cache, kDim>& pieces, uint32_t at, char* lds) {
#pragma unroll
    for (int e = 0; e < KeyPieces<Cache, kDim>::kElements; ++e) {
        const auto& x = pieces.word;
        const Word2 words = {Cache::Turned(x[0], x[1], e), Cache::Turned(x[2], x[3], e)};
        // From the fifth dim on another tile, or a slot 8 further.
        const uint32_t slot = e % 4u;
        const uint32_t further = static_cast<uint32_t>(VLdsByte<L>(kKeys, e / 4 * 4, 0));
        *reinterpret_cast<Word2*>(lds + (at ^ slot * kChunkBytes) + further) = words;
    }
}

}  // namespace liteattention::gfx942
