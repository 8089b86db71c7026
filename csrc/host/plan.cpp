#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../gfx942/params.h"

namespace liteattention::gfx942 {
namespace {

// The model of a tail, in K-block times of one workgroup. At D = 128 a K block is 6144 clocks of
// matrix cores alone (csrc/gfx942/geometry.h); at 2.1 GHz and three quarters of that rate 3.9 us,
// and half of it at D = 64.
constexpr double kBlockMicroseconds = 3.9;
// Query load, first K block and output of a workgroup, during which its matrix cores idle.
constexpr double kWorkgroupBlocks = 2.0;
// One more kernel in the stream.
constexpr double kMergeLaunchMicroseconds = 5.0;
// Partial outputs are written once and read once, through the caches: 4 TB/s of 5.3.
constexpr double kBytesPerMicrosecond = 4.0e6;

constexpr int64_t AlignUp(int64_t bytes) {
    return CeilDiv(bytes, kWorkspaceAlign) * kWorkspaceAlign;
}

}  // namespace

double TailCost(int64_t tail_tiles, int64_t splits, int64_t k_blocks, int64_t head_dim) {
    const double block = kBlockMicroseconds * static_cast<double>(head_dim) / 128.0;
    double cost = static_cast<double>(CeilDiv(k_blocks, splits)) + kWorkgroupBlocks;
    if (splits > 1) {
        const int64_t bytes =
            PartOutBytes(tail_tiles, splits, head_dim) + PartStatsBytes(tail_tiles, splits);
        cost +=
            (kMergeLaunchMicroseconds + 2.0 * static_cast<double>(bytes) / kBytesPerMicrosecond) /
            block;
    }
    return cost;
}

int64_t ChooseSplits(int64_t tail_tiles, int64_t k_blocks, int64_t head_dim,
                     int64_t compute_units) {
    if (tail_tiles == 0) return 1;
    const double whole = TailCost(tail_tiles, 1, k_blocks, head_dim);
    double best = whole * (1.0 - kMinGain);
    int64_t chosen = 1;
    const int64_t most = std::min(k_blocks, compute_units / tail_tiles);
    for (int64_t splits = 2; splits <= most; ++splits) {
        const double cost = TailCost(tail_tiles, splits, k_blocks, head_dim);
        if (cost < best) best = cost, chosen = splits;
    }
    return chosen;
}

std::vector<std::string> DenseReasons(const DenseShape& s) {
    std::vector<std::string> reasons;
    const auto sized = [&](const char* name, int64_t value) {
        if (value >= 1 && value <= std::numeric_limits<int32_t>::max()) return true;
        reasons.push_back(std::string(name) + " must be from 1 to 2^31 - 1, got " +
                          std::to_string(value));
        return false;
    };
    bool fits = sized("batch", s.batch);
    fits &= sized("q_heads", s.q_heads);
    fits &= sized("kv_heads", s.kv_heads);
    fits &= sized("q_len", s.q_len);
    fits &= sized("kv_len", s.kv_len);
    if (s.head_dim != 64 && s.head_dim != 128) {
        reasons.push_back("head dim must be 64 or 128, got " + std::to_string(s.head_dim));
        return reasons;
    }
    if (!fits) return reasons;
    if (s.q_heads % s.kv_heads)
        reasons.push_back("query heads must be a multiple of key heads, got " +
                          std::to_string(s.q_heads) + " and " + std::to_string(s.kv_heads));
    // Products of three sizes below 2^31 need not fit in 64 bits.
    const auto grid = [&](const char* what, __int128 count, int64_t threads) {
        if (count > MaxGrid(threads))
            reasons.push_back(std::string(what) + " must be at most " +
                              std::to_string(MaxGrid(threads)) + " (2^32 threads in one launch)");
    };
    grid("its (batch, head, 384 query rows) tiles",
         static_cast<__int128>(s.batch) * s.q_heads * QBlocks(s.q_len), kDenseThreads);
    grid("its (batch, key head, 64 keys) blocks",
         static_cast<__int128>(s.batch) * s.kv_heads * KBlocks(s.kv_len), kTransposeThreads);
    return reasons;
}

DensePlan PlanDense(const DenseShape& shape, int64_t compute_units, int64_t splits) {
    std::vector<std::string> reasons = DenseReasons(shape);
    const int64_t k_blocks = KBlocks(shape.kv_len);
    if (compute_units < 1)
        reasons.push_back("compute units must be >= 1, got " + std::to_string(compute_units));
    if (splits < 0 || (reasons.empty() && splits > k_blocks))
        reasons.push_back("splits must be from 0 to the " + std::to_string(k_blocks) +
                          " K blocks, got " + std::to_string(splits));
    DensePlan plan;
    plan.shape = shape;
    if (reasons.empty()) {
        const int64_t tiles = Tiles(shape.batch, shape.q_heads, shape.q_len);
        int64_t tail = tiles % compute_units;
        if (splits == 0)
            splits = ChooseSplits(tail, k_blocks, shape.head_dim, compute_units);
        else if (tail == 0)
            tail = std::min(tiles, compute_units);
        plan.splits = splits;
        plan.tail_tiles = splits > 1 ? tail : 0;
        plan.whole_tiles = tiles - plan.tail_tiles;
        plan.transpose_grid = TransposeGrid(shape.batch, shape.kv_heads, shape.kv_len);
        plan.dense_grid = DenseGrid(tiles, plan.whole_tiles, splits);
        plan.merge_grid = MergeGrid(plan.tail_tiles, shape.head_dim);
        plan.part_out_offset =
            AlignUp(VtBytes(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim));
        plan.part_stats_offset =
            plan.part_out_offset +
            AlignUp(PartOutBytes(plan.tail_tiles, plan.splits, shape.head_dim));
        plan.workspace_bytes =
            plan.part_stats_offset + AlignUp(PartStatsBytes(plan.tail_tiles, plan.splits));
        if (plan.dense_grid > MaxGrid(kDenseThreads) || plan.merge_grid > MaxGrid(kMergeThreads))
            reasons.emplace_back("its parts must be fewer than 2^32 threads");
    }
    if (!reasons.empty()) {
        std::string text = "no plan for this call: ";
        for (size_t i = 0; i < reasons.size(); ++i) text += (i ? "; " : "") + reasons[i];
        throw std::invalid_argument(text);
    }
    return plan;
}

}  // namespace liteattention::gfx942
