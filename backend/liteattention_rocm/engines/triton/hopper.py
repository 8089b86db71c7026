"""Attention on Hopper GPUs (sm_90) in Gluon, Triton's lower layer.

One workgroup computes one q block: a warp that loads (:mod:`.hopper_load`), and two or three
warpgroups that compute 64 query rows each. The loader streams K and V blocks through rings in
shared memory with the bulk copy engine; "full" barriers count arriving bytes, "empty" barriers the
warpgroups that are done with a stage. A warpgroup issues q.k of one block together with p.v of the
block before, so that the matrix units work while it computes the softmax; the warpgroups take turns
in issuing (``TURNS``), so that one's softmax falls into the other's products. Votes and weights of
a block follow one step later, between the products of the next: there they cost least.

K blocks are walked in the order of a list (LiteAttention) or from the last to the first: what needs
a mask, the tail and the diagonal, comes first. In a LiteAttention step one more warp settles the q
blocks that the warpgroups are through with: it chooses among tiles that were weighed, writes their
bitmap, and counts, while the next q block is computed. Lists may come in pieces, which are merged
by whoever is the last to have one (:mod:`.hopper_pieces`). In long walks levels stay, and a second
launch computes the tiles for which they were too low (:mod:`.hopper_again`).

Methods: online softmax over K blocks (FlashAttention, arXiv 2205.14135), asynchronous warpgroups in
alternation (FlashAttention-3, arXiv 2407.08608), skipped tiles (LiteAttention, arXiv 2511.11062).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_again import compute_again, low_memory, overflown, tell_low
from .hopper_load import handed_out, item, load, place_of
from .hopper_pieces import mark, marks_of, merge, share_mark, vote_mark
from .hopper_ring import advanced, barrier, copy_out, divided
from .hopper_settle import (
    blocks_of,
    flush,
    flush_weights,
    inverse_of,
    keep_weight,
    piece_of,
    renewed,
    settle,
    slack_of,
    weights_of,
    whole_shares,
)
from .hopper_softmax import (
    AHEAD,
    FIRST_AHEAD,
    GROWTH,
    LOWEST,
    OF_DIVISOR,
    as_carried,
    as_operand,
    faded,
    heaviest,
    held,
    lane_sums,
    larger,
    rounded,
    row_sums,
    scaled,
    scaled_and_renewed,
    signed,
    softmax,
    vote,
    vote_by_weight,
    weights_at,
)

#: Query rows of one warpgroup; the height of a warpgroup's matrix product.
WARPGROUP_ROWS = 64


@gluon.jit
def _masked(scores, block, row, kv_len, diagonal, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Hide the keys past the end and, if causal, past the diagonal."""
    layout: gl.constexpr = scores.type.layout
    key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if CAUSAL:
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout)) + diagonal
        last = gl.minimum(rows, kv_len - 1)
        visible = key[None, :] <= last[:, None]
    else:
        visible = (key < kv_len)[None, :] & (gl.arange(0, 64, gl.SliceLayout(1, layout)) >= 0)[
            :, None
        ]
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _put(
    out, level, total, o_desc, box, staged, lse, batch, head, lane, row, rows, q_len,
    dtype: gl.constexpr, HAS_LSE: gl.constexpr, ROUNDING: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of outputs and, if asked for, their log-sums."""
    # A row that saw no key: 0 / 1 instead of 0 / 0.
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    out = out * gl.convert_layout(share, gl.SliceLayout(1, out.type.layout))[:, None]
    tma.store_wait(0)
    staged.store(rounded(out, dtype, ROUNDING))
    fence_async_shared()
    copy_out(o_desc, [batch, head, row, 0], box)
    if HAS_LSE:
        value = (level + gl.log2(total)) * 0.6931471805599453
        value = gl.where(total == 0.0, float("-inf"), value)
        gl.store(lse + lane.to(gl.int64) * q_len + rows, value, mask=rows < q_len)


@gluon.jit
def _compute(
    GROUP: gl.constexpr,
    results, smem, bars, walk, sizes, words, c, threshold,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LITE: gl.constexpr, SOFT_SKIP: gl.constexpr, HAS_DO: gl.constexpr,
    WEIGH: gl.constexpr, HAS_LSE: gl.constexpr, TURNS: gl.constexpr, LATE_WAIT: gl.constexpr,
    SIGN: gl.constexpr, ROUNDING: gl.constexpr, ABREAST: gl.constexpr, SLOTS: gl.constexpr,
    LATE_EXP: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows ``GROUP * 64`` and on of every tile that is handed out."""
    o_desc, lse, votes, weights, mass, tally, must_do, parts, next_tile = results
    tiles, q_heads, q_len, kv_len, q_blocks, k_blocks = sizes
    q_smem, k_smem, v_smem, o_smem, tile_smem, low_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, tile_full, tile_empty, walked = bars
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    per_word: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    VOTE: gl.constexpr = LITE and not WEIGH
    # A tile is voted on one step later, unless its own step wants to know.
    LATER: gl.constexpr = VOTE and not SOFT_SKIP
    # At head dim 64 there is half as much to scale. Lists that vote lose 3 % by the branch there,
    # and dense attention has to round as they do.
    LAZY: gl.constexpr = HEAD_DIM == 128 or CAUSAL
    # Of votes: shorter here, longer at head dim 128, see there.
    PREDICATED: gl.constexpr = HEAD_DIM == 64
    # By the largest weights in place of the largest scores, with a tile of its own: 3 % less time
    # with three warpgroups. At head dim 128 they are there too late, 9 % more (H200).
    BY_WEIGHT: gl.constexpr = LATER and FIXED and GROUPS == 3
    gl.static_assert(not BY_WEIGHT or (LATE_WAIT and dtype == gl.bfloat16))
    if BY_WEIGHT:
        negligible = gl.exp2(threshold)
    # Whether the last step is plain where it hides no keys: up to 0.7 % less time in lists of 32
    # tiles. Lists of other kinds take up to 7 % longer so, as ptxas then waits elsewhere (H200).
    PLAIN_LAST: gl.constexpr = WEIGH and FIXED and LAZY
    # See `advanced`. Under soft skip registers are short.
    KEPT_STAGE: gl.constexpr = LITE and not SOFT_SKIP
    # What shares are divided by, in sums of rows.
    BY: gl.constexpr = AHEAD if LAZY else 1.0
    # Three warpgroups lack the registers for what follows.
    EARLY_ITEMS: gl.constexpr = GROUPS == 2
    first: gl.constexpr = 1 if GROUP == 0 else 0
    following: gl.constexpr = (GROUP + 1) % GROUPS
    diagonal = kv_len - q_len
    q = q_smem.index(GROUP).reshape([64, HEAD_DIM])
    staged = o_smem.index(GROUP).reshape([64, HEAD_DIM])
    none = gl.zeros([64, BLOCK_N], gl.float32, s_layout)

    done = 0
    step = 0
    if KEPT_STAGE:
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
    tile = handed_out(tile_smem, tile_full, tile_empty, 0)
    while tile < tiles:
        batch, head, lane, block_row, at, row_items, count, keys, mask_from = place_of(
            tile, walk, sizes, GROUPS, BLOCK_N, CAUSAL, LITE, ABREAST, SLOTS
        )
        row = block_row + GROUP * 64
        rows = row + gl.arange(0, 64, per_row)
        row_votes = votes + at * words
        if SLOTS:
            _, length, piece, pieces, first_slot = piece_of(tile, walk)
            later = piece > 0
            marks = marks_of(parts, first_slot, k_blocks, GROUP, GROUPS, HEAD_DIM, SLOTS)
            marks = marks + length * piece // pieces * 64
        block = item(row_items, 0, count, LITE)
        if LITE:
            # Lists are sorted: a block that needs a mask, the tail's, is their first or their last.
            last_block = item(row_items, count - 1, count, LITE)
            hidden = gl.where(last_block >= mask_from, count - 1, -1)
            if PLAIN_LAST:
                # The step that hides keys, if it is not the first one, or none.
                full_from = gl.where(hidden > 0, hidden, count)
        if SOFT_SKIP:
            upcoming = item(row_items, 1, count, LITE)
        top = gl.full([64], 0.0 if BY_WEIGHT else float("-inf"), gl.float32, per_row)
        level = gl.full([64], LOWEST, gl.float32, per_row)
        bits = gl.full([64], 0, gl.int32, per_row)
        kept = gl.zeros([4, 32], gl.int32, per_word)
        out = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)

        mbarrier.wait(q_full.index(GROUP), done & 1)
        if not KEPT_STAGE:
            stage, phase = divided(step, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(GROUP), (step & 1) ^ first)
        k = k_smem.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(following))
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        scores = signed(scores, SIGN)
        if block >= mask_from:
            scores = _masked(scores, block, row, keys, diagonal, CAUSAL, BLOCK_N)
        p, fade, top, level, bits, peak = softmax(
            scores, top, level, c, threshold, bits, 0, block, rows, q_len, must_do,
            VOTE and not LATER, SOFT_SKIP, HAS_DO, False, LAZY,
        )  # fmt: skip
        total = lane_sums(p)
        here = total
        if WEIGH:
            counted = gl.minimum(q_len - block_row, GROUPS * 64)
            share = whole_shares(row, q_len, total)
            divisor = total
            if LAZY:  # ahead of the sum, see `MOST_AHEAD`
                divisor = total * gl.minimum(count, FIRST_AHEAD).to(gl.float32)
            inverse = inverse_of(divisor, share)
            slack = slack_of(row, q_len, total)
            due = divisor * OF_DIVISOR
        if SLOTS and WEIGH:
            mark(marks, 0, later, share_mark(row_sums(here, per_row), level))
        carried = as_carried(p, dtype, p_layout, LATE_WAIT)
        if BY_WEIGHT:
            peak = heaviest(carried, per_row)
        if LITE and EARLY_ITEMS:
            # What is flushed after these steps: loaded now, it is there by then.
            listed = blocks_of(row_items, 0, count)
        else:
            listed = 0
        if WEIGH:
            mine = 1 + gl.arange(0, 32, gl.SliceLayout(0, per_word))[None, :]
        inside = gl.where(keys == 0, 0, count)
        if FIXED:
            fade = gl.full([64], 1.0, gl.float32, per_row)  # nothing is scaled
        # Loops of steps. Pieces that leave marks have one of their own. In the others most steps
        # are plain: they neither hide keys nor flush. A branch around what a step does not need
        # costs a hundredth of the time, or more: it jumps past instructions that were fetched.
        for MARKS in gl.static_range(1 if SLOTS else 0, -1, -1):
            steps = count
            if SLOTS:
                steps = gl.where(later == (MARKS == 1), count, 0)
            begin = 1
            while begin < steps:
                # Plain steps (0) and full ones (1), with which causal tiles begin.
                for FULL in gl.static_range(
                    1 if MARKS or CAUSAL else 0,
                    -1 if CAUSAL else 2 if LITE else 1,
                    -1 if CAUSAL else 1,
                ):
                    stop = steps
                    if LITE and not MARKS:
                        # The votes of 32 steps fill a word, and the last tile may need a mask.
                        if PLAIN_LAST:
                            end = gl.minimum(steps, full_from)
                            stop = gl.minimum((begin + 31) // 32 * 32, end)
                            if FULL:
                                stop = gl.minimum(begin + 1, steps)
                        elif FULL:
                            stop = begin + 1
                        else:
                            stop = gl.minimum((begin + 31) // 32 * 32, steps - 1)
                    if CAUSAL and FULL:
                        stop = gl.maximum(begin, gl.minimum(count - mask_from, steps))
                    for i in range(begin, stop):
                        if SOFT_SKIP:
                            block = upcoming
                            upcoming = item(row_items, i + 1, count, LITE)
                        before = stage
                        if not KEPT_STAGE:
                            _, phase = divided(step, STAGES)
                        parity = phase
                        step += 1
                        if KEPT_STAGE:
                            stage, phase = advanced(stage, phase, STAGES)
                        else:
                            stage, phase = divided(step, STAGES)
                        mbarrier.wait(k_full.index(stage), phase)
                        if TURNS:
                            mbarrier.wait(turns.index(GROUP), (step & 1) ^ first)
                        k = k_smem.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
                        scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                        mbarrier.wait(v_full.index(before), parity)
                        v = v_smem.index(before).reshape([BLOCK_N, HEAD_DIM])
                        pv_weights = as_operand(carried, dtype, p_layout, LATE_WAIT)
                        out = warpgroup_mma(pv_weights, v, out, is_async=True)
                        if TURNS:
                            mbarrier.arrive(turns.index(following))
                        # What is left to do for the tile before, while this one's scores are
                        # computed: it comes between the products, whose issue takes its time.
                        if LITE:
                            if WEIGH and not MARKS:
                                kept = keep_weight(kept, here, inverse, total, slack, mine, i)
                            elif LATER:
                                if BY_WEIGHT:
                                    top, bits = vote_by_weight(peak, top, bits, i - 1, negligible)
                                else:
                                    top, bits = vote(
                                        peak, top, bits, i - 1, c, threshold, PREDICATED
                                    )
                                if MARKS:
                                    mark(marks, i - 1, later, vote_mark(peak, top, bits, i - 1))
                        if LITE and FULL:
                            if WEIGH and LAZY and not MARKS:
                                kept, inverse = renewed(kept, total, share, inverse, mine - i)
                                due = total * GROWTH
                            if (i & 31) == 0:
                                if WEIGH and not MARKS:
                                    flush_weights(
                                        weights_of(kept, total, row, q_len, counted, BY),
                                        i - 32, inside, row_items, listed, weights + at * k_blocks,
                                        EARLY_ITEMS,
                                    )  # fmt: skip
                                    mine += 32
                                elif not MARKS:
                                    if BY_WEIGHT:
                                        bits = gl.where(top == 0.0, -1, bits)
                                    flush(
                                        bits, i - 32, inside, row_items, listed, row_votes,
                                        must_do, rows, q_len, HAS_DO, EARLY_ITEMS,
                                    )  # fmt: skip
                                bits = gl.full([64], 0, gl.int32, per_row)
                                if EARLY_ITEMS and not MARKS:
                                    listed = blocks_of(row_items, i, count)
                        scores = warpgroup_mma_wait(1, deps=[scores])
                        mbarrier.arrive(k_empty.index(stage))
                        scores = signed(scores, SIGN)
                        if CAUSAL:
                            if FULL:
                                scores = _masked(
                                    scores, count - 1 - i, row, keys, diagonal, True, BLOCK_N
                                )
                        elif FULL:
                            if i == hidden:
                                scores = _masked(
                                    scores, mask_from, row, keys, diagonal, False, BLOCK_N
                                )
                        if FIXED:
                            p = weights_at(scores, level, c, LATE_EXP)
                            if VOTE and not BY_WEIGHT:
                                peak = gl.reduce(scores, 1, larger)
                        else:
                            p, fade, top, level, bits, peak = softmax(
                                scores, top, level, c, threshold, bits, i, block, rows, q_len,
                                must_do, VOTE and not LATER, SOFT_SKIP, HAS_DO, LATE_EXP, LAZY,
                            )  # fmt: skip
                        here = lane_sums(p)
                        sums_before = total
                        total = (total if FIXED else faded(total, fade)) + here
                        if MARKS and WEIGH:
                            here_log = share_mark(row_sums(here, per_row), level)
                            mark(marks, i, later, here_log)
                        if LATE_WAIT and not LATE_EXP:
                            # Where levels stay ptxas places the wait well by itself, but for votes:
                            # 6 to 8 % of the time of lists at head dim 128 (H200).
                            if not FIXED:
                                level = held(level)
                            elif VOTE:
                                peak = held(peak)
                        out = warpgroup_mma_wait(0, deps=[out])
                        mbarrier.arrive(v_empty.index(before))
                        if LAZY:
                            # Before the branch: the compiler moves nothing across it.
                            carried = as_carried(p, dtype, p_layout, LATE_WAIT)
                            if WEIGH and not MARKS:
                                out, inverse, due, kept = scaled_and_renewed(
                                    out, fade, inverse, due, sums_before, total, kept, mine - i
                                )
                            elif not FIXED:
                                out = scaled(out, fade, True)
                        else:
                            if WEIGH and not MARKS:
                                inverse = inverse_of(total, share)
                            if not FIXED:
                                out = scaled(out, fade, False)
                            carried = as_carried(p, dtype, p_layout, LATE_WAIT)
                        if BY_WEIGHT:
                            peak = heaviest(carried, per_row)
                    begin = stop
        mbarrier.arrive(q_empty.index(GROUP))
        if not KEPT_STAGE:
            _, phase = divided(step, STAGES)
        mbarrier.wait(v_full.index(stage), phase)
        v = v_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])
        pv_weights = as_operand(carried, dtype, p_layout, LATE_WAIT)
        out = warpgroup_mma(pv_weights, v, out, is_async=True)
        if LITE:
            whole = gl.to_tensor(True)
            if SLOTS:
                whole = pieces == 1
                first_one = piece == 0
            else:
                first_one = whole
            last_word = (count - 1) // 32 * 32
            if LATER:
                if BY_WEIGHT:
                    top, bits = vote_by_weight(peak, top, bits, count - 1, negligible)
                else:
                    top, bits = vote(peak, top, bits, count - 1, c, threshold, PREDICATED)
                if SLOTS:
                    mark(marks, count - 1, later, vote_mark(peak, top, bits, count - 1))
            if first_one:
                if WEIGH:
                    kept = keep_weight(kept, here, inverse, total, slack, mine, count)
                    if LAZY:
                        kept, inverse = renewed(kept, total, share, inverse, mine - count)
                    flush_weights(
                        weights_of(kept, total, row, q_len, counted, BY),
                        last_word, inside, row_items, listed, weights + at * k_blocks, EARLY_ITEMS,
                    )  # fmt: skip
                else:
                    if BY_WEIGHT:
                        # Rows that have seen no finite score keep every tile.
                        bits = gl.where(top == 0.0, -1, bits)
                    flush(
                        bits, last_word, inside, row_items, listed, row_votes, must_do, rows,
                        q_len, HAS_DO, EARLY_ITEMS,
                    )  # fmt: skip
            if whole and not FIXED:
                barrier()  # what all warps wrote is told by one thread
                mbarrier.arrive(walked.index(done & 1))
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(v_empty.index(stage))
        step += 1
        if KEPT_STAGE:
            stage, phase = advanced(stage, phase, STAGES)

        sums = row_sums(total, per_row)
        if FIXED:
            low = overflown(sums, out)
            if LITE:
                tell_low(low_smem, done & 1, low, GROUP, GROUPS)
                barrier()
                mbarrier.arrive(walked.index(done & 1))
            elif gl.max(low, 0):
                compute_again(next_tile, tile, True)
        if SLOTS:
            missing = pieces - 1
            if pieces > 1:
                out, level, sums, last = merge(
                    tile, walk, results, sizes, words, out, top, level, sums, rows, c, threshold,
                    GROUP, GROUPS, HEAD_DIM, HAS_DO, WEIGH, SLOTS,
                )  # fmt: skip
                missing = 1 - last
                barrier()
                mbarrier.arrive(walked.index(done & 1))
            if missing == 0:
                _put(
                    out, level, sums, o_desc, o_smem.index(GROUP), staged, lse, batch, head, lane,
                    row, rows, q_len, dtype, HAS_LSE, ROUNDING,
                )  # fmt: skip
        else:
            _put(
                out, level, sums, o_desc, o_smem.index(GROUP), staged, lse, batch, head, lane,
                row, rows, q_len, dtype, HAS_LSE, ROUNDING,
            )  # fmt: skip
        done += 1
        tile = handed_out(tile_smem, tile_full, tile_empty, done)
    tma.store_wait(0)


#: Sizes are no reason to compile again.
_SIZES = [
    "tiles", "span", "q_heads", "groups", "q_len", "kv_len", "q_blocks", "k_blocks", "words",
    "limit",
]  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def attention(
    q_desc, k_desc, v_desc, o_desc, lse, items, counts, order, next_tile, spare, votes, weights,
    mass, tally, must_do, parts, limits, tiles, span, q_heads, groups, q_len, kv_len, q_blocks,
    k_blocks, words, limit, c, threshold,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LITE: gl.constexpr, SOFT_SKIP: gl.constexpr, HAS_DO: gl.constexpr,
    WEIGH: gl.constexpr, HAS_MASS: gl.constexpr, BY_HEAD: gl.constexpr, HAS_LSE: gl.constexpr,
    TURNS: gl.constexpr, LATE_WAIT: gl.constexpr, SIGN: gl.constexpr, ROUNDING: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, COUNTED: gl.constexpr,
    ABREAST: gl.constexpr, SLOTS: gl.constexpr, LATE_EXP: gl.constexpr, FIXED: gl.constexpr,
    AGAIN: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Tiles of ``GROUPS * 64`` query rows; tile = turn + q_blocks * (head + heads * batch).

    With ``ABREAST`` they are numbered ``span`` heads at a time: head + span * turn. The first tile
    of a workgroup is its own number, later ones are a grid apart or taken from the counter
    ``next_tile``, which is 0 at first: with lists, and if ``COUNTED``, which makes ``spare`` 0.
    ``order`` and ``counts``, in the order of work: tile -> row of the bitmap, length of its list.
    ``c`` = abs(scale) * log2(e), ``SIGN`` the sign of the scale. ``threshold`` is in log2 units;
    NaN keeps every tile. ``WEIGH``: tiles are weighed in place of the vote and chosen by
    ``limit`` or, if ``BY_HEAD``, by ``limits`` [q_heads]. ``tally`` gets the numbers of tiles
    computed and kept added.

    With ``SLOTS`` lists may be cut, see :func:`.kernels.plan`: tiles are pieces, as many as
    ``next_tile`` says in its second word, and what arrived is counted from its fifth one on.
    ``parts`` fp32 has, for each slot and warpgroup, outputs [64, HEAD_DIM], levels, sums and maxima
    [64], then marks [SLOTS / 2, GROUPS, k_blocks, 64].

    With ``FIXED`` levels stay. Tiles for which they were too low are noted behind ``next_tile``:
    how many, 0 at first, in its second word, and which from the fifth one on, see there. Dense
    attention makes that number 0 in ``spare``. With ``AGAIN`` these tiles are computed, and no
    others.

    ``CHAINED``: a call's launches may begin before their predecessors have ended (programmatic
    dependent launch), and wait here for what those leave in memory.
    """
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [GROUPS] + o_desc.block_type.shape, o_desc.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bar)
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    walked = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=GROUPS + (1 if LITE else 0))
        mbarrier.init(walked.index(i), count=GROUPS)
    gl.static_assert(not (FIXED and (SLOTS or AGAIN)))
    low_smem = tile_smem
    if FIXED and LITE:
        low_smem = low_memory(GROUPS)
    smem = (q_smem, k_smem, v_smem, o_smem, tile_smem, low_smem)
    bars = (
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, tile_full, tile_empty, walked
    )  # fmt: skip
    if CHAINED:
        if LITE or AGAIN:
            gdc_wait()  # for the lists, or for the tiles that were noted
        if FIXED:
            # Behind the wait, so that whoever waits for this launch has waited for the one before.
            gdc_launch_dependents()
    if SLOTS:
        tiles = gl.load(next_tile + 1)
    results = (o_desc, lse, votes, weights, mass, tally, must_do, parts, next_tile)
    walk = (items, counts, order, span)
    sizes = (tiles, q_heads, q_len, kv_len, q_blocks, k_blocks)
    # A tuple bound to a name would turn its compile-time numbers into run-time ones.
    if LITE and GROUPS == 2:
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (1, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (load, ((q_desc, k_desc, v_desc), smem, bars, walk, next_tile, spare, sizes, groups,
                GROUPS, BLOCK_N, STAGES, CAUSAL, LITE, COUNTED, ABREAST, SLOTS, FIXED, AGAIN)),
            (settle, (results, smem, bars, walk, sizes, words, limit, limits, GROUPS, WEIGH,
                HAS_MASS, BY_HEAD, SLOTS, FIXED)),
            ],
            [4, 1, 1],
            [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    elif LITE:
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (1, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (2, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (load, ((q_desc, k_desc, v_desc), smem, bars, walk, next_tile, spare, sizes, groups,
                GROUPS, BLOCK_N, STAGES, CAUSAL, LITE, COUNTED, ABREAST, SLOTS, FIXED, AGAIN)),
            (settle, (results, smem, bars, walk, sizes, words, limit, limits, GROUPS, WEIGH,
                HAS_MASS, BY_HEAD, SLOTS, FIXED)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (1, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (load, ((q_desc, k_desc, v_desc), smem, bars, walk, next_tile, spare, sizes, groups,
                GROUPS, BLOCK_N, STAGES, CAUSAL, LITE, COUNTED, ABREAST, SLOTS, FIXED, AGAIN)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
            (_compute, (0, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (1, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (_compute, (2, results, smem, bars, walk, sizes, words, c, threshold, GROUPS, BLOCK_N,
                HEAD_DIM, STAGES, CAUSAL, LITE, SOFT_SKIP, HAS_DO, WEIGH, HAS_LSE, TURNS,
                LATE_WAIT, SIGN, ROUNDING, ABREAST, SLOTS, LATE_EXP, FIXED)),
            (load, ((q_desc, k_desc, v_desc), smem, bars, walk, next_tile, spare, sizes, groups,
                GROUPS, BLOCK_N, STAGES, CAUSAL, LITE, COUNTED, ABREAST, SLOTS, FIXED, AGAIN)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
