"""Lists that are cut along K: pieces of a q block's walk, computed apart and merged.

A piece leaves what it has of its rows in memory: outputs that nothing was divided by, levels, sums
and, for votes, maxima, fp32. Who comes last to a q block merges its pieces, in their order, so that
a result does not depend on who that is. A tile's fate needs what the rows saw before it, which only
the first piece knows. The others leave a *mark* of every row and tile, and who merges decides:

- votes: the row's largest score, or -inf where its own piece is enough to call it negligible. The
  rule is that of a walk in one piece, bit for bit.
- shares of mass: log2 of what lies in the tile. It is divided by the row's sum over all pieces, a
  later sum than that of a walk in one piece, see docs/budget.md. Rows are guarded by what they have
  seen by the end of the tile, as in a walk in one piece: whoever merges adds it up.

Outputs and marks are read by ordinary loads, through the nearest cache. They may be: whoever merges
acquired what the others released, which empties that cache, and a barrier tells its other threads.
Volatile loads pass it by, and fetch what neighbours in a tile need several times. With them (1, 1,
32760, 128) with 80 % skipped unevenly takes 7 to 10 % longer, most of what merging cost (H100).
Those of levels, sums and maxima are few, and still volatile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_ring import barrier
from .hopper_settle import UNIT, flush, flush_weights, piece_of, weight_of
from .hopper_softmax import LOWEST, ROW_GUARD, larger

#: Below every score, and finite.
_LOWEST = gl.constexpr(-3.4e38)
_ROW_GUARD = gl.constexpr(ROW_GUARD)


@gluon.jit
def marks_of(
    parts, first, k_blocks, GROUP: gl.constexpr, GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's marks of a list are, [length, 64]: two pieces at least share them."""
    begin: gl.constexpr = SLOTS * GROUPS * 64 * (HEAD_DIM + 3)
    return parts + (begin + (first // 2 * GROUPS + GROUP) * k_blocks * 64)


@gluon.jit
def mark(marks, i, later, value):
    """Keep a number per row of tile ``i`` of a list, if the piece is not the first."""
    layout: gl.constexpr = value.type.layout
    row = gl.arange(0, 64, layout)
    gl.store(marks + i * 64 + row, value, mask=(row >= 0) & later)


@gluon.jit
def vote_mark(peak, top, bits, i):
    """What :func:`mark` keeps of a vote: ``bits`` has it, and ``top`` the tile's maximum, too."""
    # A NaN that was seen keeps this tile and all later ones.
    kept = ((bits >> (i & 31)) & 1) != 0
    value = gl.where(kept, gl.maximum(peak, _LOWEST), float("-inf"))
    return gl.where(top == top, value, top)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _log2(x):
    """One instruction, where ``gl.log2`` is some 25: it errs by 2^-22, and subnormals are 0."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def share_mark(here, level):
    """What :func:`mark` keeps of a share: log2 of the tile's part of a row's sum."""
    return level + _log2(here)


@gluon.jit
def _decide_votes(
    marks, top, c, threshold, begin, end, items, votes, must_do, rows, q_len, HAS_DO: gl.constexpr
):  # fmt: skip
    """Votes of tiles ``begin`` to ``end`` of a list; rows had seen ``top`` before that piece."""
    grid: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, grid))
    lane = gl.arange(0, 32, gl.SliceLayout(0, grid))
    seen = gl.convert_layout(larger(top, top * 0.0 + _LOWEST), gl.SliceLayout(1, grid))
    for first in range(begin, end, 32):
        i = first + lane
        found = gl.load(
            marks + i[None, :] * 64 + row[:, None],
            mask=(i < end)[None, :] & (row >= 0)[:, None], other=0.0,
        )  # fmt: skip
        negligible = (found - seen[:, None]) * c <= threshold
        word = gl.sum(gl.where(negligible, 0, 1 << lane[None, :]), 1)
        bits = gl.convert_layout(word, rows.type.layout)
        flush(bits, first, end, items, 0, votes, must_do, rows, q_len, HAS_DO, False)


@gluon.jit
def _decide_shares(marks, sums, before, begin, end, items, weights, unit, rows, q_len):
    """Add the shares of tiles ``begin`` to ``end`` of a list.

    ``sums`` of rows over all pieces, and what they had seen ``before`` these tiles, log2.
    """
    grid: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    per_word: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, grid))
    lane = gl.arange(0, 32, gl.SliceLayout(0, grid))
    whole = gl.convert_layout(sums, gl.SliceLayout(1, grid))
    seen = gl.convert_layout(gl.exp2(before - sums), gl.SliceLayout(1, grid))
    counted = gl.convert_layout(gl.where(rows < q_len, 1, 0), gl.SliceLayout(1, grid)) != 0
    for first in range(begin, end, 32):
        i = first + lane
        found = gl.load(
            marks + i[None, :] * 64 + row[:, None],
            mask=(i < end)[None, :] & counted[:, None], other=float("-inf"),
        )  # fmt: skip
        shares = gl.where(counted[:, None], gl.exp2(found - whole[:, None]), 0.0)
        warps = gl.sum(gl.reshape(shares, [4, 16, 32]), 1)
        kept = weight_of(gl.convert_layout(warps, per_word) * unit)
        sums_by_then = seen[:, None] + gl.associative_scan(shares, 1, _add)
        guarded = gl.where(shares > _ROW_GUARD * sums_by_then, 1, 0)
        guarded = gl.max(gl.reshape(guarded, [4, 16, 32]), 1)
        kept = gl.where(gl.convert_layout(guarded, per_word) > 0, UNIT, kept)
        seen += gl.sum(shares, 1)
        flush_weights(kept, first, end, items, 0, weights, False)


@gluon.jit
def merge(
    tile, walk, results, sizes, words, out, top, level, total, rows, c, threshold,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_DO: gl.constexpr,
    WEIGH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Leave a piece of a walk; whoever is the last has the q block's rows from all of them.

    Pieces leave their levels, sums and, for votes, their maxima ``top``. Returns outputs, levels,
    sums and 1, or, if other pieces are still missing, 0.
    """
    o_desc, lse, votes, weights, mass, tally, must_do, parts, next_tile = results
    tiles, q_heads, q_len, kv_len, q_blocks, k_blocks = sizes
    items, counts, order, span = walk
    # Found anew, so that it takes no registers during the walk.
    place, length, piece, pieces, first = piece_of(tile, walk)
    at = place.to(gl.int64)
    items = items + at * k_blocks
    votes = votes + at * words
    weights = weights + at * k_blocks
    marks = marks_of(parts, first, k_blocks, GROUP, GROUPS, HEAD_DIM, SLOTS)
    ROWS: gl.constexpr = GROUPS * 64
    unit = UNIT * 1.0 / gl.minimum(q_len - place % q_blocks * ROWS, ROWS).to(gl.float32)
    SIZE: gl.constexpr = 64 * (HEAD_DIM + 3)
    per_row: gl.constexpr = top.type.layout
    o_layout: gl.constexpr = out.type.layout
    per_out: gl.constexpr = gl.SliceLayout(1, o_layout)
    row = gl.arange(0, 64, per_row)
    inside = gl.arange(0, 64, per_out)[:, None] * HEAD_DIM
    inside = inside + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))[None, :]
    mine = parts + ((first + piece) * GROUPS + GROUP) * SIZE
    gl.store(mine + inside, out)
    gl.store(mine + 64 * HEAD_DIM + row, level)
    gl.store(mine + 64 * HEAD_DIM + 64 + row, total)
    if not WEIGH:
        gl.store(mine + 64 * HEAD_DIM + 128 + row, top)
    # All threads have written, and one tells others; it hears of what they wrote.
    barrier()
    arrived = gl.atomic_add(next_tile + 4 + first // 2 * 4 + GROUP, 1, sem="acq_rel")
    last = gl.where(arrived == pieces - 1, 1, 0)
    if last == 1:
        out = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        top = gl.full([64], float("-inf"), gl.float32, per_row)
        level = gl.full([64], LOWEST, gl.float32, per_row)
        total = gl.zeros([64], gl.float32, per_row)
        before = level
        for one in range(pieces):
            there = parts + ((first + one) * GROUPS + GROUP) * SIZE
            other_level = gl.load(there + 64 * HEAD_DIM + row, volatile=True)
            other_total = gl.load(there + 64 * HEAD_DIM + 64 + row, volatile=True)
            other_out = gl.load(there + inside)
            if not WEIGH:
                if one > 0:
                    _decide_votes(
                        marks, top, c, threshold, length * one // pieces,
                        length * (one + 1) // pieces, items, votes, must_do, rows, q_len,
                        HAS_DO,
                    )  # fmt: skip
                other_top = gl.load(there + 64 * HEAD_DIM + 128 + row, volatile=True)
                top = larger(top, other_top)
            elif one == 0:
                before = other_level + _log2(other_total)
            base = larger(level, other_level)
            fade = gl.exp2(level - base)
            other_fade = gl.exp2(other_level - base)
            total = total * fade + other_total * other_fade
            out = (
                out * gl.convert_layout(fade, per_out)[:, None]
                + other_out * gl.convert_layout(other_fade, per_out)[:, None]
            )
            level = base
        if WEIGH:
            sums = level + _log2(total)
            _decide_shares(
                marks, sums, before, length // pieces, length, items, weights, unit, rows, q_len
            )
    return out, level, total, last
