"""The memory that tensors lie in: whether they share it, and telling autograd of writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: torch.autograd.graph.increment_version without its 0.5 us of Python.
increment_version = torch._C._increment_version

#: Work that an exact comparison of two tensors may take; past it the answer is the safe one.
_EFFORT = 100_000


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory, and not a stand-in of a compiler, a tracer or a transform."""
    if torch.compiler.is_dynamo_compiling():
        return False
    if type(tensor) is torch.Tensor:
        return not (tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    return not (
        tensor.is_meta
        or isinstance(tensor, torch._subclasses.FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or is_traceable_wrapper_subclass(tensor)
    )


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * step
    return (last + 1) * tensor.element_size()


def mark_written(*tensors: torch.Tensor) -> None:
    """Tell autograd that tensors were written to, for 0.2 us.

    A backward pass that saved one of them then refuses to run, rather than use the new values.
    """
    try:
        increment_version(tensors)
    except RuntimeError:  # inference tensors: no version, and no backward pass saves them
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def target_reasons(name: str, target: torch.Tensor) -> list[str]:
    """Say why a tensor cannot be written to: negated, or two of its elements lie in one place."""
    if target.is_neg():
        return [f"{name} must not be a negated view: call .resolve_neg() on it"]
    steps = list(target.stride())
    if any(step == 0 and size > 1 for step, size in zip(steps, target.shape, strict=True)):
        return [f"{name} must not be an expanded tensor, got strides {steps}"]
    if has_address(target) and _overlaps_itself(target):
        return [
            f"{name} must not overlap itself, got {list(target.shape)} with strides {steps}: "
            "give it memory of its own"
        ]
    return []


def overlap_reasons(
    name: str,
    target: torch.Tensor,
    sources: Mapping[str, torch.Tensor | None],
    remedy: str = "give it memory of its own",
) -> list[str]:
    """Say which sources share memory with ``target``, which is written to.

    Of stand-ins of a compiler only those are known to that are one tensor.
    """
    if not has_address(target):
        return [
            f"{name} must not overlap {other}: {remedy}"
            for other, tensor in sources.items()
            if tensor is target
        ]
    return [
        f"{name} must not overlap {other}: {remedy}"
        for other, tensor in sources.items()
        if tensor is not None
        and has_address(tensor)
        and tensor.device == target.device
        and shares_memory(target, tensor)
    ]


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors share a byte, e.g. not so for two heads of one buffer."""
    a_begin, b_begin = a.data_ptr(), b.data_ptr()
    if not (a_begin < b_begin + extent_bytes(b) and b_begin < a_begin + extent_bytes(a)):
        return False
    return _meet(np.asarray(_Address(a)), np.asarray(_Address(b)))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in one place; only sizes and strides matter."""
    dims = sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    end = 1  # of the dimensions so far: a dimension that steps over them adds no overlap
    nested = True
    for step, size in dims:
        nested = nested and step >= end
        end += (size - 1) * step
    if nested or not tensor.numel():
        return False
    # Two indices that differ first in one dimension: the first is at 0 there, the second past it.
    elements = np.asarray(_Address(tensor))
    while elements.ndim > 1:
        if len(elements) > 1 and _meet(elements[:1], elements[1:]):
            return True
        elements = elements[0]
    return False


class _Address:
    """A tensor's memory as numpy sees addresses; nothing is read through it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        # Nothing steps over a single element: its stride may be any number.
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        steps = [step if count > 1 else 0 for step, count in dims]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "shape": (*tensor.shape, size),
            "strides": (*(step * size for step in steps), 1),
        }


def _meet(a: Any, b: Any) -> bool:
    try:
        return np.shares_memory(a, b, _EFFORT)  # type: ignore[arg-type] # stubs know only named efforts
    except np.exceptions.TooHardError:
        return True
