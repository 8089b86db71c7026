// The argument of each gfx942 kernel: one struct, passed by value. Included by device code and by
// the host launcher, so plain C++20 PODs and nothing but <stdint.h>.
//
// Strides are in elements, {batch, seq, head}; the head dimension is contiguous. Pointers to bf16
// or fp16 are `const uint16_t*`. Every row must start on a 4-byte boundary (geometry.h:
// kRowAlignBytes). Kernels (variants.def), argument, grid of 1-D workgroups:
//
//   transpose_v         TransposeVParams  TransposeGrid
//   attention_dense     DenseParams       DenseGrid
//   attention_lite      LiteParams        one per position of the order, or tile without one
//   attention_weigh     WeighParams       likewise
//   merge_lists         MergeListsParams  MergeListsGrid
//   select_tiles        SelectParams      one per tile, a wave each
//   merge_parts         MergeParams       MergeGrid
//   count_tiles         CountParams       CountGrid
//   plan_lpt            PlanParams        PlanGrid
//   pack_lists          PlanParams        kXcds
//   attention_prefill   RaggedParams      PrefillGrid
//   merge_prefill       RaggedParams      MergePrefillGrid
//   attention_decode    RaggedParams      DecodeGrid
//   merge_decode        RaggedParams      MergeDecodeGrid
//   write_kv            WriteKvParams     WriteKvGrid
//
// Kernels with fp8 in their names read, or write, caches of e4m3fnuz, `const void*` here.
// The fp16 kernels take IEEE binary16 where the others take bf16, probabilities included, and round
// to nearest even. transpose_v moves 16-bit words and serves both.
#pragma once

#include <stdint.h>

#include "geometry.h"

namespace liteattention::gfx942 {

struct Strides {
    int64_t batch;
    int64_t seq;
    int64_t head;
};

// V [batch, kv_len, kv_heads, D] -> V_t, packed for the PV product (mfma_layout.h), K blocks of 64
// keys, missing keys zero. V_t: bf16 [batch][kv_heads][KBlocks(kv_len)][64 * D], contiguous.
struct TransposeVParams {
    const uint16_t* v;
    uint16_t* v_t;  // 16-byte aligned, VtBytes(...)
    Strides v_strides;
    int32_t batch;
    int32_t kv_heads;
    int32_t kv_len;
    int32_t reserved;  // 0
};

// Dense attention. A tile is 256 query rows of one (batch, q head); Tiles(...) of them, in the
// order of `mapping` (TileOf). The first `whole_tiles` of that order are computed by one workgroup
// each, which writes `out` and `lse`. Each of the other ("tail") tiles is computed by `splits`
// workgroups, each over a part of the K blocks, which write partial results for merge_parts. No
// split: whole_tiles = Tiles(...), splits = 1. Precondition: 1 <= splits <= KBlocks(kv_len).
struct DenseParams {
    const uint16_t* q;
    const uint16_t* k;
    const uint16_t* v_t;
    uint16_t* out;
    float* lse;         // natural log, [batch][q_heads][q_len] contiguous; null: not wanted
    float* part_out;    // [tail tile][part][256][D] not normalised; null when nothing is split
    float* part_stats;  // [tail tile][part][2][256]: the raw score they are relative to, sum
    Strides q_strides;
    Strides k_strides;  // seq: at most kMaxKRowStride
    Strides out_strides;
    int32_t batch;
    int32_t q_heads;
    int32_t kv_heads;  // divides q_heads
    int32_t q_len;
    int32_t kv_len;
    float scale_log2;  // scale * log2(e), any finite value, also 0 or negative
    int32_t whole_tiles;
    int32_t splits;
    int32_t mapping;   // Mapping in geometry.h; 0 is the default
    int32_t reserved;  // 0
};

// One LiteAttention step. Bitmaps: bit j % 32 of word j / 32 of a q block is K block j. The kernel
// computes the K blocks (read | must_do) & ~must_skip of each q block and writes those that the
// next step shall compute, every word of them; `read` and `write` must not overlap. Bits past the
// last K block mean nothing where they are read and are written as 0. A q block that computes
// nothing gets out 0 and lse -inf.
struct LiteParams {
    const uint16_t* q;
    const uint16_t* k;
    const uint16_t* v_t;
    uint16_t* out;
    float* lse;                 // natural log, [batch][q_heads][q_len] contiguous; null: not wanted
    const uint32_t* read;       // [batch][q_heads][QBlocks(q_len)][SkipWords(kv_len)]
    uint32_t* write;            // likewise
    const uint32_t* must_do;    // [SkipWords(kv_len)]; may be null
    const uint32_t* must_skip;  // [SkipWords(kv_len)]; may be null
    const int32_t* order;       // of PlanParams: the tile of a workgroup, -1: none; null: `mapping`
    Strides q_strides;
    Strides k_strides;  // seq: at most kMaxKRowStride
    Strides out_strides;
    int32_t batch;
    int32_t q_heads;
    int32_t kv_heads;  // divides q_heads
    int32_t q_len;
    int32_t kv_len;
    float scale_log2;    // scale * log2(e), any finite value, also 0 or negative
    float threshold;     // log2 units, <= 0; -inf keeps every tile
    int32_t descending;  // walk K blocks 0: from the first to the last, 1: from the last
    int32_t soft_skip;   // 1: 32 rows that all vote skip drop the tile's contribution at once
    int32_t mapping;     // Mapping in geometry.h; 0 is the default
};

// What a workgroup computes of its tile's list: of the K blocks that the list keeps, in walking
// order, numbers `first` .. `end` - 1.
struct ListPart {
    int32_t first;
    int32_t end;
    int32_t slot;      // where it leaves what it has found (ListSlot); -1: it has the whole list
    int32_t reserved;  // 0
};
// A list that goes on in other units than it begins in.
struct CutList {
    int32_t tile;
    int32_t parts;  // 0: no list does so here
};

// One LiteAttention step with a budget: computes what LiteParams would, and adds up what each tile
// weighs, in units of 1 / (kMassUnit kMassParts): 0 of tiles that are not computed. select_tiles
// writes the next step's bitmap. Parts of lists leave outputs, statistics and, by wave, weights for
// merge_lists: their weights are shares of what the part has seen.
struct WeighParams {
    const uint16_t* q;
    const uint16_t* k;
    const uint16_t* v_t;
    uint16_t* out;
    float* lse;                 // natural log, [batch][q_heads][q_len] contiguous; null: not wanted
    const uint32_t* read;       // [batch][q_heads][QBlocks(q_len)][SkipWords(kv_len)]
    uint32_t* weights;          // [batch][q_heads][QBlocks(q_len)][KBlocks(kv_len)]
    const uint32_t* must_do;    // [SkipWords(kv_len)]; may be null
    const uint32_t* must_skip;  // [SkipWords(kv_len)]; may be null
    const int32_t* order;       // of PlanParams: the tile of a workgroup, -1: none; null: `mapping`
    const ListPart* parts;      // of PlanParams, beside `order`; null: no list is cut
    float* part_out;            // [kListParts][256][D] not normalised; null without `parts`
    float* part_stats;          // [kListParts][2][256]: the raw score they are relative to, sum
    uint32_t* part_weights;     // [kListParts][kWaves][KBlocks(kv_len)], like `weights`
    Strides q_strides;
    Strides k_strides;  // seq: at most kMaxKRowStride
    Strides out_strides;
    int32_t batch;
    int32_t q_heads;
    int32_t kv_heads;  // divides q_heads
    int32_t q_len;
    int32_t kv_len;
    float scale_log2;    // scale * log2(e), any finite value, also 0 or negative
    int32_t descending;  // walk K blocks 0: from the first to the last, 1: from the last
    int32_t mapping;     // Mapping in geometry.h; 0 is the default
};

// Chooses what of (read | must_do) & ~must_skip the next step computes: all but the lightest tiles,
// which weigh `limit` together at most; a limit of 0 drops none, not even those that weigh 0.
// `weights` are those of attention_weigh and work space.
struct SelectParams {
    uint32_t* weights;          // [tiles][KBlocks(kv_len)]
    const uint32_t* read;       // [tiles][SkipWords(kv_len)]
    uint32_t* write;            // likewise
    const uint32_t* must_do;    // [SkipWords(kv_len)]; may be null
    const uint32_t* must_skip;  // [SkipWords(kv_len)]; may be null
    float* mass;                // [tiles][KBlocks(kv_len)]: weights / kMassUnit; null: not wanted
    const int32_t* limits;      // [q_heads], in place of `limit`; null: that for all heads
    int32_t kv_len;
    uint32_t limit;  // below kMassUnit
    // Tiles are [batch][q_heads][QBlocks(q_len)].
    int32_t q_heads;
    uint32_t head_multiplier;  // DividerOf(q_heads)
    uint32_t head_shift;
    uint32_t block_multiplier;  // DividerOf(QBlocks(q_len))
    uint32_t block_shift;
    int32_t reserved;  // 0
};

// Merges the parts of the tail tiles of a DenseParams call into `out` and `lse`.
struct MergeParams {
    const float* part_out;
    const float* part_stats;
    uint16_t* out;
    float* lse;  // may be null
    Strides out_strides;
    int32_t batch;
    int32_t q_heads;
    int32_t q_len;
    int32_t head_dim;  // 64 or 128
    int32_t whole_tiles;
    int32_t splits;
    int32_t mapping;   // of the DenseParams
    float scale_log2;  // likewise
};

// Merges the parts of the lists that pack_lists has cut: `out` and `lse` as MergeParams, and their
// tiles' weights.
struct MergeListsParams {
    const CutList* cuts;           // [kComputeUnits]
    const float* part_out;         // as in WeighParams
    const float* part_stats;       // likewise
    const uint32_t* part_weights;  // likewise
    uint16_t* out;
    float* lse;         // may be null
    uint32_t* weights;  // as in WeighParams
    Strides out_strides;
    int32_t q_heads;
    int32_t q_len;
    int32_t kv_len;
    int32_t head_dim;  // 64 or 128
    float scale_log2;  // of the WeighParams
    int32_t reserved;  // 0
};

// The number of K blocks that each tile keeps, (skip | must_do) & ~must_skip, and an order without
// tiles, for plan_lpt and pack_lists.
struct CountParams {
    const uint32_t* skip;       // [tiles][words]
    const uint32_t* must_do;    // [words]; may be null
    const uint32_t* must_skip;  // [words]; may be null
    int32_t* counts;            // [tiles], room for CountWords(tiles)
    int32_t* order;             // [positions], becomes -1
    int32_t tiles;              // [batch][q_heads][q_blocks]
    int32_t positions;
    int32_t words;
    int32_t k_blocks;  // bits past them do not count; 0: 32 * words
};

// Puts each tile at one of the kXcds * slots positions of the order. XCD x, whose positions are x,
// x + 8 and so on, has a run of tiles with an eighth of the work: head after head, the longest
// tiles of each first, but the run's last heads as one, as many as have `together` tiles or more. A
// run of more than `slots` tiles is ordered as one, and its last tiles go behind the others' runs,
// one tile each in turn. pack_lists packs the last tiles of a run of up to kPackTiles into `units`
// compute units, and orders them by when they begin, if they then end before LPT does.
struct PlanParams {
    const int32_t* counts;  // of count_tiles, CountWords(tiles) are read
    int32_t* order;         // likewise, [slots][kXcds]: tile, or -1
    ListPart* parts;        // of pack_lists, likewise; null: no list is cut
    CutList* cuts;          // of pack_lists, [kComputeUnits]: of each unit; null without `parts`
    int32_t tiles;
    int32_t q_blocks;
    int32_t slots;  // LiteSlots(tiles), or CutSlots
    int32_t together;
    int32_t shift;              // WorkShift(tiles, K blocks)
    uint32_t block_multiplier;  // DividerOf(q_blocks)
    uint32_t block_shift;
    int32_t units;  // compute units of an XCD, for pack_lists: 1 to 63
};

// Attention of a ragged batch, paged or packed keys: attention_prefill and attention_decode, which
// share the requests by IsDecode. Row i of a request with q_len rows and kv_len keys stands at
// position kv_len - q_len + i and sees the keys j with j <= position + lookahead, and j > position
// - window if `window` > 0. A row that sees no key gets out 0 and lse -inf; with sinks, lse
// sinks[h].
//
// Raw scores x = q.k become, in log2 units, x * scale_log2, or with a soft cap c > 0
// cap_log2 * tanh(scale * x / c): cap_log2 = c log2(e) and cap_factor = 2 scale log2(e) / c, so
// that tanh = 1 - 2 / (1 + 2^(cap_factor x)); cap_log2 = 0 is no soft cap. All three are 0 or
// normal numbers.
//
// Keys, paged: key j of request r lies in page page_table[r * page_table_stride + j / page_size],
// row j % page_size. Packed (page_size 0, page_table null): row kv_start[r] + j. Only what a tile
// sees is read: neither pages nor table entries before the window or past kv_len.
//
// A cache of fp8 has scales: that of keys is part of scale_log2 and cap_factor, that of values
// v_scale. Or they lie in memory, which every launch reads: then scale_log2 is scale_wide times
// that of keys and cap_factor scale_log2 times cap_ratio, multiplied in fp64 and rounded once,
// which gives the bits of the same number in the arguments.
struct RowStrides {
    int64_t row;
    int64_t head;
};
struct PageStrides {
    int64_t page;  // at most kMaxPageStride, like `row`; packed: unused
    int64_t row;
    int64_t head;
};
struct RaggedParams {
    const uint16_t* q;
    const void* k;  // 16 bits an element, like q; fp8: 8
    const void* v;  // likewise
    uint16_t* out;
    float* lse;                 // natural log, [q_heads][lse_stride]; null: not wanted
    const float* sinks;         // natural units, [q_heads]; null: none
    const int32_t* q_start;     // [requests + 1], ascending, from 0 or later to at most `rows`
    const int32_t* kv_len;      // [requests]; packed: null
    const int32_t* kv_start;    // [requests + 1]; paged: null
    const int32_t* page_table;  // [requests][page_table_stride]; packed: null
    // Parts of attention_decode, of `splits`; not normalised; null where there is one part.
    float* part_out;    // [requests][kv_heads][splits][16][D]
    float* part_stats;  // [requests][kv_heads][splits][2][16]: maximum (log2 units), sum
    // Parts of attention_prefill likewise, R = PrefillRows(D), tile after tile.
    float* prefill_out;       // [kv_heads][prefill_room][R][D]
    float* prefill_stats;     // [kv_heads][prefill_room][2][R]: maximum (raw), sum
    const float* k_scale_at;  // of an fp8 cache; null: the arguments have both scales
    const float* v_scale_at;
    RowStrides q_strides;
    RowStrides out_strides;
    PageStrides k_strides;
    PageStrides v_strides;
    int64_t page_table_stride;
    int64_t lse_stride;  // from head to head, at least `rows`
    double scale_wide;   // scale * log2(e) without the scale of an fp8 cache's keys
    double cap_ratio;    // 2 / c; no soft cap: 0
    int32_t requests;
    int32_t rows;  // of q, out and lse: an upper bound of q_start[requests]
    int32_t q_heads;
    int32_t kv_heads;          // divides q_heads
    int32_t page_size;         // any from 1 on; 0: packed
    uint32_t page_multiplier;  // DividerOf(page_size)
    uint32_t page_shift;
    int32_t lookahead;  // 0: causal; kSeesAll: no bound
    int32_t window;     // 0: none
    int32_t splits;     // of attention_decode: parts of a request at most (DecodeWorkOf)
    float scale_log2;   // scale * log2(e), any finite value, also 0 or negative
    float cap_log2;
    float cap_factor;
    int32_t head_dim;           // for merge_decode; the other kernels know theirs
    uint32_t group_multiplier;  // DividerOf(q_heads / kv_heads)
    uint32_t group_shift;
    float v_scale;  // of an fp8 cache; 1 of others, which do not look at any scale of a cache
    int32_t prefill_splits;  // of attention_prefill: parts of a tile at most; 1: there are none
    int32_t prefill_room;    // parts of a key head's tiles at most (PrefillSplitsOf); 0 without
    // K blocks of a part at least. Parts of a batch are about as long as those of its longest tile.
    // 0: they are not; each tile has as many parts as may be (PrefillPartsOf).
    int32_t prefill_blocks;
};

// Copies rows of k and v into the pages of a cache: row t goes to row slot % page_size of page
// slot / page_size, slot = slots[t]; a negative slot is no row's. Elements of 16 bits, which a
// cache of fp8 gets divided by the scale, to nearest even, 240 in size at most; NaN stays NaN, and
// so does the 0 / 0 of a scale of 0.
struct WriteKvParams {
    const uint16_t* k;
    const uint16_t* v;
    void* k_cache;
    void* v_cache;
    const void* slots;        // [rows], int64 if `wide`, else int32; below 2^31
    const float* k_scale_at;  // as in RaggedParams
    const float* v_scale_at;
    RowStrides k_strides;
    RowStrides v_strides;
    PageStrides k_cache_strides;
    PageStrides v_cache_strides;
    int32_t rows;
    int32_t kv_heads;
    int32_t head_dim;  // a multiple of 8
    int32_t page_size;
    uint32_t page_multiplier;  // DividerOf(page_size)
    uint32_t page_shift;
    int32_t wide;
    float k_scale;  // of an fp8 cache; 1 of others, which do not look at it
    float v_scale;
    int32_t reserved;  // 0
};

static_assert(sizeof(TransposeVParams) == 56);
static_assert(sizeof(DenseParams) == 168);
static_assert(sizeof(LiteParams) == 192);
static_assert(sizeof(WeighParams) == 216);
static_assert(sizeof(MergeListsParams) == 104);
static_assert(sizeof(SelectParams) == 88);
static_assert(sizeof(MergeParams) == 88);
static_assert(sizeof(CountParams) == 56);
static_assert(sizeof(PlanParams) == 64);
static_assert(sizeof(RaggedParams) == 320);
static_assert(sizeof(WriteKvParams) == 176);

// ---- sizes that the host needs -------------------------------------------------------------

constexpr int64_t VtBytes(int64_t batch, int64_t kv_heads, int64_t kv_len, int64_t head_dim) {
    return batch * kv_heads * KBlocks(kv_len) * kKBlock * head_dim * 2;
}
constexpr int64_t PartOutBytes(int64_t tail_tiles, int64_t splits, int64_t head_dim) {
    return tail_tiles * splits * kQBlock * head_dim * 4;
}
constexpr int64_t PartStatsBytes(int64_t tail_tiles, int64_t splits) {
    return tail_tiles * splits * 2 * kQBlock * 4;
}

// Workgroups per launch; times the threads of each, a launch must stay below 2^32 threads.
constexpr int64_t TransposeGrid(int64_t batch, int64_t kv_heads, int64_t kv_len) {
    return batch * kv_heads * KBlocks(kv_len);
}
constexpr int64_t DenseGrid(int64_t tiles, int64_t whole_tiles, int64_t splits) {
    return whole_tiles + (tiles - whole_tiles) * splits;
}
// Workgroups that merge the outputs of a tile, kMergeVector of a row in each thread.
constexpr int64_t MergeGroups(int64_t head_dim) {
    return kQBlock * head_dim / (kMergeThreads * kMergeVector);
}
constexpr int64_t MergeGrid(int64_t tail_tiles, int64_t head_dim) {
    return tail_tiles * MergeGroups(head_dim);
}
// Those of a list that may be cut: one more for its weights.
constexpr int64_t MergeListsGroups(int64_t head_dim) { return MergeGroups(head_dim) + 1; }
constexpr int64_t MergeListsGrid(int64_t head_dim) {
    return kComputeUnits * MergeListsGroups(head_dim);
}
constexpr int64_t ListWeightsBytes(int64_t kv_len) {
    return int64_t{kListParts} * kWaves * KBlocks(kv_len) * 4;
}
constexpr int64_t CountGrid(int64_t positions) { return CeilDiv(positions, kPlanThreads); }
constexpr int64_t PlanGrid(int64_t tiles) { return CeilDiv(tiles, kPlanThreads); }
// Numbers of prefill tiles within a kv head, an upper bound that needs no lengths.
constexpr int64_t PrefillSlots(int64_t rows, int64_t requests, int64_t group, int64_t head_dim) {
    return PrefillBegin(rows, requests, group, PrefillRows(static_cast<int>(head_dim)));
}
// Workgroups of a kv head, of which `room` may have a part.
constexpr int64_t PrefillItems(int64_t slots, int64_t room) { return slots > room ? slots : room; }
constexpr int64_t PrefillGrid(int64_t slots, int64_t room, int64_t kv_heads) {
    return PrefillItems(slots, room) * kv_heads;
}
// Of attention_prefill's parts, as many as there are workgroups; none are used where a tile has
// one.
constexpr int64_t PrefillOutBytes(int64_t parts, int64_t head_dim) {
    return parts * PrefillRows(static_cast<int>(head_dim)) * head_dim * 4;
}
constexpr int64_t PrefillStatsBytes(int64_t parts, int64_t head_dim) {
    return parts * 2 * PrefillRows(static_cast<int>(head_dim)) * 4;
}
// Workgroups of merge_prefill for one tile: whole ones for every head dim.
constexpr int32_t MergePrefillPieces(int32_t head_dim) {
    return PrefillRows(head_dim) * head_dim / (kMergeRaggedThreads * kMergeVector);
}
// Tiles of a kv head that may have parts: at least two each.
constexpr int64_t MergePrefillTiles(int64_t slots, int64_t room) {
    return slots < room / 2 ? slots : room / 2;
}
constexpr int64_t MergePrefillGrid(int64_t slots, int64_t room, int64_t kv_heads,
                                   int64_t head_dim) {
    return MergePrefillTiles(slots, room) * kv_heads *
           MergePrefillPieces(static_cast<int32_t>(head_dim));
}

// Of attention_decode's parts; none of them are used when splits is 1.
constexpr int64_t DecodeParts(int64_t requests, int64_t kv_heads, int64_t splits) {
    return requests * kv_heads * splits;
}
constexpr int64_t DecodeOutBytes(int64_t parts, int64_t head_dim) {
    return parts * kDecodeRows * head_dim * 4;
}
constexpr int64_t DecodeStatsBytes(int64_t parts) { return parts * 2 * kDecodeRows * 4; }
constexpr int64_t DecodeGrid(int64_t requests, int64_t kv_heads, int64_t splits) {
    return DecodeParts(requests, kv_heads, splits);
}
constexpr int64_t MergeDecodeGrid(int64_t requests, int64_t kv_heads, int64_t head_dim) {
    return CeilDiv(requests * kv_heads * kDecodeRows * head_dim,
                   kMergeRaggedThreads * kMergeVector);
}
constexpr int64_t WriteKvGrid(int64_t rows, int64_t kv_heads, int64_t head_dim) {
    return CeilDiv(rows * kv_heads * head_dim, kWriteKvThreads * kMergeVector);
}

static_assert(kQBlock * 64 % (kMergeThreads * kMergeVector) == 0);

}  // namespace liteattention::gfx942
