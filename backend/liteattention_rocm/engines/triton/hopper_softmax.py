"""What a warpgroup of the Hopper kernels does with scores in its registers: the softmax of a tile.

Here stands, too, what keeps ptxas from waiting for products of weights and values too early
(:func:`held`), and the form in which weights go from one step to the next.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from liteattention_rocm.lite import budget


@gluon.jit
def signed(scores, SIGN: gl.constexpr):
    """Scores as if the queries carried the sign of the scale."""
    if SIGN < 0:
        scores = -scores
    if SIGN == 0:
        scores = scores * 0.0
    return scores


@gluon.jit
def larger(a, b):
    """The larger number; a NaN, if there is one."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


#: The level of a row that has seen no key: below every score, and finite.
LOWEST = gl.constexpr(-3.4028234663852886e38)

#: A load that depends on a number and never runs: no operation yields a NaN of these bits.
_NEVER = gl.constexpr("""{
    .reg .pred never;
    .reg .b32 at;
    setp.eq.b32 never, $1, 0x7fc0dead;
    mov.b32 at, 0;
    @never ld.volatile.shared.b32 at, [at];
    mov.b32 $0, $1;
}""")


@gluon.jit
def held(x):
    """``x``, which later waits for matrix products stay behind.

    ptxas moves such a wait up past all arithmetic, to the access to memory before it: in front of
    the softmax that the product should run under. This is an access that cannot come before ``x``.
    """
    return gl.inline_asm_elementwise(_NEVER, "=r,r", [x], gl.float32, is_pure=False, pack=1)


#: The same where what it gives depends on the load, so that ptxas cannot look through it.
_NEVER_FIRMLY = gl.constexpr("""{
    .reg .pred never;
    .reg .b32 at;
    setp.eq.b32 never, $1, 0x7fc0dead;
    mov.b32 at, 0;
    mov.b32 $0, $1;
    @never ld.volatile.shared.b32 $0, [at];
}""")


@gluon.jit
def held_firmly(x):
    """``x`` as :func:`held` gives it; what is computed from it comes after the access, too."""
    return gl.inline_asm_elementwise(_NEVER_FIRMLY, "=r,r", [x], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _packed(weights, dtype: gl.constexpr):
    """fp32 [64, N] -> ``dtype``, to nearest even, in pairs: int32 [64, N / 2].

    ptxas holds numbers of 16 bits that a loop hands on one by one, and copies them together.
    """
    even, odd = gl.split(gl.reshape(weights, [64, weights.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        gl.static_assert(dtype == gl.float16)
        ASM: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [even, odd], gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_carried(weights, dtype: gl.constexpr, layout: gl.constexpr, LATE_WAIT: gl.constexpr):
    """Weights as they go to the next step: an operand, or pairs of it."""
    if LATE_WAIT:
        carried = _packed(weights, dtype)
    else:
        carried = gl.convert_layout(weights.to(dtype), layout)
    return carried


@gluon.jit
def as_operand(carried, dtype: gl.constexpr, layout: gl.constexpr, LATE_WAIT: gl.constexpr):
    """What :func:`as_carried` gave, ``dtype`` [64, N], for a matrix product."""
    if LATE_WAIT:
        low = (carried & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
        high = (carried >> 16).to(gl.int16).to(dtype, bitcast=True)
        joined = gl.reshape(gl.join(low, high), [64, carried.shape[1] * 2])
        carried = gl.convert_layout(joined, layout)
    return carried


#: How far scores may pass a row's level before the level follows, log2 units: weights are 2^8 at
#: most, which every dtype has room for.
_SLACK = gl.constexpr(8.0)


#: How much a row's sum may grow before its shares are divided by a new divisor. A renewal costs a
#: warp some 200 clocks: with 1.125, lists of 128 tiles take 2 % longer. They take 1.5 % longer if
#: the sum with the tile is asked, for which the branch then waits (H100, H200).
MOST_GROWTH = 3.0
GROWTH = gl.constexpr(MOST_GROWTH)
#: A sum may grow to twice its divisor. Until it has, a tile weighs up to 2 in a row and 4 in two,
#: the most that :func:`.hopper_settle.keep_weight` counts. So the divisor is ahead of the sum.
MOST_OF_DIVISOR = 2.0
OF_DIVISOR = gl.constexpr(MOST_OF_DIVISOR)
_AHEAD = MOST_GROWTH / MOST_OF_DIVISOR
AHEAD = gl.constexpr(_AHEAD)
#: The first divisor, in sums of the first tile; or as many as there are tiles, if those are fewer.
#: All tiles of the first word are scaled by what sums are at its end, so where they grow evenly
#: there is one renewal, that. With 1 there are three more: a warp's 64 lanes have sums of 32
#: columns, and the one that grows first renews all. Lists of 32 tiles take 2 % less time so (H200).
MOST_AHEAD = 32
FIRST_AHEAD = gl.constexpr(MOST_AHEAD)
#: A ratio of sums is multiplied with this, so that roundings do not make it too small.
_MORE = 1.0 + 2.0**-20
SLIGHTLY_MORE = gl.constexpr(_MORE)
#: The tile with which a sum grew may be heavier, and counted as 4. Two rows weigh two sums at most,
#: so as much of it is enough in any case.
LEAST_LEFT = 2.0 / 4.0 / _AHEAD * _MORE
#: A row of a tile is guarded if it has more than this of what it has seen by the end of the tile.
ROW_GUARD = budget.ROW_GUARD
#: What a lane counts where a row is guarded, and what a warp counts then at least: as much as 32
#: rows, of which a warp has 16. Of 32 lanes it is no more than 31 bits. Other counts are below it:
#: rows that weigh two divisors each have at least half of what they have seen in the tile, as they
#: had seen two at most before. So under a guard above 0.5 such tiles are kept, too.
GUARDED_COUNT = (1 << 26) - 1
#: A row's share of 1, as :func:`.hopper_settle.keep_weight` adds them up.
ROW_SHARE = 2.0**15
ROW = gl.constexpr(ROW_SHARE)


def _scaling(count: int, renewing: bool = False) -> str:
    """PTX that multiplies ``count`` numbers, in turns two of two rows, unless both factors are 1.

    The branch is the warp's: it has 16 rows, whose levels rarely follow after the first tiles.
    ``renewing``: in the same branch, as a second one would cost as much as this saves, it renews
    what shares of mass are multiplied with, if a level moved or a sum has grown enough, and scales
    what was counted by it.
    """
    results = 4 * count if renewing else count
    factor = results + count  # the first factor's operand; that of the other row is two on
    lines = [
        "{",
        ".reg .pred moved;",
        f"setp.neu.f32 moved, ${factor}, 1.0;",
        f"setp.neu.or.f32 moved, ${factor + 2}, 1.0, moved;",
    ]
    multiply = [f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(count)]
    if not renewing:
        return "\n".join([
            *lines, "vote.sync.any.pred moved, moved, 0xffffffff;", "@!moved bra done;", *multiply,
            "done:", "}",
        ])  # fmt: skip
    # Each has `count` operands, alike for a row: those of results, and what is only read.
    inverse, due, kept = count, 2 * count, 3 * count
    was_inverse, was_due, before, total, was_kept, older = (factor + n * count for n in range(1, 7))
    lines += [
        ".reg .pred wanted, inside, last;",
        ".reg .f32 sum, other, left, most, counted;",
        ".reg .b32 bits;",
        *(f"mov.f32 ${inverse + row}, ${was_inverse + row};" for row in (0, 2)),
        *(f"mov.f32 ${due + row}, ${was_due + row};" for row in (0, 2)),
        f"mov.b32 ${kept}, ${was_kept};",
        f"setp.gt.or.f32 wanted, ${before}, ${due}, moved;",
        f"setp.gt.or.f32 wanted, ${before + 2}, ${due + 2}, wanted;",
        "vote.sync.any.pred wanted, wanted, 0xffffffff;",
        "@!wanted bra done;",
        "vote.sync.any.pred moved, moved, 0xffffffff;",
        "@!moved bra scaled;",
        *multiply,
        "scaled:",
        "mov.f32 most, 0f00000000;",
    ]
    # What is left of shares that were counted before: at most as much as in the lane, of all
    # rows, whose sum grew least.
    for row in (0, 2):
        lines += [
            f"rcp.approx.ftz.f32 left, ${total + row};",
            f"mul.f32 left, left, ${factor + row};",
            f"mul.f32 left, left, ${due + row};",
            f"setp.neu.f32 inside, ${was_inverse + row}, 0.0;",
            "@inside max.f32 most, most, left;",
        ]
    lines += [
        "mov.b32 bits, most;",  # from 0 on, bits are in the order of their numbers
        "redux.sync.max.u32 bits, bits, 0xffffffff;",
    ]
    for row in (0, 2):
        lines += [
            f"shfl.sync.bfly.b32 other, ${total + row}, 2, 31, 0xffffffff;",
            f"add.f32 sum, ${total + row}, other;",
            "shfl.sync.bfly.b32 other, sum, 1, 31, 0xffffffff;",
            "add.f32 sum, sum, other;",
            "max.f32 sum, sum, 0f08800000;",  # 2^-110: a share of 1 over it is finite
            "rcp.approx.ftz.f32 sum, sum;",
            f"setp.neu.f32 inside, ${was_inverse + row}, 0.0;",
            f"@inside mul.f32 ${inverse + row}, sum, {ROW_SHARE / _AHEAD};",
            f"mul.f32 ${due + row}, ${total + row}, {MOST_GROWTH};",
        ]
    lines += [
        "mov.b32 most, bits;",
        f"mul.f32 most, most, {_MORE / MOST_GROWTH};",
        f"setp.eq.s32 last, ${older}, 0;",
        f"@last max.f32 most, most, {LEAST_LEFT};",
        f"cvt.rn.f32.s32 counted, ${kept};",
        "mul.f32 counted, counted, most;",
        "cvt.rpi.s32.f32 bits, counted;",
        f"min.s32 bits, bits, {GUARDED_COUNT - 1};",
        f"setp.lt.s32 last, ${was_kept}, {GUARDED_COUNT};",
        f"@last mov.b32 ${kept}, bits;",
    ]
    return "\n".join([*lines, "done:", "}"])


def _in_place(count: int, renewing: bool = False) -> str:
    """Operands of :func:`_scaling`."""
    places = [*["=f"] * count, *map(str, range(count)), *["f"] * count]
    if renewing:
        places[count:count] = [*["=f"] * 2 * count, *["=r"] * count]
        places += [*["f"] * 4 * count, *["r"] * 2 * count]
    return ",".join(places)


#: A thread of a warpgroup holds half as many numbers of 64 rows as there are columns.
_SCALING_128, _OF_128 = gl.constexpr(_scaling(64)), gl.constexpr(_in_place(64))
_SCALING_64, _OF_64 = gl.constexpr(_scaling(32)), gl.constexpr(_in_place(32))
_RENEWING, _OF_RENEWING = gl.constexpr(_scaling(64, True)), gl.constexpr(_in_place(64, True))


@gluon.jit
def scaled(out, fade, LAZY: gl.constexpr):
    """Outputs [64, N] times a factor for each row; ``LAZY``: not if all of a warp's are 1.

    A branch that is taken rarely saves 64 of some 470 instructions of a step, and their energy.
    """
    layout: gl.constexpr = out.type.layout
    factor = gl.convert_layout(fade, gl.SliceLayout(1, layout))[:, None]
    if LAZY:
        WIDE: gl.constexpr = out.shape[1] == 128
        gl.static_assert(WIDE or out.shape[1] == 64)
        factors = factor * gl.full([64, out.shape[1]], 1.0, gl.float32, layout)
        result = gl.inline_asm_elementwise(
            _SCALING_128 if WIDE else _SCALING_64, _OF_128 if WIDE else _OF_64, [out, factors],
            gl.float32, is_pure=False, pack=64 if WIDE else 32,
        )  # fmt: skip
    else:
        result = out * factor
    return result


@gluon.jit
def _by_element(by_lane, layout: gl.constexpr):
    """[64, 4] -> [64, 128] in ``layout``: for each number of a thread, that of its row."""
    ones = gl.reshape(gl.full([64, 128], 1, by_lane.dtype, layout), [64, 16, 4, 2])
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, ones.type.layout))
    spread = gl.convert_layout(by_lane, lanes)[:, None, :, None] * ones
    return gl.convert_layout(gl.reshape(spread, [64, 128]), layout)


@gluon.jit
def _by_lane(by_element, layout: gl.constexpr):
    """The other way round: of a thread's numbers of a row the first."""
    found, _ = gl.split(gl.reshape(by_element, [64, 16, 4, 2]))
    for size in gl.static_range(4):
        found, _ = gl.split(gl.permute(gl.reshape(found, [64, 2, 8 >> size, 4]), (0, 2, 3, 1)))
    return gl.convert_layout(gl.reshape(found, [64, 4]), layout)


@gluon.jit
def _by_row(by_word, lanes: gl.constexpr):
    """int32 [4, 32], a number of each lane -> [64, 4]: that for both of its rows."""
    both = gl.reshape(gl.full([64, 4], 0, gl.int32, lanes), [4, 2, 8, 4])
    spread = gl.convert_layout(gl.reshape(by_word, [4, 8, 4]), gl.SliceLayout(1, both.type.layout))
    return gl.convert_layout(gl.reshape(spread[:, None] + both, [64, 4]), lanes)


@gluon.jit
def scaled_and_renewed(out, fade, inverse, due, before, total, kept, older):
    """:func:`scaled`, and what shares of mass are multiplied with, renewed in the same branch.

    By lane, fp32 [64, 4]: ``inverse`` is a share of 1 over the sums of rows, of which this lane's
    may grow to ``due`` before it is renewed; they were ``before`` this tile, which is known early,
    and are ``total`` now. An inverse of 0 stays: that of rows past the end. ``kept`` int32 [4, 32]
    is what each warp has counted by these inverses. It becomes a count by the new ones: as much
    less as where a sum grew least, and not below :data:`LEAST_LEFT` of it where ``older`` is 0,
    that of the last tile counted. From :data:`GUARDED_COUNT` on it stays.
    Returns outputs [64, 128], ``inverse``, ``due`` and ``kept``.
    """
    layout: gl.constexpr = out.type.layout
    lanes: gl.constexpr = total.type.layout
    word: gl.constexpr = kept.type.layout
    older = older + gl.zeros([4, 32], gl.int32, word)
    factor = gl.convert_layout(fade, gl.SliceLayout(1, layout))[:, None]
    factors = factor * gl.full([64, 128], 1.0, gl.float32, layout)
    out, inverse, due, counts = gl.inline_asm_elementwise(
        _RENEWING, _OF_RENEWING,
        [
            out, factors, _by_element(inverse, layout), _by_element(due, layout),
            _by_element(before, layout), _by_element(total, layout),
            _by_element(_by_row(kept, lanes), layout), _by_element(_by_row(older, lanes), layout),
        ],
        (gl.float32, gl.float32, gl.float32, gl.int32), is_pure=False, pack=64,
    )  # fmt: skip
    rows = gl.reshape(_by_lane(counts, lanes), [4, 2, 8, 4])
    counts, _ = gl.split(gl.permute(rows, (0, 2, 3, 1)))
    kept = gl.convert_layout(gl.reshape(counts, [4, 32]), word)
    return out, _by_lane(inverse, lanes), _by_lane(due, lanes), kept


@gluon.jit
def _negligible(peak, top, c, threshold):
    """Not "above > threshold": a threshold of NaN keeps every tile, and so does a first one."""
    return (peak - top) * c <= threshold


#: PTX that sets a tile's bit, ``$4``, where it is not negligible: ``$2`` is how far above, as in
#: :func:`_negligible`, ``$3`` the threshold. ``gtu`` is true for a NaN, too.
_KEEP = gl.constexpr("""{
    .reg .pred keep;
    setp.gtu.f32 keep, $2, $3;
    @keep or.b32 $0, $0, $4;
}""")


@gluon.jit
def vote(peak, top, bits, i, c, threshold, PREDICATED: gl.constexpr = False):
    """Vote on tile ``i`` of a walk: ``peak`` is its maxima, ``top`` what rows had seen before it.

    Returns what they have seen by now, and ``bits`` with a bit for the tile in rows that want to
    keep it. ``PREDICATED``: by an "or" under a predicate, without a select. At head dim 64 steps
    take 3 % less time so; at 128, where ptxas then waits for products elsewhere, 6 % more (H100).
    """
    bit = 1 << (i & 31)
    if PREDICATED:
        layout: gl.constexpr = peak.type.layout
        alike = gl.zeros([64], gl.int32, layout)
        bits = gl.inline_asm_elementwise(
            _KEEP, "=r,0,f,f,r",
            [bits, (peak - top) * c, alike.to(gl.float32) + threshold, alike + bit],
            gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = bits | gl.where(_negligible(peak, top, c, threshold), 0, bit)
    return larger(top, peak), bits


#: The larger of two pairs of numbers of 16 bits; ptxas makes one instruction of two of them.
_LARGER_PAIR = gl.constexpr("max.s16x2 $0, $1, $2;")


@gluon.jit
def _larger_pair(a, b):
    return gl.inline_asm_elementwise(_LARGER_PAIR, "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)


@gluon.jit
def heaviest(carried, layout: gl.constexpr):
    """The largest of each row's weights, fp32 [64], of bf16 pairs that :func:`as_carried` gave.

    Numbers from 0 on, and the NaN that conversions make, are in the order of their bits. So a
    thread compares its 64 numbers in 20 instructions.
    """
    pair = gl.reduce(carried, 1, _larger_pair)
    largest = gl.maximum(pair << 16, pair & -65536).to(gl.float32, bitcast=True)
    return gl.convert_layout(largest, layout)


@gluon.jit
def vote_by_weight(peak, top, bits, i, share):
    """:func:`vote` where levels stay: a weight is negligible up to ``share`` of the row's largest.

    Weights are as they are multiplied, rounded to bf16. So a tile within 0.8 % of ``share``, 0.011
    in log2 units, may fall on its other side. Rows start at 0, which keeps a first tile.
    """
    layout: gl.constexpr = top.type.layout
    alike = gl.zeros([64], gl.int32, layout)
    bits = gl.inline_asm_elementwise(
        _KEEP, "=r,0,f,f,r", [bits, peak, top * share, alike + (1 << (i & 31))],
        gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return larger(top, peak), bits


@gluon.jit
def softmax(
    scores, top, level, c, threshold, bits, i, block, rows, q_len, must_do,
    VOTE: gl.constexpr, SOFT_SKIP: gl.constexpr, HAS_DO: gl.constexpr,
    LATE_EXP: gl.constexpr = False, LAZY: gl.constexpr = False,
):  # fmt: skip
    """Fold one tile into the levels of rows: at first their maxima times ``c``, rounded.

    Returns weights, the factor of what was summed before, ``top`` and ``level``, votes, the tile's
    maxima. Votes need maxima that were not scaled, in ``top``; otherwise it stays what it is. Rows
    start at :data:`LOWEST`. ``LATE_EXP``: the exponentials come after an access that waits for
    products stay behind. ``LAZY``: a level stays what it is until a score is more than 8
    above it, log2 units, so that what was summed before need not be scaled (as in FlashAttention-4,
    Zadouri et al., 2026).
    """
    peak = gl.reduce(scores, 1, larger)
    if VOTE:
        negligible = _negligible(peak, top, c, threshold)
        top, bits = vote(peak, top, bits, i, c, threshold)
    # A level is finite where a row has seen no key: exp2(-inf - base) = 0 instead of
    # exp2(-inf + inf) = NaN.
    risen = peak * c
    if LAZY:
        base = gl.where(risen - level > _SLACK, risen, level)
    else:
        base = larger(level, risen)  # rounding keeps the order: the rounded product of the maximum
    # Both are rounded: top * c - base would be fused, and the rounding of the other product would
    # come out of it, so that sums grew by up to 1e-6 with every block.
    fade = gl.exp2(level - base)
    new_level = base
    if LATE_EXP:
        base = held_firmly(base)
    weights = gl.exp2(scores * c - base[:, None])
    if SOFT_SKIP:
        # Rows past the end agree with everything.
        keep = gl.max(gl.where(negligible | (rows >= q_len), 0, 1), axis=0)
        if HAS_DO:
            keep = keep | (gl.load(must_do + (block >> 5)) >> (block & 31)) & 1
        weights = gl.where(keep > 0, weights, 0.0)
    return weights, fade, top, new_level, bits, peak


@gluon.jit
def weights_at(scores, level, c, LATE_EXP: gl.constexpr):
    """Weights of a tile at levels that stay, as :func:`softmax` gives them at a new one."""
    if LATE_EXP:
        level = held_firmly(level)
    return gl.exp2(scores * c - level[:, None])


@gluon.jit
def lane_sums(weights):
    """fp32 [64, N] -> [64, 4]: sums of a row's columns, by the lane that holds them.

    Four lanes hold a row. Joining their sums in every step would cost dense attention 1 %.
    """
    pairs = gl.reshape(weights, [64, weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def faded(sums, fade):
    """:func:`lane_sums` of rows that are scaled, [64]."""
    return sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def row_sums(sums, layout: gl.constexpr):
    """:func:`lane_sums` joined: [64]."""
    return gl.convert_layout(gl.sum(sums, 1), layout)


@gluon.jit
def rounded(x, dtype: gl.constexpr, ROUNDING: gl.constexpr):
    """fp32 -> ``dtype``: to nearest even (0); for bf16 also to nearest away (1), to zero (2)."""
    if ROUNDING == 0:
        result = x.to(dtype)
    else:
        bits = x.to(gl.int32, bitcast=True)
        if ROUNDING == 1:
            bits = bits + 0x8000
        result = ((bits >> 16) & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
        result = gl.where(x == x, result, x.to(dtype))
    return result
