"""What a tile may weigh whose rows are guarded: the oracle of every engine's masses."""

from __future__ import annotations

import torch

from liteattention_rocm.lite.budget import ROW_GUARD


def wrong_masses(
    found: torch.Tensor, share: torch.Tensor, q_block: int, error: float
) -> torch.Tensor:
    """Tiles whose mass is not what the rule says, bool like ``found`` [B, H, q_blocks, K_blocks].

    Args:
        found: an engine's masses.
        share: float64 [B, H, Sq, K_blocks], as :func:`liteattention_rocm.engines.reference.shares`
            returns; no NaN.
        q_block: rows of a q block.
        error: how far an engine's share of a row, and so a mean over rows, may be from the exact
            one. A tile whose largest share is that near to the guard may weigh 1 or its mean.
    """
    blocks = share.split(q_block, 2)
    mean = torch.stack([rows.mean(2) for rows in blocks], 2)
    most = torch.stack([rows.amax(2) for rows in blocks], 2)
    near = (found - mean).abs() <= error
    guarded = found == 1
    unsure = (most - ROW_GUARD).abs() <= error
    return ~torch.where(unsure, near | guarded, torch.where(most > ROW_GUARD, guarded, near))
