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
};

// Requests of few rows are computed by attention_decode, in `splits` parts along the keys at most,
// and merge_decode merges the parts; all others by attention_prefill. A kernel that no request can
// be for has a grid of 0 and is not launched. Byte offsets are into the workspace.
struct RaggedPlan {
    RaggedShape shape;
    Split split = Split::kTooShort;
    int64_t splits = 1;
    int64_t decode_grid = 0;  // workgroups
    int64_t merge_grid = 0;
    int64_t prefill_grid = 0;
    int64_t part_out_offset = 0;
    int64_t part_stats_offset = 0;
    int64_t workspace_bytes = 0;
    double kv_bytes = 0.0;  // of K and V that decode reads if every request is as long as allowed
    // Modelled, never measured: decode and merge as planned, and decode without splitting, of
    // requests as long as allowed on an idle GPU. 0 without decode.
    double modelled_us = 0.0;
    double modelled_unsplit_us = 0.0;
};

// Modelled time in us of attention_decode over requests that are all as long as the shape allows,
// in `splits` parts, with its merge.
double DecodeCost(const RaggedShape& shape, int64_t splits, int64_t compute_units);

// Parts with the smallest DecodeCost, at most kMostDecodeSplits. Declines (kTooShort) if they would
// save less than kMinGain, so that splitting is never modelled to cost time.
inline constexpr int64_t kMostDecodeSplits = 128;
TailChoice ChooseDecodeSplits(const RaggedShape& shape, int64_t compute_units);

// Every reason why the kernels cannot take the shape; none means that PlanRagged can.
std::vector<std::string> RaggedReasons(const RaggedShape& shape);

// `splits` 0 chooses, any other number up to kMostDecodeSplits is forced. Throws
// std::invalid_argument with every reason.
RaggedPlan PlanRagged(const RaggedShape& shape, int64_t compute_units, int64_t splits);

}  // namespace liteattention::gfx942
