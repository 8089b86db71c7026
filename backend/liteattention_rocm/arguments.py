"""Rules for single arguments, shared by every public function.

Each rule returns what is wrong as ``(reasons of type, reasons of value)``, so that a call can
report all of them at once: ``TypeError`` if any is of type, else ``ValueError``.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch.autograd import forward_ad

from . import engines
from .memory import has_address

Reasons = tuple[list[str], list[str]]

#: Lengths are int32 on the device: no window, and no bound of a length, has to be larger.
LARGEST_LENGTH = 2**31 - 1

_LARGEST_SHOWN = 2**64


def raise_if(what: str, kinds: list[str], values: list[str]) -> None:
    """Raise one error with every reason: TypeError if any is about types, else ValueError."""
    if kinds or values:
        error = TypeError if kinds else ValueError
        raise error(f"invalid {what}: " + "; ".join([*kinds, *values]))


# ------------------------------------------------------------------------- numbers and names


def is_integer(value: Any) -> bool:
    """Whether it is an integer of any type, NumPy's and a compiler's too, but no bool."""
    return isinstance(value, int | torch.SymInt | numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether it is a real number of any type, NumPy's too, but no bool."""
    return isinstance(value, int | float | numbers.Real) and not isinstance(value, bool)


def as_float(number: Any) -> float:
    """Return a real number as Python's float; infinity stands for what is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def plain_length(number: Any) -> Any:
    """Return a window or a bound of a length as Python's int, cut to the longest possible length.

    A compiler's integer stays as it is.
    """
    if isinstance(number, torch.SymInt):
        return number
    return min(operator.index(number), LARGEST_LENGTH)


def shown(number: Any) -> str:
    """Return a number as messages show it; Python refuses to print very long integers."""
    if isinstance(number, int) and abs(number) >= _LARGEST_SHOWN:
        return f"an integer of {number.bit_length()} bits"
    return str(number)


def real_reasons(name: str, number: Any) -> Reasons:
    """Say whether a number is not real or not finite as a float."""
    if not is_real(number):
        return [f"{name} must be a number, got {type(number).__name__}"], []
    if not math.isfinite(as_float(number)):
        return [], [f"{name} must be finite, got {shown(number)}"]
    return [], []


def flag_reasons(**flags: Any) -> list[str]:
    """Say which flags are no bools (reasons of type)."""
    return [
        f"{name} must be a bool, got {type(flag).__name__}"
        for name, flag in flags.items()
        if not isinstance(flag, bool)
    ]


def choice_reasons(name: str, value: Any, choices: tuple[str, ...]) -> list[str]:
    """Say whether a value is none of the choices (reasons of value)."""
    if isinstance(value, str) and value in choices:
        return []
    return [f"{name} must be one of {', '.join(choices)}, got {value!r}"]


def engine_reasons(engine: Any) -> Reasons:
    """Say whether ``engine=`` names no engine of this build; None and "" choose by device."""
    if engine is not None and not isinstance(engine, str):
        return [f"engine must be a string or None, got {type(engine).__name__}"], []
    if engine and engine not in engines.available():
        listed = ", ".join(engines.available())
        return [], [f"unknown engine {engine!r}: this build has {listed}"]
    return [], []


# ------------------------------------------------------------------------- tensors


def tensor_reasons(name: str, tensor: Any) -> Reasons:
    """Say whether an argument is no tensor whose sizes, strides and memory can be looked at.

    No other rule may be asked about a tensor for which there is a reason here.
    """
    if type(tensor) is torch.Tensor and _is_plain(tensor):
        return [], []
    if not isinstance(tensor, torch.Tensor):
        return [f"{name} must be a tensor, got {type(tensor).__name__}"], []
    if torch.compiler.is_compiling():  # which has looked itself
        return [], []
    if torch.nn.parameter.is_lazy(tensor):
        return [f"{name} is a parameter that is not initialized"], []
    if tensor.is_nested:
        return [f"{name} is a nested tensor: pass packed sequences to attention_varlen"], []
    if tensor.layout is not torch.strided:
        return [f"{name} must be strided, got {tensor.layout}: call .to_dense() on it"], []
    if tensor._is_zerotensor():
        return [], [f"{name} has no memory (a zero of forward-mode derivatives)"]
    if torch._C._functorch.is_batchedtensor(tensor):
        return [], [f"{name} is batched by torch.vmap: make that a dimension of the tensors"]
    if torch._C._functorch.is_functionaltensor(tensor):
        return [], [f"{name} is under torch.func.functionalize: use torch.compile or make_fx"]
    return [], []


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is sizes, strides and memory, as nearly every tensor is."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def derivative_reasons(name: str, tensor: torch.Tensor) -> list[str]:
    """Say whether a derivative is wanted with respect to a tensor: there is none.

    Reverse mode counts while gradients are recorded; a forward-mode tangent counts always.
    """
    reasons = []
    if tensor.requires_grad and torch.is_grad_enabled():
        reasons.append(
            f"{name} requires grad, and there is no backward pass: detach it or use torch.no_grad()"
        )
    if in_forward_mode() and _tangent(tensor) is not None:
        reasons.append(
            f"{name} carries a forward-mode tangent, and there is no derivative: detach it"
        )
    return reasons


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    unpacked: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    tangent: torch.Tensor | None = unpacked.tangent
    return tangent


def in_forward_mode() -> bool:
    """Whether tensors may carry forward-mode tangents (``torch.func.jvp``, ``dual_level``)."""
    return forward_ad._current_level >= 0


def stride_reasons(name: str, tensor: torch.Tensor) -> list[str]:
    """Say whether the last dimension is not contiguous."""
    if tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return []
    return [
        f"{name} must be contiguous in its last dimension, got strides "
        f"{list(tensor.stride())}: call .contiguous() on it"
    ]


def readable(tensor: torch.Tensor) -> bool:
    """Whether looking at values costs nothing: CPU memory that is really there."""
    return tensor.device.type == "cpu" and has_address(tensor)
