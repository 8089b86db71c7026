// The argument of each gfx942 kernel: one struct, passed by value. Included by device code and by
// the host launcher, so plain C++20 PODs and nothing but <stdint.h>.
//
// Strides are in elements, {batch, seq, head}; the head dimension is contiguous. Pointers to bf16
// or fp16 are `const uint16_t*`. Every row must start on a 4-byte boundary (geometry.h:
// kRowAlignBytes). Kernels (name: argument, grid of 1-D workgroups):
//
//   transpose_v_bf16_d{64,128}                       TransposeVParams  TransposeGrid
//   attention_dense_bf16_d{64,128}_{rtne,rtna,rtz}   DenseParams       DenseGrid
//   attention_dense_fp16_d{64,128}                   likewise
//   attention_lite_bf16_d{64,128}_{rtne,rtna,rtz}    LiteParams        LiteGrid
//   attention_lite_fp16_d{64,128}                    likewise
//   merge_parts_bf16_{rtne,rtna,rtz}                 MergeParams       MergeGrid
//   merge_parts_fp16                                 likewise
//   plan_lpt                                         PlanParams        PlanGrid
//
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

// Dense attention. A tile is 384 query rows of one (batch, q head); Tiles(...) of them, in the
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
    float* part_out;    // [tail tile][part][384][D] not normalised; null when nothing is split
    float* part_stats;  // [tail tile][part][2][384]: running maximum (log2 units), sum
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
// next step shall compute, every word of them; `read` and `write` must not overlap. A q block that
// computes nothing gets out 0 and lse -inf. Precondition: SkipWords(kv_len) <= kMaxLiteWords.
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
    const int32_t* order;       // of plan_lpt, [batch][q_heads][QBlocks(q_len)]; null: ascending
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
    int32_t soft_skip;   // 1: 48 rows that all vote skip drop the tile's contribution at once
    int32_t mapping;     // Mapping in geometry.h; 0 is the default
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
    int32_t reserved;  // 0
};

// Orders the q blocks of each (batch, q head) by the number of K blocks they keep,
// (skip | must_do) & ~must_skip, heaviest first, ties by ascending q block.
struct PlanParams {
    const uint32_t* skip;       // [batch * q_heads][q_blocks][words]
    const uint32_t* must_do;    // [words]; may be null
    const uint32_t* must_skip;  // [words]; may be null
    int32_t* order;             // [batch * q_heads][q_blocks]
    int32_t rows;               // batch * q_heads
    int32_t q_blocks;
    int32_t words;
    int32_t reserved;  // 0
};

static_assert(sizeof(TransposeVParams) == 56);
static_assert(sizeof(DenseParams) == 168);
static_assert(sizeof(LiteParams) == 192);
static_assert(sizeof(MergeParams) == 88);
static_assert(sizeof(PlanParams) == 48);

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
constexpr int64_t LiteGrid(int64_t tiles) { return tiles; }
// Rows of one merge workgroup; divides kQBlock.
constexpr int64_t MergeRows(int64_t head_dim) { return kMergeThreads * kMergeVector / head_dim; }
constexpr int64_t MergeGrid(int64_t tail_tiles, int64_t head_dim) {
    return tail_tiles * (kQBlock / MergeRows(head_dim));
}
constexpr int64_t PlanGrid(int64_t rows, int64_t q_blocks) {
    return rows * CeilDiv(q_blocks, kPlanThreads);
}

static_assert(kQBlock % MergeRows(64) == 0 && kQBlock % MergeRows(128) == 0);

}  // namespace liteattention::gfx942
