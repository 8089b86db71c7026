#include "plan_ragged.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../gfx942/params.h"

namespace liteattention::gfx942 {
namespace {

// The model. None of its numbers was measured on an MI300X: bandwidth and latency are of the order
// that its documents give, the bytes in flight are counted in the kernel.
//
// What HBM gives all compute units together: 4 of 5.3 TB/s, per us.
constexpr double kBytesPerMicrosecond = 4.0e6;
// What one workgroup can draw: 4 waves with 16 KiB in flight, 8 of fp8, and a loaded latency of 2
// us. Rather low: too few parts leave bandwidth unused, a few too many cost the merge a
// microsecond.
constexpr double kWorkgroupElementsPerMicrosecond = 4 * 8192.0 / 2.0;
constexpr int64_t kResident = 2;  // workgroups on a compute unit: registers
// Lengths, query, table entries, first keys: loads that wait for each other; and the end, where
// waves meet.
constexpr double kWorkgroupMicroseconds = 4.0;
constexpr double kMergeLaunchMicroseconds = 5.0;
constexpr double kMergePartMicroseconds = 0.1;  // a row's parts are read in one loop

constexpr int64_t AlignUp(int64_t bytes) {
    return CeilDiv(bytes, kWorkspaceAlign) * kWorkspaceAlign;
}

int32_t Int(int64_t value) { return static_cast<int32_t>(value); }

// The work of the longest request that attention_decode may get.
DecodeWork LongestWork(const RaggedShape& s, int64_t splits) {
    const int64_t most_rows = std::max<int64_t>(kDecodeRows / (s.q_heads / s.kv_heads), 1);
    return DecodeWorkOf(Int(std::min(s.max_q_len, most_rows)), Int(s.max_kv_len), Int(s.window),
                        Int(splits), DecodeKeys(s.head_dim));
}

int64_t LongestKeys(const RaggedShape& s) { return s.max_kv_len - LongestWork(s, 1).first; }

}  // namespace

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
    fits &= sized("q_heads", s.q_heads, 1, kInt, "2^31");
    fits &= sized("kv_heads", s.kv_heads, 1, kInt, "2^31");
    fits &= sized("page_size", s.page_size, 0, kInt, "2^31");
    fits &= sized("max_q_len", s.max_q_len, 0, kMaxRaggedLength, "2^30");
    fits &= sized("max_kv_len", s.max_kv_len, 0, kMaxRaggedLength, "2^30");
    fits &= sized("window", s.window, 0, kMaxRaggedLength, "2^30");
    if (!IsRaggedDim(s.head_dim)) {
        reasons.push_back("head dim must be 64, 80, 96, 112, 128, 192 or 256, got " +
                          std::to_string(s.head_dim));
        fits = false;
    }
    if (s.element_bytes != kSameBytes && s.element_bytes != kFp8Bytes) {
        reasons.push_back("elements of the cache must have 2 bytes or 1, got " +
                          std::to_string(s.element_bytes));
        fits = false;
    }
    if (!fits) return reasons;
    if (s.q_heads % s.kv_heads) {
        reasons.push_back("query heads must be a multiple of key heads, got " +
                          std::to_string(s.q_heads) + " and " + std::to_string(s.kv_heads));
        return reasons;
    }
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
        if (!IsDecode(shape.max_q_len, group))
            plan.prefill_grid = PrefillGrid(shape.rows, shape.requests, shape.q_heads,
                                            shape.kv_heads, shape.head_dim);
        if (IsDecode(std::max<int64_t>(shape.min_q_len, 1), group)) {
            if (splits == 0) {
                const TailChoice chosen = ChooseDecodeSplits(shape, compute_units);
                plan.splits = chosen.splits;
                plan.split = chosen.split;
            } else {
                plan.splits = splits;
                plan.split = Split::kForced;
            }
            const int64_t parts = DecodeParts(shape.requests, shape.kv_heads, plan.splits);
            plan.decode_grid = DecodeGrid(shape.requests, shape.kv_heads, plan.splits);
            if (plan.splits > 1) {
                plan.merge_grid = MergeDecodeGrid(shape.requests, shape.kv_heads, shape.head_dim);
                plan.part_stats_offset = AlignUp(DecodeOutBytes(parts, shape.head_dim));
                plan.workspace_bytes = plan.part_stats_offset + AlignUp(DecodeStatsBytes(parts));
            }
            plan.kv_bytes =
                static_cast<double>(shape.requests * shape.kv_heads) *
                static_cast<double>(LongestKeys(shape) * shape.head_dim * 2 * shape.element_bytes);
            plan.modelled_us = DecodeCost(shape, plan.splits, compute_units);
            plan.modelled_unsplit_us = DecodeCost(shape, 1, compute_units);
            if (plan.decode_grid > MaxGrid(kDecodeThreads))
                reasons.emplace_back("its parts must be fewer than 2^32 threads");
        }
    }
    RaiseNoPlan(reasons);
    return plan;
}

}  // namespace liteattention::gfx942
