// Which XCD computes a q block of a LiteAttention step, and when, where an XCD has few tiles for
// each of its compute units: runs and their order as in plan_lpt.hip, but the last tiles are
// packed.
//
// With LPT the units have about as much work until the last round, in which some get one more tile
// and others none: with five tiles for each unit that is up to a tenth of the time. Here every unit
// gets room for a given work, and each of the last tiles, longest first, goes to the first unit
// that still has room for it (first fit decreasing). The least of some rooms into which all tiles
// fit decides. Method: MULTIFIT, E. G. Coffman, M. R. Garey and D. S. Johnson, SIAM J. Comput. 7
// (1978). Packed tiles are ordered by when they begin. If an XCD gives the next workgroup to the
// first free unit, none begins later than it was packed.
//
// Where the plan allows it and it pays, lists are cut instead (geometry.h: CutAt): a line of the
// run's work, tile after tile, of which each unit gets an equal stretch.
//
// Road map: a workgroup an XCD. Its threads rank the tiles of the run (lpt.h). Each wave then has a
// unit in each lane, and gives all tiles but the last kPackAtEnd for each unit to the unit that is
// free first. One wave goes on so: that is LPT's end. The others pack the last tiles, each into a
// room of its own. Last, tiles are ranked by when they begin, in the least room that was enough; if
// none was, or LPT ends no later, they keep their ranks. Nothing depends on timing. A packed tile
// takes ~80 clk, which is what one step of packing waits for.
//
// If lists are cut, one wave adds up where they begin on the line, in LPT's order. A thread then
// cuts a list at the borders that it crosses: the first part has the list's place, any other that
// of its unit. Last, a thread ranks a part by when it begins in its unit, as packed tiles are.
//
// Budget: VGPR 55, LDS 27760.

#include "lpt.h"

namespace liteattention::gfx942 {

// A wave each; the last one does without a room.
inline constexpr int32_t kPackTries = kPackThreads / kWaveSize - 1;

// Of a lane that is no compute unit. With a tile's work added it still fits into 32 bits.
inline constexpr uint32_t kNoUnit = 0x7fffffffu;

// Places for the parts of cut lists: the first part of each list by its rank, behind them others by
// their unit.
inline constexpr int32_t kLineParts = kPackTiles + kWaveSize;

// The run's lists as a line of work, of which units get equal stretches.
struct Line {
    uint32_t begins[kPackTiles];  // of lists, by rank
    // Of parts: 64 times when they begin in their unit, and the unit; kNoPart: there is none.
    uint32_t keys[kLineParts];
    int32_t tiles[kLineParts], firsts[kLineParts], ends[kLineParts];
    CutList cuts[kWaveSize];  // by unit
    static constexpr uint32_t kNoPart = ~0u;
};

// What the workgroup knows of its run, by rank in the order of LPT.
struct Packing {
    uint32_t work[kPackTiles];
    int32_t tiles[kPackTiles];
    union {
        uint32_t starts[kPackTries][kPackTiles];  // of the tiles that are packed
        Line line;
    };
    uint32_t ends[kPackTries];  // 0: they do not fit
    uint32_t end;               // of LPT's order
};

// Puts a tile, or a part of it, at a position of the order.
LITE_DEVICE void Place(const PlanParams& p, int32_t position, int32_t tile,
                       const ListPart& part = {0, 0, -1, 0}) {
    p.order[position] = tile;
    if (p.parts) p.parts[position] = part;
}

// Gives `take` the numbers and the work of up to 64 tiles from rank `first` on, before rank `to`,
// one after the other: eight at a time, the last of which may be none, without work.
template <class Take>
LITE_DEVICE void EachOf(const Packing& run, int32_t first, int32_t to, const Take& take) {
    constexpr int32_t kAtOnce = 8;
    const int32_t own = first + static_cast<int32_t>(ThreadId() % kWaveSize);
    const auto work = static_cast<int32_t>(own < to ? run.work[own] : 0);
    const int32_t many = to - first < kWaveSize ? to - first : kWaveSize;
#pragma unroll 1
    for (int32_t i = 0; i < many; i += kAtOnce)
#pragma unroll
        for (int32_t n = 0; n < kAtOnce; ++n)
            take(i + n, static_cast<uint32_t>(OfLane(work, i + n)));
}

// The loads of compute units, ascending by lane, once the least one took a tile: every lane gets
// the larger of its own load and the smaller of the next lane's and the new one.
LITE_DEVICE uint32_t TakeFirst(uint32_t loads, uint32_t work) {
    constexpr int kNextLane = 0x130;  // wave_shl:1
    const uint32_t taken = static_cast<uint32_t>(OfLane(static_cast<int32_t>(loads), 0)) + work;
    const uint32_t next = Neighbour<kNextLane>(loads), lower = next < taken ? next : taken;
    return loads > lower ? loads : lower;
}

// The loads of compute units after the tiles of ranks `from` .. `to` - 1, ascending by lane.
LITE_DEVICE uint32_t LoadsAfter(const Packing& run, int32_t from, int32_t to, uint32_t loads) {
#pragma unroll 1
    for (int32_t first = from; first < to; first += kWaveSize)
        EachOf(run, first, to, [&](int32_t, uint32_t work) { loads = TakeFirst(loads, work); });
    return loads;
}

// Compute units that have time for `room` each, a lane of `loads` each.
struct Units {
    uint32_t room, loads;
    int32_t begins = 0;  // when tiles begin, of 64 tiles, by lane

    // The i-th of them goes to the first unit that has room. The last lane, which is no unit, takes
    // what fits nowhere.
    LITE_DEVICE void Put(int32_t i, uint32_t work) {
        constexpr uint64_t kLast = uint64_t{1} << (kWaveSize - 1);
        const auto unit =
            static_cast<uint32_t>(__builtin_ctzll(Lanes(loads + work <= room) | kLast));
        const int32_t begin = OfLane(static_cast<int32_t>(loads), static_cast<int32_t>(unit));
        begins = WithLane(begins, static_cast<uint32_t>(i), begin);
        loads = static_cast<uint32_t>(
            WithLane(static_cast<int32_t>(loads), unit,
                     static_cast<int32_t>(static_cast<uint32_t>(begin) + work)));
    }
    LITE_DEVICE bool Fit() const { return LastLane(loads) == kNoUnit; }
};

// Packs the tiles of ranks `from` .. `to` - 1. Returns when the last unit is done, 0 if they do not
// fit; `starts` gets when each tile begins.
LITE_DEVICE uint32_t Pack(const Packing& run, int32_t from, int32_t to, Units units,
                          uint32_t (&starts)[kPackTiles]) {
#pragma unroll 1
    for (int32_t first = from; first < to; first += kWaveSize) {
        EachOf(run, first, to, [&](int32_t i, uint32_t work) { units.Put(i, work); });
        const int32_t own = first + static_cast<int32_t>(ThreadId() % kWaveSize);
        if (own < to) starts[own] = static_cast<uint32_t>(units.begins);
        if (!units.Fit()) return 0;
    }
    const uint32_t load = units.loads >= kNoUnit ? 0 : units.loads;
    return LastLane(OverWave(load, [](uint32_t a, uint32_t b) { return a > b ? a : b; }));
}

// K blocks of a tile with so much work (lpt.h: Work, with a shift of 0).
LITE_DEVICE int32_t Blocks(uint32_t work) { return static_cast<int32_t>(work) - kTileBlocks; }

// Gives each unit a stretch of the line, and puts all parts into the order in which they begin.
LITE_DEVICE void CutLists(const PlanParams& p, int32_t xcd, int32_t many, uint32_t stretch,
                          Packing& run) {
    Line& line = run.line;
    const auto thread = static_cast<int32_t>(ThreadId());
    const int32_t lane = thread % kWaveSize;
    if (thread < kWaveSize) {
        line.cuts[lane] = {0, 0};
        line.keys[many + lane] = Line::kNoPart;
        uint32_t before = 0;
#pragma unroll 1
        for (int32_t first = 0; first < many; first += kWaveSize) {
            const int32_t own = first + lane;
            const uint32_t work = own < many ? run.work[own] : 0;
            const uint32_t end = before + SumUpTo(work);
            if (own < many) line.begins[own] = end - work;
            before = LastLane(end);
        }
    }
    Barrier();

    for (int32_t own = thread; own < many; own += kPackThreads) {
        const uint32_t begin = line.begins[own], work = run.work[own];
        const int32_t blocks = Blocks(work);
        uint32_t unit = begin / stretch, start = begin % stretch;
        const uint32_t last = (begin + work - 1) / stretch;
        int32_t first = 0, parts = 0;
        uint32_t head = unit;
#pragma unroll 1
        do {
            const int32_t end =
                unit < last ? CutAt(int64_t{unit + 1} * stretch, begin, blocks) : blocks;
            if (end > first || blocks == 0) {
                const int32_t at = parts == 0 ? own : many + static_cast<int32_t>(unit);
                if (parts == 0) head = unit;
                line.keys[at] = start * kWaveSize + unit;
                line.tiles[at] = run.tiles[own];
                line.firsts[at] = first;
                line.ends[at] = end;
                first = end;
                ++parts;
            }
            ++unit;
            start = 0;
        } while (first < blocks);
        if (parts > 1) line.cuts[head] = {run.tiles[own], parts};
    }
    Barrier();

    const int32_t units = xcd * p.units;  // of the XCDs before
    if (thread < p.units) p.cuts[units + thread] = line.cuts[thread];
    for (int32_t i = thread; i < many + p.units; i += kPackThreads) {
        const uint32_t mine = line.keys[i];
        if (mine == Line::kNoPart) continue;
        int32_t rank = 0;
// Vectorised, it would have a rest that is unrolled and never reached.
#pragma clang loop vectorize(disable) interleave(disable) unroll_count(8)
        for (int32_t other = 0; other < many + p.units; ++other)
            rank += line.keys[other] < mine ? 1 : 0;
        const int32_t unit = units + static_cast<int32_t>(mine % kWaveSize);
        const bool begins = i < many;
        const bool whole = begins && line.ends[i] == Blocks(run.work[i]);
        const int32_t slot = begins ? ListSlot(unit, 0) : ListSlot(unit - 1, 1);
        Place(p, rank * kXcds + xcd, line.tiles[i],
              {line.firsts[i], line.ends[i], whole ? -1 : slot, 0});
    }
}

// Whether there are positions for all parts of a run of so many tiles. What another run has beyond
// its positions would stand there, too.
LITE_DEVICE bool HasRoom(const PlanParams& p, const int32_t* begins, int32_t many) {
    bool room = many + p.units <= p.slots;
    for (int32_t x = 0; x < kXcds; ++x) room &= begins[x + 1] - begins[x] <= p.slots;
    return room;
}

LITE_DEVICE void PackLists(const PlanParams& p) {
    __shared__ int32_t begins[kXcds + 1];
    __shared__ Packing packing;
    FindRuns<kPackThreads>(p, begins);

    const auto xcd = static_cast<int32_t>(WorkgroupId());
    const auto thread = static_cast<int32_t>(ThreadId());
    const auto wave = UniformInt(ThreadId() / kWaveSize);
    Run run(p, begins, xcd);
    run.begin = UniformInt(run.begin);
    run.end = UniformInt(run.end);
    run.last = UniformInt(run.last);
    const int32_t many = run.end - run.begin;
    const bool packs = run.fits && many <= kPackTiles;

    // Whole waves: a wave compares its 64 tiles with the same others.
    for (int32_t first = wave * kWaveSize; first < many; first += kPackThreads) {
        const int32_t place = first + thread % kWaveSize;
        const int32_t own = run.begin + (place < many ? place : many - 1);
        const int32_t rank = run.Rank(p, own);
        if (place >= many) continue;
        if (packs) {
            packing.work[rank] = Work(p, own);
            packing.tiles[rank] = own;
        } else {
            Place(p, PositionOf(begins, p.slots, xcd, rank), own);
        }
    }
    Barrier();
    if (p.cuts && thread < p.units) p.cuts[xcd * p.units + thread] = {0, 0};
    if (!packs) return;

    const uint32_t units = static_cast<uint32_t>(p.units);
    const int32_t ordered = run.last - run.begin, at_end = many - kPackAtEnd * p.units;
    int32_t from = ordered > at_end ? ordered : at_end;
    from = from > 0 ? from : 0;
    uint32_t all = 0;
#pragma unroll 1
    for (int32_t i = thread % kWaveSize; i < many; i += kWaveSize) all += packing.work[i];
    const uint32_t share = (LastLane(SumUpTo(all)) + units - 1) / units;
    const bool is_unit = static_cast<uint32_t>(thread % kWaveSize) < units;
    const uint32_t loads = LoadsAfter(packing, 0, from, is_unit ? 0 : kNoUnit);
    if (wave < kPackTries) {
        const Units free = {Uniform(PackRoom(share, static_cast<uint32_t>(wave))), loads};
        const uint32_t end = Pack(packing, from, many, free, packing.starts[wave]);
        if (thread % kWaveSize == 0) packing.ends[wave] = end;
    } else {
        const auto after = static_cast<int32_t>(LoadsAfter(packing, from, many, loads));
        packing.end = static_cast<uint32_t>(OfLane(after, p.units - 1));
    }
    Barrier();

    int32_t best = 0;
    while (best < kPackTries && packing.ends[best] == 0) ++best;
    best = UniformInt(best);
    if (best < kPackTries && PackRoom(share, static_cast<uint32_t>(best)) >= packing.end)
        best = kPackTries;
    best = UniformInt(best);
    if (p.parts && HasRoom(p, begins, many)) {
        const uint32_t whole = best < kPackTries ? packing.ends[best] : packing.end;
        const uint32_t stretch = share > kLeastStretch ? share : kLeastStretch;
        if (Uniform(whole) > stretch + kCutCost) {
            CutLists(p, xcd, many, stretch, packing);
            return;
        }
    }
    for (int32_t own = thread; own < many; own += kPackThreads) {
        int32_t rank = own;
        if (best < kPackTries && own >= from) {
            const uint32_t* const starts = packing.starts[best];
            const uint32_t mine = starts[own];
            rank = from;
#pragma unroll 8
            for (int32_t other = from; other < many; ++other)
                rank += starts[other] + (other < own ? 0 : 1) <= mine ? 1 : 0;
        }
        Place(p, rank * kXcds + xcd, packing.tiles[own]);  // PositionOf a run that fits
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_PACK_LISTS(name) \
    LITE_KERNEL(kPackThreads, 2) name(const PlanParams p) { PackLists(p); }
#include "variants.def"
