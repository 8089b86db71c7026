"""What :func:`enable` returns: LiteAttention on one pipeline."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from liteattention_rocm import LiteAttention, SeqParallel, SkipPolicy, TileGeometry
from liteattention_rocm.lite.counting import Noting
from liteattention_rocm.lite.parallel import Mode

from . import denoiser, patterns
from .clock import Clock, Position
from .discovery import Found
from .graphs import Recorder, StepGraphs
from .layers import Layer
from .reach import Reach

#: Who holds a denoiser now. Weak on both sides: neither keeps the other alive.
_holders: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)


def holder(model: torch.nn.Module) -> Handle | None:
    """Return the handle that a denoiser is enabled with, if it is."""
    reference = _holders.get(model)
    return None if reference is None else reference()


class Handle:
    """LiteAttention on one pipeline, from ``enable`` until :meth:`disable`.

    Key: none; one handle per pipeline, and handles share nothing. Owner: the caller; the
    pipeline's hooks keep it alive while it is enabled. Lifetime of the skip lists: one run of
    the pipeline (they are kept after it, for pictures, until the next run begins).
    """

    def __init__(
        self,
        policy: SkipPolicy,
        geometry: TileGeometry | None,
        engine: str | None,
        pipeline: Any | None,
        cross_attention: bool,
        balance: bool,
        peer_memory: bool = False,
        recorder: Recorder | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self.lite = LiteAttention(policy, geometry=geometry, engine=engine)
        # One per group of processes that the layers say they are in, and per way to share a
        # sequence: one at most, as a rule.
        self._splits: dict[tuple[dist.ProcessGroup, Mode], SeqParallel] = {}
        self._geometry = geometry
        self._clock = Clock(pipeline)
        self._denoisers: list[tuple[torch.nn.Module, denoiser.DenoiserHook]] = []
        self._layers: dict[Layer, denoiser.Context] = {}
        self._cross_layers: list[Layer] = []
        self._cross_attention = cross_attention
        self._balance = balance
        self._peer_memory = peer_memory
        self._recorder = recorder
        self._graphs: dict[torch.nn.Module, StepGraphs] = {}
        self._reach = Reach()
        self._taken: list[tuple[str, torch.nn.Module, list[Found]]] = []
        #: Where the calls of a forward stand that is being captured: to ask may need the device.
        self._captured_at: Position | None = None
        self._run = 0
        #: The thread that began this run, in which all of its calls have to come.
        self._thread = threading.current_thread()
        #: All layers that patterns of a policy may match, those that are excluded, too.
        self._names = names
        #: The policy whose patterns were looked at last.
        self._matched = policy

    @property
    def policy(self) -> SkipPolicy:
        """The policy given to ``enable``, or ``handle.lite.policy`` as it was set since.

        The next call raises ``ValueError`` if one of its patterns matches no layer.
        """
        return self.lite.policy

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the self-attention layers, as ``layer_thresholds`` patterns see them.

        Some modules do not show whether they attend to another sequence (``attn2`` of LTX). They
        are among the names until calls have shown that they do.
        """
        return tuple(layer.name for layer in self._layers if not layer.crossing)

    @property
    def statistics(self) -> Any:
        """``LiteAttention.statistics``: tiles by generation (:attr:`run`), step, layer, branch.

        Under context parallelism those of this rank; ``merge`` those of all ranks for the whole.
        """
        if not self._splits:
            return self.lite.statistics
        return self.lite.statistics.merge(*(split.statistics for split in self._splits.values()))

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Calls of each self-attention layer: {"LiteAttention": n, reason of others: n, ...}.

        Other calls are those that did not reach LiteAttention and so skip nothing; the first one of
        each reason is logged. Replays of CUDA graphs are not counted. :meth:`reset` starts anew.
        """
        return self._reach.counts(self.layers)

    @property
    def run(self) -> int:
        """Number of the latest run, counted from 1: the ``generation`` of its lists."""
        return self._clock.run

    @property
    def enabled(self) -> bool:
        """Whether the pipeline is still taken over."""
        return bool(self._denoisers)

    def lists(self, layer: str, branch: str, *, split: int | None = None) -> torch.Tensor:
        """Return a copy of this rank's list of the latest run.

        int32 [B, H, q_blocks, words], see :mod:`liteattention_rocm.lite.bitmap`; under context
        parallelism of the heads (:meth:`heads`) or rows that this rank attends with. In a ring
        ``split`` names the rank whose keys it is about. Raises ``KeyError`` naming what there is if
        there is none.
        """
        return self._read(lambda one, **of: one.lists(layer, branch, self.run, **of), split)

    def heads(self, layer: str, branch: str) -> tuple[int, ...] | None:
        """Heads of the model that this rank's list of the latest run is of, in its order.

        None where they were not dealt by their tiles (``balance``): rank r of Ulysses has the r-th
        part of them, a process without it has all. See
        :class:`~liteattention_rocm.SeqParallel`.
        """
        held = (parallel.heads(layer, branch, self.run) for parallel in self._splits.values())
        return next((heads for heads in held if heads is not None), None)

    def kept_tiles(self, layer: str, branch: str) -> torch.Tensor:
        """Tiles that the next step of the latest run would compute; not for a ring.

        Bool [B, H, q_blocks, K_blocks], True = compute; ``lite.picture.draw_tiles`` draws it.
        Raises ``KeyError`` naming what there is if the layer and branch hold no list.
        """
        return self._read(lambda one, **of: one.kept_tiles(layer, branch, self.run, **of), None)

    def _read(self, read: Callable[..., torch.Tensor], split: int | None) -> torch.Tensor:
        """What ``read`` finds with whoever holds this rank's lists; see :meth:`lists`."""
        mode = "ulysses" if split is None else "ring"
        missing: KeyError | None = None
        for parallel in self._splits.values():
            try:
                if parallel.mode == mode:
                    return read(parallel, split=split)
            except KeyError as error:  # another group may hold the layer
                missing = error
        if split is None:
            try:
                return read(self.lite)
            except KeyError:
                if missing is None:
                    raise
        raise missing or KeyError(f"no list for the keys of rank {split}: nothing ran in a ring")

    def reset(self) -> None:
        """Forget all skip lists and statistics; the next call begins a new run."""
        self.lite.reset()
        for parallel in self._splits.values():
            parallel.reset()
        self._reach.clear()
        self._clock.end_run()

    def graph_counts(self) -> dict[str, int]:
        """How many forwards of the denoisers ran eagerly, were captured and were replayed."""
        counts = collections.Counter({"eager": 0, "captured": 0, "replayed": 0})
        for graphs in self._graphs.values():
            counts.update(graphs.counts)
        return dict(counts)

    def disable(self) -> None:
        """Give the pipeline back exactly as it was; repeated calls do nothing.

        An attention backend that was set meanwhile stays.
        """
        self.pause()
        for graphs in self._graphs.values():
            graphs.clear()  # now, not when the collector finds the hook that has them
        self._graphs.clear()
        for parallel in self._splits.values():
            parallel.free_memory()
        self._taken = []

    def pause(self) -> None:
        """As :meth:`disable`, but :meth:`resume` goes on with the same lists and graphs."""
        for layer in (*self._layers, *self._cross_layers):
            layer.release()
        for model, hook in self._denoisers:
            denoiser.detach(model, hook)
            _holders.pop(model, None)
        self._denoisers = []

    def resume(self) -> None:
        """Take the pipeline over again after :meth:`pause`; if that fails, it stays paused.

        Raises:
            ValueError: it was disabled, is not paused, another handle has a denoiser, or a layer
                has got a processor that cannot be taken over; lists every such layer.
        """
        if not self._taken or self._denoisers:
            raise ValueError("only a paused handle can be resumed: enable() the pipeline")
        reasons = [
            f"layer {prefix}{layer.name} has a {type(layer.module.processor).__name__} now, which "
            "does not go through diffusers' attention dispatcher (it has no _attention_backend): "
            "set the processor that it had"
            for prefix, _, found in self._taken
            for layer in found
            if not hasattr(layer.module.processor, "_attention_backend")
        ]
        if any(holder(model) is not None for _, model, _ in self._taken):
            reasons.append("the pipeline is enabled with another handle: disable() that one first")
        if reasons:
            raise ValueError("cannot resume: " + "; ".join(reasons))
        before = self._taken, self._layers, self._cross_layers
        self._taken, self._layers, self._cross_layers = [], {}, []
        try:
            for prefix, model, found in before[0]:
                self._take(prefix, model, found)
        except BaseException:
            self.pause()
            self._taken, self._layers, self._cross_layers = before
            raise

    def __getstate__(self) -> Any:
        raise TypeError(
            "a handle cannot be copied or pickled: it belongs to one enabled pipeline; copy its "
            "statistics or its LiteAttention (handle.lite), or enable() the other pipeline"
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def _take(self, prefix: str, model: torch.nn.Module, found: list[Found]) -> None:
        hook = denoiser.attach(model, self._clock, graphed=self._recorder is not None)
        if isinstance(hook, denoiser.GraphedHook) and self._recorder is not None:
            turns = _Turns(self, hook.context)
            graphs = self._graphs.get(model)
            if graphs is None:
                graphs = self._graphs[model] = StepGraphs(model, self._recorder)
            graphs.turns = turns
            graphs.run_over()
            hook.graphs = graphs
        self._taken.append((prefix, model, found))
        self._denoisers.append((model, hook))
        # Replays call no layer: there is nothing to count then.
        by_call = self._recorder is None
        hook.after_forward = (
            functools.partial(self._forward_over, hook.context) if by_call else self._reach.say
        )
        hook.after_run = self._run_over if by_call else self._reach.say
        _holders[model] = weakref.ref(self)
        chosen = {id(layer.module) for layer in found}
        others = {
            id(module.processor)
            for module in model.modules()
            if hasattr(module, "processor") and id(module) not in chosen
        }
        held = collections.Counter(id(layer.module.processor) for layer in found)
        for layer in found:
            processor = id(layer.module.processor)
            taken = Layer(
                prefix + layer.name,
                layer,
                self._attend,
                self._attend_split,
                self._begin_split,
                self._reach,
                shared_processor=processor in others or held[processor] > 1,
                cross_attention=self._cross_attention,
                engine=self.lite.engine,
            )
            if layer.kind == "cross":
                self._cross_layers.append(taken)
            else:
                self._layers[taken] = hook.context

    def _forward_over(self, context: denoiser.Context) -> None:
        self._reach.forward_over(layer.name for layer, of in self._layers.items() if of is context)

    def _run_over(self) -> None:
        self._reach.run_over(self.layers)

    def _attend(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        self.lite(q, k, v, layout="bshd", scale=scale, out=out, **self._position(layer))

    def _attend_split(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        group: dist.ProcessGroup,
        mode: Mode,
    ) -> torch.Tensor:
        return self._parallel(group, mode)(q, k, v, scale=scale, **self._position(layer))

    def _begin_split(
        self, layer: Layer, v: torch.Tensor, group: dist.ProcessGroup, mode: Mode
    ) -> None:
        self._parallel(group, mode).begin(v, **self._position(layer))

    def _parallel(self, group: dist.ProcessGroup, mode: Mode) -> SeqParallel:
        if self._recorder is not None:
            raise ValueError(
                "CUDA graphs do not hold what processes exchange: enable(..., graphs=False)"
            )
        if (group, mode) not in self._splits:
            self._splits[group, mode] = SeqParallel(
                self.policy,
                group=group,
                mode=mode,
                balance=self._balance,
                peer_memory=self._peer_memory,
                geometry=self._geometry,
                engine=self.lite.engine,
            )
        split = self._splits[group, mode]
        split.policy = self.policy  # which may be another one than when it was made
        return split

    def _position(self, layer: Layer) -> dict[str, Any]:
        """Where a call of ``layer`` stands, as LiteAttention takes it."""
        at = self._captured_at or self._locate(self._layers[layer])
        return {
            "step": at.step,
            "layer": layer.name,
            "branch": at.branch,
            "generation": at.run,
            "num_steps": at.num_steps,
        }

    def _locate(self, context: denoiser.Context) -> Position:
        """Where the denoiser of ``context`` stands; ends a run that is over.

        Lists that may be another branch's start over.

        Raises ``ValueError`` if the policy was replaced by one with patterns that match no layer,
        ``RuntimeError`` if the call goes on with the run of another thread. After that the next
        call begins a new run.
        """
        if self.lite.policy is not self._matched:
            self._match(self.lite.policy)
        at = self._clock.locate(context.current)
        if at.run != self._run:
            if self._recorder is None:
                self.lite.end(self._run)
            else:
                self.lite.hand_on(self._run, at.run)
            for parallel in self._splits.values():
                parallel.end(self._run)
            for graphs in self._graphs.values():
                graphs.run_over()
            self._run, self._thread = at.run, threading.current_thread()
        elif self._thread is not (here := threading.current_thread()):
            there, self._thread = self._thread, here
            if there.is_alive():
                self._clock.end_run()
                raise RuntimeError(
                    f"thread {here.name!r} calls an enabled transformer in a run that thread "
                    f"{there.name!r} began and that has not ended: they would read each other's "
                    "skip lists. If that run was broken off, call handle.reset() before the next "
                    "one. Else let one thread at a time generate with it, or load and enable a "
                    "pipeline for each thread"
                )
        mixed_up = self._clock.mixed_up(context.denoiser)
        if mixed_up and self.lite.policy.branches == "separate":
            self._start_over(context, mixed_up)
        return at

    def _start_over(self, context: denoiser.Context, branches: list[str]) -> None:
        """Let the layers of a denoiser start from the full list in these branches."""
        keepers: list[LiteAttention | SeqParallel] = [self.lite, *self._splits.values()]
        for layer in [layer for layer, of in self._layers.items() if of is context]:
            for keeper, branch in itertools.product(keepers, branches):
                keeper.forget(layer.name, branch, self._run)

    def _match(self, policy: SkipPolicy) -> None:
        against = patterns.reasons(patterns.of_policy(policy), self._names)
        if against:
            raise ValueError("the policy does not fit this pipeline: " + "; ".join(against))
        self._matched = policy


class _Turns:
    """The state of a handle, as graphs of one of its denoisers ask for it."""

    def __init__(self, handle: Handle, context: denoiser.Context) -> None:
        self._handle = handle
        self._context = context
        self._at: Position | None = None
        self.begin_again = handle.lite.begin_again
        self.finish_again = handle.lite.finish_again

    def place(self) -> tuple[Hashable, int, Hashable]:
        """See :class:`.graphs.Turns`."""
        at = self._at = self._handle._locate(self._context)
        lite = self._handle.lite
        policy = _Same(lite.policy)
        return at.run, at.step, (at.branch, at.num_steps, policy, lite.geometry, lite.engine)

    @contextlib.contextmanager
    def noting(self, block: torch.Tensor | None = None) -> Iterator[Noting]:
        """See :class:`.graphs.Turns`."""
        self._handle._captured_at = None if block is None else self._at
        try:
            with self._handle.lite.noting(block) as noting:
                yield noting
        finally:
            self._handle._captured_at = None


class _Same:
    """An object as a key that equals itself only, and stays alive with it."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)
