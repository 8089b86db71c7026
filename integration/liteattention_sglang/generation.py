"""The skip lists that one video request holds while it is denoised. Knows nothing of SGLang."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liteattention_rocm import LiteAttention, SeqParallel, SkipPolicy, attention, engines
from liteattention_rocm.lite.by_layer import matches_any
from liteattention_rocm.lite.statistics import SkipStatistics

from . import reports
from .reports import REPORT_VARIABLE as REPORT_VARIABLE

#: Names of the classifier-free-guidance branches, by SGLang's ``is_cfg_negative``.
BRANCHES = {False: "cond", True: "uncond"}
#: More forward passes than any model needs for the branches of one step.
MOST_PASSES = 8


@dataclass(slots=True)
class Passes:
    """The forward passes of a step that reach one layer with one value of ``is_cfg_negative``.

    Key: (layer, that value). Owner: :class:`Generation`. Lifetime: the request's. ``last`` is the
    number of the pass that called last, ``count`` how many passes of ``step`` called, ``before``
    how many of the step before. ``names`` are those of the branches so far: "cond", "cond#2", ...
    """

    names: list[str]
    step: int = -1
    last: int = 0
    count: int = 0
    before: int = 1


@dataclass(slots=True)
class Dense:
    """Calls that were dense though the policy may have let them skip: why, and in which layers."""

    reason: str
    layers: dict[str, None] = field(default_factory=dict)


class Generation:
    """LiteAttention of one request.

    Key: none; one object per request, and requests share nothing. Owner: the request that is
    being denoised. Lifetime: from the request's first self-attention call until the stage that
    made it ends, in whatever way. Inside, lists are kept by layer and guidance branch and advance
    by the step index, see :class:`~liteattention_rocm.LiteAttention`.

    Some pipelines run several branches of a step and do not say which is which. Branches are
    therefore told apart by ``is_cfg_negative`` and, within a step, by the order of the forward
    passes that reach a layer. That order is trusted only while their number stays: after a step
    with another number of passes than the step before (before the first, one is expected) a layer
    starts from the full list again. A pass that comes or goes is taken for the last one of its
    step. A layer that one pass calls twice is dense from then on, because nothing says what the
    two calls are; so is one with more than ``MOST_PASSES`` passes in a step.

    Args:
        policy: what may be skipped.
        num_steps: length of the schedule, None if nothing says it.
        warm_up: the schedule may be too short to skip anything, which nobody needs to know.
    """

    def __init__(self, policy: SkipPolicy, num_steps: int | None, *, warm_up: bool = False) -> None:
        self.lite = LiteAttention(policy, max_generations=1)
        self._ring: SeqParallel | None = None  # instead of it, made by the first call in a ring
        self.num_steps = num_steps
        self._told_steps = None if warm_up else num_steps
        self.engine: str | None = None
        self._end = math.inf if num_steps is None else num_steps
        self._layers: dict[Hashable, str] = {}
        self._names: set[str] = set()
        self._branches: dict[tuple[str, bool], Passes] = {}
        # The forward pass under way, weakly: it holds the request, which holds this object. The
        # number of passes so far names it, as an id may be another object's later.
        self._forward: Callable[[], object] = lambda: None
        self._forwards = 0
        self._no_steps = False
        self._untold: set[str] = set()
        self._dense: dict[str, Dense] = {}

    def name(self, layer: Hashable, wanted: str) -> str:
        """Return the name that ``layer`` has in this request: ``wanted``, or ``wanted#2`` ...

        Names are not unique in every model: parts of it that are no denoisers of the stage may
        call their layers alike.
        """
        known = self._layers.get(layer)
        if known is not None:
            return known
        name, count = wanted, 1
        while name in self._names:
            count += 1
            name = f"{wanted}#{count}"
        self._layers[layer] = name
        self._names.add(name)
        return name

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: str,
        step: Any,
        negative: bool,
        scale: float | None,
        out: torch.Tensor,
        heads: tuple[int, ...] | None = None,
        forward: object | None = None,
    ) -> None:
        """Compute self-attention on [B,S,H,D] tensors into ``out``; ``heads`` of the model.

        ``step`` is what the runtime says. If it is no index of a step, the call is dense and
        :meth:`report` says so. ``forward`` is the object that stands for the forward pass under
        way, another one for each; without it a call of the same step is a repetition.
        """
        position = self._position(q, layer, step, negative, forward)
        if position is None:
            attention(q, k, v, scale=scale, out=out)
            return
        try:
            self.lite(q, k, v, layout="bshd", scale=scale, out=out, heads=heads, **position)
        except BaseException:
            self._undo(layer, negative)
            raise

    def attend_ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: str,
        step: Any,
        negative: bool,
        scale: float | None,
        group: dist.ProcessGroup,
        forward: object | None = None,
    ) -> torch.Tensor:
        """Return self-attention of rows that are split over ``group``, [B,S_local,H,D] each.

        Keys and values go round; see :class:`~liteattention_rocm.SeqParallel`, and
        :meth:`attend` for ``step`` and ``forward``.
        """
        position = self._position(q, layer, step, negative, forward)
        if position is None:
            return dense_ring(q, k, v, layer=layer, scale=scale, group=group)
        if self._ring is None:
            policy = self.lite.policy
            self._ring = SeqParallel(policy, group=group, mode="ring", max_generations=1)
        try:
            return self._ring(q, k, v, scale=scale, **position)
        except BaseException:
            self._undo(layer, negative)
            raise

    def _position(
        self, q: torch.Tensor, layer: str, step: Any, negative: bool, forward: object | None
    ) -> dict[str, Any] | None:
        """Where in the request a call stands; None if it has to be dense."""
        if self.engine is None:
            self.engine = engines.choose(q.device).name
        if type(step) is not int or not 0 <= step < self._end or self._no_steps:
            self._note_step(layer, step)
            return None
        passes = self._branches.get((layer, negative))
        if passes is None:
            passes = self._branches[layer, negative] = Passes([BRANCHES[negative]])
        if step != passes.step:
            self._begin(layer, passes, step)
        if forward is None:
            passes.count = 1
        else:
            if self._forward() is not forward:
                self._forward = weakref.ref(forward)
                self._forwards += 1
            again = passes.last == self._forwards or passes.count == MOST_PASSES
            if again or layer in self._untold:
                self._note_untold(layer)
                return None
            passes.last = self._forwards
            passes.count += 1
        names = passes.names
        if passes.count > len(names):
            names.append(f"{names[0]}#{passes.count}")
        return {
            "step": step,
            "layer": layer,
            "branch": names[passes.count - 1],
            "num_steps": self._told_steps,
        }

    def _begin(self, layer: str, passes: Passes, step: int) -> None:
        """Go to another step; forget the lists unless the order of passes says whose they are."""
        if step < passes.step:  # another round of the schedule
            self._forget(layer, passes)
            passes.before = 1
        elif passes.count:  # else nothing has come of that step
            if passes.count != passes.before:
                self._forget(layer, passes)
            passes.before = passes.count
        passes.step = step
        passes.count = passes.last = 0

    def _forget(self, layer: str, passes: Passes) -> None:
        """Let a layer start from the full list; shared lists suit every branch and stay."""
        if self.lite.policy.branches == "shared":
            return
        for branch in passes.names:
            self.lite.forget(layer, branch)
            if self._ring is not None:
                self._ring.forget(layer, branch)

    def _undo(self, layer: str, negative: bool) -> None:
        """Take back a call that failed: if it comes again, it is the same one."""
        passes = self._branches[layer, negative]
        passes.count -= 1
        passes.last = 0

    def _note_step(self, layer: str, step: Any) -> None:
        if type(step) is int and step < 0:
            # A special pass between steps, as LingBot-World's with -1; steps stay what they are.
            self._note("pass", layer, f"in passes with current_timestep {step}, which is no step")
            return
        # From here on, small numbers are none either: a scheduler's timesteps end at 0.
        self._no_steps = True
        said = step if type(step) is int else f"a {type(step).__name__}"
        number = "a schedule" if self.num_steps is None else f"a schedule of {self.num_steps}"
        self._note(
            "steps",
            layer,
            f"because SGLang's pipeline of this model gives a current_timestep ({said}) that is no "
            f"index of a step in {number}",
        )

    def _note_untold(self, layer: str) -> None:
        self._untold.add(layer)
        self._note(
            "untold",
            layer,
            "because SGLang's pipeline of this model calls a layer several times in one forward "
            f"pass, or in more than {MOST_PASSES} passes of a step, and does not say which call "
            "belongs to which guidance branch",
        )

    def _note(self, kind: str, layer: str, reason: str) -> None:
        self._dense.setdefault(kind, Dense(reason)).layers[layer] = None

    @property
    def dense(self) -> list[Dense]:
        """What had to be dense, whatever the policy says; empty if nothing had."""
        return list(self._dense.values())

    @property
    def layers(self) -> list[str]:
        """Names of the layers that attended, in the order of their first calls."""
        noted = (layer for item in self.dense for layer in item.layers)
        return list(dict.fromkeys([*(layer for layer, _ in self._branches), *noted]))

    @property
    def unmatched(self) -> list[str]:
        """Patterns of the policy that match the name of no layer that attended."""
        policy, layers = self.lite.policy, self.layers
        patterns = dict.fromkeys([*policy.layer_thresholds, *policy.layer_budgets])
        return [one for one in patterns if not matches_any(one, layers)]

    @property
    def statistics(self) -> SkipStatistics:
        """Tiles by step, layer and branch that this rank went through."""
        if self._ring is None:
            return self.lite.statistics
        # Layers that SGLang leaves out of sequence parallelism attend by themselves.
        return self.lite.statistics.merge(self._ring.statistics)

    def free(self) -> None:
        """Free the lists now, whoever still holds this object."""
        self.lite.reset()
        if self._ring is not None:
            self._ring.reset()

    def lists(self) -> dict[str, torch.Tensor]:
        """Copies of the lists as the last step left them, by "layer/branch".

        int32 [B, H, q_blocks, words], see :mod:`liteattention_rocm.lite.bitmap`. A layer and branch
        that never skipped has none. In a ring they are by "layer/branch/rank of the keys".
        """
        found = {}
        for layer in dict.fromkeys(layer for layer, _ in self._branches):
            for branch in self._branches_of(layer):
                for name, held in self._held(layer, branch):
                    try:
                        found[name] = held()
                    except KeyError:
                        continue
        return found

    def _branches_of(self, layer: str) -> list[str]:
        by_flag = [self._branches.get((layer, negative)) for negative in BRANCHES]
        return [name for passes in by_flag if passes is not None for name in passes.names]

    def _held(self, layer: str, branch: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        name = f"{layer}/{branch}"
        yield name, partial(self.lite.lists, layer, branch)
        if self._ring is None:
            return
        for split in range(self._ring.ranks):
            yield f"{name}/{split}", partial(self._ring.lists, layer, branch, split=split)

    def report(self, requests: Sequence[str], batched: int | None = None) -> dict[str, Any]:
        """Return policy, engine and tile counts as JSON-friendly values. Waits for the device.

        ``requests`` are the ids of the requests that this was the denoising of. ``batched`` is
        how many there were, by default as many as there are ids; if ids are missing, nothing says
        which row of the lists is whose. Otherwise rows are in the order of the ids.
        """
        statistics = self.statistics
        steps = statistics.by_step()
        return {
            "requests": list(requests),
            "batched_requests": len(requests) if batched is None else batched,
            "policy": json.loads(self.lite.policy.model_dump_json()),
            "engine": self.engine,
            "num_steps": self.num_steps,
            "sparsity": statistics.sparsity,
            "sparsity_last_step": steps[-1]["sparsity"] if steps else 0.0,
            "dense": [{"reason": one.reason, "layers": list(one.layers)} for one in self.dense],
            "unmatched_patterns": self.unmatched,
            "records": statistics.to_records(),
        }

    def write(
        self, folder: Path, name: str, requests: Sequence[str], batched: int | None = None
    ) -> None:
        """Write ``name.json`` (see :meth:`report`) and ``name.npz`` (see :meth:`lists`).

        Raises ``OSError`` as :func:`.reports.write`, which also says how names become file names.
        """
        reports.write(folder, reports.file_name(name), self.report(requests, batched), self.lists())


def dense_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer: str,
    scale: float | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return dense self-attention of rows that are split over ``group``, [B,S_local,H,D] each."""
    ring = SeqParallel(SkipPolicy(enabled=False), group=group, mode="ring")
    return ring(q, k, v, step=0, layer=layer, scale=scale)
