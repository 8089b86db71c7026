"""Attention in plain Triton: any GPU that Triton compiles for, and the interpreter on a CPU.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135); tiles skipped
from step to step (LiteAttention, arXiv 2511.11062), q blocks scheduled longest first (Graham 1969).

A LiteAttention step is three launches: :func:`list_tiles` turns the bitmap into a list of K blocks
per q block, in walking order, :func:`order_longest_first` sorts the q blocks of a head by the
length of their lists, and :func:`attention` (or the kernel of :mod:`.hopper`) walks them and votes.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: ``ROUNDING`` of the kernels: how an fp32 result becomes bf16.
ROUNDING = {"rtne": 0, "rtna": 1, "rtz": 2}


@triton.jit(do_not_specialize=["k_blocks", "words"])
def list_tiles(
    read, must_do, must_skip, items, counts, votes, k_blocks, words,
    WORDS: tl.constexpr, DESCENDING: tl.constexpr, HAS_DO: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Bitmap rows [rows, words] -> K blocks to walk, int16 [rows, k_blocks], and their counts.

    An empty list names K block 0. Also clears ``votes`` [rows, words], which the walk fills. One
    program per row; ``WORDS`` is a power of two >= words.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WORDS)
    inside = at < words
    word = tl.load(read + row * words + at, mask=inside, other=0)
    if HAS_DO:
        word = word | tl.load(must_do + at, mask=inside, other=0)
    if HAS_SKIP:
        word = word & ~tl.load(must_skip + at, mask=inside, other=0)
    lane = tl.arange(0, 32)
    block = at[:, None] * 32 + lane[None, :]
    bit = tl.where(block < k_blocks, (word[:, None] >> lane[None, :]) & 1, 0)
    bit = tl.reshape(bit, (WORDS * 32,))
    block = tl.reshape(block, (WORDS * 32,))
    total = tl.sum(bit, axis=0)
    place = tl.cumsum(bit, axis=0) - 1
    if DESCENDING:
        place = total - 1 - place
    tl.store(items + row * k_blocks + place, block.to(tl.int16), mask=bit != 0)
    tl.store(items + row * k_blocks, 0, mask=total == 0)
    tl.store(counts + row, total)
    tl.store(votes + row * words + at, tl.zeros((WORDS,), tl.int32), mask=inside)


@triton.jit(do_not_specialize=["q_blocks"])
def order_longest_first(counts, order, sorted_counts, next_tile, q_blocks, BLOCK: tl.constexpr):
    """counts [heads, q_blocks] -> order [heads, q_blocks]: q blocks, most K blocks first, stable.

    ``sorted_counts`` gets their counts in that order, the counter ``next_tile`` 0. Program
    (i, head) finds the ranks of ``BLOCK`` q blocks of a head.
    """
    start_of_head = tl.program_id(1).to(tl.int64) * q_blocks
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + start_of_head + mine, mask=mine < q_blocks, other=0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, q_blocks, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(counts + start_of_head + other, mask=other < q_blocks, other=-1)
        longer = theirs[None, :] > count[:, None]
        earlier = (theirs[None, :] == count[:, None]) & (other[None, :] < mine[:, None])
        rank += tl.sum((longer | earlier).to(tl.int32), axis=1)
    tl.store(order + start_of_head + rank, mine, mask=mine < q_blocks)
    tl.store(sorted_counts + start_of_head + rank, count, mask=mine < q_blocks)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(next_tile, 0)


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
def _flush(bits, first, count, items, votes, must_do, rows, q_len, HAS_DO: tl.constexpr):
    """Write the votes of 32 steps of a walk, one bit per step and row, into the next bitmap."""
    word = tl.reduce(tl.where(rows < q_len, bits, 0), 0, _either)
    lane = tl.arange(0, 32)
    inside = first + lane < count
    block = tl.load(items + first + lane, mask=inside, other=0).to(tl.int32)
    keep = (word >> lane) & 1
    if HAS_DO:
        keep = keep | ((tl.load(must_do + (block >> 5), mask=inside, other=0) >> (block & 31)) & 1)
    bit = tl.full((32,), 1, tl.int32) << (block & 31)
    tl.atomic_or(votes + (block >> 5), bit, mask=inside & (keep != 0), sem="relaxed")


@triton.jit
def _walk(
    state, first, end, query, k, v, stride_k, stride_v, items, count, votes, must_do, rows,
    q_len, kv_len, diagonal, c, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, LITE: tl.constexpr, VOTE_ROWS: tl.constexpr, HAS_DO: tl.constexpr,
    SIGN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Fold steps ``first`` to ``end`` of a walk into the running (output, maxima, sums, votes)."""
    out, top, total, bits = state
    dim = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, BLOCK_N)
    for i in range(first, end):
        if LITE:
            block = tl.load(items + i).to(tl.int32)
        else:
            block = i
        key = block * BLOCK_N + lane
        start = (block * BLOCK_N).to(tl.int64)
        at_k = k + start * stride_k + lane[None, :] * stride_k + dim[:, None]
        at_v = v + start * stride_v + lane[:, None] * stride_v + dim[None, :]
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
            # Not "above > threshold": a threshold of NaN keeps every tile, and so does a first one.
            negligible = (peak - top) * c <= threshold
            bits = bits | tl.where(negligible, 0, tl.full((BLOCK_M,), 1, tl.int32) << (i & 31))
        else:
            highest = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key: exp2(-inf - 0) = 0 instead of exp2(-inf + inf) = NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest) * c
        fade = tl.exp2(top * c - base)
        weights = tl.exp2(scores * c - base[:, None])
        if LITE and VOTE_ROWS > 0:
            # Rows past the end agree with everything.
            drop = (negligible | (rows >= q_len)).to(tl.int32)
            GROUPS: tl.constexpr = BLOCK_M // VOTE_ROWS
            drop = tl.min(tl.reshape(drop, (GROUPS, VOTE_ROWS)), axis=1)
            if HAS_DO:
                must = (tl.load(must_do + (block >> 5)) >> (block & 31)) & 1
                drop = drop * (1 - must)
            drop = tl.reshape(tl.broadcast_to(drop[:, None], (GROUPS, VOTE_ROWS)), (BLOCK_M,))
            weights = tl.where(drop[:, None] != 0, 0.0, weights)
        total = total * fade + tl.sum(weights, axis=1)
        out = product(weights.to(values.dtype), values, out * fade[:, None], WIDEN)
        top = highest
        if LITE:
            if (i & 31) == 31:
                _flush(bits, i - 31, count, items, votes, must_do, rows, q_len, HAS_DO)
                bits = tl.zeros((BLOCK_M,), tl.int32)
    return out, top, total, bits


#: Sizes are no reason to compile again.
_SIZES = ["q_heads", "groups", "q_len", "kv_len", "q_blocks", "k_blocks", "words"]


@triton.jit(do_not_specialize=_SIZES)
def attention(
    q, k, v, out, lse, items, counts, order, votes, must_do,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    q_heads, groups, q_len, kv_len, q_blocks, k_blocks, words, c, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr, LITE: tl.constexpr, VOTE_ROWS: tl.constexpr, HAS_DO: tl.constexpr,
    HAS_LSE: tl.constexpr, SIGN: tl.constexpr, ROUNDING: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One q block of ``BLOCK_M`` rows; program = q block + q_blocks * (head + heads * batch).

    ``c`` = abs(scale) * log2(e), ``SIGN`` the sign of the scale. ``threshold`` is in log2 units;
    NaN keeps every tile. ``VOTE_ROWS`` 0: computed tiles always contribute.
    """
    program = tl.program_id(0)
    lane = program // q_blocks
    batch = (lane // q_heads).to(tl.int64)
    head = lane % q_heads
    diagonal = kv_len - q_len
    if LITE:
        q_block = tl.load(order + program)
        at = (lane * q_blocks + q_block).to(tl.int64)
        items += at * k_blocks
        votes += at * words
        count = tl.load(counts + program)
    elif CAUSAL:
        # the last q blocks see the most keys and go first
        q_block = q_blocks - 1 - program % q_blocks
        last = tl.minimum((q_block + 1) * BLOCK_M + diagonal, kv_len)
        count = tl.maximum(tl.cdiv(last, BLOCK_N), 0)
    else:
        q_block = program % q_blocks
        count = k_blocks
    first_row = (q_block * BLOCK_M).to(tl.int64)
    rows = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    head_q = head.to(tl.int64)
    head_k = (head // groups).to(tl.int64)
    q += batch * stride_qb + head_q * stride_qh + first_row * stride_qs
    k += batch * stride_kb + head_k * stride_kh
    v += batch * stride_vb + head_k * stride_vh
    out += batch * stride_ob + head_q * stride_oh + first_row * stride_os
    at_row = tl.arange(0, BLOCK_M)
    here = rows < q_len
    query = tl.load(q + at_row[:, None] * stride_qs + dim[None, :], mask=here[:, None], other=0.0)

    state = (
        tl.zeros((BLOCK_M, HEAD_DIM), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M,), tl.int32),
    )
    if LITE:
        state = _walk(
            state, 0, count, query, k, v, stride_ks, stride_vs, items, count, votes, must_do, rows,
            q_len, kv_len, diagonal, c, threshold, BLOCK_M, BLOCK_N, HEAD_DIM, not EVEN_K, False,
            True, VOTE_ROWS, HAS_DO, SIGN, WIDEN,
        )  # fmt: skip
    else:
        whole = kv_len // BLOCK_N
        if CAUSAL:
            whole = tl.minimum(tl.maximum(q_block * BLOCK_M + diagonal + 1, 0), kv_len) // BLOCK_N
        state = _walk(
            state, 0, whole, query, k, v, stride_ks, stride_vs, items, count, votes, must_do, rows,
            q_len, kv_len, diagonal, c, threshold, BLOCK_M, BLOCK_N, HEAD_DIM, False, CAUSAL,
            False, 0, False, SIGN, WIDEN,
        )  # fmt: skip
        if CAUSAL or not EVEN_K:
            state = _walk(
                state, whole, count, query, k, v, stride_ks, stride_vs, items, count, votes,
                must_do, rows, q_len, kv_len, diagonal, c, threshold, BLOCK_M, BLOCK_N, HEAD_DIM,
                True, CAUSAL, False, 0, False, SIGN, WIDEN,
            )  # fmt: skip
    result, top, total, bits = state
    if LITE:
        if (count & 31) != 0:
            _flush(bits, count & -32, count, items, votes, must_do, rows, q_len, HAS_DO)
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
