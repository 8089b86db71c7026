// Merges the parts of attention_prefill (merge_state.h: MergeRow), one row per 8 .. 32 threads.
//
// Road map: a workgroup has a run of outputs of one tile of one (request, kv head), row after row;
// a thread owns 8 neighbouring outputs of one row. It finds the request and how many parts
// the tile has as attention_prefill does. Tiles of one part are done already. Nothing is shared.
// Budget: VGPR 72, LDS 0.

#include "cache.h"
#include "merge_state.h"
#include "params.h"
#include "ragged.h"

namespace liteattention::gfx942 {

template <class Number>
LITE_DEVICE void MergePrefill(const RaggedParams& p) {
    const int32_t tile_rows = PrefillRows(p.head_dim), keys = PrefillKeys(p.head_dim);
    const uint32_t pieces = static_cast<uint32_t>(MergePrefillPieces(p.head_dim));
    const uint32_t row_threads = static_cast<uint32_t>(p.head_dim) / kMergeVector;
    const int32_t group = UniformInt(p.q_heads / p.kv_heads);
    const uint32_t slots =
        static_cast<uint32_t>(p.rows * group) / static_cast<uint32_t>(tile_rows) +
        static_cast<uint32_t>(p.requests);
    const uint32_t bound =
        static_cast<uint32_t>(MergePrefillTiles(slots, static_cast<int64_t>(p.prefill_room)));
    const uint32_t tile = WorkgroupId() / pieces, lane = ThreadId() % kWaveSize;
    const int32_t kv_head = UniformInt(tile / bound), number = UniformInt(tile % bound);
    const PartsRule rule = PartsRuleOf(p, group, tile_rows, keys, lane);
    if (number >= rule.tiles) return;
    const Slot slot = FindTile(p, number, group, tile_rows, lane);
    const Request request = RequestOf(p, slot.request);
    const PackedRows rows{
        slot.tile * tile_rows, request.q_len * group, {p.group_multiplier, p.group_shift}, group};
    const auto seen = [&](int32_t row) {
        return SeenBy(p, request, rows.Query(rows.Existing(row)));
    };
    const BlockRange blocks = BlocksOf(seen(rows.first), seen(rows.first + tile_rows - 1), keys);
    const int32_t parts = PrefillPartsOf(blocks.end - blocks.begin, rule.blocks, rule.splits);
    if (parts == 1) return;

    const uint32_t thread = WorkgroupId() % pieces * kMergeRaggedThreads + ThreadId();
    const int32_t of_tile = static_cast<int32_t>(thread / row_threads);
    const int32_t dim = static_cast<int32_t>(thread % row_threads * kMergeVector);
    const int32_t row = rows.first + of_tile;
    if (row >= rows.rows) return;
    const int64_t first = static_cast<int64_t>(kv_head) * p.prefill_room + number * rule.splits;
    const int32_t query = rows.Query(row);
    // Scores with a soft cap are in log2 units already. A cache's scale, if there is one in memory,
    // is that of a cache of fp8.
    const float c =
        p.cap_log2 != 0.0f ? 1.0f : Factor(ScoreFactorsOf<Fp8Cache<Number>>(p).scale_log2);
    MergeRow<Number>(p, c, parts, p.prefill_stats + first * 2 * tile_rows + of_tile,
                     p.prefill_out + (first * tile_rows + of_tile) * p.head_dim + dim, tile_rows,
                     static_cast<int64_t>(request.first_row) + query,
                     kv_head * group + row - query * group, dim);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_MERGE_PREFILL(name, Number) \
    LITE_KERNEL(kMergeRaggedThreads, 4) name(const RaggedParams p) { MergePrefill<Number>(p); }
#include "variants.def"
