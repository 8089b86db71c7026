"""LiteAttention over the steps of a generation: who reads which skip list, and when it advances.

The engines are stateless. What one denoising step learns about tiles that do not matter has to
reach the same layer and branch one step later, and nothing else; this module keeps that state.
Method: LiteAttention, arXiv 2511.11062.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast
from weakref import WeakValueDictionary

import torch

from . import dense, skiplist
from .contract import LAYOUTS, Layout, Rounding, TileGeometry
from .policy import SkipPolicy, plain_int

logger = logging.getLogger(__name__)

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Shape(NamedTuple):
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

    @property
    def tiles(self) -> int:
        return self.rows * self.geometry.k_blocks(self.kv_len)

    @property
    def rows(self) -> int:
        return self.batch * self.q_heads * self.geometry.q_blocks(self.q_len)


class _Tiles:
    """The full list and the packed masks of one shape, on its device; never written to.

    Key: shape. Owner: the states of that shape, which share it. Lifetime: until the last is gone.
    """

    def __init__(self, shape: _Shape, policy: SkipPolicy) -> None:
        tile = shape.geometry
        k_blocks = tile.k_blocks(shape.kv_len)
        must_do, must_skip = policy.key_masks(shape.kv_len, tile.k_block)
        skipped = 0 if must_skip is None else int(skiplist.count(must_skip))
        with torch.inference_mode(False):
            # Lists outlive the call: made in inference mode, they could not be written outside it.
            self.full = skiplist.full(
                shape.batch, shape.q_heads, tile.q_blocks(shape.q_len), k_blocks, shape.device
            )
            self.must_do = None if must_do is None else must_do.to(shape.device)
            self.must_skip = None if must_skip is None else must_skip.to(shape.device)
        self.full_count = shape.rows * (k_blocks - skipped)

    def buffer(self) -> torch.Tensor:
        """A new list with undefined contents."""
        with torch.inference_mode(False):
            return torch.empty_like(self.full)


@dataclass(slots=True, eq=False)
class _State:
    """Lists of one layer and branch (or of all branches, where they share) in one generation.

    Key: (generation, layer, branch). Owner: :class:`LiteAttention`. Lifetime: until the
    generation ends, is reset or evicted, or a call of another shape replaces it.

    ``read`` is the list of ``lite_step``, the LiteAttention step under way or done last (None is
    the full list). Every branch has a list of its own in ``writes``, so calling a branch again in
    a step replaces its votes and leaves those of other branches alone. ``started`` names the
    branches called in ``lite_step``, ``counts`` those that returned, with their number of tiles.
    ``full`` names the branches whose list of ``lite_step`` has every tile, for all that the host
    knows; ``read_full`` says it of ``read``. ``ordinal`` counts the LiteAttention steps executed
    before ``lite_step``. ``step`` is the last step of any kind, dense ones included: it tells a
    new generation from the old one.
    """

    shape: _Shape
    step: int
    tiles: _Tiles | None = None
    lite_step: int = -1
    ordinal: int = 0
    read: torch.Tensor | None = None
    read_count: int | skiplist.Counter = 0
    read_full: bool = True
    writes: dict[str, torch.Tensor] = field(default_factory=dict)
    spare: list[torch.Tensor] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    counts: dict[str, int | skiplist.Counter] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)

    def restart(self, step: int) -> None:
        """Forget what was learnt, keep the memory: the next step reads the full list."""
        self.step = step
        self.lite_step = -1
        self.ordinal = 0
        if self.read is not None:
            self.spare.append(self.read)
            self.read = None
        self.spare.extend(self.writes.values())
        self.writes.clear()
        self.read_full = True
        self.started.clear()
        self.counts.clear()
        self.full.clear()

    def complete(self) -> bool:
        """Say whether every branch called in ``lite_step`` returned, so that its votes count."""
        return bool(self.started) and self.started == self.counts.keys()

    def advance(self, step: int, statistics: skiplist.SkipStatistics) -> None:
        """Begin a later step: what was written becomes what is read.

        A step in which a call failed leaves an unfinished list behind; the list read before holds
        every tile that it could have kept, so it is read again and the step does not count.
        """
        if self.complete():
            first, *others = self.counts
            merged = self.writes.pop(first)
            if self.read is not None:
                self.spare.append(self.read)
            self.read = merged
            self.read_count = self.counts[first]
            self.read_full = bool(self.full & self.counts.keys())
            for branch in others:
                merged.bitwise_or_(self.writes[branch])
            if others:
                counter = statistics.counter(merged.device)
                statistics.count_tiles(merged, counter)
                self.read_count = counter
            self.ordinal += 1
        self.started.clear()
        self.counts.clear()
        self.full.clear()
        self.lite_step = step

    def begin(self, tiles: _Tiles, branch: str) -> torch.Tensor:
        """Return the list for ``branch`` to write; its votes do not count until it is in counts."""
        if self.tiles is None:
            self.tiles = tiles
        self.started.add(branch)
        self.counts.pop(branch, None)
        self.full.discard(branch)
        if branch not in self.writes:
            self.writes[branch] = self.spare.pop() if self.spare else tiles.buffer()
        if self.read is None and not self.spare:
            # For the step after the first, so that later calls of this branch allocate nothing.
            self.spare.append(tiles.buffer())
        return self.writes[branch]

    def snapshot(self, number: skiplist.CountReader) -> _State:
        """Copy what the next call reads; votes of calls under way are left out, as if they failed.

        Work space is left out, too: it is made again.
        """
        with torch.inference_mode(False):
            return replace(
                self,
                read=None if self.read is None else self.read.clone(),
                read_count=number(self.read_count),
                writes={branch: self.writes[branch].clone() for branch in self.counts},
                spare=[],
                started=set(self.started),
                counts={branch: number(count) for branch, count in self.counts.items()},
                full=set(self.full),
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
        if not self.complete():
            return None if self.read is None else self.read.clone()
        first, *others = self.counts
        merged = self.writes[first].clone()
        for branch in others:
            merged.bitwise_or_(self.writes[branch])
        return merged


class LiteAttention:
    """Self-attention that remembers from step to step which tiles did not matter.

    One object serves all layers of a model. Each call names the denoising ``step``, the
    ``layer``, the guidance ``branch`` and, where several run at once, the ``generation``.

    State: key (generation, layer, branch), or (generation, layer) if the policy shares branches;
    owner this object; lifetime until :meth:`end` or :meth:`reset` of the generation, or until
    ``max_generations`` more recently used generations push it out (logged as a warning; it would
    then start again from the full list). It advances by step, never by the number of calls:

    - the same step again reads the same list in the same direction and overwrites what that call
      wrote, so warm-up runs, autotuning and ``torch.compile`` calling twice change nothing;
    - a larger step reads what the last executed step wrote, however many steps lie between; the
      walking direction alternates by executed LiteAttention steps;
    - a smaller step is a new generation under an old name and starts from the full list, as does
      another shape, dtype, device or tile geometry;
    - a call that raises leaves no votes behind; calling its step again works, and so does going
      on (the step that failed then does not count).

    Steps that the policy makes dense run dense attention and keep the lists as they are. With
    shared branches, finish every branch of a step before the first call of the next.

    May be called from several threads as long as one (generation, layer, branch) is in one thread
    at a time. Nothing synchronises a GPU; nothing but the output is allocated after the first
    call of a layer and branch with a given shape. Under ``torch.compile`` a call is a graph break.

    A copy (shallow or deep) has lists and statistics of its own from then on, and so has what is
    loaded from a pickle or with ``torch.load``. Calls that another thread has under way are not in
    it. Making one waits for the device.

    Args:
        policy: see :class:`SkipPolicy`; the defaults if None.
        geometry: tile sizes; by default what the engine prefers for the head dimension.
        engine: name of the engine; by default chosen by the device.
        max_generations: how many generations may hold lists at once.

    Raises:
        TypeError, ValueError: listing every argument that is wrong.
    """

    def __init__(
        self,
        policy: SkipPolicy | None = None,
        *,
        geometry: TileGeometry | None = None,
        engine: str | None = None,
        max_generations: int = 8,
    ) -> None:
        reasons = []
        if policy is not None and not isinstance(policy, SkipPolicy):
            reasons.append(f"policy must be a SkipPolicy, got {type(policy).__name__}")
        if geometry is not None and not isinstance(geometry, TileGeometry):
            reasons.append(f"geometry must be a TileGeometry, got {type(geometry).__name__}")
        if engine is not None and not isinstance(engine, str):
            reasons.append(f"engine must be the name of an engine, got {type(engine).__name__}")
        max_generations = plain_int(max_generations)
        if type(max_generations) is not int:
            reasons.append(f"max_generations must be an integer, got {max_generations!r}")
        if reasons:
            raise TypeError("invalid LiteAttention: " + "; ".join(reasons))
        if max_generations < 1:
            raise ValueError(
                f"invalid LiteAttention: max_generations must be >= 1, got {max_generations}"
            )
        self.policy = SkipPolicy() if policy is None else policy
        self.geometry = geometry
        self.engine = engine
        self.max_generations = max_generations
        #: Tiles computed and kept by generation, step, layer and branch.
        self.statistics = skiplist.SkipStatistics()
        self._generations: OrderedDict[Hashable, dict[tuple[str, str], _State]] = OrderedDict()
        self._prepare()

    def _prepare(self) -> None:
        """Make what no copy takes along."""
        self._lock = threading.Lock()
        self._tiles: WeakValueDictionary[_Shape, _Tiles] = WeakValueDictionary()
        # Dynamo may trace a function more often than it runs; the state must see the runs only.
        disable = cast(Callable[..., Callable[..., _Result]], torch.compiler.disable)
        self._traced_call = disable(self._call)

    def __getstate__(self) -> dict[str, Any]:
        number = skiplist.CountReader()
        with self._lock:
            generations = OrderedDict(
                (generation, {key: state.snapshot(number) for key, state in states.items()})
                for generation, states in self._generations.items()
            )
            rest = {
                name: value
                for name, value in vars(self).items()
                if name not in ("_lock", "_tiles", "_traced_call")
            }
        return {**rest, "_generations": generations}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()
        for states in self._generations.values():
            for one in states.values():
                one.adopt()
                if one.tiles is not None:
                    self._tiles[one.shape] = one.tiles

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        layer: str,
        branch: str = "",
        generation: Hashable = 0,
        num_steps: int | None = None,
        layout: Layout = "bshd",
        scale: float | None = None,
        rounding: Rounding = "rtne",
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> _Result:
        """Attend, skipping the tiles that earlier steps found negligible.

        Args:
            q, k, v, layout, scale, rounding, return_lse, out: as in
                :func:`liteattention_rocm.attention`.
            step: index of the denoising step, from 0.
            layer: name of the layer; matched against the policy's ``layer_thresholds``.
            branch: name of the classifier-free-guidance branch; "" if there is one only or all
                are batched.
            generation: what tells concurrent generations apart; any hashable.
            num_steps: length of the schedule, needed by a policy whose ``last_step`` counts from
                the end.

        Returns:
            The attention output in q's shape and dtype, or ``(out, lse)`` with natural-log fp32
            [B, Hq, Sq].

        Raises:
            TypeError, ValueError: as :func:`liteattention_rocm.attention`, and for a wrong step,
                layer, branch, generation or num_steps, or token ranges that do not fit the keys.
        """
        call = self._traced_call if torch.compiler.is_compiling() else self._call
        return call(
            q,
            k,
            v,
            _Where(generation, step, layer, branch, num_steps),
            {
                "layout": layout,
                "scale": scale,
                "rounding": rounding,
                "return_lse": return_lse,
                "out": out,
                "engine": self.engine,
            },
        )

    def _call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        where: _Where,
        arguments: dict[str, Any],
    ) -> _Result:
        generation, step, layer, branch, num_steps = where.checked()
        shape = self._shape(q, k, arguments["layout"]) if self.policy.enabled else None
        if shape is None:
            # switched off, or tensors so wrong that the dense call is to say what is wrong
            return cast(_Result, dense.attention(q, k, v, **arguments))
        threshold = self.policy.threshold_at(step, layer, shape.kv_len, num_steps)
        key = (layer, "" if self.policy.branches == "shared" else branch)
        if threshold is None:
            with self._lock:
                state = self._enter(generation, key, shape, step, branch)
            result: _Result = dense.attention(q, k, v, **arguments)
            self._commit(generation, key, state)
            self.statistics.record(
                generation,
                step,
                layer,
                branch,
                tiles_total=shape.tiles,
                tiles_computed=shape.tiles,
                tiles_kept=shape.tiles,
                dense=True,
            )
            return result

        with self._lock:
            tiles = self._tiles.get(shape)
            if tiles is None:
                tiles = self._tiles[shape] = _Tiles(shape, self.policy)
            state = self._enter(generation, key, shape, step, branch)
            if step > state.lite_step:
                state.advance(step, self.statistics)
            ordinal = state.ordinal
            descending = self.policy.descends(ordinal)
            write = state.begin(tiles, branch)
            if state.read is None or self.policy.retests(ordinal):
                read, computed = tiles.full, cast(int | skiplist.Counter, tiles.full_count)
                full = True
            else:
                read, computed = state.read, state.read_count
                full = state.read_full
        full = full and threshold == -math.inf and tiles.must_skip is None
        if full:
            # The same as below, and the engine's dense kernel may divide the work otherwise.
            result = dense.attention(q, k, v, **arguments)
            write.copy_(tiles.full)
        else:
            result = dense.lite_attention(
                q,
                k,
                v,
                read,
                write,
                threshold=threshold,
                descending=descending,
                soft_skip=self.policy.soft_skip,
                must_do=tiles.must_do,
                must_skip=tiles.must_skip,
                geometry=shape.geometry,
                **arguments,
            )
        kept = self.statistics.counter(write.device)
        self.statistics.count_tiles(write, kept)
        with self._lock:
            state.counts[branch] = kept
            if full:
                state.full.add(branch)
        self._commit(generation, key, state)
        self.statistics.record(
            generation,
            step,
            layer,
            branch,
            tiles_total=shape.tiles,
            tiles_computed=computed,
            tiles_kept=kept,
            threshold=threshold,
            descending=descending,
        )
        return result

    def _shape(self, q: Any, k: Any, layout: Any) -> _Shape | None:
        """Sizes of a request, or None if the tensors are not even of the right kind."""
        if (
            not isinstance(q, torch.Tensor)
            or not isinstance(k, torch.Tensor)
            or q.dim() != 4
            or k.dim() != 4
            or layout not in LAYOUTS
            or 0 in q.shape
            or 0 in k.shape
        ):
            return None
        rows, heads = (1, 2) if layout == "bshd" else (2, 1)
        geometry = self.geometry
        if geometry is None:
            geometry = dense.default_geometry(q, self.engine)
        batch, _, _, head_dim = q.shape
        return _Shape(
            batch,
            q.shape[heads],
            k.shape[heads],
            q.shape[rows],
            k.shape[rows],
            head_dim,
            q.dtype,
            q.device,
            geometry,
        )

    def _enter(
        self,
        generation: Hashable,
        key: tuple[str, str],
        shape: _Shape,
        step: int,
        branch: str,
    ) -> _State:
        """Find the state of a call and bring it to ``step``; hold the lock.

        A state for another shape is left in the table until the call has succeeded
        (:meth:`_commit`), so that a call refused for its tensors costs nobody its lists.
        """
        states = self._generations.get(generation)
        if states is None:
            states = self._generations[generation] = {}
            while len(self._generations) > self.max_generations:
                evicted, _ = self._generations.popitem(last=False)
                logger.warning(
                    "LiteAttention holds lists of %d generations at most: dropped those of %r, "
                    "used longest ago; call end() when a generation is over or raise "
                    "max_generations",
                    self.max_generations,
                    evicted,
                )
        else:
            self._generations.move_to_end(generation)
        state = states.get(key)
        if state is None:
            state = states[key] = _State(shape, step)
        elif step < state.step:
            self._forget_records(generation, key)
            if state.shape == shape:
                state.restart(step)
            else:
                state = _State(shape, step)
        elif state.shape != shape:
            if step == state.lite_step and state.started and branch not in state.started:
                logger.warning(
                    "layer %r: branches that share skip lists came with different shapes in step "
                    "%d, so each starts from the full list: use branches='separate'",
                    key[0],
                    step,
                )
            state = _State(shape, step)
        state.step = step
        return state

    def _commit(self, generation: Hashable, key: tuple[str, str], state: _State) -> None:
        with self._lock:
            states = self._generations.get(generation)
            if states is not None and states.get(key) is not state:
                states[key] = state

    def _forget_records(self, generation: Hashable, key: tuple[str, str]) -> None:
        layer, branch = key
        self.statistics.discard(
            generation, layer, None if self.policy.branches == "shared" else branch
        )

    def lists(self, layer: str, branch: str = "", generation: Hashable = 0) -> torch.Tensor:
        """Return a copy of the list that the next step of a layer and branch starts from.

        int32 [B, Hq, q_blocks, words], see :mod:`liteattention_rocm.skiplist`. A step at which the
        policy re-tests walks the full list instead. Raises ``KeyError`` naming what there is if
        the generation, layer or branch holds no list.
        """
        key = (layer, "" if self.policy.branches == "shared" else branch)
        with self._lock:
            states = self._generations.get(generation)
            if states is None:
                raise KeyError(
                    f"no lists of generation {generation!r}: there are "
                    f"{list(self._generations) or 'none'}"
                )
            state = states.get(key)
            if state is None or state.tiles is None:
                known = [name for name, other in states.items() if other.tiles is not None]
                raise KeyError(
                    f"no list of layer {layer!r}, branch {branch!r} in generation "
                    f"{generation!r}: (layer, branch) pairs that have one are {known or 'none'}"
                )
            found = state.next_list()
            return state.tiles.full.clone() if found is None else found

    def reset(self, generation: Hashable | None = None) -> None:
        """Forget the lists and statistics of one generation, or of all when it is None."""
        with self._lock:
            if generation is None:
                self._generations.clear()
            else:
                self._generations.pop(generation, None)
            self.statistics.clear(generation)

    def end(self, generation: Hashable = 0) -> None:
        """Free the lists of a generation that is over; its statistics stay readable.

        A generation without lists is no error, so that clean-up code need not ask.
        """
        with self._lock:
            self._generations.pop(generation, None)


class _Where(NamedTuple):
    """What a call says about itself."""

    generation: Hashable
    step: int
    layer: str
    branch: str
    num_steps: int | None

    def checked(self) -> _Where:
        """Return it with plain integers; raise one error with every reason against it."""
        kinds, values = [], []
        step, num_steps = plain_int(self.step), plain_int(self.num_steps)
        if type(step) is not int:
            kinds.append(f"step must be an integer, got {type(step).__name__}: use int(step)")
        elif step < 0:
            values.append(f"step must be >= 0, got {step}")
        if not isinstance(self.layer, str):
            kinds.append(f"layer must be a string, got {type(self.layer).__name__}")
        elif not self.layer:
            values.append("layer must not be empty: it tells the lists of the layers apart")
        if not isinstance(self.branch, str):
            kinds.append(f"branch must be a string, got {type(self.branch).__name__}")
        if not _hashable(self.generation):
            kinds.append(f"generation must be hashable, got {self.generation!r}")
        elif self.generation is None:
            values.append("generation must not be None: reset(None) means all generations")
        elif not _equals_itself(self.generation):
            values.append(
                f"generation {self.generation!r} does not equal itself, so its lists would not be "
                "found again: use a number, a string or a tuple of them, without NaN"
            )
        if num_steps is not None:
            if type(num_steps) is not int:
                kinds.append(
                    f"num_steps must be an integer or None, got {type(num_steps).__name__}"
                )
            elif num_steps < 1:
                values.append(f"num_steps must be >= 1, got {num_steps}")
        if kinds or values:
            error = TypeError if kinds else ValueError
            raise error("invalid LiteAttention call: " + "; ".join([*kinds, *values]))
        return _Where(self.generation, step, self.layer, self.branch, num_steps)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:  # a tuple is Hashable, but not one that holds a list
        return False
    return True


def _equals_itself(value: Any) -> bool:
    """Say whether a copy of ``value`` would be found under it: not if there is a NaN in it."""
    if isinstance(value, tuple | frozenset):  # which compare identity first
        return all(_equals_itself(item) for item in value)
    return bool(value == value)
