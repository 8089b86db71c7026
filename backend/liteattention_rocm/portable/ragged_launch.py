"""Launches of the ragged kernels and the plan that the layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engines.base import RaggedBatch, RaggedSpec
from . import kernels, ragged
from .launch import Kernel, alignments, kind, multiprocessors

_ATTENTION = Kernel(ragged.attention)
_MERGE = Kernel(ragged.merge)
_WRITE = Kernel(ragged.write_kv)

#: Smallest and largest height of a matrix product's tile.
_MIN_M, _MAX_M = 16, 128
#: Programs that a multiprocessor should get before a request's keys are cut into more parts.
_PROGRAMS_PER_UNIT = 6
#: Fewest K blocks of a part, and most parts.
_MIN_BLOCKS, _MAX_SPLITS = 4, 64
_MERGE_HEADS = 4


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """How a step is cut: see :func:`liteattention_rocm.portable.ragged.attention`.

    ``workspace``: fp32 partial results of ``splits`` parts and their log-sum-exps, or None.
    """

    tile_rows: int
    group: int
    block_n: int
    warps: int
    stages: int
    one_tile: bool
    splits: int
    workspace: torch.Tensor | None


def plan(spec: RaggedSpec) -> RaggedPlan:
    """Choose tile and parts from the bounds alone; nothing waits for the device."""
    heads = spec.q_heads // spec.kv_heads
    group = 1 << (heads - 1).bit_length()
    packed = max(spec.max_q_len, 1) * group
    block_m = max(_MIN_M, min(_MAX_M, 1 << (packed - 1).bit_length()), group)
    tile_rows = block_m // group
    one_tile = spec.max_q_len <= tile_rows
    block_n = 64
    tiles = spec.requests if one_tile else spec.rows // tile_rows + spec.requests
    programs = max(1, tiles * spec.kv_heads)
    wanted = _PROGRAMS_PER_UNIT * _units(spec.device)
    longest = min(spec.max_kv_len, spec.window + spec.max_q_len) if spec.window else spec.max_kv_len
    splits = min(wanted // programs, -(-longest // (_MIN_BLOCKS * block_n)), _MAX_SPLITS)
    splits = max(1, splits)
    workspace = None
    if splits > 1:
        size = splits * spec.rows * spec.q_heads * (spec.head_dim + 1)
        workspace = torch.empty(size, dtype=torch.float32, device=spec.device)
    # On an H200, 64 requests of 32k keys decode at 4.34 TB/s with two warps, 8 at 3.7 with four.
    warps = 8 if block_m > 64 else 2 if block_m == _MIN_M and splits == 1 else 4
    return RaggedPlan(tile_rows, group, block_n, warps, 3, one_tile, splits, workspace)


def attention(
    spec: RaggedSpec,
    batch: RaggedBatch,
    step: RaggedPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Launch a ragged call."""
    paged = batch.page_table is not None
    keys = batch.kv_len if paged else batch.kv_start
    table = batch.page_table if batch.page_table is not None else batch.q_start
    assert keys is not None  # a batch is either paged or packed
    part_out = part_lse = out
    if step.workspace is not None:
        numbers = step.splits * spec.rows * spec.q_heads * spec.head_dim
        part_out, part_lse = step.workspace[:numbers], step.workspace[numbers:]
    pointers = [
        q, k, v, out, out if lse is None else lse, out if sinks is None else sinks,
        part_out, part_lse, batch.q_start, keys, table,
    ]  # fmt: skip
    k_steps = (*k.stride()[:3],) if paged else (0, *k.stride()[:2])
    v_steps = (*v.stride()[:3],) if paged else (0, *v.stride()[:2])
    steps = [*q.stride()[:2], *k_steps, *v_steps, *out.stride()[:2], table.stride(0)]
    rounding = kernels.ROUNDING[spec.rounding]
    tiles = spec.requests if step.one_tile else spec.rows // step.tile_rows + spec.requests
    scale = spec.scale * spec.k_scale * 1.4426950408889634
    _ATTENTION(
        (tiles, spec.kv_heads, step.splits),
        [
            *pointers, *steps, spec.requests, spec.q_heads, spec.q_heads // spec.kv_heads,
            spec.window, max(spec.page_size, 1), spec.rows, step.splits, scale,
            spec.soft_cap,
        ],
        (
            step.tile_rows, step.group, step.block_n, spec.head_dim, step.splits > 1, step.one_tile,
            paged, spec.causal, spec.window > 0, spec.soft_cap > 0, sinks is not None,
            lse is not None, rounding, q.device.type == "cpu",
        ),
        (("num_warps", step.warps), ("num_stages", step.stages)),
        (spec.dtype, alignments(*pointers), tuple(map(kind, steps))),
    )  # fmt: skip
    if step.workspace is None:
        return
    merged = [
        part_out, part_lse, out, out if lse is None else lse, out if sinks is None else sinks,
        batch.q_start,
    ]  # fmt: skip
    steps = [*out.stride()[:2]]
    _MERGE(
        (spec.rows, -(-spec.q_heads // _MERGE_HEADS)),
        [*merged, *steps, spec.requests, spec.q_heads, spec.rows, step.splits],
        (
            _MERGE_HEADS, spec.head_dim, sinks is not None, lse is not None, rounding
        ),
        (("num_warps", 2),),
        (spec.dtype, alignments(*merged), tuple(map(kind, steps))),
    )  # fmt: skip


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch the copy of new rows into the cache."""
    rows, heads, dim = k.shape
    steps = [*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]]
    pointers = [k, v, k_cache, v_cache, slots]
    _WRITE(
        (rows, heads),
        [*pointers, *steps, k_cache.shape[1]],
        (dim,),
        (("num_warps", 1),),
        (k.dtype, slots.dtype, alignments(*pointers), tuple(map(kind, steps))),
    )


def _units(device: torch.device) -> int:
    """Multiprocessors of a GPU; two for the interpreter, so that tests see parts."""
    if device.type == "cpu":
        return 2
    return multiprocessors(torch.cuda.current_device() if device.index is None else device.index)
