#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../gfx942/params.h"

namespace liteattention::gfx942 {
namespace {

// The model. What one K block takes a workgroup, and what starting and ending one takes in such
// blocks, modelled (docs/model.md, `liteattention-rocm model --shape 1,24,4096,128 --json`): clocks
// of a compute unit. At D = 64 two workgroups may share one, which takes 9 % less than both one
// after the other: not counted here, since small launches leave each alone.
constexpr double BlockClocks(int64_t head_dim) { return head_dim == 128 ? 4230.0 : 2890.0; }
constexpr double WorkgroupBlocks(int64_t head_dim) { return head_dim == 128 ? 2.6 : 3.2; }

double BlockMicroseconds(int64_t head_dim) { return BlockClocks(head_dim) / (1000.0 * kGigahertz); }

void CheckComputeUnits(std::vector<std::string>& reasons, int64_t compute_units) {
    if (compute_units < 1)
        reasons.push_back("compute units must be >= 1, got " + std::to_string(compute_units));
}

}  // namespace

void RaiseNoPlan(const std::vector<std::string>& reasons) {
    if (reasons.empty()) return;
    std::string text = "no plan for this call: ";
    for (size_t i = 0; i < reasons.size(); ++i) text += (i ? "; " : "") + reasons[i];
    throw std::invalid_argument(text);
}

double TailCost(int64_t tail_tiles, int64_t splits, int64_t k_blocks, int64_t head_dim,
                int64_t compute_units) {
    const auto rounds = static_cast<double>(CeilDiv(tail_tiles * splits, compute_units));
    double cost =
        rounds * (static_cast<double>(CeilDiv(k_blocks, splits)) + WorkgroupBlocks(head_dim));
    if (splits > 1) {
        const int64_t bytes =
            PartOutBytes(tail_tiles, splits, head_dim) + PartStatsBytes(tail_tiles, splits);
        cost +=
            (kMergeLaunchMicroseconds + 2.0 * static_cast<double>(bytes) / kBytesPerMicrosecond) /
            BlockMicroseconds(head_dim);
    }
    return cost;
}

TailChoice ChooseSplits(int64_t tail_tiles, int64_t k_blocks, int64_t head_dim,
                        int64_t compute_units) {
    if (tail_tiles == 0) return {1, Split::kEven};
    if (static_cast<double>(tail_tiles) >= kNearlyFullShare * static_cast<double>(compute_units))
        return {1, Split::kNearlyFull};
    const double whole = TailCost(tail_tiles, 1, k_blocks, head_dim, compute_units);
    double best = whole * (1.0 - kMinGain);
    TailChoice chosen{1, Split::kTooShort};
    const int64_t most = std::min(k_blocks, kMostRounds * compute_units / tail_tiles);
    for (int64_t splits = 2; splits <= most; ++splits) {
        const double cost = TailCost(tail_tiles, splits, k_blocks, head_dim, compute_units);
        if (cost < best) best = cost, chosen = {splits, Split::kPays};
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
    bool heads = sized("q_heads", s.q_heads);
    heads &= sized("kv_heads", s.kv_heads);
    if (heads && s.q_heads % s.kv_heads)
        reasons.push_back("query heads must be a multiple of key heads, got " +
                          std::to_string(s.q_heads) + " and " + std::to_string(s.kv_heads));
    fits &= heads;
    fits &= sized("q_len", s.q_len);
    fits &= sized("kv_len", s.kv_len);
    if (s.head_dim != 64 && s.head_dim != 128)
        reasons.push_back("head dim must be 64 or 128, got " + std::to_string(s.head_dim));
    if (!fits) return reasons;
    // Products of three sizes below 2^31 need not fit in 64 bits.
    const auto grid = [&](const char* what, __int128 count, int64_t threads) {
        if (count > MaxGrid(threads))
            reasons.push_back(std::string(what) + " must be at most " +
                              std::to_string(MaxGrid(threads)) + " (2^32 threads in one launch)");
    };
    grid(("its (batch, head, " + std::to_string(kQBlock) + " query rows) tiles").c_str(),
         static_cast<__int128>(s.batch) * s.q_heads * QBlocks(s.q_len), kDenseThreads);
    grid("its (batch, key head, 64 keys) blocks",
         static_cast<__int128>(s.batch) * s.kv_heads * KBlocks(s.kv_len), kTransposeThreads);
    return reasons;
}

DensePlan PlanDense(const DenseShape& shape, int64_t compute_units, int64_t splits) {
    std::vector<std::string> reasons = DenseReasons(shape);
    const int64_t k_blocks = KBlocks(shape.kv_len);
    CheckComputeUnits(reasons, compute_units);
    if (splits < 0 || (reasons.empty() && splits > k_blocks))
        reasons.push_back("splits must be from 0 to the " + std::to_string(k_blocks) +
                          " K blocks, got " + std::to_string(splits));
    DensePlan plan;
    plan.shape = shape;
    if (reasons.empty()) {
        const int64_t tiles = Tiles(shape.batch, shape.q_heads, shape.q_len);
        int64_t tail = tiles % compute_units;
        if (splits == 0) {
            const TailChoice chosen = ChooseSplits(tail, k_blocks, shape.head_dim, compute_units);
            plan.splits = chosen.splits;
            plan.split = chosen.split;
        } else {
            plan.splits = splits;
            plan.split = Split::kForced;
            if (tail == 0) tail = std::min(tiles, compute_units);
        }
        plan.tail_tiles = plan.splits > 1 ? tail : 0;
        plan.whole_tiles = tiles - plan.tail_tiles;
        plan.transpose_grid = TransposeGrid(shape.batch, shape.kv_heads, shape.kv_len);
        plan.dense_grid = DenseGrid(tiles, plan.whole_tiles, plan.splits);
        plan.merge_grid = MergeGrid(plan.tail_tiles, shape.head_dim);
        plan.part_out_offset =
            AlignUp(VtBytes(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim));
        plan.part_stats_offset =
            plan.part_out_offset +
            AlignUp(PartOutBytes(plan.tail_tiles, plan.splits, shape.head_dim));
        plan.workspace_bytes =
            plan.part_stats_offset + AlignUp(PartStatsBytes(plan.tail_tiles, plan.splits));
        const auto cost = [&](int64_t count, int64_t parts) {
            return count ? TailCost(count, parts, k_blocks, shape.head_dim, compute_units) : 0.0;
        };
        const double block = BlockMicroseconds(shape.head_dim);
        plan.modelled_unsplit_us = block * cost(tiles, 1);
        plan.modelled_us = block * (cost(plan.whole_tiles, 1) + cost(plan.tail_tiles, plan.splits));
        if (plan.dense_grid > MaxGrid(kDenseThreads) || plan.merge_grid > MaxGrid(kMergeThreads))
            reasons.emplace_back("its parts must be fewer than 2^32 threads");
    }
    RaiseNoPlan(reasons);
    return plan;
}

LitePlan PlanLite(const DenseShape& shape, int64_t compute_units, bool weighs, bool cuts) {
    std::vector<std::string> reasons = DenseReasons(shape);
    CheckComputeUnits(reasons, compute_units);
    RaiseNoPlan(reasons);
    const int64_t k_blocks = KBlocks(shape.kv_len);
    LitePlan plan;
    plan.shape = shape;
    plan.tiles = Tiles(shape.batch, shape.q_heads, shape.q_len);
    plan.transpose_grid = TransposeGrid(shape.batch, shape.kv_heads, shape.kv_len);
    plan.lite_grid = plan.tiles;
    plan.select_grid = weighs ? plan.tiles : 0;
    const bool packs = PacksLists(plan.tiles, compute_units);
    plan.cuts = weighs && cuts && packs && k_blocks >= kLeastCutList &&
                WorkShift(plan.tiles, k_blocks) == 0;
    const int64_t slots = plan.cuts ? CutSlots(plan.tiles) : LiteSlots(plan.tiles);
    const int64_t positions = kXcds * slots;
    // Nor is there an order of more positions than a launch has workgroups.
    if (plan.cuts || (plan.tiles > compute_units && positions <= MaxGrid(kDenseThreads))) {
        plan.slots = slots;
        plan.units = CeilDiv(compute_units, kXcds);
        plan.together = kTogether * plan.units;
        plan.packs = packs;
        plan.count_grid = CountGrid(positions);
        plan.lpt_grid = plan.packs ? kXcds : PlanGrid(plan.tiles);
        plan.lite_grid = positions;
        plan.order_bytes = positions * 4;
        plan.counts_bytes = CountWords(plan.tiles) * 4;
    }
    plan.words = SkipWords(shape.kv_len);
    int64_t end = 0;
    const auto give = [&](int64_t& offset, int64_t bytes) {
        offset = end;
        end += AlignUp(bytes);
        return bytes;
    };
    give(plan.v_t_offset, VtBytes(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim));
    give(plan.order_offset, plan.order_bytes);
    give(plan.counts_offset, plan.counts_bytes);
    plan.weights_bytes = give(plan.weights_offset, weighs ? plan.tiles * k_blocks * 4 : 0);
    if (plan.cuts) {
        plan.merge_grid = MergeListsGrid(shape.head_dim);
        plan.parts_bytes = give(plan.parts_offset, positions * int64_t{sizeof(ListPart)});
        plan.cuts_bytes = give(plan.cuts_offset, kComputeUnits * int64_t{sizeof(CutList)});
        give(plan.part_out_offset, PartOutBytes(kListParts, 1, shape.head_dim));
        give(plan.part_stats_offset, PartStatsBytes(kListParts, 1));
        give(plan.part_weights_offset, ListWeightsBytes(shape.kv_len));
    }
    plan.workspace_bytes = end;
    return plan;
}

}  // namespace liteattention::gfx942
