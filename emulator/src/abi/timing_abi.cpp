// C functions of the timing model: its constants, and the replay of recorded streams.
#include <cstdio>
#include <cstring>
#include <vector>

#include "abi/hip_types.h"
#include "abi/json.h"
#include "abi/text.h"
#include "timing/compute_unit.h"

namespace emulator {
namespace {

std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", value);
    return text;
}

std::string idle_json(const timing::Account& account) {
    Members rows;
    for (size_t i = 0; i < account.by_instruction().size(); ++i)
        for (size_t cause = 0; cause < timing::kCauses; ++cause) {
            const double clocks = account.by_instruction()[i][cause];
            if (clocks)
                rows.item("[" + std::to_string(i) + "," +
                          quoted(timing::name_of(static_cast<timing::Cause>(cause))) + "," +
                          number(clocks) + "]");
        }
    return rows.list();
}

}  // namespace
}  // namespace emulator

using namespace emulator;

// [[name, value, unit, low, high, source], ...] in the order in which lae_replay takes values.
EXPORT char* lae_timing_constants() {
    return text_of([] {
        Members rows;
        for (const timing::Entry& entry : timing::table())
            rows.item("[" + quoted(entry.name) + "," + number(entry.value) + "," +
                      quoted(entry.unit) + "," + number(entry.low) + "," + number(entry.high) +
                      "," + quoted(entry.source) + "]");
        return rows.list();
    });
}

// Replays streams over machine code (timing/compute_unit.h):
//   steps, counts          Steps of each wave, and how many
//   lines, line_counts     128-byte lines of each wave, and how many
//   workgroups             of each wave, from 0: which one of those on the CU it belongs to
//   window                 wave, first step, step behind the last: what is accounted for
//   constants              values of all of them, in the table's order
//   issued                 out: of each wave the clk at which each step issued
// {"clocks", "begin", "end", "matrix", "lds_busy", "address_busy", "l1_hits",
//  "l1_misses", "flight": [asked, fetched, asked_clocks, fetched_clocks], "idle": [[instruction,
//  cause, clk], ...]}, clk of all four SIMDs together
EXPORT char* lae_replay(const void* text, size_t bytes, uint32_t accum_offset, uint32_t waves,
                        const Step* const* steps, const size_t* counts,
                        const uint64_t* const* lines, const size_t* line_counts,
                        const size_t* workgroups, const size_t* window, const double* constants,
                        size_t constant_count, int64_t* const* issued) {
    return text_of([&] {
        const auto table = timing::Constants::of({constants, constant_count});
        const Code code = decode(static_cast<const uint8_t*>(text), bytes);
        std::vector<timing::WaveSteps> streams;
        for (uint32_t i = 0; i < waves; ++i)
            streams.push_back({{steps[i], counts[i]}, {lines[i], line_counts[i]}, workgroups[i]});
        const timing::Result result = timing::replay(timing::describe(code, accum_offset), streams,
                                                     {window[0], window[1], window[2]}, table);
        for (uint32_t i = 0; i < waves; ++i)
            if (!result.issued[i].empty())
                std::memcpy(issued[i], result.issued[i].data(), 8 * result.issued[i].size());
        Members out;
        out.field("clocks", static_cast<uint64_t>(result.clocks));
        out.field("begin", static_cast<uint64_t>(result.begin));
        out.field("end", static_cast<uint64_t>(result.end));
        out.field("matrix", number(result.matrix));
        out.field("lds_busy", number(result.lds_busy));
        out.field("address_busy", number(result.address_busy));
        out.field("l1_hits", result.l1_hits);
        out.field("l1_misses", result.l1_misses);
        const timing::Flight& flight = result.flight;
        out.field("flight", "[" + number(flight.asked) + "," + number(flight.fetched) + "," +
                                number(flight.asked_clocks) + "," + number(flight.fetched_clocks) +
                                "]");
        out.field("idle", idle_json(result.account));
        return out.object();
    });
}
