// What one instruction-set path offers to the host code: packing of keys and values, and the
// attention of one q block. The host (schedule.h) owns threads, memory and the order of work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "params.h"
#include "select_tiles.h"
#include "skip_words.h"

namespace liteattention::cpu {

// One q block of one query head, or of some heads that share keys.
struct QBlockTask {
    const AttentionParams* params;
    const LiteParams* lite;  // null: dense
    int64_t head;
    int64_t heads = 1;  // consecutive heads of one kv head; if more, all rows fit in one q tile
    int64_t row_begin;  // rows [row_begin, row_end) of the sequence
    int64_t row_end;
    int64_t first_block = 0;  // K block that the packed blocks begin with
    const char* k_packed;     // this kv head's packed K blocks; see Kernel::k_direct
    const char* v_packed;     // this kv head's packed V^T blocks
    const uint32_t* read;     // row of the read bitmap, or null
    uint32_t* write;          // row of the write bitmap, or null
    float* mass;              // row of the tiles' masses, or null
};

struct Kernel {
    // Bytes of one packed K block ([64][head dim, padded]) and one V^T block ([head dim, padded]
    // [64]) for a head dimension.
    size_t (*k_block_bytes)(const AttentionParams&);
    size_t (*v_block_bytes)(const AttentionParams&);
    // Full K blocks are read where the caller has them, and only a ragged last one is packed.
    bool (*k_direct)(const AttentionParams&);
    // Packs K block `block` of a kv head into dst, zero-padded.
    void (*pack_k)(const AttentionParams&, int64_t kv_head, int64_t block, char* dst);
    void (*pack_v)(const AttentionParams&, int64_t kv_head, int64_t block, char* dst);
    size_t (*scratch_bytes)(const AttentionParams&);
    // Runs one q block. `scratch` is this thread's own, 64-byte aligned.
    void (*run)(const QBlockTask&, char* scratch);
    // Called by each thread before its first and after its last `run`.
    void (*enter)();
    void (*leave)();
};

// Part of a request's keys against up to kDecodeLanes lanes; lane i is row i % rows of head
// head + i / rows.
struct DecodeTask {
    const AttentionParams* params;
    int64_t head;
    int64_t heads;
    int64_t row_begin;
    int64_t row_end;
    int64_t key_begin;  // a multiple of kKBlock
    int64_t key_end;
    float* part;  // [lanes][DecodeKernel::part_words]: the part's state; null: the part is all
    const DecodeTask* next = nullptr;  // what this thread runs next: its first keys are asked for
};

// Attention of few rows, reading keys and values once and where they lie. Threads enter and leave
// through the Kernel of the same path.
struct DecodeKernel {
    size_t (*scratch_bytes)(const AttentionParams&);
    int64_t (*part_words)(const AttentionParams&);  // of one lane's state
    void (*run)(const DecodeTask&, char* scratch);
    // Merges `parts` states, `stride` words apart, and writes the rows of `task`.
    void (*merge)(const DecodeTask& task, const float* parts, int64_t count, int64_t stride,
                  char* scratch);
};

// The kernel of a path for a dtype. Paths without bf16 arithmetic of their own, and fp16 and fp32
// on any path, compute in fp32.
const Kernel& SelectKernel(Isa isa, DType dtype);
const DecodeKernel& SelectDecode(Isa isa, DType dtype);

}  // namespace liteattention::cpu
