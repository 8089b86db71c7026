// What a dense call on gfx942 launches and how much workspace it takes: pure functions of the
// sizes, no HIP.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace liteattention::gfx942 {

struct DenseShape {
    int64_t batch = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;  // divides q_heads
    int64_t q_len = 0;
    int64_t kv_len = 0;
    int64_t head_dim = 0;  // 64 or 128
};

// One call: V is transposed into the workspace, the dense kernel runs, and if the tail tiles are
// split along the keys their parts are merged. Byte offsets are into the workspace.
struct DensePlan {
    DenseShape shape;
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
};

inline constexpr int64_t kWorkspaceAlign = 256;  // of the buffers' offsets in it

// Modelled cost of the last, partly filled round of workgroups if its `tail_tiles` are computed in
// `splits` parts each, in units of the time that one workgroup takes for one K block. All parts
// run at once: tail_tiles * splits must not exceed the compute units.
double TailCost(int64_t tail_tiles, int64_t splits, int64_t k_blocks, int64_t head_dim);

// Number of parts per tail tile with the smallest TailCost, 1 if splitting does not pay: when the
// parts would not all fit on the idle compute units, or the gain is below kMinGain of the round.
inline constexpr double kMinGain = 0.05;
int64_t ChooseSplits(int64_t tail_tiles, int64_t k_blocks, int64_t head_dim, int64_t compute_units);

// Workgroups of one launch: HIP counts its threads in 32 bits.
constexpr int64_t MaxGrid(int64_t threads) { return ((int64_t{1} << 32) - 1) / threads; }

// Every reason why the kernels cannot take the shape; none means that PlanDense can.
std::vector<std::string> DenseReasons(const DenseShape& shape);

// `splits` 0 chooses; any other number of parts, at most one per K block, is forced upon the last
// round of workgroups even if it is full. Throws std::invalid_argument with every reason.
DensePlan PlanDense(const DenseShape& shape, int64_t compute_units, int64_t splits);

}  // namespace liteattention::gfx942
