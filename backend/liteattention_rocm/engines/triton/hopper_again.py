"""Tiles of :mod:`.hopper` whose levels stay, and what becomes of those for which that went wrong.

A row's weights are relative to its level. In long walks it is the row's largest score in the first
K block and stays so, whatever comes (``FIXED``): no step looks for the largest score, and neither
outputs nor sums are ever scaled. Floating-point numbers are as exact at one level as at another.
Only when a later score is so much larger that weights or outputs overflow does a level that stays
give wrong results. Each warpgroup looks for that when its walk is over. It notes its tile then, and
a second launch (``AGAIN``) computes the tiles that were noted, with levels that follow.

What is noted: the number of tiles, in the word behind the counter ``next_tile``, and from the fifth
word on the tiles. A list is noted once, by the warp that would settle it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Set in the length of a list that is to be computed again.
AGAIN_BIT = gl.constexpr(1 << 30)
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
def compute_again(noted, tile):
    """Note a tile; ``noted`` is where the list of them begins."""
    place = gl.atomic_add(noted + -3, 1, sem="relaxed")
    gl.store(noted + place, tile)


@gluon.jit
def tile_again(next_tile, turn, tiles):
    """The tile that was noted as number ``turn``; ``tiles``, which is none, past the last one."""
    number = gl.load(next_tile + 1)
    return gl.load(next_tile + 4 + turn, mask=turn < number, other=tiles)
