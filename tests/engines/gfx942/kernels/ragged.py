"""Launches attention_prefill by itself on the software MI300X; what its tests compare it with."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from liteattention_rocm.engines.gfx942 import manifest
from tests.oracle.attention import Exact, exact_rows

from .machine import PageStrides, RaggedParams, RowStrides, pointer, variant

LOG2E = math.log2(math.e)


def divider(size: int) -> tuple[int, int]:
    """geometry.h: DividerOf."""
    if size <= 0:
        return 0, 0
    shift = (size - 1).bit_length()
    return -(-(1 << (31 + shift)) // size), shift


def tile_rows(dim: int) -> int:
    return 128 if dim > 128 else 256


@dataclass
class Batch:
    """Requests (q_len, kv_len) of seeded random tensors, their keys in pages or packed.

    ``k`` and ``v`` are lists of [kv_len, Hkv, D]; ``caches`` hold them in scattered pages
    [pages, page_size, Hkv, D] (NaN wherever nothing was written), or packed [keys, Hkv, D].
    """

    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    kv_start: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    #: What a launch may touch of the caches; nothing: all of them.
    spans: list[torch.Tensor] = field(default_factory=list)

    @property
    def requests(self) -> list[tuple[int, int]]:
        starts = self.q_start.tolist()
        rows = [b - a for a, b in itertools.pairwise(starts)]
        return list(zip(rows, self.kv_len.tolist(), strict=True))


def make(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    padding: int = 0,
    lead: int = 0,
) -> Batch:
    """Values are normal; ``lead`` rows of q precede the first request's, ``padding`` follow."""
    g = torch.Generator().manual_seed(seed + 17 * dim + page_size)
    q_heads, kv_heads = heads
    rows = sum(q for q, _ in requests)
    lengths = [kv for _, kv in requests]
    # every other head and a few columns of a larger buffer: nothing is contiguous but the last
    fused = torch.randn(lead + rows + padding, q_heads + 1, dim + 8, generator=g).to(dtype)
    q = fused[:, 1:, :dim]
    k = [torch.randn(n, kv_heads, dim, generator=g).to(dtype) for n in lengths]
    v = [torch.randn(n, kv_heads, dim, generator=g).to(dtype) for n in lengths]
    starts = torch.tensor([lead, *(q for q, _ in requests)]).cumsum(0).int()
    kv_starts = torch.tensor([0, *lengths]).cumsum(0).int()
    if page_size == 0:
        k_cache = torch.cat([*k, torch.full((1, kv_heads, dim), math.nan).to(dtype)])
        v_cache = torch.cat([*v, torch.full((1, kv_heads, dim), math.nan).to(dtype)])
        table = torch.zeros(1, 1, dtype=torch.int32)
        return Batch(q, k, v, k_cache, v_cache, starts, torch.tensor(lengths).int(), kv_starts,
                     table, 0)  # fmt: skip
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts)
    order = torch.randperm(total + 2, generator=g).int()
    # one block of memory for K and V, heads before rows, as vLLM lays them out
    both = torch.full((total + 2, kv_heads, page_size, 2 * dim), math.nan).to(dtype)
    k_cache, v_cache = (both[..., i * dim : (i + 1) * dim].transpose(1, 2) for i in (0, 1))
    table = torch.full((len(requests), max([*counts, 1]) + 2), -1, dtype=torch.int32)
    at = 0
    for r, (keys, values) in enumerate(zip(k, v, strict=True)):
        for n in range(counts[r]):
            page = int(order[at])
            at += 1
            table[r, n] = page
            part = slice(n * page_size, (n + 1) * page_size)
            k_cache[page, : len(keys[part])] = keys[part]
            v_cache[page, : len(values[part])] = values[part]
    return Batch(q, k, v, k_cache, v_cache, starts, torch.tensor(lengths).int(), kv_starts,
                 table, page_size)  # fmt: skip


def prefill(
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    rounding: str = "rtne",
    code: Path | None = None,
) -> Any:
    """One launch over ``batch``; out [T, Hq, D], lse [Hq, T] or None. ``code``: another build."""
    import liteattention_emulator as emulator

    q, k, v = batch.q, batch.k_cache, batch.v_cache
    rows, q_heads, dim = q.shape
    kv_heads = k.shape[-2]
    requests = len(batch.kv_len)
    paged = batch.page_size > 0
    scale = 1 / math.sqrt(dim) if scale is None else scale
    strides = [PageStrides(x.stride(0) if paged else 0, x.stride(-3), x.stride(-2)) for x in (k, v)]
    params = RaggedParams(
        *map(pointer, (q, k, v, out, lse, sinks, batch.q_start)),
        *map(pointer, (
            batch.kv_len if paged else None,
            None if paged else batch.kv_start,
            batch.page_table if paged else None,
        )),
        None, None,
        *(RowStrides(x.stride(0), x.stride(1)) for x in (q, out)),
        *strides, batch.page_table.stride(0), 0 if lse is None else lse.stride(0),
        requests, rows, q_heads, kv_heads, batch.page_size, *divider(batch.page_size),
        causal, window, 1,
        scale * LOG2E, soft_cap * LOG2E, 2 * scale * LOG2E / soft_cap if soft_cap else 0.0,
        dim, *divider(q_heads // kv_heads),
    )  # fmt: skip
    name = f"attention_prefill_{variant(q, rounding)}"
    slots = rows * (q_heads // kv_heads) // tile_rows(dim) + requests
    image = manifest.load("attention_prefill.co") if code is None else code.read_bytes()
    caches = batch.spans or [k, v]
    given = (q, *caches, out, lse, sinks, batch.q_start, batch.kv_len, batch.kv_start)
    with emulator.Module(image) as module, ExitStack() as stack:
        tensors: list[Any] = [batch.page_table, *(x for x in given if x is not None)]
        stack.enter_context(emulator.registered(*tensors))
        return module.launch(name, [slots * kv_heads], [512], [params])


def expected(batch: Batch, *, causal: bool = True, **options: Any) -> Exact:
    """Float64: out and weight [T, Hq, D], lse [Hq, T] of the requests' rows."""
    rows = batch.q[int(batch.q_start[0]) : int(batch.q_start[-1])]
    parts = [
        exact_rows(q, k, v, causal=causal, **options)
        for q, k, v in zip(
            rows.split([n for n, _ in batch.requests]), batch.k, batch.v, strict=True
        )
    ]
    return Exact(
        torch.cat([part.out for part in parts]),
        torch.cat([part.lse for part in parts], 1),
        torch.cat([part.weight for part in parts]),
        max(part.reach for part in parts),
    )
