// What a ragged call (RaggedParams) launches on gfx942, how much workspace it takes and how long
// its decode should take: pure functions of sizes and bounds, no HIP. The lengths themselves are
// on the device, where each workgroup reads them; the host knows how long they can be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../gfx942/geometry.h"
#include "plan.h"

namespace liteattention::gfx942 {

// Bytes of an element of a cache: the queries' 16-bit numbers, or fp8.
inline constexpr int64_t kSameBytes = 2, kFp8Bytes = 1;

struct RaggedShape {
    int64_t requests = 0;
    int64_t rows = 0;  // query rows of all requests, or more
    int64_t q_heads = 0;
    int64_t kv_heads = 0;   // divides q_heads
    int64_t head_dim = 0;   // IsRaggedDim
    int64_t page_size = 0;  // 0: packed
    int64_t max_q_len = 0;
    int64_t max_kv_len = 0;
    int64_t min_q_len = 0;               // of the requests that have rows, as far as known
    int64_t window = 0;                  // 0: none
    int64_t element_bytes = kSameBytes;  // of keys and values
    int64_t lookahead = 0;               // 0: causal; kSeesAll: no bound
};

// How a kernel of a ragged call is launched: in parts along the keys or not, and what merges them.
// Byte offsets are into the workspace; nothing lies there without parts.
struct RaggedStage {
    Split split = Split::kTooShort;
    int64_t splits = 1;      // parts at most
    int64_t grid = 0;        // workgroups, 0: not launched
    int64_t merge_grid = 0;  // likewise
    int64_t parts = 0;       // that there is room for, 0: none
    int64_t out_offset = 0;
    int64_t stats_offset = 0;
    // Modelled, never measured: kernel and merge as planned, and the kernel without splitting, of
    // requests as long as allowed on an idle GPU. 0 where it is not launched.
    double modelled_us = 0.0;
    double modelled_unsplit_us = 0.0;
};

// Requests of few rows are computed by attention_decode and merge_decode, all others by
// attention_prefill and merge_prefill. A kernel that no request can be for is not launched.
struct RaggedPlan {
    RaggedShape shape;
    RaggedStage decode;
    RaggedStage prefill;
    int64_t prefill_room = 0;    // parts of a key head's tiles at most (PrefillSplitsOf)
    int64_t prefill_blocks = 0;  // K blocks of a part of a tile at least; 0: forced (params.h)
    int64_t workspace_bytes = 0;
    double kv_bytes = 0.0;  // of K and V that decode reads if every request is as long as allowed
};

// Modelled time in us of attention_decode over requests that are all as long as the shape allows,
// in `splits` parts, with its merge.
double DecodeCost(const RaggedShape& shape, int64_t splits, int64_t compute_units);

// Parts with the smallest DecodeCost, at most kMostDecodeSplits. Declines (kTooShort) if they would
// save less than kMinGain, so that splitting is never modelled to cost time.
inline constexpr int64_t kMostDecodeSplits = 128;
TailChoice ChooseDecodeSplits(const RaggedShape& shape, int64_t compute_units);

// K blocks of a part of a prefill tile at least: merging shorter ones costs what they save.
inline constexpr int64_t kLeastPrefillBlocks = 4;

// Modelled time in us of attention_prefill over as many requests as there are rows for, all as long
// as the shape allows, with tiles in `splits` parts at most and their merge: each part goes to the
// first compute unit that is free, the last tiles first. With more than kMostRounds tiles for each
// unit the last ones hardly matter: that is their mean.
double PrefillCost(const RaggedShape& shape, int64_t splits, int64_t compute_units);

// Parts with the smallest PrefillCost, at most kMostPrefillSplits. Declines like
// ChooseDecodeSplits, and where two parts of every tile would be more than kMostRounds for each
// compute unit: so many take 162 MB of workspace. The tiles of a batch may be others than the
// model's: where they are more, each has fewer parts (PrefillSplitsOf).
inline constexpr int64_t kMostPrefillSplits = 64;
TailChoice ChoosePrefillSplits(const RaggedShape& shape, int64_t compute_units);

// Every reason why the kernels cannot take the shape; none means that PlanRagged can.
std::vector<std::string> RaggedReasons(const RaggedShape& shape);

// `splits` 0 chooses, any other number up to kMostDecodeSplits is forced (a tile of prefill has as
// many parts, but no more than kMostPrefillSplits, K blocks or room). Throws std::invalid_argument
// with every reason.
RaggedPlan PlanRagged(const RaggedShape& shape, int64_t compute_units, int64_t splits);

}  // namespace liteattention::gfx942
