// What a call on gfx942 launches, how much workspace it takes and how long it should take: pure
// functions of the sizes, no HIP.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../gfx942/geometry.h"

namespace liteattention::gfx942 {

struct DenseShape {
    int64_t batch = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;  // divides q_heads
    int64_t q_len = 0;
    int64_t kv_len = 0;
    int64_t head_dim = 0;  // 64 or 128
};

// Why the last, partly filled round of workgroups ("tail") is split along the keys, or is not.
enum class Split {
    kPays,        // the parts use units that would idle, and that saves more than the merge costs
    kEven,        // there is no tail: the tiles fill every round
    kNearlyFull,  // the tail fills kNearlyFullShare of the units or more
    kTooShort,    // no number of parts saves kMinGain of the round
    kForced,      // the caller gave the number of parts
};

// One call: V is transposed into the workspace, the dense kernel runs, and if the tail tiles are
// split along the keys their parts are merged. Byte offsets are into the workspace.
struct DensePlan {
    DenseShape shape;
    Split split = Split::kEven;
    Mapping mapping = Mapping::kSwizzledHeadFirst;
    int64_t whole_tiles = 0;
    int64_t tail_tiles = 0;  // 0 if nothing is split
    int64_t splits = 1;
    int64_t transpose_grid = 0;  // workgroups
    int64_t dense_grid = 0;
    int64_t merge_grid = 0;  // 0: no merge
    int64_t v_t_offset = 0;
    int64_t part_out_offset = 0;
    int64_t part_stats_offset = 0;
    int64_t workspace_bytes = 0;
    // Modelled, never measured, on an idle GPU: dense kernel and merge as planned, and the dense
    // kernel without a split.
    double modelled_us = 0.0;
    double modelled_unsplit_us = 0.0;
};

// One LiteAttention step: V is transposed, tiles are ordered by the K blocks they keep, the lite
// kernel runs. With a budget it weighs its tiles, and another kernel chooses; there pack_lists may
// cut lists along the keys, whose parts are then merged. Tiles that all have a compute unit of
// their own need no order unless they may be cut; more than a launch has workgroups for have none.
struct LitePlan {
    DenseShape shape;
    int64_t tiles = 0;
    int64_t slots = 0;  // of an XCD in the order; 0: there is none
    int64_t together = 0;
    int64_t units = 0;           // compute units of an XCD
    bool packs = false;          // its few tiles are ordered by pack_lists, not by plan_lpt
    bool cuts = false;           // which may cut them
    int64_t transpose_grid = 0;  // workgroups
    int64_t count_grid = 0;      // 0: no order
    int64_t lpt_grid = 0;        // likewise; of plan_lpt or pack_lists
    int64_t lite_grid = 0;
    int64_t merge_grid = 0;   // 0: no list may be cut
    int64_t select_grid = 0;  // 0: no budget
    int64_t words = 0;        // of a bitmap row
    int64_t v_t_offset = 0;
    int64_t order_offset = 0;
    int64_t order_bytes = 0;
    int64_t counts_offset = 0;
    int64_t counts_bytes = 0;
    int64_t weights_offset = 0;
    int64_t weights_bytes = 0;  // 0 without a budget
    // Of lists that may be cut; all 0 if none may.
    int64_t parts_offset = 0;
    int64_t parts_bytes = 0;
    int64_t cuts_offset = 0;
    int64_t cuts_bytes = 0;
    int64_t part_out_offset = 0;
    int64_t part_stats_offset = 0;
    int64_t part_weights_offset = 0;
    int64_t workspace_bytes = 0;
};

inline constexpr int64_t kWorkspaceAlign = 256;  // of the buffers' offsets in it

// Modelled time of the last round if its `tail_tiles` are computed in `splits` parts each, in units
// of the time that one workgroup takes for one K block: rounds of parts times the blocks of a part,
// and the merge.
double TailCost(int64_t tail_tiles, int64_t splits, int64_t k_blocks, int64_t head_dim,
                int64_t compute_units);

struct TailChoice {
    int64_t splits = 1;
    Split split = Split::kEven;
};

// Number of parts per tail tile with the smallest TailCost. Declines, so that splitting is never
// modelled to cost time.
inline constexpr double kMinGain = 0.05;
inline constexpr double kNearlyFullShare = 0.95;
// Parts may take more rounds than the tail did, each shorter; this bounds their workspace to
// kMostRounds * 304 * 200 KB = 240 MB.
inline constexpr int64_t kMostRounds = 4;
TailChoice ChooseSplits(int64_t tail_tiles, int64_t k_blocks, int64_t head_dim,
                        int64_t compute_units);

// Of the models of every kernel (none was measured on an MI300X). The clock at which published
// times and uses of the matrix cores put kernels that are as busy: power decides it.
inline constexpr double kGigahertz = 1.1;
// One more kernel in the stream.
inline constexpr double kMergeLaunchMicroseconds = 5.0;
// What HBM gives all compute units together, and at which partial outputs are written once and read
// once: 4 TB/s of 5.3.
inline constexpr double kBytesPerMicrosecond = 4.0e6;

constexpr int64_t AlignUp(int64_t bytes) {
    return CeilDiv(bytes, kWorkspaceAlign) * kWorkspaceAlign;
}

// Workgroups of one launch: HIP counts its threads in 32 bits.
constexpr int64_t MaxGrid(int64_t threads) { return ((int64_t{1} << 32) - 1) / threads; }

// Throws std::invalid_argument with every reason, if there is one.
void RaiseNoPlan(const std::vector<std::string>& reasons);

// Every reason why the kernels cannot take the shape; none means that PlanDense and PlanLite can.
std::vector<std::string> DenseReasons(const DenseShape& shape);

// `splits` 0 chooses; any other number of parts, at most one per K block, is forced upon the last
// round of workgroups even if it is full. Throws std::invalid_argument with every reason.
DensePlan PlanDense(const DenseShape& shape, int64_t compute_units, int64_t splits);
// `cuts`: lists may be cut, where that can pay.
LitePlan PlanLite(const DenseShape& shape, int64_t compute_units, bool weighs, bool cuts);

}  // namespace liteattention::gfx942
