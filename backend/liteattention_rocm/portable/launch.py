"""Launches of the portable kernels: from tensors and a request to a grid.

Importing this module needs Triton. Nothing here waits for a device; workspaces come from PyTorch's
allocator, so calls can be captured in a graph and made from several streams.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..engines.base import AttentionSpec, LiteSpec, strides
from . import hopper, kernels

_LOG2E = 1.4426950408889634
_WORD_BLOCK = 32  # K blocks in a bitmap word
_RANK_BLOCK = 64  # q blocks ranked by one program


class Kernel:
    """A Triton kernel with its compiled forms by what they were compiled for.

    Triton finds the compiled form of every call anew, from all its arguments (30 to 50 us on the
    host); here the caller names what the code depends on.

    Key: device and ``key`` (whatever the code depends on that is not in ``constants`` or
    ``options``). Owner: this module. Lifetime: the process's.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: list[Any],
        constants: tuple[Any, ...],
        options: tuple[tuple[str, Any], ...],
        key: tuple[Any, ...],
    ) -> None:
        """Launch over ``grid``: run-time ``arguments``, then ``constants``, in their order."""
        full = (_current_device(), key, constants, options)
        compiled = self._compiled.get(full)
        if compiled is not None:
            compiled[(*grid, 1, 1)](*arguments, *constants)
            return
        # Triton will change the default; unfused, a score takes two instructions instead of one.
        compiled = self._function[grid](
            *arguments, *constants, enable_fp_fusion=True, **dict(options)
        )
        if compiled is not None:  # None: the interpreter
            self._compiled[full] = compiled


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


_LIST_TILES = Kernel(kernels.list_tiles)
_ORDER = Kernel(kernels.order_longest_first)
_PLAIN = Kernel(kernels.attention)
_HOPPER = Kernel(hopper.attention)


@dataclass(frozen=True, slots=True)
class PlainTile:
    """How the plain kernel is compiled: tile, warps of a workgroup, stages of its loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperTile:
    """How the Hopper kernel is compiled.

    ``groups`` warpgroups of 64 rows, K blocks of ``block_n`` keys, ``stages`` of them in shared
    memory. ``registers`` of a computing thread, ``loader_registers`` of a loading one. ``turns``:
    warpgroups alternate in issuing products. ``persistent``: one workgroup per multiprocessor, so
    that a tile's first loads run under the end of the one before.
    """

    groups: int
    block_n: int
    stages: int
    registers: int
    loader_registers: int
    turns: bool = True
    persistent: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of a workgroup."""
        return self.groups * hopper.WARPGROUP_ROWS


@dataclass(frozen=True, slots=True)
class Walks:
    """The work of a LiteAttention step.

    ``items`` int16 [rows of the bitmap, K blocks]: K blocks to walk, in order. By order of work,
    int32 [heads, q_blocks]: ``order`` (q block) and ``counts`` (K blocks of its walk).
    ``next_tile``: the counter that tiles are taken from. ``votes``: the next bitmap.
    """

    items: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    next_tile: torch.Tensor
    votes: torch.Tensor
    must_do: torch.Tensor | None


def plan_walks(
    spec: AttentionSpec,
    lite: LiteSpec,
    read: torch.Tensor,
    write: torch.Tensor,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
    descending: bool,
) -> Walks:
    """List the tiles of every q block in walking order, order the q blocks, clear ``write``."""
    tile = lite.geometry
    q_blocks, k_blocks = tile.q_blocks(spec.q_len), tile.k_blocks(spec.kv_len)
    words = tile.words(spec.kv_len)
    heads = spec.batch * spec.q_heads
    rows = heads * q_blocks
    items = torch.empty(rows * k_blocks, dtype=torch.int16, device=read.device)
    numbers = torch.empty(3 * rows + 1, dtype=torch.int32, device=read.device)
    counts, order, sorted_counts = numbers[: 3 * rows].view(3, rows)
    next_tile = numbers[3 * rows :]
    masks = (must_do, must_skip)
    _LIST_TILES(
        (rows,),
        [read, *(read if mask is None else mask for mask in masks), items, counts, write,
         k_blocks, words],
        (1 << (words - 1).bit_length(), descending, must_do is not None, must_skip is not None),
        (("num_warps", 1 if words <= 8 else 4),),
        alignments(read, *masks, write),
    )  # fmt: skip
    _ORDER(
        (-(-q_blocks // _RANK_BLOCK), heads),
        [counts, order, sorted_counts, next_tile, q_blocks],
        (_RANK_BLOCK,),
        (),
        alignments(counts, order, sorted_counts, next_tile),
    )
    return Walks(items, order, sorted_counts, next_tile, write, must_do)


def plain(
    spec: AttentionSpec,
    tile: PlainTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    lite: LiteSpec | None = None,
    walks: Walks | None = None,
) -> None:
    """Launch the plain kernel; dense without ``walks``."""
    q_blocks = -(-spec.q_len // tile.block_m)
    k_blocks = -(-spec.kv_len // tile.block_n)
    steps = [*strides(q, spec.layout), *strides(k, spec.layout)]
    steps += [*strides(v, spec.layout), *strides(out, spec.layout)]
    pointers = [
        q, k, v, out, out if lse is None else lse,
        *_walk_pointers(walks, out, counter=False),
    ]  # fmt: skip
    _PLAIN(
        (q_blocks * spec.batch * spec.q_heads,),
        [
            *pointers, *steps, spec.q_heads, spec.q_heads // spec.kv_heads, spec.q_len,
            spec.kv_len, q_blocks, k_blocks, -(-k_blocks // _WORD_BLOCK), _log2_scale(spec),
            _threshold(lite),
        ],
        (
            tile.block_m, tile.block_n, spec.head_dim, spec.causal,
            spec.kv_len % tile.block_n == 0, walks is not None,
            lite.geometry.vote_rows if lite is not None and lite.soft_skip else 0,
            walks is not None and walks.must_do is not None, lse is not None, _sign(spec.scale),
            kernels.ROUNDING[spec.rounding], q.device.type == "cpu",
        ),
        (("num_warps", tile.warps), ("num_stages", tile.stages)),
        (spec.dtype, alignments(*pointers), tuple(map(kind, steps))),
    )  # fmt: skip


def on_hopper(
    spec: AttentionSpec,
    tile: HopperTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    lite: LiteSpec | None = None,
    walks: Walks | None = None,
) -> None:
    """Launch the Hopper kernel; dense without ``walks``. See :func:`hopper_reasons`."""
    q_blocks = -(-spec.q_len // tile.block_m)
    k_blocks = -(-spec.kv_len // tile.block_n)
    tiles = q_blocks * spec.batch * spec.q_heads
    pointers = [out if lse is None else lse, *_walk_pointers(walks, out, counter=True)]
    _HOPPER(
        (min(tiles, multiprocessors(_current_device())) if tile.persistent else tiles,),
        [
            _descriptor(q, spec, hopper.WARPGROUP_ROWS), _descriptor(k, spec, tile.block_n),
            _descriptor(v, spec, tile.block_n), _descriptor(out, spec, hopper.WARPGROUP_ROWS),
            *pointers, tiles, spec.q_heads, spec.q_heads // spec.kv_heads, spec.q_len,
            spec.kv_len, q_blocks, k_blocks, -(-k_blocks // _WORD_BLOCK), _log2_scale(spec),
            _threshold(lite),
        ],
        (
            tile.groups, tile.block_n, spec.head_dim, tile.stages, spec.causal, walks is not None,
            lite is not None and lite.soft_skip, walks is not None and walks.must_do is not None,
            lse is not None, tile.turns, _sign(spec.scale), kernels.ROUNDING[spec.rounding],
            tile.registers, tile.loader_registers,
        ),
        (("num_warps", 4),),
        (spec.dtype, alignments(*pointers)),
    )  # fmt: skip


def hopper_reasons(*tensors: torch.Tensor) -> list[str]:
    """Say why the bulk copy engine cannot address tensors [., ., ., D]; none means it can."""
    for tensor in tensors:
        if tensor.data_ptr() % 16 or not _addressable(
            tensor.shape, tensor.stride(), tensor.element_size()
        ):
            return ["rows must start on multiples of 16 bytes and not be expanded"]
    return []


@functools.lru_cache(maxsize=256)
def _addressable(shape: torch.Size, steps: tuple[int, ...], size: int) -> bool:
    return all(
        extent == 1 or (step > 0 and step * size % 16 == 0)
        for extent, step in zip(shape[:3], steps[:3], strict=True)
    )


def _walk_pointers(walks: Walks | None, unused: torch.Tensor, counter: bool) -> list[torch.Tensor]:
    """Pointers of a walk in the order of the kernels; any pointer where there is none to take."""
    if walks is None:
        return [unused] * (6 if counter else 5)
    do = walks.votes if walks.must_do is None else walks.must_do
    middle = [walks.next_tile] if counter else []
    return [walks.items, walks.counts, walks.order, *middle, walks.votes, do]


def _descriptor(tensor: torch.Tensor, spec: AttentionSpec, rows: int) -> TensorDescriptor:
    """[B, H, S, D] in boxes of ``rows`` of one head; rows past the end read as 0."""
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(_box(tensor.shape, tensor.stride(), tensor.dtype, spec.layout, rows))
    found.base = tensor
    return found


@functools.lru_cache(maxsize=256)
def _box(
    shape: torch.Size, steps: tuple[int, ...], dtype: torch.dtype, layout: str, rows: int
) -> dict[str, Any]:
    """Everything of a descriptor but its address: checking it takes 5 us."""
    batch, length, heads, dim = shape
    step_b, step_s, step_h, _ = steps
    if layout == "bhsd":
        length, heads, step_s, step_h = heads, length, step_h, step_s
    # The stride of a dimension of one element is anything; the copy engine wants a multiple of 16.
    sizes = (batch, heads, length)
    fit = [s if n > 1 else 16 for n, s in zip(sizes, (step_b, step_h, step_s), strict=True)]
    base = torch.empty(8, dtype=dtype)
    made = TensorDescriptor(base, [*sizes, dim], [*fit, 1], [1, 1, rows, dim], _LAYOUT)
    return {**made.__dict__, "base": None}


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@functools.cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def alignments(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """What Triton's code depends on in pointers."""
    return tuple(tensor is not None and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def kind(number: int) -> int:
    """What Triton's code depends on in a stride: 1, multiple of 16, 64 bits wide."""
    if number == 1:
        return 1
    return (16 if number % 16 == 0 else 2) + (number >= 1 << 31)


def _log2_scale(spec: AttentionSpec) -> float:
    return abs(spec.scale) * _LOG2E if spec.scale else 1.0


def _sign(scale: float) -> int:
    return (scale > 0) - (scale < 0)


def _threshold(lite: LiteSpec | None) -> float:
    """Threshold as the kernels take it: NaN, which nothing is below, keeps every tile."""
    if lite is None or lite.threshold == -math.inf:
        return math.nan
    return lite.threshold
