"""Attention in plain Triton: any GPU that Triton compiles for, and the interpreter on a CPU.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135); tiles skipped
from step to step (LiteAttention, arXiv 2511.11062), q blocks scheduled longest first (Graham 1969).

A LiteAttention step is two launches. :func:`plan` turns the bitmap into a list of K blocks per q
block, in walking order, and sorts the q blocks of a head by the length of their lists. For the
kernel of :mod:`.hopper` it cuts the longest along K where few q blocks fill the GPU unevenly.
:func:`attention` (or the kernel of :mod:`.hopper`) walks them, votes or weighs, and settles every q
block that it is through with: it counts the tiles that the next step has to compute, after choosing
them if they were weighed (:mod:`liteattention_rocm.lite.budget`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...lite.budget import ROW_GUARD

#: ``ROUNDING`` of the kernels: how an fp32 result becomes bf16.
ROUNDING = {"rtne": 0, "rtna": 1, "rtz": 2}


#: Tiles of a q block that are held in registers while a cut is searched for; more are read anew.
SPAN = tl.constexpr(512)
#: A mass of 1 as a weight, its bits, and what is set in weights of must-do tiles: above every cut.
_UNIT = tl.constexpr(1 << 24)
_UNIT_BITS = tl.constexpr(24)
_FIRM = tl.constexpr(1 << 30)
_ROW_GUARD = tl.constexpr(ROW_GUARD)
#: Pieces of a list at most: their number has four bits in what is told of one.
MOST_PIECES = tl.constexpr(16)


@triton.jit
def set_bits(word):
    """Number of set bits of each int32: sums over pairs, nibbles, bytes and the word."""
    # The shifts bring in copies of the sign; every mask that follows one clears them.
    pairs = word - ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _walked(
    read, must_do, must_skip, row, rows, at, k_blocks, words,
    HAS_DO: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Words ``at`` of bitmap rows ``row``: the tiles that a step computes; 0 from ``rows`` on."""
    inside = (row < rows) & (at < words)
    word = tl.load(read + row * words + at, mask=inside, other=0)
    if HAS_DO:
        word = tl.where(inside, word | tl.load(must_do + at, mask=at < words, other=0), 0)
    if HAS_SKIP:
        word = word & ~tl.load(must_skip + at, mask=at < words, other=0)
    left = tl.maximum(k_blocks - at * 32, 0)  # what lies past the last K block means nothing
    return tl.where(left < 32, word & ((1 << (left & 31)) - 1), word)


@triton.jit
def _lengths(
    read, must_do, must_skip, row, rows, k_blocks, words, HAS_DO: tl.constexpr,
    HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Lengths of the lists of bitmap rows ``row``, 0 from ``rows`` on.

    A list for each lane. With words in lanes, which have to be joined for each list, ordering lists
    among 591 takes twice as long.
    """
    lengths = row * 0
    for word in range(words):
        lengths += set_bits(
            _walked(
                read, must_do, must_skip, row, rows, row * 0 + word, k_blocks, words, HAS_DO,
                HAS_SKIP,
            )
        )  # fmt: skip
    return lengths


@triton.jit
def _rank(
    read, must_do, must_skip, order, counts, row, total, q_blocks, k_blocks, words, joint,
    ROWS: tl.constexpr, HAS_DO: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Give the list of bitmap row ``row`` its place in the order of work, see :func:`plan`."""
    rows = tl.num_programs(0)
    head = row // q_blocks * q_blocks
    # The rows that it is compared with: those of its head, or of the last heads together.
    together = row >= rows - joint * q_blocks
    first = tl.where(together, rows - joint * q_blocks, head)
    many = tl.where(together, joint * q_blocks, q_blocks)
    read += first.to(tl.int64) * words
    # Nothing is joined across lanes before the end.
    in_head = tl.zeros((ROWS,), tl.int32)
    in_all = tl.zeros((ROWS,), tl.int32)
    longest = tl.zeros((ROWS,), tl.int32)
    tiles = tl.zeros((ROWS,), tl.int32)
    for start in range(0, many, ROWS):
        other = start + tl.arange(0, ROWS)
        theirs = _lengths(
            read, must_do, must_skip, other, many, k_blocks, words, HAS_DO, HAS_SKIP
        )  # fmt: skip
        longest = tl.maximum(longest, theirs)
        tiles += theirs
        before = (theirs > total) | ((theirs == total) & (first + other < row))
        before = before & (other < many)
        in_all += before.to(tl.int32)
        mine = (first + other >= head) & (first + other < head + q_blocks)
        in_head += (before & mine).to(tl.int32)
    uneven = 4 * tl.max(longest, axis=0) * many > 5 * tl.sum(tiles, axis=0)
    place = tl.where(uneven, first + tl.sum(in_all, axis=0), head + tl.sum(in_head, axis=0))
    tl.store(order + place, row)
    tl.store(counts + place, total)


@triton.jit
def pieces_of(length, fair, mean, LEAST: tl.constexpr, GOAL: tl.constexpr):
    """Number of pieces that lists of ``length`` tiles are cut into, 1 of most.

    ``fair``: tiles of all lists for each multiprocessor; ``mean``: for each list, both rounded up.
    Lists longer than 9/8 of a fair share and 5/4 of the mean are cut, so none where all are as
    long (:func:`last_round` does that). Pieces aim at ``GOAL`` eighths of a fair share and have
    ``LEAST`` tiles at least. Where a fair share is less than that, they have a share, and half of
    ``LEAST`` at least: the longest piece is most of the time there. A list of n fair shares has
    ceil(8 n / GOAL) of them: at most 2 n if ``GOAL`` is 6, which 3/2 of a share reach, and 8/3 n if
    it is 4.
    """
    least = tl.minimum(tl.maximum(fair, (LEAST + 1) // 2), LEAST)
    goal = tl.maximum((GOAL * fair + 7) // 8, least)
    pieces = tl.minimum((length + goal - 1) // goal, tl.minimum(length // least, MOST_PIECES))
    return tl.where(8 * length > tl.maximum(9 * fair, 10 * mean), tl.maximum(pieces, 1), 1)


@triton.jit
def last_round(rows, longest, mean, UNITS: tl.constexpr, LEAST: tl.constexpr, SLOTS: tl.constexpr):
    """Of ``rows`` lists that are nearly as long, those that are cut: (first, into how many pieces).

    Whole lists go round the multiprocessors, and the last round may leave most of them idle. Its
    lists are cut, into up to eight pieces, as that round ends first; by an eighth of a list at
    least. 1 piece: the last round is full enough, or the lists are not as long as each other.
    """
    rest = rows % UNITS
    time = longest - longest // 8
    pieces = rest * 0 + 1
    for number in tl.static_range(2, 9):
        rounds = (rest * number + UNITS - 1) // UNITS
        then = rounds * ((longest + number - 1) // number)
        fits = (longest >= number * LEAST) & (rest * number <= SLOTS)
        better = fits & (then < time)
        pieces = tl.where(better, number, pieces)
        time = tl.where(better, then, time)
    even = (8 * longest <= 9 * mean) & (rest > 0)
    return rows - rest, tl.where(even, pieces, 1)


@triton.jit
def _cut(
    lengths, order, counts, next_tile, mine, length, q_blocks,
    UNITS: tl.constexpr, ALL: tl.constexpr, LEAST: tl.constexpr, GOAL: tl.constexpr,
    SLOTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The pieces of the list of row ``mine`` in the order of work, see :func:`plan`.

    ``lengths``: those of all lists, [ALL].
    """
    rows = tl.num_programs(0)
    other = tl.arange(0, ALL)
    total = tl.sum(lengths, axis=0)
    fair = (total + UNITS - 1) // UNITS
    mean = (total + rows - 1) // rows
    theirs = pieces_of(lengths, fair, mean, LEAST, GOAL)
    pieces = pieces_of(length, fair, mean, LEAST, GOAL)
    if EVEN:
        last, number = last_round(rows, tl.max(lengths, axis=0), mean, UNITS, LEAST, SLOTS)
        most = tl.maximum(lengths // LEAST, 1)
        theirs = tl.where((number > 1) & (other >= last), tl.minimum(number, most), theirs)
        most = tl.maximum(length // LEAST, 1)
        pieces = tl.where((number > 1) & (mine >= last), tl.minimum(number, most), pieces)
    theirs = tl.where(other < rows, theirs, 0)
    # The longest first, of all heads, if one list more at the end would show. If it does not, head
    # after head, whose keys stay in the cache.
    apart = 4 * tl.max(lengths, axis=0) <= fair
    sizes = (lengths + theirs - 1) // tl.maximum(theirs, 1)
    size = (length + pieces - 1) // pieces
    longer = (sizes > size) | ((sizes == size) & (other < mine))
    head = other // q_blocks
    before = tl.where(
        apart, (head < mine // q_blocks) | ((head == mine // q_blocks) & longer), longer
    )
    place = tl.sum(tl.where(before, theirs, 0), axis=0)
    first = tl.sum(tl.where(before & (theirs > 1), theirs, 0), axis=0)
    piece = tl.arange(0, MOST_PIECES)
    tl.store(order + place + piece, (piece * 0 + mine) | (first << 16), mask=piece < pieces)
    tl.store(
        counts + place + piece, length | (piece << 16) | ((pieces - 1) << 20), mask=piece < pieces
    )
    if mine == 0:
        tl.store(next_tile + 1, tl.sum(theirs, axis=0))
        for start in range(0, 2 * SLOTS, 128):
            at = start + tl.arange(0, 128)
            tl.store(next_tile + 4 + at, at * 0, mask=at < 2 * SLOTS)


@triton.jit(do_not_specialize=["q_blocks", "k_blocks", "words", "joint"])
def plan(
    read, must_do, must_skip, items, counts, order, next_tile, votes, weights, tally,
    q_blocks, k_blocks, words, joint,
    WORDS: tl.constexpr, ROWS: tl.constexpr, DESCENDING: tl.constexpr, HAS_DO: tl.constexpr,
    HAS_SKIP: tl.constexpr, WEIGH: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr,
    LEAST: tl.constexpr, GOAL: tl.constexpr, SLOTS: tl.constexpr, EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Bitmap [heads, q_blocks, words] -> K blocks to walk, and bitmap rows in the order of work.

    One program per q block; ``WORDS`` is a power of two >= words.

    - ``items`` int16 [heads, q_blocks, k_blocks]: K blocks to walk; an empty list names block 0.
    - ``order``, ``counts`` int32 [heads * q_blocks]: rows of the bitmap in the order of work, and
      the lengths of their lists. Head after head, most K blocks first, stable: so keys stay in the
      cache. The last ``joint`` heads are ordered together if one of their lists is longer than 5/4
      of their mean, as the longest list of the last head would otherwise begin when hardly any
      work is left beside it. Every program finds the place of its own row, counting the lists of
      all that it is ordered with, ``ROWS`` at a time.
    - Cleared for the walk: the counter ``next_tile`` and the word behind it, ``tally`` int64 [2],
      and ``votes`` [heads, q_blocks, words] or, if ``WEIGH``, ``weights`` [heads, q_blocks,
      k_blocks] as :func:`select` takes them.

    With ``UNITS`` multiprocessors lists are cut, see :func:`pieces_of` and, if ``EVEN``,
    :func:`last_round`; ``ALL`` is a power of two >= heads * q_blocks. ``order`` and ``counts`` then
    have an entry for each piece, the largest first: row of the bitmap, and from bit 16 on the
    number of cut pieces before its list's first; length of the whole list, number of the piece from
    bit 16 and of its list's last from bit 20 on. ``next_tile`` has the number of pieces in its
    second word, and from the fifth one on two zeros for each of the ``SLOTS`` pieces there can be
    of lists that are cut.

    ``CHAINED``: the walk may be launched as soon as every program here has begun (programmatic
    dependent launch); it waits for the end.
    """
    if CHAINED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = (program // q_blocks).to(tl.int64) * q_blocks
    mine = program % q_blocks
    row = head + mine
    if UNITS:
        # First, as no load passes a store: memory is waited for once, and holds the program's own
        # row, too.
        lengths = _lengths(
            read, must_do, must_skip, tl.arange(0, ALL), tl.num_programs(0), k_blocks, words,
            HAS_DO, HAS_SKIP,
        )  # fmt: skip
    at = tl.arange(0, WORDS)
    word = _walked(
        read + head * words, must_do, must_skip, at * 0 + mine, q_blocks, at, k_blocks, words,
        HAS_DO, HAS_SKIP,
    )  # fmt: skip
    lane = tl.arange(0, 32)
    bit = tl.reshape((word[:, None] >> lane[None, :]) & 1, (WORDS * 32,))
    block = tl.arange(0, WORDS * 32)
    total = tl.sum(bit, axis=0)
    place = tl.cumsum(bit, axis=0) - 1
    if DESCENDING:
        place = total - 1 - place
    tl.store(items + row * k_blocks + place, block.to(tl.int16), mask=bit != 0)
    tl.store(items + row * k_blocks, 0, mask=total == 0)
    if WEIGH:
        weight = bit - 1
        if HAS_DO:
            must = tl.load(must_do + (block >> 5), mask=block < k_blocks, other=0) >> (block & 31)
            weight = tl.where(bit != 0, (must & 1) * _FIRM, weight)
        tl.store(weights + row * k_blocks + block, weight, mask=block < k_blocks)
    else:
        tl.store(votes + row * words + at, tl.zeros((WORDS,), tl.int32), mask=at < words)

    if UNITS:
        _cut(
            lengths, order, counts, next_tile, program, total, q_blocks, UNITS, ALL, LEAST, GOAL,
            SLOTS, EVEN,
        )  # fmt: skip
    else:
        _rank(
            read, must_do, must_skip, order, counts, program, total, q_blocks, k_blocks, words,
            joint, ROWS, HAS_DO, HAS_SKIP,
        )  # fmt: skip
        if program == 0:
            tl.store(next_tile + 1, 0)
    if program == 0:
        tl.store(next_tile, 0)
        tl.store(tally + tl.arange(0, 2), tl.zeros((2,), tl.int64))


@triton.jit
def _weights(weights, block, k_blocks):
    """Weights of tiles and which of them may be dropped; a tile that was not walked has -1."""
    found = tl.load(weights + block, mask=block < k_blocks, other=-1)
    # What was rounded up to more than 1 weighs 1.
    weight = tl.where(found < 0, -1, tl.minimum(found & (_FIRM - 1), _UNIT))
    return weight, (found >= 0) & (found < _FIRM)


@triton.jit
def _loose(weights, block, k_blocks):
    """Weights of the tiles that may be dropped; of others, what no cut reaches."""
    weight, loose = _weights(weights, block, k_blocks)
    return tl.where(loose, weight, _FIRM)


@triton.jit
def select(
    weights, write, mass, k_blocks, words, limit, SPAN: tl.constexpr, HAS_MASS: tl.constexpr
):  # fmt: skip
    """Write the next bitmap row of a q block that was weighed, and what its tiles weigh.

    The rule of :mod:`liteattention_rocm.lite.budget`, bit for bit. Returns the number of tiles
    kept. ``weights`` [k_blocks] has -1 where a tile was not walked, and the bit ``_FIRM`` where it
    must be computed; those dropped add up to ``limit`` at most, and none is if that is 0.
    """
    first = tl.arange(0, SPAN)
    held = _loose(weights, first, k_blocks)
    largest = tl.max(_weights(weights, first, k_blocks)[0], axis=0)
    for start in range(SPAN, k_blocks, SPAN):
        more = _weights(weights, start + first, k_blocks)[0]
        largest = tl.maximum(largest, tl.max(more, axis=0))
    # The largest cut for which the weights up to it stay within the limit, bit by bit from above.
    cut = tl.zeros((), tl.int32)
    for step in range(_UNIT_BITS):
        tried = cut | (_UNIT >> (step + 1))
        total = tl.sum(tl.where(held <= tried, held, 0).to(tl.int64), axis=0)
        for start in range(SPAN, k_blocks, SPAN):
            more = _loose(weights, start + first, k_blocks)
            total += tl.sum(tl.where(more <= tried, more, 0).to(tl.int64), axis=0)
        cut = tl.where(total <= limit, tried, cut)
    cut = tl.where(limit > 0, cut, -1)
    kept = tl.zeros((), tl.int32)
    for start in range(0, k_blocks, SPAN):
        block = start + first
        weight, loose = _weights(weights, block, k_blocks)
        dropped = loose & (weight <= cut) & (weight < largest)
        keep = ((weight >= 0) & ~dropped).to(tl.int32)
        kept += tl.sum(keep, axis=0)
        word = tl.sum(tl.reshape(keep, (SPAN // 32, 32)) << tl.arange(0, 32)[None, :], axis=1)
        at = start // 32 + tl.arange(0, SPAN // 32)
        tl.store(write + at, word, mask=at < words)
        if HAS_MASS:
            share = tl.maximum(weight, 0).to(tl.float32) * (1.0 / _UNIT)
            tl.store(mass + block, share, mask=block < k_blocks)
    return kept


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def rounded(x, dtype: tl.constexpr, ROUNDING: tl.constexpr):
    """fp32 -> ``dtype``: to nearest even (0); for bf16 also to nearest away (1), to zero (2)."""
    if ROUNDING == 0:
        result = x.to(dtype)
    else:
        bits = x.to(tl.int32, bitcast=True)
        if ROUNDING == 1:
            bits = bits + 0x8000
        result = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        result = tl.where(x == x, result, x.to(dtype))
    return result


@triton.jit
def row_maxima(x, INTERPRETED: tl.constexpr):
    """Largest number of every row, NaN if there is one."""
    if INTERPRETED:
        result = tl.max(x, axis=1)  # NumPy's: it propagates NaN, and is not a loop in Python
    else:
        result = tl.reduce(x, 1, _larger)
    return result


@triton.jit
def product(a, b, c, WIDEN: tl.constexpr):
    """a @ b + c in fp32. ``WIDEN``: Triton's interpreter multiplies bf16 numbers as integers."""
    if WIDEN:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        result = tl.dot(a, b, c)
    return result


@triton.jit
def _flush(bits, first, count, items, votes, must_do, rows, end, HAS_DO: tl.constexpr):
    """Write the votes of 32 steps of a walk, one bit per step and row, into the next bitmap.

    Returns the number of tiles that it keeps.
    """
    word = tl.reduce(tl.where(rows < end, bits, 0), 0, _either)
    lane = tl.arange(0, 32)
    inside = first + lane < count
    block = tl.load(items + first + lane, mask=inside, other=0).to(tl.int32)
    keep = (word >> lane) & 1
    if HAS_DO:
        keep = keep | ((tl.load(must_do + (block >> 5), mask=inside, other=0) >> (block & 31)) & 1)
    bit = tl.full((32,), 1, tl.int32) << (block & 31)
    keep = tl.where(inside, keep, 0)
    tl.atomic_or(votes + (block >> 5), bit, mask=keep != 0, sem="relaxed")
    return tl.sum(keep, axis=0)


@triton.jit
def _walk(
    state, first, last, query, k, v, stride_k, stride_v, items, count, votes, weights_of, must_do,
    rows, end, kv_len, diagonal, c, threshold, unit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, LITE: tl.constexpr, VOTE_ROWS: tl.constexpr, HAS_DO: tl.constexpr,
    WEIGH: tl.constexpr, SIGN: tl.constexpr, WIDEN: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Fold steps ``first`` to ``last`` of a walk into its state.

    The state is (output, maxima, sums, votes, tiles that the votes of finished words keep).
    Rows from ``end`` on are not of this q block. ``unit`` is what a row's whole mass weighs.
    """
    out, top, total, bits, kept = state
    dim = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, BLOCK_N)
    place = lane.to(tl.int64) if FAR else lane
    for i in range(first, last):
        if LITE:
            block = tl.load(items + i).to(tl.int32)
        else:
            block = i
        key = block * BLOCK_N + lane
        start = (block * BLOCK_N).to(tl.int64)
        at_k = k + start * stride_k + place[None, :] * stride_k + dim[:, None]
        at_v = v + start * stride_v + place[:, None] * stride_v + dim[None, :]
        if MASKED:
            keys = tl.load(at_k, mask=key[None, :] < kv_len, other=0.0)
            values = tl.load(at_v, mask=key[:, None] < kv_len, other=0.0)
        else:
            keys = tl.load(at_k)
            values = tl.load(at_v)
        scores = product(query, keys, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
        if SIGN < 0:
            scores = -scores
        if SIGN == 0:
            scores = scores * 0.0
        if MASKED:
            visible = key[None, :] < kv_len
            if CAUSAL:
                visible = visible & (key[None, :] <= rows[:, None] + diagonal)
            scores = tl.where(visible, scores, float("-inf"))
        if LITE:
            # A NaN stays in the running maximum, so that its row keeps every later tile.
            peak = row_maxima(scores, WIDEN)
            highest = _larger(top, peak)
            if not WEIGH:
                # Not "above > threshold": NaN as a threshold keeps every tile, and so does a
                # first tile.
                negligible = (peak - top) * c <= threshold
                bits = bits | tl.where(negligible, 0, tl.full((BLOCK_M,), 1, tl.int32) << (i & 31))
        else:
            highest = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key: exp2(-inf - 0) = 0 instead of exp2(-inf + inf) = NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        # Not top * c - base * c: of its fused multiply-add comes the rounding of the other product,
        # so that sums grow by up to 1e-6 with every block.
        fade = tl.exp2((top - base) * c)
        weights = tl.exp2(scores * c - (base * c)[:, None])
        if LITE and VOTE_ROWS > 0:
            # Rows past the end agree with everything.
            drop = (negligible | (rows >= end)).to(tl.int32)
            GROUPS: tl.constexpr = BLOCK_M // VOTE_ROWS
            drop = tl.min(tl.reshape(drop, (GROUPS, VOTE_ROWS)), axis=1)
            if HAS_DO:
                must = (tl.load(must_do + (block >> 5)) >> (block & 31)) & 1
                drop = drop * (1 - must)
            drop = tl.reshape(tl.broadcast_to(drop[:, None], (GROUPS, VOTE_ROWS)), (BLOCK_M,))
            weights = tl.where(drop[:, None] != 0, 0.0, weights)
        here = tl.sum(weights, axis=1)
        total = total * fade + here
        if WEIGH:
            # Rows past the end do not count. A NaN weighs 1, like what adds up to more.
            shares = tl.where(rows < end, here / total, 0.0)
            # A row that is guarded counts for all rows, which costs no second sum across warps.
            shares = tl.where(shares > _ROW_GUARD, BLOCK_M * 1.0, shares)
            share = tl.sum(shares, axis=0) * unit
            weight = tl.where(share < _UNIT, tl.ceil(share), _UNIT).to(tl.int32)
            if HAS_DO:
                must = (tl.load(must_do + (block >> 5)) >> (block & 31)) & 1
                weight = weight | (must * _FIRM)
            tl.store(weights_of + block, weight)
        out = product(weights.to(values.dtype), values, out * fade[:, None], WIDEN)
        top = highest
        if LITE and not WEIGH:
            if (i & 31) == 31:
                kept += _flush(bits, i - 31, count, items, votes, must_do, rows, end, HAS_DO)
                bits = tl.zeros((BLOCK_M,), tl.int32)
    return out, top, total, bits, kept


#: Sizes are no reason to compile again.
_SIZES = ["q_heads", "groups", "q_len", "kv_len", "q_blocks", "k_blocks", "words", "limit"]


@triton.jit(do_not_specialize=_SIZES)
def attention(
    q, k, v, out, lse, items, counts, order, votes, weights, mass, tally, must_do, limits,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    q_heads, groups, q_len, kv_len, q_blocks, k_blocks, words, limit, c, threshold,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_K: tl.constexpr, LITE: tl.constexpr, VOTE_ROWS: tl.constexpr,
    HAS_DO: tl.constexpr, WEIGH: tl.constexpr, HAS_MASS: tl.constexpr, BY_HEAD: tl.constexpr,
    HAS_LSE: tl.constexpr, SIGN: tl.constexpr, ROUNDING: tl.constexpr, WIDEN: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """One q block of ``ROWS`` rows; program = q block + q_blocks * (head + heads * batch).

    With lists, ``order`` has that number for every program.
    ``BLOCK_M`` is a power of two >= ``ROWS``; rows past a q block are computed and not used.
    ``c`` = abs(scale) * log2(e), ``SIGN`` the sign of the scale. ``threshold`` is in log2 units;
    NaN keeps every tile. ``VOTE_ROWS`` 0: computed tiles always contribute. ``WEIGH``: tiles are
    weighed in place of the vote, and :func:`select` chooses by ``limit`` or, if ``BY_HEAD``, by
    ``limits`` [q_heads]. ``tally`` gets the numbers of tiles computed and kept added. ``FAR``: rows
    of a tile may lie 2^31 elements apart.
    """
    program = tl.program_id(0)
    row = program
    if LITE:
        row = tl.load(order + program)
    lane = row // q_blocks
    batch = (lane // q_heads).to(tl.int64)
    head = lane % q_heads
    diagonal = kv_len - q_len
    if LITE:
        q_block = row % q_blocks
        at = row.to(tl.int64)
        items += at * k_blocks
        votes += at * words
        weights += at * k_blocks
        mass += at * k_blocks
        count = tl.load(counts + program)
    elif CAUSAL:
        # the last q blocks see the most keys and go first
        q_block = q_blocks - 1 - program % q_blocks
        last = tl.minimum((q_block + 1) * ROWS + diagonal, kv_len)
        count = tl.maximum(tl.cdiv(last, BLOCK_N), 0)
    else:
        q_block = program % q_blocks
        count = k_blocks
    first_row = (q_block * ROWS).to(tl.int64)
    end = tl.minimum((q_block + 1) * ROWS, q_len)
    rows = q_block * ROWS + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    head_q = head.to(tl.int64)
    head_k = (head // groups).to(tl.int64)
    q += batch * stride_qb + head_q * stride_qh + first_row * stride_qs
    k += batch * stride_kb + head_k * stride_kh
    v += batch * stride_vb + head_k * stride_vh
    out += batch * stride_ob + head_q * stride_oh + first_row * stride_os
    at_row = tl.arange(0, BLOCK_M).to(tl.int64) if FAR else tl.arange(0, BLOCK_M)
    here = rows < end
    query = tl.load(q + at_row[:, None] * stride_qs + dim[None, :], mask=here[:, None], other=0.0)

    state = (
        tl.zeros((BLOCK_M, HEAD_DIM), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M,), tl.int32),
        tl.full((), 0, tl.int32),
    )
    unit = _UNIT * 1.0 / (end - q_block * ROWS).to(tl.float32)
    if LITE:
        state = _walk(
            state, 0, count, query, k, v, stride_ks, stride_vs, items, count, votes, weights,
            must_do, rows, end, kv_len, diagonal, c, threshold, unit, BLOCK_M, BLOCK_N, HEAD_DIM,
            not EVEN_K, False, True, VOTE_ROWS, HAS_DO, WEIGH, SIGN, WIDEN, FAR,
        )  # fmt: skip
    else:
        whole = kv_len // BLOCK_N
        if CAUSAL:
            whole = tl.minimum(tl.maximum(q_block * ROWS + diagonal + 1, 0), kv_len) // BLOCK_N
        state = _walk(
            state, 0, whole, query, k, v, stride_ks, stride_vs, items, count, votes, weights,
            must_do, rows, end, kv_len, diagonal, c, threshold, unit, BLOCK_M, BLOCK_N, HEAD_DIM,
            False, CAUSAL, False, 0, False, False, SIGN, WIDEN, FAR,
        )  # fmt: skip
        if CAUSAL or not EVEN_K:
            state = _walk(
                state, whole, count, query, k, v, stride_ks, stride_vs, items, count, votes,
                weights, must_do, rows, end, kv_len, diagonal, c, threshold, unit, BLOCK_M,
                BLOCK_N, HEAD_DIM, True, CAUSAL, False, 0, False, False, SIGN, WIDEN, FAR,
            )  # fmt: skip
    result, top, total, bits, kept = state
    if LITE:
        if WEIGH:
            tl.debug_barrier()  # one warp wrote a weight, all read it
            if BY_HEAD:
                limit = tl.load(limits + head)
            kept = select(weights, votes, mass, k_blocks, words, limit, SPAN, HAS_MASS)
        elif (count & 31) != 0:
            kept += _flush(bits, count & -32, count, items, votes, must_do, rows, end, HAS_DO)
        tl.atomic_add(tally, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(tally + 1, kept.to(tl.int64), sem="relaxed")
    # A row that saw no key: 0 / 1 instead of 0 / 0.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + at_row[:, None] * stride_os + dim[None, :],
        rounded(result, out.dtype.element_ty, ROUNDING),
        mask=here[:, None],
    )
    if HAS_LSE:
        value = (top * c + tl.log2(total)) * 0.6931471805599453
        value = tl.where(total == 0.0, float("-inf"), value)
        tl.store(lse + lane.to(tl.int64) * q_len + rows, value, mask=here)
