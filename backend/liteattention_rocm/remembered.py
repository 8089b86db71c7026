"""Calls that were checked and bound, to be repeated with other tensors of the same kind.

What was checked once is not checked again. A call is remembered by all that the checks and the
engine's choices depend on (:func:`recall`): a repeated one looks where its tensors lie and goes
straight to what the engine bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from .contract import Bound
from .memory import extent_bytes, increment_version, mark_written, shares_memory

#: A parameter is a tensor in everything but its type.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Sets of addresses that a call remembers as harmless.
_MOST_PASSED = 256

# Each of these takes 60 ns; together they say whether anything but the engine must see a call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled


class Call(NamedTuple):
    """A call that was checked and bound. It holds no tensor of the call.

    ``run`` takes a tuple of tensors. ``names`` and ``spans`` (bytes from the first to past the last
    element, 0 for None) are theirs, in its order; ``written`` are the places of those that the
    caller gave to be written to. ``passed``: addresses at which no tensor that is written to shared
    memory with another. Sizes and strides are those of the call, so that holds for all time.
    ``holds``: of a call that rests on values in CPU memory, says whether they are still right.
    ``value_dim``: head dim of the output, if it is another than the queries'.
    """

    run: Bound
    names: tuple[str, ...]
    spans: tuple[int, ...]
    written: tuple[int, ...]
    passed: set[tuple[int, ...]]
    holds: Callable[[], bool] | None = None
    value_dim: int | None = None

    def claim(self, tensors: tuple[torch.Tensor | None, ...], what: str, remedy: str = "") -> None:
        """Tell autograd what is going to be written, unless it shares memory: that is an error.

        Raises:
            ValueError: a tensor that is written to shares memory with another; names all pairs.
        """
        begins = []
        for tensor in tensors:
            begins.append(0 if tensor is None else tensor.data_ptr())
        found = tuple(begins)
        if found not in self.passed:
            pairs = self._overlaps(tensors, found)
            if pairs:
                remedy = remedy or "give it memory of its own"
                listed = [f"{a} must not overlap {b}: {remedy}" for a, b in pairs]
                raise ValueError(f"invalid {what}: " + "; ".join(listed))
            if len(self.passed) >= _MOST_PASSED:
                self.passed.clear()
            self.passed.add(found)
        written: Any = tuple(map(tensors.__getitem__, self.written))
        try:
            increment_version(written)
        except RuntimeError:
            mark_written(*written)

    def _overlaps(
        self, tensors: tuple[torch.Tensor | None, ...], begins: tuple[int, ...]
    ) -> list[tuple[str, str]]:
        """Names of tensors that share memory: written, other."""
        spans = self.spans
        return [
            (self.names[i], self.names[j])
            for i in self.written
            for j, other in enumerate(begins)
            if i != j
            and not (j in self.written and i < j)
            and other < begins[i] + spans[i]
            and begins[i] < other + spans[j]
            and shares_memory(tensors[i], tensors[j])  # type: ignore[arg-type]
        ]


class Calls(OrderedDict[Any, Any]):
    """Calls by what they depend on; past ``most`` the one that was made longest ago goes.

    Owner: this module, one per process, or a batch. Lifetime: its owner's.
    """

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Any, call: Any) -> None:
        """Remember a call."""
        self[key] = call
        if len(self) > self._most:
            self.popitem(last=False)


#: Calls of the process.
calls = Calls(1024)
#: Packed calls whose plans rest on bounds: their sizes are new in most steps.
packed = Calls(256)
#: What calls over paged caches have shown to hold, for the batches of later steps.
kinds = Calls(256)
#: Calls over paged caches that serve every batch of their bounds: other steps, and other groups of
#: caches in the same step.
bounded = Calls(512)


def forget() -> None:
    """Forget every call of the process."""
    calls.clear()
    packed.clear()
    kinds.clear()
    bounded.clear()


def bound_call(run: Bound, tensors: Any, written: tuple[int, ...]) -> Call:
    """Return what is to be remembered of a bound call with tensors (a named tuple) of its kind."""
    spans: tuple[int, ...] = ()
    if written:
        spans = tuple([0 if t is None else extent_bytes(t) for t in tensors])
    return Call(run, tensors._fields, spans, written, set())


def _seen_by_modes() -> bool:
    """Whether one of the function modes there are may be to see a call.

    A default device (``torch.set_default_device``, ``with torch.device(...)``) is none of these: it
    changes where new tensors are made, and ours all name their device.
    """
    modes = map(_function_mode, range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def watched() -> bool:
    """Whether a mode, a transform, a tracer or a profiler is to see calls of operators."""
    return bool(
        _dispatch_modes()
        or (_function_modes() and _seen_by_modes())
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _profiling()
    )


def recall(found: Calls, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """Look up a call: (key, call), with None for a call that is not remembered.

    The key is None for a call that must be looked at closely every time, because a compiler, a
    profiler or a transform watches, a derivative is wanted, or an argument is no plain tensor in
    memory. It names everything about the tensors but their addresses (modulo 16), and the types of
    the options too: True equals 1 and 1.0 as a key.
    """
    if (
        _dispatch_modes()
        or (_function_modes() and _seen_by_modes())
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _profiling()
    ):
        return None, None
    grad = _grad_enabled()
    kind: list[Any] = [options, *map(type, options)]
    try:
        for tensor in tensors:
            if tensor is None:
                kind.append(None)
                continue
            if type(tensor) not in _PLAIN:
                return None, None
            place = tensor.data_ptr()
            if (
                # Numbers that are not in memory as they are: the dispatcher writes them out first.
                not place or tensor.is_neg() or (grad and tensor.requires_grad)
            ):
                return None, None
            kind.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place & 15))
        key = tuple(kind)
        return key, found.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # Not tensors, tensors without strides or addresses, or options that cannot be a key.
        return None, None
