"""How the portable kernels are compiled for a request: a tuned tile, or that of the shipped table.

The shipped table was chosen on an NVIDIA H200 among warpgroups, keys of a block, stages, taking
turns and persistence. Tiles off a counter and of several heads in turn came later and were not
measured. On AMD's GPUs nothing was: there its plain tiles have fewer stages, so that they fit.
Nothing is tuned while a program runs, see :mod:`.tuning`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...contract import DenseRequest, LiteRequest, RaggedRequest
from . import tuning
from .launch import HopperTile, PlainTile

#: Rows of one warpgroup of the Hopper kernel, which drop a tile together under ``soft_skip``.
_HOPPER_VOTE_ROWS = 64

# Causal tiles differ in length: the hardware hands out workgroups as multiprocessors fall free.
_HOPPER = {
    (64, False): HopperTile(3, 128, 2, registers=160, loader_registers=32),
    (64, True): HopperTile(3, 128, 2, registers=160, loader_registers=32, persistent=False),
    (128, False): HopperTile(2, 128, 2, registers=232, loader_registers=40, turns=False),
    (128, True): HopperTile(
        2, 128, 2, registers=232, loader_registers=40, turns=False, persistent=False
    ),
}
_TWO_GROUPS = HopperTile(2, 128, 2, registers=232, loader_registers=40, turns=False)
#: LiteAttention steps, by head dim and rows of a q block. The 192 rows of a dense call at head dim
#: 64 are there for who asks for them: not timed yet.
_HOPPER_LITE = {
    (64, 128): _TWO_GROUPS,
    (64, 192): HopperTile(3, 128, 2, registers=160, loader_registers=32),
    (128, 128): _TWO_GROUPS,
}
#: Prompts, packed or paged, by columns of the tile.
PROMPTS = {
    64: HopperTile(3, 128, 2, registers=160, loader_registers=32, persistent=False),
    128: HopperTile(2, 128, 2, registers=232, loader_registers=40, turns=False, persistent=False),
    256: HopperTile(2, 64, 2, registers=232, loader_registers=40, turns=False, persistent=False),
}
_PLAIN = {
    64: PlainTile(block_m=128, block_n=64, warps=4, stages=3),
    128: PlainTile(block_m=128, block_n=64, warps=8, stages=3),
}
#: Local memory of a workgroup that every AMD GPU has, bytes.
_LDS = 64 << 10


def hopper(request: DenseRequest) -> HopperTile:
    """Tile of a dense request on sm_90."""
    found = tuning.tuned("hopper", request)
    if isinstance(found, HopperTile):
        return found
    return _HOPPER[request.head_dim, request.causal]


def shipped(kind: str, request: DenseRequest) -> HopperTile | PlainTile:
    """Tile of the shipped table for a dense request, of the "hopper" or the "plain" kernel."""
    if kind == "hopper":
        return _HOPPER[request.head_dim, request.causal]
    return _fitting(_PLAIN[request.head_dim], request)


def prompts(request: RaggedRequest, columns: int) -> HopperTile:
    """Tile of prompts on sm_90, of as many columns as heads are widened to."""
    found = tuning.tuned("prompts", request)
    return found if isinstance(found, HopperTile) else PROMPTS[columns]


def hopper_lite(request: LiteRequest) -> HopperTile | None:
    """Tile of a LiteAttention step on sm_90, or None if its geometry is not the kernel's."""
    asked = request.geometry
    own = _HOPPER_LITE.get((request.head_dim, asked.q_block))
    if own is None or asked.k_block != own.block_n:
        return None
    if request.soft_skip and asked.vote_rows != _HOPPER_VOTE_ROWS:
        return None
    return own


def plain(request: DenseRequest) -> PlainTile:
    """Tile of a dense request in plain Triton."""
    found = tuning.tuned("plain", request)
    if isinstance(found, PlainTile):
        return found
    return _fitting(_PLAIN[request.head_dim], request)


def plain_lite(request: LiteRequest) -> PlainTile:
    """Tile of a LiteAttention step in plain Triton: the geometry's own."""
    rows, keys = request.geometry.q_block, request.geometry.k_block
    warps = 4 if rows <= 64 else 8 if rows <= 128 else 16
    return _fitting(PlainTile(rows, keys, warps, stages=3 if keys <= 64 else 2), request)


def _fitting(tile: PlainTile, request: DenseRequest) -> PlainTile:
    """The tile; on an AMD GPU with two stages, or one where two would not fit into its LDS.

    Triton keeps 2 n - 1 blocks of keys or values there for n stages. The third stage would be 80 KB
    at D = 128, and adds instructions to the loop (``python -m liteattention_tools.amdgcn``). Warps
    are 8 at most: they have 64 lanes, and 16 of them take 96 KB for tiles of 192 x 128 at D = 64.
    """
    if torch.version.hip is None:
        return tile
    block = tile.block_n * request.head_dim * request.dtype.itemsize
    return replace(tile, warps=min(tile.warps, 8), stages=2 if 3 * block <= _LDS else 1)
