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
    const int32_t low = next - p.window;
    Seen seen;
    seen.begin = p.window > 0 && low > 0 ? low : 0;
    seen.end = p.causal ? (next > 0 ? next : 0) : r.kv_len;
    return seen;
}

}  // namespace liteattention::gfx942
