"""Launches of the portable kernels: from tensors and a request to a grid.

A request is bound once (:class:`Attention`, :class:`LiteStep`): grid, tile, strides and the
compiled kernels. Calls then bring addresses only, which matters on the host: Triton finds
everything anew in each call, which takes five times as long. On NVIDIA GPUs they go to CUDA's
driver by themselves (:mod:`.short`), elsewhere through Triton's launcher.

Importing this module needs Triton. Nothing here waits for a device; workspaces come from PyTorch's
allocator, so calls can be captured in a graph and made from several streams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...contract import LOG2E, DenseRequest, DenseTensors, LiteRequest, LiteTensors, strides
from ...lite.budget import limit_of
from ..workspace import Workspaces, raw_stream
from . import hopper, kernels
from .boxes import box
from .compiled_tiles import HopperTile, PlainTile
from .short import short_launch

_WORD_BLOCK = 32  # K blocks in a bitmap word
_RANK_ROWS = 128  # lists that a program counts at a time when it ranks its own

_runtime: Any = knobs.runtime
_device: Any = getattr(torch._C, "_cuda_getDevice", None)


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
            sizes = (*grid, 1, 1)
            compiled[sizes](*arguments, *constants)
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


_LISTS = Kernel(kernels.plan)
_PLAIN = Kernel(kernels.attention)
_HOPPER = Kernel(hopper.attention)
#: Elements that fit into 32 bits.
_MOST_APART = (1 << 31) - 1


class Launch:
    """One launch of a kernel with all that stays from call to call: grid, sizes, compiled code.

    Its kernel takes tensors as boxes of the copy engine (``boxes``: all of their descriptors but
    the address, see :func:`box`), then pointers, then numbers, then constants.

    Key: the arguments of the constructor, made on the device that it will run on. Owner: a bound
    request.
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
        counters: int = 0,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = tuple(numbers)
        self._how = (constants, options, key)
        self._boxes = boxes
        #: Words of each of the two counters that it wants among its pointers, see
        #: :meth:`BoundCall.counters`; 0: none.
        self.counters = counters
        self._sizes = (*grid, 1, 1)[:3]
        self._rest = (*numbers, *constants)
        self._compiled: Any | None = None
        self._run: Any = None
        self._short: Any | None = None
        #: Whether it is compiled and takes addresses; never so in the interpreter.
        self.ready = False
        self._bind()

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
        elif self._short is None or not self._short(stream, boxed, addresses):
            compiled: Any = self._compiled
            self._run(
                *self._sizes, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *self._descriptors(boxed), *addresses, *self._rest,
            )  # fmt: skip

    def _bind(self) -> None:
        """Take the compiled form, if there is one, and the shortest way into it."""
        compiled = self._kernel.compiled(*self._how)
        if compiled is None:
            return
        self._run = compiled.run
        self._short = short_launch(compiled, self._sizes, self._boxes, self._rest)
        self._compiled = compiled
        self.ready = True

    def _descriptors(self, boxed: Sequence[torch.Tensor]) -> list[TensorDescriptor]:
        """[B, H, S, D] in boxes of rows of one head; rows past the end read as 0."""
        made = []
        for rest, tensor in zip(self._boxes, boxed, strict=True):
            found = object.__new__(TensorDescriptor)
            found.__dict__.update(rest)
            found.base = tensor
            made.append(found)
        return made


def _hooked() -> bool:
    """Whether a profiler (Proton) wants to hear of launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return (enter is not None and getattr(enter, "calls", True)) or (
        leave is not None and getattr(leave, "calls", True)
    )


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current, which is where Triton launches."""
    if device.type == "cpu" or device.index in (None, _current_device()):
        return nullcontext()
    return torch.cuda.device(device)


#: Scratch memory of LiteAttention steps and of ragged calls. Owner: this module.
workspaces = Workspaces()


class BoundCall:
    """A request bound to a device: launches, which are run where they can be, else started."""

    def __init__(self, device: torch.device, *launches: Launch) -> None:
        self.device = device
        self.index = -1 if device.type == "cpu" else device.index
        self._launches = launches

    @property
    def ready(self) -> bool:
        """Whether everything is compiled and the tensors' device is current."""
        return all([launch.ready for launch in self._launches]) and _device() == self.index

    def workspace(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes for the launches of one call."""
        stream = 0 if self.index < 0 else raw_stream(self.index)
        return workspaces.take(self.device, stream, size)

    def counters(self, words: int) -> list[torch.Tensor]:
        """Take two counters, see :meth:`.workspace.Workspaces.counters`."""
        stream = 0 if self.index < 0 else raw_stream(self.index)
        return workspaces.counters(self.device, stream, words)

    def keep(self, counters: list[torch.Tensor]) -> None:
        """Keep counters that a launch was given for the next one."""
        stream = 0 if self.index < 0 else raw_stream(self.index)
        workspaces.keep(self.device, stream, counters)


class Attention(BoundCall):
    """Dense attention in one tile, bound to all of a call but addresses.

    Make it on the device of the tensors; see :meth:`liteattention_rocm.contract.Engine.bind`.
    """

    def __init__(
        self, request: DenseRequest, tile: PlainTile | HopperTile, like: DenseTensors
    ) -> None:
        self._hopper = isinstance(tile, HopperTile)
        fixed = levels_stay(request, tile)
        self._launch = _attend(request, tile, like, fixed=fixed)
        self._again = _attend(request, tile, like, again=True) if fixed else None
        launches = (self._launch, self._again) if self._again else (self._launch,)
        super().__init__(request.device, *launches)

    def __call__(self, t: DenseTensors) -> None:
        """Write attention into ``out`` and ``lse``."""
        launch = self._launch
        if not self.ready:
            with on(self.device):
                lse = t.out if t.lse is None else t.lse
                if self._hopper:
                    words = launch.counters
                    counters = self.counters(words) if words else [t.out, t.out]
                    tensors = (lse, *3 * (t.out,), *counters, *7 * (t.out,))
                    launch.start(t[:4], tensors)
                    if self._again is not None:
                        self._again.start(t[:4], tensors)
                    if words:
                        self.keep(counters)
                else:
                    launch.start((), (*t[:4], lse) + 9 * (t.out,))
            return
        unused = t.out.data_ptr()
        sums = unused if t.lse is None else t.lse.data_ptr()
        stream = raw_stream(self.index)
        if self._hopper:
            if launch.counters:
                counters = self.counters(launch.counters)
                now, later = counters[0].data_ptr(), counters[1].data_ptr()
                pointers = (sums, *3 * (unused,), now, later, *7 * (unused,))
                launch(stream, t[:4], pointers)
                if self._again is not None:
                    self._again(stream, t[:4], pointers)
                self.keep(counters)
            else:
                launch(stream, t[:4], (sums, *12 * (unused,)))
        else:
            addresses = (t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), unused, sums)
            launch(stream, (), addresses + 9 * (unused,))


class LiteStep(BoundCall):
    """One LiteAttention step, bound as :class:`Attention` is: two launches and a workspace.

    ``plan`` lists the tiles of every q block in walking order, orders the q blocks or pieces of
    their lists (:func:`cut_for`) and clears what the attention kernel writes its votes or weights
    to, which walks them, chooses and counts.
    """

    def __init__(
        self, request: LiteRequest, tile: PlainTile | HopperTile, like: LiteTensors
    ) -> None:
        self._hopper = isinstance(tile, HopperTile)
        size = request.geometry
        q_blocks, k_blocks = size.q_blocks(request.q_len), size.k_blocks(request.kv_len)
        words = size.words(request.kv_len)
        rows = request.batch * request.q_heads * q_blocks
        weigh = request.budget > 0
        units = cut_for(request, tile, rows, k_blocks)
        goal, slots = cutting(rows, units)
        fixed = levels_stay(request, tile)
        # items: int16 [rows, K blocks]; counts and order: int32 [rows + slots]; the counter that
        # tiles are taken from, three words more, and two for each slot or for each list that may
        # be computed again; the tally, where the caller has none: int64 [2]; weights: int32
        # [rows, K blocks]; pieces of lists and their marks: fp32. Parts begin at multiples of 16
        # bytes.
        tiles = rows + slots
        pieces = tile.block_m * (slots * (request.head_dim + 3) + -(-slots // 2) * k_blocks)
        parts = (
            2 * rows * k_blocks, 4 * tiles, 4 * tiles, 16 + 8 * slots + 8 * tiles * fixed, 16,
            4 * rows * k_blocks * weigh, 4 * pieces,
        )  # fmt: skip
        self._parts = tuple(-(-part // 16) * 16 for part in parts)
        self._size = sum(self._parts)
        self._places = tuple(sum(self._parts[:i]) for i in range(len(parts)))
        # The dense order of the Hopper kernel descends; a step that keeps every tile is dense bit
        # for bit.
        descending = request.walks_down or (self._hopper and not request.drops)
        width = 1 << (words - 1).bit_length()
        self._plan = Launch(
            _LISTS,
            (rows,),
            (q_blocks, k_blocks, words, jointly(rows // q_blocks, q_blocks, request.device)),
            (
                width, _RANK_ROWS, descending, like.must_do is not None,
                like.must_skip is not None, weigh, units,
                1 << (rows - 1).bit_length() if units else 0, LEAST_PIECE, goal, slots,
                # Not where a step keeps every tile: it is dense bit for bit, pieces are not.
                request.drops, self._hopper and chains(request.device),
            ),
            (("num_warps", 1 if words <= 8 and not units else 4),),
            alignments(like.read, like.must_do, like.must_skip, like.write, like.tally),
        )  # fmt: skip
        self._attend = _attend(request, tile, like, slots, fixed)
        self._again = _attend(request, tile, like, again=True) if fixed else None
        again = (self._again,) if self._again else ()
        super().__init__(request.device, self._plan, self._attend, *again)

    def __call__(self, t: LiteTensors) -> None:
        """Compute the tiles in ``read``; write ``out``, ``lse``, the next bitmap and the tally."""
        if not self.ready:
            with on(self.device):
                self._start(t)
            return
        _, _, _, out, lse, read, write, must_do, must_skip, mass, tally, limits = t
        workspace = self.workspace(self._size)  # kept until everything is launched
        items = workspace.data_ptr()
        _, counts, order, counter, sums, weights, pieces = self._places
        counts, order, counter, weights, pieces = (
            items + counts, items + order, items + counter, items + weights, items + pieces
        )  # fmt: skip
        sums = items + sums if tally is None else tally.data_ptr()
        old, new, unused = read.data_ptr(), write.data_ptr(), out.data_ptr()
        do = old if must_do is None else must_do.data_ptr()
        skip = old if must_skip is None else must_skip.data_ptr()
        stream = raw_stream(self.index)
        self._plan(stream, (), (old, do, skip, items, counts, order, counter, new, weights, sums))
        lse_at = unused if lse is None else lse.data_ptr()
        mass_at = unused if mass is None else mass.data_ptr()
        limits_at = order if limits is None else limits.data_ptr()
        rest = (new, weights, mass_at, sums, do)
        if self._hopper:
            lists = (items, counts, order, counter, counter)
            addresses = (lse_at, *lists, *rest, pieces, limits_at)
            self._attend(stream, t[:4], addresses)
            if self._again is not None:
                self._again(stream, t[:4], addresses)
        else:
            q, k, v = t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr()
            self._attend(
                stream, (), (q, k, v, unused, lse_at, items, counts, order, *rest, limits_at)
            )

    def _start(self, t: LiteTensors) -> None:
        workspace = self.workspace(self._size)[: self._size]
        items, *rest = torch.split(workspace, list(self._parts))
        items = items.view(torch.int16)
        counts, order, counter, sums, weights, pieces = (part.view(torch.int32) for part in rest)
        tally = sums.view(torch.int64) if t.tally is None else t.tally
        do = t.read if t.must_do is None else t.must_do
        skip = t.read if t.must_skip is None else t.must_skip
        self._plan.start(
            (), (t.read, do, skip, items, counts, order, counter, t.write, weights, tally)
        )
        lse = t.out if t.lse is None else t.lse
        mass = t.out if t.mass is None else t.mass
        limits = order if t.limits is None else t.limits
        last = (t.write, weights, mass, tally, do)
        if self._hopper:
            lists = (items, counts, order, counter, counter)
            pointers = (lse, *lists, *last, pieces.view(torch.float32), limits)
            self._attend.start(t[:4], pointers)
            if self._again is not None:
                self._again.start(t[:4], pointers)
        else:
            self._attend.start((), (*t[:4], lse, items, counts, order, *last, limits))


def _attend(
    request: DenseRequest,
    tile: PlainTile | HopperTile,
    like: DenseTensors | LiteTensors,
    slots: int = 0,
    fixed: bool = False,
    again: bool = False,
) -> Launch:
    """Bind the attention kernel, which keeps ``slots`` pieces of lists that are cut.

    See :func:`.boxes.hopper_reasons` for Hopper, :mod:`.hopper_again` for ``fixed`` and ``again``.
    """
    lite = request if isinstance(request, LiteRequest) else None
    q_blocks = -(-request.q_len // tile.block_m)
    k_blocks = -(-request.kv_len // tile.block_n)
    tiles = q_blocks * request.batch * request.q_heads
    sizes = [
        request.q_heads, request.q_heads // request.kv_heads, request.q_len, request.kv_len,
        q_blocks, k_blocks, -(-k_blocks // _WORD_BLOCK), 0 if lite is None else
        limit_of(lite.budget), _log2_scale(request), _threshold(lite),
    ]  # fmt: skip
    soft = lite is not None and lite.soft_skip
    rounding = kernels.ROUNDING[request.rounding]
    votes = must_do = mass = tally = limits = None
    if isinstance(like, LiteTensors):
        votes, must_do, mass, tally = like.write, like.must_do, like.mass, like.tally
        limits = like.limits
    has_do = must_do is not None
    weigh = lite is not None and lite.budget > 0
    by_head = limits is not None
    aligned = alignments(like.lse, votes, must_do, mass, tally, limits)
    boxed = like[:4]
    if isinstance(tile, HopperTile):
        span = abreast(
            request.batch * request.q_heads, request.q_heads // request.kv_heads,
            kv_bytes(request),
        )  # fmt: skip
        rows, keys = hopper.WARPGROUP_ROWS, tile.block_n
        persistent = tile.persistent or again
        counters = 4 if tile.counted else 0
        chained = chains(request.device) and (lite is not None or fixed or again)
        if fixed and lite is None:
            counters = 4 + 2 * tiles  # which are noted, and flags
        return Launch(
            _HOPPER,
            (
                min(tiles + slots, multiprocessors(_current_device())) if persistent else tiles,
            ),
            [tiles, span, *sizes],
            (
                tile.groups, tile.block_n, request.head_dim, tile.stages, request.causal,
                lite is not None, soft, has_do, weigh, mass is not None, by_head,
                request.return_lse, tile.turns, tile.late_wait, _sign(request.scale), rounding,
                tile.registers, tile.loader_registers, tile.counted,
                tile.abreast and request.causal, slots,
                tile.late_exp, fixed, again, chained,
            ),
            (("num_warps", 4), *(CHAINED if chained and (again or lite is not None) else ())),
            (request.dtype, aligned),
            tuple(
                box(x.shape, x.stride(), x.dtype, request.layout, high, request.head_dim)
                for x, high in zip(boxed, (rows, keys, keys, rows), strict=True)
            ),
            counters,
        )  # fmt: skip
    steps = [step for x in boxed for step in strides(x, request.layout)]
    height = 1 << (tile.block_m - 1).bit_length()
    # Kernels take longer where this is a matter of 64 bits, and hardly any tensor is so wide.
    far = max(steps[1::3]) * max(height, tile.block_n) > _MOST_APART
    return Launch(
        _PLAIN,
        (tiles,),
        [*steps, *sizes],
        (
            height, tile.block_m, tile.block_n, request.head_dim,
            request.causal, request.kv_len % tile.block_n == 0, lite is not None,
            lite.geometry.vote_rows if lite is not None and soft else 0,
            has_do, weigh, mass is not None, by_head, request.return_lse, _sign(request.scale),
            rounding, request.device.type == "cpu", far,
        ),
        (("num_warps", tile.warps), ("num_stages", tile.stages)),
        (request.dtype, alignments(*boxed), aligned, tuple(map(kind, steps))),
    )  # fmt: skip


#: Tiles of a piece at least, or down to half as many where a fair share of all is less. It takes
#: the time of one or two to leave and to merge it. With 80 % skipped, uneven, pieces of 8 take
#: 0.047 ms in place of 0.063 at (1, 2, 6144, 128), where a share is 7 or 8, but 0.081 in place of
#: 0.065 at (1, 3, 8192, 128), where it is 19 (H200).
LEAST_PIECE = 16
#: Warpgroups, lists and K blocks of grids whose lists are cut. On an H200 that pays at D = 128 up
#: to 512 lists, and costs up to 7 % at 1,536, where every program reads the bitmap of all and heads
#: no longer take turns in the L2 cache. Three warpgroups lack the registers: 20 % slower. So at
#: D = 64 such grids have q blocks of 128 rows by default (:func:`.tiles.rows_of_lists`).
_CUT_GROUPS = (2,)
MOST_CUT = 640
_MOST_CUT_K_BLOCKS = 640


def cut_for(request: LiteRequest, tile: PlainTile | HopperTile, rows: int, k_blocks: int) -> int:
    """Multiprocessors that ``rows`` lists are cut for, or 0 if they all stay whole.

    Under ``soft_skip`` a tile must be decided where it is computed.
    """
    if not isinstance(tile, HopperTile) or not tile.persistent or request.soft_skip:
        return 0
    if tile.groups not in _CUT_GROUPS or rows > MOST_CUT:
        return 0
    if not 2 * LEAST_PIECE <= k_blocks <= _MOST_CUT_K_BLOCKS:
        return 0
    return multiprocessors(_current_device())


#: K blocks of walks at least in which levels stay.
_FIXED_K_BLOCKS = 32
#: Threshold at least of votes by weight, log2 units: what is above it must not be flushed to 0.
_LEAST_BY_WEIGHT = -100.0


def levels_stay(request: DenseRequest, tile: PlainTile | HopperTile) -> bool:
    """Whether rows keep the level of their first K block, see :mod:`.hopper_again`.

    The same for dense attention and for lists of any q blocks, so that those of a step that keeps
    every tile are dense bit for bit; rows of a tile that is computed again are so if both have q
    blocks of one height. Not for fp16, whose largest number soon is too small for a weight, nor in
    small grids, where a second launch counts and lists are cut. With three warpgroups not for
    finite thresholds below ``_LEAST_BY_WEIGHT`` either.
    """
    if not isinstance(tile, HopperTile) or request.causal or request.dtype != torch.bfloat16:
        return False
    if isinstance(request, LiteRequest):
        by_weight = tile.groups not in _CUT_GROUPS
        if request.soft_skip or (by_weight and -math.inf < request.threshold < _LEAST_BY_WEIGHT):
            return False
    low = _CUT_GROUPS[0] * hopper.WARPGROUP_ROWS
    lists = request.batch * request.q_heads * -(-request.q_len // low)
    return lists > MOST_CUT and request.kv_len > _FIXED_K_BLOCKS * tile.block_n


#: Option of a launch that begins before its predecessor in the stream has ended, if that lets it.
CHAINED = (("launch_pdl", True),)


def chains(device: torch.device) -> bool:
    """Whether the GPU starts a kernel before its predecessor ends, if that one lets it."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


#: Lists for each multiprocessor that are ordered together, see :func:`.kernels.plan`.
_JOINT = 4


def jointly(heads: int, q_blocks: int, device: torch.device) -> int:
    """Heads of all batches, the last ones, whose lists are ordered together; 1: none are.

    So many that the longest list that there can be is no longer than what each multiprocessor has
    to do, unless more than three quarters of their tiles are skipped.
    """
    units = MULTIPROCESSORS if device.type == "cpu" else multiprocessors(_current_device())
    return min(heads, -(-_JOINT * units // q_blocks))


def cutting(rows: int, units: int) -> tuple[int, int]:
    """How ``rows`` lists are cut for ``units`` multiprocessors: (eighths of a share, slots).

    Pieces aim at so many eighths of a fair share (:func:`.kernels.pieces_of`), and memory is kept
    for so many of them. Of few lists, each several shares long, small pieces balance better. With
    80 % skipped, uneven: 0.212 ms instead of 0.233 at (1, 1, 32760, 128), and of 384 lists 2 to 7 %
    less, at (1, 3, 16384, 64) 0.123 instead of 0.132 (H100). Of 512 they take up to 3 % longer.
    """
    return (4, 3 * units) if rows <= 3 * units else (6, 2 * units)


#: Bytes of keys and values that stay in the L2 cache of an H200 while workgroups walk them.
CACHED = 24 << 20


def kv_bytes(request: DenseRequest) -> int:
    """Bytes of the keys and values of one head, of 16 bits each."""
    return 4 * request.head_dim * request.kv_len


def abreast(heads: int, group: int, size: int) -> int:
    """Number of query heads whose tiles are computed side by side, of ``heads``.

    The tiles of one head differ in length if it is causal. Taken in turn from many heads, they go
    from the longest to the shortest, and the last ones fill the multiprocessors evenly (Graham
    1969). But the keys and values of those heads, ``size`` bytes for each ``group``, must stay in
    the L2 cache. So the heads are cut into as few sections of equal size as have that.
    """
    lanes = heads // group
    most = max(1, CACHED // max(1, size))
    return group * -(-lanes // -(-lanes // most))


#: Those of the H200, for requests on no GPU.
MULTIPROCESSORS = 132


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


def _log2_scale(request: DenseRequest) -> float:
    return abs(request.scale) * LOG2E if request.scale else 1.0


def _sign(scale: float) -> int:
    return (scale > 0) - (scale < 0)


def _threshold(lite: LiteRequest | None) -> float:
    """Threshold as the kernels take it: NaN, which nothing is below, keeps every tile."""
    if lite is None or lite.threshold == -math.inf:
        return math.nan
    return lite.threshold
