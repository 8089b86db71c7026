"""What attention gives in float64, for the errors that benchmarks report."""

from __future__ import annotations

import itertools
import math

import torch


def attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    *,
    causal: bool = False,
    tiles: torch.Tensor | None = None,
    size: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """Attention of some query rows, float64 [B, Hq, len(rows), D].

    Args:
        q: [B, Hq, Sq, D]; k, v: [B, Hkv, Sk, D], Hkv divides Hq.
        rows: which query rows, int64.
        causal: the last row sees all keys, each before it one less.
        tiles: keys that are seen, bool [B, Hq, q_blocks, K_blocks] of blocks of ``size``.
    """
    heads, q_len, dim = q.shape[1:]
    kv_len, group = k.shape[2], heads // k.shape[1]
    rows = rows.to(q.device)
    out = torch.empty(*q.shape[:2], len(rows), dim, dtype=torch.float64, device=q.device)
    # Head by head: float64 scores of all of them may not fit.
    for b, h in itertools.product(range(q.shape[0]), range(heads)):
        scores = q[b, h, rows].double() @ k[b, h // group].double().mT / math.sqrt(dim)
        if causal:
            hidden = torch.arange(kv_len, device=q.device)[None] > rows[:, None] + kv_len - q_len
            scores = scores.masked_fill(hidden, -math.inf)
        if tiles is not None:
            seen = tiles[b, h, rows // size[0]].repeat_interleave(size[1], dim=-1)[:, :kv_len]
            scores = scores.masked_fill(~seen, -math.inf)
        out[b, h] = torch.softmax(scores, dim=-1) @ v[b, h // group].double()
    return out
