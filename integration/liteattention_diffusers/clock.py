"""Which run, step and CFG branch a call of the denoising transformer belongs to.

Skip lists advance by step, so every self-attention call has to know its step. Sources, best
first: the ``cache_context`` of the pipeline (``WanPipeline`` passes the step there), the
pipeline's scheduler, and, for a transformer on its own, the changes of its ``timestep`` argument.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.hooks import BaseState, CacheContext, HookRegistry, ModelHook, StateManager

from . import copies

logger = logging.getLogger(__name__)

HOOK_NAME = "liteattention_rocm"


@dataclass(frozen=True)
class Position:
    """``run`` counts the runs of the handle, ``step`` the steps of the run; ``num_steps`` None
    if nothing says how many there will be; ``branch`` is the name of the CFG branch."""

    run: int
    step: int
    num_steps: int | None
    branch: str


class Context(StateManager):  # type: ignore[misc]
    """The ``cache_context`` a pipeline is in, as diffusers tells its cache hooks.

    Owner: the hook on one denoiser. Lifetime: that hook's.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(BaseState)
        self._clock = clock
        #: True while the clock has to watch the transformer's calls to know step and branch.
        self.watch = True

    @property
    def current(self) -> CacheContext | None:
        """The context, or None outside one."""
        return self._context

    def set_context(self, context: CacheContext | None) -> None:
        """Take the context of the next call; called by ``cache_context``."""
        super().set_context(context)
        # Decided here, outside of compiled code, so that a graph guards on one constant bool.
        self.watch = context is None or (
            context.step_index is None and self._clock.scheduler is None
        )


class DenoiserHook(ModelHook):  # type: ignore[misc]
    """Lets ``cache_context`` and the end-of-run reset reach us; watches calls only if it must."""

    _is_stateful = True

    def __init__(self, clock: Clock, model: torch.nn.Module) -> None:
        super().__init__()
        self.context = Context(clock)
        self._clock = clock
        parameters = list(inspect.signature(model.forward).parameters)
        self._timestep_index = parameters.index("timestep") if "timestep" in parameters else -1

    def pre_forward(
        self, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Watch the call if neither a context nor a scheduler says where it stands."""
        if self.context.watch:
            timestep = kwargs.get("timestep")
            if timestep is None and 0 <= self._timestep_index < len(args):
                timestep = args[self._timestep_index]
            self._watch(timestep)
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, timestep: Any) -> None:
        self._clock.watch(self.context, timestep)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """The pipeline is at the end of a run."""
        self.context.reset()
        self._clock.end_run()
        return module


class Clock:
    """Tells runs apart and counts steps.

    Owner: one handle. Lifetime: that handle's. A run ends when the pipeline resets its hooks,
    when the scheduler is given new timesteps, or when the step goes back (a run that died of an
    exception is left behind by the first two).
    """

    def __init__(self, pipeline: Any | None) -> None:
        self._pipeline = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        self.run = 0
        self._fresh = True
        self._timesteps: Any = None
        self._step = 0
        self._watched = _Watched()

    @property
    def scheduler(self) -> Any | None:
        """The pipeline's scheduler, None for a transformer on its own."""
        return getattr(self._pipeline(), "scheduler", None)

    def end_run(self) -> None:
        """The next call belongs to a new run."""
        self._fresh = True

    def locate(self, context: Context) -> Position:
        """Return where the denoiser of ``context`` stands now; starts a new run if it must."""
        cache = context.current
        scheduler = self.scheduler
        step = None if cache is None else cache.step_index
        if step is None:
            step = self._scheduler_step(scheduler)
        if step is None:
            step = self._watched.step
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is not self._timesteps or step < self._step:
            self._fresh = True
        if self._fresh:
            self.run += 1
            self._fresh = False
            self._timesteps = timesteps
        self._step = step
        num_steps = None if cache is None else cache.num_inference_steps
        if num_steps is None and timesteps is not None:
            num_steps = len(timesteps)
        branch = f"call{self._watched.call}" if cache is None else cache.name
        return Position(self.run, step, num_steps, branch)

    def watch(self, context: Context, timestep: Any) -> None:
        """See one transformer call whose pipeline does not say step and branch.

        Calls of one step are told apart by their order in it: that order is the branch.
        """
        if self.scheduler is None and self._watched.see(_scalar(timestep)):
            self._fresh = True
        step = self._scheduler_step(self.scheduler)
        timesteps = getattr(self.scheduler, "timesteps", None)
        self._watched.count((id(context), id(timesteps), self._watched.step, step))

    def _scheduler_step(self, scheduler: Any | None) -> int | None:
        if scheduler is None:
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
        if now is None or timesteps is None:
            return 0 if hasattr(scheduler, "step_index") else None
        where = (torch.as_tensor(timesteps) == torch.as_tensor(now)).nonzero()
        return int(where[0]) if len(where) else None


class _Watched:
    """Steps and calls counted from the ``timestep`` argument alone; owner: the clock."""

    def __init__(self) -> None:
        self.step = 0
        self.call = 0
        self._value: float | None = None
        self._direction = 0
        self._key: tuple[Any, ...] | None = None

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
        self.step, self._direction, self._key = 0, 0, None
        return True

    def count(self, key: tuple[Any, ...]) -> None:
        """Count the calls within one step."""
        self.call = self.call + 1 if key == self._key else 0
        self._key = key


def _scalar(timestep: Any) -> float | None:
    if timestep is None:
        return None
    return float(torch.as_tensor(timestep).max())


def attach(model: torch.nn.Module, clock: Clock) -> DenoiserHook:
    """Hook ``model`` so that ``cache_context`` reaches the clock."""
    hook = DenoiserHook(clock, model)
    created = not hasattr(model, "_diffusers_hook")
    hook.had_forward = "forward" in vars(model)
    hook.created_registry = created
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(hook, HOOK_NAME)
    registry.invalidate_child_registries_cache()
    copies.stay_plain(model, functools.partial(_undo, model))
    return hook


def _undo(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Take the hooks of diffusers, ours among them, out of the attributes of a copy of the model.

    Theirs go too: what a registry puts in place of ``forward`` runs the model it was made for.
    """
    fn_ref = state.pop("_diffusers_hook")._fn_refs[0]
    forward = fn_ref.original_forward or fn_ref.forward
    if getattr(forward, "__func__", None) is type(model).forward:
        state.pop("forward", None)
    else:
        state["forward"] = forward
    logger.warning(
        "this copy of an enabled %s runs without LiteAttention: enable() it as well if it is to "
        "run with it",
        type(model).__name__,
    )


def detach(model: torch.nn.Module, hook: DenoiserHook) -> None:
    """Undo :func:`attach`, leaving no attribute behind."""
    copies.release(model)
    registry = getattr(model, "_diffusers_hook", None)
    if registry is None or registry.get_hook(HOOK_NAME) is not hook:
        return
    registry.remove_hook(HOOK_NAME, recurse=False)
    registry.invalidate_child_registries_cache()
    if not registry.hooks:
        # remove_hook leaves the bound method as an instance attribute.
        if not hook.had_forward:
            vars(model).pop("forward", None)
        if hook.created_registry:
            del model._diffusers_hook
