"""What becomes of tiles that :mod:`.hopper` walked: votes or shares, and the next step's bitmap.

Warpgroups join their rows' votes or add up their shares of softmax mass, every 32 steps of a walk.
Once a q block was walked, a warp of its own settles it: it chooses among tiles that were weighed
(:mod:`liteattention_rocm.lite.budget`), writes their bitmap, and counts for the tally.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_again import compute_again, was_low
from .hopper_softmax import AHEAD, GUARDED_COUNT, LEAST_LEFT, ROW, ROW_GUARD, SLIGHTLY_MORE

#: Tiles of a q block that are held in registers while a cut is searched for; more are read anew.
_SPAN = gl.constexpr(256)
#: A mass of 1 as a weight, its bits, and what is set in weights of must-do tiles: above every cut.
UNIT = gl.constexpr(1 << 24)
_UNIT_BITS = gl.constexpr(24)
_FIRM = gl.constexpr(1 << 30)
_LEAST_LEFT = gl.constexpr(LEAST_LEFT)
_GUARDED = gl.constexpr(GUARDED_COUNT)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def piece_of(tile, walk):
    """What a tile is of lists that may be cut, see :func:`.kernels.plan`.

    Returns the row of the bitmap, the length of its whole list, the number of the piece, of how
    many, and where the first of them is kept.
    """
    items, counts, order, span = walk
    place = gl.load(order + tile)
    told = gl.load(counts + tile)
    return place & 0xFFFF, told & 0xFFFF, (told >> 16) & 15, ((told >> 20) & 15) + 1, place >> 16


@gluon.jit
def blocks_of(items, first, count):
    """K blocks of 32 steps of a walk, int16, as :func:`flush` and the like take them.

    Not converted here: that would wait for the load, where nobody wants the blocks yet.
    """
    grid: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    at = first + gl.arange(0, 32, gl.SliceLayout(0, grid))
    return gl.load(items + at, mask=at < count, other=0)


@gluon.jit
def flush(
    bits, first, count, items, listed, votes, must_do, rows, q_len, HAS_DO: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """Write the votes of 32 steps of the walk, one bit per step and row, into the next bitmap.

    ``LISTED``: the K blocks of these steps are in ``listed`` already.
    """
    # A word per warp: what warps found is joined in memory, without a barrier of the warpgroup.
    grid: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    warps = gl.reshape(gl.where(rows < q_len, bits, 0), [4, 16])
    word = gl.convert_layout(gl.reduce(warps, 1, _either), gl.SliceLayout(1, grid))
    lane = gl.arange(0, 32, gl.SliceLayout(0, grid))
    inside = first + lane < count
    if LISTED:
        block = listed.to(gl.int32)
    else:
        block = gl.load(items + first + lane, mask=inside, other=0).to(gl.int32)
    keep = (word[:, None] >> lane[None, :]) & 1
    if HAS_DO:
        must = gl.load(must_do + (block >> 5), mask=inside, other=0) >> (block & 31)
        keep = keep | (must & 1)[None, :]
    bit = (1 << (block & 31))[None, :] + gl.zeros([4, 32], gl.int32, grid)
    target = votes + (block >> 5)[None, :] + gl.zeros([4, 32], gl.int32, grid)
    gl.atomic_or(target, bit, mask=inside[None, :] & (keep != 0), sem="relaxed")


@gluon.jit
def weight_of(scaled):
    """Weights of shares in units, fp32 -> int32: rounded up, at most :data:`UNIT`, as is a NaN."""
    return gl.where(scaled < UNIT, gl.ceil(scaled), UNIT).to(gl.int32)


#: Shares of two rows, 2^15 for a share of 1, are added to 2^17, an fp32 number whose last bit is
#: 2^-6. So its bits count them, 2^21 for a share of 1, and those of 32 lanes add up to the counts
#: alone: 32 times the bits of 2^17 is 0 in 32 bits.
_ROW_COUNTS = gl.constexpr(1 << 21)
#: PTX for it: the parts of a tile in ``$2`` and ``$3``, and what they are multiplied with. Both
#: sums are rounded to the nearest count, so that one more to begin with rounds up. Two rows weigh 4
#: at most, as does a NaN. A conversion would run where the exponentials run.
#: Rows are guarded beside that, by lane: ``$6`` and ``$7`` are its parts of their sums, ``$8`` and
#: ``$9`` :func:`slack_of`. A row with more than ``ROW_GUARD`` of its sum in the tile has as much in
#: one of its four lanes at least, so no shuffle is needed; to join the lanes takes 2 to 14 % more
#: time (H200). The lane then counts :data:`.hopper_softmax.GUARDED_COUNT`.
_PAIR = gl.constexpr(f"""{{
    .reg .f32 share, one, two;
    .reg .pred guarded;
    fma.rn.f32 share, $2, $4, 131072.015625;
    fma.rn.f32 share, $3, $5, share;
    min.f32 share, share, 262143.984375;
    fma.rn.f32 one, $6, {-ROW_GUARD}, $2;
    fma.rn.f32 two, $7, {-ROW_GUARD}, $3;
    setp.gt.f32 guarded, one, $8;
    setp.gt.or.f32 guarded, two, $9, guarded;
    @guarded mov.f32 share, 0f{0x48000000 + GUARDED_COUNT:08X};
    mov.b32 $0, share;
    mov.b32 $1, $0;
}}""")

#: PTX that keeps ``$4`` where ``$2`` is ``$3``. A select in its place costs lists that weigh 2 % of
#: their time, though it is compiled to as many instructions (H100).
_KEEP = gl.constexpr("""{
    .reg .pred mine;
    setp.eq.s32 mine, $2, $3;
    @mine mov.b32 $0, $4;
}""")


@gluon.jit
def whole_shares(row, q_len, like):
    """A row's share of 1, by lane as ``like``: fp32 [64, 4], 0 for rows past the end."""
    layout: gl.constexpr = like.type.layout
    at = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return gl.where(at < q_len, ROW, 0.0)[:, None] + gl.zeros([64, 4], gl.float32, layout)


@gluon.jit
def slack_of(row, q_len, like):
    """What a row may have in a tile above its guard, by lane as ``like``: fp32 [64, 4].

    0, or infinity for rows past the end, which guard nothing.
    """
    layout: gl.constexpr = like.type.layout
    at = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    slack = gl.where(at < q_len, 0.0, float("inf"))
    return slack[:, None] + gl.zeros([64, 4], gl.float32, layout)


@gluon.jit
def _reciprocal(x):
    """1 / x: a division looks for very large and very small numbers first."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def inverse_of(total, share):
    """What parts of rows are multiplied with: fp32 by lane, as ``total`` and ``share`` [64, 4]."""
    # A sum of 0 gives a finite number, with which the shares of the row are 0.
    return share * _reciprocal(gl.maximum(gl.sum(total, 1), 2.0**-110))[:, None]


@gluon.jit
def keep_weight(kept, here, inverse, total, slack, mine, i):
    """Keep what a tile of a walk weighs in a warp's rows, counted: where ``mine`` is ``i``.

    ``here`` of each row's sum ``total`` lies in it, by lane, [64, 4]; ``slack``: :func:`slack_of`.
    The count is :data:`.hopper_softmax.GUARDED_COUNT` or more if a row is guarded. The weight of a
    NaN means nothing: :func:`weights_of`.
    """
    layout: gl.constexpr = kept.type.layout
    pairs = gl.inline_asm_elementwise(
        _PAIR, "=r,=r,f,f,f,f,f,f,f,f", [here, inverse, total, slack], gl.int32, is_pure=True,
        pack=2,
    )  # fmt: skip
    # Two of a warp's 16 rows lie in a lane. Integers of 32 lanes add up in one instruction.
    pairs, _ = gl.split(gl.permute(gl.reshape(pairs, [4, 2, 8, 4]), (0, 2, 3, 1)))
    weight = gl.convert_layout(gl.sum(gl.reshape(pairs, [4, 32]), 1), gl.SliceLayout(1, layout))
    alike = gl.zeros([4, 32], gl.int32, layout)
    return gl.inline_asm_elementwise(
        _KEEP, "=r,0,r,r,r", [kept, mine + alike, alike + i, weight[:, None] + alike],
        gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def renewed(kept, total, share, inverse, older):
    """Counts by ``inverse`` as counts by divisors ahead of the sums ``total``, and their inverses.

    As in :func:`.hopper_softmax.scaled_and_renewed`: rounded up, and ``older`` is 0 for the last
    tile counted.
    """
    layout: gl.constexpr = kept.type.layout
    new = inverse_of(total * AHEAD, share)
    left = new * _reciprocal(gl.where(inverse == 0.0, 1.0, inverse))
    # From 0 on, bits are in the order of their numbers, and a warp has an instruction for them.
    bits = gl.max(gl.reshape(left.to(gl.int32, bitcast=True), [4, 64]), 1)
    most = bits.to(gl.float32, bitcast=True) * SLIGHTLY_MORE
    most = gl.convert_layout(most, gl.SliceLayout(1, layout))[:, None]
    most = gl.where(older == 0, gl.maximum(most, _LEAST_LEFT), most)
    counts = gl.minimum(gl.ceil(kept.to(gl.float32) * most).to(gl.int32), _GUARDED - 1)
    return gl.where(kept < _GUARDED, counts, kept), new


@gluon.jit
def weights_of(kept, total, row, q_len, rows, BY: gl.constexpr):
    """Weights of the last 32 tiles in a q block of ``rows`` rows, from counts: rounded up.

    Counts are of shares of ``BY`` times the rows' sums. Weights are 0 in warps without a row, and
    :data:`UNIT` in others one of whose sums is NaN: also of rows past the end, which are 0 times a
    key. So they are of tiles for which a row is guarded.
    """
    layout: gl.constexpr = kept.type.layout
    bad = gl.where(total != total, 1, 0)
    bad = gl.convert_layout(gl.sum(gl.reshape(bad, [4, 64]), 1), gl.SliceLayout(1, layout))
    first = row + 16 * gl.arange(0, 4, gl.SliceLayout(1, layout))
    # Each of 16 rows weighs 1 at most, however much its lanes count; one more for what they round.
    counts = gl.minimum(kept.to(gl.float32) * BY, 17.0 * _ROW_COUNTS)
    unit = (UNIT // _ROW_COUNTS) * SLIGHTLY_MORE * _reciprocal(rows.to(gl.float32))
    weight = gl.ceil(counts * unit).to(gl.int32)
    weight = gl.where((bad > 0)[:, None] | (kept >= _GUARDED), UNIT, weight)
    return gl.where((first < q_len)[:, None], weight, 0)


@gluon.jit
def flush_weights(kept, first, count, items, listed, weights, LISTED: gl.constexpr):
    """Add what 32 tiles of a walk weigh in each warp, int32 [4, 32]: their order does not matter.

    ``LISTED``: their K blocks are in ``listed`` already.
    """
    layout: gl.constexpr = kept.type.layout
    lane = gl.arange(0, 32, gl.SliceLayout(0, layout))
    inside = first + lane < count
    if LISTED:
        block = listed.to(gl.int32)
    else:
        block = gl.load(items + first + lane, mask=inside, other=0).to(gl.int32)
    everywhere = gl.zeros([4, 32], gl.int32, layout)
    target = weights + block[None, :] + everywhere
    gl.atomic_add(target, kept, mask=inside[None, :] & (everywhere == 0), sem="relaxed")


@gluon.jit
def _weights(weights, block, k_blocks):
    """Weights of tiles and which of them may be dropped; a tile that was not walked has -1."""
    # Volatile: atomics pass the nearest cache by, which may hold the line.
    found = gl.load(weights + block, mask=block < k_blocks, other=-1, volatile=True)
    # What was rounded up to more than 1 weighs 1.
    weight = gl.where(found < 0, -1, gl.minimum(found & (_FIRM - 1), UNIT))
    return weight, (found >= 0) & (found < _FIRM)


@gluon.jit
def _loose(weights, block, k_blocks):
    """Weights of the tiles that may be dropped; of others, what no cut reaches."""
    weight, loose = _weights(weights, block, k_blocks)
    return gl.where(loose, weight, _FIRM)


@gluon.jit
def _up_to(cut, loose):
    """Sum of the weights that are at most ``cut``, where more than 2 is all the same."""
    lanes = gl.sum(gl.reshape(gl.where(loose <= cut, loose, 0), [32, _SPAN // 32]), 1)
    return gl.minimum(gl.sum(gl.minimum(lanes, 2 * UNIT), 0), 2 * UNIT)


@gluon.jit
def _select(weights, votes, mass, k_blocks, words, limit, HAS_MASS: gl.constexpr):
    """What :func:`.kernels.select` does, in one warp: returns the number of tiles kept."""
    layout: gl.constexpr = gl.BlockedLayout([_SPAN // 32], [32], [1], [0])
    grid: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    first = gl.arange(0, _SPAN, layout)
    held = _loose(weights, first, k_blocks)
    largest = gl.max(_weights(weights, first, k_blocks)[0], 0)
    for start in range(_SPAN, k_blocks, _SPAN):
        largest = gl.maximum(largest, gl.max(_weights(weights, start + first, k_blocks)[0], 0))
    # The largest cut for which the weights up to it stay within the limit, two bits at a time from
    # above: nobody computes beside the search for the last q block, and three sums take as long as
    # one.
    cut = gl.to_tensor(0)
    for step in range(_UNIT_BITS // 2):
        low = UNIT >> (2 * step + 2)
        one, two, three = cut + low, cut + 2 * low, cut + 3 * low
        up_to_one = _up_to(one, held)
        up_to_two = _up_to(two, held)
        up_to_three = _up_to(three, held)
        for start in range(_SPAN, k_blocks, _SPAN):
            more = _loose(weights, start + first, k_blocks)
            up_to_one = gl.minimum(up_to_one + _up_to(one, more), 2 * UNIT)
            up_to_two = gl.minimum(up_to_two + _up_to(two, more), 2 * UNIT)
            up_to_three = gl.minimum(up_to_three + _up_to(three, more), 2 * UNIT)
        cut = gl.where(up_to_one <= limit, one, cut)
        cut = gl.where(up_to_two <= limit, two, cut)
        cut = gl.where(up_to_three <= limit, three, cut)
    cut = gl.where(limit > 0, cut, -1)
    kept = gl.to_tensor(0)
    for start in range(0, k_blocks, _SPAN):
        block = start + first
        weight, loose = _weights(weights, block, k_blocks)
        keep = gl.where((weight >= 0) & ~(loose & (weight <= cut) & (weight < largest)), 1, 0)
        kept += gl.sum(keep, 0)
        lane = gl.arange(0, 32, gl.SliceLayout(0, grid))
        bits = gl.convert_layout(gl.reshape(keep, [_SPAN // 32, 32]), grid) << lane[None, :]
        at = start // 32 + gl.arange(0, _SPAN // 32, gl.SliceLayout(1, grid))
        gl.store(votes + at, gl.sum(bits, 1), mask=at < words)
        if HAS_MASS:
            share = gl.maximum(weight, 0).to(gl.float32) * (1.0 / UNIT)
            gl.store(mass + block, share, mask=block < k_blocks)
    return kept


@gluon.jit
def _weigh_anew(weights, k_blocks):
    """Leave weights as they were before the walk: 0, or -1 or :data:`_FIRM`, which stay."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for start in range(0, k_blocks, 32):
        block = start + lane
        found = gl.load(weights + block, mask=block < k_blocks, other=-1, volatile=True)
        gl.store(weights + block, gl.where(found < 0, found, found & _FIRM), mask=block < k_blocks)


@gluon.jit
def _vote_anew(votes, words):
    """Leave a row of the next bitmap as it was before the walk: 0."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for start in range(0, words, 32):
        at = start + lane
        gl.store(votes + at, at * 0, mask=at < words)


@gluon.jit
def _count(votes, words):
    """Number of bits set in a bitmap row, in one warp."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    kept = gl.to_tensor(0)
    for start in range(0, words, 32):
        # Volatile: atomics pass the nearest cache by, which may hold the line.
        word = gl.load(votes + start + lane, mask=start + lane < words, other=0, volatile=True)
        # Sums over pairs, nibbles, bytes and the word; masks clear the copies of the sign.
        pairs = word - ((word >> 1) & 0x55555555)
        nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        kept += gl.sum((((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24, 0)
    return kept


@gluon.jit
def _tile_of_warp(tile_smem, tile_full, done):
    """Tile that the loading warp hands out next, for a single warp, which keeps its place."""
    mbarrier.wait(tile_full.index(done & 1), (done >> 1) & 1)
    shared: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.sum(tile_smem.index(done & 1).load(shared), axis=0)


@gluon.jit
def _settled(
    at, results, k_blocks, words, limit, WEIGH: gl.constexpr, HAS_MASS: gl.constexpr
):  # fmt: skip
    """Settle a q block, all of which was walked: choose if tiles were weighed, and count."""
    o_desc, lse, votes, weights, mass, tally, must_do, parts, next_tile = results
    if WEIGH:
        kept = _select(
            weights + at * k_blocks, votes + at * words, mass + at * k_blocks, k_blocks, words,
            limit, HAS_MASS,
        )  # fmt: skip
    else:
        kept = _count(votes + at * words, words)
    gl.atomic_add(tally + 1, kept.to(gl.int64), sem="relaxed")


@gluon.jit
def settle(
    results, smem, bars, walk, sizes, words, limit, limits, GROUPS: gl.constexpr,
    WEIGH: gl.constexpr, HAS_MASS: gl.constexpr, BY_HEAD: gl.constexpr, SLOTS: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """The settling warp: what there is to do once a q block was walked."""
    o_desc, lse, votes, weights, mass, tally, must_do, parts, next_tile = results
    tiles, q_heads, q_len, kv_len, q_blocks, k_blocks = sizes
    q_smem, k_smem, v_smem, o_smem, tile_smem, low_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, tile_full, tile_empty, walked = bars
    items, counts, order, span = walk
    done = 0
    tile = _tile_of_warp(tile_smem, tile_full, 0)
    while tile < tiles:
        if SLOTS:
            place, length, piece, pieces, first = piece_of(tile, walk)
            count = length * (piece + 1) // pieces - length * piece // pieces
        else:
            place = gl.load(order + tile)
            count = gl.load(counts + tile)
        at = place.to(gl.int64)
        if BY_HEAD:
            limit = gl.load(limits + place // q_blocks % q_heads)
        mbarrier.wait(walked.index(done & 1), (done >> 1) & 1)
        if FIXED:
            again = was_low(low_smem, done & 1, GROUPS)
        # Not before: two tiles that were walked and not settled are all that two bars tell apart.
        mbarrier.arrive(tile_empty.index(done & 1))
        if SLOTS:
            # Of a list that was cut the last one settles, which hears of what the others wrote.
            missing = pieces - 1
            if pieces > 1:
                missing -= gl.atomic_add(next_tile + 4 + first // 2 * 4 + 3, 1, sem="acq_rel")
            if missing == 0:
                _settled(at, results, k_blocks, words, limit, WEIGH, HAS_MASS)
        elif FIXED:
            count = gl.where(again == 0, count, 0)  # who computes it again counts it
            if again != 0:
                if WEIGH:
                    _weigh_anew(weights + at * k_blocks, k_blocks)
                else:
                    _vote_anew(votes + at * words, words)
                compute_again(next_tile, tile, False)
            else:
                _settled(at, results, k_blocks, words, limit, WEIGH, HAS_MASS)
        else:
            _settled(at, results, k_blocks, words, limit, WEIGH, HAS_MASS)
        gl.atomic_add(tally, count.to(gl.int64), sem="relaxed")
        done += 1
        tile = _tile_of_warp(tile_smem, tile_full, done)
    mbarrier.arrive(tile_empty.index(done & 1))
