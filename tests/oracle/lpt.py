"""The order of a LiteAttention step's tiles on an MI300X, in plain Python.

What csrc/gfx942/params.h says of CountParams and PlanParams, without the kernel's ways to do it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise
from typing import NamedTuple

XCDS = 8
TILE_BLOCKS = 3
"""What a tile takes beside its K blocks, in their time."""
TRIES, PACK_TILES, AT_END = 7, 768, 3
LEAST_PART, LEAST_STRETCH, CUT_COST = 8, 19, 22


def work(kept: int, shift: int) -> int:
    """Of a tile. A bit of ``shift`` less exact each, so that sums fit into 32 bits."""
    return ((kept + TILE_BLOCKS - 1) >> shift) + 1


def runs(kept: Sequence[int], shift: int = 0) -> list[range]:
    """The tiles of each XCD: a run that begins where an eighth more of the work is done."""
    before = [0, *accumulate(work(blocks, shift) for blocks in kept)]
    begins = [
        next((i for i in range(len(kept)) if XCDS * before[i] >= x * before[-1]), len(kept))
        for x in range(XCDS)
    ]
    return [range(a, b) for a, b in zip(begins, [*begins[1:], len(kept)], strict=True)]


def finish(lengths: Sequence[int], units: int) -> list[int]:
    """When units are done that take lengths in their order, each whenever it is free."""
    loads = [0] * units
    for length in lengths:
        heapq.heapreplace(loads, loads[0] + length)
    return sorted(loads)


def starts(lengths: Sequence[int], loads: Sequence[int], room: int) -> list[int] | None:
    """When each begins, if it goes to the first unit that has room for it; None: one has none."""
    loads, found = list(loads), []
    for length in lengths:
        unit = next((u for u, load in enumerate(loads) if load + length <= room), None)
        if unit is None:
            return None
        found.append(loads[unit])
        loads[unit] += length
    return found


def packed(
    before: Sequence[int], lengths: Sequence[int], units: int
) -> tuple[list[int] | None, int]:
    """The order of tiles of these lengths, longest first, by when they begin, and when all end.

    None: LPT's order. before: the lengths of the tiles that are taken before them, in their order.
    Rooms are 129/128, 130/128 ... of an equal share of all work, up to when LPT ends.
    """
    share = -(-(sum(before) + sum(lengths)) // units)
    end = finish([*before, *lengths], units)[-1]
    for number in range(1, TRIES + 1):
        room = share + -(-share // 128) * number
        found = starts(lengths, finish(before, units), room) if room < end else None
        if found is not None:
            ends = (start + length for start, length in zip(found, lengths, strict=True))
            last = max([*finish(before, units), *ends])
            return sorted(range(len(lengths)), key=lambda i: (found[i], i)), last
    return None, end


class Part(NamedTuple):
    """K blocks ``first`` .. ``end`` - 1 of a tile's list, in walking order.

    Where it is computed and when it begins; ``part`` of ``parts``.
    """

    unit: int
    start: int
    tile: int
    first: int
    end: int
    part: int
    parts: int


def cut(queue: Sequence[int], kept: Sequence[int], stretch: int) -> list[Part]:
    """The run as a line of work of which each unit has a stretch, by when parts begin."""
    found, begin = [], 0
    for tile in queue:
        end = begin + kept[tile] + TILE_BLOCKS
        units = range(begin // stretch, (end - 1) // stretch + 1)
        places = [0]
        for unit in units[1:]:
            # Starting the tile comes first; a part is not too short.
            place = unit * stretch - begin - TILE_BLOCKS
            if place < LEAST_PART:
                place = 0
            elif kept[tile] - place < LEAST_PART:
                place = kept[tile]
            places.append(place)
        places.append(kept[tile])
        own = [
            (unit, *ends)
            for unit, ends in zip(units, pairwise(places), strict=True)
            if ends[0] < ends[1] or (kept[tile] == 0 and unit == units[0])
        ]
        for number, (unit, *ends) in enumerate(own):
            start = begin - unit * stretch if unit == units[0] else 0
            found.append(Part(unit, start, tile, *ends, number, len(own)))
        begin = end
    return sorted(found, key=lambda part: (part.start, part.unit))


class Run(NamedTuple):
    """An XCD's tiles: in LPT's order, in that in which they are taken, and when they then end.

    ends: None if the run is none that pack_lists looks at.
    """

    by_lpt: list[int]
    taken: list[int]
    ends: int | None


def ordered(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, shift: int = 0, units: int = 0
) -> list[Run]:
    """Of each XCD, were there room for all.

    units: of an XCD, into which the last tiles that are ordered together are packed, AT_END for
    each; 0: they are not.
    """
    found = []
    for run in runs(kept, shift):
        # From the head on with the tile from which there are `together` tiles to the end.
        last = max(run.stop - together, 0) // q_blocks if len(run) <= slots else 0
        queue = sorted(run, key=lambda i: (min(i // q_blocks, last), -kept[i], i))
        taken, ends = queue, None
        if units and len(run) <= min(slots, PACK_TILES):
            begin = max(sum(i // q_blocks < last for i in run), len(run) - AT_END * units, 0)
            before, lengths = (
                [work(kept[i], shift) for i in part] for part in (queue[:begin], queue[begin:])
            )
            ranks, ends = packed(before, lengths, units)
            if ranks is not None:
                taken = queue[:begin] + [queue[begin + rank] for rank in ranks]
        found.append(Run(queue, taken, ends))
    return found


def in_parts(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, units: int
) -> list[list[Part] | None]:
    """The parts of each XCD's lists where they are cut; None where they stay whole."""
    found: list[list[Part] | None] = []
    every = ordered(kept, q_blocks, slots, together, 0, units)
    # What runs without room leave to others stands where these would have their parts.
    beyond = any(len(run.by_lpt) > slots for run in every)
    for run in every:
        found.append(None)
        if run.ends is None or beyond or len(run.by_lpt) + units > slots:
            continue
        share = -(-sum(work(kept[i], 0) for i in run.by_lpt) // units)
        stretch = max(share, LEAST_STRETCH)
        if run.ends > stretch + CUT_COST:
            found[-1] = cut(run.by_lpt, kept, stretch)
    return found


def order(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, shift: int = 0, units: int = 0
) -> list[list[int]]:
    """[slots][XCDS]: a tile, or -1.

    kept: K blocks of each tile, q blocks fastest. What runs have beyond their slots, their shortest
    tiles, goes behind the runs that have room, one tile each in turn. units: pack_lists' order.
    """
    taken = [run.taken for run in ordered(kept, q_blocks, slots, together, shift, units)]
    beyond = [tile for queue in taken for tile in queue[slots:]]
    taken = [queue[:slots] for queue in taken]
    for x in cycle(range(XCDS)):
        if not beyond:
            break
        if len(taken[x]) < slots:
            taken[x].append(beyond.pop(0))
    return [[queue[slot] if slot < len(queue) else -1 for queue in taken] for slot in range(slots)]


class Placed(NamedTuple):
    """What pack_lists writes of lists that may be cut (csrc/gfx942/params.h).

    order: [slots][XCDS]. parts: [slots][XCDS] of [first, end, slot, 0], None where there is no
    tile. cuts: [XCDS * units] of [tile, parts].
    """

    order: list[list[int]]
    parts: list[list[list[int] | None]]
    cuts: list[list[int]]


def placed(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, units: int, shift: int = 0
) -> Placed:
    """The order of whole lists, but of parts in each XCD whose lists are cut."""
    whole = order(kept, q_blocks, slots, together, shift, units)
    parts = [[None if tile < 0 else [0, 0, -1, 0] for tile in row] for row in whole]
    found = Placed(whole, parts, [[0, 0] for _ in range(XCDS * units)])
    for x, of_xcd in enumerate(in_parts(kept, q_blocks, slots, together, units)):
        if of_xcd is None:
            continue
        for slot in range(slots):
            part = of_xcd[slot] if slot < len(of_xcd) else None
            found.order[slot][x] = -1 if part is None else part.tile
            found.parts[slot][x] = None
            if part is None:
                continue
            unit = x * units + part.unit
            place = -1 if part.parts == 1 else 2 * unit + (part.part == 0)
            found.parts[slot][x] = [part.first, part.end, place, 0]
            if part.part == 0 and part.parts > 1:
                found.cuts[unit] = [part.tile, part.parts]
    return found
