"""How the portable kernels are compiled for a request: a tuned tile, or that of the shipped table.

The shipped table was chosen on an NVIDIA H200 among warpgroups, keys of a block, stages, taking
turns and persistence. Nothing is tuned while a program runs, see :mod:`.tuning`.
"""

from __future__ import annotations

from ...contract import DenseRequest, LiteRequest
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
_HOPPER_LITE = HopperTile(2, 128, 2, registers=232, loader_registers=40, turns=False)
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


def hopper(request: DenseRequest) -> HopperTile:
    """Tile of a dense request on sm_90."""
    found = tuning.tuned("hopper", request)
    if isinstance(found, HopperTile):
        return found
    return _HOPPER[request.head_dim, request.causal]


def shipped(kind: str, request: DenseRequest) -> HopperTile | PlainTile:
    """Tile of the shipped table for a dense request, of the "hopper" or the "plain" kernel."""
    return (
        _HOPPER[request.head_dim, request.causal] if kind == "hopper" else _PLAIN[request.head_dim]
    )


def hopper_lite(request: LiteRequest) -> HopperTile | None:
    """Tile of a LiteAttention step on sm_90, or None if its geometry is not the kernel's."""
    asked, own = request.geometry, _HOPPER_LITE
    if (asked.q_block, asked.k_block) != (own.block_m, own.block_n):
        return None
    if request.soft_skip and asked.vote_rows != _HOPPER_VOTE_ROWS:
        return None
    return own


def plain(request: DenseRequest) -> PlainTile:
    """Tile of a dense request in plain Triton."""
    found = tuning.tuned("plain", request)
    if isinstance(found, PlainTile):
        return found
    return _PLAIN[request.head_dim]


def plain_lite(request: LiteRequest) -> PlainTile:
    """Tile of a LiteAttention step in plain Triton: the geometry's own."""
    keys = request.geometry.k_block
    warps = 4 if request.geometry.q_block < 128 else 8
    return PlainTile(request.geometry.q_block, keys, warps, stages=3 if keys <= 64 else 2)
