"""Test-only: what SGLang's Wan pipeline lacks on a CPU.

The diffusion runtime has a CPU platform, but three operators that Wan uses go to a CPU build of
SGLang's kernel library, which no registry has. They have plain PyTorch forms, which are taken
instead. A plugin, because that reaches the worker processes.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_LAYERS = "sglang.multimodal_gen.runtime.layers.layernorm."


def register() -> None:
    """Take the plain forms, unless there is a GPU."""
    if torch.cuda.is_available():
        return
    # Decorated functions of the runtime would be compiled for minutes each.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for name in ("_NormScaleShift", "_ScaleResidualNormScaleShift"):
        HookRegistry.register(f"{_LAYERS}{name}.forward_cpu", _native, HookType.REPLACE)
    HookRegistry.register(
        "sglang.kernels.ops.diffusion.fuse_scale_shift_kernel", _scale_shift, HookType.REPLACE
    )


def _native(layer: Any, *args: Any) -> Any:
    return layer.forward_native(*args)


def _scale_shift(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, scale_constant: float = 1.0
) -> torch.Tensor:
    from sglang.kernels.ops.diffusion.common.fallback_torch import fuse_scale_shift_kernel_native

    result: torch.Tensor = fuse_scale_shift_kernel_native(
        x, scale, shift, scale_constant=scale_constant
    )
    return result
