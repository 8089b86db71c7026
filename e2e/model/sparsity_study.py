"""How many attention tiles of a model could be skipped? A study in plain PyTorch, without a kernel.

    python e2e/model/sparsity_study.py --model e2e/model/wan-shapes --device cuda

Runs the pipeline with exact attention and looks at the scores of every self-attention call. A tile
(q block x K block) counts as droppable if for every row of the q block the largest score in it lies
at least -threshold (log2 units) below the row's maximum over the K blocks walked before. The lists
shrink as LiteAttention's do: a tile dropped at one step stays dropped, and the walking direction
alternates with the step. Because the output stays exact here, the numbers say what a model's
attention allows, not what an engine's error does to the next step.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from diffusers import WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from liteattention_e2e.clips import held_out_scenes
from liteattention_e2e.pixel_vae import pipeline_num_frames


class TileStudy:
    """Counts droppable tiles of all self-attention calls of one generation.

    Key: (layer, branch, geometry, threshold); owner: `main`; lifetime: one pipeline call.
    """

    def __init__(self, geometries: list[tuple[int, int]], thresholds: list[float]) -> None:
        self.geometries, self.thresholds = geometries, thresholds
        self.kept: dict[tuple[Any, ...], torch.Tensor] = {}
        self.calls: dict[tuple[int, str], int] = {}
        # (geometry, threshold) -> layer -> share of skipped tiles per step, both branches
        self.shares: dict[tuple[Any, ...], dict[int, list[float]]] = {}

    def look(self, layer: int, branch: str, q: torch.Tensor, k: torch.Tensor) -> None:
        """q, k: [B, S, H, D] after the rotary embedding; counts one call."""
        step = self.calls.get((layer, branch), 0)
        self.calls[layer, branch] = step + 1
        scale = math.log2(math.e) / math.sqrt(q.shape[-1])
        q, k = q.transpose(1, 2) * scale, k.transpose(1, 2)
        for geometry in self.geometries:
            rows, columns = geometry
            drops: dict[float, list[torch.Tensor]] = {t: [] for t in self.thresholds}
            for start in range(0, q.shape[2], rows):
                score = (q[:, :, start : start + rows] @ k.transpose(2, 3)).float()
                pad = -score.shape[-1] % columns
                score = torch.nn.functional.pad(score, (0, pad), value=-math.inf)
                peak = score.unflatten(-1, (-1, columns)).amax(-1)  # [B, H, rows, K blocks]
                walked = peak.flip(-1) if step % 2 else peak
                before = torch.nn.functional.pad(
                    walked.cummax(-1).values[..., :-1], (1, 0), value=-math.inf
                )
                above = (walked - before).amax(2)  # first tile: +inf
                above = above.flip(-1) if step % 2 else above
                for threshold in self.thresholds:
                    drops[threshold].append(above <= threshold)
            for threshold in self.thresholds:
                keep = ~torch.stack(drops[threshold], dim=2)
                key = (geometry, threshold)
                state = (layer, branch, *key)
                if state in self.kept:
                    keep &= self.kept[state]
                self.kept[state] = keep
                by_layer = self.shares.setdefault(key, {})
                by_layer.setdefault(layer, []).append(1.0 - float(keep.float().mean()))


def queries_and_keys(
    attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K of a self-attention layer of Wan, [B, S, H, D], with the rotary embedding."""
    cos, sin = (table[..., ::2].to(hidden_states.device, torch.float32) for table in rotary_emb)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        even, odd = x.unflatten(2, (attn.heads, -1)).float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).type_as(x)

    return rotate(attn.norm_q(attn.to_q(hidden_states))), rotate(
        attn.norm_k(attn.to_k(hidden_states))
    )


class StudyProcessor(WanAttnProcessor):  # type: ignore[misc]
    """Computes attention as before and shows q and k to a `TileStudy` on the way."""

    def __init__(self, study: TileStudy, layer: int) -> None:
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
        """As WanAttnProcessor; WanPipeline calls cond and uncond in turn."""
        if rotary_emb is None:
            raise ValueError("the study is for self-attention, which has rotary embeddings")
        branch = ("cond", "uncond")[self.calls % 2]
        self.calls += 1
        self.study.look(self.layer, branch, *queries_and_keys(attn, hidden_states, rotary_emb))
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
        )


def main(
    model: str = str(Path(__file__).parent / "wan-shapes"),
    height: int = 128,
    width: int = 128,
    frames: int = 8,
    steps: int = 20,
    guidance: float = 3.0,
    prompts: int = 4,
    device: str = "cpu",
    json_out: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Print the share of droppable tiles, mean over steps and at the last step, by threshold."""
    pipe = WanPipeline.from_pretrained(model, dtype=torch.bfloat16).to(device)
    pipe.set_progress_bar_config(disable=True)
    study = TileStudy([(128, 64), (256, 64)], [-8.0, -6.0, -4.0, -3.0, -2.0])
    for layer, block in enumerate(pipe.transformer.blocks):
        block.attn1.set_processor(StudyProcessor(study, layer))
    scenes = held_out_scenes(prompts)
    pipe(
        [scene.prompt for scene in scenes], height=height, width=width,
        num_frames=pipeline_num_frames(frames), num_inference_steps=steps,
        guidance_scale=guidance, max_sequence_length=32, output_type="latent",
        generator=[torch.Generator().manual_seed(i) for i in range(prompts)],
    )  # fmt: skip
    table = []
    for (geometry, threshold), by_layer in study.shares.items():
        means = {layer: sum(values) / len(values) for layer, values in by_layer.items()}
        last = [sum(values[-2:]) / 2 for values in by_layer.values()]
        table.append(
            {
                "tile": f"{geometry[0]}x{geometry[1]}",
                "threshold": threshold,
                "sparsity": round(sum(means.values()) / len(means), 4),
                "last_step": round(sum(last) / len(last), 4),
                "by_layer": [round(means[layer], 3) for layer in sorted(means)],
            }
        )
        print(json.dumps(table[-1]))
    if json_out is not None:
        json_out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
