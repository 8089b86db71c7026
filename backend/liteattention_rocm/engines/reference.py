"""The oracle: attention in float64 and skip lists byte for byte; written to be read, not for speed.

Every other engine is judged by this one, so it takes no shortcut that a kernel takes: no online
softmax, no approximate exponential, no order of summation that could matter.

A LiteAttention step is separate things here:

1. *Votes.* Raw scores q.k are computed in float64 (products of bf16, fp16 or fp32 numbers are
   exact there) and rounded once to float32. Everything the vote then does is float32 and in the
   kernel's order: tile maxima, running maximum before the tile, difference, product with
   c = float32(|scale| * log2(e)), comparison with float32(threshold). That is exact, hence the
   lists are comparable byte for byte with a kernel whose own dot products are exact.
2. *Masses*, in a step with a budget instead of votes: shares of softmax sums in float64, rounded
   once to float32. Kernels come near them; what a kernel drops follows from its own masses, byte
   for byte (:func:`liteattention_rocm.lite.budget.select`).
3. *Attention* in float64 over the keys that the votes left, through the same code as the dense
   call. With threshold -inf nothing is masked and the result is bit-equal to dense attention.

Method: LiteAttention, arXiv 2511.11062.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ..contract import (
    FP8,
    LOG2E,
    Bound,
    DenseRequest,
    DenseTensors,
    Engine,
    Layout,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    Request,
    TileGeometry,
    WriteRequest,
    WriteTensors,
    read_scale,
    slot_beyond,
)
from ..lite import bitmap, budget
from .rounding import round_to_bf16

#: Scores held at a time: 2^22 float64 are 32 MiB, and a masked softmax makes about four copies.
_CHUNK_SCORES = 1 << 22


class ReferenceEngine(Engine):
    """Float64 attention and the byte-exact skip oracle, on CPU tensors."""

    name = "reference"
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    cache_dtypes = FP8
    plans_from_bounds = True
    weighs = True
    values_apart = True

    def limits(self, request: Request) -> list[str]:
        """Return nothing: any head dim, GQA, tile, rounding; see :meth:`Engine.limits`."""
        return []

    def geometry(self, head_dim: int, rows: int | None = None) -> TileGeometry:
        """Return the CPU engine's tile, 128 x 64 with vote groups of 32 rows."""
        return TileGeometry(q_block=128, k_block=64, vote_rows=32)

    def bind(self, request: Request, like: Any) -> Bound:
        """Return what computes in float64; there is nothing to plan. See :meth:`Engine.bind`."""
        run: Any = _dense
        if isinstance(request, LiteRequest):
            run = _lite
        elif isinstance(request, RaggedRequest):
            run = _ragged
        elif isinstance(request, WriteRequest):
            run = _write
        return functools.partial(_run, run, request)


@torch.inference_mode()  # outputs may be inference tensors
def _run(run: Any, request: Request, tensors: Any) -> None:
    """Compute a call in the dtypes that it has, whatever autocast it stands in."""
    with torch.autocast("cpu", enabled=False):
        run(request, tensors)


def _dense(request: DenseRequest, t: DenseTensors) -> None:
    _attend(request, t, kept=None, k_block=1)


def _lite(request: LiteRequest, t: LiteTensors) -> None:
    if request.budget:
        walked, mass = weigh(request, t.q, t.k, t.read, t.must_do, t.must_skip)
        do = _block_mask(t.must_do, walked.shape[-1])
        limit = budget.limit_of(request.budget) if t.limits is None else t.limits
        next_tiles = budget.select_within(mass, walked, do, limit)
        rows = walked.repeat_interleave(request.geometry.q_block, dim=2)
        kept = rows[:, :, : request.q_len]
        if t.mass is not None:
            t.mass.copy_(mass)
    else:
        next_tiles, kept = vote(request, t.q, t.k, t.read, t.must_do, t.must_skip)
    t.write.copy_(bitmap.pack(next_tiles))
    _attend(request, t, kept=kept, k_block=request.geometry.k_block)


def _ragged(request: RaggedRequest, t: RaggedTensors) -> None:
    """Compute one request after the other."""
    request = replace(
        request,
        k_scale=read_scale(t.k_scale, request.k_scale),
        v_scale=read_scale(t.v_scale, request.v_scale),
    )
    for index in range(request.requests):
        begin, end = t.q_start[index : index + 2].tolist()
        if begin == end:
            continue
        keys, values = (_request_tokens(request, t, index, x) for x in (t.k, t.v))
        rows = max(1, _CHUNK_SCORES // max(1, request.q_heads * keys.shape[0]))
        for first in range(begin, end, rows):
            last = min(first + rows, end)
            # of the chunk's first row: the request's last row stands at its last key
            position = keys.shape[0] - (end - first)
            result, row_lse = _attend_rows(
                request, t.q[first:last], keys, values, position, t.sinks
            )
            t.out[first:last].copy_(_rounded(result, request))
            if t.lse is not None:
                t.lse[:, first:last].copy_(row_lse)


def _write(request: WriteRequest, t: WriteTensors) -> None:
    """Copy rows into the cache one by one."""
    error = slot_beyond(t, request)
    if error is not None:
        raise error
    for rows, cache, scale in (
        (t.k, t.k_cache, read_scale(t.k_scale, request.k_scale)),
        (t.v, t.v_cache, read_scale(t.v_scale, request.v_scale)),
    ):
        for row, slot in zip(rows, t.slots.tolist(), strict=True):
            if slot >= 0:
                page, offset = divmod(slot, request.page_size)
                cache[page, offset] = _stored(row, cache.dtype, scale)


def _request_tokens(
    request: RaggedRequest, t: RaggedTensors, index: int, x: torch.Tensor
) -> torch.Tensor:
    """One request's keys or values as the cache holds them, [kv_len, Hkv, D]."""
    if t.page_table is None:
        begin, end = t.keys[index : index + 2].tolist()
        return x[begin:end]
    length = int(t.keys[index])
    used = t.page_table[index, : -(-length // request.page_size)].tolist()
    if not used:
        return x.new_empty((0, *x.shape[2:]))
    return torch.cat([x[page] for page in used])[:length]


def _attend_rows(
    request: RaggedRequest,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of consecutive rows of one request, the first of them at ``position``.

    ``q`` [rows, Hq, D], ``k`` and ``v`` [keys, Hkv, D]. Returns float64 (out [rows, Hq, D],
    lse [Hq, rows]).
    """
    group = request.q_heads // request.kv_heads
    queries = q.double().transpose(0, 1)
    keys = (k.double() * request.k_scale).transpose(0, 1).repeat_interleave(group, 0)
    values = (v.double() * request.v_scale).transpose(0, 1).repeat_interleave(group, 0)
    scores = queries @ keys.mT * request.scale
    if request.soft_cap:
        scores = request.soft_cap * torch.tanh(scores / request.soft_cap)
    at = position + torch.arange(q.shape[0], device="cpu")[:, None]
    key = torch.arange(k.shape[0], device="cpu")
    if request.lookahead is not None:
        scores = scores.masked_fill(key > at + request.lookahead, -math.inf)
    if request.window:
        scores = scores.masked_fill(key <= at - request.window, -math.inf)
    logits = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(logits, -1)
    # A row without any logit has an lse of -inf and weights exp(-inf) = 0.
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
    return _visible_product(weights, values, scores).transpose(0, 1), lse


def _stored(row: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """A row as the cache holds it: unchanged, or row / scale as fp8, clamped to what is finite."""
    if dtype not in FP8:
        return row
    limit = torch.finfo(dtype).max
    return (row.float() / scale).clamp(-limit, limit).to(dtype)


def _queries(q: torch.Tensor, request: DenseRequest) -> torch.Tensor:
    """Queries as float64 [B, Hkv, G, Sq, D] that carry the sign of the scale (0 if it is 0)."""
    heads_first = q.transpose(1, 2) if request.layout == "bshd" else q
    grouped = heads_first.double().reshape(
        request.batch,
        request.kv_heads,
        request.q_heads // request.kv_heads,
        request.q_len,
        request.head_dim,
    )
    if request.scale == 0:
        return torch.zeros_like(grouped)
    return -grouped if request.scale < 0 else grouped


def _keys(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Keys or values as float64 [B, Hkv, 1, Skv, D]."""
    heads_first = x.transpose(1, 2) if layout == "bshd" else x
    return heads_first.double().unsqueeze(2)


def vote(
    request: LiteRequest,
    q: torch.Tensor,
    k: torch.Tensor,
    read: torch.Tensor,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk the kept tiles of one step and vote, exactly as a kernel has to.

    Returns ``(next_tiles, kept)``: bool [B, Hq, q_blocks, K_blocks], the tiles to compute in the
    next step, and bool [B, Hq, Sq, K_blocks], the K blocks that each row attends to in this step
    (they differ between vote groups when ``soft_skip`` drops some).

    A NaN score keeps its tile and, since it stays in the running maximum, every later tile of
    its row's q block.
    """
    tile = request.geometry
    k_blocks, q_blocks = tile.k_blocks(request.kv_len), tile.q_blocks(request.q_len)
    heads = (request.batch, request.q_heads)
    c = torch.tensor(
        abs(request.scale) * LOG2E if request.scale else 1.0, dtype=torch.float32, device="cpu"
    )
    threshold = torch.tensor(request.threshold, dtype=torch.float32, device="cpu")

    do = _block_mask(must_do, k_blocks)
    walked = (bitmap.unpack(read, k_blocks) | do) & ~_block_mask(must_skip, k_blocks)

    tile_max = _tile_maxima(request, tile, q, k)
    padded_rows = q_blocks * tile.q_block
    tile_max = torch.nn.functional.pad(tile_max, (0, 0, 0, padded_rows - request.q_len))
    tile_max = tile_max.view(*heads, q_blocks, tile.q_block, k_blocks)
    # Rows past the end agree with everything, which is the same as having no vote.
    absent = (torch.arange(padded_rows, device="cpu") >= request.q_len).view(q_blocks, tile.q_block)

    running = torch.full(tile_max.shape[:-1], -math.inf, dtype=torch.float32, device="cpu")
    next_tiles = torch.zeros_like(walked)
    dropped = torch.zeros(
        *heads, q_blocks, tile.q_block // tile.vote_rows, k_blocks, dtype=torch.bool, device="cpu"
    )
    order = range(k_blocks - 1, -1, -1) if request.descending else range(k_blocks)
    for j in order:
        above = (tile_max[..., j] - running) * c
        drop = (above <= threshold) & (running > -math.inf) & (threshold > -math.inf) & ~do[j]
        drop |= absent
        groups = drop.view((*dropped.shape[:-1], tile.vote_rows)).all(-1)
        next_tiles[..., j] = walked[..., j] & ~groups.all(-1)
        if request.soft_skip:
            dropped[..., j] = groups
        here = walked[..., j, None]
        running = torch.where(here, torch.maximum(running, tile_max[..., j]), running)

    kept = walked.unsqueeze(3) & ~dropped
    rows = kept.repeat_interleave(tile.vote_rows, dim=3).flatten(2, 3)
    return next_tiles, rows[:, :, : request.q_len]


def weigh(
    request: LiteRequest,
    q: torch.Tensor,
    k: torch.Tensor,
    read: torch.Tensor,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk the kept tiles of one step and weigh them; see :mod:`liteattention_rocm.lite.budget`.

    Returns ``(walked, mass)``: bool [B, Hq, q_blocks, K_blocks], the tiles computed, and fp32 of
    the same shape, the mean of a q block's :func:`shares`; 1 where one of these exceeds
    :data:`~liteattention_rocm.lite.budget.ROW_GUARD`, 0 of tiles not computed. It is NaN, as
    kernels have it, from the tile on in which a row's sum becomes infinite or NaN.
    """
    walked, share = shares(request, q, k, read, must_do, must_skip)
    share = share.masked_fill(share > budget.ROW_GUARD, math.inf)
    rows = request.geometry.q_block
    blocks = [share[:, :, first : first + rows] for first in range(0, request.q_len, rows)]
    return walked, torch.stack([block.mean(2).clamp(max=1.0) for block in blocks], 2).float()


def shares(
    request: LiteRequest,
    q: torch.Tensor,
    k: torch.Tensor,
    read: torch.Tensor,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles computed and what share each has of what its rows have seen by then.

    ``(walked, share)``: bool [B, Hq, q_blocks, K_blocks] and float64 [B, Hq, Sq, K_blocks]: the sum
    of exp(score) over the tile's keys, divided by that over all keys of the walk up to the tile's
    end. 0 of tiles not computed; NaN where the row's sum is infinite, NaN or still 0.
    """
    tile = request.geometry
    k_blocks = tile.k_blocks(request.kv_len)
    do = _block_mask(must_do, k_blocks)
    walked = (bitmap.unpack(read, k_blocks) | do) & ~_block_mask(must_skip, k_blocks)
    here = walked.repeat_interleave(tile.q_block, 2)[:, :, : request.q_len]
    rows = torch.where(here, _tile_sums(request, tile, q, k), -math.inf)
    seen = torch.logcumsumexp(rows.flip(-1) if request.walks_down else rows, -1)
    seen = seen.flip(-1) if request.walks_down else seen
    share = torch.exp(rows - seen).masked_fill(torch.isposinf(seen), math.nan)
    return walked, torch.where(here, share, 0.0)


def _tile_sums(
    request: DenseRequest, tile: TileGeometry, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Log (natural) of the sum of exp(score) over each K block: float64 [B, Hq, Sq, K_blocks]."""
    keys = _keys(k, request.layout).transpose(-1, -2)
    queries = _queries(q, request)
    k_blocks = tile.k_blocks(request.kv_len)
    shape = (request.batch, request.q_heads, request.q_len, k_blocks)
    result = torch.empty(shape, dtype=torch.float64, device="cpu")
    for begin, end in _row_chunks(request):
        scores = (queries[..., begin:end, :] @ keys * abs(request.scale)).flatten(1, 2)
        scores = torch.nn.functional.pad(
            scores, (0, k_blocks * tile.k_block - request.kv_len), value=-math.inf
        )
        blocks = scores.view(*scores.shape[:-1], k_blocks, tile.k_block)
        result[:, :, begin:end] = torch.logsumexp(blocks, -1)
    return result


def _block_mask(packed: torch.Tensor | None, k_blocks: int) -> torch.Tensor:
    """Unpack a K-block mask to bool [k_blocks]; None means no block."""
    if packed is None:
        return torch.zeros(k_blocks, dtype=torch.bool, device="cpu")
    return bitmap.unpack(packed, k_blocks)


def _tile_maxima(
    request: DenseRequest, tile: TileGeometry, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Largest raw score of every row in every K block: float32 [B, Hq, Sq, K_blocks]."""
    keys = _keys(k, request.layout).transpose(-1, -2)
    queries = _queries(q, request)
    k_blocks = tile.k_blocks(request.kv_len)
    result = torch.empty(
        request.batch, request.q_heads, request.q_len, k_blocks, dtype=torch.float32, device="cpu"
    )
    for begin, end in _row_chunks(request):
        scores = (queries[..., begin:end, :] @ keys).to(torch.float32).flatten(1, 2)
        scores = torch.nn.functional.pad(
            scores, (0, k_blocks * tile.k_block - request.kv_len), value=-math.inf
        )
        blocks = scores.view(*scores.shape[:-1], k_blocks, tile.k_block)
        result[:, :, begin:end] = blocks.amax(-1)
    return result


def _row_chunks(request: DenseRequest) -> list[tuple[int, int]]:
    """Split the query rows so that one chunk has at most ``_CHUNK_SCORES`` scores."""
    rows = max(1, _CHUNK_SCORES // max(1, request.batch * request.q_heads * request.kv_len))
    return [(i, min(i + rows, request.q_len)) for i in range(0, request.q_len, rows)]


def _attend(
    request: DenseRequest, t: DenseTensors | LiteTensors, kept: torch.Tensor | None, k_block: int
) -> None:
    """Float64 softmax attention, chunk by chunk of query rows.

    ``kept`` bool [B, Hq, Sq, K_blocks] masks blocks of ``k_block`` keys, or None. The masked and
    the unmasked call do the same arithmetic on the same chunks, so a mask that hides nothing
    changes no bit.
    """
    layout = request.layout
    queries, keys, values = _queries(t.q, request), _keys(t.k, layout), _keys(t.v, layout)
    scale = abs(request.scale)
    for begin, end in _row_chunks(request):
        scores = (queries[..., begin:end, :] @ keys.transpose(-1, -2)) * scale
        if request.causal:
            last = torch.arange(begin, end, device="cpu") + (request.kv_len - request.q_len)
            hidden = torch.arange(request.kv_len, device="cpu") > last[:, None]
            scores.masked_fill_(hidden, -math.inf)
        if kept is not None:
            keys_kept = kept[:, :, begin:end].repeat_interleave(k_block, dim=-1)
            scores.masked_fill_(~keys_kept[..., : request.kv_len].view(scores.shape), -math.inf)
        top = scores.amax(-1, keepdim=True)
        # A row that sees no key has no maximum; 0 keeps its exponentials at exp(-inf) = 0.
        empty = top == -math.inf
        weights = torch.exp(scores - top.masked_fill(empty, 0.0))
        total = weights.sum(-1, keepdim=True)
        result = _visible_product(weights, values, scores) / total.masked_fill(empty, 1.0)
        rows = _rounded(result, request).flatten(1, 2)
        target = t.out.transpose(1, 2) if layout == "bshd" else t.out
        target[:, :, begin:end].copy_(rows)
        if t.lse is not None:
            # log(0) is the -inf of an empty row
            t.lse[:, :, begin:end].copy_((top + total.log()).flatten(1, 2).squeeze(-1))


def _visible_product(
    weights: torch.Tensor, values: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """``weights @ values`` in which hidden keys (score -inf) do not matter, whatever they hold.

    A skipped tile is never read, so an infinite or NaN value in it must not become 0 * inf = NaN.
    Visible infinite and NaN values spoil the result as they should.
    """
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return weights @ values
    result = weights @ values.masked_fill(~finite, 0.0)
    visible = (scores > -math.inf).double()
    for special in (math.inf, -math.inf, math.nan):
        found = torch.isnan(values) if math.isnan(special) else values == special
        result = result + torch.where(visible @ found.double() > 0, special, 0.0)
    return result


def _rounded(result: torch.Tensor, request: DenseRequest | RaggedRequest) -> torch.Tensor:
    """Round float64 results to the output dtype, through float32 as the kernels do."""
    if request.dtype == torch.bfloat16:
        return round_to_bf16(result, request.rounding)
    if request.dtype == torch.float64:
        return result
    return result.to(torch.float32).to(request.dtype)
