"""One video of diffusers' Wan pipeline with LiteAttention, for comparison with SGLang's.

    PYTHON tests/serving/diffusers_reference.py OUT.npz '{"policies": [...], "height": 48, ...}'

Runs in an environment with ``liteattention-rocm[diffusers]``. For every policy (null: the
pipeline's own attention) it writes ``frames<i>`` uint8 [F, H, W, 3], ``records<i>`` as JSON, and
``lists<i>/LAYER/BRANCH`` int32 [B, H, q_blocks, words].
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / name) for name in ("backend", "integration", "e2e")]


def main(target: str, text: str) -> None:
    from diffusers import WanPipeline

    import liteattention_e2e.pixel_vae as pixel_vae
    from liteattention_diffusers import enable
    from liteattention_rocm import SkipPolicy

    asked = json.loads(text)
    pipe = WanPipeline.from_pretrained(
        REPOSITORY / "e2e" / "model" / "wan-shapes", dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    made: dict[str, Any] = {}
    for index, policy in enumerate(asked["policies"]):
        with contextlib.ExitStack() as stack:
            handle = None
            if policy is not None:
                handle = stack.enter_context(enable(pipe, SkipPolicy(**policy)))
            video = pipe(
                asked["prompt"],
                negative_prompt="",
                height=asked["height"],
                width=asked["width"],
                num_frames=pixel_vae.pipeline_num_frames(asked["num_frames"]),
                num_inference_steps=asked["num_inference_steps"],
                guidance_scale=3.0,
                max_sequence_length=32,
                generator=torch.Generator("cpu").manual_seed(asked["seed"]),
                output_type="np",
            ).frames[0]
            made[f"frames{index}"] = (np.asarray(video) * 255).round().astype(np.uint8)
            if handle is None:
                continue
            records = handle.statistics.to_records()
            made[f"records{index}"] = np.array(json.dumps(records))
            for layer in handle.layers:
                for branch in ("cond", "uncond"):
                    made[f"lists{index}/{layer}/{branch}"] = handle.lite.lists(
                        layer, branch, handle.run
                    ).numpy()
    np.savez(target, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
