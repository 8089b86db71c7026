// Merges the parts of attention_decode: exact log-sum-exp merge, one row per 8 .. 32 threads.
//
//   M = max m_g    w_g = 2^(m_g - M)    out = sum w_g o_g / sum w_g l_g    lse = ln 2 (M + log2 ..)
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
    constexpr uint32_t kMinusInfinity = 0xff800000u;
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const uint32_t id = WorkgroupId() * kMergeDecodeThreads + ThreadId();
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
    const float* stats = p.part_stats + first * 2 * kDecodeRows + row;
    const float* part = p.part_out + (first * kDecodeRows + row) * p.head_dim + dim;
    const int64_t part_stride = static_cast<int64_t>(kDecodeRows) * p.head_dim;

    float top = FromBits(kMinusInfinity);
#pragma unroll 4
    for (int32_t g = 0; g < parts; ++g) top = __builtin_fmaxf(top, stats[g * 2 * kDecodeRows]);
    // No part saw a finite score: -inf - 0 rather than -inf + inf.
    const float shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));

    float sum = 0.0f;
    Float4 low = {}, high = {};
#pragma unroll 4  // four parts' loads in flight
    for (int32_t g = 0; g < parts; ++g) {
        const float weight = Exp2(stats[g * 2 * kDecodeRows] - shift);
        sum += weight * stats[g * 2 * kDecodeRows + kDecodeRows];
        const Float4* from = reinterpret_cast<const Float4*>(part + g * part_stride);
        low += from[0] * weight;
        high += from[1] * weight;
    }
    const int32_t query = static_cast<int32_t>(
        Divide(static_cast<uint32_t>(row), {p.group_multiplier, p.group_shift}));
    const int32_t head = kv_head * group + row - query * group;
    const int64_t at = static_cast<int64_t>(q_begin) + query;
    const RowResult result = Result(top, sum, p.sinks, head);
    low *= result.scale;
    high *= result.scale;
    uint16_t* out = p.out + at * p.out_strides.row + head * p.out_strides.head + dim;
    *reinterpret_cast<UnalignedWord4*>(out) =
        Word4{Number::Pair(low[0], low[1]), Number::Pair(low[2], low[3]),
              Number::Pair(high[0], high[1]), Number::Pair(high[2], high[3])};
    if (p.lse && dim == 0) p.lse[head * p.lse_stride + at] = result.lse;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_DECODE(name, Number) \
    LITE_KERNEL(kMergeDecodeThreads, 4) name(const RaggedParams p) { MergeDecode<Number>(p); }
#include "variants.def"
