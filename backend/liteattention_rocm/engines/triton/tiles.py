"""How the portable kernels are compiled for a request: a tuned tile, or that of the shipped table.

The shipped table was chosen on an NVIDIA H200 among warpgroups, stages, orders of work, taking
turns and late waits (``liteattention-rocm bench tune``). On AMD's GPUs nothing was measured: there
its plain tiles have fewer stages, so that they fit. Nothing is tuned while a program runs, see
:mod:`.tuning`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...contract import DenseRequest, LiteRequest, RaggedRequest
from . import launch, tuning
from .compiled_tiles import HopperTile, PlainTile

#: Rows of one warpgroup of the Hopper kernel, which drop a tile together under ``soft_skip``.
_HOPPER_VOTE_ROWS = 64

_TWO_GROUPS = HopperTile(2, 128, 2, registers=232, loader_registers=40, turns=False)
_THREE_GROUPS = HopperTile(3, 128, 2, registers=160, loader_registers=32)
#: Dense attention, by head dim and whether it is causal.
_HOPPER = {
    (64, False): _THREE_GROUPS,
    (64, True): replace(_THREE_GROUPS, stages=3, counted=True, abreast=True, late_wait=True),
    (128, False): replace(_TWO_GROUPS, late_wait=True),
    (128, True): replace(_TWO_GROUPS, counted=True, abreast=True, late_wait=True, late_exp=True),
}
#: The same in lower tiles, for calls whose last round of tall ones would leave the GPU half empty:
#: 1.12 to 1.14 times as long for as many rows.
_HOPPER_LOW = {
    (64, False): replace(_TWO_GROUPS, turns=True, late_wait=True),
    (64, True): replace(_TWO_GROUPS, turns=True, counted=True, abreast=True, late_wait=True),
}
_COST_OF_LOW = 1.13
#: LiteAttention steps, by head dim and rows of a q block.
_HOPPER_LITE = {
    (64, 128): replace(_TWO_GROUPS, turns=True, late_wait=True, late_exp=True),
    (64, 192): _THREE_GROUPS,
    (128, 128): replace(_TWO_GROUPS, late_wait=True),
}
#: Of three warpgroups where levels stay (:func:`.launch.levels_stay`): dense attention, which takes
#: 2.5 % less time so, lists that weigh, 1 %, and those that vote, 3 % (H200). Registers are freer
#: there.
_HOPPER_STAYING = {
    "dense": replace(_THREE_GROUPS, stages=3, late_wait=True, late_exp=True),
    "weighs": replace(_THREE_GROUPS, stages=3, late_wait=True),
    "votes": replace(_THREE_GROUPS, stages=3, late_wait=True, late_exp=True),
}
#: Prompts, packed or paged, by columns of the tile.
PROMPTS = {
    64: replace(_THREE_GROUPS, stages=3, counted=True, abreast=True),
    128: replace(_TWO_GROUPS, counted=True, abreast=True),
    256: replace(_TWO_GROUPS, block_n=64, counted=True, abreast=True),
}
#: The same in lower tiles, which most prompts of up to 512 rows take, and causal ones of up to 4k.
_LOW_PROMPTS = {64: replace(_TWO_GROUPS, stages=3, counted=True, abreast=True)}
#: What a row takes in them, relative to high ones; what starting and ending a tile takes, and in
#: causal attention each warpgroup but the first at the diagonal, in K blocks (H100).
_COST_OF_LOW_PROMPT, _PROMPT_START, _PROMPT_DIAGONAL = 1.06, 1.1, 0.75
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
    return _hopper(request)


def _hopper(request: DenseRequest) -> HopperTile:
    key = request.head_dim, request.causal
    tile, low = _HOPPER[key], _HOPPER_LOW.get(key)
    if low is not None and _COST_OF_LOW * _rows_in_turn(request, low) < _rows_in_turn(
        request, tile
    ):
        tile = low
    if tile is _THREE_GROUPS and launch.levels_stay(request, tile):
        tile = _HOPPER_STAYING["dense"]
    if not request.causal and launch.kv_bytes(request) > launch.CACHED:
        # What a head's tiles read does not stay in the L2 cache: the hardware's order, 2 % faster.
        tile = replace(tile, persistent=False)
    return tile


def _rows_in_turn(request: DenseRequest, tile: HopperTile) -> int:
    """Query rows that a multiprocessor computes at most."""
    tiles = request.batch * request.q_heads * -(-request.q_len // tile.block_m)
    return -(-tiles // _units(request.device)) * tile.block_m


def _units(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of the H200 for requests on no GPU."""
    if device.type == "cpu":
        return launch.MULTIPROCESSORS
    return launch.multiprocessors(
        torch.cuda.current_device() if device.index is None else device.index
    )


def shipped(kind: str, request: DenseRequest) -> HopperTile | PlainTile:
    """Tile of the shipped table for a dense request, of the "hopper" or the "plain" kernel."""
    if kind == "hopper":
        return _hopper(request)
    return _fitting(_PLAIN[request.head_dim], request)


def prompts(request: RaggedRequest, columns: int) -> HopperTile:
    """Tile of prompts on sm_90, of as many columns as heads are widened to."""
    found = tuning.tuned("prompts", request)
    return found if isinstance(found, HopperTile) else shipped_prompts(request, columns)


def shipped_prompts(request: RaggedRequest, columns: int) -> HopperTile:
    """Tile of the shipped table for prompts: a low one where that is modelled to take less time.

    At head dim 64 that is 0.58 to 0.96 of the time with prompts of up to 512 rows and causal ones
    of up to 4,096 (H100); the model is within 4 % of what was measured where they are close.
    """
    tile = PROMPTS[columns]
    low = _LOW_PROMPTS.get(columns, tile)
    if _COST_OF_LOW_PROMPT * _longest_turn(low, request) < _longest_turn(tile, request):
        tile = low
    # With keys that come in whole blocks late waits bring 3 %, with small pages nothing.
    late = tile.groups == 2 and columns <= 128 and request.page_size % tile.block_n == 0
    return replace(tile, late_wait=late)


def none_below(request: RaggedRequest, rows: int) -> bool:
    """Whether every request has so many rows, if none of the call's is padding."""
    longest = min(request.max_q_len, request.rows)
    return request.rows - (request.requests - 1) * longest >= rows


def _longest_turn(tile: HopperTile, request: RaggedRequest) -> float:
    """Rows times K blocks that the busiest multiprocessor computes, by a model.

    Prompts are as long as allowed, or their last tile is half full on average. Tiles go to the
    first free multiprocessor, those that see most first, so one of them has k + 1 of the first k
    rounds' tiles and the next one.
    """
    longest = min(request.max_q_len, request.rows)
    equal = none_below(request, longest)
    causal = request.lookahead is not None
    if equal:
        count = float(-(-longest // tile.block_m) * request.requests)
    else:
        count = request.rows / tile.block_m + request.requests / 2
    rounds = count * request.q_heads / _units(request.device)
    start = _PROMPT_START + causal * _PROMPT_DIAGONAL * (tile.groups - 1)
    keys = request.max_kv_len
    if request.window:
        keys = min(keys, request.window + tile.block_m)
    hidden = max(min(longest, keys) - tile.block_m, 0) if causal else 0

    def blocks(share: float) -> float:
        """K blocks of a tile that this share of all tiles sees more keys than."""
        return max((keys - hidden * share) / tile.block_n, 1) + start

    turns = [blocks(0), rounds * blocks(0.5)]
    if equal:
        turns += [(k + 1) * blocks(k / rounds) for k in range(math.ceil(rounds))]
    return max(turns) * tile.block_m


def rows_of_lists(head_dim: int, rows: int | None) -> int:
    """Rows of the q blocks that lists are kept for by default, in calls of ``rows`` or of many.

    Those of large dense calls, 192 at head dim 64. In small grids it is 128 there, too: three
    warpgroups lack the registers to cut lists, and the longest one bounds the time. Nobody says how
    many keys there will be, so calls that are too short to be cut have these rows as well.
    """
    low = _TWO_GROUPS.block_m
    if head_dim != 64 or (rows is not None and rows <= low * launch.MOST_CUT):
        return low
    return _HOPPER_LITE[64, 192].block_m


def hopper_lite(request: LiteRequest) -> HopperTile | None:
    """Tile of a LiteAttention step on sm_90, or None if its geometry is not the kernel's."""
    asked = request.geometry
    own = _HOPPER_LITE.get((request.head_dim, asked.q_block))
    if own is None or asked.k_block != own.block_n:
        return None
    if request.soft_skip and asked.vote_rows != _HOPPER_VOTE_ROWS:
        return None
    if own is _THREE_GROUPS and launch.levels_stay(request, own):
        own = _HOPPER_STAYING["weighs" if request.budget > 0 else "votes"]
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
