// Merges the parts of attention_decode (merge_state.h: MergeRow), one row per 8 .. 32 threads.
//
// Road map: a thread owns 8 neighbouring outputs of one row of one (request, kv head); the 16 rows
// of a tile follow each other. How many parts a request has is computed from its lengths as
// attention_decode does, so parts that nobody wrote are not read; requests of one part are done
// already. The sink, one more score without a value, is added here. Nothing is shared. Budget: VGPR
// 72, LDS 0.

#include "merge_state.h"
#include "params.h"

namespace liteattention::gfx942 {

template <class Number>
LITE_DEVICE void MergeDecode(const RaggedParams& p) {
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const uint32_t id = WorkgroupId() * kMergeRaggedThreads + ThreadId();
    const int32_t dim = static_cast<int32_t>(id % row_threads * kMergeVector);
    const int32_t row = static_cast<int32_t>(id / row_threads % kDecodeRows);
    const uint32_t tile = id / (row_threads * kDecodeRows);
    const int32_t kv_head = static_cast<int32_t>(tile % static_cast<uint32_t>(p.kv_heads));
    const int32_t request = static_cast<int32_t>(tile / static_cast<uint32_t>(p.kv_heads));
    if (request >= p.requests) return;

    const int32_t group = p.q_heads / p.kv_heads;
    const int32_t q_begin = p.q_start[request], q_len = p.q_start[request + 1] - q_begin;
    if (!IsDecode(q_len, group) || row >= q_len * group) return;
    const int32_t kv_len =
        p.page_table ? p.kv_len[request] : p.kv_start[request + 1] - p.kv_start[request];
    const int32_t parts =
        DecodeWorkOf(q_len, kv_len, p.window, p.splits, DecodeKeys(p.head_dim)).parts;
    if (parts == 1) return;

    const int64_t first = static_cast<int64_t>(tile) * p.splits;
    const int32_t query = static_cast<int32_t>(
        Divide(static_cast<uint32_t>(row), {p.group_multiplier, p.group_shift}));
    MergeRow<Number>(p, 1.0f, parts, p.part_stats + first * 2 * kDecodeRows + row,
                     p.part_out + (first * kDecodeRows + row) * p.head_dim + dim, kDecodeRows,
                     static_cast<int64_t>(q_begin) + query, kv_head * group + row - query * group,
                     dim);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_DECODE(name, Number) \
    LITE_KERNEL(kMergeRaggedThreads, 4) name(const RaggedParams p) { MergeDecode<Number>(p); }
#include "variants.def"
