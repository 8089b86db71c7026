"""Tiles of :mod:`.hopper` whose levels stay, and what becomes of those for which that went wrong.

A row's weights are relative to its level. In long walks it is the row's largest score in the first
K block and stays so, whatever comes (``FIXED``): no step looks for the largest score, and neither
outputs nor sums are ever scaled. Floating-point numbers are as exact at one level as at another.
Only when a later score is so much larger that weights or outputs overflow does a level that stays
give wrong results. Each warpgroup looks for that when its walk is over. It notes its tile then, and
a second launch (``AGAIN``) computes the tiles that were noted, with levels that follow.

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
    """Whether a level of 64 rows was too low: 1 if a sum or an output is too large, or a NaN."""
    # 0, or NaN where one of a row's is not finite
    zero = gl.convert_layout(gl.sum(out * 0.0, 1), sums.type.layout)
    return gl.max(gl.where((sums <= _MOST) & (zero == 0.0), 0, 1), 0)


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
