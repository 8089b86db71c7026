"""The calls that :mod:`.kernels` times in a cell, ours and our peers', and the error of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from liteattention_rocm import (
    PagedBatch,
    attention,
    attention_paged,
    attention_varlen,
    lite_attention,
)
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap

from . import peers
from .cells import DTYPES, Cell, Decode, Dense, Host, Lite, Prefill
from .expected import attention_rows
from .peers import Call, Maker, Unavailable

#: Low enough that no tile of random data is voted away, while voting does run.
NOTHING_SKIPPED = -64.0
#: Small enough that no tile is dropped, while all are weighed.
NOTHING_DROPPED = 2.0**-30
_SAMPLED_ROWS = 64
#: Contenders that compute the tiles of a list; beside them others compute all.
OF_LISTS = ("ours, lite", "ours, budget", *peers.TILE_PEERS)


@dataclass
class Job:
    """Tensors of a cell, its contenders' calls and what they must give."""

    calls: dict[str, Callable[[], torch.Tensor]]
    absent: dict[str, str]
    error: Callable[[str, torch.Tensor], float]
    #: Share of the tiles that are computed, of LiteAttention.
    kept: float | None = None


def make(
    cell: Cell, device: torch.device, fa3_library: Path | None, more: Mapping[str, Maker]
) -> Job:
    """Make the tensors of a cell and the calls of its contenders."""
    if isinstance(cell, Decode | Prefill):
        return _ragged(cell, device, fa3_library)
    if isinstance(cell, Host):
        return _host(cell, device)
    return _self_attention(cell, device, fa3_library, more)


def _self_attention(
    cell: Dense | Lite, device: torch.device, fa3: Path | None, more: Mapping[str, Maker]
) -> Job:
    generator = torch.Generator(device=device).manual_seed(cell.length + cell.head_dim)
    kv_heads = (cell.kv_heads if isinstance(cell, Dense) else None) or cell.heads

    def normal(heads: int) -> torch.Tensor:
        shape = (cell.batch, cell.length, heads, cell.head_dim)
        numbers = torch.randn(shape, generator=generator, device=device)
        # [B, H, S, D] as a model has it after its projections: rows of all heads side by side
        return numbers.to(DTYPES[cell.dtype]).transpose(1, 2)

    q, k, v = normal(cell.heads), normal(kv_heads), normal(kv_heads)
    causal = isinstance(cell, Dense) and cell.causal
    makers = {"ours": _ours} | peers.self_attention_peers(device, fa3, more, isinstance(cell, Lite))
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            calls[name] = maker(q, k, v, causal)
        except Unavailable as error:
            absent[name] = str(error)
    tiles = None
    if isinstance(cell, Lite):
        geometry = default_geometry(q)
        size = geometry.q_block, geometry.k_block
        tiles = tiles_to_keep(cell, *size, device)
        calls["ours, lite"] = _ours_lite(q, k, v, tiles, threshold=NOTHING_SKIPPED)
        calls["ours, budget"] = _ours_lite(q, k, v, tiles, budget=NOTHING_DROPPED)
        for name, tile_maker in peers.TILE_PEERS.items() if device.type == "cuda" else ():
            try:
                calls[name] = tile_maker(q, k, v, tiles, size)
            except Unavailable as error:
                absent[name] = str(error)

    def difference(name: str, out: torch.Tensor) -> float:
        kept = tiles if name in OF_LISTS else None
        blocks = (1, 1) if tiles is None else size
        return _error(q, k, v, out, causal, kept, blocks)

    share = None if tiles is None else float(tiles.float().mean())
    return Job(calls, absent, difference, share)


def tiles_to_keep(
    cell: Lite, q_block: int, k_block: int, device: torch.device | None = None, seed: int = 1
) -> torch.Tensor:
    """Tiles to keep, bool [B, H, q_blocks, K_blocks], ``sparsity`` of them not.

    uniform: each by itself. clustered: those nearest to the diagonal or to one of four columns of
    the head, between 0.5 and 1.5 times as many in some q blocks as in others. uneven: each by
    itself, and a q block keeps any share from nothing to all, ``sparsity`` in the mean.
    """
    q_blocks, k_blocks = -(-cell.length // q_block), -(-cell.length // k_block)
    shape = (cell.batch, cell.heads, q_blocks, k_blocks)
    # Drawn on the CPU: every device gets the same tiles.
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(shape, generator=generator).to(device)
    keep = max(1, round((1 - cell.sparsity) * k_blocks))
    counts = torch.full(shape[:3], keep, device=device)
    if cell.pattern == "clustered":
        row = torch.linspace(0, 1, q_blocks, device=device)[:, None, None]
        column = torch.linspace(0, 1, k_blocks, device=device)[None, :, None]
        centres = (
            torch.rand(*shape[:2], 1, 1, 4, generator=generator)
            .to(device)
            .expand(-1, -1, q_blocks, 1, 4)
        )
        diagonal = row.expand(*shape[:2], q_blocks, 1, 1)
        distance = (column - torch.cat([centres, diagonal], -1)).abs().amin(-1)
        score = distance + 1e-6 * score
        swing = (
            0.5
            * _room(keep, k_blocks)
            * torch.sin(torch.linspace(0, 12.0, q_blocks, device=device))
        )
        counts = keep * (1 + swing)
        counts = counts.round().long().clamp(1, k_blocks).expand(shape[:3])
    if cell.pattern == "uneven":
        # the mean of u^a is 1 / (1 + a) for u evenly spread from 0 to 1
        rows = counts.numel()
        spread = (torch.randperm(rows, generator=generator).to(device) + 0.5) / rows
        shares = spread.view(shape[:3]) ** (cell.sparsity / (1 - cell.sparsity))
        counts = (shares * k_blocks).round().long().clamp(1, k_blocks)
    rank = score.argsort(-1).argsort(-1)
    return rank < counts[..., None]


def _room(keep: int, k_blocks: int) -> float:
    """Share of a swing by half that fits below all K blocks."""
    return min(1.0, (k_blocks - keep) / max(1.0, 0.5 * keep))


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    def call() -> torch.Tensor:
        out = attention(q, k, v, layout="bhsd", causal=causal)
        assert isinstance(out, torch.Tensor)
        return out

    return call


def _ours_lite(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: torch.Tensor,
    *,
    threshold: float | None = None,
    budget: float | None = None,
) -> Call:
    read = bitmap.pack(tiles)
    write = torch.empty_like(read)

    def call() -> torch.Tensor:
        return lite_attention(
            q, k, v, read, write, layout="bhsd", threshold=threshold, budget=budget
        )

    return call


def _error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    tiles: torch.Tensor | None,
    size: tuple[int, int],
) -> float:
    """Norm of the difference to float64 over the norm, on rows spread over the sequence."""
    length = q.shape[2]
    rows = torch.linspace(0, length - 1, min(_SAMPLED_ROWS, length), device=q.device).long()
    expected = attention_rows(q, k, v, rows, causal=causal, tiles=tiles, size=size)
    return float((out[:, :, rows].double() - expected).norm() / expected.norm())


def _host(cell: Host, device: torch.device) -> Job:
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device)
        .to(DTYPES[cell.dtype])
        .transpose(1, 2)
        for _ in range(3)
    )
    tile = default_geometry(q)
    blocks = tile.q_blocks(cell.length), tile.k_blocks(cell.length)
    tiles = torch.ones(cell.batch, cell.heads, *blocks, dtype=torch.bool, device=device)
    calls = {
        "ours": _ours(q, k, v, False),
        "ours, lite": _ours_lite(q, k, v, tiles, threshold=NOTHING_SKIPPED),
        "SDPA": peers.sdpa(None)(q, k, v, False),
    }
    return Job(calls, {}, lambda name, out: _error(q, k, v, out, False, None, (1, 1)))


def _ragged(cell: Decode | Prefill, device: torch.device, library: Path | None) -> Job:
    generator = torch.Generator(device=device).manual_seed(cell.context)
    dtype, rows = DTYPES[cell.dtype], cell.rows if isinstance(cell, Prefill) else 1
    causal = not isinstance(cell, Prefill) or cell.causal
    page = cell.page_size or cell.context
    pages = -(-cell.context // page)
    shape = (cell.requests * pages, 2, page, cell.kv_heads, cell.head_dim)
    held = torch.float8_e4m3fn if cell.fp8 else dtype
    cache = torch.empty(shape, dtype=held, device=device)
    for begin in range(0, len(cache), 4096):
        part = cache[begin : begin + 4096]
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    table = torch.randperm(len(cache), generator=generator, device=device).int()
    table = table.view(cell.requests, pages)
    q = torch.randn(
        cell.requests * rows, cell.q_heads, cell.head_dim, generator=generator, device=device
    ).to(dtype)
    starts = torch.arange(cell.requests + 1, device=device, dtype=torch.int32) * rows
    lengths = torch.full((cell.requests,), cell.context, device=device, dtype=torch.int32)
    ours: Call
    if cell.page_size:
        batch = PagedBatch(starts, lengths, table, max_q_len=rows, max_kv_len=cell.context)
        ours = functools.partial(attention_paged, q, k_cache, v_cache, batch, causal=causal)
        given: tuple[Any, ...] = (k_cache, v_cache, starts, None)
        given += (rows, cell.context, lengths, table)
    else:
        k, v = (x[table.flatten().long()].flatten(0, 1) for x in (k_cache, v_cache))
        k_starts = torch.arange(cell.requests + 1, device=device, dtype=torch.int32) * cell.context
        ours = functools.partial(
            attention_varlen, q, k, v, starts, k_starts, causal=causal, max_seqlen_q=rows,
            max_seqlen_k=cell.context,
        )  # fmt: skip
        given = (k, v, starts, k_starts, rows, cell.context, None, None)
    calls: dict[str, Call] = {"ours": ours}
    absent: dict[str, str] = {}
    if device.type == "cuda":
        if library is None:
            absent["FA3"] = "no library was given (--fa3-library)"
        else:
            try:
                # It multiplies fp8 by fp8; rounding q is not part of its time.
                fa3_q = q.to(held)
                calls["FA3"] = functools.partial(peers.fa3_forward(library), fa3_q, *given, causal)
            except Unavailable as error:
                absent["FA3"] = str(error)
    if not cell.page_size and rows == cell.context:
        # Whole prompts of one length are a batch of [B, H, S, D], as torch has it.
        name, backend = "SDPA", None
        if device.type == "cuda":
            name, backend = "cuDNN (SDPA)", "CUDNN_ATTENTION"
        qkv = [torch.unflatten(x, 0, (-1, rows)).transpose(1, 2) for x in (q, k, v)]
        calls[name] = peers.sdpa(backend)(qkv[0], qkv[1], qkv[2], causal)
    if device.type == "cuda" and isinstance(cell, Decode):
        half = cache.numel() // 2
        source, target = cache.view(-1)[:half], torch.empty(half, dtype=held, device=device)
        # reads and writes half of the cache: as many bytes as a step reads
        calls["device copy"] = lambda: target.copy_(source)

    def difference(name: str, out: torch.Tensor) -> float:
        if name == "device copy":
            return float((out.view(torch.uint8) != source.view(torch.uint8)).sum())
        if out.dim() == 4:
            out = out.transpose(1, 2).flatten(0, 1)
        squares = norm = 0.0
        for r in {0, cell.requests - 1}:
            keys, values = (
                x[table[r].long()].flatten(0, 1)[: cell.context].transpose(0, 1)[None].to(dtype)
                for x in (k_cache, v_cache)
            )
            at = torch.linspace(0, rows - 1, min(_SAMPLED_ROWS, rows)).long()
            for row in dict.fromkeys(at.tolist()):
                seen = cell.context - rows + row + 1 if causal else cell.context
                expected = attention_rows(
                    q[r * rows + row, None, :, None], keys[:, :, :seen], values[:, :, :seen],
                    torch.tensor([0]),
                )[0, :, 0]  # fmt: skip
                squares += float((out[r * rows + row].double() - expected).square().sum())
                norm += float(expected.square().sum())
        return math.sqrt(squares / norm)

    return Job(calls, absent, difference)
