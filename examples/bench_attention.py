"""One call of attention on your device: PyTorch's, our dense kernel, and LiteAttention.

    python examples/bench_attention.py --shape 1,8192,12,128

Tensors are random patches of tokens alike, as in a video: see which share of tiles is skipped, and
what that saves here. `liteattention-rocm bench kernels` compares with more kernels.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from liteattention_rocm import LiteAttention, SkipPolicy, attention

parser = argparse.ArgumentParser()
parser.add_argument("--shape", default="1,8192,12,128", help="batch, tokens, heads, head dim")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement, at least")
options = parser.parse_args()
batch, tokens, heads, head_dim = map(int, options.shape.split(","))

torch.manual_seed(0)
patches = torch.randn(batch, -(-tokens // 128), heads, head_dim)
patches = patches.repeat_interleave(128, dim=1)[:, :tokens]
q, k, v = (
    (patches + 0.3 * torch.randn_like(patches)).to(options.device, torch.bfloat16) for _ in range(3)
)
lite = LiteAttention(SkipPolicy())  # a budget of 0.05 after four dense steps
for step in range(7):  # the next ones find out what may be skipped
    lite(q, k, v, step=step, layer="one")


def sdpa() -> torch.Tensor:
    """PyTorch's attention, which wants heads before tokens."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))


def sparse() -> torch.Tensor:
    """One more step of LiteAttention."""
    global step
    step += 1
    return lite(q, k, v, step=step, layer="one")


calls = {"torch": sdpa, "ours, dense": lambda: attention(q, k, v), "LiteAttention": sparse}
for name, call in calls.items():
    run = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    print(f"{name:13} {run.blocked_autorange(min_run_time=options.seconds).median * 1e3:9.3f} ms")
print(f"{lite.statistics.sparsity:.0%} of the tiles skipped")
