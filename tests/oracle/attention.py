"""Float64 attention and the error bounds that follow from the arithmetic of the kernels.

It knows no tiles, pages or bitmaps: one mask, one softmax, the sink as one more column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Exact:
    """Float64 results, [..., H, S, D] or [..., H, S]; ``weight`` is softmax(scores) @ |v|.

    ``reach`` is the number of keys times the largest |v|.
    """

    out: torch.Tensor
    lse: torch.Tensor
    weight: torch.Tensor
    reach: float


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    lookahead: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    seen: torch.Tensor | None = None,
) -> Exact:
    """Attention of [..., H, S, D] tensors; masks are bottom-right aligned.

    ``sinks`` [Hq] are logits in natural units; ``seen``, bool, broadcasts to [..., Hq, Sq, Skv].
    """
    group = q.shape[-3] // k.shape[-3]
    q = q.double()
    k, v = (x.double().repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows, keys = scores.shape[-2:]
    at, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    if causal:
        scores = scores.masked_fill(key > at, -math.inf)
    if window and window < keys:  # it may be any integer
        scores = scores.masked_fill(key <= at - window, -math.inf)
    if lookahead is not None and lookahead < keys + rows:
        scores = scores.masked_fill(key > at + lookahead, -math.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    logits = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    reach = keys * float(v.abs().max()) if v.numel() else 0.0
    return Exact(weights @ v, lse, weights @ v.abs(), reach)


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Exact:
    """The same of [..., S, H, D] tensors; lse is [..., H, S]."""
    found = exact(*(x.transpose(-3, -2) for x in (q, k, v)), **options)
    found.out, found.weight = found.out.transpose(-3, -2), found.weight.transpose(-3, -2)
    return found


# Half a unit in the last place, relative: of bf16 (8 significant bits), fp16 (11) and fp32 (24).
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# Smallest steps below the normal range.
TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-25, torch.float32: 2.0**-149}


def bound(
    expected: Exact, dtype: torch.dtype, rounding: str = "rtne", *, p_as_output: bool = False
) -> torch.Tensor:
    """Largest error that each output element may have.

    bf16 kernels round each probability to bf16 (half an ulp of p, weighted by |v|) and then the
    output (half an ulp, a whole one when rounding towards zero). fp32 score and sum rounding adds
    a few 1e-6 of the weight. With ``p_as_output``, as on gfx942, probabilities are rounded as
    outputs are: in fp16 kernels to fp16, those below 2^-14 by up to 2^-25, and in bf16 kernels
    that round towards zero by up to a whole ulp.
    """
    p_error = HALF_ULP[torch.bfloat16] if dtype == torch.bfloat16 else 0.0
    if p_as_output and rounding == "rtz":
        p_error *= 2
    before = (p_error + 4e-6) * expected.weight
    out_error = HALF_ULP[dtype] * (2 if rounding == "rtz" else 1)
    allowed = before + out_error * (expected.out.abs() + before) + TINY[dtype]
    if p_as_output and dtype == torch.float16:
        allowed += 2.0**-11 * expected.weight + 2.0**-25 * expected.reach
    return allowed


def expect_out(
    out: torch.Tensor, expected: Exact, allowed: torch.Tensor, what: object = ""
) -> None:
    """Every element within ``allowed`` of the exact one."""
    error = (out.double() - expected.out).abs()
    assert (error <= allowed).all(), f"{what} worst {(error / allowed).max():.2f} x the bound"


def expect_lse(
    lse: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """-inf exactly where the exact one is, and near it elsewhere."""
    empty = expected.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    torch.testing.assert_close(lse.double()[~empty], expected[~empty], atol=atol, rtol=rtol)


def expect_close(
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: Exact,
    rounding: str = "rtne",
    *,
    what: object = "",
    **kernel: bool,
) -> None:
    """Output and log-sum-exp against float64 and :func:`bound`, which takes ``kernel``."""
    expect_out(out, expected, bound(expected, out.dtype, rounding, **kernel), what)
    expect_lse(lse, expected.lse)


def expect_no_worse_than_twice_sdpa(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """[B, H, S, D]: largest and mean square errors, beside those of PyTorch's own attention."""
    expected = exact(q, k, v).out
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    our_error, their_error = out.double() - expected, theirs.double() - expected
    assert our_error.abs().max() <= 2 * their_error.abs().max()
    assert our_error.square().mean().sqrt() <= 2 * their_error.square().mean().sqrt()
