"""The order of a LiteAttention step's tiles on an MI300X, in plain Python.

What csrc/gfx942/params.h says of CountParams and PlanParams, without the kernel's ways to do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle

XCDS = 8
TILE_BLOCKS = 3
"""What a tile takes beside its K blocks, in their time."""


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


def queues(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, shift: int = 0
) -> list[list[int]]:
    """The same in the order in which they are taken, were there room for all."""
    found = []
    for run in runs(kept, shift):
        # From the head on with the tile from which there are `together` tiles to the end.
        last = max(run.stop - together, 0) // q_blocks if len(run) <= slots else 0
        found.append(sorted(run, key=lambda i: (min(i // q_blocks, last), -kept[i], i)))
    return found


def order(
    kept: Sequence[int], q_blocks: int, slots: int, together: int, shift: int = 0
) -> list[list[int]]:
    """[slots][XCDS]: a tile, or -1.

    kept: K blocks of each tile, q blocks fastest. What runs have beyond their slots, their shortest
    tiles, goes behind the runs that have room, one tile each in turn.
    """
    taken = queues(kept, q_blocks, slots, together, shift)
    beyond = [tile for queue in taken for tile in queue[slots:]]
    taken = [queue[:slots] for queue in taken]
    for x in cycle(range(XCDS)):
        if not beyond:
            break
        if len(taken[x]) < slots:
            taken[x].append(beyond.pop(0))
    return [[queue[slot] if slot < len(queue) else -1 for queue in taken] for slot in range(slots)]
