"""Our kernels' launches on the whole chip: which workgroups there are and how many blocks each has.

What a workgroup costs is a replay's (``liteattention_emulator.timing.Cost``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from liteattention_emulator import library
from liteattention_emulator.memory_constants import parameters
from liteattention_emulator.timing import Chip, Cost, Launch, Replay, launch, replay
from liteattention_rocm import _core
from liteattention_rocm.engines.gfx942 import Gfx942Engine
from liteattention_rocm.lite import bitmap

from .cells import Lite
from .contenders import tiles_to_keep
from .hbm import CUS
from .model import BLOCK, Case, record

Blocks = npt.NDArray[np.float64]
Order = Literal["none", "whole", "cut"]
ORDERS: tuple[Order, ...] = ("none", "whole", "cut")


@dataclass(frozen=True, slots=True)
class Work:
    """K blocks of 64 keys of each workgroup in the order of their ids; one of 32 keys counts half.

    0: it ends at once.

    pass_bytes: what the passes before and after the kernel read and write, V packed and parts
    merged.
    """

    blocks: Blocks
    pass_bytes: int = 0


def work_of(case: Case) -> Work:
    """The launch of a case's whole shape; prefill is causal, of requests of S tokens."""
    batch, heads, length, dim = case.shape
    if case.kernel == "prefill":
        return work_of_prefill(batch, length, length, heads, case.kv_heads or heads, dim)
    blocks = -(-length // _core.GFX942_K_BLOCK)
    shape = _core.DenseShape(batch, heads, heads, length, length, dim)
    packing = 2 * 2 * batch * heads * blocks * _core.GFX942_K_BLOCK * dim
    if case.kernel in ("lite", "weigh"):
        return Work(np.full(_core.plan_lite(shape, CUS).tiles, float(blocks)), packing)
    plan = _core.plan_dense(shape, CUS, 0)
    whole = np.full(plan.whole_tiles, blocks)
    splits = max(plan.splits, 1)
    parts = [blocks // splits + (part < blocks % splits) for part in range(splits)]
    tail = np.repeat(parts, plan.tail_tiles)
    merged = 0
    if splits > 1:
        merged = plan.tail_tiles * _core.GFX942_Q_BLOCK * dim * (2 * 4 * splits + 2)
    return Work(np.concatenate([whole, tail]).astype(np.float64), packing + merged)


def work_of_lists(cell: Lite, order: Order = "cut") -> Work:
    """The launch of a LiteAttention step over the lists of a cell, and the merge of cut ones.

    order: as pack_lists or plan_lpt orders them, run by the software MI300X, in a step that votes
    ("whole") or one with a budget; or as the mapping alone deals tiles. A step that votes has no
    order if it has no more tiles than compute units.
    """
    lists = tiles_to_keep(cell, _core.GFX942_Q_BLOCK, _core.GFX942_K_BLOCK)
    counts = lists.sum(-1).flatten().numpy()
    if order == "none" or (order == "whole" and len(counts) <= CUS):
        mapping = _core.Mapping.swizzled_head_first
        q_blocks = lists.shape[2]
        tiles = _core.tiles_of(mapping, len(counts) // q_blocks, q_blocks, len(counts))
        return Work(counts[tiles].astype(np.float64))
    engine, packed = Gfx942Engine(library=str(library())), bitmap.pack(lists)
    if order == "whole":
        taken = engine.order_of_tiles(packed, k_blocks=lists.shape[3]).flatten().numpy()
        return Work(np.where(taken >= 0, counts[taken], 0).astype(np.float64))
    found, parts = engine.order_of_parts(packed, k_blocks=lists.shape[3])
    taken, (first, end, slot, _) = found.flatten().numpy(), parts.view(-1, 4).T.numpy()
    blocks = np.where(slot < 0, counts[taken], end - first)
    in_parts = (taken >= 0) & (slot >= 0)
    numbers = 2 * 4 * np.count_nonzero(in_parts) + 2 * len(np.unique(taken[in_parts]))
    merged = _core.GFX942_Q_BLOCK * cell.head_dim * numbers
    return Work(np.where(taken >= 0, blocks, 0).astype(np.float64), merged)


def clocks(work: Work, cost: Cost) -> float:
    """clk of a launch, and of its passes by HBM's rate."""
    return launch(_taken(work.blocks, cost)).clocks + work.pass_bytes / parameters()["hbm_rate"]


def even(blocks: Blocks, cost: Cost) -> float:
    """clk of as much work, spread evenly over all compute units."""
    chip = Chip()
    taken = _taken(blocks, cost)
    return float(taken.sum() + chip.start * np.count_nonzero(blocks)) / chip.cus


def _taken(blocks: Blocks, cost: Cost) -> npt.NDArray[np.float64]:
    return np.where(blocks > 0, cost.fixed + cost.per_block * blocks, 0.0)


def work_of_prefill(
    requests: int, q_len: int, kv_len: int, heads: int, kv_heads: int, dim: int, *, splits: int = 0
) -> Work:
    """The launch of causal requests of as many rows and keys; 0 splits: as the engine plans it.

    Dealt as csrc/gfx942 deals tiles (geometry.h: PrefillBegin, PrefillTileOf) and their parts
    (ragged.h: FindItem).
    """
    shape = _core.RaggedShape(requests, requests * q_len, heads, kv_heads, dim, 0, q_len, kv_len, 1)
    plan = _core.plan_ragged(shape, CUS, splits)
    group, (rows, keys) = heads // kv_heads, (128, 32) if dim > 128 else (256, 64)
    of_tile = []
    for tile in range(-(-q_len * group // rows)):
        last = -(-min((tile + 1) * rows, q_len * group) // group)
        of_tile.append(-(-(kv_len - q_len + last) // keys))
    tiles = requests * len(of_tile)
    items = plan.prefill.grid // kv_heads
    of_item = np.zeros(items)
    merged = 0
    if plan.prefill.splits == 1:
        for request in range(requests):
            begin = request * q_len * group // rows + request
            of_item[begin : begin + len(of_tile)] = of_tile
    else:
        splits = _core.prefill_splits(tiles, plan.prefill_room, plan.prefill.splits)
        first, least = items - tiles * splits, plan.prefill_blocks
        part_blocks = max(least, -(-max(of_tile) // splits)) if least else 1
        for number, blocks in enumerate(of_tile * requests):
            parts = _core.prefill_parts(blocks, part_blocks, splits)
            each = [blocks // parts + (part < blocks % parts) for part in range(parts)]
            of_item[first + number : first + parts * tiles : tiles] = each
            if parts > 1:
                merged += rows * dim * (2 * 4 * parts + 2) * kv_heads
    ids = np.arange(items * kv_heads)
    sets = min(kv_heads & -kv_heads, 8)
    return Work(of_item[items - 1 - ids // sets % items] * (keys / BLOCK), merged)


def clocks_of_block(result: Replay, matrix_per_block: float | None) -> float | None:
    """clk of the first wave per 64 keys, by its matrix instructions; None without a loop."""
    loop, clocks = result.loops[0], result.per_iteration(0)
    if loop is None or clocks is None or matrix_per_block is None:
        return None
    return clocks * matrix_per_block * loop.iterations / loop.matrix


def cost_of(result: Replay, clocks_per_block: float, blocks: int) -> Cost:
    """What a replayed workgroup of so many blocks says of others."""
    return Cost(max(result.clocks - clocks_per_block * blocks, 0.0), clocks_per_block)


def of(case: Case, result: Replay, clocks_per_block: float) -> tuple[Launch, dict[str, Any]]:
    """The launch of a case's shape, and its figures for ``--json``.

    result: of the workgroups that ``model.record`` records, as many as a CU holds. Of two, one
    alone is replayed here, too: each is slower than that, and both together are faster. pass_clk is
    by HBM's rate alone.
    """
    work, slots, alone, per_block = work_of(case), case.resident, result, clocks_per_block
    if slots > 1:
        recorded, matrix_per_block = record(case, 1)
        alone = replay(recorded, dict(result.constants))
        per_block = clocks_of_block(alone, matrix_per_block) or clocks_per_block
    cost = cost_of(alone, per_block, -(-case.shape[2] // BLOCK))
    speeds = (1.0, *(per_block / clocks_per_block for _ in range(1, slots)))
    found = launch(_taken(work.blocks, cost), slots=slots, speeds=speeds)
    matrix = float(work.blocks.sum()) * result.use * result.simds * clocks_per_block / slots
    return found, {
        "workgroups": int((work.blocks > 0).sum()),
        "rounds": found.rounds,
        "clk": found.clocks,
        "cus_in_use": found.occupied,
        "matrix_use": found.matrix_use(matrix),
        "pass_clk": work.pass_bytes / parameters()["hbm_rate"],
        "workgroup_fixed_clk": cost.fixed,
        "workgroup_clk_per_block": cost.per_block,
    }
