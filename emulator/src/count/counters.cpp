#include "count/counters.h"

#include <algorithm>
#include <bit>

#include "isa/matrix.h"
#include "record/recorder.h"

namespace emulator {
namespace {

// LDS of CDNA3: 32 banks of 4 bytes, so a wave is served in phases of at most 128 bytes. Which
// lanes share a phase depends on the width: halves of the wave for up to 4 bytes, quarters for 8;
// 12 and 16 bytes take eight lanes a phase, for stores neighbouring ones, for loads two groups of
// four. Source: AMD's Composable Kernel documentation, "Understanding AMD GPU LDS and Bank
// Conflicts"; the eight phases of b96 loads and the four of b64 stores also stand in HipKittens
// (arXiv 2511.08083), table 5, whose 64-bank rows are CDNA4's.
struct Phase {
    uint64_t lanes[8];
    int count;
};

constexpr uint64_t four(int lane) { return 15ull << lane; }

constexpr Phase kHalves = {{0xffffffffull, 0xffffffffull << 32}, 2};
constexpr Phase kQuarters = {{0xffffull, 0xffffull << 16, 0xffffull << 32, 0xffffull << 48}, 4};
constexpr Phase kEighths = {{0xffull, 0xffull << 8, 0xffull << 16, 0xffull << 24, 0xffull << 32,
                             0xffull << 40, 0xffull << 48, 0xffull << 56},
                            8};
constexpr Phase kWideLoad = {
    {four(0) | four(20), four(4) | four(16), four(8) | four(28), four(12) | four(24),
     four(32) | four(52), four(36) | four(48), four(40) | four(60), four(44) | four(56)},
    8};

// The largest number of different dwords that the phase asks of one bank.
int ways(const uint32_t* address, uint64_t lanes, uint32_t dwords) {
    uint32_t banks = 0;
    bool shared = false;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint32_t first = address[std::countr_zero(left)] / 4;
        const uint32_t mask = std::rotl((1u << dwords) - 1, static_cast<int>(first & 31));
        shared |= (banks & mask) != 0;
        banks |= mask;
    }
    if (!shared) return 1;
    // Lanes at the same dword are served together: count the different ones of each bank.
    uint32_t different[32][kLanes];
    int uses[32] = {}, most = 1;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint32_t first = address[std::countr_zero(left)] / 4;
        for (uint32_t dword = first; dword < first + dwords; ++dword) {
            uint32_t* seen = different[dword & 31];
            int& count = uses[dword & 31];
            int k = 0;
            while (k < count && seen[k] != dword) ++k;
            if (k < count) continue;
            seen[count++] = dword;
            most = std::max(most, count);
        }
    }
    return most;
}

template <class T>
void resize(std::vector<T>& list, size_t size) {
    if (list.size() < size) list.resize(size);
}

void add_to(std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
    resize(to, from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
}

}  // namespace

void Counters::Extent::include(uint64_t begin, uint64_t end) {
    low = std::min(low, begin);
    high = std::max(high, end);
}

void Counters::begin_workgroup() { touched_.clear(); }

void Counters::count_copy(const Inst& inst, uint32_t to, uint64_t lanes) {
    lds_dma_bytes += 4 * static_cast<uint64_t>(std::popcount(lanes));
    if (!lanes) return;
    resize(lds_extents, inst.index + 1);
    const uint64_t last = 63 - static_cast<uint64_t>(std::countl_zero(lanes));
    lds_extents[inst.index].include(to + 4ull * static_cast<uint64_t>(std::countr_zero(lanes)),
                                    to + 4ull * last + 4);
}

void Counters::add(const Counters& other) {
    add_to(executed, other.executed);
    add_to(bank_conflicts, other.bank_conflicts);
    add_to(lds_phases, other.lds_phases);
    resize(lds_extents, other.lds_extents.size());
    for (size_t i = 0; i < other.lds_extents.size(); ++i)
        lds_extents[i].include(other.lds_extents[i].low, other.lds_extents[i].high);
    lds_bytes += other.lds_bytes;
    global_load_bytes += other.global_load_bytes;
    global_store_bytes += other.global_store_bytes;
    smem_bytes += other.smem_bytes;
    lds_dma_bytes += other.lds_dma_bytes;
    scratch_bytes += other.scratch_bytes;
    vmem_lines += other.vmem_lines;
    distinct_load_bytes += other.distinct_load_bytes;
    barriers += other.barriers;
    flops += other.flops;
}

void Counters::count_lds(const Inst& inst, const uint32_t* address, uint64_t lanes, uint32_t bytes,
                         bool write) {
    resize(bank_conflicts, inst.index + 1);
    resize(lds_phases, inst.index + 1);
    resize(lds_extents, inst.index + 1);
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint64_t at = address[std::countr_zero(left)];
        lds_extents[inst.index].include(at, at + bytes);
    }
    lds_bytes += static_cast<uint64_t>(std::popcount(lanes)) * bytes;
    const Phase& phase = bytes <= 4   ? kHalves
                         : bytes <= 8 ? kQuarters
                         : write      ? kEighths
                                      : kWideLoad;
    const uint32_t dwords = (bytes + 3) / 4;
    int phases = 0, conflicts = 0;
    for (int p = 0; p < phase.count; ++p) {
        const uint64_t active = lanes & phase.lanes[p];
        if (!active) continue;
        ++phases;
        conflicts += ways(address, active, dwords) - 1;
    }
    lds_phases[inst.index] += static_cast<uint64_t>(phases);
    bank_conflicts[inst.index] += static_cast<uint64_t>(conflicts);
    if (recorder)
        recorder->lds(static_cast<uint32_t>(std::popcount(lanes)) * bytes, phases, conflicts);
}

void Counters::count_global(const uint64_t* address, uint64_t lanes, uint32_t bytes, bool load,
                            bool store) {
    const uint64_t total = static_cast<uint64_t>(std::popcount(lanes)) * bytes;
    if (load) global_load_bytes += total;
    if (store) global_store_bytes += total;
    uint64_t lines[2 * kLanes];
    int count = 0;
    bool ascending = true;
    uint64_t page = 0, *pieces = nullptr;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint64_t at = address[std::countr_zero(left)];
        for (uint64_t piece = at / 64; load && piece <= (at + bytes - 1) / 64; ++piece) {
            if (piece / 64 != page || !pieces) {
                page = piece / 64;
                pieces = &touched_[page];  // entries stay where they are while others come
            }
            const uint64_t bit = 1ull << piece % 64;
            if (!(*pieces & bit)) distinct_load_bytes += 64;
            *pieces |= bit;
        }
        for (uint64_t line = at / 128; line <= (at + bytes - 1) / 128; ++line) {
            if (count && lines[count - 1] == line) continue;
            ascending &= !count || lines[count - 1] < line;
            lines[count++] = line;
        }
    }
    if (!ascending) {
        std::sort(lines, lines + count);
        count = static_cast<int>(std::unique(lines, lines + count) - lines);
    }
    vmem_lines += static_cast<uint64_t>(count);
    if (recorder)
        recorder->memory(static_cast<uint32_t>(total), {lines, static_cast<size_t>(count)});
}

Counters Counters::of(const Code& code) {
    Counters counters;
    counters.executed.assign(code.insts.size(), 0);
    counters.bank_conflicts.assign(code.insts.size(), 0);
    counters.lds_phases.assign(code.insts.size(), 0);
    return counters;
}

void Counters::count_flops(const Code& code) {
    for (size_t i = 0; i < executed.size(); ++i)
        if (executed[i] && code.insts[i].unit == Unit::mfma)
            flops += executed[i] * matrix_flops(code.insts[i]);
}

}  // namespace emulator
