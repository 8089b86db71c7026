// Launches of dense attention and LiteAttention.
#include <cmath>
#include <numbers>

#include "launch.h"
#include "tensors.h"

namespace liteattention::gfx942 {
namespace {

void CheckTensors(std::vector<std::string>& reasons, const DenseShape& s,
                  const DenseRequest& request, const void* workspace) {
    CheckRows(reasons, "q", request.q, request.q_strides, s.batch, s.q_len, s.q_heads);
    CheckRows(reasons, "k", request.k, request.k_strides, s.batch, s.kv_len, s.kv_heads);
    CheckRows(reasons, "v", request.v, request.v_strides, s.batch, s.kv_len, s.kv_heads);
    CheckRows(reasons, "out", request.out, request.out_strides, s.batch, s.q_len, s.q_heads);
    if (s.kv_len > 1 && request.k_strides.seq > kMaxKRowStride)
        reasons.push_back("the rows of k must be at most " + std::to_string(kMaxKRowStride) +
                          " elements apart, got " + std::to_string(request.k_strides.seq) +
                          ": call .contiguous() on it");
    CheckWorkspace(reasons, workspace);
}

void TouchTensors(TouchedMemory& touched, const DenseShape& s, const DenseRequest& request) {
    touched.Add("q", request.q, request.q_strides, s.batch, s.q_len, s.q_heads, s.head_dim);
    touched.Add("k", request.k, request.k_strides, s.batch, s.kv_len, s.kv_heads, s.head_dim);
    touched.Add("v", request.v, request.v_strides, s.batch, s.kv_len, s.kv_heads, s.head_dim);
    touched.Add("out", request.out, request.out_strides, s.batch, s.q_len, s.q_heads, s.head_dim);
    touched.Add("lse", request.lse, s.batch * s.q_heads * s.q_len * 4);
}

// What DenseParams, LiteParams and WeighParams have in common.
template <class Params>
Params AttentionParams(const DenseShape& s, const DenseRequest& request, const uint16_t* v_t) {
    Params params{};
    params.q = request.q;
    params.k = request.k;
    params.v_t = v_t;
    params.out = request.out;
    params.lse = request.lse;
    params.q_strides = request.q_strides;
    params.k_strides = request.k_strides;
    params.out_strides = request.out_strides;
    params.batch = Int(s.batch);
    params.q_heads = Int(s.q_heads);
    params.kv_heads = Int(s.kv_heads);
    params.q_len = Int(s.q_len);
    params.kv_len = Int(s.kv_len);
    params.scale_log2 = static_cast<float>(request.scale * std::numbers::log2e);
    return params;
}

// What LiteParams and WeighParams have in common beyond that.
template <class Params>
Params StepParams(const DenseShape& s, const DenseRequest& request, const uint16_t* v_t,
                  const LiteStep& step, const int32_t* order) {
    auto params = AttentionParams<Params>(s, request, v_t);
    params.read = step.read;
    params.must_do = step.must_do;
    params.must_skip = step.must_skip;
    params.order = order;
    params.descending = step.descending;
    params.mapping = Int(static_cast<int64_t>(Mapping::kSwizzledHeadFirst));
    return params;
}

}  // namespace

void Device::TransposeV(const DenseShape& shape, int64_t grid, const DenseRequest& request,
                        uint16_t* v_t, hip::Stream stream) const {
    TransposeVParams params{};
    params.v = request.v;
    params.v_t = v_t;
    params.v_strides = request.v_strides;
    params.batch = Int(shape.batch);
    params.kv_heads = Int(shape.kv_heads);
    params.kv_len = Int(shape.kv_len);
    Launch(Find(Family::kTransposeV, shape.head_dim), grid, params, stream);
}

void Device::Attention(const DensePlan& plan, const DenseRequest& request, void* workspace,
                       hip::Stream stream) const {
    const DenseShape& s = plan.shape;
    std::vector<std::string> reasons;
    CheckTensors(reasons, s, request, workspace);
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    char* const base = static_cast<char*>(workspace);
    auto* const v_t = reinterpret_cast<uint16_t*>(base + plan.v_t_offset);
    const bool split = plan.tail_tiles > 0;
    auto* const part_out = split ? reinterpret_cast<float*>(base + plan.part_out_offset) : nullptr;
    auto* const part_stats =
        split ? reinterpret_cast<float*>(base + plan.part_stats_offset) : nullptr;

    const hip::CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_, stream);
    TouchTensors(touched, s, request);
    // Buffer by buffer, so that running over one into the padding behind it is found, too.
    touched.Add("the workspace", v_t, VtBytes(s.batch, s.kv_heads, s.kv_len, s.head_dim));
    touched.Add("the workspace", part_out, PartOutBytes(plan.tail_tiles, plan.splits, s.head_dim));
    touched.Add("the workspace", part_stats, PartStatsBytes(plan.tail_tiles, plan.splits));

    TransposeV(s, plan.transpose_grid, request, v_t, stream);

    auto dense = AttentionParams<DenseParams>(s, request, v_t);
    dense.part_out = part_out;
    dense.part_stats = part_stats;
    dense.whole_tiles = Int(plan.whole_tiles);
    dense.splits = Int(plan.splits);
    dense.mapping = Int(static_cast<int64_t>(plan.mapping));
    Launch(Find(Family::kDense, s.head_dim, request.number), plan.dense_grid, dense, stream);

    if (!split) return;
    MergeParams merge{};
    merge.part_out = part_out;
    merge.part_stats = part_stats;
    merge.out = request.out;
    merge.lse = request.lse;
    merge.out_strides = request.out_strides;
    merge.batch = Int(s.batch);
    merge.q_heads = Int(s.q_heads);
    merge.q_len = Int(s.q_len);
    merge.head_dim = Int(s.head_dim);
    merge.whole_tiles = Int(plan.whole_tiles);
    merge.splits = Int(plan.splits);
    merge.mapping = Int(static_cast<int64_t>(plan.mapping));
    merge.scale_log2 = static_cast<float>(request.scale * std::numbers::log2e);
    Launch(Find(Family::kMergeParts, 0, request.number), plan.merge_grid, merge, stream);
}

void Device::Order(const LitePlan& plan, const LiteStep& step, int32_t* order, int32_t* counts,
                   ListPart* parts, CutList* cuts, hip::Stream stream) const {
    CountParams count{};
    count.skip = step.read;
    count.must_do = step.must_do;
    count.must_skip = step.must_skip;
    count.counts = counts;
    count.order = order;
    count.tiles = Int(plan.tiles);
    count.positions = Int(kXcds * plan.slots);
    count.words = Int(plan.words);
    count.k_blocks = Int(KBlocks(plan.shape.kv_len));
    Launch(Find(Family::kCountTiles), plan.count_grid, count, stream);

    const Divider blocks = DividerOf(Int(QBlocks(plan.shape.q_len)));
    PlanParams lpt{};
    lpt.counts = counts;
    lpt.order = order;
    lpt.parts = parts;
    lpt.cuts = cuts;
    lpt.tiles = Int(plan.tiles);
    lpt.q_blocks = Int(QBlocks(plan.shape.q_len));
    lpt.slots = Int(plan.slots);
    lpt.together = Int(plan.together);
    lpt.shift = WorkShift(plan.tiles, KBlocks(plan.shape.kv_len));
    lpt.block_multiplier = blocks.multiplier;
    lpt.block_shift = blocks.shift;
    lpt.units = Int(plan.units);
    Launch(Find(plan.packs ? Family::kPackLists : Family::kPlanLpt), plan.lpt_grid, lpt, stream);
}

void Device::Lite(const LitePlan& plan, const DenseRequest& request, const LiteStep& step,
                  void* workspace, hip::Stream stream) const {
    const DenseShape& s = plan.shape;
    std::vector<std::string> reasons;
    CheckTensors(reasons, s, request, workspace);
    if (!step.read) reasons.emplace_back("read has no memory");
    if (!step.write) reasons.emplace_back("write has no memory");
    if (!(step.threshold <= 0.0))
        reasons.push_back("threshold must be <= 0, got " + std::to_string(step.threshold));
    const bool weighs = plan.weights_bytes > 0;
    if (!(step.budget >= 0.0 && step.budget < 1.0) || weighs != (step.budget > 0.0))
        reasons.push_back("budget must be " +
                          std::string(weighs ? "above 0 and below 1" : "0 in a plan without one") +
                          ", got " + std::to_string(step.budget));
    const int64_t mask_bytes = plan.words * 4, list_bytes = plan.tiles * mask_bytes;
    // Workgroups write rows of it while others have yet to read theirs.
    const int64_t apart =
        reinterpret_cast<intptr_t>(step.write) - reinterpret_cast<intptr_t>(step.read);
    if (step.read && step.write && -list_bytes < apart && apart < list_bytes)
        reasons.emplace_back("write must not overlap read");
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    char* const base = static_cast<char*>(workspace);
    auto* const v_t = reinterpret_cast<uint16_t*>(base + plan.v_t_offset);
    auto* const order = plan.slots ? reinterpret_cast<int32_t*>(base + plan.order_offset) : nullptr;
    auto* const counts =
        plan.slots ? reinterpret_cast<int32_t*>(base + plan.counts_offset) : nullptr;
    auto* const weights =
        weighs ? reinterpret_cast<uint32_t*>(base + plan.weights_offset) : nullptr;
    const auto of_cuts = [&]<class T>(int64_t offset) {
        return plan.cuts ? reinterpret_cast<T*>(base + offset) : nullptr;
    };
    auto* const parts = of_cuts.operator()<ListPart>(plan.parts_offset);
    auto* const cuts = of_cuts.operator()<CutList>(plan.cuts_offset);
    auto* const part_out = of_cuts.operator()<float>(plan.part_out_offset);
    auto* const part_stats = of_cuts.operator()<float>(plan.part_stats_offset);
    auto* const part_weights = of_cuts.operator()<uint32_t>(plan.part_weights_offset);

    const hip::CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_, stream);
    TouchTensors(touched, s, request);
    touched.Add("read", step.read, list_bytes);
    touched.Add("write", step.write, list_bytes);
    touched.Add("must_do", step.must_do, mask_bytes);
    touched.Add("must_skip", step.must_skip, mask_bytes);
    touched.Add("the workspace", v_t, VtBytes(s.batch, s.kv_heads, s.kv_len, s.head_dim));
    touched.Add("the workspace", order, plan.order_bytes);
    touched.Add("the workspace", counts, plan.counts_bytes);
    touched.Add("the workspace", weights, plan.weights_bytes);
    touched.Add("the workspace", parts, plan.parts_bytes);
    touched.Add("the workspace", cuts, plan.cuts_bytes);
    touched.Add("the workspace", part_out, PartOutBytes(kListParts, 1, s.head_dim));
    touched.Add("the workspace", part_stats, PartStatsBytes(kListParts, 1));
    touched.Add("the workspace", part_weights, ListWeightsBytes(s.kv_len));
    touched.Add("mass", step.mass, plan.weights_bytes);
    touched.Add("limits", weighs ? step.limits : nullptr, s.q_heads * 4);

    TransposeV(s, plan.transpose_grid, request, v_t, stream);

    if (order) Order(plan, step, order, counts, parts, cuts, stream);

    if (!weighs) {
        auto lite = StepParams<LiteParams>(s, request, v_t, step, order);
        lite.write = step.write;
        lite.threshold = static_cast<float>(step.threshold);
        lite.soft_skip = step.soft_skip;
        Launch(Find(Family::kLite, s.head_dim, request.number), plan.lite_grid, lite, stream);
        return;
    }
    auto weigh = StepParams<WeighParams>(s, request, v_t, step, order);
    weigh.weights = weights;
    weigh.parts = parts;
    weigh.part_out = part_out;
    weigh.part_stats = part_stats;
    weigh.part_weights = part_weights;
    Launch(Find(Family::kWeigh, s.head_dim, request.number), plan.lite_grid, weigh, stream);

    if (plan.cuts) {
        MergeListsParams merge{};
        merge.cuts = cuts;
        merge.part_out = part_out;
        merge.part_stats = part_stats;
        merge.part_weights = part_weights;
        merge.out = request.out;
        merge.lse = request.lse;
        merge.weights = weights;
        merge.out_strides = request.out_strides;
        merge.q_heads = Int(s.q_heads);
        merge.q_len = Int(s.q_len);
        merge.kv_len = Int(s.kv_len);
        merge.head_dim = Int(s.head_dim);
        merge.scale_log2 = weigh.scale_log2;
        Launch(Find(Family::kMergeLists, 0, request.number), plan.merge_grid, merge, stream);
    }

    const Divider heads = DividerOf(Int(s.q_heads)), blocks = DividerOf(Int(QBlocks(s.q_len)));
    SelectParams select{};
    select.weights = weights;
    select.read = step.read;
    select.write = step.write;
    select.must_do = step.must_do;
    select.must_skip = step.must_skip;
    select.mass = step.mass;
    select.limits = step.limits;
    select.kv_len = Int(s.kv_len);
    select.limit = static_cast<uint32_t>(std::floor(step.budget * kMassUnit));
    select.q_heads = Int(s.q_heads);
    select.head_multiplier = heads.multiplier;
    select.head_shift = heads.shift;
    select.block_multiplier = blocks.multiplier;
    select.block_shift = blocks.shift;
    Launch(Find(Family::kSelectTiles), plan.select_grid, select, stream);
}

void Device::PlanLpt(const LitePlan& plan, const LiteStep& step, int32_t* order, int32_t* counts,
                     ListPart* parts, CutList* cuts, hip::Stream stream) const {
    std::vector<std::string> reasons;
    if (!plan.slots)
        reasons.emplace_back(
            "each tile has a compute unit of its own, or the order would have more positions than "
            "a launch has workgroups");
    if (!step.read) reasons.emplace_back("read has no memory");
    if (!order) reasons.emplace_back("order has no memory");
    if (!counts) reasons.emplace_back("counts have no memory");
    if (plan.cuts && !(parts && cuts)) reasons.emplace_back("parts or cuts have no memory");
    if (!reasons.empty()) Refuse("no order of these tiles", reasons);

    const hip::CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_, stream);
    const int64_t mask_bytes = plan.words * 4;
    touched.Add("read", step.read, plan.tiles * mask_bytes);
    touched.Add("must_do", step.must_do, mask_bytes);
    touched.Add("must_skip", step.must_skip, mask_bytes);
    touched.Add("order", order, plan.order_bytes);
    touched.Add("counts", counts, plan.counts_bytes);
    if (plan.cuts) {
        touched.Add("parts", parts, plan.parts_bytes);
        touched.Add("cuts", cuts, plan.cuts_bytes);
    }
    Order(plan, step, order, counts, plan.cuts ? parts : nullptr, plan.cuts ? cuts : nullptr,
          stream);
}

}  // namespace liteattention::gfx942
