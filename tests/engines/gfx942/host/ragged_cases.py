"""Ragged batches with seeded tensors, and what attention over them should be, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from liteattention_rocm import serving
from tests.oracle import attention

NOWHERE = 2**30  # a page that no cache has: reading it is out of bounds


@dataclass
class Case:
    """A batch; ``k`` and ``v`` hold each request's own keys [kv_len, Hkv, D]."""

    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    requests: list[tuple[int, int]]
    q_start: torch.Tensor
    kv_len: torch.Tensor
    sinks: torch.Tensor

    @property
    def kv_start(self) -> torch.Tensor:
        return starts(kv for _, kv in self.requests)


def starts(lengths: Any) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(
    requests: Sequence[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    padding: int = 0,
) -> Case:
    """``padding`` rows follow the last request's in q. q is a slice of a larger buffer."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(q for q, _ in requests) + padding
    fused = torch.randn(rows, q_heads + 3, dim, generator=g).to(dtype)
    return Case(
        fused[:, 1 : q_heads + 1],
        [torch.randn(n, kv_heads, dim, generator=g).to(dtype) for _, n in requests],
        [torch.randn(n, kv_heads, dim, generator=g).to(dtype) for _, n in requests],
        list(requests),
        starts(q for q, _ in requests),
        torch.tensor([n for _, n in requests], dtype=torch.int32),
        torch.randn(q_heads, generator=g),
    )


def paged(
    case: Case, page_size: int, window: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches and page table: pages in random order, NaN wherever no key is that a row sees.

    k lies [pages, page_size, Hkv, D], v [pages, Hkv, page_size, D] as a view of the same shape.
    Table entries without a visible key name a page that does not exist.
    """
    g = torch.Generator().manual_seed(page_size)
    counts = [-(-n // page_size) for _, n in case.requests]
    _, heads, dim = case.k[0].shape
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=g).tolist()
    k = torch.full((pages, page_size, heads, dim), math.nan).to(case.q.dtype)
    v = torch.full((pages, heads, page_size, dim), math.nan).to(case.q.dtype).transpose(1, 2)
    table = torch.full((len(counts), max(counts) + 3), NOWHERE, dtype=torch.int32)[:, :-1]
    for r, (q_len, n) in enumerate(case.requests):
        seen = max(0, n - q_len - window + 1) if window else 0
        for i in range(seen // page_size, counts[r]):
            page = order.pop()
            table[r, i] = page
            begin, end = max(i * page_size, seen), min((i + 1) * page_size, n)
            at = slice(begin - i * page_size, end - i * page_size)
            k[page, at], v[page, at] = case.k[r][begin:end], case.v[r][begin:end]
    return k, v, table


def expect_close(
    case: Case,
    out: torch.Tensor,
    lse: torch.Tensor,
    rounding: str = "rtne",
    *,
    causal: bool = True,
    sinks: bool = False,
    **options: Any,
) -> None:
    options["sinks"] = case.sinks if sinks else None
    for r, (q_len, n) in enumerate(case.requests):
        rows = slice(int(case.q_start[r]), int(case.q_start[r + 1]))
        expected = attention.exact_rows(
            case.q[rows], case.k[r], case.v[r], causal=causal, **options
        )
        attention.expect_close(
            out[rows], lse[:, rows], expected, rounding, what=(r, q_len, n), p_in_fp16=True
        )


def run(
    case: Case, page_size: int, *, rounding: Any = "rtne", sinks: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of the gfx942 engine through the public API; page size 0: packed."""
    out = torch.full_like(case.q, 7.0)
    common = {
        "sinks": case.sinks if sinks else None,
        "rounding": rounding,
        "return_lse": True,
        "out": out,
        "engine": "gfx942",
        "causal": True,
    } | options
    if not page_size:
        k, v = torch.cat(case.k), torch.cat(case.v)
        _, lse = serving.attention_varlen(case.q, k, v, case.q_start, case.kv_start, **common)
    else:
        k, v, table = paged(case, page_size, options.get("window") or 0)
        # The API looks at every page that could be read; here some are hidden on purpose.
        batch = serving.PagedBatch(case.q_start, case.kv_len, table)
        batch.check_cache = lambda *sizes: None  # type: ignore[method-assign]
        _, lse = serving.attention_paged(case.q, k, v, batch, **common)
    end = int(case.q_start[-1])
    assert (out[end:] == 7.0).all()  # padding rows
    return out, lse


def check(
    case: Case, page_size: int, *, rounding: Any = "rtne", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run, compare with float64, return what came out."""
    out, lse = run(case, page_size, rounding=rounding, **options)
    expect_close(case, out, lse, rounding, **options)
    return out, lse
