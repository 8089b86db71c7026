"""LiteAttention over the steps of a generation: who reads which skip list, and when it advances.

The engines are stateless. What one denoising step learns about tiles that do not matter has to
reach the same layer and branch one step later, and nothing else; :class:`LiteAttention` owns the
states that keep it. Method: LiteAttention, arXiv 2511.11062.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from typing_extensions import Self

from .. import dense, engines
from ..arguments import Reasons
from ..contract import Layout, Rounding, TileGeometry, dense_tensors, lite_tensors
from ..remembered import Call, bound_call, calls, recall
from . import bitmap
from .admission import WHAT, Given, Options, Where, admit, call_reasons, engine_request
from .counting import Count, CountReader, Noted, Noting, TileCounters
from .names import checked_names
from .once import warn_once
from .policy import SkipPolicy, plain_int
from .state import Kind, Plan, Shape, State, Tiles, Turn
from .statistics import MOST_PENDING, SkipStatistics

logger = logging.getLogger(__name__)

_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
    - a smaller step of any layer and branch is a new generation under an old name: all of them that
      are past it start from the full list, and their records go;
    - another shape, dtype, device or tile geometry starts from the full list, too;
    - a call that raises leaves no votes behind; calling its step again works, and so does going
      on (the step that failed then does not count).

    Steps that the policy makes dense run dense attention and keep the lists as they are. With
    shared branches, finish every branch of a step before the first call of the next.

    May be called from several threads as long as one (generation, layer, branch) is in one thread
    at a time. Nothing synchronises a GPU; nothing but the output is allocated after the first
    call of a layer and branch with a given shape. Under ``torch.compile`` a call is a graph break.
    A call is one step, and a CUDA graph of it would repeat that step: who captures one notes its
    calls (:meth:`noting`) and makes them again beside each replay (:meth:`begin_again`).

    A copy (shallow or deep) has lists and statistics of its own from then on, and so has what is
    loaded from a pickle or with ``torch.load``. Calls that another thread has under way are not in
    it. Making one waits for the device.

    Args:
        policy: see :class:`SkipPolicy`; the defaults if None.
        geometry: tile sizes; by default what the engine prefers for the head dimension and the
            number of rows.
        engine: name of the engine; by default chosen by the device.
        max_generations: how many generations may hold lists at once.

    Raises:
        TypeError, ValueError: listing every argument that is wrong.
    """

    _untraced: ClassVar[Callable[..., _Result] | None] = None

    def __init__(
        self,
        policy: SkipPolicy | None = None,
        *,
        geometry: TileGeometry | None = None,
        engine: str | None = None,
        max_generations: int = 8,
    ) -> None:
        wrong = Reasons()
        for name, given, kind, words in (
            ("policy", policy, SkipPolicy, "a SkipPolicy"),
            ("geometry", geometry, TileGeometry, "a TileGeometry"),
        ):
            if given is not None and not isinstance(given, kind):
                wrong.types.append(f"{name} must be {words}, got {type(given).__name__}")
        wrong.engine(engine)
        max_generations = plain_int(max_generations)
        if type(max_generations) is not int:
            wrong.types.append(f"max_generations must be an integer, got {max_generations!r}")
        elif max_generations < 1:
            wrong.values.append(f"max_generations must be >= 1, got {max_generations}")
        wrong.raise_for("LiteAttention")
        self.policy = SkipPolicy() if policy is None else policy
        self.geometry = geometry
        self.engine = engine
        self.max_generations = max_generations
        #: Tiles computed and kept by generation, step, layer and branch.
        self.statistics = SkipStatistics()
        self._generations: OrderedDict[Hashable, dict[tuple[str, str], State]] = OrderedDict()
        self._prepare()
        _warn_if_nothing_skips(self.policy)

    def _prepare(self) -> None:
        """Make what no copy takes along."""
        self._lock = threading.Lock()
        self._tiles: WeakValueDictionary[tuple[Shape, Any], Tiles] = WeakValueDictionary()
        self._counters = TileCounters()
        if LiteAttention._untraced is None:  # of no object: one would hold itself
            disable = cast(Callable[..., Callable[..., _Result]], torch.compiler.disable)
            LiteAttention._untraced = staticmethod(disable(_call))

    def __getstate__(self) -> dict[str, Any]:
        number = CountReader()
        with self._lock:
            generations = OrderedDict(
                (generation, {key: state.snapshot(number) for key, state in states.items()})
                for generation, states in self._generations.items()
            )
            made = ("_lock", "_tiles", "_counters")
            rest = {name: value for name, value in vars(self).items() if name not in made}
        return {**rest, "_generations": generations}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()
        for states in self._generations.values():
            for one in states.values():
                one.adopt()
                if one.tiles is not None:
                    self._tiles[one.shape, one.tiles.ranges] = one.tiles

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
        heads: tuple[int, ...] | None = None,
    ) -> _Result:
        """Attend, skipping the tiles that earlier steps found negligible.

        Args:
            q, k, v, layout, scale, rounding, return_lse, out: as in
                :func:`liteattention_rocm.attention`.
            step: index of the denoising step, from 0.
            layer: name of the layer; matched against the policy's ``layer_thresholds`` or
                ``layer_budgets``.
            branch: name of the classifier-free-guidance branch; "" if there is one only or all
                are batched.
            generation: what tells concurrent generations apart; any hashable.
            num_steps: length of the schedule, needed by a policy whose ``last_step`` counts from
                the end.
            heads: which query heads of the model q has, one after the other, where processes share
                them: different integers from 0. None: all of them. It matters for budgets by head
                only.

        Returns:
            The attention output in q's shape and dtype, or ``(out, lse)`` with natural-log fp32
            [B, Hq, Sq].

        Raises:
            TypeError, ValueError: as :func:`liteattention_rocm.attention`, and for a wrong step,
                layer, branch, generation, num_steps or heads, all in one error; else for a
                schedule, token ranges or budgets by head that do not fit the call.
        """
        if torch.compiler.is_dynamo_compiling():
            # Dynamo may trace a function more often than it runs; the state must see the runs only.
            assert self._untraced is not None
            return self._untraced(
                self, q, k, v, step=step, layer=layer, branch=branch, generation=generation,
                num_steps=num_steps, layout=layout, scale=scale, rounding=rounding,
                return_lse=return_lse, out=out, heads=heads,
            )  # fmt: skip
        given = (q, k, v, out)
        # All but the step and the addresses: what a plan depends on. It holds what the ids are of.
        options = (
            layout, scale, rounding, return_lse, num_steps, self.engine, id(self.geometry),
            id(self.policy), heads,
        )  # fmt: skip
        key = (layer, "" if self.policy.branches == "shared" else branch)
        state = plan = None
        with self._lock:
            try:
                state = self._generations[generation][key]
                self._generations.move_to_end(generation)
            except (KeyError, TypeError):  # the first of its kind, or wrong names
                pass
        if state is not None:
            _, plan = recall(state.plans, given, options)
            if (
                plan is not None
                and type(step) is int
                and state.step <= step < plan.schedule.end
                and step >= 0
                and type(branch) is str
            ):
                return self._run(state, plan, given, options, (generation, step, layer, branch))

        others = functools.partial(call_reasons, given, options, self.engine)
        step, num_steps = checked_names(generation, step, layer, branch, num_steps, others)
        if not self.policy.enabled:
            if heads is not None:
                others().raise_for(WHAT)
            result: _Result = dense.attention(q, k, v, **self._arguments(given, options))
            return result
        where = (generation, step, layer, branch)
        state, plan = self._plan(given, options, where, key, num_steps)
        result = self._run(state, plan, given, options, where)
        with self._lock:
            states = self._generations.get(generation)
            if states is not None:
                states[key] = state
        return result

    def _run(
        self, state: State, plan: Plan, given: Given, options: Options, where: Where
    ) -> _Result:
        """Attend in a step that may follow upon the state's, and enter what came of it."""
        q, k, v, out = given
        turn = self._begin(state, plan, where)
        kind, write, tiles = turn.kind, turn.write, turn.tiles
        noting = self._counters.noting
        block = None if noting is None else noting.block
        computed, kept = turn.computed, turn.kept
        counted = False
        lists: tuple[torch.Tensor | None, ...] = ()
        if kind is not None and tiles is not None:
            lists = (turn.read, write, tiles.must_do, tiles.must_skip, None, None, turn.limits)

        result: _Result
        if plan.calls is None:
            result = self._dispatch(state, kind, lists, given, options)
        else:
            target = torch.empty_like(q) if out is None else out
            shape = plan.lse_shape
            lse = None if shape is None else q.new_empty(shape, dtype=torch.float32)
            if lists and plan.tallies:
                if noting is None or block is None:
                    tally, computed, kept = self._counters.tally(q.device)
                else:
                    tally = block[len(noting.calls)]
                lists, counted = (*lists[:5], tally, lists[6]), True
            tensors = (lite_tensors if lists else dense_tensors)((q, k, v, target, lse, *lists))
            call = plan.calls.get(kind)
            if call is None:
                call = self._bind(state, plan, kind, tensors, given, options)
            if out is not None:
                call.claim(tensors[:9], WHAT)  # the tally is another one every time
            call.run(tensors)
            result = target if lse is None else (target, lse)

        if write is not None and tiles is not None:
            if kind is None:
                write.copy_(tiles.full)
            elif not counted and block is None:
                kept = self._counters.count(write)
        if noting is not None:
            noting.add(Noted(where[2], where[3], state.shape, plan), turn.depends)
        self._finish(state, plan, where, turn, computed, kept)
        return result

    def _begin(self, state: State, plan: Plan, where: Where) -> Turn:
        """Settle what a call reads, writes and drops; the same again for the same step."""
        _, step, _, branch = where
        schedule, limit, tiles = plan.schedule, None, state.tiles
        if schedule.first <= step <= schedule.last:  # schedule.limit(step), without a call
            limits = schedule.limits
            limit = limits[step] if step < len(limits) else limits[-1]
            policy = plan.policy
            if tiles is None or tiles.ranges != (policy.must_do, policy.must_skip):
                tiles = self._new_tiles(state, policy, step)
        with self._lock:
            state.step = step
            if tiles is None or limit is None:
                return Turn(limit, None, None, None, plan.tiles, plan.tiles, tiles, None)
            read, write, computed, whole, descending = state.take_turn(
                tiles, schedule, step, branch
            )
        kind: Kind = None
        if not whole or limit.threshold > -math.inf or limit.budget > 0:
            kind = (limit, descending)
        # else dense is the same, and the engine's kernel may divide the work otherwise
        # the tally of a bound call counts what it computes
        if computed is None and (kind is None or not plan.tallies or plan.calls is None):
            computed = state.read_count = self._counters.count(read)
        kept = tiles.full_count if kind is None else plan.tiles
        found: Count = plan.tiles if computed is None else computed
        by_head = tiles.limits(limit.heads) if limit.heads and limit.budget else None
        return Turn(limit, kind, read, write, found, kept, tiles, descending, by_head)

    def _finish(
        self, state: State, plan: Plan, where: Where, turn: Turn, computed: Count, kept: Count
    ) -> None:
        """Enter what came of a call: its list counts from now on."""
        limit, branch = turn.limit, where[3]
        if turn.write is not None:
            with self._lock:
                state.counts[branch] = kept
                if turn.kind is None:
                    state.full.add(branch)
        threshold: float | None = None
        budget: float | tuple[float, ...] | None = None
        if limit is not None:
            if self.policy.budget is None:
                threshold = limit.threshold
            else:
                budget = limit.heads or limit.budget
        pending = self.statistics.pending
        pending.append(
            (
                *where, plan.tiles, computed, kept, limit is None, threshold, turn.descending,
                budget,
            )
        )  # fmt: skip
        if len(pending) >= MOST_PENDING:
            self.statistics.enter()

    @contextlib.contextmanager
    def noting(self, block: torch.Tensor | None = None) -> Iterator[Noting]:
        """Note the calls of this thread, in their order, to make them again beside a graph.

        ``block``, int64 [calls, 2], is where a captured graph writes the tiles computed and kept
        by each of its calls. Nothing else is counted then, and no operation is launched but those
        of the calls: bring each to its turn before (:meth:`begin_again`).
        """
        before = self._counters.noting
        noting = self._counters.noting = Noting(block)
        try:
            yield noting
        finally:
            self._counters.noting = before

    def begin_again(
        self, calls: Sequence[Noted], generation: Hashable, step: int
    ) -> tuple[list[tuple[State, Turn]], Hashable] | None:
        """Bring noted calls to a step: their turns, and what their launches would depend on.

        That is the same for two steps exactly if a graph of one does what the other asks for.
        Operations between two steps, such as joining the lists of branches that share them, are
        launched here. Calls of the same step may follow, which find the same turns, or
        :meth:`finish_again`. None if a call is no step of its schedule; the call itself says why.
        """
        if any(step >= call.plan.schedule.end for call in calls):
            return None
        turns = []
        signature: list[Hashable] = []
        for call in calls:
            where = (generation, step, call.layer, call.branch)
            key = (call.layer, "" if self.policy.branches == "shared" else call.branch)
            with self._lock:
                state = self._enter(call.shape, where, key)
                self._generations[generation][key] = state
            turn = self._begin(state, call.plan, where)
            turns.append((state, turn))
            signature.append(turn.depends)
        return turns, tuple(signature)

    def finish_again(
        self,
        calls: Sequence[Noted],
        turns: Sequence[tuple[State, Turn]],
        generation: Hashable,
        step: int,
        block: torch.Tensor,
    ) -> None:
        """Enter what a replayed graph of noted calls did, whose counts are in ``block``."""
        pairs = None
        for i, (call, (state, turn)) in enumerate(zip(calls, turns, strict=True)):
            computed, kept = turn.computed, turn.kept
            if turn.kind is not None and turn.write is not None:
                if not call.plan.tallies:
                    kept = self._counters.count(turn.write)
                else:
                    pairs = pairs or self._counters.copied(block)
                    computed, kept = pairs[i]
            where = (generation, step, call.layer, call.branch)
            self._finish(state, call.plan, where, turn, computed, kept)

    def _plan(
        self,
        given: Given,
        options: Options,
        where: Where,
        key: tuple[str, str],
        num_steps: int | None,
    ) -> tuple[State, Plan]:
        """Check a call that is not like one before; return its state, at its step, and its plan.

        A state for another shape is not in the table until the call has succeeded, so that a call
        that fails does not cost its layer the lists.
        """
        q = given[0]
        _, scale, _, return_lse, *_ = options
        shape, schedule = admit(
            self.policy, self.geometry, self.engine, given, options, where, num_steps
        )
        _warn_if_nothing_skips(self.policy, num_steps)
        with self._lock:
            state = self._enter(shape, where, key)
        known, plan = recall(state.plans, given, options)
        if plan is None:
            batch, q_heads, _, q_len, kv_len, head_dim, _, _, tile = shape
            plan = Plan(
                schedule,
                batch * q_heads * tile.q_blocks(q_len) * tile.k_blocks(kv_len),
                None if known is None else {},
                engines.choose(q.device, self.engine).tallies,
                1.0 / math.sqrt(head_dim) if scale is None else float(scale),
                (batch, q_heads, q_len) if return_lse else None,
                self.policy,
                self.geometry,
            )
            if known is not None:
                state.plans.keep(known, plan)
        return state, plan

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        layer: str,
        branch: str,
        generation: Hashable,
        num_steps: int | None,
        scale: float | None = None,
        rounding: Rounding = "rtne",
        heads: tuple[int, ...] | None = None,
    ) -> None:
        """Raise if a call would be refused, whatever the tensors hold; touch no state."""
        given = (q, k, v, None)
        options = ("bshd", scale, rounding, False, num_steps, self.engine, None, None, heads)
        others = functools.partial(call_reasons, given, options, self.engine)
        step, num_steps = checked_names(generation, step, layer, branch, num_steps, others)
        where = (generation, step, layer, branch)
        admit(self.policy, self.geometry, self.engine, given, options, where, num_steps)

    def _new_tiles(self, state: State, policy: SkipPolicy, step: int) -> Tiles:
        """Give a state the masks of a policy; lists of other masks start from the full one."""
        ranges = (policy.must_do, policy.must_skip)
        key = (state.shape, ranges)
        with self._lock:
            if state.tiles is not None and state.tiles.ranges == ranges:
                return state.tiles  # a thread with another branch was faster
            tiles = self._tiles.get(key)
            if tiles is None:
                tiles = self._tiles[key] = Tiles(state.shape, policy)
            if state.tiles is not None:
                dealt = state.deal  # by which the heads of this call were exchanged already
                state.restart(step)
                state.deal = dealt
            state.tiles = tiles
            return tiles

    def _bind(
        self, state: State, plan: Plan, kind: Kind, tensors: Any, given: Given, options: Options
    ) -> Call:
        """Bind the call of a plan. Layers of one shape share it, and dense ones with all others."""
        layout, scale, rounding, return_lse, *_ = options
        engine = self.engine
        depends: Options = ("dense", layout, scale, False, rounding, return_lse, engine)
        if kind is not None:
            # Engines may compile in whether there are forced tiles, or budgets by head.
            forced = (
                tensors.must_do is not None, tensors.must_skip is not None,
                tensors.limits is not None,
            )  # fmt: skip
            tile = state.shape.geometry
            depends = ("lite state", *depends, *kind, self.policy.soft_skip, tile, *forced)
        key, found = recall(calls, given, depends)
        call: Call | None = found
        if call is None:
            request = engine_request(self.policy, state.shape, kind, plan.scale, options)
            run = engines.admit(request, engine).bind(request, tensors)
            call = bound_call(run, tensors, () if given[3] is None else (3,))
            if key is not None:
                calls.keep(key, call)
        assert plan.calls is not None
        plan.calls[kind] = call
        return call

    def _dispatch(
        self, state: State, kind: Kind, lists: tuple[Any, ...], given: Given, options: Options
    ) -> Any:
        """Attend by way of the dispatcher, where a profiler or a transform watches."""
        q, k, v, _ = given
        arguments = self._arguments(given, options)
        if kind is None:
            return dense.attention(q, k, v, **arguments)
        (read, write, must_do, must_skip, *_, limits), (limit, descending) = lists, kind
        if limit.budget:
            arguments.update(budget=limit.budget, limits=limits)
        else:
            arguments["threshold"] = limit.threshold
        return dense.lite_attention(
            q, k, v, read, write, descending=descending, must_do=must_do, must_skip=must_skip,
            soft_skip=self.policy.soft_skip, geometry=state.shape.geometry, **arguments,
        )  # fmt: skip

    def _arguments(self, given: Given, options: Options) -> dict[str, Any]:
        names = ("layout", "scale", "rounding", "return_lse")
        return {**dict(zip(names, options, strict=False)), "out": given[3], "engine": self.engine}

    def _enter(self, shape: Shape, where: Where, key: tuple[str, str]) -> State:
        """Find or make the state of a call, and bring it to its step; hold the lock."""
        generation, step, layer, branch = where
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
        named = None if self.policy.branches == "shared" else branch
        if state is None:
            # Records of a generation of that name that is over go; those of one that goes on stay.
            self.statistics.discard(generation, layer, named, step)
            state = states[key] = State(shape, step)
        elif step < state.step:
            self._begin_anew(generation, states, step)
            if state.shape != shape:
                state = State(shape, step)
        elif state.shape != shape:
            if step == state.lite_step and state.started and branch not in state.started:
                logger.warning(
                    "layer %r: branches that share skip lists came with different shapes in step "
                    "%d, so each starts from the full list: use branches='separate'",
                    layer,
                    step,
                )
            state = State(shape, step)
        state.step = step
        return state

    def _begin_anew(
        self, generation: Hashable, states: dict[tuple[str, str], State], step: int
    ) -> None:
        """Let all that is past a step start over, as a new generation has begun; hold the lock.

        Not only the layer and branch that came to that step: another may first be called in a later
        one, as where guidance or a second denoiser begins late, or no more at all.
        """
        shared = self.policy.branches == "shared"
        for (layer, branch), state in states.items():
            if state.step > step:
                self.statistics.discard(generation, layer, None if shared else branch)
                state.restart(-1)

    def _held(self, generation: Hashable, layer: str, branch: str) -> State | None:
        """Find the state of a layer and branch, if there is one."""
        key = (layer, "" if self.policy.branches == "shared" else branch)
        with self._lock:
            try:
                return self._generations.get(generation, {}).get(key)
            except TypeError:  # wrong names: the call itself says so
                return None

    def lists(self, layer: str, branch: str = "", generation: Hashable = 0) -> torch.Tensor:
        """Return a copy of the list that the next step of a layer and branch starts from.

        int32 [B, Hq, q_blocks, words], see :mod:`liteattention_rocm.lite.bitmap`. A step at which
        the policy re-tests walks the full list instead. Raises ``KeyError`` naming what there is
        if the generation, layer or branch holds no list.
        """
        return self._listed(layer, branch, generation)[0]

    def kept_tiles(self, layer: str, branch: str = "", generation: Hashable = 0) -> torch.Tensor:
        """Return the tiles of :meth:`lists`: bool [B, Hq, q_blocks, K_blocks], True = compute.

        :func:`liteattention_rocm.lite.picture.draw_tiles` draws them.
        """
        listed, shape = self._listed(layer, branch, generation)
        return bitmap.unpack(listed, shape.geometry.k_blocks(shape.kv_len))

    def _listed(self, layer: str, branch: str, generation: Hashable) -> tuple[torch.Tensor, Shape]:
        """A copy of a list, and what it fits; see :meth:`lists`."""
        key = (layer, "" if self.policy.branches == "shared" else branch)
        with self._lock:
            states = self._generations.get(generation)
            if states is None:
                raise KeyError(
                    f"no lists of generation {generation!r}: there are "
                    f"{list(self._generations) or 'none'}"
                )
            state = states.get(key)
            if state is None or state.tiles is None or state.step < 0:
                known = [
                    name
                    for name, other in states.items()
                    if other.tiles is not None and other.step >= 0
                ]
                raise KeyError(
                    f"no list of layer {layer!r}, branch {branch!r} in generation "
                    f"{generation!r}: (layer, branch) pairs that have one are {known or 'none'}"
                )
            found = state.next_list()
            return state.tiles.full.clone() if found is None else found, state.shape

    def forget(self, layer: str, branch: str = "", generation: Hashable = 0) -> None:
        """Free the list of a layer and branch, which starts from the full one; statistics stay.

        For callers that no longer know whose list it is. A layer and branch without one is no
        error. With shared branches, all branches of the layer start over.
        """
        key = (layer, "" if self.policy.branches == "shared" else branch)
        with self._lock:
            self._generations.get(generation, {}).pop(key, None)

    def _pass_over(
        self, *, step: int, layer: str, branch: str = "", generation: Hashable = 0
    ) -> None:
        """Take note of a step without a call, because none of its tiles are to be computed.

        The list is freed, as a call with other masks would free it. Records that a call would have
        replaced go, too.
        """
        shared = self.policy.branches == "shared"
        with self._lock:
            states = self._generations.get(generation, {})
            state = states.pop((layer, "" if shared else branch), None)
            first = step
            if state is not None and step < state.step:
                first = 0
                self._begin_anew(generation, states, step)
            self.statistics.discard(generation, layer, None if shared else branch, first)

    def reset(self, generation: Hashable | None = None) -> None:
        """Forget the lists and statistics of one generation, or of all when it is None."""
        with self._lock:
            if generation is None:
                self._generations.clear()
            else:
                self._generations.pop(generation, None)
            self.statistics.clear(generation)

    def hand_on(self, generation: Hashable, successor: Hashable) -> None:
        """End a generation and give the memory of its lists to another, which begins.

        Its lists then lie where those before lay, step by step, so that graphs captured in one
        generation serve the next ones.
        """
        with self._lock:
            states = self._generations.pop(generation, None)
            if states and successor not in self._generations:
                for state in states.values():
                    state.restart(-1)
                self._generations[successor] = states
                self.statistics.clear(successor)

    def end(self, generation: Hashable = 0) -> None:
        """Free the lists of a generation that is over; its statistics stay readable.

        A generation without lists is no error, so that clean-up code need not ask.
        """
        with self._lock:
            self._generations.pop(generation, None)


def _warn_if_nothing_skips(policy: SkipPolicy, num_steps: int | None = None) -> None:
    # What holds for every number of steps is the same text with one, and is not logged again.
    why = policy.nothing_skips() or policy.nothing_skips(num_steps)
    if why:
        warn_once(f"LiteAttention skips nothing: {why}")


def _call(lite: LiteAttention, *tensors: torch.Tensor, **call: Any) -> _Result:
    """Call ``lite``, where a compiler must not look into it."""
    return lite(*tensors, **call)
