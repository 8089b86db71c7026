"""A video with Wan2.1 in diffusers, self-attention through LiteAttention.

    pip install '.[diffusers,bench]'    # in a checkout, beside the build of torch for your GPU
    python examples/wan_diffusers.py --prompt "a cat walks through snow" --out cat.mp4

Needs a GPU with room for the model: an MI300X, or an NVIDIA GPU. PyTorch calls both "cuda".
"""

import argparse
from pathlib import Path

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

from liteattention_diffusers import enable
from liteattention_rocm import SkipPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
parser.add_argument("--prompt", default="a cat walks through snow")
rule = parser.add_mutually_exclusive_group()
rule.add_argument("--budget", type=float, default=0.05, help="softmax mass a step may drop")
rule.add_argument("--threshold", type=float, help="instead, log2 units; lower skips less")
parser.add_argument("--warmup-steps", type=int, default=4, help="first steps that run dense")
parser.add_argument("--size", default="480x832x81", help="height x width x frames")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--device", default="cuda")
parser.add_argument("--out", default="video.mp4")
options = parser.parse_args()
height, width, frames = map(int, options.size.split("x"))
Path(options.out).parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it

pipe = WanPipeline.from_pretrained(options.model, dtype=torch.bfloat16).to(options.device)
if options.threshold is None:
    policy = SkipPolicy(budget=options.budget, warmup_steps=options.warmup_steps)
else:
    policy = SkipPolicy(threshold=options.threshold, warmup_steps=options.warmup_steps)
with enable(pipe, policy) as handle:  # refuses, with every reason, what the engine cannot run
    video = pipe(
        options.prompt,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=options.steps,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
export_to_video(video, options.out, fps=16)
print(f"{options.out}: {handle.statistics.sparsity:.0%} of the tiles of self-attention skipped")
