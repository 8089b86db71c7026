"""Attention over requests of different lengths, in plain Triton: packed or in a paged cache.

The query rows of a request and the query heads that share a key head are packed into one tile, so
that decoding one row with grouped heads reads every key once. The keys of a request may be cut into
parts that are merged by log-sum-exp (Flash-Decoding). The host bounds their number and the device
chooses it from the true lengths, so one launch, recorded in a graph, serves requests of any length.
Beside prompts, requests of few rows have a launch of their own.
Kernels: :func:`attention`, :func:`merge`, :func:`widen`, :func:`write_kv`.

Head dims are any multiple of 16: a tile is ``WIDTH`` columns wide, the next power of two, of which
``HEAD_DIM`` are read and written and the others are zeros.

fp8 caches are widened, which is exact, and their scales are factors of the scores and of the
result. On NVIDIA they are read in words of two columns. ``ldmatrix`` transposes words and no bytes:
in bytes, every number of V takes a load of its own. A word's low and high bytes become fp16, four
numbers in three instructions (to bf16 they take 18 with Triton 3.6), and even and odd columns are
multiplied on their own. So q and the weights are fp16 there, both scaled by powers of two to what
fp16 can hold: see :func:`_halves_of_query` and ``_HEADROOM``.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135), a cache in
pages (PagedAttention, Kwon et al., arXiv 2309.06180), log-sum-exp merge of split softmax (Milakov
and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kernels import product, rounded

#: Weights in fp16 lie 2^15 higher, so that all down to 2^-39 of a row's largest count.
_HEADROOM = tl.constexpr(15.0)
#: Two words of two fp8 numbers each -> the fp16 numbers of the low or the high bytes.
_UNPACK = """
{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $1, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.%sx2 $0, %s;
}
"""
_LOW_E4M3, _HIGH_E4M3 = (tl.constexpr(_UNPACK % ("e4m3", half)) for half in ("low", "high"))
_LOW_E5M2, _HIGH_E5M2 = (tl.constexpr(_UNPACK % ("e5m2", half)) for half in ("low", "high"))

#: Do not specialise on sizes.
_SIZES = [
    "requests", "q_heads", "group", "window", "lookahead", "rows", "splits", "part_blocks",
]  # fmt: skip
_MERGE_SIZES = ["requests", "q_heads", "rows"]


@triton.jit
def _request(block, q_start, requests, TILE_ROWS: tl.constexpr):
    """Request of a tile, when request r's tiles begin at number q_start[r] // TILE_ROWS + r."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(q_start + middle) // TILE_ROWS + middle
        if begins <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _capped(scores, scale_log2, soft_cap):
    """c tanh(scale x / c) of raw scores x in log2 units, relative error below 1e-6 at every c.

    Where |scale x / c| <= 1/2 the uncapped score times tanh(t) / t, minimax in t^2 with an error of
    1.5e-8: 1 - 2 / (1 + 2^w) would cancel. Above, exp2 overflows to inf, which gives c.
    """
    w = scores * (scale_log2 * 2.0 / soft_cap)
    square = w * w
    ratio = square * 3.5887112e-6 - 9.1922371e-5
    ratio = square * ratio + 1.9225504e-3
    ratio = square * ratio - 4.0037524e-2
    ratio = square * ratio + 1.0
    far = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(w) + 1.0))
    return tl.where(square <= 2.081369, scores * scale_log2 * ratio, far)


@triton.jit
def _unpacked(words, FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Even and odd columns, as fp16, of int16 words that hold two fp8 numbers each."""
    if INTERPRETED:
        kind: tl.constexpr = tl.float8e4nv if FP8 == 3 else tl.float8e5
        low = (words & 255).to(tl.uint8).to(kind, bitcast=True).to(tl.float16)
        high = ((words >> 8) & 255).to(tl.uint8).to(kind, bitcast=True).to(tl.float16)
    else:
        # An instruction each, though ptxas sorts the bytes once for both: Triton 3.8 copies an
        # instruction of two results, and one copy's way to the product leads through shared memory.
        low = tl.inline_asm_elementwise(
            _LOW_E4M3 if FP8 == 3 else _LOW_E5M2, "=r,r", [words], tl.float16, True, 2
        )
        high = tl.inline_asm_elementwise(
            _HIGH_E4M3 if FP8 == 3 else _HIGH_E5M2, "=r,r", [words], tl.float16, True, 2
        )
    return low, high


@triton.jit
def _halves_of_query(even, odd):
    """Even and odd columns of q as fp16, and what to multiply each row's scores by.

    Each row times the power of two that brings its largest number to 2^14 or more, below 2^15.
    What is 2^-28 of that number or larger stays as it is; the rest is off by 2^-39 of it
    at most. NaN and infinities stay.
    """
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(even), axis=1), tl.max(tl.abs(odd), axis=1))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    even, odd = even * factor[:, None], odd * factor[:, None]
    return even.to(tl.float16), odd.to(tl.float16), back


@triton.jit
def _fold(
    state, first, end, query, odd_query, k, v, table, stride_kp, stride_kt, stride_vp, stride_vt,
    reach, kv_len, window, scale_log2, soft_cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, PAGE: tl.constexpr, LOOKAHEAD: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Fold the keys from ``first`` to ``end`` into the running (output, maxima, sums).

    A row sees no key past its ``reach`` with ``LOOKAHEAD``, and of those up to there only the last
    ``window`` with ``WINDOW``.

    With ``FP8`` the columns are words: ``query`` and the first output are of even columns,
    ``odd_query`` and the second of odd ones, and maxima lie ``_HEADROOM`` below the scores'.
    """
    out, odd_out, top, total = state
    dim = tl.arange(0, WIDTH)
    lane = tl.arange(0, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        key = start + lane
        inside = key < kv_len
        if PAGE > 0:
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            token = (key % PAGE).to(tl.int64)
            at_k = page * stride_kp + token * stride_kt
            at_v = page * stride_vp + token * stride_vt
        else:
            at_k = key.to(tl.int64) * stride_kt
            at_v = key.to(tl.int64) * stride_vt
        if WIDTH != HEAD_DIM:
            column = dim < HEAD_DIM
            there = column[:, None] & inside[None, :]
            keys = tl.load(k + at_k[None, :] + dim[:, None], mask=there, other=0.0)
            there = inside[:, None] & column[None, :]
            values = tl.load(v + at_v[:, None] + dim[None, :], mask=there, other=0.0)
        elif MASKED:
            keys = tl.load(k + at_k[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
            values = tl.load(v + at_v[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        else:
            keys = tl.load(k + at_k[None, :] + dim[:, None])
            values = tl.load(v + at_v[:, None] + dim[None, :])
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if FP8 > 0:
            keys, odd_keys = _unpacked(keys, FP8, WIDEN)
            scores = product(odd_query, odd_keys, scores, WIDEN)
        scores = product(query, keys.to(query.dtype), scores, WIDEN)
        if CAP:
            scores = _capped(scores, scale_log2, soft_cap)
        else:
            scores = scores * scale_log2
        if MASKED:
            visible = (key < end)[None, :] & inside[None, :]
            if LOOKAHEAD:
                visible = visible & (key[None, :] <= reach[:, None])
            if WINDOW:
                visible = visible & (key[None, :] > reach[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.max(scores, axis=1)
        if FP8 > 0:
            highest -= _HEADROOM
        highest = tl.maximum(top, highest)
        # A row that has seen no key: exp2(-inf - 0) = 0 instead of exp2(-inf + inf) = NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        weights = weights.to(query.dtype)
        if FP8 > 0:
            values, odd_values = _unpacked(values, FP8, WIDEN)
            odd_out = product(weights, odd_values, odd_out * fade[:, None], WIDEN)
        out = product(weights, values.to(query.dtype), out * fade[:, None], WIDEN)
        top = highest
    return out, odd_out, top, total


@triton.jit(do_not_specialize=_SIZES)
def attention(
    q, k, v, out, lse, sinks, part_out, part_lse, part_count, q_start, kv_len, page_table,
    k_scale_at, v_scale_at,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_table,
    requests, q_heads, group, window, lookahead, rows, splits, part_blocks, scale_log2, soft_cap,
    v_scale,
    TILE_ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, ONE_TILE: tl.constexpr, PAGE: tl.constexpr,
    LOOKAHEAD: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, ROUNDING: tl.constexpr, WIDEN: tl.constexpr, CHAINED: tl.constexpr,
    FROM: tl.constexpr, BELOW: tl.constexpr, SLOTS: tl.constexpr, SCALES: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Program (tile, key head, part): ``TILE_ROWS`` rows x ``GROUP`` heads of one request.

    ``GROUP`` is a power of two >= ``group``, heads of the tile past ``group`` are idle.
    ``ONE_TILE``: no request has more rows than a tile, tile r is request r. ``PAGE``: tokens of a
    page, 0 for packed keys; ``kv_len`` then holds kv_start [requests + 1]. A row at position p
    sees the keys j <= p + ``lookahead`` with ``LOOKAHEAD``, without which that is 0, and with
    ``WINDOW`` those with j > p + ``lookahead`` - ``window``. ``v_scale`` is what an fp8 cache's
    values are multiplied by; with ``SCALES`` fp32 ``k_scale_at[0]`` and ``v_scale_at[0]`` multiply
    its keys and values, too. ``FP8`` > 0: ``k`` and ``v`` point to int16 words of two fp8 numbers
    with as many bits of mantissa; strides are those of the numbers, even.

    Without ``SPLIT``, ``splits`` is 1, and ``out`` and ``lse`` are final. Otherwise a tile's keys
    are cut into as many parts as have ``part_blocks`` blocks of keys each, ``splits`` at most;
    programs of further parts exit. int32 ``part_count`` [rows] says how many there are. One part is
    final; several go to :func:`merge`: ``part_out`` fp32 [splits, rows, q_heads, HEAD_DIM] and
    ``part_lse`` fp32 (log2 units) [splits, rows, q_heads]. ``CHAINED``: the merge may be launched
    as soon as every program here has begun (programmatic dependent launch); it waits for the end.

    Several launches may share a batch: requests of fewer than ``FROM`` rows are left to another
    one, and those of ``BELOW`` > 0 rows or more. With ``SLOTS`` > 0, a multiple of ``TILE_ROWS``,
    this is the launch for requests of so many rows at most. Each then has ``SLOTS`` / ``TILE_ROWS``
    tiles, and row i of request r is row r * ``SLOTS`` + i of the partial results and of
    ``part_count``, which have requests * ``SLOTS`` rows.
    """
    if CHAINED:
        gdc_launch_dependents()
    BLOCK_M: tl.constexpr = TILE_ROWS * GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if SLOTS > 0:
        request = tile // (SLOTS // TILE_ROWS)
        first_row = tile % (SLOTS // TILE_ROWS) * TILE_ROWS
    elif ONE_TILE:
        request = tile
        first_row = 0
    else:
        request = _request(tile, q_start, requests, TILE_ROWS)
        first_row = (tile - tl.load(q_start + request) // TILE_ROWS - request) * TILE_ROWS
    row_start = tl.load(q_start + request)
    q_len = tl.load(q_start + request + 1) - row_start
    if (first_row < 0) | (first_row >= q_len):
        return
    if FROM > 0:
        if q_len < FROM:
            return
    if BELOW > 0:
        if q_len >= BELOW:
            return
    if SCALES:
        scale_log2 = scale_log2 * tl.load(k_scale_at)
        v_scale = v_scale * tl.load(v_scale_at)
    # Columns of a load of keys or values, and where they lie.
    PER_WORD: tl.constexpr = 2 if FP8 > 0 else 1
    stride_kp, stride_kt, stride_kh = (
        stride_kp // PER_WORD, stride_kt // PER_WORD, stride_kh // PER_WORD
    )  # fmt: skip
    stride_vp, stride_vt, stride_vh = (
        stride_vp // PER_WORD, stride_vt // PER_WORD, stride_vh // PER_WORD
    )  # fmt: skip
    if PAGE > 0:
        length = tl.load(kv_len + request)
        table = page_table + request.to(tl.int64) * stride_table
    else:
        key_start = tl.load(kv_len + request)
        length = tl.load(kv_len + request + 1) - key_start
        table = page_table
        k += key_start.to(tl.int64) * stride_kt
        v += key_start.to(tl.int64) * stride_vt
    k += kv_head.to(tl.int64) * stride_kh
    v += kv_head.to(tl.int64) * stride_vh

    member = tl.arange(0, BLOCK_M)
    row = first_row + member // GROUP
    head = kv_head * group + member % GROUP
    here = (row < q_len) & (member % GROUP < group)
    # The last key that a row may see. The window counts from there, so that masks take no more
    # than in causal attention.
    reach = length - q_len + lookahead + row
    token = (row_start + row).to(tl.int64)
    dim = tl.arange(0, WIDTH // PER_WORD) * PER_WORD
    at_q = q + token[:, None] * stride_qt + head.to(tl.int64)[:, None] * stride_qh + dim[None, :]
    there = _there(here, dim, HEAD_DIM, WIDTH)
    query = tl.load(at_q, mask=there, other=0.0)
    odd_query = query
    if FP8 > 0:
        query, odd_query, back = _halves_of_query(query, tl.load(at_q + 1, mask=there, other=0.0))
        scale_log2 = (scale_log2 * back)[:, None]

    # Keys that some row of the tile sees, cut into parts of whole blocks.
    first_reach = length - q_len + lookahead + first_row
    last_reach = length - q_len + lookahead + tl.minimum(first_row + TILE_ROWS, q_len) - 1
    low = 0
    high = length
    if LOOKAHEAD:
        high = tl.minimum(tl.maximum(last_reach + 1, 0), length)
    if WINDOW:
        # Exactly: pages before the window may be another request's, and 0 * NaN is NaN.
        low = tl.maximum(first_reach - window + 1, 0)
    blocks = tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
    share = blocks
    parts = 1
    if SPLIT:
        most = tl.maximum(tl.minimum(tl.cdiv(blocks, part_blocks), splits), 1)
        share = tl.cdiv(blocks, most)
        parts = tl.cdiv(blocks, tl.maximum(share, 1))
        if part >= tl.maximum(parts, 1):
            return
    begin = low + part * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, high)
    # Before ``whole`` every row sees every key.
    whole = begin
    if not WINDOW:
        whole = end
        if LOOKAHEAD:
            whole = tl.minimum(whole, first_reach + 1)
        whole = begin + tl.maximum(whole - begin, 0) // BLOCK_N * BLOCK_N

    nothing = tl.zeros((BLOCK_M, WIDTH // PER_WORD), tl.float32)
    state = (
        nothing,
        nothing,
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    if not WINDOW:
        state = _fold(
            state, begin, whole, query, odd_query, k, v, table, stride_kp, stride_kt, stride_vp,
            stride_vt, reach, length, window, scale_log2, soft_cap, BLOCK_M, BLOCK_N,
            HEAD_DIM // PER_WORD, WIDTH // PER_WORD, False, PAGE, LOOKAHEAD, WINDOW, CAP, WIDEN,
            FP8,
        )  # fmt: skip
    state = _fold(
        state, whole, end, query, odd_query, k, v, table, stride_kp, stride_kt, stride_vp,
        stride_vt, reach, length, window, scale_log2, soft_cap, BLOCK_M, BLOCK_N,
        HEAD_DIM // PER_WORD, WIDTH // PER_WORD, True, PAGE, LOOKAHEAD, WINDOW, CAP, WIDEN, FP8,
    )  # fmt: skip
    result, odd_result, top, total = state
    if FP8 > 0:
        result = tl.interleave(result, odd_result) * v_scale
    elif k.dtype.element_ty.primitive_bitwidth == 8:
        result = result * v_scale
    slot = token
    slots = rows
    if SLOTS > 0:
        slot = request.to(tl.int64) * SLOTS + row
        slots = requests * SLOTS
    if SPLIT:
        if (part == 0) & (kv_head == 0):
            tl.store(part_count + slot, parts, mask=here & (member % GROUP == 0))
    if parts <= 1:
        _finish(
            result, top, total, out, lse, sinks, token, head, here, rows, stride_ot, stride_oh,
            HEAD_DIM, WIDTH, HAS_SINKS, HAS_LSE, ROUNDING,
        )  # fmt: skip
    else:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        at = (part * slots + slot) * q_heads + head
        column = tl.arange(0, WIDTH)
        mask = _there(here, column, HEAD_DIM, WIDTH)
        tl.store(part_out + at[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
        share_lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(part_lse + at, share_lse, mask=here)


@triton.jit(do_not_specialize=["pages", "kv_heads", "window"])
def widen(
    k, v, k_out, v_out, table_out, q_start, kv_len, page_table, k_scale_at,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_table,
    pages, kv_heads, window,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, FROM: tl.constexpr, SCALES: tl.constexpr, FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of an fp8 cache as 16-bit numbers, for kernels that take those.

    Program (page of the copy, request, key head). A request of ``FROM`` rows or more has ``pages``
    pages of ``BLOCK_N`` tokens in ``k_out`` and ``v_out`` [requests * pages, BLOCK_N, kv_heads,
    HEAD_DIM], contiguous, and their numbers in ``table_out`` int32 [requests, pages]. What no row
    sees stays unwritten. The numbers stay what they are, without their scales, but keys get the
    sign of ``k_scale_at[0]`` with ``SCALES``. ``k``, ``v`` and their strides are those of
    :func:`attention` with ``FP8``.
    """
    page = tl.program_id(0)
    request = tl.program_id(1)
    head = tl.program_id(2)
    q_len = tl.load(q_start + request + 1) - tl.load(q_start + request)
    length = tl.load(kv_len + request)
    begin = page * BLOCK_N
    if (q_len < FROM) | (begin >= length):
        return
    if WINDOW:
        if begin + BLOCK_N <= length - q_len - window + 1:
            return
    number = request.to(tl.int64) * pages + page
    if head == 0:
        tl.store(table_out + number, number.to(tl.int32))
    key = begin + tl.arange(0, BLOCK_N)
    word = tl.arange(0, WIDTH // 2)
    column = tl.arange(0, WIDTH)
    inside = key < length
    if WINDOW:  # what no row sees may have any page
        inside = inside & (key > length - q_len - window)
    at = tl.load(
        page_table + request.to(tl.int64) * stride_table + key // PAGE, mask=inside, other=0
    )
    at = at.to(tl.int64)
    token = (key % PAGE).to(tl.int64)
    there = inside[:, None] & (word < HEAD_DIM // 2)[None, :]
    to = ((number * BLOCK_N + key - begin) * kv_heads + head)[:, None] * HEAD_DIM + column[None, :]
    stored = inside[:, None] & (column < HEAD_DIM)[None, :]

    from_k = at * (stride_kp // 2) + token * (stride_kt // 2) + head.to(tl.int64) * (stride_kh // 2)
    words = tl.load(k + from_k[:, None] + word[None, :], mask=there, other=0)
    even, odd = _unpacked(words, FP8, INTERPRETED)
    wide = tl.interleave(even, odd).to(tl.float32)
    if SCALES:
        wide = tl.where(tl.load(k_scale_at) < 0.0, -wide, wide)
    tl.store(k_out + to, wide.to(k_out.dtype.element_ty), mask=stored)

    from_v = at * (stride_vp // 2) + token * (stride_vt // 2) + head.to(tl.int64) * (stride_vh // 2)
    words = tl.load(v + from_v[:, None] + word[None, :], mask=there, other=0)
    even, odd = _unpacked(words, FP8, INTERPRETED)
    wide = tl.interleave(even, odd).to(tl.float32)
    tl.store(v_out + to, wide.to(v_out.dtype.element_ty), mask=stored)


@triton.jit
def _there(rows, dim, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Mask of the numbers that exist of rows that may not, and of columns up to ``WIDTH``."""
    if WIDTH == HEAD_DIM:
        mask = rows[:, None]
    else:
        mask = rows[:, None] & (dim < HEAD_DIM)[None, :]
    return mask


@triton.jit
def _finish(
    result, top, total, out, lse, sinks, token, head, here, rows, stride_ot, stride_oh,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    ROUNDING: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, a sink's logit among them, and store; maxima are in log2 units."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=here, other=0.0) * 1.4426950408889634
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        result = result * fade[:, None]
        top = highest
    # A row that saw no key: 0 / 1 instead of 0 / 0.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    dim = tl.arange(0, WIDTH)
    tl.store(
        out + token[:, None] * stride_ot + head.to(tl.int64)[:, None] * stride_oh + dim[None, :],
        rounded(result, out.dtype.element_ty, ROUNDING),
        mask=_there(here, dim, HEAD_DIM, WIDTH),
    )
    if HAS_LSE:
        value = (top + tl.log2(total)) * 0.6931471805599453
        value = tl.where(total == 0.0, float("-inf"), value)
        tl.store(lse + head.to(tl.int64) * rows + token, value, mask=here)


@triton.jit(do_not_specialize=_MERGE_SIZES)
def merge(
    part_out, part_lse, part_count, out, lse, sinks, q_start, stride_ot, stride_oh, requests,
    q_heads, rows, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, ROUNDING: tl.constexpr, CHAINED: tl.constexpr,
    SLOTS: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Merge the parts of :func:`attention`, ``PARTS`` at most. Program (row, head).

    With ``SLOTS`` > 0 program (request, head): the rows of a request that has so many at most.
    With ``FROM`` > 0 only rows of requests of so many or more: what :mod:`.hopper_ragged` computes.
    ``CHAINED``: this was launched before its predecessor in the stream has ended, and waits for
    that.
    """
    if CHAINED:
        gdc_wait()
    head = tl.program_id(1)
    if SLOTS > 0:
        request = tl.program_id(0)
        row_start = tl.load(q_start + request)
        q_len = tl.load(q_start + request + 1) - row_start
        if q_len > SLOTS:
            return
        for row in range(0, q_len):
            _merge_row(
                part_out, part_lse, part_count, out, lse, sinks, request * SLOTS + row,
                requests * SLOTS, row_start + row, head, stride_ot, stride_oh, q_heads, rows,
                PARTS, HEAD_DIM, WIDTH, HAS_SINKS, HAS_LSE, ROUNDING,
            )  # fmt: skip
    else:
        row = tl.program_id(0)
        if (row < tl.load(q_start)) | (row >= tl.load(q_start + requests)):
            return  # padding
        if FROM > 0:
            low = 0
            high = requests
            while high - low > 1:
                middle = (low + high) // 2
                if tl.load(q_start + middle) <= row:
                    low = middle
                else:
                    high = middle
            if tl.load(q_start + low + 1) - tl.load(q_start + low) < FROM:
                return
        _merge_row(
            part_out, part_lse, part_count, out, lse, sinks, row, rows, row, head, stride_ot,
            stride_oh, q_heads, rows, PARTS, HEAD_DIM, WIDTH, HAS_SINKS, HAS_LSE, ROUNDING,
        )  # fmt: skip


@triton.jit
def _merge_row(
    part_out, part_lse, part_count, out, lse, sinks, slot, slots, row, head, stride_ot, stride_oh,
    q_heads, rows, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Merge row ``slot`` of ``slots`` in the partial results into ``row`` of the output.

    All parts are read at once: one after the other, each would wait for memory.
    """
    parts = tl.load(part_count + slot)
    if parts > 1:  # else final already
        part = tl.arange(0, PARTS)
        dim = tl.arange(0, WIDTH)
        token = row.to(tl.int64) + tl.zeros((1,), tl.int64)
        one_head = head + tl.zeros((1,), tl.int32)
        at = (part * slots + slot.to(tl.int64)) * q_heads + head
        written = part < parts
        share = tl.load(part_lse + at, mask=written, other=float("-inf"))
        there = _there(written, dim, HEAD_DIM, WIDTH)
        values = tl.load(part_out + at[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
        top = tl.max(share, axis=0)
        weight = tl.exp2(share - tl.where(top == float("-inf"), 0.0, top))
        result = tl.sum(values * weight[:, None], axis=0)[None, :]
        total = tl.sum(weight, axis=0) + tl.zeros((1,), tl.float32)
        top += tl.zeros((1,), tl.float32)
        _finish(
            result, top, total, out, lse, sinks, token, one_head, one_head < q_heads, rows,
            stride_ot, stride_oh, HEAD_DIM, WIDTH, HAS_SINKS, HAS_LSE, ROUNDING,
        )  # fmt: skip


@triton.jit
def _fp8(x, MANTISSA: tl.constexpr):
    """Bits of fp32 numbers as e4m3 (3 bits of mantissa) or e5m2 (2) of the OCP form.

    To nearest even; beyond the finite range the largest finite number; NaN stays NaN. In integers,
    so that every GPU and the interpreter give the same bits.
    """
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    nearest = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    nearest = nearest - ((127 - BIAS) << MANTISSA)
    # Subnormals are multiples of 2^(1 - BIAS - MANTISSA): the sum has that as its last place.
    PLACE: tl.constexpr = 24 - BIAS - MANTISSA
    low = bits.to(tl.float32, bitcast=True) + (1 << PLACE)
    small = low.to(tl.int32, bitcast=True) - ((127 + PLACE) << 23)
    result = tl.where(bits < ((128 - BIAS) << 23), small, tl.minimum(nearest, LARGEST))
    result = tl.where(bits > 0x7F800000, 0x7F, result)
    return (result | sign).to(tl.uint8)


@triton.jit(do_not_specialize=["page_size"])
def write_kv(
    k, v, k_cache, v_cache, slots, k_scale_at, v_scale_at,
    stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kp, stride_ks, stride_kc, stride_vp, stride_vs, stride_vc, page_size, k_scale, v_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, FP8_MANTISSA: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Program (row, head): copy k and v [HEAD_DIM] into token ``slots[row]`` of the cache.

    ``FP8_MANTISSA``: 0, or the cache is uint8 and gets row / scale as fp8, see :func:`_fp8`. With
    ``SCALES`` the scales are fp32 ``k_scale_at[0]`` and ``v_scale_at[0]``.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    dim = tl.arange(0, WIDTH)
    there = dim < HEAD_DIM
    page = slot // page_size
    token = slot % page_size
    key = tl.load(k + row * stride_kt + head * stride_kh + dim, mask=there)
    value = tl.load(v + row * stride_vt + head * stride_vh + dim, mask=there)
    if SCALES:
        k_scale = tl.load(k_scale_at)
        v_scale = tl.load(v_scale_at)
    if FP8_MANTISSA > 0:
        key = _fp8(tl.div_rn(key.to(tl.float32), k_scale), FP8_MANTISSA)
        value = _fp8(tl.div_rn(value.to(tl.float32), v_scale), FP8_MANTISSA)
    to_k = k_cache + page * stride_kp + token * stride_ks + head * stride_kc
    tl.store(to_k + dim, key, mask=there)
    to_v = v_cache + page * stride_vp + token * stride_vs + head * stride_vc
    tl.store(to_v + dim, value, mask=there)
