"""Float64 attention and the error bounds that follow from the arithmetic of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Exact:
    """Float64 results, all [B, H, S, D] or [B, H, S]; ``weight`` is softmax(scores) @ |v|."""

    out: torch.Tensor
    lse: torch.Tensor
    weight: torch.Tensor


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Exact:
    """Attention of [B, H, S, D] tensors in float64; causal is bottom-right aligned."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        i = torch.arange(q.shape[2])[:, None]
        j = torch.arange(k.shape[2])[None]
        scores = scores.masked_fill(j > i + k.shape[2] - q.shape[2], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])
    return Exact(weights @ v, lse, weights @ v.abs())


# Half a unit in the last place, relative: of bf16 (8 significant bits), fp16 (11) and fp32 (24).
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# Smallest steps below the normal range.
TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-25, torch.float32: 2.0**-149}


def bound(expected: Exact, dtype: torch.dtype, rounding: str = "rtne") -> torch.Tensor:
    """Largest error that each output element may have.

    bf16 kernels round each probability to bf16 (half an ulp of p, weighted by |v|) and then the
    output (half an ulp, a whole one when rounding towards zero). fp32 score and sum rounding adds
    a few 1e-6 of the weight.
    """
    p_error = HALF_ULP[torch.bfloat16] if dtype == torch.bfloat16 else 0.0
    before = (p_error + 4e-6) * expected.weight
    out_error = HALF_ULP[dtype] * (2 if rounding == "rtz" else 1)
    return before + out_error * (expected.out.abs() + before) + TINY[dtype]
