"""How many tiles a budget drops by what shares of mass are divided by, as the Hopper kernel does.

    python e2e/model/divisor_study.py

Makes one dense video with the small model and takes queries and keys of one step. The kernel at
head dim 128 divides what lies in a tile by a divisor of the row that is ahead of the row's sum. It
renews divisors when a sum in the warp has outgrown its own, and after every 32 tiles
(docs/budget.md, "What the shares give away"). That is repeated here in fp32, but for its rounding
to integers, for several first divisors. "Mass" and "share" choose by the mass of the whole row, and
by the share of what a row had seen by then.

For each the program prints the share of the walked tiles that the budget drops, both ways of
walking, and how far any weight falls short of the tile's mass: not at all, if the bound holds.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from budget_study import Processor
from diffusers import WanPipeline

from liteattention_e2e.pixel_vae import pipeline_num_frames

ROWS, WARP, K_BLOCK = 128, 16, 64
#: As in the kernel: tiles between renewals at most, growth of a sum until one, over its divisor,
#: the most that is counted of a tile in a row, and what is kept of a count at least.
WORD, GROWTH, MOST, LEAST_LEFT = 32, 3.0, 2.0, 0.5
AHEAD = GROWTH / MOST
TINY = 1e-30


class Divided:
    """Weights of the tiles of one head, in the order of a walk.

    ``sums`` fp32 [q blocks, ROWS, K blocks]: what lies in each tile of a row. ``kept`` bool
    [q blocks, K blocks]: the tiles that are walked.
    """

    def __init__(self, sums: torch.Tensor, kept: torch.Tensor) -> None:
        self._parts = sums.unflatten(1, (-1, WARP))  # [q blocks, warps, rows, K blocks]
        self._kept = kept
        q_blocks, warps, rows, k_blocks = self._parts.shape
        self._seen = torch.zeros(q_blocks, warps, rows)
        self._divisor = torch.ones(q_blocks, warps, rows)
        self._due = torch.full((q_blocks, warps, rows), math.inf)
        self._counts = torch.zeros(q_blocks, warps, k_blocks)
        self._word = torch.zeros(q_blocks, k_blocks, dtype=torch.bool)  # counted, not written
        self._last = torch.zeros(q_blocks, dtype=torch.long)

    def weights(self, most_ahead: int, descending: bool) -> torch.Tensor:
        """[q blocks, K blocks], of a first divisor of ``most_ahead`` first sums at most."""
        k_blocks = self._kept.shape[1]
        tiles = self._kept.sum(-1)
        walked = torch.zeros_like(tiles)
        found = torch.zeros(self._kept.shape)
        for j in reversed(range(k_blocks)) if descending else range(k_blocks):
            live = self._kept[:, j]
            first = (live & (walked == 0))[:, None]
            part = self._parts[..., j]
            self._renew((self._seen > self._due).any(-1) & live[:, None] & ~first, AHEAD)
            begin = part * tiles.clamp(max=most_ahead)[:, None, None]
            self._set(first, begin, MOST * begin)
            count = (part / self._divisor).clamp(max=MOST).sum(-1)
            self._counts[..., j] = torch.where(live[:, None], count, self._counts[..., j])
            self._seen += part * live[:, None, None]
            self._word[:, j] |= live
            self._last[live] = j
            walked += live
            end = live & ((walked % WORD == 0) | (walked == tiles))
            everywhere = end[:, None].expand(-1, self._parts.shape[1])
            self._renew(everywhere, 1.0)
            written = end[:, None] & self._word
            found = torch.where(written, self._counts.sum(1) / ROWS, found)
            self._word &= ~end[:, None]
            self._set(everywhere, AHEAD * self._seen, GROWTH * self._seen)
        return found.clamp(max=1.0)

    def _set(self, where: torch.Tensor, divisor: torch.Tensor, due: torch.Tensor) -> None:
        """Take new divisors in some warps, bool [q blocks, warps]."""
        self._divisor = torch.where(where[..., None], divisor.clamp_min(TINY), self._divisor)
        self._due = torch.where(where[..., None], due, self._due)

    def _renew(self, where: torch.Tensor, ahead: float) -> None:
        """Divide by ``ahead`` sums in some warps, and scale what they counted of this word.

        By the row whose sum grew least. Of the last tile, with which a sum may have outgrown its
        divisor, some is left in any case.
        """
        if not where.any():
            return
        divisor = (ahead * self._seen).clamp_min(TINY)
        left = (self._divisor / divisor).amax(-1, keepdim=True)
        scale = torch.where(self._word[:, None], left, torch.ones(()))
        at = self._last[:, None, None].expand(-1, scale.shape[1], 1)
        last = scale.gather(-1, at)
        scale = scale.scatter(-1, at, last.clamp_min(LEAST_LEFT / ahead))
        self._counts = torch.where(where[..., None], self._counts * scale, self._counts)
        self._set(where, divisor, GROWTH * self._seen)


class Taken:
    """Queries and keys of one step of one branch, by layer; attention stays dense."""

    def __init__(self, step: int) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step = step
        self._calls: dict[int, int] = {}

    def attend(
        self, layer: int, branch: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q, k, v: [B, S, H, D] bf16."""
        if branch == "cond":
            if self._calls.get(layer, 0) == self._step:
                self.found.append((q[0].clone(), k[0].clone()))
            self._calls[layer] = self._calls.get(layer, 0) + 1
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*turned).transpose(1, 2)


def sums_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What lies in each tile of a row, fp32 [q blocks, ROWS, K blocks], relative to its largest."""
    scores = (q @ k.T).float() / math.sqrt(q.shape[-1])
    parts = (scores - scores.amax(-1, keepdim=True)).exp()
    return parts.unflatten(-1, (-1, K_BLOCK)).sum(-1).unflatten(0, (-1, ROWS))


def dropped(weights: torch.Tensor, kept: torch.Tensor, budget: float) -> float:
    """Share of the walked tiles whose weights, smallest first, stay within the budget."""
    ordered = weights.masked_fill(~kept, math.inf).sort(-1).values
    within = ordered.cumsum(-1) <= budget
    return float(within.sum() / kept.sum())


def main(
    budget: float = 0.05,
    step: int = 8,
    rows: int = 1024,
    size: int = 128,
    frames: int = 8,
    model: str = str(Path(__file__).parent / "wan-shapes"),
    prompt: str = "a red circle moves left on a blue background",
) -> None:
    """Print a line for each rule, of one head of each layer and its first ROWS rows."""
    pipe = WanPipeline.from_pretrained(model, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    taken: Any = Taken(step)
    for layer, block in enumerate(pipe.transformer.blocks):
        block.attn1.set_processor(Processor(taken, layer))
    pipe(
        prompt, height=size, width=size, num_frames=pipeline_num_frames(frames),
        num_inference_steps=step + 2, guidance_scale=3.0, max_sequence_length=32,
        output_type="latent", generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    shares: dict[str, list[float]] = {}
    short: dict[str, float] = {}
    for layer, (q, k) in enumerate(taken.found):
        head = layer % q.shape[1]
        sums = sums_of(q[:rows, head], k[:, head])
        kept = torch.ones(sums.shape[0], sums.shape[2], dtype=torch.bool)
        mass = (sums / sums.sum(-1, keepdim=True)).mean(1)
        for descending in (False, True):
            walked = sums.flip(-1) if descending else sums
            share = walked / walked.cumsum(-1).clamp_min(TINY)
            rules = {"mass": mass, "share": (share.flip(-1) if descending else share).mean(1)}
            for most_ahead in (1, 3, 8, 32):
                weights = Divided(sums, kept).weights(most_ahead, descending)
                rules[f"first divisor of {most_ahead}"] = weights
            for name, weights in rules.items():
                shares.setdefault(name, []).append(dropped(weights, kept, budget))
                short[name] = max(short.get(name, -math.inf), float((mass - weights).max()))
    print(f"{len(taken.found)} layers, {sums.shape[2]} K blocks, budget {budget}")
    for name, found in shares.items():
        mean = sum(found) / len(found)
        print(f"{name:20} drops {mean:.4f}; mass - weight at most {short[name]:.1e}")


if __name__ == "__main__":
    typer.run(main)
