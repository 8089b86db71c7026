"""Where the tiles of :mod:`.hopper_ragged` lie, and the warp that finds them and loads for them.

A tile is 128 or 192 query rows of one request and head, or a part of it along the keys. The loading
warp gathers K and V blocks from the pages of a cache, in *pieces*, or from packed keys. Where
programs take tiles off a counter, it finds them (:func:`place_of`) and tells the warpgroups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_ring import clear, copy_in

#: Columns of a piece: 128 bytes, the span of the swizzle in shared memory.
COLUMNS = 64
_COLUMNS = gl.constexpr(COLUMNS)
#: Numbers that the loading warp tells of a tile.
TOLD = gl.constexpr(10)


@gluon.jit
def place_of(
    program, q_start, lengths, requests, tiles, each, shortest, q_heads, group, span, window,
    lookahead, splits, part_blocks,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, LOOKAHEAD: gl.constexpr,
    WINDOW: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Find the rows and keys of a tile or of a part of it, ``program`` in the order of work.

    Returns the request; key and query head; 1 or 0 for whether there is work; first row in q and in
    the request; rows and keys of the request and the first key's place; the lowest key that a row
    of the tile sees; first K block and number of them; the blocks from and below which is masked;
    which part it is, of how many.
    """
    ROWS: gl.constexpr = GROUPS * 64
    part = 0
    parts = 1
    if PARTS:
        part = program // (tiles * q_heads)
        program = program % (tiles * q_heads)
    # ``span`` heads side by side, the others apart, so that their keys stay in the L2 cache.
    section = program // (span * tiles)
    rest = program % (span * tiles)
    heads = gl.minimum(span, q_heads - section * span)
    tile = rest // heads
    head = section * span + rest % heads
    kv_head = head // group
    # Where each request has as many numbers, nothing is searched.
    request = gl.where(each > 0, tile // gl.maximum(each, 1), 0)
    high = gl.where(each > 0, request + 1, requests)
    while high - request > 1:
        middle = (request + high) // 2
        begins = gl.load(q_start + middle) // ROWS + middle
        request = gl.where(begins <= tile, middle, request)
        high = gl.where(begins <= tile, high, middle)
    row_start = gl.load(q_start + request)
    q_len = gl.load(q_start + request + 1) - row_start
    q_blocks = (q_len + ROWS - 1) // ROWS
    turn = tile - gl.where(each > 0, request * each, row_start // ROWS + request)
    work = gl.where((turn >= 0) & (turn < q_blocks) & (q_len >= shortest), 1, 0)
    # The last q blocks see the most keys and go first.
    first_row = gl.maximum(q_blocks - 1 - turn, 0) * ROWS
    key_start = 0
    length = gl.load(lengths + request)
    if PAGE == 0:
        key_start = length
        length = gl.load(lengths + request + 1) - key_start
    first = length - q_len + lookahead + first_row
    last = length - q_len + lookahead + gl.minimum(first_row + ROWS, q_len) - 1
    end = length
    mask_from = length // BLOCK_N
    if LOOKAHEAD:
        end = gl.minimum(gl.maximum(last + 1, 0), length)
        mask_from = gl.minimum(gl.maximum(first + 1, 0), length) // BLOCK_N
    low = 0
    mask_below = 0
    if WINDOW:
        low = gl.maximum(first - window + 1, 0)
        mask_below = (gl.maximum(last - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
    low_block = low // BLOCK_N
    # A tile that sees no key walks one block, all of it masked: zeros come out.
    count = gl.maximum((end + BLOCK_N - 1) // BLOCK_N - low_block, 1)
    if PARTS:
        parts = gl.maximum(gl.minimum(count // part_blocks, splits), 1)
        work = gl.where(part < parts, work, 0)
        begin = count * part // parts
        count = count * (part + 1) // parts - begin
        low_block += begin
    return (
        request, kv_head, head, work, row_start, first_row, q_len, length, key_start, low,
        low_block, count, mask_from, mask_below, part, parts,
    )  # fmt: skip


@gluon.jit
def _gather(
    desc, smem, stage, bar, block, kv_head, length, key_start, table,
    BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, PIECE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Start copying a K block into a stage, piece by piece; what lies past the end is zeros."""
    PIECES: gl.constexpr = BLOCK_N // PIECE
    HALVES: gl.constexpr = WIDTH // _COLUMNS
    mbarrier.expect(bar, BLOCK_N * WIDTH * 2)
    for j in gl.static_range(PIECES):
        token = block * BLOCK_N + j * PIECE
        if PAGE > 0:
            inside = token < length
            # A page that does not exist: the copy engine fills in zeros.
            page = gl.load(table + token // PAGE, mask=inside, other=-1)
            token = token % PAGE
        else:
            page = 0
            token += key_start
        for half in gl.static_range(HALVES):
            copy_in(
                desc,
                [page, kv_head, token, half * _COLUMNS],
                bar,
                smem.index((stage * HALVES + half) * PIECES + j),
            )


@gluon.jit
def _tell(tile_smem, slot, numbers):
    """Hand out a tile: what the warpgroups have to know of it."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for j in gl.static_range(len(numbers)):
        tile_smem.index(slot * TOLD + j).store(gl.full([1], 0, gl.int32, one) + numbers[j])


@gluon.jit
def told(tile_smem, slot, j: gl.constexpr):
    """Number ``j`` of the tile that was handed out."""
    shared: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(tile_smem.index(slot * TOLD + j).load(shared), axis=0)


@gluon.jit
def _stream(
    inputs, smem, pieces, bars, place, tables, done, step,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, PIECE: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Stream the queries, keys and values of a tile, ``step`` K blocks after the workgroup's first.

    Returns the number of K blocks so far; ``done`` tiles were streamed before.
    """
    q_desc, k_desc, v_desc = inputs
    q_smem, k_smem, v_smem, tile_smem = smem
    k_pieces, v_pieces = pieces
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, clean, tile_full, tile_empty = bars
    q_start, lengths, page_table, stride_table = tables
    (
        request, kv_head, head, work, row_start, first_row, q_len, length, key_start, low,
        low_block, count, mask_from, mask_below, part, parts,
    ) = place  # fmt: skip
    table = page_table + request.to(gl.int64) * stride_table
    BUFFERS: gl.constexpr = q_smem.shape[0] // GROUPS
    for group in gl.static_range(GROUPS):
        buffer = done % BUFFERS * GROUPS + group
        mbarrier.wait(q_empty.index(buffer), ((done // BUFFERS) & 1) ^ 1)
        mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
        at = row_start + first_row + group * 64
        copy_in(q_desc, [0, head, at, 0], q_full.index(buffer), q_smem.index(buffer))
    for i in range(count):
        block = low_block + count - 1 - i
        stage = step % STAGES
        free = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        _gather(
            k_desc, k_pieces, stage, k_full.index(stage), block, kv_head, length, key_start,
            table, BLOCK_N, WIDTH, PIECE, PAGE,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), free)
        _gather(
            v_desc, v_pieces, stage, v_full.index(stage), block, kv_head, length, key_start,
            table, BLOCK_N, WIDTH, PIECE, PAGE,
        )  # fmt: skip
        step += 1
    return step


@gluon.jit
def load(
    inputs, smem, pieces, bars, place, tables, sizes, next_tile, spare,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, PIECE: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, LOOKAHEAD: gl.constexpr, WINDOW: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    """The loading warp: streams operands and, if ``COUNTED``, finds tiles and hands them out."""
    if COUNTED:
        clear(spare)
        q_smem, k_smem, v_smem, tile_smem = smem
        (
            q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, clean, tile_full, tile_empty
        ) = bars  # fmt: skip
        q_start, lengths, page_table, stride_table = tables
        (
            requests, tiles, each, shortest, q_heads, group, span, window, lookahead, rows
        ) = sizes  # fmt: skip
        program = gl.program_id(0)
        done = 0
        step = 0
        while program < tiles * q_heads:
            found = place_of(
                program, q_start, lengths, requests, tiles, each, shortest, q_heads, group, span,
                window, lookahead, 1, 1, GROUPS, BLOCK_N, PAGE, LOOKAHEAD, WINDOW, False,
            )  # fmt: skip
            (
                request, kv_head, head, work, row_start, first_row, q_len, length, key_start, low,
                low_block, count, mask_from, mask_below, part, parts,
            ) = found  # fmt: skip
            for _once in range(work):
                mbarrier.wait(tile_empty.index(done & 1), ((done >> 1) & 1) ^ 1)
                _tell(
                    tile_smem, done & 1,
                    (
                        count, head, row_start, first_row, q_len, length, low, low_block,
                        mask_from, mask_below,
                    ),
                )  # fmt: skip
                mbarrier.arrive(tile_full.index(done & 1))
                step = _stream(
                    inputs, smem, pieces, bars, found, tables, done, step, GROUPS, BLOCK_N, WIDTH,
                    PIECE, PAGE, STAGES,
                )  # fmt: skip
                done += 1
            # Not before, as in the dense kernel.
            upcoming = gl.atomic_add(next_tile, 1, sem="relaxed") + gl.num_programs(0)
            program = upcoming
        mbarrier.wait(tile_empty.index(done & 1), ((done >> 1) & 1) ^ 1)
        _tell(tile_smem, done & 1, (0,))
        mbarrier.arrive(tile_full.index(done & 1))
    else:
        none = gl.to_tensor(0)
        for _once in range(place[3]):
            _stream(
                inputs, smem, pieces, bars, place, tables, none, none, GROUPS, BLOCK_N, WIDTH,
                PIECE, PAGE, STAGES,
            )  # fmt: skip
