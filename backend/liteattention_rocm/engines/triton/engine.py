"""The portable engine: Triton kernels for every GPU that is not an MI300X.

On Hopper GPUs (sm_90) dense attention, LiteAttention and prompts run kernels written in Gluon,
Triton's lower layer, for the bulk copy engine and the asynchronous matrix units of that chip;
everywhere else, for tensors that the copy engine cannot address, and with Triton 3.5, the same
request runs a plain Triton kernel. Triton is imported when first asked about. With
``TRITON_INTERPRET=1`` set before that, the plain kernels run in Triton's interpreter and the engine
takes CPU tensors: slow, for tests.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135), warpgroups in
alternation (FlashAttention-3, arXiv 2407.08608), tiles skipped from step to step (LiteAttention,
arXiv 2511.11062), q blocks scheduled longest first (Graham 1969).
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ...contract import (
    Bound,
    Engine,
    LiteRequest,
    RaggedRequest,
    Request,
    TileGeometry,
    WriteRequest,
)
from ..environment import OLDEST_FP8, architecture, converts_fp8
from .versions import compiles_hopper, warn_of_plain_kernels, without_triton

#: Head dims of dense calls and of LiteAttention; those of packed and paged calls.
HEAD_DIMS = (64, 128)
RAGGED_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
#: Oldest NVIDIA compute capability with bf16 matrix products.
_OLDEST = 80
#: K blocks that an int16 entry of a walk can name.
_MAX_K_BLOCKS = 32767


class PortableEngine(Engine):
    """Every kind of call in Triton, on any GPU that Triton compiles for."""

    name = "portable"
    dtypes = (torch.bfloat16, torch.float16)
    cache_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    plans_from_bounds = True
    weighs = True
    tallies = True

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device``; see :meth:`Engine.unavailable`."""
        reasons = [without_triton()] if without_triton() else []
        found = architecture(device)
        if device.type == "cpu":
            if not _interpreted():
                reasons.append(
                    "it runs on GPU tensors (on CPU tensors with TRITON_INTERPRET=1, for tests)"
                )
        elif device.type != "cuda":
            reasons.append(f"it runs on GPU tensors, got {device}")
        elif not found:
            reasons.append("PyTorch sees no GPU")
        elif found.startswith("sm_") and int(found.removeprefix("sm_")) < _OLDEST:
            reasons.append(f"it needs compute capability {_OLDEST / 10:.1f} or newer, got {found}")
        return reasons

    def limits(self, request: Request) -> list[str]:
        """Return the sizes and tiles that its kernels do not take; see :meth:`Engine.limits`."""
        reasons = []
        ragged = isinstance(request, RaggedRequest | WriteRequest)
        head_dims = RAGGED_HEAD_DIMS if ragged else HEAD_DIMS
        if request.head_dim not in head_dims:
            *others, last = map(str, head_dims)
            listed = f"{', '.join(others)} or {last}"
            reasons.append(f"head dim must be {listed}, got {request.head_dim}")
        e4m3 = isinstance(request, RaggedRequest) and request.kv_dtype == torch.float8_e4m3fn
        if e4m3 and not converts_fp8(request.device):  # Triton reads e5m2 everywhere
            reasons.append(
                f"a cache of e4m3 needs compute capability {OLDEST_FP8 / 10:.1f} or newer, "
                f"got {architecture(request.device)}: use e5m2"
            )
        if isinstance(request, LiteRequest):
            reasons += _tile_reasons(request)
        return reasons

    def geometry(self, head_dim: int, rows: int | None = None) -> TileGeometry:
        """Return the tile that calls of so many rows have on the current GPU.

        128 x 128 on Hopper, at head dim 64 192 x 128 in large calls, see
        :func:`.tiles.rows_of_lists`; 128 x 64 elsewhere, as the plain kernel is faster with narrow
        K blocks.
        """
        if not (torch.cuda.is_available() and self._hopper(torch.device("cuda"))):
            return TileGeometry(q_block=128, k_block=64, vote_rows=64)
        tiles = _modules()[2]
        return TileGeometry(tiles.rows_of_lists(head_dim, rows), k_block=128, vote_rows=64)

    def bind(self, request: Request, like: Any) -> Bound:
        """Choose kernels and tiles; see :meth:`Engine.bind`.

        With threshold -inf, a full list and the engine's own geometry a LiteAttention step equals
        dense attention bit for bit; on Hopper, where levels overflowed, in q blocks of one height.
        """
        launch, ragged, tiles, boxes = _modules()
        if architecture(request.device) == "sm_90" and not compiles_hopper():
            warn_of_plain_kernels()
        bound: Bound
        with launch.on(request.device):
            if isinstance(request, WriteRequest):
                bound = ragged.Write(request, like)
            elif isinstance(request, RaggedRequest):
                bound = ragged.Attention(request, like)
            else:
                fits = self._hopper(request.device) and not boxes.hopper_reasons(*like[:4])
                if isinstance(request, LiteRequest):
                    if request.threshold == -math.inf:
                        request = replace(request, soft_skip=False)  # nothing is negligible
                    tile = tiles.hopper_lite(request) if fits else None
                    bound = launch.LiteStep(request, tile or tiles.plain_lite(request), like)
                else:
                    tile = tiles.hopper(request) if fits else tiles.plain(request)
                    bound = launch.Attention(request, tile, like)
        return bound

    @staticmethod
    def _hopper(device: torch.device) -> bool:
        return architecture(device) == "sm_90" and not _interpreted() and compiles_hopper()


def _tile_reasons(request: LiteRequest) -> list[str]:
    tile = request.geometry
    rows = tile.q_block // 3 if tile.q_block % 3 == 0 else tile.q_block
    # The plain kernel computes 256 rows for 192: at head dim 128 more than a workgroup can hold.
    most = 192 if request.head_dim == 64 else 128
    reasons = [
        f"{name} must be a power of two{more} from {low} to {high}, got {value}"
        for name, value, power, more, low, high in (
            ("q_block", tile.q_block, rows, " or three times one,", 16, most),
            ("k_block", tile.k_block, tile.k_block, "", 16, 128),
            ("vote_rows", tile.vote_rows, tile.vote_rows, "", 1, 128),
        )
        if power & (power - 1) or not low <= value <= high
    ]
    if isinstance(request.kv_len, int) and tile.k_blocks(request.kv_len) > _MAX_K_BLOCKS:
        reasons.append(
            f"at most {_MAX_K_BLOCKS} K blocks, got {tile.k_blocks(request.kv_len)}: use a larger "
            "k_block"
        )
    return reasons


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    """Import what needs Triton: (launch, ragged_launch, tiles, boxes)."""
    from . import boxes, launch, ragged_launch, tiles

    return launch, ragged_launch, tiles, boxes
