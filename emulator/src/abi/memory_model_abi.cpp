// C functions for Python: the memory model of the chip. They keep no state.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/hip_types.h"
#include "abi/json.h"
#include "abi/text.h"
#include "memory_model/block_cache.h"
#include "memory_model/chip.h"

namespace emulator {
namespace {

std::string json_of(const LevelCounts& counts) {
    Members out;
    out.field("reads", counts.reads);
    out.field("hits", counts.hits);
    out.field("hits_on_miss", counts.hits_on_miss);
    out.field("misses", counts.misses);
    return out.object();
}

}  // namespace
}  // namespace emulator

using namespace emulator;

// Runs a launch of `count` workgroups, reads = uint64 [count][3]: first block, stride, blocks. The
// counts as chip.h says, or null.
EXPORT char* lae_run_chip(const char* parameters, const uint64_t* reads, size_t count,
                          size_t warm_up, int stop_at_drain) {
    return text_of([&] {
        const ChipParameters chip = chip_parameters(parameters);
        std::vector<BlockReads> workgroups(count);
        for (size_t i = 0; i < count; ++i) {
            if (reads[3 * i + 2] == 0 || reads[3 * i + 2] > UINT32_MAX)
                throw std::invalid_argument("workgroup " + std::to_string(i) +
                                            " must read 1 to 4294967295 blocks");
            workgroups[i] = {reads[3 * i], reads[3 * i + 1],
                             static_cast<uint32_t>(reads[3 * i + 2])};
        }
        const ChipCounts counts =
            run_chip(chip, workgroups.data(), count, warm_up, stop_at_drain != 0);
        Members out, l2;
        for (const LevelCounts& each : counts.l2) l2.item(json_of(each));
        out.field("clocks", std::to_string(counts.clocks));
        out.field("steps", counts.steps);
        out.field("compute_clocks", std::to_string(counts.compute_clocks));
        out.field("l2", l2.list());
        out.field("cache", json_of(counts.cache));
        out.field("started", counts.started);
        out.field("whole", std::string(counts.whole ? "true" : "false"));
        return out.object();
    });
}

// Sets hits[i] to 1 where access i of a trace hits in a cache that was empty before it, else to 0.
// 0, or -1 for a cache without sets or ways.
EXPORT int lae_trace_cache(uint64_t sets, uint32_t ways, const uint64_t* blocks, size_t count,
                           uint8_t* hits) {
    if (sets == 0 || sets > UINT32_MAX || ways == 0) return -1;
    BlockCache cache(sets, ways);
    for (size_t i = 0; i < count; ++i) hits[i] = cache.access(blocks[i]).hit;
    return 0;
}
