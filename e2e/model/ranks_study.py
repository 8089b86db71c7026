"""How evenly would several GPUs share the tiles that LiteAttention computes?

    python e2e/model/ranks_study.py --device cuda

Makes one video with the small model and notes the tiles that every head and q block keeps in every
step. From these counts it computes the efficiency of attention on several ranks: the mean over the
busiest, summed over layers, branches and steps, as all ranks wait for each other in every layer.
Times of tiles are taken to be equal, and the exchange to be free.

Ring: each rank has a part of the rows. Ulysses: each has some of the heads. The model has three
heads a layer, so layers of more heads are drawn from all of them with their histories, 200 times.
"In order" leaves heads where they are; "dealt" is what ``liteattention_rocm.lite.deal`` does after
1, 2, 4, 8 ... LiteAttention steps; "each step" would deal them in every step.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer

import liteattention_diffusers
from liteattention_e2e.config import load_config
from liteattention_e2e.runner import Runner
from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite import deal

#: (step, layer, branch) -> tiles kept, by head and q block.
Kept = dict[tuple[int, str, str], list[list[int]]]


def generate(size: int, frames: int, threshold: float, dense: int, device: str) -> tuple[Kept, Any]:
    """Make a video, with the tiles that the engine has by itself."""
    config = load_config(
        {
            "model": str(Path(__file__).parent / "wan-shapes"),
            "prompts": ("a red circle moves left on a blue background",),
            "height": size, "width": size, "frames": frames, "device": device,
        }
    )  # fmt: skip
    runner = Runner(config)
    policy = SkipPolicy(threshold=threshold, warmup_steps=dense)
    found: Kept = {}
    with liteattention_diffusers.enable(runner.pipeline, policy) as handle:

        def end(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            for layer in handle.layers:
                for branch in ("cond", "uncond"):
                    if step >= dense:
                        tiles = handle.kept_tiles(layer, branch)
                        found[step, layer, branch] = tiles[0].sum(-1).tolist()
            return {}

        runner.pipeline(**runner._arguments(runner.settings, 0, 0, end))
    return found, handle.statistics


def ring(kept: Kept, ranks: int) -> float:
    """Efficiency with the rows cut into as many parts as there are ranks."""
    most = even = 0.0
    for heads in kept.values():
        rows = torch.tensor(heads).sum(0)
        parts = [int(part.sum()) for part in rows.tensor_split(ranks)]
        most, even = most + max(parts), even + sum(parts) / ranks
    return even / most


def ulysses(histories: list[list[int]], heads: int, ranks: int, how: str) -> float:
    """Efficiency of layers of ``heads`` drawn from ``histories`` of tiles by step."""
    draw = random.Random(0)
    most = even = 0.0
    for _ in range(200):
        layer = [draw.choice(histories) for _ in range(heads)]
        order = deal.in_order(heads)
        for step, tiles in enumerate(zip(*layer, strict=True)):
            follows = step + 1  # the lists of this step were made by so many before
            if how == "each step" or (how == "dealt" and follows & (follows - 1) == 0):
                order = deal.by_tiles(tiles, ranks)
            most += deal.most(tiles, order, ranks)
            even += sum(tiles) / ranks
    return even / most


def main(
    size: Annotated[int, typer.Option(help="Pixels in height and width.")] = 128,
    frames: int = 8,
    threshold: Annotated[float, typer.Option(help="Log2 units.")] = -2.0,
    dense: Annotated[int, typer.Option(help="Dense steps at the beginning.")] = 4,
    device: str = "cpu",
) -> None:
    """Print both tables."""
    kept, statistics = generate(size, frames, threshold, dense, device)
    steps = sorted({step for step, _, _ in kept})
    by_head = {
        (layer, branch, head): [sum(kept[step, layer, branch][head]) for step in steps]
        for step, layer, branch in kept
        if step == steps[0]
        for head in range(len(kept[step, layer, branch]))
    }
    print(f"skipped {statistics.sparsity:.1%}, in the last step", end=" ")
    print(f"{statistics.by_step()[-1]['sparsity']:.1%}")
    last = [history[-1] for history in by_head.values()]
    whole = max(max(history) for history in by_head.values())
    shares = ", ".join(f"{tiles / whole:.2f}" for tiles in sorted(last))
    print(f"share of the most tiles that each head kept in the last step: {shares}")
    print("ring:", ", ".join(f"{n} ranks {ring(kept, n):.3f}" for n in (2, 4, 8)))
    print("| heads | ranks | in order | dealt | each step |")
    print("|---:|---:|---:|---:|---:|")
    for heads, ranks in ((12, 2), (12, 3), (12, 4), (12, 6), (40, 2), (40, 4), (40, 8)):
        cells = [
            f"{ulysses(list(by_head.values()), heads, ranks, how):.3f}"
            for how in ("in order", "dealt", "each step")
        ]
        print(f"| {heads} | {ranks} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
