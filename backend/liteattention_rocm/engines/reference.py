"""The oracle: attention in float64 and skip lists byte for byte; written to be read, not for speed.

Every other engine is judged by this one, so it takes no shortcut that a kernel takes: no online
softmax, no approximate exponential, no order of summation that could matter.

A LiteAttention step is two separate things here:

1. *Votes.* Raw scores q.k are computed in float64 (products of bf16, fp16 or fp32 numbers are
   exact there) and rounded once to float32. Everything the vote then does is float32 and in the
   kernel's order: tile maxima, running maximum before the tile, difference, product with
   c = float32(|scale| * log2(e)), comparison with float32(threshold). That is exact, hence the
   lists are comparable byte for byte with a kernel whose own dot products are exact.
2. *Attention* in float64 over the keys that the votes left, through the same code as the dense
   call. With threshold -inf nothing is masked and the result is bit-equal to dense attention.

Method: LiteAttention, arXiv 2511.11062.
"""

from __future__ import annotations

import math

import torch

from .. import skiplist
from ..rounding import round_to_bf16
from .base import (
    AttentionSpec,
    Engine,
    Layout,
    LiteSpec,
    RaggedBatch,
    RaggedSpec,
    TileGeometry,
    number_reasons,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_LOG2E = 1.4426950408889634
#: Scores held at a time: 2^22 float64 are 32 MiB, and a masked softmax makes about four copies.
_CHUNK_SCORES = 1 << 22


class ReferenceEngine(Engine):
    """Float64 attention and the byte-exact skip oracle, on CPU tensors."""

    name = "reference"

    def supports(self, spec: AttentionSpec, lite: LiteSpec | None = None) -> list[str]:
        """Return every reason why this engine cannot run the request; an empty list means it can.

        It takes bf16, fp16, fp32 and fp64 on the CPU, any head dimension, GQA, causal (dense
        only), every rounding for bf16, any tile geometry.
        """
        reasons = self.unavailable(spec.device)
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype must be bf16, fp16, fp32 or fp64, got {spec.dtype}")
        elif spec.dtype != torch.bfloat16 and spec.rounding != "rtne":
            reasons.append(
                f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}: use 'rtne'"
            )
        if spec.kv_heads < 1 or spec.q_heads % spec.kv_heads:
            reasons.append(
                f"query heads must be a multiple of key heads, got {spec.q_heads} and "
                f"{spec.kv_heads}"
            )
        reasons += number_reasons(spec)
        if lite is not None:
            if spec.causal:
                reasons.append("LiteAttention is not causal: call attention() for causal requests")
            if not lite.threshold <= 0:
                reasons.append(
                    f"threshold is in log2 units and must be <= 0 or -inf, got {lite.threshold}"
                )
        return reasons

    def geometry(self, head_dim: int) -> TileGeometry:
        """Return the CPU engine's tile, 128 x 64 with vote groups of 32 rows."""
        return TileGeometry(q_block=128, k_block=64, vote_rows=32)

    @torch.inference_mode()  # outputs may be inference tensors
    def attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write dense attention into ``out`` and, if given, ``lse`` (natural log)."""
        _attend(spec, q, k, v, out, lse, kept=None, k_block=1)

    @torch.inference_mode()  # outputs may be inference tensors
    def lite_attention(
        self,
        spec: AttentionSpec,
        lite: LiteSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        """Write attention over the kept tiles into ``out``, the next step's list into ``write``."""
        next_tiles, kept = vote(spec, lite, q, k, read, must_do, must_skip)
        write.copy_(skiplist.pack(next_tiles))
        _attend(spec, q, k, v, out, lse, kept=kept, k_block=lite.geometry.k_block)

    def ragged_reasons(self, spec: RaggedSpec) -> list[str]:
        """Return every reason why this engine cannot run a ragged call; none means it can."""
        reasons = self.unavailable(spec.device)
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype must be bf16, fp16, fp32 or fp64, got {spec.dtype}")
        elif spec.dtype != torch.bfloat16 and spec.rounding != "rtne":
            reasons.append(
                f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}: use 'rtne'"
            )
        if spec.kv_dtype not in (spec.dtype, *_FP8):
            reasons.append(f"the cache must be {spec.dtype} or fp8, got {spec.kv_dtype}")
        return reasons + number_reasons(spec)

    def plan_ragged(self, spec: RaggedSpec, batch: RaggedBatch) -> None:
        """Plan nothing: requests are computed one after the other."""

    @torch.inference_mode()  # outputs may be inference tensors
    def attention_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write every request's attention into its rows of ``out`` and ``lse``."""
        for request in range(spec.requests):
            begin, end = batch.q_start[request : request + 2].tolist()
            if begin == end:
                continue
            keys, values = (_request_tokens(spec, batch, request, x) for x in (k, v))
            rows = max(1, _CHUNK_SCORES // max(1, spec.q_heads * keys.shape[0]))
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                # of the chunk's first row: the request's last row stands at its last key
                position = keys.shape[0] - (end - first)
                result, row_lse = _attend_rows(spec, q[first:last], keys, values, position, sinks)
                out[first:last].copy_(_rounded(result, spec))
                if lse is not None:
                    lse[:, first:last].copy_(row_lse)

    def write_reasons(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Return every reason why :meth:`write_kv` cannot run; none means it can."""
        reasons = self.unavailable(device)
        if cache_dtype not in (dtype, *_FP8):
            reasons.append(f"the cache must be {dtype} or fp8, got {cache_dtype}")
        return reasons

    @torch.inference_mode()  # outputs may be inference tensors
    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Copy rows into the cache one by one; see :meth:`Engine.write_kv`."""
        pages, page_size = k_cache.shape[:2]
        numbers = slots.tolist()
        if numbers and max(numbers) >= pages * page_size:
            raise ValueError(
                f"slot {max(numbers)} lies beyond a cache of {pages} pages of {page_size} tokens"
            )
        for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            for row, slot in zip(rows, numbers, strict=True):
                if slot >= 0:
                    cache[slot // page_size, slot % page_size] = _stored(row, cache.dtype, scale)


def _request_tokens(
    spec: RaggedSpec, batch: RaggedBatch, request: int, x: torch.Tensor
) -> torch.Tensor:
    """One request's keys or values as the cache holds them, [kv_len, Hkv, D]."""
    if batch.kv_start is not None:
        begin, end = batch.kv_start[request : request + 2].tolist()
        return x[begin:end]
    assert batch.kv_len is not None and batch.page_table is not None
    length = int(batch.kv_len[request])
    used = batch.page_table[request, : -(-length // spec.page_size)].tolist()
    if not used:
        return x.new_empty((0, *x.shape[2:]))
    return torch.cat([x[page] for page in used])[:length]


def _attend_rows(
    spec: RaggedSpec,
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
    group = spec.q_heads // spec.kv_heads
    queries = q.double().transpose(0, 1)
    keys = (k.double() * spec.k_scale).transpose(0, 1).repeat_interleave(group, 0)
    values = (v.double() * spec.v_scale).transpose(0, 1).repeat_interleave(group, 0)
    scores = queries @ keys.mT * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    at = position + torch.arange(q.shape[0])[:, None]
    key = torch.arange(k.shape[0])
    if spec.causal:
        scores = scores.masked_fill(key > at, -math.inf)
    if spec.window:
        scores = scores.masked_fill(key <= at - spec.window, -math.inf)
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
    if dtype not in _FP8:
        return row
    limit = torch.finfo(dtype).max
    return (row.float() / scale).clamp(-limit, limit).to(dtype)


def _queries(q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Queries as float64 [B, Hkv, G, Sq, D] that carry the sign of the scale (0 if it is 0)."""
    heads_first = q.transpose(1, 2) if spec.layout == "bshd" else q
    grouped = heads_first.double().reshape(
        spec.batch, spec.kv_heads, spec.q_heads // spec.kv_heads, spec.q_len, spec.head_dim
    )
    if spec.scale == 0:
        return torch.zeros_like(grouped)
    return -grouped if spec.scale < 0 else grouped


def _keys(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Keys or values as float64 [B, Hkv, 1, Skv, D]."""
    heads_first = x.transpose(1, 2) if layout == "bshd" else x
    return heads_first.double().unsqueeze(2)


def vote(
    spec: AttentionSpec,
    lite: LiteSpec,
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
    tile = lite.geometry
    k_blocks, q_blocks = tile.k_blocks(spec.kv_len), tile.q_blocks(spec.q_len)
    heads = (spec.batch, spec.q_heads)
    c = torch.tensor(abs(spec.scale) * _LOG2E if spec.scale else 1.0, dtype=torch.float32)
    threshold = torch.tensor(lite.threshold, dtype=torch.float32)

    do = _block_mask(must_do, k_blocks)
    walked = (skiplist.unpack(read, k_blocks) | do) & ~_block_mask(must_skip, k_blocks)

    tile_max = _tile_maxima(spec, tile, q, k)
    padded_rows = q_blocks * tile.q_block
    tile_max = torch.nn.functional.pad(tile_max, (0, 0, 0, padded_rows - spec.q_len))
    tile_max = tile_max.view(*heads, q_blocks, tile.q_block, k_blocks)
    # Rows past the end agree with everything, which is the same as having no vote.
    absent = (torch.arange(padded_rows) >= spec.q_len).view(q_blocks, tile.q_block)

    running = torch.full(tile_max.shape[:-1], -math.inf, dtype=torch.float32)
    next_tiles = torch.zeros_like(walked)
    dropped = torch.zeros(
        *heads, q_blocks, tile.q_block // tile.vote_rows, k_blocks, dtype=torch.bool
    )
    order = range(k_blocks - 1, -1, -1) if lite.descending else range(k_blocks)
    for j in order:
        above = (tile_max[..., j] - running) * c
        drop = (above <= threshold) & (running > -math.inf) & (threshold > -math.inf) & ~do[j]
        drop |= absent
        groups = drop.view((*dropped.shape[:-1], tile.vote_rows)).all(-1)
        next_tiles[..., j] = walked[..., j] & ~groups.all(-1)
        if lite.soft_skip:
            dropped[..., j] = groups
        here = walked[..., j, None]
        running = torch.where(here, torch.maximum(running, tile_max[..., j]), running)

    kept = walked.unsqueeze(3) & ~dropped
    rows = kept.repeat_interleave(tile.vote_rows, dim=3).flatten(2, 3)
    return next_tiles, rows[:, :, : spec.q_len]


def _block_mask(packed: torch.Tensor | None, k_blocks: int) -> torch.Tensor:
    """Unpack a K-block mask to bool [k_blocks]; None means no block."""
    if packed is None:
        return torch.zeros(k_blocks, dtype=torch.bool)
    return skiplist.unpack(packed, k_blocks)


def _tile_maxima(
    spec: AttentionSpec, tile: TileGeometry, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Largest raw score of every row in every K block: float32 [B, Hq, Sq, K_blocks]."""
    keys = _keys(k, spec.layout).transpose(-1, -2)
    queries = _queries(q, spec)
    k_blocks = tile.k_blocks(spec.kv_len)
    result = torch.empty(spec.batch, spec.q_heads, spec.q_len, k_blocks, dtype=torch.float32)
    for begin, end in _row_chunks(spec):
        scores = (queries[..., begin:end, :] @ keys).to(torch.float32).flatten(1, 2)
        scores = torch.nn.functional.pad(
            scores, (0, k_blocks * tile.k_block - spec.kv_len), value=-math.inf
        )
        blocks = scores.view(*scores.shape[:-1], k_blocks, tile.k_block)
        result[:, :, begin:end] = blocks.amax(-1)
    return result


def _row_chunks(spec: AttentionSpec) -> list[tuple[int, int]]:
    """Split the query rows so that one chunk has at most ``_CHUNK_SCORES`` scores."""
    rows = max(1, _CHUNK_SCORES // max(1, spec.batch * spec.q_heads * spec.kv_len))
    return [(i, min(i + rows, spec.q_len)) for i in range(0, spec.q_len, rows)]


def _attend(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    kept: torch.Tensor | None,
    k_block: int,
) -> None:
    """Float64 softmax attention, chunk by chunk of query rows.

    ``kept`` bool [B, Hq, Sq, K_blocks] masks blocks of ``k_block`` keys, or None. The masked and
    the unmasked call do the same arithmetic on the same chunks, so a mask that hides nothing
    changes no bit.
    """
    queries, keys, values = _queries(q, spec), _keys(k, spec.layout), _keys(v, spec.layout)
    scale = abs(spec.scale)
    for begin, end in _row_chunks(spec):
        scores = (queries[..., begin:end, :] @ keys.transpose(-1, -2)) * scale
        if spec.causal:
            last = torch.arange(begin, end) + (spec.kv_len - spec.q_len)
            hidden = torch.arange(spec.kv_len) > last[:, None]
            scores.masked_fill_(hidden, -math.inf)
        if kept is not None:
            keys_kept = kept[:, :, begin:end].repeat_interleave(k_block, dim=-1)
            scores.masked_fill_(~keys_kept[..., : spec.kv_len].view(scores.shape), -math.inf)
        top = scores.amax(-1, keepdim=True)
        # A row that sees no key has no maximum; 0 keeps its exponentials at exp(-inf) = 0.
        empty = top == -math.inf
        weights = torch.exp(scores - top.masked_fill(empty, 0.0))
        total = weights.sum(-1, keepdim=True)
        result = _visible_product(weights, values, scores) / total.masked_fill(empty, 1.0)
        rows = _rounded(result, spec).flatten(1, 2)
        target = out.transpose(1, 2) if spec.layout == "bshd" else out
        target[:, :, begin:end].copy_(rows)
        if lse is not None:
            # log(0) is the -inf of an empty row
            lse[:, :, begin:end].copy_((top + total.log()).flatten(1, 2).squeeze(-1))


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


def _rounded(result: torch.Tensor, spec: AttentionSpec | RaggedSpec) -> torch.Tensor:
    """Round float64 results to the output dtype, through float32 as the kernels do."""
    if spec.dtype == torch.bfloat16:
        return round_to_bf16(result, spec.rounding)
    if spec.dtype == torch.float64:
        return result
    return result.to(torch.float32).to(spec.dtype)
