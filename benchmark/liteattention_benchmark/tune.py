"""``liteattention-rocm bench tune``: measure the portable engine's tiles on this GPU.

Peers that are there are timed in the same turns: cuDNN and FA3 beside dense calls, FA3 beside
prompts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from liteattention_rocm.contract import DenseRequest, DenseTensors, RaggedRequest, RaggedTensors
from liteattention_rocm.engines import architecture
from liteattention_rocm.engines.triton import launch, ragged_cut, ragged_launch, tiles, tuning
from liteattention_rocm.engines.triton.compiled_tiles import HopperTile
from liteattention_rocm.engines.triton.engine import RAGGED_HEAD_DIMS
from liteattention_rocm.engines.triton.tuning import Tile
from liteattention_rocm.engines.triton.versions import compiles_hopper

from . import peers
from .cells import DTYPES, Prefill
from .peers import Call, Unavailable
from .timing import flush_buffer, milliseconds

#: Largest relative difference between the results of two tiles; bf16 rounds to 4e-3.
_TOLERANCE = 1e-2


def run(
    shape: tuple[int, int, int, int],
    causal: bool,
    dtype: torch.dtype,
    rounds: int = 9,
    progress: Callable[[str], None] = lambda _: None,
    fa3_library: Path | None = None,
) -> tuple[Tile, dict[Tile | str, float]]:
    """Measure all tiles for self-attention of (B, H, S, D) and store the fastest.

    ``fa3_library``: as of :func:`.kernels.run`.

    Returns:
        The shipped tile and the median milliseconds of all that ran, peers by name, fastest first.

    Raises:
        RuntimeError: there is no GPU, or no tile runs on it.
    """
    device = _device()
    batch, heads, length, dim = shape
    request = DenseRequest(
        batch, heads, heads, length, length, dim, dtype, device, "bhsd", 1 / math.sqrt(dim),
        causal, "rtne", False,
    )  # fmt: skip
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    kind = "hopper" if architecture(device) == "sm_90" and compiles_hopper() else "plain"

    def make(tile: Tile) -> tuple[Callable[[], None], torch.Tensor]:
        out = torch.empty_like(q)
        tensors = DenseTensors(q, k, v, out, None)
        return functools.partial(launch.Attention(request, tile, tensors), tensors), out

    others: dict[str, Call] = {}
    for name, maker in peers.self_attention_peers(device, fa3_library, {}, lite=True).items():
        try:
            others[name] = maker(q, k, v, causal)
        except Unavailable as error:
            progress(f"{name}: {error}")
    return _tune(kind, request, tiles.shipped(kind, request), make, others, rounds, progress)


def problems(cell: Prefill) -> list[str]:
    """Say why prompts would not run the kernel whose tiles are chosen; none means they do.

    Another kernel would run them whatever the tile, and the fastest would be one by chance.
    """
    shortest, piece = ragged_cut.SHORTEST_PROMPT, ragged_launch.LEAST_PIECE
    reasons = []
    if cell.rows < shortest:
        reasons.append(f"rows must be at least {shortest}, got {cell.rows}")
    few = ragged_cut.few_keys(cell.head_dim)
    if cell.context <= few:
        reasons.append(f"keys must be more than {few} at D = {cell.head_dim}, got {cell.context}")
    if cell.page_size % piece:
        reasons.append(f"page size must be a multiple of {piece}, got {cell.page_size}")
    if cell.head_dim not in RAGGED_HEAD_DIMS:
        listed = ", ".join(map(str, RAGGED_HEAD_DIMS))
        reasons.append(f"D must be one of {listed}, got {cell.head_dim}")
    if cell.q_heads % cell.kv_heads:
        reasons.append(
            f"query heads must be a multiple of key heads, got {cell.q_heads} and {cell.kv_heads}"
        )
    return reasons


def run_prompts(
    cell: Prefill,
    rounds: int = 9,
    progress: Callable[[str], None] = lambda _: None,
    fa3_library: Path | None = None,
) -> tuple[Tile, dict[Tile | str, float]]:
    """Measure all tiles for the prompts of ``cell``, causal; as :func:`run` does.

    ``cell``: one that has no :func:`problems`.

    Raises:
        RuntimeError: there is no Hopper GPU.
    """
    device = _device()
    if architecture(device) != "sm_90" or not compiles_hopper():
        raise RuntimeError(
            "only on Hopper GPUs (sm_90) with Triton 3.6 or newer prompts have a kernel with tiles "
            "to choose"
        )
    dtype, page = DTYPES[cell.dtype], cell.page_size or cell.context
    pages = -(-cell.context // page)
    shape = (cell.requests * pages, page, cell.kv_heads, cell.head_dim)
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    rows = cell.requests * cell.rows
    q = torch.randn(rows, cell.q_heads, cell.head_dim, device=device).to(dtype)
    starts, k_starts = (
        torch.arange(cell.requests + 1, device=device, dtype=torch.int32) * n
        for n in (cell.rows, cell.context)
    )
    keys = torch.full((cell.requests,), cell.context, device=device, dtype=torch.int32)
    table: torch.Tensor | None = torch.randperm(len(k), device=device).int().view(-1, pages)
    given: tuple[Any, ...] = (k, v, starts, None, cell.rows, cell.context, keys, table)
    if not cell.page_size:
        k, v, table, keys = k.flatten(0, 1), v.flatten(0, 1), None, k_starts
        given = (k, v, starts, k_starts, cell.rows, cell.context, None, None)
    request = RaggedRequest(
        requests=cell.requests, rows=rows, q_heads=cell.q_heads, kv_heads=cell.kv_heads,
        head_dim=cell.head_dim, dtype=dtype, kv_dtype=dtype, device=device,
        page_size=cell.page_size, max_q_len=cell.rows, max_kv_len=cell.context,
        scale=1 / math.sqrt(cell.head_dim), lookahead=0, window=0, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip

    def make(tile: Tile) -> tuple[Callable[[], None], torch.Tensor]:
        assert isinstance(tile, HopperTile)
        out = torch.empty_like(q)
        tensors = RaggedTensors(q, k, v, out, None, None, starts, keys, table)
        return functools.partial(ragged_launch.Attention(request, tensors, tile), tensors), out

    others: dict[str, Call] = {}
    try:
        if fa3_library is not None:
            forward = peers.fa3_forward(fa3_library)
            others["FA3"] = lambda: forward(q, *given, True)
    except Unavailable as error:
        progress(f"FA3: {error}")
    shipped = tiles.shipped_prompts(request, ragged_cut.columns_of(cell.head_dim))
    return _tune("prompts", request, shipped, make, others, rounds, progress)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError("tiles are measured on a GPU, and PyTorch sees none")
    return torch.device("cuda", torch.cuda.current_device())


def _tune(
    kind: str,
    request: DenseRequest | RaggedRequest,
    shipped: Tile,
    make: Callable[[Tile], tuple[Callable[[], None], torch.Tensor]],
    others: Mapping[str, Call],
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[Tile, dict[Tile | str, float]]:
    """Time ``others`` and the calls that ``make`` gives for tiles, with where their results go."""
    flush = flush_buffer(request.device)
    calls: dict[Tile, tuple[Callable[[], None], torch.Tensor]] = {}
    expected: torch.Tensor | None = None

    def measure(tile: Tile) -> float:
        nonlocal expected
        progress(str(tile))
        if tile not in calls:
            calls[tile] = make(tile)
        call, out = calls[tile]
        try:
            taken = milliseconds(call, request.device, flush)
        except (CompilationError, OutOfResources, PTXASError) as error:
            raise RuntimeError(" ".join(str(error).split())[:200]) from error
        if expected is None:
            expected = out.float()
        difference = (out.float() - expected).norm() / expected.norm()
        if not difference < _TOLERANCE:
            raise RuntimeError(f"{tile} gives another result (by {float(difference):.1e})")
        return taken

    measure(shipped)
    beside = {}
    for name, call in others.items():
        try:
            call()
            beside[name] = functools.partial(milliseconds, call, request.device, flush)
        except (RuntimeError, Unavailable) as error:
            progress(f"{name}: {error}")
    return shipped, tuning.tune(kind, request, measure, rounds=rounds, beside=beside)
