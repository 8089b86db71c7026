"""Which tiles a budget of softmax mass drops, given the weight of every tile computed.

*Mass.* The mass of a tile is the mean over the rows of its q block of the softmax probability that
lies in it, so the tiles of a q block that a step computes have a mass of 1 together. Leaving out
tiles of mass d changes a row's output by its own share of d times the distance between two means
of values: docs/budget.md has the bound.

*What kernels write.* A row's sum is known at the end of its walk only. Kernels therefore divide by
the sum so far, which is never larger: what they write is the tile's share of what its rows had seen
by then, at least its mass, exactly 1 for the first tile walked. (Hopper's kernel at head dim 128
comes nearer to the mass where rows have seen more by 32 tiles later: docs/budget.md.) Where the
tiles that weigh most come late in a walk, those before look heavier than they are, and the next
step, which walks the other way, sees them as they are.

*Rows are guarded.* The mass is a mean, in which a few rows that look at one K block only get lost.
So a tile of which any single row has a share above :data:`ROW_GUARD` weighs 1, which no budget
drops. An engine may round a row's share, which then falls on either side of the guard.

*Selection.* Masses become integers, ``weight = ceil(mass * 2^24)``, so that sums do not depend on
their order and every engine drops the same tiles for the same masses. Tiles of one weight go
together or stay together. With ``limit = floor(budget * 2^24)``, dropped are the tiles whose weight
is at most the largest cut for which the weights up to the cut add up to at most ``limit``. Must-do
tiles are neither dropped nor counted. Those of the largest weight in the q block stay whatever the
budget, and so does a tile whose mass is NaN. A limit of 0 drops nothing, not even what weighs
nothing.

*By head.* Heads may have budgets of their own: one limit for the q blocks of each head
(:func:`limits`). Nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

#: A mass of 1 as a weight.
UNIT = 1 << 24

#: A tile stays if it holds more than this share of what any single row of its q block had seen.
ROW_GUARD = 0.25


def limit_of(budget: float) -> int:
    """Return what the weights dropped by ``budget`` (share of mass, 0 to 1) add up to at most."""
    return math.floor(budget * UNIT)


def limits(budgets: Sequence[float], device: torch.device | str | None = None) -> torch.Tensor:
    """Return :func:`limit_of` each head's budget, int32 [heads], as engines take it."""
    return torch.tensor([limit_of(value) for value in budgets], dtype=torch.int32, device=device)


def weights(mass: torch.Tensor) -> torch.Tensor:
    """Return masses as integer weights, int64 of the same shape; NaN and more than 1 weigh 1."""
    scaled = torch.ceil(mass.double() * UNIT)
    return torch.where(scaled < UNIT, scaled, float(UNIT)).to(torch.int64)


def select(
    mass: torch.Tensor, walked: torch.Tensor, must_do: torch.Tensor, budget: float | Sequence[float]
) -> torch.Tensor:
    """Return the tiles to compute in the next step, bool [..., K_blocks].

    Args:
        mass: fp32 [..., K_blocks], a row per q block; of tiles not walked it may be anything.
        walked: bool [..., K_blocks], the tiles that this step computed.
        must_do: bool [K_blocks].
        budget: share of mass, 0 <= budget < 1; 0 drops nothing. A sequence has one for each head:
            mass and walked are then [..., heads, q_blocks, K_blocks].
    """
    if isinstance(budget, Sequence):
        return select_within(mass, walked, must_do, limits(budget, mass.device))
    return select_within(mass, walked, must_do, limit_of(budget))


def select_within(
    mass: torch.Tensor, walked: torch.Tensor, must_do: torch.Tensor, limit: int | torch.Tensor
) -> torch.Tensor:
    """Do what :func:`select` does within limits: one number, or int32 [heads]."""
    if isinstance(limit, torch.Tensor):
        limit = limit.view(-1, 1, 1)
    weight = torch.where(walked, weights(mass), 0)
    largest = weight.amax(-1, keepdim=True)
    loose = walked & ~must_do
    ordered = torch.where(loose, weight, 0).sort(-1).values.contiguous()
    # of each tile: all loose weights up to and including its own
    last = torch.searchsorted(ordered, weight.contiguous(), right=True) - 1
    together = ordered.cumsum(-1).gather(-1, last.clamp_min(0))
    within = (together <= limit) & torch.as_tensor(limit > 0, device=mass.device)
    return walked & ~(loose & within & (weight < largest))
