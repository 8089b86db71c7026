"""The hook on a denoising transformer: what its pipeline says reaches the clock."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks.hooks import BaseState, CacheContext, HookRegistry, ModelHook, StateManager

from . import copies
from .clock import Clock
from .graphs import StepGraphs
from .module_hooks import same_key, take_out

logger = logging.getLogger(__name__)

HOOK_NAME = "liteattention_rocm"
#: Arguments that say something about step and branch.
_WATCHED = ("timestep", "encoder_hidden_states")


class Context(StateManager):  # type: ignore[misc]
    """The ``cache_context`` a pipeline is in, as diffusers tells its cache hooks.

    Owner: the hook on one denoiser. Lifetime: that hook's.
    """

    def __init__(self, clock: Clock, denoiser: int) -> None:
        super().__init__(BaseState)
        self._clock = clock
        #: Tells the denoiser from others; the same after ``pause`` and ``resume``.
        self.denoiser = denoiser
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
        self.watch = context is None or (context.step_index is None and not self._clock.has_steps)


class DenoiserHook(ModelHook):  # type: ignore[misc]
    """Lets ``cache_context`` and the end-of-run reset reach us; watches calls only if it must.

    It watches by a hook of PyTorch. accelerate, which offloads models, puts back the ``forward``
    that it found at the end of every run, and what was around it since is gone.
    """

    _is_stateful = True

    def __init__(self, clock: Clock, model: torch.nn.Module) -> None:
        super().__init__()
        self.context = Context(clock, id(model))
        self._clock = clock
        #: Called after each forward that ran eagerly, and at the end of a run.
        self.after_forward: Callable[[], None] | None = None
        self.after_run: Callable[[], None] | None = None
        parameters = list(inspect.signature(model.forward).parameters)
        #: Where callers that name no arguments have them.
        self._places = {
            name: parameters.index(name) if name in parameters else -1 for name in _WATCHED
        }

    def see_call(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Watch the call if neither a context nor a scheduler says where it stands."""
        if self.context.watch:
            self._watch(*[self._given(name, args, kwargs) for name in _WATCHED])

    def see_end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Tell that a forward is over."""
        if self.after_forward is not None and not torch.compiler.is_compiling():
            self.after_forward()

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._places[name]
        return args[place] if 0 <= place < len(args) else kwargs.get(name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, timestep: Any, text: Any) -> None:
        self._clock.watch(self.context.denoiser, timestep, text)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """The pipeline is at the end of a run."""
        self.context.reset()
        self._clock.end_run()
        if self.after_run is not None:
            self.after_run()
        return module


class GraphedHook(DenoiserHook):
    """Also runs the forwards from graphs."""

    def __init__(self, clock: Clock, model: torch.nn.Module) -> None:
        super().__init__(clock, model)
        #: Set by who knows the state between forwards, before the first of them.
        self.graphs: StepGraphs

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a forward from a graph, or as it is."""
        return self.graphs(self.fn_ref.original_forward, args, kwargs)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """The pipeline is at the end of a run."""
        self.graphs.run_over()
        reset: torch.nn.Module = super().reset_state(module)
        return reset


def attach(model: torch.nn.Module, clock: Clock, *, graphed: bool = False) -> DenoiserHook:
    """Hook ``model`` so that ``cache_context`` reaches the clock."""
    hook = (GraphedHook if graphed else DenoiserHook)(clock, model)
    created = not hasattr(model, "_diffusers_hook")
    hook.had_forward = "forward" in vars(model)
    hook.created_registry = created
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(hook, HOOK_NAME)
    registry.invalidate_child_registries_cache()
    hook.wrapper = vars(model)["forward"]
    hook.seeing = same_key(
        model.register_forward_pre_hook(hook.see_call, with_kwargs=True),
        model._forward_pre_hooks,
        model._forward_pre_hooks_with_kwargs,
    )
    hook.seeing_end = same_key(model.register_forward_hook(hook.see_end), model._forward_hooks)
    copies.stay_plain(model, functools.partial(_undo, model))
    return hook


def _undo(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Take the hooks of diffusers, ours among them, out of the attributes of a copy of the model.

    Theirs go too: what a registry puts in place of ``forward`` runs the model it was made for.
    """
    take_out(state)
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
    """Undo :func:`attach`, leaving no attribute behind.

    A ``forward`` that others put there since, around ours or in place of it, stays.
    """
    copies.release(model)
    hook.seeing.remove()
    hook.seeing_end.remove()
    registry = getattr(model, "_diffusers_hook", None)
    if registry is None or registry.get_hook(HOOK_NAME) is not hook:
        return
    own = vars(model)
    found = own.get("forward")
    others = found is not hook.wrapper and registry._hook_order[-1] == HOOK_NAME
    if others and own.get("_old_forward") is hook.wrapper:  # accelerate's, around ours
        own["_old_forward"] = hook.fn_ref.original_forward or hook.fn_ref.forward
    registry.remove_hook(HOOK_NAME, recurse=False)
    registry.invalidate_child_registries_cache()
    if others and found is not None:
        own["forward"] = found
    if not registry.hooks:
        # remove_hook leaves the bound method as an instance attribute.
        if found is None or not (hook.had_forward or others):
            own.pop("forward", None)
        if hook.created_registry:
            del model._diffusers_hook
