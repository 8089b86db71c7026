"""Use budgets by layer that were calibrated for a wanted quality, and see what they cost and save.

    liteattention-rocm calibrate --model MODEL --prompts prompts.txt --psnr 40,33 --out calibrated
    python examples/calibrated_policy.py --model MODEL --policies calibrated/policies.json

It makes one video dense and one per policy from the same noise, and prints how far they are apart.
"""

import argparse
import json

import numpy as np
import torch
from diffusers import WanPipeline

from liteattention_diffusers import enable
from liteattention_rocm import SkipPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
parser.add_argument("--policies", required=True, help="policies.json of calibrate")
parser.add_argument("--prompt", default="a cat walks through snow")
parser.add_argument("--size", default="480x832x81", help="height x width x frames")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
options = parser.parse_args()
height, width, frames = map(int, options.size.split("x"))

pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16).to(options.device)


def video(policy: SkipPolicy) -> tuple[np.ndarray, float]:
    """Frames between 0 and 1, and the share of tiles that were skipped."""
    with enable(pipe, policy) as handle:
        made = pipe(
            options.prompt,
            height=height,
            width=width,
            num_frames=frames,
            num_inference_steps=options.steps,
            generator=torch.Generator("cpu").manual_seed(0),
        ).frames[0]
        return np.asarray(made, dtype=np.float64), handle.statistics.sparsity


dense, _ = video(SkipPolicy(enabled=False))
with open(options.policies) as file:
    policies = {name: SkipPolicy(**fields) for name, fields in json.load(file).items()}
for name, policy in policies.items():
    sparse, skipped = video(policy)
    error = np.mean((sparse - dense) ** 2)
    apart = f"{-10 * np.log10(error):.1f} dB to dense" if error else "equal to dense"
    print(f"{name}: {skipped:.0%} of the tiles skipped, {apart}")
