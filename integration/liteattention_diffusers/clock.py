"""Which run, step and CFG branch a call of the denoising transformer belongs to.

Skip lists advance by step, so every self-attention call has to know its step. Sources, best
first: the ``cache_context`` of the pipeline (``WanPipeline`` passes the step there), the
pipeline's scheduler, and the changes of the ``timestep`` argument: for a transformer on its own, or
called by another pipeline than the one that is enabled.

Steps are those that a run executes: where it begins within its schedule (video-to-video, a
``strength`` below 1), its first step is 0 all the same, and the steps left out are not in
``num_steps``. Where neither scheduler nor pipeline says where it begins, the first step has the
length of the whole schedule.

Branches have the names of the ``cache_context``. Without one they are told apart by the order of
the calls in a step: ``call0``, ``call1``, ... That order says whose lists are whose only while each
step has as many calls as the step before, see :class:`_Calls`.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.hooks import CacheContext

logger = logging.getLogger(__name__)

#: Calls at one timestep that are taken for guidance branches of a step, each with lists of its own.
#: More of them are no denoising: a warm-up, or generations of one step.
MOST_CALLS = 64


@dataclass(frozen=True)
class Position:
    """``run`` counts the runs of the handle, ``step`` from 0 the steps that the run executes;
    ``num_steps`` None if nothing says how many there will be; ``branch`` is the name of the CFG
    branch."""

    run: int
    step: int
    num_steps: int | None
    branch: str


class Clock:
    """Tells runs apart and counts steps.

    Owner: one handle. Lifetime: that handle's. A run ends when the pipeline resets its hooks,
    when the scheduler is given new timesteps, when the step goes back, or when a context says
    another number of steps. A run that died of an exception is left behind by the first two, or by
    the last.
    """

    def __init__(self, pipeline: Any | None) -> None:
        self._pipeline = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        #: Timesteps of no run of the pipeline under this clock.
        self._earlier = getattr(self.scheduler, "timesteps", None)
        self.run = 0
        self._fresh = True
        self._timesteps: Any = None
        #: Of the latest call, as its source counts it.
        self._step = 0
        self._num_steps: int | None = None
        #: The source's number of the run's first step; None while nothing says it.
        self._first: int | None = 0
        self._watched = _Watched()

    @property
    def scheduler(self) -> Any | None:
        """The pipeline's scheduler, None for a transformer on its own."""
        return getattr(self._pipeline(), "scheduler", None)

    @property
    def has_steps(self) -> bool:
        """Whether the pipeline's scheduler says which step it is."""
        return self._scheduler_step(self.scheduler) is not None

    def end_run(self) -> None:
        """The next call belongs to a new run."""
        self._fresh = True
        self._num_steps = None
        self._watched = _Watched()

    def locate(self, cache: CacheContext | None) -> Position:
        """Return where the denoiser in ``cache`` stands now; starts a new run if it must."""
        scheduler = self.scheduler
        step = None if cache is None else cache.step_index
        counted = step is None  # by the scheduler, in whose schedule a run may begin anywhere
        if step is None:
            step = self._scheduler_step(scheduler)
        if step is None:
            step, counted = self._watched.step, False
        timesteps = getattr(scheduler, "timesteps", None)
        idle = self._idle(scheduler)
        num_steps = None if cache is None else cache.num_inference_steps
        goes_on = timesteps is self._timesteps and step >= self._step
        if num_steps is not None:  # another number is another run, where no scheduler tells
            goes_on = goes_on and self._num_steps in (None, num_steps)
            self._num_steps = num_steps
        if not goes_on:
            self._fresh = True
        if self._fresh:
            self.run += 1
            self._fresh = False
            self._timesteps = timesteps
            self._watched.begin_run()
            if not counted:
                self._first = 0
            elif not goes_on:  # else a reset by hand, amid the steps of a schedule
                self._first = self._begins_at(scheduler, step)
        if self._first is None and getattr(scheduler, "step_index", None) is not None:
            self._first = step - 1
        self._step = step
        first = (self._first or 0) if counted else 0
        if num_steps is None and timesteps is not None and not idle:
            num_steps = len(timesteps) - first
        branch = f"call{self._watched.call}" if cache is None else cache.name
        return Position(self.run, step - first, num_steps, branch)

    def _begins_at(self, scheduler: Any, step: int) -> int | None:
        """Where in its schedule a run begins that is at ``step`` of it at its first call.

        None if that is not known before the scheduler's first step.
        """
        begin = getattr(scheduler, "begin_index", None)
        if begin is not None:
            return int(begin)
        if getattr(scheduler, "step_index", None) is not None:
            return 0  # the calls before were not seen
        now = getattr(self._pipeline(), "_current_timestep", None)
        return step if now is not None else None

    def watch(self, denoiser: int, timestep: Any, text: Any = None) -> None:
        """See one call of a denoiser whose pipeline does not say step and branch.

        ``denoiser`` tells it from others. Calls of one step are told apart by their order in it:
        that order is the branch. ``text`` is the tensor that the call attends to, if it has one.
        """
        step = self._scheduler_step(self.scheduler)
        if step is None and self._watched.see(_scalar(timestep)):
            self._fresh = True
        timesteps = getattr(self.scheduler, "timesteps", None)
        self._watched.count(denoiser, (id(timesteps), self._watched.step, step), text)
        if step is None and self._watched.call == MOST_CALLS:
            logger.warning(
                "%d calls of a transformer at one timestep: the next ones are taken for a new run. "
                "Generations of one step need cache_context(), or handle.reset() between them",
                MOST_CALLS,
            )
            self.end_run()
            self.watch(denoiser, timestep, text)

    def mixed_up(self, denoiser: int) -> list[str]:
        """Return the branches of a denoiser whose lists may be those of other passes.

        They have to start over before the latest call attends. Says so once.
        """
        calls = self._watched.calls.get(denoiser)
        return [] if calls is None else [f"call{i}" for i in range(calls.mixed_up())]

    def _idle(self, scheduler: Any | None) -> bool:
        """Whether the scheduler is in no run: who calls is not its pipeline.

        It has got no timesteps yet, or is through with them. After a run that was broken off it is
        neither, which nothing but a look at the timesteps of all later calls could tell.
        """
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None:
            return False
        step = getattr(scheduler, "step_index", None)
        if step is not None:
            return int(step) >= len(timesteps)
        set_by = (getattr(scheduler, name, None) for name in ("num_inference_steps", "begin_index"))
        return timesteps is self._earlier and all(value is None for value in set_by)

    def _scheduler_step(self, scheduler: Any | None) -> int | None:
        if scheduler is None or self._idle(scheduler):
            return None
        step = getattr(scheduler, "step_index", None)
        if step is not None:
            return int(step)
        # Before its first step() a scheduler knows only where it will begin.
        begin = getattr(scheduler, "begin_index", None)
        if begin is not None:
            return int(begin)
        now = getattr(self._pipeline(), "_current_timestep", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if now is not None and torch.as_tensor(now).numel() != 1:
            return None  # one for each latent frame
        if now is None or timesteps is None:
            return 0 if hasattr(scheduler, "step_index") else None
        where = (torch.as_tensor(timesteps) == torch.as_tensor(now)).nonzero()
        # Of two that are equal a scheduler begins at the second.
        return int(where[min(1, len(where) - 1)]) if len(where) else None


class _Watched:
    """Steps and calls counted from the arguments alone; owner: the clock."""

    def __init__(self) -> None:
        self.step = 0
        #: Number of the latest call in its step.
        self.call = 0
        #: By denoiser.
        self.calls: dict[int, _Calls] = {}
        self._latest: int | None = None
        self._value: float | None = None
        self._direction = 0

    def see(self, value: float | None) -> bool:
        """Count a step when the timestep moves on; return True when it turns back: a new run."""
        if value is None or value == self._value:
            return False
        last, self._value = self._value, value
        if last is None:
            return True
        direction = 1 if value > last else -1
        if self._direction in (0, direction):
            self._direction = direction
            self.step += 1
            return False
        self.step, self._direction, self.calls = 0, 0, {}
        return True

    def count(self, denoiser: int, step: tuple[Any, ...], text: Any) -> None:
        """Count the calls of a denoiser within one step."""
        calls = self.calls.setdefault(denoiser, _Calls())
        calls.count(step, text)
        self.call, self._latest = calls.number, denoiser

    def begin_run(self) -> None:
        """The latest call is the first of a run: steps before it say nothing about its order."""
        self.calls = {name: one for name, one in self.calls.items() if name == self._latest}
        for calls in self.calls.values():
            calls.begin_run()


@dataclass
class _Text:
    """What a call attended to, held weakly, and whether the one before in its place did, too."""

    held: weakref.ref[torch.Tensor]
    stays: bool


class _Calls:
    """The calls of one denoiser in a step; owner: :class:`_Watched`.

    Passes may come and go, as where guidance is limited to some steps. Then others move up or down
    in the order and would read lists that are not theirs. So lists start over after a step with
    another number of calls than the step before. How many calls a step has is known when it is
    over. Within it, only the text that a call attends to can tell that another pass has its place:
    another place had this text in the step before, or this place had one text for two steps and
    now has another. Where texts do not tell (passes with the same one, tensors made anew in each
    step), a pass that comes or goes is taken for the last one of its step, in that step alone.
    """

    def __init__(self) -> None:
        #: Number of the latest call in its step.
        self.number = -1
        self._step: tuple[Any, ...] | None = None
        self._before: int | None = None
        self._texts: list[_Text | None] = []
        self._texts_before: list[_Text | None] = []
        self._mixed_up = False
        #: Calls that may have left lists.
        self._listed = 0

    def begin_run(self) -> None:
        """Forget the steps before this one."""
        self._before, self._texts_before, self._mixed_up = None, [], False
        self._listed = self.number + 1

    def count(self, step: tuple[Any, ...], text: Any) -> None:
        """Count a call; a step is over when another one calls."""
        if step != self._step:
            if self._step is not None:
                if self._before not in (None, self.number + 1):
                    self._mixed_up = True
                self._before, self._texts_before = self.number + 1, self._texts
            self._step, self.number, self._texts = step, -1, []
        self.number += 1
        self._listed = max(self._listed, self.number + 1)
        if self.number < MOST_CALLS:
            self._texts.append(self._see(text))

    def _see(self, text: Any) -> _Text | None:
        """Compare the text of the latest call with those of the step before."""
        if not isinstance(text, torch.Tensor):
            return None
        found = _Text(weakref.ref(text), False)
        if self.number < len(self._texts_before):
            before = self._texts_before[self.number]
            found.stays = before is not None and before.held() is text
            if before is not None and not found.stays:
                others = (one for one in self._texts_before if one is not None)
                if before.stays or any(one.held() is text for one in others):
                    self._mixed_up = True
        return found

    def mixed_up(self) -> int:
        """How many branches have to start over before the latest call; asks for it once."""
        if not self._mixed_up:
            return 0
        listed, self._listed, self._mixed_up = self._listed, self.number + 1, False
        return listed


def _scalar(timestep: Any) -> float | None:
    if timestep is None:
        return None
    return float(torch.as_tensor(timestep).max())
