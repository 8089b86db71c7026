// Requests of a ragged batch: which one a tile belongs to, and which keys a row of it sees.
#pragma once

#include "isa.h"
#include "params.h"

namespace liteattention::gfx942 {

// All scalar.
struct Request {
    int32_t number;
    int32_t first_row;  // in q, out and lse
    int32_t q_len, kv_len;
};

LITE_DEVICE Request RequestOf(const RaggedParams& p, int32_t number) {
    const auto scalar = [](int32_t x) {
        return static_cast<int32_t>(Uniform(static_cast<uint32_t>(x)));
    };
    Request r;
    r.number = number;
    r.first_row = scalar(p.q_start[number]);
    r.q_len = scalar(p.q_start[number + 1]) - r.first_row;
    r.kv_len = p.kv_start ? scalar(p.kv_start[number + 1]) - scalar(p.kv_start[number])
                          : scalar(p.kv_len[number]);
    return r;
}

// The request whose tiles of `tile_rows` rows begin at or before number `slot` (PrefillBegin), and
// where they begin; rows count from the first request's. A wave tries 64 requests at a time: two
// loads, one behind the other, among up to 4096.
struct Slot {
    int32_t request;
    int32_t tile;  // of the request; may be past its last
};
LITE_DEVICE Slot FindSlot(const RaggedParams& p, int32_t slot, int32_t group, int32_t tile_rows,
                          uint32_t lane) {
    int32_t first = 0, count = p.requests;  // the last request that begins by then is in here
    int32_t begin = 0;                      // of request `first`
    const int32_t lead = static_cast<int32_t>(Uniform(static_cast<uint32_t>(p.q_start[0])));
    while (count > 1) {
        const int32_t step = (count + kWaveSize - 1) / kWaveSize;
        const int32_t ahead = static_cast<int32_t>(lane) * step;
        const int32_t mine = first + (ahead < count ? ahead : 0);
        const int32_t mine_begin =
            static_cast<int32_t>(static_cast<uint32_t>((p.q_start[mine] - lead) * group) /
                                 static_cast<uint32_t>(tile_rows)) +
            mine;
        const uint64_t by_then = Lanes(ahead < count && mine_begin <= slot);
        const int32_t found = __builtin_popcountll(by_then) - 1;
        first += found * step;
        begin = OfLane(mine_begin, found);
        count = count - found * step < step ? count - found * step : step;
    }
    return {first, slot - begin};
}

// Keys `begin` .. `end` - 1 are what query `query` (0 .. q_len - 1) of a request sees; none where
// end <= begin.
struct Seen {
    int32_t begin, end;
};
LITE_DEVICE Seen SeenBy(const RaggedParams& p, const Request& r, int32_t query) {
    const int32_t next = r.kv_len - r.q_len + query + 1;  // the position after the query's own
    const int32_t low = next - p.window, high = next + p.lookahead;
    Seen seen;
    seen.begin = p.window > 0 && low > 0 ? low : 0;
    seen.end = __builtin_elementwise_min(__builtin_elementwise_max(high, 0), r.kv_len);
    return seen;
}

// A tile of attention_prefill, of one (request, kv head): rows `first` .. `rows` - 1 of its packed
// rows, at most PrefillRows of them.
struct PackedRows {
    int32_t first, rows;
    Divider group;
    int32_t heads;  // of the group

    // Query and head within the group of packed row `row`; rows past the end repeat the last one.
    LITE_DEVICE int32_t Existing(int32_t row) const { return row < rows ? row : rows - 1; }
    LITE_DEVICE int32_t Query(int32_t row) const {
        return static_cast<int32_t>(Divide(static_cast<uint32_t>(row), group));
    }
};

// K blocks `begin` .. `end` - 1, and of them `full_begin` .. `full_end` - 1 with all their keys.
struct BlockRange {
    int32_t begin, end, full_begin, full_end;

    LITE_DEVICE bool Full(int32_t block) const { return block >= full_begin && block < full_end; }
};

// What rows that see keys from `first.begin` (the first of them) to `last.end` (the last of them)
// visit: both bounds grow from row to row.
LITE_DEVICE BlockRange BlocksOf(const Seen& first, const Seen& last, int32_t keys) {
    BlockRange range;
    range.begin = first.begin / keys;
    range.end = last.end > first.begin ? (last.end + keys - 1) / keys : range.begin;
    range.full_begin = (last.begin + keys - 1) / keys;
    range.full_end = first.end / keys;
    return range;
}

// Tiles of `tile_rows` rows of one (request, kv head) of attention_prefill; requests of few rows
// have none.
LITE_DEVICE uint32_t TilesOfRequest(const RaggedParams& p, int32_t request, int32_t group,
                                    int32_t tile_rows) {
    if (request >= p.requests) return 0;
    const int32_t q_len = p.q_start[request + 1] - p.q_start[request];
    if (IsDecode(q_len, group)) return 0;
    return static_cast<uint32_t>(q_len * group + tile_rows - 1) / static_cast<uint32_t>(tile_rows);
}

// How the tiles of a batch are cut into parts: PrefillSplitsOf, PrefillPartsOf.
struct PartsRule {
    int32_t tiles;   // of a kv head
    int32_t splits;  // parts of a tile at most
    int32_t blocks;  // K blocks of a part at least
};

// From the lengths, which only the device knows, of 64 requests at a time.
LITE_DEVICE PartsRule PartsRuleOf(const RaggedParams& p, int32_t group, int32_t tile_rows,
                                  int32_t keys, uint32_t lane) {
    uint32_t sum = 0, longest = 0;
    for (int32_t request = static_cast<int32_t>(lane); request < p.requests; request += kWaveSize) {
        const uint32_t tiles = TilesOfRequest(p, request, group, tile_rows);
        const int32_t kv_len =
            p.kv_start ? p.kv_start[request + 1] - p.kv_start[request] : p.kv_len[request];
        const uint32_t length = tiles > 0 && kv_len > 0 ? static_cast<uint32_t>(kv_len) : 0;
        sum += tiles;
        longest = length > longest ? length : longest;
    }
    longest = LastLane(OverWave(longest, [](uint32_t a, uint32_t b) { return a > b ? a : b; }));
    if (p.window > 0) {
        // A tile sees a window before its first query, what lies between its queries, and what its
        // last one sees ahead.
        const uint32_t span =
            static_cast<uint32_t>(p.window) + static_cast<uint32_t>(p.lookahead) +
            Divide(static_cast<uint32_t>(tile_rows - 1), {p.group_multiplier, p.group_shift});
        longest = span < longest ? span : longest;
    }
    PartsRule rule;
    rule.tiles = static_cast<int32_t>(LastLane(SumUpTo(sum)));
    rule.splits = UniformInt(PrefillSplitsOf(rule.tiles, p.prefill_room, p.prefill_splits));
    rule.blocks = 1;
    if (p.prefill_blocks > 0) {
        const uint32_t part_keys = static_cast<uint32_t>(keys * rule.splits);
        const int32_t blocks = UniformInt((longest + part_keys - 1) / part_keys);
        rule.blocks = blocks > p.prefill_blocks ? blocks : p.prefill_blocks;
    }
    return rule;
}

// Tile `number` among them, which must exist.
LITE_DEVICE Slot FindTile(const RaggedParams& p, int32_t number, int32_t group, int32_t tile_rows,
                          uint32_t lane) {
    int32_t before = 0, first = 0;
    while (true) {
        const uint32_t tiles =
            TilesOfRequest(p, first + static_cast<int32_t>(lane), group, tile_rows);
        const int32_t end = before + static_cast<int32_t>(SumUpTo(tiles));
        const uint64_t behind = Lanes(end > number);
        if (behind) {
            const int32_t found = __builtin_ctzll(behind);
            return {first + found, number - OfLane(end - static_cast<int32_t>(tiles), found)};
        }
        before = OfLane(end, kWaveSize - 1);
        first += kWaveSize;
    }
}

// A part of a tile, or a tile of a batch without parts.
struct PrefillItem {
    Slot slot;
    PartsRule rule;
    int32_t first_part;  // the tile's, among those of its kv head
    int32_t part;
};

// The item of the workgroup that has number `place` of `items` within a kv head. Workgroups start
// from the highest number down (PrefillTileOf). False if it has none. First come the last parts of
// all tiles, then those before them, so that whole tiles, which are short where others have parts,
// come at the end. Neighbours differ in their tiles: so XCDs have as many parts each, though short
// tiles have fewer of them.
LITE_DEVICE bool FindItem(const RaggedParams& p, int32_t place, int32_t items, int32_t group,
                          int32_t tile_rows, int32_t keys, uint32_t lane, PrefillItem& item) {
    if (p.prefill_splits > 1) {
        item.rule = PartsRuleOf(p, group, tile_rows, keys, lane);
        const int32_t tiles = item.rule.tiles, index = place - (items - tiles * item.rule.splits);
        if (index < 0) return false;
        item.part = UniformInt(index / tiles);
        const int32_t number = index - item.part * tiles;
        item.first_part = number * item.rule.splits;
        item.slot = FindTile(p, number, group, tile_rows, lane);
    } else {
        item.rule = {0, 1, 1};
        item.first_part = item.part = 0;
        item.slot = FindSlot(p, place, group, tile_rows, lane);
    }
    return true;
}

}  // namespace liteattention::gfx942
