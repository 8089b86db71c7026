"""Tensors as the bulk copy engine of Hopper GPUs takes them: boxes of rows of one head."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def hopper_reasons(*tensors: torch.Tensor) -> list[str]:
    """Say why the bulk copy engine cannot address tensors [., ., ., D]; none means it can."""
    for tensor in tensors:
        if tensor.data_ptr() % 16 or not _addressable(
            tensor.shape, tensor.stride(), tensor.element_size()
        ):
            return ["rows must start on multiples of 16 bytes and not be expanded"]
    return []


@functools.lru_cache(maxsize=256)
def _addressable(shape: torch.Size, steps: tuple[int, ...], size: int) -> bool:
    return all(
        extent == 1 or (step > 0 and step * size % 16 == 0)
        for extent, step in zip(shape[:3], steps[:3], strict=True)
    )


@functools.lru_cache(maxsize=256)
def box(
    shape: torch.Size,
    steps: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    rows: int,
    columns: int,
) -> dict[str, Any]:
    """Everything of a descriptor but its address, which takes 5 us to check.

    Of a tensor of ``layout``, in boxes of ``rows`` x ``columns`` of one head.
    """
    batch, length, heads, dim = shape
    step_b, step_s, step_h, _ = steps
    if layout == "bhsd":
        length, heads, step_s, step_h = heads, length, step_h, step_s
    # The stride of a dimension of one element is anything; the copy engine wants a multiple of 16.
    sizes = (batch, heads, length)
    fit = [s if n > 1 else 16 for n, s in zip(sizes, (step_b, step_h, step_s), strict=True)]
    base = torch.empty(8, dtype=dtype, device="cpu")
    made = TensorDescriptor(base, [*sizes, dim], [*fit, 1], [1, 1, rows, columns], _LAYOUT)
    return {**made.__dict__, "base": None}


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
