"""``liteattention-rocm bench tune``: measure the portable engine's tiles on this GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from liteattention_rocm.contract import DenseRequest, DenseTensors
from liteattention_rocm.engines import architecture
from liteattention_rocm.engines.triton import launch, tiles, tuning
from liteattention_rocm.engines.triton.tuning import Tile

from .timing import flush_buffer, milliseconds

#: Largest relative difference between the results of two tiles; bf16 rounds to 4e-3.
_TOLERANCE = 1e-2


def run(
    shape: tuple[int, int, int, int],
    causal: bool,
    dtype: torch.dtype,
    rounds: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Tile, dict[Tile, float]]:
    """Measure all tiles for self-attention of (B, H, S, D) and store the fastest.

    Returns:
        The shipped tile and the median milliseconds of all that ran, fastest first.

    Raises:
        RuntimeError: there is no GPU, or no tile runs on it.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tiles are measured on a GPU, and PyTorch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    batch, heads, length, dim = shape
    request = DenseRequest(
        batch, heads, heads, length, length, dim, dtype, device, "bhsd", 1 / math.sqrt(dim),
        causal, "rtne", False,
    )  # fmt: skip
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    kind = "hopper" if architecture(device) == "sm_90" else "plain"
    shipped = tiles.shipped(kind, request)
    flush = flush_buffer(device)
    expected: torch.Tensor | None = None

    def measure(tile: Tile) -> float:
        nonlocal expected
        progress(str(tile))
        out = torch.empty_like(q)
        tensors = DenseTensors(q, k, v, out, None)
        bound = launch.Attention(request, tile, tensors)

        def call() -> torch.Tensor:
            bound(tensors)
            return out

        try:
            taken = milliseconds(call, device, flush)
        except (CompilationError, OutOfResources, PTXASError) as error:
            raise RuntimeError(" ".join(str(error).split())[:200]) from error
        if expected is None:
            expected = out.float()
        difference = (out.float() - expected).norm() / expected.norm()
        if not difference < _TOLERANCE:
            raise RuntimeError(f"{tile} gives another result (by {float(difference):.1e})")
        return taken

    measure(shipped)
    return shipped, tuning.tune(kind, request, measure, rounds=rounds)
