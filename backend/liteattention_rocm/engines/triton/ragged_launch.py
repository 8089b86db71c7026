"""Launches of the ragged kernels, bound to all of a call but addresses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from triton import knobs

from ...contract import (
    LOG2E,
    RaggedRequest,
    RaggedTensors,
    WriteRequest,
    WriteTensors,
    page_strides,
    slot_beyond,
)
from ..environment import architecture, converts_fp8
from ..workspace import raw_stream
from . import hopper, hopper_ragged, hopper_ragged_load, kernels, ragged, ragged_cut, tiles
from .boxes import box, hopper_reasons
from .compiled_tiles import HopperTile
from .launch import CHAINED, BoundCall, Kernel, Launch, abreast, alignments, chains, kind, on
from .ragged_cut import Cut, columns_of, width
from .versions import compiles_hopper

_ATTENTION = Kernel(ragged.attention)
_PROMPTS = Kernel(hopper_ragged.attention)
_MERGE = Kernel(ragged.merge)
_WIDEN = Kernel(ragged.widen)
_WRITE = Kernel(ragged.write_kv)

#: Fewest tokens that a copy must bring: 8 rows of 128 bytes are what the swizzle repeats after.
LEAST_PIECE = 8
#: Rows from which on the keys of an fp8 cache are copied as 16-bit numbers for the kernel of
#: prompts, most bytes of such copies, and tokens of their pages, the K block of that kernel. A copy
#: takes as long as some hundred rows gain by it.
_WIDENED_ROWS, _WIDENED_MOST, _WIDENED_PAGE = 256, 1 << 30, 128
#: Bits of mantissa of the fp8 types of a cache, OCP's.
FP8_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
#: Numbers of partial results that a warp of the merge holds.
_MERGED_BY_WARP = 1024


class Prompts(NamedTuple):
    """The launch of requests of ``shortest`` rows or more, and the parts of a tile at most."""

    launch: Launch
    shortest: int
    parts: int


def prompts(
    request: RaggedRequest, like: RaggedTensors, tile: HopperTile | None = None
) -> Prompts | None:
    """The launch of :func:`.hopper_ragged.attention` for the long requests of a step on Hopper.

    ``tile``: other than that of :func:`.tiles.prompts`. None if there are none, without ``tile`` if
    all have few keys, or if the copy engine cannot gather their keys: fp8 caches, which are
    widened, pages of which less than 8 tokens lie together, and rows that are not aligned.
    """
    if (
        request.max_q_len < ragged_cut.SHORTEST_PROMPT
        or (tile is None and request.max_kv_len <= ragged_cut.few_keys(request.head_dim))
        or knobs.runtime.interpret  # it knows no Gluon
        or request.kv_dtype != request.dtype
        or architecture(request.device) != "sm_90"
        or not compiles_hopper()
    ):
        return None
    columns = columns_of(request.head_dim)
    tile = tile or tiles.prompts(request, columns)
    piece = math.gcd(request.page_size, tile.block_n)  # of no page, a whole block
    views = _views(like, request.page_size > 0)
    if piece < LEAST_PIECE or not all(x.numel() for x in views) or hopper_reasons(*views):
        return None
    high = (hopper.WARPGROUP_ROWS, columns)
    heights = (high, (piece, hopper_ragged_load.COLUMNS), (piece, hopper_ragged_load.COLUMNS))
    each, numbers = ragged_cut.numbers_of(request, tile)
    shortest = ragged_cut.shortest(request)
    out_step = page_strides(like.out)[1:]
    table = like.q_start if like.page_table is None else like.page_table
    scale = request.scale * request.k_scale
    sign = (scale > 0) - (scale < 0)
    steps = (*out_step, table.stride(0))
    group = request.q_heads // request.kv_heads
    span = group
    if tile.abreast:
        span = abreast(request.q_heads, group, 4 * columns * request.max_kv_len)
    parts = ragged_cut.prompt_parts(request, tile)
    programs = numbers * request.q_heads * parts
    counted = tile.counted and parts == 1
    launch = Launch(
        _PROMPTS,
        (min(programs, ragged_cut.units_of(request.device)) if counted else programs,),
        (
            *steps, request.requests, numbers, each, shortest, request.q_heads, group, span,
            *_sight(request), request.rows, parts, ragged_cut.PROMPT_PART_BLOCKS, scale * LOG2E,
            request.soft_cap, request.v_scale,
        ),
        (
            tile.groups, tile.block_n, request.head_dim, columns, piece, request.page_size,
            tile.stages, request.lookahead is not None, request.window > 0, request.soft_cap > 0,
            request.sinks, request.return_lse, tile.turns, tile.late_wait, sign,
            kernels.ROUNDING[request.rounding], tile.registers, tile.loader_registers, counted,
            request.scale_tensors, parts > 1,
        ),
        (("num_warps", 4),),
        (request.dtype, alignments(*like), tuple(map(kind, steps))),
        tuple(
            box(x.shape, x.stride(), x.dtype, "bshd", *high)
            for x, high in zip(views, heights, strict=True)
        ),
        4 if counted else 0,
    )  # fmt: skip
    return Prompts(launch, shortest, parts)


def _views(t: RaggedTensors, paged: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as [1 or pages, tokens, heads, D]."""
    if paged:
        return t.q[None], t.k, t.v
    return t.q[None], t.k[None], t.v[None]


class Widened:
    """Copies of an fp8 cache as 16-bit numbers: how they are made, and where they lie.

    ``request`` is the call that reads them. ``size``: bytes of a workspace, which holds the keys,
    the values and, at ``table_at``, the page table.
    """

    def __init__(self, request: RaggedRequest, like: RaggedTensors) -> None:
        self._pages = -(-request.max_kv_len // _WIDENED_PAGE)
        count = request.requests * self._pages
        self._shape = (count, _WIDENED_PAGE, request.kv_heads, request.head_dim)
        self._table = (request.requests, self._pages)
        self._bytes = 2 * math.prod(self._shape)
        self.table_at = 2 * self._bytes
        self.size = self.table_at + 4 * count
        self._dtype = request.dtype
        self.request = replace(request, kv_dtype=request.dtype, page_size=_WIDENED_PAGE)
        assert like.page_table is not None
        steps = (*page_strides(like.k), *page_strides(like.v), like.page_table.stride(0))
        self.launch = Launch(
            _WIDEN,
            (self._pages, request.requests, request.kv_heads),
            (*steps, self._pages, request.kv_heads, request.window),
            (
                _WIDENED_PAGE, request.head_dim, width(request.head_dim), request.page_size,
                request.window > 0, ragged_cut.shortest(request), request.scale_tensors,
                FP8_MANTISSA[request.kv_dtype], request.device.type == "cpu",
            ),
            (("num_warps", 8),),
            (request.dtype, request.kv_dtype, alignments(*like), tuple(map(kind, steps))),
        )  # fmt: skip

    def views(self, t: RaggedTensors, workspace: torch.Tensor | None = None) -> RaggedTensors:
        """The tensors of the call that reads the copies; without a workspace, only their shapes."""
        if workspace is None:
            workspace = torch.empty(self.size, dtype=torch.uint8, device="meta")
        sizes = [self._bytes, self._bytes, self.size - self.table_at]
        k, v, table = torch.split(workspace[: self.size], sizes)
        return t._replace(
            k=k.view(self._dtype).view(self._shape),
            v=v.view(self._dtype).view(self._shape),
            page_table=table.view(torch.int32).view(self._table),
        )


def _widened(request: RaggedRequest, like: RaggedTensors) -> Widened | None:
    """Copies of the cache for the kernel of prompts; None if they do not pay or are too large."""
    if (
        request.max_q_len < _WIDENED_ROWS
        or not request.page_size
        or not _words(request, like)
        or architecture(request.device) != "sm_90"
        or not compiles_hopper()
    ):
        return None
    made = Widened(request, like)
    return made if made.size <= _WIDENED_MOST else None


class _Room(NamedTuple):
    """Where partial results lie in a workspace, in bytes; each begins at a multiple of 16.

    fp32 outputs [splits, T, Hq, D] and log-sum-exps [splits, T, Hq], and how many parts each row
    has, int32 [T].
    """

    outputs: int
    sums: int
    counts: int
    end: int

    @classmethod
    def of(cls, begin: int, splits: int, rows: int, heads: int, head_dim: int) -> _Room:
        """Behind ``begin``, for T = ``rows``."""
        outputs = -(-begin // 16) * 16
        sums = outputs + 4 * splits * rows * heads * head_dim
        counts = sums + -(-4 * splits * rows * heads // 16) * 16
        return cls(outputs, sums, counts, counts + 4 * rows)

    def addresses(self, workspace: int) -> tuple[int, int, int]:
        """As the kernels take them."""
        return workspace + self.outputs, workspace + self.sums, workspace + self.counts

    def views(self, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as tensors."""
        return (
            workspace[self.outputs : self.sums].view(torch.float32),
            workspace[self.sums : self.counts].view(torch.float32),
            workspace[self.counts : self.end].view(torch.int32),
        )


class Attention(BoundCall):
    """A ragged call: prompts on Hopper, requests of few rows beside longer ones, what is left.

    ``tile``: of prompts, other than the chosen one. With splits, a launch writes partial results
    that a further one merges. Of prompts they have a room of their own in the workspace; of the
    other launches of a step one has splits at most. If those are of requests of few rows beside
    longer ones, T of :class:`_Room` is the number of requests times the most rows.
    """

    def __init__(
        self, request: RaggedRequest, like: RaggedTensors, tile: HopperTile | None = None
    ) -> None:
        request = _without_idle_bounds(request, like)
        found, wide = prompts(request, like, tile), None
        if found is None:
            wide = _widened(request, like)
            if wide is not None:
                found = prompts(wide.request, wide.views(like), tile)
        self._wide = None if found is None else wide
        below = 0 if found is None else found.shortest
        steps: list[Cut] = []
        self._attend: list[Launch] = []
        if below != 1:  # else nothing is left
            rest = ragged_cut.cut(request, below)
            short = ragged_cut.cut_short(request, rest)
            steps = [rest] if short is None else [rest, short]
            first = 0 if short is None else short.slots + 1
            self._attend.append(_attention(request, like, rest, first, below))
            if short is not None:
                self._attend.append(_attention(request, like, short, 0, first))
        heads = request.q_heads, request.head_dim
        # The copies come first, so that they are aligned.
        self._size = 0 if self._wide is None else self._wide.size
        self._merge: Launch | None = None
        self._room: _Room | None = None
        for step in steps:
            if step.splits > 1:
                rows = request.requests * step.slots or request.rows
                self._room = _Room.of(self._size, step.splits, rows, *heads)
                self._size = self._room.end
                self._merge = _merge(request, like, step.splits, slots=step.slots)
        self._long: Launch | None = None
        self._merge_long: Launch | None = None
        self._room_long: _Room | None = None
        if found is not None:
            self._long = found.launch
            if found.parts > 1:
                self._room_long = _Room.of(self._size, found.parts, request.rows, *heads)
                self._size = self._room_long.end
                self._merge_long = _merge(request, like, found.parts, first=found.shortest)
        self._words = _words(request, like) > 0
        self._paged = request.page_size > 0
        self._requests = request.requests
        launches = [*self._attend, self._merge, self._long, self._merge_long]
        launches += [] if self._wide is None else [self._wide.launch]
        super().__init__(request.device, *(x for x in launches if x is not None))

    def __call__(self, t: RaggedTensors) -> None:
        """Write attention of every row into ``out`` and ``lse``."""
        if not self._requests:
            return  # all rows are padding, and there is no length to look at
        if not self.ready:
            with on(self.device):
                self._start(t)
            return
        out = t.out.data_ptr()
        lse = out if t.lse is None else t.lse.data_ptr()
        sinks = out if t.sinks is None else t.sinks.data_ptr()
        q_start = t.q_start.data_ptr()
        table = q_start if t.page_table is None else t.page_table.data_ptr()
        k_scale = out if t.k_scale is None else t.k_scale.data_ptr()
        v_scale = out if t.v_scale is None else t.v_scale.data_ptr()
        parts = parts_long = (out, out, out)
        if self._size:
            # kept until everything is launched
            workspace = self.workspace(self._size)
            begin = workspace.data_ptr()
            if self._room is not None:
                parts = self._room.addresses(begin)
            if self._room_long is not None:
                parts_long = self._room_long.addresses(begin)
        stream = raw_stream(self.index)
        if self._long is not None:
            read, pages = t, table
            if self._wide is not None:
                read = self._wide.views(t, workspace)
                pages = begin + self._wide.table_at
                self._wide.launch(
                    stream, (),
                    (
                        t.k.data_ptr(), t.v.data_ptr(), read.k.data_ptr(), read.v.data_ptr(), pages,
                        q_start, t.keys.data_ptr(), table, k_scale,
                    ),
                )  # fmt: skip
            counters = self.counters(4) if self._long.counters else [t.q_start, t.q_start]
            now, later = (counter.data_ptr() for counter in counters)
            self._long(
                stream, _views(read, self._paged),
                (
                    out, lse, sinks, q_start, t.keys.data_ptr(), pages, now, later, k_scale,
                    v_scale, *parts_long,
                ),
            )  # fmt: skip
            if self._long.counters:
                self.keep(counters)
        pointers = (
            t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), out, lse, sinks, *parts, q_start,
            t.keys.data_ptr(), table, k_scale, v_scale,
        )  # fmt: skip
        for attend in self._attend:
            attend(stream, (), pointers)
        if self._merge is not None:
            self._merge(stream, (), (*parts, out, lse, sinks, q_start))
        if self._merge_long is not None:
            self._merge_long(stream, (), (*parts_long, out, lse, sinks, q_start))

    def _start(self, t: RaggedTensors) -> None:
        lse = t.out if t.lse is None else t.lse
        sinks = t.out if t.sinks is None else t.sinks
        table = t.q_start if t.page_table is None else t.page_table
        k_scale = t.out if t.k_scale is None else t.k_scale
        v_scale = t.out if t.v_scale is None else t.v_scale
        k, v = (x.view(torch.int16) if self._words else x for x in (t.k, t.v))
        workspace = self.workspace(self._size)
        parts, parts_long = (
            (t.out, t.out, t.q_start) if room is None else room.views(workspace)
            for room in (self._room, self._room_long)
        )
        if self._long is not None:
            read, pages = t, table
            if self._wide is not None:
                read = self._wide.views(t, workspace)
                assert read.page_table is not None
                pages = read.page_table
                self._wide.launch.start(
                    (), (k, v, read.k, read.v, pages, t.q_start, t.keys, table, k_scale)
                )
            counters = self.counters(4) if self._long.counters else [t.q_start, t.q_start]
            pointers = (
                t.out, lse, sinks, t.q_start, t.keys, pages, *counters, k_scale, v_scale,
                *parts_long,
            )  # fmt: skip
            self._long.start(_views(read, self._paged), pointers)
            if self._long.counters:
                self.keep(counters)
        for attend in self._attend:
            attend.start(
                (),
                (t.q, k, v, t.out, lse, sinks, *parts, t.q_start, t.keys, table, k_scale, v_scale),
            )
        if self._merge is not None:
            self._merge.start((), (*parts, t.out, lse, sinks, t.q_start))
        if self._merge_long is not None:
            self._merge_long.start((), (*parts_long, t.out, lse, sinks, t.q_start))


def _without_idle_bounds(request: RaggedRequest, like: RaggedTensors) -> RaggedRequest:
    """The same call without a window or a lookahead that hides nothing; causality stays.

    What is left lies within the lengths, so that kernels add it to a position in 32 bits: 2^31 - 1
    before a row that sees no key would overflow. Bounds may be larger than what there is.
    """
    if like.page_table is None:
        keys = like.k.shape[0]
    else:
        keys = like.page_table.shape[1] * request.page_size
    if request.window >= min(request.max_kv_len, keys):
        request = replace(request, window=0)
    # The first row of a request sees its last key.
    if request.lookahead and request.lookahead >= min(request.max_q_len, request.rows) - 1:
        request = replace(request, lookahead=None)
    return request


def _sight(request: RaggedRequest) -> tuple[int, int]:
    """Window and lookahead as kernels take them: the window counts from the last key ahead."""
    ahead = request.lookahead or 0
    return request.window + ahead if request.window else 0, ahead


def _attention(
    request: RaggedRequest, like: RaggedTensors, step: Cut, first: int, below: int
) -> Launch:
    """The launch of :func:`.ragged.attention` for requests of ``first`` rows to ``below`` - 1."""
    table = like.q_start if like.page_table is None else like.page_table
    q_step, out_step = page_strides(like.q)[1:], page_strides(like.out)[1:]
    steps = (*q_step, *page_strides(like.k), *page_strides(like.v), *out_step, table.stride(0))
    tiles = request.requests
    if step.slots:
        tiles *= step.slots // step.tile_rows
    elif not step.one_tile:
        tiles += request.rows // step.tile_rows
    return Launch(
        _ATTENTION,
        (tiles, request.kv_heads, step.splits),
        (
            *steps, request.requests, request.q_heads, request.q_heads // request.kv_heads,
            *_sight(request), request.rows, step.splits, step.part_blocks,
            request.scale * request.k_scale * LOG2E, request.soft_cap, request.v_scale,
        ),
        (
            step.tile_rows, step.group, step.block_n, request.head_dim, width(request.head_dim),
            step.splits > 1, step.one_tile, request.page_size, request.lookahead is not None,
            request.window > 0, request.soft_cap > 0, request.sinks, request.return_lse,
            kernels.ROUNDING[request.rounding], request.device.type == "cpu",
            chains(request.device) and step.splits > 1, first, below, step.slots,
            request.scale_tensors, _words(request, like),
        ),
        (("num_warps", step.warps), ("num_stages", step.stages)),
        (request.dtype, request.kv_dtype, alignments(*like, like.out), tuple(map(kind, steps))),
    )  # fmt: skip


def _words(request: RaggedRequest, like: RaggedTensors) -> int:
    """Bits of mantissa of an fp8 cache that is read in words of two columns; 0: it is not.

    The instructions are NVIDIA's. Words lie at even addresses.
    """
    steps = (*page_strides(like.k), *page_strides(like.v))
    aligned = all(alignments(like.k, like.v)) and not any(step % 2 for step in steps)
    if not aligned or torch.version.hip is not None or not converts_fp8(request.device):
        return 0
    return FP8_MANTISSA.get(request.kv_dtype, 0)


def _merge(
    request: RaggedRequest, like: RaggedTensors, splits: int, *, slots: int = 0, first: int = 0
) -> Launch:
    """The launch of :func:`.ragged.merge` for ``splits`` parts at most.

    ``slots``: of requests of so many rows at most, 0: of all. ``first``: of requests of so many
    rows or more, whose parts the kernel of prompts has left.
    """
    out_step = page_strides(like.out)[1:]
    columns, parts = width(request.head_dim), 1 << (splits - 1).bit_length()
    chained = chains(request.device) and not first  # that kernel lets nobody begin early
    return Launch(
        _MERGE,
        (request.requests if slots else request.rows, request.q_heads),
        (*out_step, request.requests, request.q_heads, request.rows),
        (
            parts, request.head_dim, columns, request.sinks, request.return_lse,
            kernels.ROUNDING[request.rounding], chained, slots, first,
        ),
        (
            ("num_warps", min(max(parts * columns // _MERGED_BY_WARP, 1), 8)),
            *(CHAINED if chained else ()),
        ),
        (request.dtype, alignments(*like, like.out), tuple(map(kind, out_step))),
    )  # fmt: skip


class Write(BoundCall):
    """A copy of new rows into the cache, as fp8 if it is one: one launch."""

    def __init__(self, request: WriteRequest, like: WriteTensors) -> None:
        self._request = request
        k_step, v_step = page_strides(like.k)[1:], page_strides(like.v)[1:]
        steps = (*k_step, *v_step, *page_strides(like.k_cache), *page_strides(like.v_cache))
        self._launch = Launch(
            _WRITE,
            (request.rows, request.kv_heads),
            (*steps, request.page_size, request.k_scale, request.v_scale),
            (
                request.head_dim, width(request.head_dim), FP8_MANTISSA.get(request.kv_dtype, 0),
                request.scale_tensors,
            ),
            (("num_warps", 1),),
            (
                request.dtype, request.kv_dtype, like.slots.dtype, alignments(*like),
                tuple(map(kind, steps)),
            ),
        )  # fmt: skip
        super().__init__(request.device, self._launch)

    def __call__(self, t: WriteTensors) -> None:
        """Write the rows; in the interpreter, none if a slot lies beyond the cache."""
        if not self._request.rows:
            return
        if self.ready:
            launch, stream = self._launch, raw_stream(self.index)
            k_scale = t.slots if t.k_scale is None else t.k_scale
            v_scale = t.slots if t.v_scale is None else t.v_scale
            launch(stream, (), tuple([x.data_ptr() for x in (*t[:5], k_scale, v_scale)]))
            return
        error = slot_beyond(t, self._request) if self.index < 0 else None
        if error is not None:
            raise error
        with on(self.device):
            if self._request.kv_dtype in FP8_MANTISSA:
                # The kernel makes the bits itself, as not every GPU has such conversions.
                t = t._replace(
                    k_cache=t.k_cache.view(torch.uint8), v_cache=t.v_cache.view(torch.uint8)
                )
            k_scale = t.slots if t.k_scale is None else t.k_scale
            v_scale = t.slots if t.v_scale is None else t.v_scale
            self._launch.start((), (*t[:5], k_scale, v_scale))
