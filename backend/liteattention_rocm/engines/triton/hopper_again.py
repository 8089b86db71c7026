"""Tiles of :mod:`.hopper` whose levels stay, and what becomes of those for which that went wrong.

A row's weights are relative to its level. In long walks it is the row's largest score in the first
K block and stays so, whatever comes (``FIXED``): no step looks for the largest score, and neither
outputs nor sums are ever scaled. Floating-point numbers are as exact at one level as at another.
Only when a later score is so much larger that weights or outputs overflow does a level that stays
give wrong results. Each warpgroup looks for that when its walk is over. It notes its tile then, and
a second launch (``AGAIN``) computes the tiles that were noted, with levels that follow.

A warpgroup of a list tells the warp that settles it, through shared memory (:func:`tell_low`). With
two warpgroups each row tells for itself: warps need not join what they found, which saves lists of
32 tiles up to 1 %. With three, ptxas then places the steps of votes so that they take 1 to 2 %
longer: there the warpgroup finds out first.

What is noted: the number of tiles, in the word behind the counter ``next_tile``, and the tiles, in
every other word from the fifth one on. Of dense attention, whose warpgroups do not hear of each
other, the words between are flags by tile, so that each is noted once. A list is noted by the warp
that would settle it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: The largest sum of a row's weights that is taken: far below the largest number, so that its
#: reciprocal is none of the smallest, which are flushed to 0. The scores of a row may be 69 above
#: the largest of its first K block, in natural units.
_MOST = gl.constexpr(2.0**100)


@gluon.jit
def overflown(sums, out):
    """Whose level was too low, int32 [64]: 1 if a row's sum or an output is too large, or a NaN."""
    # 0, or NaN where one of a row's is not finite
    zero = gl.convert_layout(gl.sum(out * 0.0, 1), sums.type.layout)
    return gl.where((sums <= _MOST) & (zero == 0.0), 0, 1)


@gluon.jit
def low_memory(GROUPS: gl.constexpr):
    """Shared memory for what warpgroups tell of two lists: by row, or a number that starts at 0."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if GROUPS == 2:
        low_smem = gl.allocate_shared_memory(gl.int32, [2 * GROUPS, 64], plain)
    else:
        low_smem = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
        per_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        for i in gl.static_range(2):
            low_smem.index(i).store(gl.full([1], 0, gl.int32, per_group))
    return low_smem


@gluon.jit
def tell_low(low_smem, slot, low, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Tell of a list in ``slot`` which rows were ``low`` (:func:`overflown`), or that one was."""
    if GROUPS == 2:
        low_smem.index(slot * GROUPS + GROUP).store(low)
    elif gl.max(low, 0):
        per_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        low_smem.index(slot).store(gl.full([1], 1, gl.int32, per_group))


@gluon.jit
def was_low(low_smem, slot, GROUPS: gl.constexpr):
    """Whether a row of the list in ``slot`` was low, for a single warp; the slot is free then."""
    if GROUPS == 2:
        rows: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
        again = gl.to_tensor(0)
        for group in gl.static_range(GROUPS):
            again |= gl.max(low_smem.index(slot * GROUPS + group).load(rows), axis=0)
    else:
        alone: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        low = low_smem.index(slot)
        again = gl.sum(low.load(alone), axis=0)
        low.store(gl.full([1], 0, gl.int32, alone))
    return again


@gluon.jit
def compute_again(next_tile, tile, FLAGGED: gl.constexpr):
    """Note a tile; ``FLAGGED``: unless another warpgroup has."""
    missing = gl.to_tensor(True)
    if FLAGGED:
        missing = gl.atomic_or(next_tile + 5 + 2 * tile, 1, sem="relaxed") == 0
    if missing:
        place = gl.atomic_add(next_tile + 1, 1, sem="relaxed")
        gl.store(next_tile + 4 + 2 * place, tile)


@gluon.jit
def tile_again(next_tile, turn, tiles, FLAGGED: gl.constexpr):
    """The tile that was noted as number ``turn``; ``tiles``, which is none, past the last one.

    Its flag is 0 again then, for calls to come.
    """
    noted = turn < gl.load(next_tile + 1)
    tile = gl.load(next_tile + 4 + 2 * turn, mask=noted, other=tiles)
    if FLAGGED:
        gl.store(next_tile + 5 + 2 * tile, 0, mask=noted)
    return tile
