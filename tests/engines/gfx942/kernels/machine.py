"""Launches single kernels on the software MI300X: csrc/gfx942/params.h as ctypes structures."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, NamedTuple

import torch

from liteattention_rocm.engines.gfx942 import manifest

Q_BLOCK, K_BLOCK = 256, 64


class Strides(ctypes.Structure):
    _fields_ = [("batch", c_int64), ("seq", c_int64), ("head", c_int64)]


class TransposeVParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("v", "v_t")),
        ("v_strides", Strides),
        *((name, c_int32) for name in ("batch", "kv_heads", "kv_len", "reserved")),
    ]


class DenseParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("q", "k", "v_t", "out", "lse", "part_out", "part_stats")),
        *((name, Strides) for name in ("q_strides", "k_strides", "out_strides")),
        *((name, c_int32) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")),
        ("scale_log2", c_float),
        *((name, c_int32) for name in ("whole_tiles", "splits", "mapping", "reserved")),
    ]


class LiteParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("q", "k", "v_t", "out", "lse", "read", "write")),
        *((n, c_void_p) for n in ("must_do", "must_skip", "order")),
        *((name, Strides) for name in ("q_strides", "k_strides", "out_strides")),
        *((name, c_int32) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")),
        *((name, c_float) for name in ("scale_log2", "threshold")),
        *((name, c_int32) for name in ("descending", "soft_skip", "mapping")),
    ]


class WeighParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("q", "k", "v_t", "out", "lse", "read", "weights")),
        *((n, c_void_p) for n in ("must_do", "must_skip", "order")),
        *((n, c_void_p) for n in ("parts", "part_out", "part_stats", "part_weights")),
        *((name, Strides) for name in ("q_strides", "k_strides", "out_strides")),
        *((name, c_int32) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")),
        ("scale_log2", c_float),
        *((name, c_int32) for name in ("descending", "mapping")),
    ]


class SelectParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("weights", "read", "write", "must_do", "must_skip", "mass")),
        ("limits", c_void_p),
        ("kv_len", c_int32),
        ("limit", c_uint32),
        ("q_heads", c_int32),
        *((n, c_uint32) for n in ("head_multiplier", "head_shift")),
        *((n, c_uint32) for n in ("block_multiplier", "block_shift")),
        ("reserved", c_int32),
    ]


class MergeParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("part_out", "part_stats", "out", "lse")),
        ("out_strides", Strides),
        *((n, c_int32) for n in ("batch", "q_heads", "q_len", "head_dim", "whole_tiles", "splits")),
        ("mapping", c_int32),
        ("scale_log2", c_float),
    ]


class MergeListsParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cuts", "part_out", "part_stats", "part_weights")),
        *((name, c_void_p) for name in ("out", "lse", "weights")),
        ("out_strides", Strides),
        *((n, c_int32) for n in ("q_heads", "q_len", "kv_len", "head_dim")),
        ("scale_log2", c_float),
        ("reserved", c_int32),
    ]


class CountParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("skip", "must_do", "must_skip", "counts", "order")),
        *((name, c_int32) for name in ("tiles", "positions", "words", "k_blocks")),
    ]


class PlanParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("counts", "order", "parts", "cuts")),
        *((n, c_int32) for n in ("tiles", "q_blocks", "slots", "together", "shift")),
        *((n, c_uint32) for n in ("block_multiplier", "block_shift")),
        ("units", c_int32),
    ]


class RowStrides(ctypes.Structure):
    _fields_ = [("row", c_int64), ("head", c_int64)]


class PageStrides(ctypes.Structure):
    _fields_ = [("page", c_int64), ("row", c_int64), ("head", c_int64)]


class RaggedParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("q", "k", "v", "out", "lse", "sinks")),
        *((n, c_void_p) for n in ("q_start", "kv_len", "kv_start", "page_table")),
        *((n, c_void_p) for n in ("part_out", "part_stats", "prefill_out", "prefill_stats")),
        *((n, c_void_p) for n in ("k_scale_at", "v_scale_at")),
        *((n, RowStrides) for n in ("q_strides", "out_strides")),
        *((n, PageStrides) for n in ("k_strides", "v_strides")),
        *((n, c_int64) for n in ("page_table_stride", "lse_stride")),
        *((n, c_double) for n in ("scale_wide", "cap_ratio")),
        *((n, c_int32) for n in ("requests", "rows", "q_heads", "kv_heads", "page_size")),
        *((n, c_uint32) for n in ("page_multiplier", "page_shift")),
        *((n, c_int32) for n in ("lookahead", "window", "splits")),
        *((n, c_float) for n in ("scale_log2", "cap_log2", "cap_factor")),
        ("head_dim", c_int32),
        *((n, c_uint32) for n in ("group_multiplier", "group_shift")),
        ("v_scale", c_float),
        *((n, c_int32) for n in ("prefill_splits", "prefill_room", "prefill_blocks")),
    ]


class WriteKvParams(ctypes.Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("k", "v", "k_cache", "v_cache", "slots")),
        *((n, c_void_p) for n in ("k_scale_at", "v_scale_at")),
        *((n, RowStrides) for n in ("k_strides", "v_strides")),
        *((n, PageStrides) for n in ("k_cache_strides", "v_cache_strides")),
        *((n, c_int32) for n in ("rows", "kv_heads", "head_dim", "page_size")),
        *((n, c_uint32) for n in ("page_multiplier", "page_shift")),
        ("wide", c_int32),
        *((n, c_float) for n in ("k_scale", "v_scale")),
        ("reserved", c_int32),
    ]


STRUCTS = {
    "transpose_v": TransposeVParams,
    "attention_dense": DenseParams,
    "attention_lite": LiteParams,
    "attention_weigh": WeighParams,
    "merge_lists": MergeListsParams,
    "select_tiles": SelectParams,
    "merge_parts": MergeParams,
    "count_tiles": CountParams,
    "plan_lpt": PlanParams,
    "pack_lists": PlanParams,
    "attention_prefill": RaggedParams,
    "attention_decode": RaggedParams,
    "merge_decode": RaggedParams,
    "merge_prefill": RaggedParams,
    "write_kv": WriteKvParams,
}


def launch(name: str, grid: int, params: ctypes.Structure, tensors: Sequence[torch.Tensor]) -> Any:
    """Run one kernel with ``tensors`` accessible; raises with what the checkers find."""
    import liteattention_emulator as emulator

    entry, kernel = manifest.read().find(name)
    with emulator.Module(manifest.load(entry.file)) as module, ExitStack() as stack:
        stack.enter_context(emulator.registered(*tensors))
        return module.launch(name, [grid], [kernel.max_workgroup], [params])


def strides(x: torch.Tensor) -> Strides:
    """Of a [B, S, H, D] tensor."""
    return Strides(x.stride(0), x.stride(1), x.stride(2))


def divider(size: int) -> tuple[int, int]:
    """geometry.h: DividerOf."""
    if size <= 0:
        return 0, 0
    shift = (size - 1).bit_length()
    return -(-(1 << (31 + shift)) // size), shift


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def transpose_v(v: torch.Tensor, v_t: torch.Tensor) -> Any:
    """v [B, S, H, D], 16 bits each; v_t flat."""
    batch, rows, heads, dim = v.shape
    params = TransposeVParams(pointer(v), pointer(v_t), strides(v), batch, heads, rows, 0)
    grid = batch * heads * -(-rows // K_BLOCK)
    return launch(f"transpose_v_bf16_d{dim}", grid, params, [v, v_t])


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float | None = None,
    rounding: str = "rtne",
    whole_tiles: int | None = None,
    splits: int = 1,
    mapping: int = 0,
) -> Any:
    """All [B, S, H, D]; the report is the attention kernel's. Workspaces hold NaN beforehand."""
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    v_t = packed_values(v)
    tiles = batch * q_heads * -(-q_len // Q_BLOCK)
    whole = tiles if whole_tiles is None else whole_tiles
    slots = (tiles - whole) * splits
    part_out = torch.full((max(slots, 1), Q_BLOCK, dim), math.nan)
    part_stats = torch.full((max(slots, 1), 2, Q_BLOCK), math.nan)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    params = DenseParams(
        *map(pointer, (q, k, v_t, out, lse)),
        *(pointer(x) if slots else None for x in (part_out, part_stats)),
        *map(strides, (q, k, out)),
        *(batch, q_heads, kv_heads, q_len, kv_len, scale * math.log2(math.e), whole, splits),
        *(mapping, 0),
    )
    tensors = [q, k, v_t, out, *([] if lse is None else [lse])]
    tensors += [part_out, part_stats] if slots else []
    report = launch(f"attention_dense_{variant(q, rounding)}", whole + slots, params, tensors)
    if slots:
        merge(part_out, part_stats, out, lse, whole, splits, rounding, mapping, scale)
    return report


def variant(q: torch.Tensor, rounding: str, *, fp8: bool = False) -> str:
    """The end of an attention kernel's name; ``fp8``: of the cache."""
    end = f"{'fp8_' if fp8 else ''}d{q.shape[-1]}"
    return f"fp16_{end}" if q.dtype == torch.float16 else f"bf16_{end}_{rounding}"


def packed_values(v: torch.Tensor) -> torch.Tensor:
    """v [B, S, H, D] as the attention kernels want it."""
    batch, rows, heads, dim = v.shape
    size = batch * heads * -(-rows // K_BLOCK) * K_BLOCK * dim
    v_t = torch.full((size,), math.nan).to(v.dtype)
    transpose_v(v, v_t)
    return v_t


def lite(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    threshold: float,
    scale: float | None = None,
    rounding: str = "rtne",
    descending: bool = False,
    soft_skip: bool = False,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    mapping: int = 0,
) -> Any:
    """One LiteAttention step of [B, S, H, D] tensors; int32 bitmaps [B, Hq, q_blocks, words]."""
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    v_t = packed_values(v)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    params = LiteParams(
        *map(pointer, (q, k, v_t, out, lse, read, write, must_do, must_skip, order)),
        *map(strides, (q, k, out)),
        *(batch, q_heads, kv_heads, q_len, kv_len, scale * math.log2(math.e), threshold),
        *(descending, soft_skip, mapping),
    )
    given = (q, k, v_t, out, lse, read, write, must_do, must_skip, order)
    tensors = [x for x in given if x is not None]
    grid = batch * q_heads * -(-q_len // Q_BLOCK) if order is None else order.numel()
    return launch(f"attention_lite_{variant(q, rounding)}", grid, params, tensors)


def weigh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    read: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale: float | None = None,
    rounding: str = "rtne",
    descending: bool = False,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    order: torch.Tensor | Cut | None = None,
    mapping: int = 0,
) -> Any:
    """As :func:`lite`; ``weights`` int32 [B, Hq, q_blocks, K_blocks], in units of 2^-28.

    The parts of lists that are cut are merged. The report is the attention kernel's. Their
    workspaces hold NaN, and weights of 1, beforehand.
    """
    cut = order if isinstance(order, Cut) else None
    order = cut.order if cut is not None else order
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    v_t = packed_values(v)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    given = [q, k, v_t, out, lse, read, weights, must_do, must_skip, order, *[None] * 4]
    if cut is not None:
        slots = 2 * len(cut.cuts)
        part_out = torch.full((slots, Q_BLOCK, dim), math.nan)
        part_stats = torch.full((slots, 2, Q_BLOCK), math.nan)
        part_weights = torch.full((slots, 8, -(-kv_len // K_BLOCK)), 2**28, dtype=torch.int32)
        given[10:] = cut.parts, part_out, part_stats, part_weights
    scale_log2 = scale * math.log2(math.e)
    params = WeighParams(
        *map(pointer, given),
        *map(strides, (q, k, out)),
        *(batch, q_heads, kv_heads, q_len, kv_len, scale_log2, descending, mapping),
    )
    tensors = [x for x in given if x is not None]
    grid = batch * q_heads * -(-q_len // Q_BLOCK) if order is None else order.numel()
    report = launch(f"attention_weigh_{variant(q, rounding)}", grid, params, tensors)
    if cut is not None:
        given = [cut.cuts, part_out, part_stats, part_weights, out, lse, weights]
        merge = MergeListsParams(
            *map(pointer, given), strides(out), q_heads, q_len, kv_len, dim, scale_log2, 0
        )
        groups = Q_BLOCK // (256 // (dim // 8)) + 1
        name = "fp16" if q.dtype == torch.float16 else f"bf16_{rounding}"
        tensors = [x for x in given if x is not None]
        launch(f"merge_lists_{name}", len(cut.cuts) * groups, merge, tensors)
    return report


def select(
    weights: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    limit: int,
    *,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    q_blocks: int = 1,
) -> Any:
    """``weights`` as of :func:`weigh`, int32 [tiles, K_blocks], overwritten; ``mass`` likewise.

    With ``limits``, int32 [q_heads], ``q_blocks`` tiles in a row are of one head.
    """
    tiles, k_blocks = weights.shape
    given = (weights, read, write, must_do, must_skip, mass, limits)
    q_heads = tiles // q_blocks if limits is None else len(limits)
    params = SelectParams(
        *map(pointer, given), k_blocks * K_BLOCK, limit, q_heads, *divider(q_heads),
        *divider(q_blocks), 0,
    )  # fmt: skip
    return launch("select_tiles", tiles, params, [x for x in given if x is not None])


class Cut(NamedTuple):
    """What pack_lists makes of lists that may be cut.

    order: int32 [slots, 8]. parts: int32 [slots, 8, 4] of the same positions: first K block in
    walking order, last one plus 1, slot or -1 for a whole list, and 0. cuts: int32 [8 units, 2]:
    the tile whose list begins in a unit and goes on in another one, and in how many parts.
    """

    order: torch.Tensor
    parts: torch.Tensor
    cuts: torch.Tensor


def plan(skip: torch.Tensor, **options: Any) -> torch.Tensor:
    """Order int32 [slots, 8] of a bitmap [B, Hq, q_blocks, words]; options of :func:`_plan`."""
    found = _plan(skip, **options)
    assert isinstance(found, torch.Tensor)
    return found


def _plan(
    skip: torch.Tensor,
    *,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    k_blocks: int = 0,
    slots: int = 0,
    together: int = 152,
    shift: int = 0,
    units: int = 0,
    cuts: bool = False,
) -> torch.Tensor | Cut:
    """By pack_lists for ``units`` compute units of an XCD; 0: by plan_lpt. Memory is guarded."""
    *rows, q_blocks, words = skip.shape
    tiles = math.prod(rows) * q_blocks
    slots = slots or -(-tiles // 8) * 3 // 2  # geometry.h: LiteSlots
    guarded = torch.full((slots * 8 + 2,), 0x5A5A5A5A, dtype=torch.int32)
    # Room for whole groups of eight, which are read at once (geometry.h: CountWords).
    order, counts = guarded[1:-1], torch.full((-(-tiles // 8) * 8,), 2**31 - 1, dtype=torch.int32)
    positions = order.numel()
    count = CountParams(
        *map(pointer, (skip, must_do, must_skip, counts, order)), tiles, positions, words, k_blocks
    )
    given = [x for x in (skip, must_do, must_skip, counts, order) if x is not None]
    launch("count_tiles", -(-positions // 256), count, given)
    sizes = tiles, q_blocks, slots, together, shift, *divider(q_blocks), units
    parts = torch.full((slots, 8, 4), -7, dtype=torch.int32) if cuts else None
    of_units = torch.full((8 * units, 2), -7, dtype=torch.int32) if cuts else None
    given = [counts, order, parts, of_units]
    params = PlanParams(*map(pointer, given), *sizes)
    name, grid = ("pack_lists", 8) if units else ("plan_lpt", -(-tiles // 256))
    launch(name, grid, params, [x for x in given if x is not None])
    assert guarded[0] == guarded[-1] == 0x5A5A5A5A
    order = order.view(slots, 8)
    return Cut(order, parts, of_units) if parts is not None and of_units is not None else order


def cut(skip: torch.Tensor, units: int, **options: Any) -> Cut:
    """Of lists that may be cut, for so many compute units of an XCD; options of :func:`_plan`."""
    *rows, q_blocks, _ = skip.shape
    # geometry.h: CutSlots
    half_again = -(-math.prod(rows) * q_blocks // 8) * 3 // 2
    slots = half_again + min(half_again, 64) + units
    found = _plan(skip, units=units, slots=slots, cuts=True, **options)
    assert isinstance(found, Cut)
    return found


def merge(
    part_out: torch.Tensor,
    part_stats: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    whole_tiles: int,
    splits: int,
    rounding: str,
    mapping: int = 0,
    scale: float = 1 / math.log2(math.e),
) -> Any:
    """part_out [slots, 256, D], part_stats [slots, 2, 256], out [B, S, H, D].

    ``scale`` makes natural units of what parts are relative to, by default of log2 units.
    """
    batch, q_len, heads, dim = out.shape
    params = MergeParams(
        *map(pointer, (part_out, part_stats, out, lse)),
        strides(out),
        *(batch, heads, q_len, dim, whole_tiles, splits, mapping, scale * math.log2(math.e)),
    )
    grid = part_out.shape[0] // splits * (Q_BLOCK * dim // 8 // 256)
    tensors = [part_out, part_stats, out, *([] if lse is None else [lse])]
    name = "fp16" if out.dtype == torch.float16 else f"bf16_{rounding}"
    return launch(f"merge_parts_{name}", grid, params, tensors)
