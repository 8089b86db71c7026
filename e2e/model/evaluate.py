"""Measure how well a text-to-video model follows held-out prompts, from its pixels alone.

    python e2e/model/evaluate.py --model e2e/model/wan-shapes --height 128 --width 128 --frames 8

Runs diffusers' WanPipeline over prompts whose attribute combinations no training clip showed, reads
every clip with `liteattention_e2e.checker` and prints the share of prompts for which background,
colour, direction and shape are right (for two objects: both right).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

from liteattention_e2e.checker import ATTRIBUTES, compare, describe
from liteattention_e2e.clips import Scene, held_out_scenes
from liteattention_e2e.pixel_vae import pipeline_num_frames


def evaluate_pipeline(
    pipe: WanPipeline,
    scenes: list[Scene],
    *,
    height: int,
    width: int,
    frames: int,
    steps: int = 20,
    guidance: float = 3.0,
    batch: int = 8,
    seed: int = 0,
    max_sequence_length: int = 32,
    keep: list[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Generate one clip per scene and check it.

    Args:
        pipe: on its device, ready to call.
        scenes: what to ask for; clip i starts from noise seeded with seed + i on the CPU.
        height, width, frames: of the clips, pixels.
        steps, guidance, max_sequence_length: as WanPipeline's.
        batch: prompts generated together.
        keep: the clips are appended here, float [3, frames, height, width] in [-1, 1] on the CPU.

    Returns:
        "share" by attribute in [0, 1] over all prompts, the same for one and two objects, seconds
        of generation, tokens, and a record per prompt.
    """
    pipe.set_progress_bar_config(disable=True)
    records = []
    begun = time.time()
    for first in range(0, len(scenes), batch):
        part = scenes[first : first + batch]
        generators = [
            torch.Generator().manual_seed(seed + first + index) for index in range(len(part))
        ]
        clips = pipe(
            [scene.prompt for scene in part], height=height, width=width,
            num_frames=pipeline_num_frames(frames, pipe.vae.config.scale_factor_temporal),
            num_inference_steps=steps, guidance_scale=guidance, generator=generators,
            max_sequence_length=max_sequence_length, output_type="pt",
        ).frames  # fmt: skip
        for scene, clip in zip(part, clips, strict=True):
            video = clip.float().cpu().transpose(0, 1) * 2 - 1
            if keep is not None:
                keep.append(video)
            seen = describe(video)
            agreement = compare(seen, scene)
            records.append(
                {
                    "prompt": scene.prompt,
                    "objects": len(scene.objects),
                    **{name: getattr(agreement, name) for name in ATTRIBUTES},
                    "seen": f"{seen.background}: "
                    + ", ".join(f"{i.colour} {i.shape} {i.direction}" for i in seen.objects),
                }
            )

    def share(rows: list[dict[str, Any]]) -> dict[str, float]:
        return {
            name: round(sum(row[name] for row in rows) / len(rows), 4) if rows else float("nan")
            for name in ATTRIBUTES
        }

    return {
        "share": share(records),
        "one_object": share([row for row in records if row["objects"] == 1]),
        "two_objects": share([row for row in records if row["objects"] == 2]),
        "prompts": len(records),
        "seconds": round(time.time() - begun, 2),
        "height": height, "width": width, "frames": frames, "steps": steps, "guidance": guidance,
        "tokens": frames * (height // 4) * (width // 4),
        "records": records,
    }  # fmt: skip


def contact_sheet(videos: list[torch.Tensor], path: Path, columns: int = 2) -> None:
    """PNG with one clip per cell, its frames side by side; clips as `evaluate_pipeline` keeps."""
    from PIL import Image

    rows = []
    for video in videos:
        strip = ((video.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        strip = torch.nn.functional.pad(strip, (1, 1, 1, 1), value=90)
        rows.append(strip.permute(2, 1, 3, 0).flatten(1, 2))  # [H, F*W, 3]
    while len(rows) % columns:
        rows.append(torch.zeros_like(rows[0]))
    lines = [torch.cat(rows[i : i + columns], dim=1) for i in range(0, len(rows), columns)]
    Image.fromarray(torch.cat(lines).numpy()).save(path)


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name.")] = str(
        Path(__file__).parent / "wan-shapes"
    ),
    height: int = 128,
    width: int = 128,
    frames: int = 8,
    steps: int = 20,
    guidance: float = 3.0,
    prompts: Annotated[int, typer.Option(help="Held-out prompts, half with two objects.")] = 64,
    batch: int = 8,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    scheduler: Annotated[str, typer.Option(help="model (as saved), unipc or euler.")] = "model",
    shift: Annotated[float, typer.Option(help="Flow shift for unipc and euler.")] = 3.0,
    text_length: Annotated[int, typer.Option(help="max_sequence_length of the pipeline.")] = 32,
    json_out: Annotated[Path | None, typer.Option(help="Write the full report here.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a PNG of all clips here.")] = None,
    show_wrong: Annotated[bool, typer.Option(help="List the prompts that were missed.")] = True,
) -> None:
    """Evaluate a model folder on held-out prompts."""
    pipe = WanPipeline.from_pretrained(model, dtype=torch.bfloat16).to(device)
    if scheduler == "unipc":
        pipe.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
    elif scheduler == "euler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    elif scheduler != "model":
        raise typer.BadParameter(f"scheduler is {scheduler!r}: give model, unipc or euler")
    if device == "cpu":
        rope = pipe.transformer.rope  # float64 tables would make each rotation a float64 one
        rope.freqs_cos, rope.freqs_sin = rope.freqs_cos.float(), rope.freqs_sin.float()
    kept: list[torch.Tensor] = []
    report = evaluate_pipeline(
        pipe, held_out_scenes(prompts), height=height, width=width, frames=frames, steps=steps,
        guidance=guidance, batch=batch, seed=seed, max_sequence_length=text_length, keep=kept,
    )  # fmt: skip
    report.update(
        model=model, device=device, torch=torch.__version__, scheduler=scheduler, shift=shift
    )
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1) + "\n")
    if sheet is not None:
        contact_sheet(kept, sheet)
    if show_wrong:
        for row in report["records"]:
            if not all(row[name] for name in ATTRIBUTES):
                missed = [name for name in ATTRIBUTES if not row[name]]
                print(f"missed {','.join(missed)}: {row['prompt']} -> {row['seen']}")
    print(json.dumps({key: value for key, value in report.items() if key != "records"}))


if __name__ == "__main__":
    typer.run(main)
