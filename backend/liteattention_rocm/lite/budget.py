"""Which tiles a budget of softmax mass drops, given the weight of every tile computed.

*Mass.* The mass of a tile is the mean over the rows of its q block of the softmax probability that
lies in it, so the tiles of a q block that a step computes have a mass of 1 together. Leaving out
tiles of mass d changes a row's output by its own share of d times the distance between two means
of values: docs/budget.md has the bound.

*What kernels write.* A row's sum is known at the end of its walk only. Kernels therefore divide by
the sum so far, which is never larger: what they write is the tile's share of what its rows had seen
by then, at least its mass, exactly 1 for the first tile walked. Where the tiles that weigh most
come late in a walk, those before look heavier than they are, and the next step, which walks the
other way, sees them as they are.

*Selection.* Masses become integers, ``weight = ceil(mass * 2^24)``, so that sums do not depend on
their order and every engine drops the same tiles for the same masses. Tiles of one weight go
together or stay together. With ``limit = floor(budget * 2^24)``, dropped are the tiles whose weight
is at most the largest cut for which the weights up to the cut add up to at most ``limit``. Must-do
tiles are neither dropped nor counted. Those of the largest weight in the q block stay whatever the
budget, and so does a tile whose mass is NaN.
"""

from __future__ import annotations

import math

import torch

#: A mass of 1 as a weight.
UNIT = 1 << 24


def limit_of(budget: float) -> int:
    """Return what the weights dropped by ``budget`` (share of mass, 0 to 1) add up to at most."""
    return math.floor(budget * UNIT)


def weights(mass: torch.Tensor) -> torch.Tensor:
    """Return masses as integer weights, int64 of the same shape; NaN and more than 1 weigh 1."""
    scaled = torch.ceil(mass.double() * UNIT)
    return torch.where(scaled < UNIT, scaled, float(UNIT)).to(torch.int64)


def select(
    mass: torch.Tensor, walked: torch.Tensor, must_do: torch.Tensor, budget: float
) -> torch.Tensor:
    """Return the tiles to compute in the next step, bool [..., K_blocks].

    Args:
        mass: fp32 [..., K_blocks], a row per q block; of tiles not walked it may be anything.
        walked: bool [..., K_blocks], the tiles that this step computed.
        must_do: bool [K_blocks].
        budget: share of mass, 0 <= budget < 1; 0 drops nothing.
    """
    if not budget:
        return walked.clone()
    weight = torch.where(walked, weights(mass), 0)
    largest = weight.amax(-1, keepdim=True)
    loose = walked & ~must_do
    ordered = torch.where(loose, weight, 0).sort(-1).values.contiguous()
    # of each tile: all loose weights up to and including its own
    last = torch.searchsorted(ordered, weight.contiguous(), right=True) - 1
    together = ordered.cumsum(-1).gather(-1, last.clamp_min(0))
    dropped = loose & (together <= limit_of(budget)) & (weight < largest)
    return walked & ~dropped
