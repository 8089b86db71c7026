"""Where the tiles of :mod:`.hopper` lie, and the warp that hands them out and loads for them.

A tile is a q block of one head, or a piece of its list. The loading warp takes tiles in the order
of their numbers or off a counter, tells the other warps which one comes next, and streams its
queries and the K and V blocks of its walk through the rings in shared memory. Every warp works out
for itself where a tile lies (:func:`place_of`) and what comes next in its walk (:func:`item`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_again import tile_again
from .hopper_ring import clear, copy_in
from .hopper_settle import piece_of


@gluon.jit
def item(items, i, count, LITE: gl.constexpr):
    """K block of the i-th step of a q block's walk; the last one's past the end."""
    if LITE:
        block = gl.load(items + gl.minimum(i, count - 1)).to(gl.int32)
    else:
        block = count - 1 - i
    return block


@gluon.jit
def place_of(
    tile, walk, sizes, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    LITE: gl.constexpr, ABREAST: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Where a tile lies: (batch, head), first row, row of the bitmap, its walk and what to mask."""
    items, counts, order, span = walk
    tiles, q_heads, q_len, kv_len, q_blocks, k_blocks = sizes
    lane = tile // q_blocks
    turn = tile % q_blocks
    if ABREAST:
        # ``span`` heads at a time, a tile of each in turn
        section = tile // (span * q_blocks)
        rest = tile % (span * q_blocks)
        heads = gl.minimum(span, tiles // q_blocks - section * span)
        lane = section * span + rest % heads
        turn = rest // heads
    if SLOTS:
        place, length, piece, pieces, first = piece_of(tile, walk)
    elif LITE:
        place = gl.load(order + tile)
        count = gl.load(counts + tile)
    if LITE:
        lane = place // q_blocks
    batch = lane // q_heads
    head = lane % q_heads
    diagonal = kv_len - q_len
    keys = kv_len
    if LITE:
        if SLOTS:
            begin = length * piece // pieces
            count = length * (piece + 1) // pieces - begin
        q_block = place % q_blocks
        at = place.to(gl.int64)
        items = items + at * k_blocks
        if SLOTS:
            items = items + begin
        # An empty list names K block 0, here with every key hidden: zeros come out.
        keys = gl.where(count == 0, 0, kv_len)
        mask_from = keys // BLOCK_N
        count = gl.maximum(count, 1)
    else:
        at = tile.to(gl.int64)
        if CAUSAL:
            # the last q blocks see the most keys and go first
            q_block = q_blocks - 1 - turn
            end = gl.minimum((q_block + 1) * GROUPS * 64 + diagonal, kv_len)
            count = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
            mask_from = (
                gl.minimum(gl.maximum(q_block * GROUPS * 64 + diagonal + 1, 0), kv_len) // BLOCK_N
            )
        else:
            q_block = turn
            count = k_blocks
            mask_from = kv_len // BLOCK_N
    return batch, head, lane, q_block * GROUPS * 64, at, items, count, keys, mask_from


@gluon.jit
def load(
    inputs, smem, bars, walk, next_tile, spare, sizes, groups,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    LITE: gl.constexpr, COUNTED: gl.constexpr, ABREAST: gl.constexpr, SLOTS: gl.constexpr,
    FIXED: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """The loading warp: hands out tiles and streams their operands."""
    gl.static_assert(not (LITE and COUNTED))  # lists always are, by a counter that `plan` clears
    if COUNTED or (FIXED and not LITE):
        clear(spare)
    q_desc, k_desc, v_desc = inputs
    tiles = sizes[0]
    q_smem, k_smem, v_smem, o_smem, tile_smem, low_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, tile_full, tile_empty, walked = bars
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = gl.program_id(0)
    if AGAIN:
        turn = tile
        tile = tile_again(next_tile, turn, tiles, not LITE)
    done = 0
    step = 0
    while tile < tiles:
        slot = done & 1
        mbarrier.wait(tile_empty.index(slot), ((done >> 1) & 1) ^ 1)
        tile_smem.index(slot).store(gl.full([1], 0, gl.int32, one) + tile)
        mbarrier.arrive(tile_full.index(slot))
        batch, head, lane, row, at, row_items, count, keys, mask_from = place_of(
            tile, walk, sizes, GROUPS, BLOCK_N, CAUSAL, LITE, ABREAST, SLOTS
        )
        kv_head = head // groups
        block = item(row_items, 0, count, LITE)
        for i in range(count):
            following = item(row_items, i + 1, count, LITE)
            stage = step % STAGES
            free = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            copy_in(
                k_desc,
                [batch, kv_head, block * BLOCK_N, 0],
                k_full.index(stage),
                k_smem.index(stage),
            )
            if i == 0:
                # After the keys, which need not wait until the tile before is through with its
                # queries: causal tiles of 4,096 keys take 1.6 % less time so, dense ones 1.2 %, and
                # those of 1,000 keys 6 % (H100).
                for group in gl.static_range(GROUPS):
                    mbarrier.wait(q_empty.index(group), (done & 1) ^ 1)
                    mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
                    copy_in(
                        q_desc,
                        [batch, head, row + group * 64, 0],
                        q_full.index(group),
                        q_smem.index(group),
                    )
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            copy_in(
                v_desc,
                [batch, kv_head, block * BLOCK_N, 0],
                v_full.index(stage),
                v_smem.index(stage),
            )
            block = following
            step += 1
        done += 1
        # Not before: a tile asked for while this one's loads go on would wait for all of them,
        # even where another multiprocessor is through. The loads run two K blocks ahead, and the
        # answer comes while those are computed.
        upcoming = tile + gl.num_programs(0)
        if AGAIN:
            turn += gl.num_programs(0)
            upcoming = tile_again(next_tile, turn, tiles, not LITE)
        elif LITE or COUNTED:
            upcoming = gl.atomic_add(next_tile, 1, sem="relaxed") + gl.num_programs(0)
        tile = upcoming
    slot = done & 1
    mbarrier.wait(tile_empty.index(slot), ((done >> 1) & 1) ^ 1)
    tile_smem.index(slot).store(gl.full([1], 0, gl.int32, one) + tile)
    mbarrier.arrive(tile_full.index(slot))


@gluon.jit
def handed_out(tile_smem, tile_full, tile_empty, done):
    """Tile that the loading warp hands out next."""
    mbarrier.wait(tile_full.index(done & 1), (done >> 1) & 1)
    shared: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.sum(tile_smem.index(done & 1).load(shared), axis=0)
    mbarrier.arrive(tile_empty.index(done & 1))
    return tile
