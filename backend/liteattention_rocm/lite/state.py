"""What one layer and branch of a generation remember from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..contract import TileGeometry
from ..remembered import Call, Calls
from . import bitmap, budget
from .counting import Count, CountReader
from .deal import Deal
from .policy import Limit, Schedule, SkipPolicy


class Shape(NamedTuple):
    """What lists of a state fit; a call with another shape starts over."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    geometry: TileGeometry


class Tiles:
    """The full list, masks and budgets by head of one shape, on its device; never written to.

    Key: shape and ranges of the policy. Owner: the states of that shape, which share it. Lifetime:
    until the last is gone.
    """

    def __init__(self, shape: Shape, policy: SkipPolicy) -> None:
        #: What the masks were made of.
        self.ranges = (policy.must_do, policy.must_skip)
        tile = shape.geometry
        q_blocks, k_blocks = tile.q_blocks(shape.q_len), tile.k_blocks(shape.kv_len)
        must_do = must_skip = None
        if policy.must_do or policy.must_skip:
            must_do, must_skip = policy.key_masks(shape.kv_len, tile.k_block)
        skipped = 0 if must_skip is None else int(bitmap.count(must_skip))
        with torch.inference_mode(False):
            # Lists outlive the call: made in inference mode, they could not be written outside it.
            self.full = bitmap.full(shape.batch, shape.q_heads, q_blocks, k_blocks, shape.device)
            self.must_do = None if must_do is None else must_do.to(shape.device)
            self.must_skip = None if must_skip is None else must_skip.to(shape.device)
        self.full_count = shape.batch * shape.q_heads * q_blocks * (k_blocks - skipped)
        self._limits: dict[tuple[float, ...], torch.Tensor] = {}

    def limits(self, budgets: tuple[float, ...]) -> torch.Tensor:
        """Budgets by head as engines take them, on the device; made once."""
        found = self._limits.get(budgets)
        if found is None:
            with torch.inference_mode(False):
                found = self._limits[budgets] = budget.limits(budgets, self.full.device)
        return found

    def buffer(self) -> torch.Tensor:
        """A new list with undefined contents."""
        with torch.inference_mode(False):
            return torch.empty_like(self.full)


#: What may be dropped and whether the walk descends; None for dense attention.
Kind = tuple[Limit, bool] | None


class Plan(NamedTuple):
    """What calls of a state have in common that differ in step and addresses alone.

    ``tiles`` is the number of all tiles. ``calls`` are bound, or it is None: the dispatcher has to
    see every call. ``lse_shape`` is None if no LSE is wanted. ``policy`` and ``geometry`` are those
    that it was made with. ``tallies`` says whether the engine counts tiles.
    """

    schedule: Schedule
    tiles: int
    calls: dict[Kind, Call] | None
    tallies: bool
    scale: float
    lse_shape: tuple[int, int, int] | None
    policy: SkipPolicy
    geometry: TileGeometry | None


class Turn(NamedTuple):
    """What a call of one step reads, writes and drops.

    ``limit`` is None in steps that the policy makes dense, ``kind`` also where dense attention is
    the same. ``read`` and ``write`` are lists, None in dense steps. ``computed`` and ``kept`` are
    numbers of tiles where nobody has to count them. ``limits`` are budgets by head, on the device.
    """

    limit: Limit | None
    kind: Kind
    read: torch.Tensor | None
    write: torch.Tensor | None
    computed: Count
    kept: Count
    tiles: Tiles | None
    descending: bool | None
    limits: torch.Tensor | None = None

    @property
    def depends(self) -> tuple[Any, ...]:
        """What the launches of this turn depend on: its kind, and where lists and masks lie."""
        if self.write is None or self.tiles is None:
            return (self.kind,)
        tiles = self.tiles
        held = (
            self.read, self.write, tiles.full, tiles.must_do, tiles.must_skip, self.limits,
        )  # fmt: skip
        return (self.kind, *(0 if one is None else one.data_ptr() for one in held))


@dataclass(slots=True, eq=False)
class State:
    """Lists of one layer and branch (or of all branches, where they share) in one generation.

    Key: (generation, layer, branch). Owner: :class:`~liteattention_rocm.LiteAttention`. Lifetime:
    until the generation ends, is reset or evicted, or a call of another shape replaces it.

    ``read`` is the list of ``lite_step``, the LiteAttention step under way or done last (None is
    the full list). Every branch has a list of its own in ``writes``, so calling a branch again in
    a step replaces its votes and leaves those of other branches alone. ``started`` names the
    branches called in ``lite_step``, ``counts`` those that returned, with their number of tiles.
    ``full`` names the branches whose list of ``lite_step`` has every tile, for all that the host
    knows; ``read_full`` says it of ``read``. ``read_count`` is None while nobody has counted it.
    ``ordinal`` counts the LiteAttention steps executed before ``lite_step``. ``step`` is the last
    step of any kind, dense ones included: it tells a new generation from the old one. ``deal`` says
    which heads of a whole model these are, where ranks share them otherwise than in their order
    (:mod:`.deal`).
    """

    shape: Shape
    step: int
    tiles: Tiles | None = None
    lite_step: int = -1
    ordinal: int = 0
    read: torch.Tensor | None = None
    read_count: Count | None = 0
    read_full: bool = True
    writes: dict[str, torch.Tensor] = field(default_factory=dict)
    spare: list[torch.Tensor] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    counts: dict[str, Count] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    plans: Calls = field(default_factory=Calls)
    deal: Deal | None = None

    @property
    def complete(self) -> bool:
        """Whether ``lite_step`` counts: calls of it returned, and none of them failed."""
        return bool(self.counts) and self.started == self.counts.keys()

    def advance(self, step: int) -> None:
        """Begin a later step: what was written becomes what is read; hold the lock.

        A step in which a call failed leaves an unfinished list behind; the list read before holds
        every tile that it could have kept, so it is read again and the step does not count.
        """
        if self.counts and self.started == self.counts.keys():  # `complete`, a function less
            first, *others = self.counts
            merged = self.writes.pop(first)
            if self.read is not None:
                self.spare.append(self.read)
            self.read = merged
            self.read_count = self.counts[first]
            self.read_full = bool(self.full)
            if others:
                for branch in others:
                    merged.bitwise_or_(self.writes[branch])
                self.read_count = None
            self.ordinal += 1
        self.started.clear()
        self.counts.clear()
        self.full.clear()
        self.lite_step = step

    def take_turn(
        self, tiles: Tiles, schedule: Schedule, step: int, branch: str
    ) -> tuple[torch.Tensor, torch.Tensor, Count | None, bool, bool]:
        """Begin a call of a LiteAttention step; hold the lock.

        Returns the list to read, the one to write, the number of tiles in the first (None if nobody
        counted them), whether it is known to hold all tiles, and whether it is walked downwards.
        The votes of the call do not count until it is in ``counts``.
        """
        if step > self.lite_step:
            self.advance(step)
        self.started.add(branch)
        self.counts.pop(branch, None)
        self.full.discard(branch)
        spare = self.spare
        write = self.writes.get(branch)
        if write is None:
            if not spare and self.read is None:
                # In the order of their addresses, as `restart` leaves them.
                spare += sorted((tiles.buffer(), tiles.buffer()), key=torch.Tensor.data_ptr)
            write = self.writes[branch] = spare.pop() if spare else tiles.buffer()
        if self.read is None and not spare:
            # For the step after the first, so that later calls of this branch allocate nothing.
            spare.append(tiles.buffer())
        read, computed, whole = self.read, self.read_count, self.read_full
        retest = schedule.retest_every
        if read is None or (retest and self.ordinal % retest == 0):
            read, computed, whole = tiles.full, tiles.full_count, True
        descending = schedule.descending[self.ordinal % 2]
        return read, write, computed, whole and tiles.must_skip is None, descending

    def restart(self, step: int) -> None:
        """Forget what was learnt, keep the memory: the next step reads the full list."""
        self.step = step
        self.lite_step = -1
        self.ordinal = 0
        if self.read is not None:
            self.spare.append(self.read)
            self.read = None
        self.spare.extend(self.writes.values())
        # In one order, so that a graph captured in one generation finds its lists in the next.
        self.spare.sort(key=torch.Tensor.data_ptr)
        self.writes.clear()
        self.read_full = True
        self.started.clear()
        self.counts.clear()
        self.full.clear()
        self.deal = None

    def snapshot(self, number: CountReader) -> State:
        """Copy what the next call reads; votes of calls under way are left out, as if they failed.

        Work space and bound calls are left out, too: they are made again.
        """
        with torch.inference_mode(False):
            return replace(
                self,
                read=None if self.read is None else self.read.clone(),
                read_count=None if self.read_count is None else number(self.read_count),
                writes={branch: self.writes[branch].clone() for branch in self.counts},
                spare=[],
                started=set(self.started),
                counts={branch: number(count) for branch, count in self.counts.items()},
                full=set(self.full),
                plans=Calls(),
            )

    def adopt(self) -> None:
        """Fit a state that was copied or loaded to the device and the mode that it finds."""
        if self.tiles is not None:  # torch.load may have put the lists on another device
            self.shape = self.shape._replace(device=self.tiles.full.device)
        with torch.inference_mode(False):
            # What was made in inference mode could not be written outside it.
            if self.read is not None and self.read.is_inference():
                self.read = self.read.clone()
            for branch, written in self.writes.items():
                if written.is_inference():
                    self.writes[branch] = written.clone()

    def next_list(self) -> torch.Tensor | None:
        """Copy the list that a later step would read; None is the full list."""
        if not self.complete:
            return None if self.read is None else self.read.clone()
        first, *others = self.counts
        merged = self.writes[first].clone()
        for branch in others:
            merged.bitwise_or_(self.writes[branch])
        return merged
