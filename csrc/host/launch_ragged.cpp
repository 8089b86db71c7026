// Launches of ragged attention and of cache writes.
#include <numbers>

#include "launch.h"
#include "tensors.h"

namespace liteattention::gfx942 {

void Device::Ragged(const RaggedPlan& plan, const RaggedRequest& request, void* workspace,
                    hip::Stream stream) const {
    const RaggedShape& s = plan.shape;
    const RaggedStage &prefill = plan.prefill, &decode = plan.decode;
    if (decode.grid == 0 && prefill.grid == 0) return;
    const bool fp8 = s.element_bytes == kFp8Bytes;
    const bool paged = s.page_size > 0;
    std::vector<std::string> reasons;
    const auto needed = [&](const char* name, const void* pointer) {
        if (!pointer) reasons.push_back(std::string(name) + " has no memory");
    };
    CheckRows(reasons, "q", request.q, request.q_strides, s.rows, s.q_heads);
    CheckRows(reasons, "out", request.out, request.out_strides, s.rows, s.q_heads);
    if (request.pages > 0 && request.page_rows > 0) {
        CheckPages(reasons, "k", request.k, request.k_strides, request.pages, request.page_rows,
                   s.kv_heads, s.element_bytes);
        CheckPages(reasons, "v", request.v, request.v_strides, request.pages, request.page_rows,
                   s.kv_heads, s.element_bytes);
    }
    needed("q_start", request.q_start);
    if (paged) {
        needed("kv_len", request.kv_len);
        if (request.table_width > 0) needed("page_table", request.page_table);
    } else {
        needed("kv_start", request.kv_start);
    }
    CheckScales(reasons, request.k_scale_at, request.v_scale_at, fp8);
    if (plan.workspace_bytes > 0) CheckWorkspace(reasons, workspace);
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    // Multiplied in the order of the kernels, which have the scale of keys from memory.
    const double scale_wide = request.scale * std::numbers::log2e;
    const double log2_scale = scale_wide * request.k_scale;
    const Divider pages = DividerOf(Int(s.page_size));
    const Divider group = DividerOf(Int(s.q_heads / s.kv_heads));
    RaggedParams params{};
    params.q = request.q;
    params.k = request.k;
    params.v = request.v;
    params.out = request.out;
    params.lse = request.lse;
    params.sinks = request.sinks;
    params.q_start = request.q_start;
    params.kv_len = request.kv_len;
    params.kv_start = request.kv_start;
    // By its address kernels know that there are pages, but PyTorch gives an empty table none.
    params.page_table = paged && request.table_width == 0 ? request.kv_len : request.page_table;
    const auto parts_of = [&](const RaggedStage& stage, float*& out, float*& stats) {
        if (stage.parts == 0) return;
        char* const base = static_cast<char*>(workspace);
        out = reinterpret_cast<float*>(base + stage.out_offset);
        stats = reinterpret_cast<float*>(base + stage.stats_offset);
    };
    parts_of(decode, params.part_out, params.part_stats);
    parts_of(prefill, params.prefill_out, params.prefill_stats);
    params.k_scale_at = request.k_scale_at;
    params.v_scale_at = request.v_scale_at;
    params.q_strides = request.q_strides;
    params.out_strides = request.out_strides;
    params.k_strides = request.k_strides;
    params.v_strides = request.v_strides;
    params.page_table_stride = request.page_table_stride;
    params.lse_stride = s.rows;
    params.scale_wide = scale_wide;
    params.requests = Int(s.requests);
    params.rows = Int(s.rows);
    params.q_heads = Int(s.q_heads);
    params.kv_heads = Int(s.kv_heads);
    params.page_size = Int(s.page_size);
    params.page_multiplier = pages.multiplier;
    params.page_shift = pages.shift;
    params.lookahead = Int(s.lookahead);
    params.window = Int(s.window);
    params.splits = Int(decode.splits);
    params.scale_log2 = static_cast<float>(log2_scale);
    if (request.soft_cap > 0.0) {
        params.cap_log2 = static_cast<float>(request.soft_cap * std::numbers::log2e);
        params.cap_ratio = 2.0 / request.soft_cap;
        params.cap_factor = static_cast<float>(log2_scale * params.cap_ratio);
    }
    params.head_dim = Int(s.head_dim);
    params.group_multiplier = group.multiplier;
    params.group_shift = group.shift;
    params.v_scale = static_cast<float>(request.v_scale);
    params.prefill_splits = Int(prefill.splits);
    params.prefill_room = Int(plan.prefill_room);
    params.prefill_blocks = Int(plan.prefill_blocks);

    const hip::CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_, stream);
    touched.Add("q", request.q, request.q_strides, s.rows, s.q_heads, s.head_dim);
    touched.Add("out", request.out, request.out_strides, s.rows, s.q_heads, s.head_dim);
    if (request.pages > 0 && request.page_rows > 0) {
        touched.Add("k", request.k, request.k_strides, request.pages, request.page_rows, s.kv_heads,
                    s.head_dim, s.element_bytes);
        touched.Add("v", request.v, request.v_strides, request.pages, request.page_rows, s.kv_heads,
                    s.head_dim, s.element_bytes);
    }
    touched.Add("lse", request.lse, s.q_heads * s.rows * 4);
    touched.Add("sinks", request.sinks, s.q_heads * 4);
    touched.Add("k_scale", request.k_scale_at, sizeof(float));
    touched.Add("v_scale", request.v_scale_at, sizeof(float));
    touched.Add("q_start", request.q_start, (s.requests + 1) * 4);
    touched.Add("kv_len", request.kv_len, s.requests * 4);
    touched.Add("kv_start", request.kv_start, (s.requests + 1) * 4);
    if (request.table_width > 0)
        touched.Add("page_table", request.page_table,
                    ((s.requests - 1) * request.page_table_stride + request.table_width) * 4);
    touched.Add("the workspace", params.part_out, DecodeOutBytes(decode.parts, s.head_dim));
    touched.Add("the workspace", params.part_stats, DecodeStatsBytes(decode.parts));
    touched.Add("the workspace", params.prefill_out, PrefillOutBytes(prefill.parts, s.head_dim));
    touched.Add("the workspace", params.prefill_stats,
                PrefillStatsBytes(prefill.parts, s.head_dim));

    // Each kernel leaves the other's requests alone, so only a merge has to wait for its parts.
    const Cache cache = fp8 ? Cache::kFp8 : Cache::kSame;
    const auto launch = [&](Family family, int64_t dim, Cache holds, int64_t grid) {
        if (grid > 0) Launch(Find(family, dim, request.number, holds), grid, params, stream);
    };
    launch(Family::kPrefill, s.head_dim, cache, prefill.grid);
    launch(Family::kDecode, s.head_dim, cache, decode.grid);
    launch(Family::kMergePrefill, 0, Cache::kSame, prefill.merge_grid);
    launch(Family::kMergeDecode, 0, Cache::kSame, decode.merge_grid);
}

void Device::WriteKv(const WriteKvRequest& request, hip::Stream stream) const {
    if (request.rows == 0) return;
    const int64_t cache_bytes = request.cache == Cache::kFp8 ? kFp8Bytes : kSameBytes;
    std::vector<std::string> reasons;
    CheckRows(reasons, "k", request.k, request.k_strides, request.rows, request.kv_heads);
    CheckRows(reasons, "v", request.v, request.v_strides, request.rows, request.kv_heads);
    CheckPages(reasons, "k_cache", request.k_cache, request.k_cache_strides, request.pages,
               request.page_size, request.kv_heads, cache_bytes);
    CheckPages(reasons, "v_cache", request.v_cache, request.v_cache_strides, request.pages,
               request.page_size, request.kv_heads, cache_bytes);
    if (!request.slots) reasons.emplace_back("slots has no memory");
    CheckScales(reasons, request.k_scale_at, request.v_scale_at, request.cache == Cache::kFp8);
    if (request.head_dim < kMergeVector || request.head_dim % kMergeVector)
        reasons.push_back("head dim must be a multiple of " + std::to_string(kMergeVector) +
                          ", got " + std::to_string(request.head_dim));
    if (static_cast<__int128>(request.pages) * request.page_size > int64_t{1} << 31)
        reasons.emplace_back("the cache must hold at most 2^31 tokens");
    if (static_cast<__int128>(request.rows) * request.kv_heads * request.head_dim / kMergeVector >
        MaxGrid(1))
        reasons.emplace_back("its elements must be fewer than 8 times 2^32");
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot write this cache", reasons);

    const Divider pages = DividerOf(Int(request.page_size));
    WriteKvParams params{};
    params.k = request.k;
    params.v = request.v;
    params.k_cache = request.k_cache;
    params.v_cache = request.v_cache;
    params.slots = request.slots;
    params.k_scale_at = request.k_scale_at;
    params.v_scale_at = request.v_scale_at;
    params.k_strides = request.k_strides;
    params.v_strides = request.v_strides;
    params.k_cache_strides = request.k_cache_strides;
    params.v_cache_strides = request.v_cache_strides;
    params.rows = Int(request.rows);
    params.kv_heads = Int(request.kv_heads);
    params.head_dim = Int(request.head_dim);
    params.page_size = Int(request.page_size);
    params.page_multiplier = pages.multiplier;
    params.page_shift = pages.shift;
    params.wide = request.wide;
    params.k_scale = static_cast<float>(request.k_scale);
    params.v_scale = static_cast<float>(request.v_scale);

    const hip::CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_, stream);
    touched.Add("k", request.k, request.k_strides, request.rows, request.kv_heads,
                request.head_dim);
    touched.Add("v", request.v, request.v_strides, request.rows, request.kv_heads,
                request.head_dim);
    touched.Add("k_cache", request.k_cache, request.k_cache_strides, request.pages,
                request.page_size, request.kv_heads, request.head_dim, cache_bytes);
    touched.Add("v_cache", request.v_cache, request.v_cache_strides, request.pages,
                request.page_size, request.kv_heads, request.head_dim, cache_bytes);
    touched.Add("k_scale", request.k_scale_at, sizeof(float));
    touched.Add("v_scale", request.v_scale_at, sizeof(float));
    touched.Add("slots", request.slots, request.rows * (request.wide ? 8 : 4));
    const Number number = request.cache == Cache::kSame ? Number::kAny : request.number;
    Launch(Find(Family::kWriteKv, 0, number, request.cache),
           WriteKvGrid(request.rows, request.kv_heads, request.head_dim), params, stream);
}

}  // namespace liteattention::gfx942
