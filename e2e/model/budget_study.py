"""What a budget of softmax mass buys on the small model, and what would buy more: in plain PyTorch.

    python e2e/model/budget_study.py --device cuda

Each variant makes the videos of all prompts with its tiles left out exactly, in fp32 from bf16
products, and is compared with dense attention: PSNR of 8-bit frames, mean and worst over the
prompts, and the share of tiles that were not computed. Variants whose tiles do not fit the number
of tokens are left out: those of 384 rows need --height 96. docs/budget.md has the rule that engines
follow (`share`); the others are here to be held against it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import typer
from diffusers import WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from sparsity_study import queries_and_keys

from liteattention_e2e.metrics import psnr, to_8_bit
from liteattention_e2e.pixel_vae import pipeline_num_frames

K_BLOCK = 64
PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "shapes-12.txt"
Budget = Callable[[int, int], float]  # of step and layer


@dataclass(frozen=True)
class Variant:
    """A way to choose tiles.

    ``weight`` is what is added up against the budget, per tile: "share" of what the rows had seen
    by then (what kernels write), "mass" of the whole row, "rms" of the rows' masses instead of
    their mean, or "value": the share times how far the tile's mean value lies from that of all
    tiles, relative to the mean distance. ``remainder``: what the first skipping step leaves out is
    kept and added to every later output, out = w out_kept + R. ``estimate``: tiles left out weigh
    what the means of their queries and keys say, relative to the tiles computed, and come back if
    that is too much; the budget is then one of all tiles, not of what is left. ``guard``: a tile
    stays if the share (or mass) of any row in it exceeds this; 1 guards nothing.
    """

    name: str
    budget: Budget
    dense_steps: int = 4
    rows: int = 128
    weight: str = "share"
    remainder: bool = False
    estimate: bool = False
    guard: float = 1.0


def flat(value: float) -> Budget:
    """The same budget at every step and layer."""
    return lambda step, layer: value


def by_layer(*values: float) -> Budget:
    """A budget for each layer."""
    return lambda step, layer: values[layer]


def ramp(first: float, last: float, dense_steps: int = 4, steps: int = 20) -> Budget:
    """From ``first`` to ``last`` over the steps that are not dense, in equal differences."""
    return lambda step, layer: (
        first + (last - first) * (step - dense_steps) / (steps - 1 - dense_steps)
    )


#: Budgets that `liteattention-rocm calibrate` chose for 33.6 dB with prompts/shapes-calibrate.txt.
LAYERS = (0.25, 0.124, 0.0657, 0.0738, 0.052, 0.0552)
VARIANTS = (
    *(Variant(f"budget {value:g}", flat(value)) for value in (0.01, 0.02, 0.05, 0.1)),
    *(
        Variant(f"budget 0.05, rows guarded at {guard:g}", flat(0.05), guard=guard)
        for guard in (0.1, 0.25, 0.5)
    ),
    Variant("budget 0.05, mass of the whole row", flat(0.05), weight="mass"),
    Variant("budget 0.05, rms over the rows", flat(0.05), weight="rms"),
    Variant("budget 0.05, weighted by values", flat(0.05), weight="value"),
    Variant("budget 0.01 rising to 0.1", ramp(0.01, 0.1)),
    Variant("budget 0.1 falling to 0.01", ramp(0.1, 0.01)),
    Variant("budget 0.03, three dense steps", flat(0.03), dense_steps=3),
    Variant("budget 0.05, remainder added", flat(0.05), remainder=True),
    Variant("budget 0.1, left-out tiles estimated", flat(0.1), weight="mass", estimate=True),
    Variant("budget 0.2, left-out tiles estimated", flat(0.2), weight="mass", estimate=True),
    Variant("by layer", by_layer(*LAYERS)),
    Variant("by layer, rms over the rows", by_layer(*LAYERS), weight="rms"),
    Variant("by layer, mass of the whole row", by_layer(*LAYERS), weight="mass"),
    Variant("0.7 by layer, three dense steps", by_layer(*(0.7 * b for b in LAYERS)), dense_steps=3),
    Variant("budget 0.02, 256 rows", flat(0.02), rows=256),
    Variant("budget 0.05, 256 rows", flat(0.05), rows=256),
    Variant("by layer, 256 rows", by_layer(*LAYERS), rows=256),
    Variant("budget 0.02, 384 rows", flat(0.02), rows=384),
    Variant("by layer, 384 rows", by_layer(*LAYERS), rows=384),
)


class Study:
    """Attention of one generation with a variant's tiles left out.

    Key: (layer, branch); owner: `main`; lifetime: one pipeline call.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.steps: dict[tuple[int, str], int] = {}
        self.kept: dict[tuple[int, str], torch.Tensor] = {}
        self.remainders: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self.skipped: list[float] = []  # share of each call

    def attend(
        self, layer: int, branch: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q, k, v: [B, S, H, D] bf16; S must divide into tiles."""
        key = (layer, branch)
        step = self.steps.get(key, 0)
        self.steps[key] = step + 1
        if step < self.variant.dense_steps:
            self.skipped.append(0.0)
            return _dense(q, k, v)
        batch, length, heads, _ = q.shape
        if length % self.variant.rows or length % K_BLOCK:
            raise ValueError(f"{length} tokens do not divide into {self.variant.rows} x {K_BLOCK}")
        shape = (batch, heads, length // self.variant.rows, length // K_BLOCK)
        kept = self.kept.get(key)
        if kept is None:
            kept = torch.ones(shape, dtype=torch.bool, device=q.device)
        self.skipped.append(1.0 - float(kept.float().mean()))
        after, out = torch.empty_like(kept), torch.empty_like(q)
        made = []
        for b in range(batch):
            for h in range(heads):
                tensors = (q[b, :, h], k[b, :, h], v[b, :, h])
                one, after[b, h], rest = self._one_head(
                    *tensors, kept[b, h], self.variant.budget(step, layer), step, key
                )
                if key in self.remainders:
                    share, added = (part[b * heads + h] for part in self.remainders[key])
                    one = share * one + added
                out[b, :, h] = one.to(out.dtype)
                made.append(rest)
        if self.variant.remainder and step == self.variant.dense_steps:
            shares, rests = zip(*made, strict=True)
            self.remainders[key] = (torch.stack(shares), torch.stack(rests))
        self.kept[key] = after
        return out

    def _one_head(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor,
        budget: float, step: int, key: tuple[int, str],
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        rows = self.variant.rows
        length, dim = q.shape
        tiles = (length // rows, rows, length // K_BLOCK)
        e = (q @ k.T).float().mul_(1 / math.sqrt(dim))
        e.view(*tiles, K_BLOCK).masked_fill_(~kept[:, None, :, None], -math.inf)
        e.sub_(e.amax(-1, keepdim=True)).exp_()
        sums = e.view(*tiles, K_BLOCK).sum(-1)
        total = sums.sum(-1).view(length, 1)
        out = (e.to(v.dtype) @ v).float() / total
        weight = self._weigh(sums, v, step % 2 == 1)
        weight = torch.where(kept, weight, _estimate(q, k, kept) if self.variant.estimate else 0.0)
        ordered, order = weight.sort(-1)
        drop = ordered.cumsum(-1) <= budget
        drop[:, -1] = False
        after = ~torch.zeros_like(kept).scatter(-1, order, drop)
        if not self.variant.estimate:
            after &= kept
        if not (self.variant.remainder and step == self.variant.dense_steps):
            return out, after, None
        lost = e.view(*tiles, K_BLOCK) * ~after[:, None, :, None]
        lost = lost.view(length, length)
        rest = (lost.to(v.dtype) @ v).float() / total
        return out, after, (1 - lost.sum(-1, keepdim=True) / total, rest)

    def _weigh(self, sums: torch.Tensor, v: torch.Tensor, descending: bool) -> torch.Tensor:
        """Weights [q_blocks, K_blocks] of sums [q_blocks, rows, K_blocks]."""
        mass = sums / sums.sum(-1, keepdim=True)
        if self.variant.weight == "mass":
            return mass.mean(1)
        if self.variant.weight == "rms":
            return mass.square().mean(1).sqrt()
        walked = sums.flip(-1) if descending else sums
        seen = walked / walked.cumsum(-1).clamp_min(1e-30)
        seen = seen.flip(-1) if descending else seen
        share = seen.mean(1).masked_fill((seen > self.variant.guard).any(1), 1.0)
        if self.variant.weight == "value":
            means = v.float().unflatten(0, (-1, K_BLOCK)).mean(1)
            far = (means - means.mean(0)).norm(dim=-1)
            share = share * far / far.mean()
        return share


def _estimate(q: torch.Tensor, k: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Mass of every tile [q_blocks, K_blocks] by mean query and mean key; the kept ones have 1."""
    mean_q, mean_k = (
        x.float().unflatten(0, (count, -1)).mean(1)
        for x, count in zip((q, k), kept.shape, strict=True)
    )
    scores = mean_q @ mean_k.T / math.sqrt(q.shape[-1])
    return (scores - scores.masked_fill(~kept, -math.inf).logsumexp(-1, keepdim=True)).exp()


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Processor(WanAttnProcessor):  # type: ignore[misc]
    """Wan's self-attention with `Study.attend` in the middle; WanPipeline alternates branches."""

    def __init__(self, study: Study | None, layer: int) -> None:
        super().__init__()
        self.study, self.layer, self.calls = study, layer, 0

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As WanAttnProcessor."""
        if rotary_emb is None:
            raise ValueError("the study is for self-attention, which has rotary embeddings")
        branch = ("cond", "uncond")[self.calls % 2]
        self.calls += 1
        q, k = queries_and_keys(attn, hidden_states, rotary_emb)
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        if self.study is None:
            out = _dense(q, k, v)
        else:
            out = self.study.attend(self.layer, branch, q, k, v)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))  # type: ignore[no-any-return]


def main(
    model: str = str(Path(__file__).parent / "wan-shapes"),
    prompts: Path = PROMPTS,
    height: int = 128,
    width: int = 128,
    frames: int = 8,
    steps: int = 20,
    guidance: float = 3.0,
    only: str = "",
    device: str = "cpu",
) -> None:
    """Print a line of JSON for every variant whose name holds ``only``."""
    pipe = WanPipeline.from_pretrained(model, dtype=torch.bfloat16).to(device)
    pipe.set_progress_bar_config(disable=True)
    lines = [line.strip() for line in prompts.read_text().splitlines()]
    asked = [line for line in lines if line and not line.startswith("#")]

    def videos(study: Study | None) -> list[Any]:
        for layer, block in enumerate(pipe.transformer.blocks):
            block.attn1.set_processor(Processor(study, layer))
        made = pipe(
            asked, height=height, width=width, num_frames=pipeline_num_frames(frames),
            num_inference_steps=steps, guidance_scale=guidance, max_sequence_length=32,
            output_type="np",
            generator=[torch.Generator().manual_seed(i) for i in range(len(asked))],
        ).frames  # fmt: skip
        return [to_8_bit(video) for video in made]

    dense = videos(None)
    for variant in VARIANTS:
        if only not in variant.name:
            continue
        study, begun = Study(variant), time.time()
        try:
            made = videos(study)
        except ValueError as error:
            print(json.dumps({"variant": variant.name, "left out": str(error)}), flush=True)
            continue
        ratios = [psnr(a, b) for a, b in zip(made, dense, strict=True)]
        row = {
            "variant": variant.name,
            "skipped": round(float(np.mean(study.skipped)), 3),
            "psnr_db": round(float(np.mean(ratios)), 2),
            "worst_db": round(min(ratios), 2),
            "seconds": round(time.time() - begun, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
