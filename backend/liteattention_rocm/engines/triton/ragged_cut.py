"""How ragged calls are cut: tiles, parts along the keys, and which launch has which requests.

All of it is chosen from the bounds of a call, so that a graph's replays may bring other lengths.
Times beside the choices are of the GPUs named there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ...contract import RaggedRequest
from . import hopper_ragged_load, tiles
from .compiled_tiles import HopperTile
from .launch import multiprocessors
from .versions import registers_grow

#: Rows from which on a request is a prompt, which on Hopper has a kernel of its own.
SHORTEST_PROMPT = 64
#: Rows up to which a request beside longer ones is computed as in decoding steps: one token, or a
#: few drafts. Fewer where so many rows and heads were more than the highest tile.
_SHORT_ROWS = 8
#: Keys from which on that is worth two more launches.
_SHORT_KEYS = 1024
#: Smallest and largest height of a matrix product's tile.
_MIN_M, _MAX_M = 16, 128
#: Fewest keys of a block in decoding steps.
_DECODE_KEYS = 64
#: Columns from which on a tile takes fewer keys at a time, so that two stages of them fit.
_WIDE = 256
#: Programs of the decoding tile that a multiprocessor of an H200 holds at once, by bytes of a
#: number in the cache and columns, for each choice of keys and warps: two warps read long parts
#: fastest, and of four more fit or they start faster. A block of 128 fp8 keys has the bytes of 64
#: bf16 ones.
_RESIDENT = {
    2: {64: {(64, 2): 8, (64, 4): 7}, 128: {(64, 2): 4, (64, 4): 5}, 256: {(64, 4): 2}},
    1: {64: {(64, 2): 8}, 128: {(64, 2): 6, (128, 2): 4}, 256: {(64, 4): 3, (128, 4): 2}},
}
#: Fewer that it holds where nothing is split: ptxas takes 104 registers there and 96 elsewhere, but
#: as many elsewhere, too, where :func:`.versions.registers_grow`.
_FEWER_WHOLE = {(2, 128): {(64, 4): 1}}
_STAGES = {2: 3, 4: 2}
#: Blocks of a part from which on what reads fastest is chosen, not what starts fastest.
_LONG_PART = 4
#: Most parts of a request; up to how many of them the last wave of programs is worth a thought.
_MAX_SPLITS, _FEW_SPLITS = 128, 8
#: What one more part costs, as a share of the time.
_COST_OF_A_PART = 0.025
#: Of higher tiles: programs per multiprocessor before keys are cut, fewest K blocks of a part.
_PROGRAMS_PER_UNIT, _PART_BLOCKS = 6, 4
#: Parts of a tile of prompts: fewest K blocks, most parts. What starting and ending a program, one
#: that exits at once, and the merge take, in K blocks; and for how many bytes of parts, which are
#: written and read, HBM takes as long as 128 columns of a K block do (H100).
PROMPT_PART_BLOCKS, _MOST_PROMPT_PARTS = 4, 32
_PROMPT_START, _PROMPT_EXIT, _PROMPT_MERGE, _PROMPT_BLOCK_BYTES = 2.0, 1.0, 4.0, 3.9e6


class Cut(NamedTuple):
    """How a step is cut: see :func:`liteattention_rocm.engines.triton.ragged.attention`.

    ``splits``: most parts of a request; the device makes fewer where its keys are fewer.
    ``slots``: rows of a request at most, of which longer ones are another launch's, so that each
    has as many tiles; 0: tiles are searched.
    """

    tile_rows: int
    group: int
    block_n: int
    warps: int
    stages: int
    one_tile: bool
    splits: int
    part_blocks: int
    slots: int = 0


def cut(request: RaggedRequest, below: int = 0) -> Cut:
    """Choose tile and splits from the bounds alone; nothing waits for the device.

    ``below`` > 0: requests of as many rows or more are another kernel's, and nothing is split. Each
    has as many tiles then, if those are fewer than could be found: there may be work for none.
    """
    heads = request.q_heads // request.kv_heads
    group = 1 << (heads - 1).bit_length()
    most_rows = min(request.max_q_len, below - 1) if below else request.max_q_len
    packed = max(most_rows, 1) * group
    block_m = max(_MIN_M, min(_MAX_M, 1 << (packed - 1).bit_length()), group)
    tile_rows = block_m // group
    one_tile = most_rows <= tile_rows
    columns = width(request.head_dim)
    longest = request.max_kv_len
    if request.window:
        # Whatever the lookahead: a request's last row stands at its last key.
        longest = min(longest, request.window + request.max_q_len)
    tiles = request.requests if one_tile else request.rows // tile_rows + request.requests
    programs, units = max(1, tiles * request.kv_heads), units_of(request.device)
    if block_m == _MIN_M and not below:
        kind = request.kv_dtype.itemsize, max(columns, _DECODE_KEYS)
        splits, block_n, warps = _decode_cut(programs, units, *kind, -(-longest // _DECODE_KEYS))
        return Cut(tile_rows, group, block_n, warps, _STAGES[warps], one_tile, splits, 1)
    block_n = 32 if columns >= _WIDE else 64
    most = min(_PROGRAMS_PER_UNIT * units // programs, -(-longest // (_PART_BLOCKS * block_n)))
    splits = 1 if below else max(1, min(most, _MAX_SPLITS))
    warps, stages = 8 if block_m > 64 else 4, 2 if columns >= _WIDE else 3
    each = -(-most_rows // tile_rows)
    slots = each * tile_rows if below and request.requests * each < tiles else 0
    return Cut(tile_rows, group, block_n, warps, stages, one_tile, splits, _PART_BLOCKS, slots)


def cut_short(request: RaggedRequest, rest: Cut) -> Cut | None:
    """Choose tile and splits for the requests of few rows in a step that has longer ones, too.

    They are cut as if each request of the step decoded one row. ``rest``: how the step is cut
    without it. None where no request can be longer, where ``rest`` is cut already, and where keys
    are few.
    """
    step = cut(replace(request, rows=request.requests, max_q_len=1))
    slots = max(step.tile_rows, min(_SHORT_ROWS, _MAX_M // step.group))
    longest = min(request.max_kv_len, request.window or request.max_kv_len)
    alone = request.requests == 1 or request.max_q_len <= slots
    if alone or rest.splits > 1 or longest < _SHORT_KEYS:
        return None
    return step._replace(slots=slots)


def _decode_cut(
    programs: int, units: int, itemsize: int, columns: int, blocks: int
) -> tuple[int, int, int]:
    """Parts, keys of a block and warps of a decoding step of ``programs`` requests and key heads.

    As many programs as run at once, or as little as possible of a last wave that fills a part of
    the GPU only: on an H200, 8 requests of 4k keys and 8 heads take 42 us with 512 programs and
    51 with 768. ``itemsize``: bytes of a number in the cache. ``blocks``: of ``_DECODE_KEYS`` keys.
    """
    resident = _RESIDENT[itemsize][columns]
    most = max(1, min(blocks, _MAX_SPLITS))
    splits = min(min(resident.values()) * units // programs, most)
    if splits > _FEW_SPLITS:
        widest = max(resident)
        if widest[0] > _DECODE_KEYS and blocks >= _LONG_PART * splits:
            return splits, *widest
        return splits, _DECODE_KEYS, 4

    def share_of_use(choice: tuple[int, tuple[int, int]]) -> float:
        parts, tile = choice
        held = _held(itemsize, columns, tile, parts == 1)
        waves = programs * parts / (held * units)
        return waves / math.ceil(waves) - _COST_OF_A_PART * parts

    few = range(1, min(_FEW_SPLITS, most) + 1)
    parts, tile = max(((parts, tile) for parts in few for tile in resident), key=share_of_use)
    return parts, *tile


def _held(itemsize: int, columns: int, tile: tuple[int, int], whole: bool) -> int:
    """Programs of a decoding tile that a multiprocessor holds, of ``whole`` keys or of parts."""
    fewer = _FEWER_WHOLE.get((itemsize, columns), {}).get(tile, 0)
    return _RESIDENT[itemsize][columns][tile] - (fewer if whole or registers_grow() else 0)


def width(head_dim: int) -> int:
    """Columns of the tile that holds a head: the next power of two."""
    return 1 << (head_dim - 1).bit_length()


def columns_of(head_dim: int) -> int:
    """Columns of the tile of prompts on Hopper."""
    return max(width(head_dim), hopper_ragged_load.COLUMNS)


def few_keys(head_dim: int) -> int:
    """Keys up to which prompts run the plain kernel on Hopper.

    A multiprocessor runs several of its programs at once, which pays where tiles are a K block or
    two: with 64 keys it takes 0.27 to 0.84 of the time, and at head dim 32, where the other kernel
    computes columns that nobody needs, 0.53 to 0.89 with up to 512 (H100).
    """
    return 64 if head_dim >= hopper_ragged_load.COLUMNS else 512


def shortest(request: RaggedRequest) -> int:
    """Rows from which on a request is a prompt: 1 where none is short unless rows are padding.

    Launches for short ones take 4 to 13 us even without work (H100).
    """
    return 1 if tiles.none_below(request, SHORTEST_PROMPT) else SHORTEST_PROMPT


def numbers_of(request: RaggedRequest, tile: HopperTile) -> tuple[int, int]:
    """Numbers of the tiles of prompts: of each request, 0 where they are searched; of a head.

    Whatever makes them fewer. With 256 prompts of 128 rows a search, and as many empty numbers as
    tiles, took a sixth of the time (H100).
    """
    each = -(-min(request.max_q_len, request.rows) // tile.block_m)
    searched = request.rows // tile.block_m + request.requests
    if each * request.requests <= searched:
        return each, each * request.requests
    return 0, searched


def prompt_parts(request: RaggedRequest, tile: HopperTile) -> int:
    """How many parts along the keys the tiles of prompts have on Hopper, at most.

    One where they fill the GPU. Otherwise a model of as many requests as there are rows for, all as
    long as allowed, says what takes least: rounds of programs times the K blocks of a part.
    """
    rows = max(min(request.max_q_len, request.rows), 1)
    longest = request.max_kv_len
    if request.window:
        longest = min(longest, request.window + rows)
    requests = max(1, min(request.rows // rows, request.requests))
    programs = requests * -(-rows // tile.block_m) * request.q_heads
    units, blocks = units_of(request.device), -(-longest // tile.block_n)
    if programs >= units:
        return 1
    numbers = numbers_of(request, tile)[1] * request.q_heads
    part_bytes = 8 * programs * tile.block_m * request.head_dim
    columns = columns_of(request.head_dim)

    def cost(parts: int) -> float:
        rounds = -(-programs * parts // units)
        exits = max(numbers - programs, 0) * parts / units * _PROMPT_EXIT
        merge = _PROMPT_MERGE + parts * part_bytes / _PROMPT_BLOCK_BYTES
        return (
            rounds * (-(-blocks // parts) + _PROMPT_START) * (columns / 128)
            + exits
            + merge * (parts > 1)
        )

    most = min(blocks // PROMPT_PART_BLOCKS, _MOST_PROMPT_PARTS)
    return min(range(1, max(most, 1) + 1), key=cost)


def units_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; two for the interpreter, so that tests see splits."""
    if device.type == "cpu":
        return 2
    return multiprocessors(torch.cuda.current_device() if device.index is None else device.index)
