"""Ragged batches, an oracle that knows nothing of pages, and the bound that results must keep.

The oracle goes request by request over dense tensors: one mask, one softmax in float64, the sink
as one more column. The error bound is that of ``tests/cpu/oracle.py``, widened by what a soft cap's
tanh may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cpu.oracle import Exact, bound


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
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        weight = torch.zeros_like(out)
        lse = torch.zeros(self.q_heads, self.q.shape[0], dtype=torch.float64)
        for r in range(len(self.q_lens)):
            rows = slice(int(self.q_start[r]), int(self.q_start[r + 1]))
            k, v = self.tokens(self.k_cache, r), self.tokens(self.v_cache, r)
            part = dense(self.q[rows], k, v, **self.options)
            out[rows], weight[rows], lse[:, rows] = part.out, part.weight, part.lse
        return Exact(out, lse, weight)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rounding: str = "rtne",
) -> Exact:
    """Attention of one request: q [n, Hq, D], k and v [m, Hkv, D]; written head by head."""
    n, heads, dim = q.shape
    m, group = k.shape[0], heads // k.shape[1]
    visible = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        at = m - n + i
        low = 0 if window is None else max(0, at - window + 1)
        high = min(m, at + 1) if causal else m
        visible[i, low : max(low, high)] = True
    outs, weights, lses = [], [], []
    for head in range(heads):
        keys, values = (
            k[:, head // group].double() * k_scale,
            v[:, head // group].double() * v_scale,
        )
        logits = (q[:, head].double() @ keys.T) * (dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            logits = soft_cap * (logits / soft_cap).tanh()
        logits = torch.where(visible, logits, -math.inf)
        extra = -math.inf if sinks is None else float(sinks[head])
        logits = torch.cat([logits, torch.full((n, 1), extra, dtype=torch.float64)], dim=1)
        shares = torch.nan_to_num(torch.softmax(logits, dim=1), nan=0.0)[:, :m]
        outs.append(shares @ values)
        weights.append(shares @ values.abs())
        lses.append(torch.logsumexp(logits, dim=1))
    return Exact(torch.stack(outs, 1), torch.stack(lses), torch.stack(weights, 1))


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
    error = (out.double() - expected.out).abs()
    assert (error <= limit)[rows].all(), f"{(error / limit)[rows].max():.2f} x the bound"
    empty = torch.isneginf(expected.lse[:, rows])
    assert torch.equal(torch.isneginf(lse[:, rows]), empty)
    off = (lse.double() - expected.lse)[:, rows][~empty].abs()
    assert off.numel() == 0 or off.max() <= 1e-5 + 5e-7 * cap
    silent = torch.where(torch.isneginf(expected.lse).T[..., None], out.double(), 0.0)
    assert (silent[rows] == 0).all()
