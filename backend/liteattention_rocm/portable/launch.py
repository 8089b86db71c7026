"""Launches of the portable kernels: from tensors and a request to a grid.

A request is bound once (:class:`Attention`, :class:`LiteStep`): grid, tile, strides and the
compiled kernels. Calls then bring addresses only, which matters on the host: Triton finds
everything anew in each call, which takes five times as long.

Importing this module needs Triton. Nothing here waits for a device; workspaces come from PyTorch's
allocator, so calls can be captured in a graph and made from several streams.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..engines.base import AttentionSpec, LiteSpec, strides
from . import hopper, kernels

_LOG2E = 1.4426950408889634
_WORD_BLOCK = 32  # K blocks in a bitmap word
_RANK_BLOCK = 64  # q blocks ranked by one program
#: Sets of addresses that a launch keeps tensor maps for; past it, all are made anew.
_MOST_MAPS = 32
#: What the entry point of a compiled kernel takes before the kernel's own arguments, in the
#: versions of Triton (3.5 and 3.6) where it may be called with tensor maps made before.
_ENTRY_FORMAT = "iiiKKppOOOOOO"

_runtime: Any = knobs.runtime
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_device = getattr(torch._C, "_cuda_getDevice", None)


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
        arguments: Sequence[Any],
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

    def compiled(
        self, constants: tuple[Any, ...], options: tuple[tuple[str, Any], ...], key: tuple[Any, ...]
    ) -> Any | None:
        """Form for the current device, or None if nothing was launched with these yet."""
        return self._compiled.get((_current_device(), key, constants, options))


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


class Launch:
    """One launch of a kernel with all that stays from call to call: grid, sizes, compiled code.

    Its kernel takes tensors as boxes of the copy engine (``boxes``: all of their descriptors but
    the address, see :func:`_box`), then pointers, then numbers, then constants.

    Key: the arguments of the constructor, made on the device that it will run on. Owner: a bound
    request. It keeps tensor maps by address, ``_MOST_MAPS`` sets at most; a map holds an address,
    sizes and strides and no memory, so it is as good for the next tensor there.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        numbers: Sequence[Any],
        constants: tuple[Any, ...],
        options: tuple[tuple[str, Any], ...],
        key: tuple[Any, ...],
        boxes: tuple[dict[str, Any], ...] = (),
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = tuple(numbers)
        self._how = (constants, options, key)
        self._boxes = boxes
        self._sizes = (*grid, 1, 1)[:3]
        self._rest = (*numbers, *constants)
        self._begins: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._compiled: Any | None = None
        self._run: Any = None
        self._entry: Any | None = None
        self._fixed: tuple[Any, ...] = ()
        self._bind()

    @property
    def ready(self) -> bool:
        """Whether it is compiled and takes addresses; never so in the interpreter."""
        return self._compiled is not None

    def start(self, boxed: Sequence[torch.Tensor], pointers: Sequence[torch.Tensor]) -> None:
        """Launch through Triton, which compiles if it has to and needs tensors for their types."""
        arguments = [*self._descriptors(boxed), *pointers, *self._numbers]
        constants, options, key = self._how
        self._kernel(self._grid, arguments, constants, options, key)
        self._bind()

    def __call__(
        self, stream: int, boxed: tuple[torch.Tensor, ...], addresses: tuple[int, ...]
    ) -> None:
        """Launch on a stream of the current device; ``addresses`` in place of the pointers."""
        if _hooked():
            arguments = (*self._descriptors(boxed), *addresses, *self._rest)
            self._compiled[self._sizes](*arguments, stream=stream)  # type: ignore[index]
        elif self._entry is None:
            compiled: Any = self._compiled
            self._run(
                *self._sizes, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *self._descriptors(boxed), *addresses, *self._rest,
            )  # fmt: skip
        elif boxed:
            q, k, v, out = boxed
            where = stream, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            begin = self._begins.get(where) or self._describe(where, boxed)
            self._entry(*begin, *addresses, *self._rest)
        else:
            self._entry(*self._sizes, stream, *self._fixed, *addresses, *self._rest)

    def _bind(self) -> None:
        """Take the compiled form, if there is one, and the shortest way into it."""
        compiled = self._kernel.compiled(*self._how)
        if compiled is None:
            return
        self._run = compiled.run
        driver = sys.modules[type(self._run).__module__]
        known = getattr(driver, "_BASE_ARGS_FORMAT", None) == _ENTRY_FORMAT
        if known and not (self._run.global_scratch_size or self._run.profile_scratch_size):
            entry = self._run.launch
            if self._boxes:
                # Triton wraps the entry point to make tensor maps in each call, 2 us each.
                names, cells = entry.__code__.co_freevars, entry.__closure__
                entry = dict(zip(names, cells, strict=True))["launcher"].cell_contents
            if not self._boxes or compiled.metadata.tensordesc_meta:
                self._entry = entry
                self._fixed = (
                    compiled.function, self._run.launch_cooperative_grid, self._run.launch_pdl,
                    None, None, compiled.packed_metadata, None, None, None,
                )  # fmt: skip
        self._compiled = compiled

    def _descriptors(self, boxed: Sequence[torch.Tensor]) -> list[TensorDescriptor]:
        """[B, H, S, D] in boxes of rows of one head; rows past the end read as 0."""
        made = []
        for box, tensor in zip(self._boxes, boxed, strict=True):
            found = object.__new__(TensorDescriptor)
            found.__dict__.update(box)
            found.base = tensor
            made.append(found)
        return made

    def _describe(self, where: tuple[int, ...], boxed: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """What the entry point takes first: tensor maps with their sizes and strides, too."""
        driver = sys.modules[type(self._run).__module__]
        compiled: Any = self._compiled
        found = [*self._sizes, where[0], *self._fixed]
        for descriptor, meta in zip(
            self._descriptors(boxed), compiled.metadata.tensordesc_meta, strict=True
        ):
            found += driver.make_tensordesc_arg(descriptor, meta)
        if len(self._begins) >= _MOST_MAPS:
            self._begins.clear()
        self._begins[where] = begin = tuple(found)
        return begin


def _hooked() -> bool:
    """Whether a profiler (Proton) wants to hear of launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return (enter is not None and getattr(enter, "calls", True)) or (
        leave is not None and getattr(leave, "calls", True)
    )


class _Bound:
    """A request bound to a device."""

    def __init__(self, device: torch.device) -> None:
        self._index = -1 if device.type == "cpu" else device.index

    def _elsewhere(self) -> AbstractContextManager[object]:
        """Make the tensors' device current, which is where Triton launches."""
        if self._index in (-1, _current_device()):
            return nullcontext()
        return torch.cuda.device(self._index)


class Attention(_Bound):
    """Dense attention in one tile, bound to all of a call but addresses.

    It holds for tensors with the sizes, strides and dtype of those it was made with and, like
    them, aligned to 16 bytes or not; it keeps none of them. Make it on the device of the tensors.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tile: PlainTile | HopperTile,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        super().__init__(spec.device)
        self._hopper = isinstance(tile, HopperTile)
        self._launch = _attend(spec, tile, q, k, v, out, lse)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write attention into ``out`` and ``lse``."""
        launch = self._launch
        if not launch.ready or _device() != self._index:  # type: ignore[misc]
            with self._elsewhere():
                self._first(q, k, v, out, lse)
            return
        unused = out.data_ptr()
        sums = unused if lse is None else lse.data_ptr()
        stream = _stream(self._index)  # type: ignore[misc]
        if self._hopper:
            launch(stream, (q, k, v, out), (sums,) + 6 * (unused,))
        else:
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), unused, sums)
            launch(stream, (), addresses + 5 * (unused,))

    def _first(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        sums = out if lse is None else lse
        if self._hopper:
            self._launch.start((q, k, v, out), (sums,) + 6 * (out,))
        else:
            self._launch.start((), (q, k, v, out, sums) + 5 * (out,))


class LiteStep(_Bound):
    """One LiteAttention step, bound as :class:`Attention` is: three launches and a workspace.

    ``list_tiles`` lists the tiles of every q block in walking order and clears ``write``,
    ``order_longest_first`` orders the q blocks, the attention kernel walks them and votes.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        lite: LiteSpec,
        tile: PlainTile | HopperTile,
        descending: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        super().__init__(spec.device)
        self._hopper = isinstance(tile, HopperTile)
        size = lite.geometry
        q_blocks, k_blocks = size.q_blocks(spec.q_len), size.k_blocks(spec.kv_len)
        words = size.words(spec.kv_len)
        heads = spec.batch * spec.q_heads
        rows = heads * q_blocks
        # items: int16 [rows, K blocks]; counts, order and counts in that order: int32 [rows]; the
        # counter that tiles are taken from. Parts begin at multiples of 16 bytes, as int32 ones.
        parts = (-(-rows * k_blocks // 2), rows, rows, rows, 1)
        self._parts = tuple((-(-part // 4) * 4) for part in parts)
        self._list = Launch(
            _LIST_TILES,
            (rows,),
            (k_blocks, words),
            (
                1 << (words - 1).bit_length(), descending, must_do is not None,
                must_skip is not None,
            ),
            (("num_warps", 1 if words <= 8 else 4),),
            alignments(read, must_do, must_skip, write),
        )  # fmt: skip
        self._order = Launch(
            _ORDER, (-(-q_blocks // _RANK_BLOCK), heads), (q_blocks,), (_RANK_BLOCK,), (), ()
        )
        self._attend = _attend(spec, tile, q, k, v, out, lse, lite, write, must_do)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        """Compute the tiles in ``read``; write ``out``, ``lse`` and the votes."""
        ready = self._list.ready and self._order.ready and self._attend.ready
        if not ready or _device() != self._index:  # type: ignore[misc]
            with self._elsewhere():
                self._first(q, k, v, out, lse, read, write, must_do, must_skip)
            return
        workspace = torch.empty(sum(self._parts), dtype=torch.int32, device=q.device)
        items = workspace.data_ptr()
        ends = self._parts
        counts = items + 4 * ends[0]
        order = counts + 4 * ends[1]
        ordered = order + 4 * ends[2]
        counter = ordered + 4 * ends[3]
        old, votes = read.data_ptr(), write.data_ptr()
        do = old if must_do is None else must_do.data_ptr()
        skip = old if must_skip is None else must_skip.data_ptr()
        stream = _stream(self._index)  # type: ignore[misc]
        self._list(stream, (), (old, do, skip, items, counts, votes))
        self._order(stream, (), (counts, order, ordered, counter))
        unused = out.data_ptr()
        sums = unused if lse is None else lse.data_ptr()
        do = votes if must_do is None else do
        if self._hopper:
            self._attend(stream, (q, k, v, out), (sums, items, ordered, order, counter, votes, do))
        else:
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), unused, sums)
            self._attend(stream, (), (*addresses, items, ordered, order, votes, do))

    def _first(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        workspace = torch.empty(sum(self._parts), dtype=torch.int32, device=q.device)
        items, counts, order, ordered, counter = torch.split(workspace, list(self._parts))
        items = items.view(torch.int16)
        do = read if must_do is None else must_do
        skip = read if must_skip is None else must_skip
        self._list.start((), (read, do, skip, items, counts, write))
        self._order.start((), (counts, order, ordered, counter))
        sums = out if lse is None else lse
        do = write if must_do is None else must_do
        if self._hopper:
            self._attend.start((q, k, v, out), (sums, items, ordered, order, counter, write, do))
        else:
            self._attend.start((), (q, k, v, out, sums, items, ordered, order, write, do))


def _attend(
    spec: AttentionSpec,
    tile: PlainTile | HopperTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    lite: LiteSpec | None = None,
    votes: torch.Tensor | None = None,
    must_do: torch.Tensor | None = None,
) -> Launch:
    """Bind the attention kernel; dense without ``lite``. See :func:`hopper_reasons` for Hopper."""
    q_blocks = -(-spec.q_len // tile.block_m)
    k_blocks = -(-spec.kv_len // tile.block_n)
    tiles = q_blocks * spec.batch * spec.q_heads
    sizes = [
        spec.q_heads, spec.q_heads // spec.kv_heads, spec.q_len, spec.kv_len, q_blocks, k_blocks,
        -(-k_blocks // _WORD_BLOCK), _log2_scale(spec), _threshold(lite),
    ]  # fmt: skip
    soft = lite is not None and lite.soft_skip
    rounding = kernels.ROUNDING[spec.rounding]
    has_do = must_do is not None
    aligned = alignments(lse, votes, must_do)
    if isinstance(tile, HopperTile):
        rows, keys = hopper.WARPGROUP_ROWS, tile.block_n
        return Launch(
            _HOPPER,
            (min(tiles, multiprocessors(_current_device())) if tile.persistent else tiles,),
            [tiles, *sizes],
            (
                tile.groups, tile.block_n, spec.head_dim, tile.stages, spec.causal,
                lite is not None, soft, has_do, lse is not None, tile.turns, _sign(spec.scale),
                rounding, tile.registers, tile.loader_registers,
            ),
            (("num_warps", 4),),
            (spec.dtype, aligned),
            tuple(
                _box(x.shape, x.stride(), x.dtype, spec.layout, high)
                for x, high in ((q, rows), (k, keys), (v, keys), (out, rows))
            ),
        )  # fmt: skip
    steps = [*strides(q, spec.layout), *strides(k, spec.layout)]
    steps += [*strides(v, spec.layout), *strides(out, spec.layout)]
    return Launch(
        _PLAIN,
        (tiles,),
        [*steps, *sizes],
        (
            tile.block_m, tile.block_n, spec.head_dim, spec.causal,
            spec.kv_len % tile.block_n == 0, lite is not None,
            lite.geometry.vote_rows if lite is not None and soft else 0,
            has_do, lse is not None, _sign(spec.scale), rounding, q.device.type == "cpu",
        ),
        (("num_warps", tile.warps), ("num_stages", tile.stages)),
        (spec.dtype, alignments(q, k, v, out), aligned, tuple(map(kind, steps))),
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
