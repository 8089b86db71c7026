"""Ragged batches in pages, and the bound that results must keep: that of ``tests/oracle``, widened
by what a soft cap's tanh may be off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.oracle.attention import Exact, bound, exact_rows, expect_lse, expect_out


@dataclass
class Case:
    """One batch: lengths, tensors in pages, and the call's options."""

    q_lens: list[int]
    kv_lens: list[int]
    q_heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    shared_prefix: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        requests = len(self.q_lens)
        self.width = max(1, -(-max(self.kv_lens) // self.page_size)) + 1
        pages = requests * self.width + 2
        table = torch.randperm(pages, generator=g)[: requests * self.width]
        self.table = table.view(requests, self.width).int()
        if self.shared_prefix:  # a prefix cache: everyone's first page is the first request's
            self.table[:, 0] = self.table[0, 0]
        # What vLLM hands over: heads before tokens, keys beside values.
        self.kv = torch.randn(pages, self.kv_heads, self.page_size, 2 * self.dim, generator=g).to(
            self.dtype
        )
        self.k_cache = self.kv[..., : self.dim].transpose(1, 2)
        self.v_cache = self.kv[..., self.dim :].transpose(1, 2)
        starts = [2]  # two rows of padding before, three behind
        for length in self.q_lens:
            starts.append(starts[-1] + length)
        self.q_start = torch.tensor(starts, dtype=torch.int32)
        self.kv_len = torch.tensor(self.kv_lens, dtype=torch.int32)
        self.q = torch.randn(starts[-1] + 3, self.q_heads, self.dim, generator=g).to(self.dtype)

    def tokens(self, cache: torch.Tensor, request: int) -> torch.Tensor:
        """One request's keys or values, [kv_len, Hkv, D] float64, token by token."""
        rows = [
            cache[int(self.table[request, j // self.page_size]), j % self.page_size]
            for j in range(self.kv_lens[request])
        ]
        return torch.stack(rows).double() if rows else torch.empty(0, self.kv_heads, self.dim)

    def exact(self) -> Exact:
        """Float64 results over all rows: out, weight [T, Hq, D] and lse [Hq, T]; padding is 0."""
        others = ("k_scale", "v_scale", "rounding")
        options = {name: x for name, x in self.options.items() if name not in others}
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        weight = torch.zeros_like(out)
        lse = torch.zeros(self.q_heads, self.q.shape[0], dtype=torch.float64)
        for r in range(len(self.q_lens)):
            rows = slice(int(self.q_start[r]), int(self.q_start[r + 1]))
            k, v = (
                self.tokens(cache, r) * self.options.get(scale, 1.0)
                for cache, scale in ((self.k_cache, "k_scale"), (self.v_cache, "v_scale"))
            )
            part = exact_rows(self.q[rows], k, v, **{"causal": True} | options)
            out[rows], weight[rows], lse[:, rows] = part.out, part.weight, part.lse
        return Exact(out, lse, weight, 0.0)


def check(case: Case, out: torch.Tensor, lse: torch.Tensor, untouched: float) -> None:
    """Hold a result against float64; padding rows must still hold ``untouched``."""
    rows = slice(int(case.q_start[0]), int(case.q_start[-1]))
    padding = torch.ones(out.shape[0], dtype=torch.bool)
    padding[rows] = False
    assert (out[padding] == untouched).all()
    expected = case.exact()
    limit = bound(expected, case.dtype, case.options.get("rounding", "rtne"))
    # fp32 tanh is off by 5e-7, and so is the logit that it makes; logits lie within +-10.
    cap = min(10.0, case.options.get("soft_cap") or 0.0)
    limit = limit + 2 * 5e-7 * cap * expected.weight
    expected.out[padding] = untouched
    expect_out(out, expected, limit)
    expect_lse(lse[:, rows], expected.lse[:, rows], atol=1e-5 + 5e-7 * cap)
    silent = torch.where(torch.isneginf(expected.lse).T[..., None], out.double(), 0.0)
    assert (silent[rows] == 0).all()
