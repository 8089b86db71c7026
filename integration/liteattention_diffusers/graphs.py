"""Forwards of a denoiser as CUDA graphs: the host hands over one launch instead of a thousand.

A graph repeats its launches, and LiteAttention's state moves on from step to step. So a graph
serves those steps whose launches would be the same: the same shapes, limits, walking direction and
addresses of lists. Under most policies that is four graphs a guidance branch: dense steps, the
first step that skips, and two in turn, as lists are read and written by turns. Beside each replay
the host brings the state to its step, without launches
(:meth:`liteattention_rocm.LiteAttention.begin_again`).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch.utils import _pytree as pytree

from liteattention_rocm import hip_graphs
from liteattention_rocm.lite.counting import Noted, Noting
from liteattention_rocm.remembered import watched

#: Graphs and kinds of calls that are kept; those used longest ago go first.
MOST_GRAPHS, MOST_FAMILIES = 64, 16
#: Signatures of a family that are remembered as seen.
_MOST_SEEN = 1024

#: What PEFT's layers decide by in Python.
_ADAPTED = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
#: Hooks on denoisers that graphs go along with.
OWN_HOOKS = ("liteattention_rocm", "liteattention_rocm_graphs")
_PLAIN = (type(None), bool, int, float, str)


class Recorder(Protocol):
    """What records launches: CUDA, or a stand-in where there is none."""

    def renew(self, device: torch.device) -> None:
        """Begin anew, on ``device``: earlier graphs are gone, or share nothing with later ones."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record the launches of ``run``; return what repeats them, and what ``run`` returned."""


class CudaRecorder:
    """CUDA graphs of one device that share memory: none may run beside another.

    Owner: a :class:`StepGraphs`. Lifetime: its owner's.
    """

    def __init__(self, device: torch.device) -> None:
        self.renew(device)

    def renew(self, device: torch.device) -> None:
        """Take another pool: PyTorch lets nobody back into one whose graphs are all gone."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make(device)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record the launches of ``run`` on a stream of their own; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _uncollected():
            # Other threads may go on allocating and waiting.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                    graph.capture_end()
                self._pool = torch.cuda.graph_pool_handle()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, result


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from freeing somebody's graph or event inside a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Turns(Protocol):
    """Who keeps state between forwards, as :class:`StepGraphs` asks it."""

    def place(self) -> tuple[Hashable, int, Hashable]:
        """Where the coming forward stands: generation, step, and what else tells calls apart."""

    def noting(
        self, block: torch.Tensor | None = None
    ) -> contextlib.AbstractContextManager[Noting]:
        """As :meth:`liteattention_rocm.LiteAttention.noting`."""

    def begin_again(
        self, calls: Sequence[Noted], generation: Hashable, step: int
    ) -> tuple[list[Any], Hashable] | None:
        """As :meth:`liteattention_rocm.LiteAttention.begin_again`."""

    def finish_again(
        self,
        calls: Sequence[Noted],
        turns: Sequence[Any],
        generation: Hashable,
        step: int,
        block: torch.Tensor,
    ) -> None:
        """As :meth:`liteattention_rocm.LiteAttention.finish_again`."""


@dataclass
class _Graph:
    """A captured forward, and the last run that used it.

    ``block`` is where it counts the tiles of each call.
    """

    replay: Callable[[], None]
    result: Any
    block: torch.Tensor
    last_run: int


@dataclass
class _Family:
    """Forwards whose arguments are alike, and which make the same calls.

    ``inputs`` are the tensors that graphs read. ``seen`` are signatures that ran once: everything
    that they launch is compiled and loaded.
    """

    calls: list[Noted]
    inputs: list[torch.Tensor]
    seen: set[Hashable] = field(default_factory=set)


class GraphHook(ModelHook):  # type: ignore[misc]
    """Runs a denoiser that has no handle from graphs; see :func:`attached`."""

    _is_stateful = True

    def __init__(self, graphs: StepGraphs) -> None:
        super().__init__()
        self.graphs = graphs

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a forward from a graph, or as it is."""
        return self.graphs(self.fn_ref.original_forward, args, kwargs)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """The pipeline is at the end of a run."""
        self.graphs.run_over()
        return module


@contextlib.contextmanager
def attached(graphs: StepGraphs) -> Iterator[None]:
    """Run a denoiser with whatever attention it has from graphs."""
    registry = HookRegistry.check_if_exists_or_initialize(graphs.model)
    graphs.run_over()
    registry.register_hook(GraphHook(graphs), OWN_HOOKS[1])
    registry.invalidate_child_registries_cache()
    try:
        yield
    finally:
        registry.remove_hook(OWN_HOOKS[1], recurse=False)
        registry.invalidate_child_registries_cache()


class StepGraphs:
    """Runs the forwards of one denoiser: eagerly, or from graphs once they have been seen.

    A forward runs eagerly the first time that its launches are asked for, is captured the second
    time, and replayed from then on. Results are the same bits. Eager in any case are calls with
    gradients, under autocast (which keeps weights that it has cast where it likes), dispatch modes,
    profilers and transforms, while a compiler traces, on other devices, and with arguments other
    than plain tensors and numbers. So are those that find ``MOST_GRAPHS`` graphs in use.

    Key: none. Owner: a handle, or who runs a model without one. Lifetime: its owner's. One thread
    at a time. Graphs hold the addresses of weights: :meth:`run_over` has them looked at again.
    """

    def __init__(self, model: torch.nn.Module, recorder: Recorder, turns: Turns | None = None):
        self.model = model
        #: Who keeps state between forwards; None if nobody does.
        self.turns = turns
        self._recorder = recorder
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._graphs: OrderedDict[tuple[Hashable, Hashable], _Graph] = OrderedDict()
        self._weights: Hashable = None
        self._check = True
        self._run_number = 0
        self._lock = threading.Lock()
        #: How many forwards were run in each way.
        self.counts = {"eager": 0, "captured": 0, "replayed": 0}

    def run_over(self) -> None:
        """Look at the model's weights before the next forward: a run is over, or another begins."""
        self._check = True

    def clear(self) -> None:
        """Drop all graphs."""
        self._families.clear()
        self._graphs.clear()

    def __call__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``forward(*args, **kwargs)`` returns, in memory of its own.

        Raises:
            RuntimeError: the model does something that no graph can hold.
        """
        with self._lock:
            return self._run(forward, args, kwargs)

    def _run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, shape = pytree.tree_flatten((args, kwargs))
        kind = None if _seen_by_others() else _kind(leaves, shape, self.model)
        if kind is None:
            self.counts["eager"] += 1
            return forward(*args, **kwargs)
        generation, step, more = (0, 0, None) if self.turns is None else self.turns.place()
        if self._check:
            _refuse_hooks(self.model)
            weights = _addresses(self.model)
            if weights != self._weights:
                self.clear()
                self._recorder.renew(_device_of(leaves))
                self._weights = weights
            self._check = False
            self._run_number += 1
        key = (kind, more)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        family = self._families.get(key)
        if family is None:
            return self._first(key, tensors, lambda: forward(*args, **kwargs))
        self._families.move_to_end(key)
        turns: list[Any] = []
        signature: Hashable = ()
        if self.turns is not None:
            begun = self.turns.begin_again(family.calls, generation, step)
            if begun is None:
                return forward(*args, **kwargs)
            turns, signature = begun
        known = (key, signature)
        if known not in self._graphs and (signature not in family.seen or not self._room()):
            if len(family.seen) >= _MOST_SEEN:
                family.seen.clear()
            family.seen.add(signature)
            self.counts["eager"] += 1
            return forward(*args, **kwargs)
        try:
            if known not in self._graphs:
                self._graphs[known] = self._capture(family, leaves, shape, forward)
            graph = self._graphs[known]
            graph.last_run = self._run_number
            self._graphs.move_to_end(known)
            for held, given in zip(family.inputs, tensors, strict=True):
                held.copy_(given)
            graph.replay()
            result = pytree.tree_map_only(torch.Tensor, torch.clone, graph.result)
        except BaseException:
            if self.turns is not None:
                # What a capture entered was never computed: no call of this step counts.
                self.turns.begin_again(family.calls, generation, step)
            raise
        self.counts["replayed"] += 1
        if self.turns is not None:
            self.turns.finish_again(family.calls, turns, generation, step, graph.block)
        return result

    def _room(self) -> bool:
        """Make room for a graph, unless each of them serves this run or served the last one."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        if next(iter(self._graphs.values())).last_run >= self._run_number - 1:
            return False
        self._graphs.popitem(last=False)
        return True

    def _first(self, key: Hashable, tensors: list[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Run a forward of a new kind and note its calls."""
        self.counts["eager"] += 1
        with _noting(self.turns, None) as noting:
            result = forward()
        if not noting.complete:
            return result
        while len(self._families) >= MOST_FAMILIES:
            gone, _ = self._families.popitem(last=False)
            for held in [held for held in self._graphs if held[0] == gone]:
                del self._graphs[held]
        inputs = [torch.empty_like(x) for x in tensors]  # dense, also where a pipeline expands one
        self._families[key] = _Family(noting.calls, inputs, {noting.signature})
        return result

    def _capture(
        self, family: _Family, leaves: list[Any], shape: Any, forward: Callable[..., Any]
    ) -> _Graph:
        """Capture a forward of the inputs that are held; its calls stand at their turns."""
        hip_graphs.warn(f"diffusers, for {type(self.model).__name__},")
        held = iter(family.inputs)
        device = family.inputs[0].device
        args, kwargs = pytree.tree_unflatten(
            [next(held) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], shape
        )
        block = torch.zeros(len(family.calls), 2, dtype=torch.int64, device=device)
        try:
            with _noting(self.turns, block) as noting:
                replay, result = self._recorder.capture(lambda: forward(*args, **kwargs))
        except Exception as error:
            raise RuntimeError(
                f"a forward of {type(self.model).__name__} cannot be captured in a graph: {error}. "
                "Run it without graphs: enable(..., graphs=False)"
            ) from error
        if [call[:3] for call in noting.calls] != [call[:3] for call in family.calls]:
            raise RuntimeError(
                f"a forward of {type(self.model).__name__} called other layers than the one before "
                "with arguments of the same kind, so no graph can stand for it: "
                "enable(..., graphs=False)"
            )
        self.counts["captured"] += 1
        return _Graph(replay, result, block, self._run_number)


@contextlib.contextmanager
def _noting(turns: Turns | None, block: torch.Tensor | None) -> Iterator[Noting]:
    if turns is None:
        yield Noting(block)
        return
    with turns.noting(block) as noting:
        yield noting


def _seen_by_others() -> bool:
    """Whether a call is more than its launches."""
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
        or watched()
    )


def _kind(leaves: Sequence[Any], shape: Any, model: torch.nn.Module) -> Hashable | None:
    """What tells kinds of calls apart; None for one that is run eagerly."""
    parts: list[Hashable] = [
        shape, model.training, torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
    ]  # fmt: skip
    tensors = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) is not torch.Tensor or not _on_device(leaf):
                return None
            tensors += 1
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif type(leaf) in _PLAIN:
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts) if tensors else None


def _device_of(leaves: Sequence[Any]) -> torch.device:
    """Device of the first tensor among arguments."""
    return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def graph_reasons(model: torch.nn.Module) -> list[str]:
    """Say why a denoiser cannot run from CUDA graphs; none means it can."""
    reasons = []
    weight = next(model.parameters(), None)
    if weight is None or not _on_device(weight):
        where = "it has no weights" if weight is None else f"it is on {weight.device}"
        reasons.append(f"CUDA graphs need a model on a GPU, {where}: graphs=False")
    return reasons + _hook_reasons(model)


def recorder_for(model: torch.nn.Module) -> Recorder:
    """What records the launches of a denoiser."""
    return CudaRecorder(next(model.parameters()).device)


def _refuse_hooks(model: torch.nn.Module) -> None:
    reasons = _hook_reasons(model)
    if reasons:
        raise ValueError(
            f"{type(model).__name__} cannot run from CUDA graphs: {'; '.join(reasons)}. "
            "Take that off, or enable(..., graphs=False)"
        )


def _hook_reasons(model: torch.nn.Module) -> list[str]:
    """Python that runs beside the model and decides by step, or moves weights."""
    reasons = []
    if getattr(model, "is_cache_enabled", False):
        reasons.append("a cache decides by step what is computed: call disable_cache()")
    if getattr(model, "_parallel_config", None) is not None:
        reasons.append("processes exchange parts of the sequence")
    moved = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    if moved:
        reasons.append(f"accelerate's hooks move or cast weights ({len(moved)} modules)")
    foreign = sorted(
        {
            name
            for module in model.modules()
            for name in getattr(getattr(module, "_diffusers_hook", None), "hooks", ())
            if name not in OWN_HOOKS
        }
    )
    if foreign:
        reasons.append(f"diffusers' hooks run beside the model ({', '.join(foreign)})")
    return reasons


def _addresses(model: torch.nn.Module) -> Hashable:
    """Where the weights of a model lie, and which modules it has: adapters add some.

    How far an adapter counts is a number in Python (PEFT's ``scaling``), and so is whether it does.
    """
    modules: list[Hashable] = []
    for module in model.modules():
        modules.append((id(module), None))
        if hasattr(module, "scaling"):
            modules += [(name, str(getattr(module, name, None))) for name in _ADAPTED]
        processor = getattr(module, "processor", None)
        if processor is not None:
            backend = getattr(processor, "_attention_backend", None)
            modules.append((type(processor), str(backend)))
    held = (*model.parameters(), *model.buffers())
    return tuple(modules), tuple((each.data_ptr(), each.dtype, each.shape) for each in held)
