"""Calls that were checked and bound, to be repeated with other tensors of the same kind.

What was checked once is not checked again. A call is remembered by all that the checks and the
engine's choices depend on (:func:`recall`): a repeated one looks where its tensors lie and goes
straight to what the engine bound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .contract import Bound
from .memory import extent_bytes, shares_memory

#: A parameter is a tensor in everything but its type.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Distances between overlapping ranges that a call remembers as harmless.
_MOST_PASSED = 64

# Each of these takes 60 ns; together they say whether anything but the engine must see a call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled


class Call(NamedTuple):
    """A call that was checked and bound. It holds no tensor of the call and no address.

    ``run`` takes a tuple of tensors. ``names`` and ``spans`` (bytes from the first to past the last
    element, 0 for None) are theirs, in its order; ``written`` are the places of those that the
    caller gave to be written to. ``passed``: pairs of tensors whose ranges meet at a distance at
    which no element is shared, such as keys and values that are views of one cache.
    """

    run: Bound
    names: tuple[str, ...]
    spans: tuple[int, ...]
    written: tuple[int, ...]
    passed: set[tuple[int, int, int]]

    def overlaps(self, tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[int, int]]:
        """Pairs of places, written and other, that share memory."""
        begins = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        spans = self.spans
        found = []
        for i in self.written:
            begin = begins[i]
            end = begin + spans[i]
            for j, other in enumerate(begins):
                if other < end and begin < other + spans[j] and i != j:
                    pair = (i, j, other - begin)
                    if pair in self.passed:
                        continue
                    if shares_memory(tensors[i], tensors[j]):  # type: ignore[arg-type]
                        found.append((i, j))
                    elif len(self.passed) < _MOST_PASSED:
                        self.passed.add(pair)
        return found


class Calls(dict[Any, Any]):
    """Calls by what they depend on; past ``most`` the one that was made first goes.

    Owner: this module, one per process, or a batch. Lifetime: its owner's.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Any, call: Any) -> None:
        """Remember a call."""
        if len(self) >= self._most:
            self.pop(next(iter(self)), None)
        self[key] = call


#: Calls of the process.
calls = Calls(1024)
#: What calls over paged caches have shown to hold, for the batches of later steps.
kinds = Calls(256)


def forget() -> None:
    """Forget every call of the process."""
    calls.clear()
    kinds.clear()


def bound_call(run: Bound, tensors: Any, written: tuple[int, ...]) -> Call:
    """Return what is to be remembered of a bound call with tensors (a named tuple) of its kind."""
    spans = tuple([0 if t is None else extent_bytes(t) for t in tensors])
    return Call(run, tensors._fields, spans, written, set())


def recall(
    found: Calls, tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Any, Call | None]:
    """Look up a call: (key, call), with None for a call that is not remembered.

    The key is None for a call that must be looked at closely every time, because a compiler, a
    profiler or a transform watches, a derivative is wanted, or an argument is no plain tensor in
    memory. It names everything about the tensors but their addresses (modulo 16), and the types of
    the options too: True equals 1 and 1.0 as a key.
    """
    if (
        _dispatch_modes()
        or _function_modes()
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
            place = tensor.data_ptr()
            if (
                type(tensor) not in _PLAIN
                # Numbers that are not in memory as they are: the dispatcher writes them out first.
                or not place
                or tensor.is_neg()
                or (grad and tensor.requires_grad)
            ):
                return None, None
            kind += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place & 15)
        key = tuple(kind)
        return key, found.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # Not tensors, tensors without strides or addresses, options that cannot be a key.
        return None, None
