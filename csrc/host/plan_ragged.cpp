#include "plan_ragged.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>

#include "../gfx942/params.h"

namespace liteattention::gfx942 {
namespace {

// The model. None of its numbers was measured on an MI300X: bandwidth and latency are of the order
// that its documents give, the bytes in flight are counted in the kernel.
//
// What one workgroup can draw: 4 waves with 16 KiB in flight, 8 of fp8, and a loaded latency of 2
// us. Rather low: too few parts leave bandwidth unused, a few too many cost the merge a
// microsecond.
constexpr double kWorkgroupElementsPerMicrosecond = 4 * 8192.0 / 2.0;
constexpr int64_t kResident = 2;  // workgroups on a compute unit: registers
// Lengths, query, table entries, first keys: loads that wait for each other; and the end, where
// waves meet.
constexpr double kWorkgroupMicroseconds = 4.0;
constexpr double kMergePartMicroseconds = 0.1;  // a row's parts are read in one loop

// What a K block of PrefillKeys keys takes a workgroup of attention_prefill, and what starting and
// ending one takes: clocks, modelled (`liteattention-rocm model --kernel prefill`). At D = 64 two
// workgroups may share a compute unit, as in plan.cpp; that is not counted here either.
constexpr double PrefillBlockClocks(int64_t head_dim) {
    if (head_dim > 128) return head_dim == 192 ? 2350.0 : 2830.0;
    return head_dim <= 64 ? 3110.0 : head_dim == 112 ? 4190.0 : 4450.0;
}
constexpr double kPrefillTileClocks = 14000.0;
// Numbers of parts that are tried: finer ones hardly differ.
constexpr int64_t kPrefillSplits[] = {
    2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, kMostPrefillSplits};
constexpr int64_t kPrefillSample = 1024;  // tiles

int32_t Int(int64_t value) { return static_cast<int32_t>(value); }

// The work of the longest request that attention_decode may get.
DecodeWork LongestWork(const RaggedShape& s, int64_t splits) {
    const int64_t most_rows = std::max<int64_t>(kDecodeRows / (s.q_heads / s.kv_heads), 1);
    return DecodeWorkOf(Int(std::min(s.max_q_len, most_rows)), Int(s.max_kv_len), Int(s.window),
                        Int(splits), DecodeKeys(s.head_dim));
}

int64_t LongestKeys(const RaggedShape& s) { return s.max_kv_len - LongestWork(s, 1).first; }

// Requests of as many rows as allowed that there are rows for, at least one; their rows of a key
// head, and the tiles of those.
struct PrefillWork {
    int64_t requests, q_len, tiles;
};
PrefillWork LongestPrefill(const RaggedShape& s) {
    const int64_t q_len = std::max<int64_t>(std::min(s.max_q_len, s.rows), 1);
    const int64_t packed = q_len * (s.q_heads / s.kv_heads);
    const int64_t requests = std::clamp<int64_t>(s.rows / q_len, 1, s.requests);
    return {requests, q_len, CeilDiv(packed, PrefillRows(Int(s.head_dim)))};
}

// K blocks that tile `tile` of such a request visits.
int64_t TileBlocks(const RaggedShape& s, const PrefillWork& work, int64_t tile) {
    const int64_t group = s.q_heads / s.kv_heads, tile_rows = PrefillRows(Int(s.head_dim));
    const int64_t keys = PrefillKeys(Int(s.head_dim)), before = s.max_kv_len - work.q_len;
    const int64_t first_query = tile * tile_rows / group;
    const int64_t last_query = std::min(((tile + 1) * tile_rows - 1) / group, work.q_len - 1);
    const int64_t end = std::min(before + last_query + 1 + s.lookahead, s.max_kv_len);
    const int64_t begin =
        s.window > 0 ? std::max<int64_t>(before + first_query - s.window + 1, 0) : 0;
    return end > begin ? CeilDiv(end, keys) - begin / keys : 0;
}

// Nearly: under a window the first tile sees the most keys if nothing bounds those ahead, and one
// in the middle, or another one by a block, if its rows see some ahead; else one of the last does.
int64_t LongestTile(const RaggedShape& s) {
    const PrefillWork work = LongestPrefill(s);
    return std::max({TileBlocks(s, work, 0), TileBlocks(s, work, work.tiles / 2),
                     TileBlocks(s, work, work.tiles - 1),
                     TileBlocks(s, work, std::max<int64_t>(work.tiles - 2, 0))});
}

}  // namespace

double PrefillCost(const RaggedShape& s, int64_t splits, int64_t compute_units) {
    const PrefillWork work = LongestPrefill(s);
    const int64_t alike = work.requests * s.kv_heads;
    const int64_t part_blocks = std::max(CeilDiv(LongestTile(s), splits), kLeastPrefillBlocks);
    const auto clocks = [&](int64_t blocks) {
        return kPrefillTileClocks + static_cast<double>(blocks) * PrefillBlockClocks(s.head_dim);
    };
    // When each compute unit is free next, the first one on top.
    std::priority_queue<double, std::vector<double>, std::greater<>> free(
        std::greater<>{}, std::vector<double>(static_cast<size_t>(compute_units), 0.0));
    const bool many = work.tiles * alike * splits > kMostRounds * compute_units;
    // Of so many tiles a sample will do.
    const int64_t step = many ? CeilDiv(work.tiles, kPrefillSample) : 1;
    double end = 0.0, sum = 0.0;
    int64_t merged = 0, most = 1, sampled = 0;
    for (int64_t tile = work.tiles - 1; tile >= 0; tile -= step) {
        const int64_t blocks = TileBlocks(s, work, tile);
        const int32_t parts = PrefillPartsOf(Int(blocks), Int(part_blocks), Int(splits));
        if (parts > 1) merged += parts * alike;
        most = std::max<int64_t>(most, parts);
        ++sampled;
        sum += static_cast<double>(alike) * (clocks(blocks) + (parts - 1) * kPrefillTileClocks);
        for (int32_t part = 0; part < parts && !many; ++part) {
            const double part_clocks = clocks(PartBegin(part + 1, parts, Int(blocks)) -
                                              PartBegin(part, parts, Int(blocks)));
            for (int64_t one = 0; one < alike; ++one) {
                const double done = free.top() + part_clocks;
                free.pop();
                free.push(done);
                end = std::max(end, done);
            }
        }
    }
    const double share = static_cast<double>(work.tiles) / static_cast<double>(sampled);
    if (many) end = sum * share / static_cast<double>(compute_units);
    double cost = end / (1000.0 * kGigahertz);
    if (merged > 0) {
        const int64_t bytes =
            PrefillOutBytes(merged, s.head_dim) + PrefillStatsBytes(merged, s.head_dim);
        cost += kMergeLaunchMicroseconds + kMergePartMicroseconds * static_cast<double>(most) +
                2.0 * share * static_cast<double>(bytes) / kBytesPerMicrosecond;
    }
    return cost;
}

TailChoice ChoosePrefillSplits(const RaggedShape& s, int64_t compute_units) {
    const PrefillWork work = LongestPrefill(s);
    const int64_t tiles = work.requests * work.tiles * s.kv_heads;
    const int64_t room = kMostRounds * compute_units;
    if (2 * tiles > room) return {1, Split::kNearlyFull};
    TailChoice chosen{1, Split::kTooShort};
    double best = PrefillCost(s, 1, compute_units) * (1.0 - kMinGain);
    const int64_t most = std::min(CeilDiv(LongestTile(s), kLeastPrefillBlocks), room / tiles);
    for (const int64_t splits : kPrefillSplits) {
        if (splits > most) break;
        const double cost = PrefillCost(s, splits, compute_units);
        if (cost < best) best = cost, chosen = {splits, Split::kPays};
    }
    return chosen;
}

double DecodeCost(const RaggedShape& s, int64_t splits, int64_t compute_units) {
    const DecodeWork work = LongestWork(s, splits);
    const int64_t workgroups = s.requests * s.kv_heads * work.parts;
    const int64_t slots = kResident * compute_units;
    const auto rounds = static_cast<double>(CeilDiv(workgroups, slots));
    const double rate =
        std::min(kWorkgroupElementsPerMicrosecond * static_cast<double>(s.element_bytes),
                 kBytesPerMicrosecond / static_cast<double>(std::min(workgroups, slots)));
    const int64_t keys =
        std::min(CeilDiv(work.blocks, work.parts) * DecodeKeys(s.head_dim), LongestKeys(s));
    const auto part_bytes = static_cast<double>(keys * s.head_dim * 2 * s.element_bytes);
    double cost = rounds * (kWorkgroupMicroseconds + part_bytes / rate);
    if (work.parts > 1) {
        const int64_t parts = s.requests * s.kv_heads * work.parts;
        const auto bytes =
            static_cast<double>(DecodeOutBytes(parts, s.head_dim) + DecodeStatsBytes(parts));
        cost += kMergeLaunchMicroseconds + kMergePartMicroseconds * work.parts +
                2.0 * bytes / kBytesPerMicrosecond;
    }
    return cost;
}

TailChoice ChooseDecodeSplits(const RaggedShape& s, int64_t compute_units) {
    if (s.requests * s.kv_heads >= kResident * compute_units) return {1, Split::kNearlyFull};
    TailChoice chosen{1, Split::kTooShort};
    double best = DecodeCost(s, 1, compute_units) * (1.0 - kMinGain);
    // More parts than that are not taken by any request (DecodeWorkOf).
    const int64_t most = LongestWork(s, kMostDecodeSplits).parts;
    for (int64_t splits = 2; splits <= most; ++splits) {
        const double cost = DecodeCost(s, splits, compute_units);
        if (cost < best) best = cost, chosen = {splits, Split::kPays};
    }
    return chosen;
}

std::vector<std::string> RaggedReasons(const RaggedShape& s) {
    std::vector<std::string> reasons;
    const auto sized = [&](const char* name, int64_t value, int64_t least, int64_t limit,
                           const char* limit_text) {
        if (value >= least && value < limit) return true;
        reasons.push_back(std::string(name) + " must be from " + std::to_string(least) + " to " +
                          limit_text + " - 1, got " + std::to_string(value));
        return false;
    };
    constexpr int64_t kInt = int64_t{1} << 31;
    bool fits = sized("requests", s.requests, 0, kInt, "2^31");
    fits &= sized("rows", s.rows, 0, kInt, "2^31");
    bool heads = sized("q_heads", s.q_heads, 1, kInt, "2^31");
    heads &= sized("kv_heads", s.kv_heads, 1, kInt, "2^31");
    if (heads && s.q_heads % s.kv_heads) {
        reasons.push_back("query heads must be a multiple of key heads, got " +
                          std::to_string(s.q_heads) + " and " + std::to_string(s.kv_heads));
        heads = false;
    }
    fits &= heads;
    fits &= sized("page_size", s.page_size, 0, kInt, "2^31");
    fits &= sized("max_q_len", s.max_q_len, 0, kMaxRaggedLength, "2^30");
    fits &= sized("max_kv_len", s.max_kv_len, 0, kMaxRaggedLength, "2^30");
    fits &= sized("window", s.window, 0, kMaxRaggedLength, "2^30");
    fits &= sized("lookahead", s.lookahead, 0, kMaxRaggedLength, "2^30");
    if (!IsRaggedDim(s.head_dim)) {
        reasons.push_back("head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got " +
                          std::to_string(s.head_dim));
        fits = false;
    }
    if (s.element_bytes != kSameBytes && s.element_bytes != kFp8Bytes) {
        reasons.push_back("elements of the cache must have 2 bytes or 1, got " +
                          std::to_string(s.element_bytes));
        fits = false;
    }
    if (!fits) return reasons;
    const int64_t group = s.q_heads / s.kv_heads;
    if (static_cast<__int128>(s.rows) * group >= kMaxRaggedLength)
        reasons.push_back(
            "query rows times the query heads of a key head must be below 2^30, got " +
            std::to_string(s.rows) + " times " + std::to_string(group));
    const auto grid = [&](const char* what, __int128 count, int64_t threads) {
        if (count > MaxGrid(threads))
            reasons.push_back(std::string(what) + " must be at most " +
                              std::to_string(MaxGrid(threads)) + " (2^32 threads in one launch)");
    };
    grid("requests times key heads",
         static_cast<__int128>(s.requests) * s.kv_heads * kDecodeRows * s.head_dim / kMergeVector,
         1);
    if (reasons.empty() && !IsDecode(s.max_q_len, group))
        grid(
            "its tiles of prefill rows",
            static_cast<__int128>(PrefillSlots(s.rows, s.requests, group, s.head_dim)) * s.kv_heads,
            kDenseThreads);
    return reasons;
}

namespace {

// Room for the parts of a stage behind what the workspace has already.
void PlaceParts(RaggedPlan& plan, RaggedStage& stage, int64_t out_bytes, int64_t stats_bytes) {
    stage.out_offset = plan.workspace_bytes;
    stage.stats_offset = stage.out_offset + AlignUp(out_bytes);
    plan.workspace_bytes = stage.stats_offset + AlignUp(stats_bytes);
}

void PlanPrefill(RaggedPlan& plan, int64_t compute_units, int64_t splits) {
    const RaggedShape& s = plan.shape;
    RaggedStage& stage = plan.prefill;
    const int64_t slots = PrefillSlots(s.rows, s.requests, s.q_heads / s.kv_heads, s.head_dim);
    const PrefillWork work = LongestPrefill(s);
    const int64_t room = kMostRounds * compute_units / s.kv_heads;
    TailChoice chosen{std::min(splits, kMostPrefillSplits), Split::kForced};
    if (splits == 0)
        chosen = ChoosePrefillSplits(s, compute_units);
    else if (room < 2)
        chosen = {1, Split::kNearlyFull};
    stage.splits = chosen.splits;
    stage.split = chosen.split;
    if (stage.splits > 1) {
        const bool forced = stage.split == Split::kForced;
        const int64_t tiles = forced ? slots : work.requests * work.tiles;
        // Forced parts are a tile's own matter, as far as there is room.
        plan.prefill_blocks = forced ? 0 : kLeastPrefillBlocks;
        plan.prefill_room = std::min(tiles * stage.splits, room);
        stage.parts = plan.prefill_room * s.kv_heads;
        stage.merge_grid = MergePrefillGrid(slots, plan.prefill_room, s.kv_heads, s.head_dim);
        PlaceParts(plan, stage, PrefillOutBytes(stage.parts, s.head_dim),
                   PrefillStatsBytes(stage.parts, s.head_dim));
    }
    stage.grid = PrefillGrid(slots, plan.prefill_room, s.kv_heads);
    stage.modelled_us = PrefillCost(s, stage.splits, compute_units);
    stage.modelled_unsplit_us = PrefillCost(s, 1, compute_units);
}

void PlanDecode(RaggedPlan& plan, int64_t compute_units, int64_t splits) {
    const RaggedShape& s = plan.shape;
    RaggedStage& stage = plan.decode;
    TailChoice chosen{splits, Split::kForced};
    if (splits == 0) chosen = ChooseDecodeSplits(s, compute_units);
    stage.splits = chosen.splits;
    stage.split = chosen.split;
    stage.grid = DecodeGrid(s.requests, s.kv_heads, stage.splits);
    if (stage.splits > 1) {
        stage.parts = DecodeParts(s.requests, s.kv_heads, stage.splits);
        stage.merge_grid = MergeDecodeGrid(s.requests, s.kv_heads, s.head_dim);
        PlaceParts(plan, stage, DecodeOutBytes(stage.parts, s.head_dim),
                   DecodeStatsBytes(stage.parts));
    }
    plan.kv_bytes = static_cast<double>(s.requests * s.kv_heads) *
                    static_cast<double>(LongestKeys(s) * s.head_dim * 2 * s.element_bytes);
    stage.modelled_us = DecodeCost(s, stage.splits, compute_units);
    stage.modelled_unsplit_us = DecodeCost(s, 1, compute_units);
}

}  // namespace

RaggedPlan PlanRagged(const RaggedShape& shape, int64_t compute_units, int64_t splits) {
    std::vector<std::string> reasons = RaggedReasons(shape);
    if (compute_units < 1)
        reasons.push_back("compute units must be >= 1, got " + std::to_string(compute_units));
    if (splits < 0 || splits > kMostDecodeSplits)
        reasons.push_back("splits must be from 0 to " + std::to_string(kMostDecodeSplits) +
                          ", got " + std::to_string(splits));
    RaggedPlan plan;
    plan.shape = shape;
    if (reasons.empty() && shape.requests > 0 && shape.rows > 0 && shape.max_q_len > 0) {
        const int64_t group = shape.q_heads / shape.kv_heads;
        if (!IsDecode(shape.max_q_len, group)) PlanPrefill(plan, compute_units, splits);
        if (IsDecode(std::max<int64_t>(shape.min_q_len, 1), group))
            PlanDecode(plan, compute_units, splits);
        if (plan.decode.grid > MaxGrid(kDecodeThreads) ||
            plan.prefill.grid > MaxGrid(kDenseThreads) ||
            plan.prefill.merge_grid > MaxGrid(kMergeRaggedThreads))
            reasons.emplace_back("its parts must be fewer than 2^32 threads");
    }
    RaiseNoPlan(reasons);
    return plan;
}

}  // namespace liteattention::gfx942
