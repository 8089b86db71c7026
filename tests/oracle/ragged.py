"""Ragged batches of seeded tensors, their keys in pages or packed, and float64 attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .attention import Exact, exact_rows

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
    kv_start: torch.Tensor
    sinks: torch.Tensor

    @property
    def rows(self) -> slice:
        """Rows of q that belong to a request."""
        return slice(int(self.q_start[0]), int(self.q_start[-1]))

    def exact(
        self, *, causal: bool = True, k_scale: float = 1.0, v_scale: float = 1.0, **options: Any
    ) -> Exact:
        """Float64: out and weight [T, Hq, D], lse [Hq, T] of the requests' rows."""
        rows = self.q[self.rows].split([n for n, _ in self.requests])
        k, v = ([x.double() * s for x in xs] for xs, s in ((self.k, k_scale), (self.v, v_scale)))
        requests = zip(rows, k, v, strict=True)
        parts = [exact_rows(*tensors, causal=causal, **options) for tensors in requests]
        return Exact(
            torch.cat([part.out for part in parts]),
            torch.cat([part.lse for part in parts], 1),
            torch.cat([part.weight for part in parts]),
            max(part.reach for part in parts),
        )


def starts(lengths: Iterable[int], first: int = 0) -> torch.Tensor:
    return torch.tensor([first, *lengths]).cumsum(0).int()


def make(
    requests: Sequence[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    padding: int = 0,
    lead: int = 0,
    fp8: torch.dtype | None = None,
) -> Case:
    """``lead`` rows of q precede the first request's, ``padding`` follow the last one's.

    ``fp8``: of k and v, which have q's dtype otherwise. q is a slice of a larger buffer: nothing is
    contiguous but the last dimension.
    """
    g = torch.Generator().manual_seed(seed)
    rows = lead + sum(n for n, _ in requests) + padding
    fused = torch.randn(rows, q_heads + 3, dim + 8, generator=g).to(dtype)
    k, v = (
        [torch.randn(n, kv_heads, dim, generator=g).to(fp8 or dtype) for _, n in requests]
        for _ in "kv"
    )
    return Case(
        fused[:, 1 : q_heads + 1, :dim],
        k,
        v,
        list(requests),
        starts((n for n, _ in requests), lead),
        torch.tensor([n for _, n in requests], dtype=torch.int32),
        starts(n for _, n in requests),
        torch.randn(q_heads, generator=g),
    )


def paged(
    case: Case, page_size: int, window: int = 0, *, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches and page table: pages in random order, NaN wherever no key is that a row sees.

    The caches are [pages, page_size, Hkv, D]; ``fused``: in one block of memory, heads before rows,
    as vLLM lays them out; otherwise only the values have heads before rows. Table entries without a
    visible key name a page that does not exist.
    """
    g = torch.Generator().manual_seed(page_size)
    counts = [-(-n // page_size) for _, n in case.requests]
    (_, heads, dim), dtype = case.k[0].shape, case.k[0].dtype
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=g).tolist()
    if fused:
        both = torch.full((pages, heads, page_size, 2 * dim), math.nan).to(dtype)
        k, v = (both[..., i * dim : (i + 1) * dim].transpose(1, 2) for i in (0, 1))
    else:
        k = torch.full((pages, page_size, heads, dim), math.nan).to(dtype)
        v = torch.full((pages, heads, page_size, dim), math.nan).to(dtype).transpose(1, 2)
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
