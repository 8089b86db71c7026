"""Prompts of different lengths on Hopper GPUs (sm_90), packed or in a paged cache, in Gluon.

One workgroup computes 128 or 192 query rows of one request and head: a warp that loads
(:mod:`.hopper_ragged_load`), and warpgroups of 64 rows each, as in :mod:`.hopper`, whose schedule
this kernel has. Either it ends then, or it takes further tiles off a counter: the loading warp
finds them and tells the warpgroups by way of shared memory, so that the next tile's loads run under
the end of this one's, its queries into a second buffer where there is room. The bulk copy engine
gathers a K block from the cache in *pieces*: as many tokens as lie together in a page, 64 columns
each, which is how the matrix units want them in shared memory. So a page table costs a few more
copies per block, and the loop that computes knows nothing of pages.

K blocks are walked from the last to the first: what needs a mask, the end and the diagonal, comes
first. Head dims that are no multiple of 64 are widened with zeros, which the copy engine fills in
beyond a tensor's edge. Requests of less than ``shortest`` rows are left to
:func:`.ragged.attention`, where query heads that share a key head share a tile.

Where tiles are fewer than multiprocessors, they may be cut into *parts* along the keys, a program
each, which :func:`.ragged.merge` merges.

Methods: as in :mod:`.hopper` and :mod:`.ragged`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_ragged_load import COLUMNS, TOLD, load, place_of, told
from .hopper_ring import advanced, barrier
from .hopper_softmax import (
    LOWEST,
    as_carried,
    as_operand,
    faded,
    lane_sums,
    rounded,
    row_sums,
    scaled,
    signed,
    softmax,
)

_COLUMNS = gl.constexpr(COLUMNS)
#: Do not specialise on sizes.
_SIZES = [
    "requests", "tiles", "each", "shortest", "q_heads", "group", "span", "window", "lookahead",
    "rows", "splits", "part_blocks",
]  # fmt: skip


# Triton 3.9 calls it "reinterpret", 3.6 has an underscore before it.
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _capped(scores, scale_log2, soft_cap):
    """c tanh(scale x / c) in log2 units; see :func:`.ragged.capped`, whose numbers these are."""
    w = scores * (scale_log2 * 2.0 / soft_cap)
    square = w * w
    ratio = square * 3.5887112e-6 - 9.1922371e-5
    ratio = square * ratio + 1.9225504e-3
    ratio = square * ratio - 4.0037524e-2
    ratio = square * ratio + 1.0
    far = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (gl.exp2(w) + 1.0))
    return gl.where(square <= 2.081369, scores * scale_log2 * ratio, far)


@gluon.jit
def _scored(
    scores, block, reach, length, window, scale_log2, soft_cap, mask_from, mask_below,
    BLOCK_N: gl.constexpr, LOOKAHEAD: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    SIGN: gl.constexpr, HIDES: gl.constexpr = True,
):  # fmt: skip
    """Sign or cap of raw scores, and what the rows do not see hidden, if the block ``HIDES``."""
    if CAP:
        scores = _capped(scores, scale_log2, soft_cap)
    else:
        scores = signed(scores, SIGN)
    if HIDES and ((block >= mask_from) | (block < mask_below)):
        layout: gl.constexpr = scores.type.layout
        key = (block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)))[None, :]
        last = reach * 0 + (length - 1)
        if LOOKAHEAD:
            last = gl.minimum(reach, last)
        visible = key <= last[:, None]
        if WINDOW:
            visible = visible & (key > (reach - window)[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _blank(values, clean, first, low, length, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the values of keys below ``low`` and from ``length`` on, which may be another request's.

    Their weights are 0, but 0 * NaN is NaN. Two warpgroups clear half of the block each; all tell
    ``clean``, which is to be waited for.
    """
    PART: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if GROUP < 2:
        part = values.slice(GROUP * PART, PART, dim=0)
        key = first + GROUP * PART + gl.arange(0, PART, gl.SliceLayout(1, layout))
        own = ((key >= low) & (key < length))[:, None]
        part.store(gl.where(own, part.load(layout), 0.0))
        fence_async_shared()
    barrier()  # what all warps wrote is told by one thread
    mbarrier.arrive(clean)


@gluon.jit
def _put(
    out, level, sums, rows, row, row_start, head, q_len, all_rows, v_scale, result, lse, sinks,
    stride_ot, stride_oh, dtype: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, ROUNDING: gl.constexpr,
):  # fmt: skip
    """Divide a warpgroup's outputs by their sums, a sink's logit among them, and store them."""
    WIDTH: gl.constexpr = out.shape[1]
    per_out: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    # 128 bytes of a row at a time, 16 a thread.
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    top = level
    if HAS_SINKS:
        sink = gl.load(sinks + head) * 1.4426950408889634
        highest = gl.maximum(top, sink)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        fade = gl.exp2(top - base)
        sums = sums * fade + gl.exp2(sink - base)
        out = out * gl.convert_layout(fade, per_out)[:, None]
        top = highest
    # A row that saw no key: 0 / 1 instead of 0 / 0.
    share = v_scale / gl.where(sums == 0.0, 1.0, sums)
    out = out * gl.convert_layout(share, per_out)[:, None]
    final = gl.convert_layout(rounded(out, dtype, ROUNDING), stored)
    here = row + gl.arange(0, 64, gl.SliceLayout(1, stored))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, stored))
    token = (row_start + here).to(gl.int64)
    there = (here < q_len)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(
        result + token[:, None] * stride_ot + head.to(gl.int64) * stride_oh + column[None, :],
        final,
        mask=there,
    )
    if HAS_LSE:
        value = (top + gl.log2(sums)) * 0.6931471805599453
        value = gl.where(sums == 0.0, float("-inf"), value)
        gl.store(lse + head.to(gl.int64) * all_rows + row_start + rows, value, mask=rows < q_len)


@gluon.jit
def _leave(
    out, level, sums, first, rows, row, q_len, q_heads, v_scale, part_out, part_lse,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Leave a part for :func:`.ragged.merge`; ``first`` is where row 0 of the request has it.

    Stored as it lies in registers, 32 bytes of a row at a time.
    """
    layout: gl.constexpr = out.type.layout
    per_out: gl.constexpr = gl.SliceLayout(1, layout)
    share = v_scale / gl.where(sums == 0.0, 1.0, sums)
    out = out * gl.convert_layout(share, per_out)[:, None]
    here = row + gl.arange(0, 64, per_out)
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    at = first.to(gl.int64) + here * q_heads
    there = (here < q_len)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(part_out + at[:, None] * HEAD_DIM + column[None, :], out, mask=there)
    value = gl.where(sums == 0.0, float("-inf"), level + gl.log2(sums))
    gl.store(part_lse + first.to(gl.int64) + rows * q_heads, value, mask=rows < q_len)


@gluon.jit
def _compute(
    GROUP: gl.constexpr,
    results, smem, bars, place, sizes, numbers,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, LOOKAHEAD: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, TURNS: gl.constexpr, LATE_WAIT: gl.constexpr,
    SIGN: gl.constexpr, ROUNDING: gl.constexpr, COUNTED: gl.constexpr, SCALES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows ``GROUP * 64`` and on of each tile, or of that in ``place``."""
    result, lse, sinks, stride_ot, stride_oh, part_out, part_lse, part_count = results
    q_smem, k_smem, v_smem, tile_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, clean, tile_full, tile_empty = bars
    requests, tiles, each, shortest, q_heads, group, span, window, lookahead, all_rows = sizes
    scale_log2, soft_cap, v_scale = numbers
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    first: gl.constexpr = 1 if GROUP == 0 else 0
    following: gl.constexpr = (GROUP + 1) % GROUPS
    # Outputs are scaled under a branch. At 64 columns that takes 4 % longer (H100).
    LAZY: gl.constexpr = WIDTH == 128
    # Two loops of steps, at the diagonal and without masks: with LAZY 4 % less time at 128 columns,
    # nothing at 256. At 64, and with windows at 256, a second loop took 3 to 6 % longer (H100).
    SPLIT: gl.constexpr = LOOKAHEAD and not WINDOW and WIDTH == 128
    # Values that others than a request's own hold are cleared before the softmax, and waited for
    # behind it: at 64 columns 3 to 4 % less time of mixed lengths, at 128 1 % (H100). With 256 the
    # registers do not suffice.
    EARLY: gl.constexpr = WIDTH <= 128
    if CAP or SIGN == 0:
        c = 1.0
    elif SCALES:
        # A tensor's scale may be 0, and 0 * -inf would be NaN where keys are hidden.
        c = gl.maximum(gl.abs(scale_log2), 2.0**-126)
    else:
        c = gl.abs(scale_log2)
    none = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    BUFFERS: gl.constexpr = q_smem.shape[0] // GROUPS
    done = 0
    step = 0
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    blanked = 0
    if COUNTED:
        mbarrier.wait(tile_full.index(0), 0)
        count = told(tile_smem, 0, 0)
    else:
        (
            request, kv_head, head, work, row_start, first_row, q_len, length, key_start, low,
            low_block, count, mask_from, mask_below, part, parts,
        ) = place  # fmt: skip
        count = count * work
    while count > 0:
        if COUNTED:
            head = told(tile_smem, done & 1, 1)
            row_start = told(tile_smem, done & 1, 2)
            first_row = told(tile_smem, done & 1, 3)
            q_len = told(tile_smem, done & 1, 4)
            length = told(tile_smem, done & 1, 5)
            low = told(tile_smem, done & 1, 6)
            low_block = told(tile_smem, done & 1, 7)
            mask_from = told(tile_smem, done & 1, 8)
            mask_below = told(tile_smem, done & 1, 9)
            mbarrier.arrive(tile_empty.index(done & 1))
        row = first_row + GROUP * 64
        rows = row + gl.arange(0, 64, per_row)
        reach = rows + (length - q_len) + lookahead
        top = gl.full([64], float("-inf"), gl.float32, per_row)
        level = gl.full([64], LOWEST, gl.float32, per_row)
        bits = gl.full([64], 0, gl.int32, per_row)
        out = gl.zeros([64, WIDTH], gl.float32, o_layout)

        block = low_block + count - 1
        buffer = done % BUFFERS * GROUPS + GROUP
        q = q_smem.index(buffer).reshape([64, WIDTH])
        mbarrier.wait(q_full.index(buffer), (done // BUFFERS) & 1)
        mbarrier.wait(k_full.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(GROUP), (step & 1) ^ first)
        k = k_smem.index(stage).reshape([BLOCK_N, WIDTH]).permute((1, 0))
        scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(following))
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        # The end of a request and the beginning of its window: outside of the loop, as a branch
        # there would keep the compiler from converting weights under the exponentials.
        blanks = ((block + 1) * BLOCK_N > length) | ((count == 1) & (block * BLOCK_N < low))
        if EARLY:
            if blanks:
                mbarrier.wait(v_full.index(stage), phase)
                v = v_smem.index(stage).reshape([BLOCK_N, WIDTH])
                _blank(v, clean.index(0), block * BLOCK_N, low, length, GROUP, BLOCK_N)
        scores = _scored(
            scores, block, reach, length, window, scale_log2, soft_cap, mask_from, mask_below,
            BLOCK_N, LOOKAHEAD, WINDOW, CAP, SIGN,
        )  # fmt: skip
        p, fade, top, level, bits, _ = softmax(
            scores, top, level, c, 0.0, bits, 0, block, rows, q_len, lse, False, False, False,
            False, LAZY,
        )  # fmt: skip
        total = lane_sums(p)
        carried = as_carried(p, dtype, p_layout, LATE_WAIT)
        if blanks:
            if not EARLY:
                mbarrier.wait(v_full.index(stage), phase)
                v = v_smem.index(stage).reshape([BLOCK_N, WIDTH])
                _blank(v, clean.index(0), block * BLOCK_N, low, length, GROUP, BLOCK_N)
            mbarrier.wait(clean.index(0), blanked & 1)
            blanked += 1
        # Before this step, keys reach past what the tile's first row sees. The first block is done.
        hiding = gl.maximum(low_block + count - mask_from, 1)
        if PARTS:
            hiding = gl.minimum(hiding, count)
        for DIAGONAL in gl.static_range(1 if SPLIT else 0, -1, -1):
            begin = 1
            stop = count
            if DIAGONAL:
                stop = hiding
            elif SPLIT:
                begin = hiding
            for _step in range(begin, stop):
                block -= 1
                before = stage
                parity = phase
                step += 1
                stage, phase = advanced(stage, phase, STAGES)
                mbarrier.wait(k_full.index(stage), phase)
                if TURNS:
                    mbarrier.wait(turns.index(GROUP), (step & 1) ^ first)
                k = k_smem.index(stage).reshape([BLOCK_N, WIDTH]).permute((1, 0))
                scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), parity)
                v = v_smem.index(before).reshape([BLOCK_N, WIDTH])
                pv_weights = as_operand(carried, dtype, p_layout, LATE_WAIT)
                out = warpgroup_mma(pv_weights, v, out, is_async=True)
                if TURNS:
                    mbarrier.arrive(turns.index(following))
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(stage))
                scores = _scored(
                    scores, block, reach, length, window, scale_log2, soft_cap, mask_from,
                    mask_below, BLOCK_N, LOOKAHEAD, WINDOW, CAP, SIGN,
                    DIAGONAL or (not SPLIT and (LOOKAHEAD or WINDOW)),
                )  # fmt: skip
                # With a late wait, the exponentials come after the access that holds the wait.
                p, fade, top, level, bits, _ = softmax(
                    scores, top, level, c, 0.0, bits, 0, block, rows, q_len, lse, False, False,
                    False, LATE_WAIT, LAZY,
                )  # fmt: skip
                total = faded(total, fade) + lane_sums(p)
                out = warpgroup_mma_wait(0, deps=[out])
                mbarrier.arrive(v_empty.index(before))
                if LAZY:
                    # Before the branch: the compiler moves nothing across it.
                    carried = as_carried(p, dtype, p_layout, LATE_WAIT)
                    out = scaled(out, fade, True)
                else:
                    out = scaled(out, fade, False)
                    carried = as_carried(p, dtype, p_layout, LATE_WAIT)
        mbarrier.arrive(q_empty.index(buffer))
        mbarrier.wait(v_full.index(stage), phase)
        v = v_smem.index(stage).reshape([BLOCK_N, WIDTH])
        if WINDOW:
            if (count > 1) & (block * BLOCK_N < low):
                _blank(v, clean.index(0), block * BLOCK_N, low, length, GROUP, BLOCK_N)
                mbarrier.wait(clean.index(0), blanked & 1)
                blanked += 1
        pv_weights = as_operand(carried, dtype, p_layout, LATE_WAIT)
        out = warpgroup_mma(pv_weights, v, out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(v_empty.index(stage))
        step += 1
        stage, phase = advanced(stage, phase, STAGES)

        sums = row_sums(total, per_row)
        if PARTS:
            if (part == 0) & (head == 0):
                gl.store(part_count + row_start + rows, parts, mask=rows < q_len)
            if parts > 1:
                _leave(
                    out, level, sums, (part * all_rows + row_start) * q_heads + head, rows, row,
                    q_len, q_heads, v_scale, part_out, part_lse, HEAD_DIM,
                )  # fmt: skip
            else:
                _put(
                    out, level, sums, rows, row, row_start, head, q_len, all_rows, v_scale, result,
                    lse, sinks, stride_ot, stride_oh, dtype, HEAD_DIM, HAS_SINKS, HAS_LSE, ROUNDING,
                )  # fmt: skip
        else:
            _put(
                out, level, sums, rows, row, row_start, head, q_len, all_rows, v_scale, result,
                lse, sinks, stride_ot, stride_oh, dtype, HEAD_DIM, HAS_SINKS, HAS_LSE, ROUNDING,
            )  # fmt: skip
        done += 1
        count = 0
        if COUNTED:
            mbarrier.wait(tile_full.index(done & 1), (done >> 1) & 1)
            count = told(tile_smem, done & 1, 0)


@gluon.jit(do_not_specialize=_SIZES)
def attention(
    q_desc, k_desc, v_desc, out, lse, sinks, q_start, lengths, page_table, next_tile, spare,
    k_scale_at, v_scale_at, part_out, part_lse, part_count, stride_ot, stride_oh, stride_table,
    requests, tiles, each, shortest, q_heads, group, span, window, lookahead, rows, splits,
    part_blocks, scale_log2, soft_cap, v_scale,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr,
    PIECE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, LOOKAHEAD: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    TURNS: gl.constexpr, LATE_WAIT: gl.constexpr, SIGN: gl.constexpr, ROUNDING: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, COUNTED: gl.constexpr,
    SCALES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Tiles of ``GROUPS * 64`` rows of one request and head, a program each.

    They are numbered ``span`` query heads at a time: head + span * tile. If ``COUNTED``, a program
    takes further ones off the counter ``next_tile``, which is 0 at first, and makes ``spare`` 0.
    The tiles of a head have ``tiles`` numbers. Those of request r begin at ``each`` * r, if that is
    how many a request has at most; with ``each`` = 0, as in :func:`.ragged.attention`, at
    q_start[r] // (GROUPS * 64) + r, which is searched. ``q_desc`` has boxes of 64 rows x ``WIDTH``
    columns of q as [1, Hq, T, D]; ``k_desc`` and ``v_desc`` have boxes of ``PIECE`` tokens x 64
    columns of the cache as [pages, Hkv, PAGE, D], or of packed keys as [1, Hkv, keys, D]. ``PIECE``
    divides ``PAGE``; ``PAGE`` is 0 for packed keys, and ``lengths`` then holds kv_start
    [requests + 1]. ``scale_log2`` = scale * log2(e), ``SIGN`` its sign. Values are multiplied by
    ``v_scale``, and with ``SCALES`` scores by the size of fp32 ``k_scale_at[0]``, whose sign is in
    the keys, and values by ``v_scale_at[0]``. ``window`` and ``lookahead`` are those of
    :func:`.ragged.attention`.

    With ``PARTS``, which knows no counter, a tile is cut along the keys into ``splits`` parts, or
    into fewer that have ``part_blocks`` K blocks or more; program = part * all tiles + tile, and
    those of further parts exit. ``part_count``, ``part_out`` and ``part_lse`` are those
    of :func:`.ragged.attention`; rows of shorter requests stay unwritten there.
    """
    gl.static_assert(not (PARTS and COUNTED))
    if SCALES:
        scale_log2 = scale_log2 * gl.abs(gl.load(k_scale_at))
        v_scale = v_scale * gl.load(v_scale_at)
    dtype: gl.constexpr = q_desc.dtype
    # While a tile is computed, the queries of the next one are loaded: prompts of one tile or two
    # take 0.79 to 1.01 of the time, longer ones up to 3 % less (H100). 256 columns leave no room.
    QUERIES: gl.constexpr = GROUPS * (2 if COUNTED and WIDTH <= 128 else 1)
    q_smem = gl.allocate_shared_memory(dtype, [QUERIES] + q_desc.block_type.shape, q_desc.layout)
    block: gl.constexpr = [STAGES, 1, 1, BLOCK_N, WIDTH]
    k_smem = gl.allocate_shared_memory(dtype, block, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, block, v_desc.layout)
    # The same memory as copies see it: [stage, columns / 64, piece].
    pieces: gl.constexpr = [
        STAGES * (WIDTH // _COLUMNS) * (BLOCK_N // PIECE),
        1,
        1,
        PIECE,
        _COLUMNS,
    ]
    if _PUBLIC:
        k_pieces = k_smem.reinterpret(dtype, pieces, k_desc.layout)
        v_pieces = v_smem.reinterpret(dtype, pieces, v_desc.layout)
    else:
        k_pieces = k_smem._reinterpret(dtype, pieces, k_desc.layout)
        v_pieces = v_smem._reinterpret(dtype, pieces, v_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bar)
    clean = gl.allocate_shared_memory(gl.int64, [1, 1], bar)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * TOLD, 1], plain)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], bar)
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    mbarrier.init(clean.index(0), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=GROUPS)
    smem = (q_smem, k_smem, v_smem, tile_smem)
    bars = (
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, clean, tile_full, tile_empty
    )  # fmt: skip
    tables = (q_start, lengths, page_table, stride_table)
    sizes = (requests, tiles, each, shortest, q_heads, group, span, window, lookahead, rows)
    if COUNTED:
        place = ()  # the loading warp finds them
    else:
        place = place_of(
            gl.program_id(0), q_start, lengths, requests, tiles, each, shortest, q_heads, group,
            span, window, lookahead, splits, part_blocks, GROUPS, BLOCK_N, PAGE, LOOKAHEAD, WINDOW,
            PARTS,
        )  # fmt: skip
    results = (out, lse, sinks, stride_ot, stride_oh, part_out, part_lse, part_count)
    numbers = (scale_log2, soft_cap, v_scale)
    # A tuple bound to a name would turn its compile-time numbers into run-time ones.
    if GROUPS == 2:
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, place, sizes, numbers, GROUPS, BLOCK_N, HEAD_DIM,
                WIDTH, STAGES, LOOKAHEAD, WINDOW, CAP, HAS_SINKS, HAS_LSE, TURNS, LATE_WAIT, SIGN,
                ROUNDING, COUNTED, SCALES, PARTS)),
            (_compute, (1, results, smem, bars, place, sizes, numbers, GROUPS, BLOCK_N, HEAD_DIM,
                WIDTH, STAGES, LOOKAHEAD, WINDOW, CAP, HAS_SINKS, HAS_LSE, TURNS, LATE_WAIT, SIGN,
                ROUNDING, COUNTED, SCALES, PARTS)),
            (load, ((q_desc, k_desc, v_desc), smem, (k_pieces, v_pieces), bars, place, tables,
                sizes, next_tile, spare, GROUPS, BLOCK_N, WIDTH, PIECE, PAGE, STAGES, LOOKAHEAD,
                WINDOW, COUNTED)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, place, sizes, numbers, GROUPS, BLOCK_N, HEAD_DIM,
                WIDTH, STAGES, LOOKAHEAD, WINDOW, CAP, HAS_SINKS, HAS_LSE, TURNS, LATE_WAIT, SIGN,
                ROUNDING, COUNTED, SCALES, PARTS)),
            (_compute, (1, results, smem, bars, place, sizes, numbers, GROUPS, BLOCK_N, HEAD_DIM,
                WIDTH, STAGES, LOOKAHEAD, WINDOW, CAP, HAS_SINKS, HAS_LSE, TURNS, LATE_WAIT, SIGN,
                ROUNDING, COUNTED, SCALES, PARTS)),
            (_compute, (2, results, smem, bars, place, sizes, numbers, GROUPS, BLOCK_N, HEAD_DIM,
                WIDTH, STAGES, LOOKAHEAD, WINDOW, CAP, HAS_SINKS, HAS_LSE, TURNS, LATE_WAIT, SIGN,
                ROUNDING, COUNTED, SCALES, PARTS)),
            (load, ((q_desc, k_desc, v_desc), smem, (k_pieces, v_pieces), bars, place, tables,
                sizes, next_tile, spare, GROUPS, BLOCK_N, WIDTH, PIECE, PAGE, STAGES, LOOKAHEAD,
                WINDOW, COUNTED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
