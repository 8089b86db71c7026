"""The dense kernel of moonmath-ai/amd-kernels, built here by clang-19 and never committed.

``AMD_KERNELS`` names a checkout. Of its one source file the device code of the dense kernel is
taken as it is; only the launchers, which need HIP's host API, are left out.
"""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import torch

from liteattention_emulator import set_option
from liteattention_emulator.device import Module
from liteattention_emulator.recording import Recording

from .launch import on_a_page

VARIABLE = "AMD_KERNELS"
ROWS = 384
HERE = Path(__file__).parent
COMPILER = "clang++-19"
OPTIONS = (
    *("-x", "hip", "--offload-arch=gfx942", "--offload-device-only", "-nogpuinc", "-nogpulib"),
    *("--no-gpu-bundle-output", "-O3", "-std=c++20", "-ffast-math", "-fno-math-errno"),
    *("-mllvm", "-amdgpu-early-inline-all=true", "-fuse-cuid=none", "-mcode-object-version=5"),
)
#: The first line that is not the dense kernel's: host planners and the LiteAttention order.
PLANNERS = "// ─── Planners"
BUILT = """
template __global__ void attention_forward<true>(
    const bf16_t*, const bf16_t*, const bf16_t*, bf16_t*, int, int, float, int, const int16_t*,
    int16_t*, const int16_t*, float, int, float*, int, int, const int*);
template __global__ void v_transpose_kernel_16x16<true>(const bf16_t*, bf16_t*, int, int);
}
"""


def folder() -> Path | None:
    """Its csrc; None where the variable names no such checkout."""
    found = Path(os.environ.get(VARIABLE, "nowhere")) / "csrc"
    return found if (found / "attention_kernel.hip").is_file() else None


def build(source: Path, rounding: str, into: Path) -> Path:
    """Build the kernel of a rounding; raises CalledProcessError, FileNotFoundError (no clang)."""
    text = (source / "attention_kernel.hip").read_text()
    device, found, _ = text.partition(PLANNERS)
    if not found:
        raise ValueError(f"{source}: another version of attention_kernel.hip: no line {PLANNERS!r}")
    head = f"#define __HIPCC__ 1\n#define BF16_ROUND {rounding.upper()}\n"
    (into / f"{rounding}.hip").write_text(head + device + BUILT)
    out = into / f"{rounding}.co"
    command = [COMPILER, *OPTIONS, f"-I{HERE}", f"-I{source}", "-o", out, into / f"{rounding}.hip"]
    subprocess.run(command, check=True, capture_output=True)
    return out


def record(file: Path, keys: int) -> tuple[Recording, float]:
    """Record one workgroup over some keys; also its relative error against float64.

    The checks are off: this kernel's missing wait states are known.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        on_a_page(torch.randn(1, n, 1, 128, generator=g).bfloat16()) for n in (ROWS, keys, keys)
    )
    blocks = -(-keys // 64)
    out = torch.zeros_like(q)
    packed = on_a_page(torch.zeros(blocks * 64 * 128, dtype=torch.bfloat16))
    scale = 128**-0.5
    set_option("check", "off")
    try:
        with Module(file) as module:
            [pack] = [name for name in module.kernels if "transpose" in name]
            [forward] = [name for name in module.kernels if "forward" in name]
            module.launch(pack, [blocks], [256], [v, packed, keys, 1])
            arguments = [q, k, packed, out, ROWS, keys, scale * math.log2(math.e), 1]
            skipping = [None, None, None, 0.0, 0, None, 0, 0, None]
            report = module.launch(forward, [1], [512], [*arguments, *skipping], record=0)
    finally:
        set_option("check", "")
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    exact = torch.softmax(q @ k.T * scale, -1) @ v
    error = float((out[0, :, 0].double() - exact).norm() / exact.norm())
    assert report.recording is not None
    return report.recording, error
