"""Rules for single arguments, and the collector that every call reports through.

A call looks at everything that is wrong with it before anything runs and raises one exception with
all reasons: ``TypeError`` if any is about types, else ``ValueError``.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from . import engines
from .memory import has_address, overlap_reasons, target_reasons

#: Lengths are int32 on the device: no window, and no bound of a length, has to be larger.
LARGEST_LENGTH = 2**31 - 1

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_LARGEST_SHOWN = 2**64

#: Factors in use lie within these powers of two. Products and quotients of two of them, and log2(e)
#: on top, are normal fp32 numbers then, and scores of up to 2^67 do not overflow when scaled.
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-60, 2.0**60

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


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


def shown_list(numbers: list[int]) -> str:
    """Return the first twelve numbers of a list as messages show them."""
    return str(numbers) if len(numbers) <= 12 else f"{str(numbers[:12])[:-1]}, ...]"


def in_forward_mode() -> bool:
    """Whether tensors may carry forward-mode tangents (``torch.func.jvp``, ``dual_level``)."""
    return forward_ad._current_level >= 0


def readable(tensor: torch.Tensor) -> bool:
    """Whether looking at values costs nothing: CPU memory that is really there."""
    return tensor.device.type == "cpu" and has_address(tensor)


class Reasons:
    """What is wrong with a call: ``types`` and ``values``, in the order in which it was found."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.values: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.types or self.values)

    def add(self, others: Reasons) -> None:
        """Add what was found elsewhere."""
        self.types += others.types
        self.values += others.values

    def raise_for(self, what: str) -> None:
        """Raise one error with every reason, if there is one."""
        if self.types or self.values:
            error = TypeError if self.types else ValueError
            raise error(f"invalid {what}: " + "; ".join([*self.types, *self.values]))

    # ------------------------------------------------------------------ numbers and names

    def real(self, name: str, number: Any, *, positive: bool = False, remedy: str = "") -> None:
        """A real number that is finite as a float."""
        if not is_real(number):
            self.types.append(f"{name} must be a number, got {type(number).__name__}")
        elif not -math.inf < as_float(number) < math.inf:  # isfinite would end a trace
            self.values.append(f"{name} must be finite, got {shown(number)}")
        elif positive and number <= 0:
            self.values.append(f"{name} must be positive, got {shown(number)}{remedy}")

    def flags(self, **flags: Any) -> None:
        """True or False, and nothing that is merely like it."""
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                self.types.append(f"{name} must be a bool, got {type(flag).__name__}")

    def choice(self, name: str, value: Any, choices: tuple[str, ...]) -> None:
        """One of a few names."""
        if not (isinstance(value, str) and value in choices):
            self.values.append(f"{name} must be one of {', '.join(choices)}, got {value!r}")

    def engine(self, engine: Any) -> None:
        """The name of an engine of this build; None and "" choose by device."""
        if engine is not None and not isinstance(engine, str):
            self.types.append(f"engine must be a string or None, got {type(engine).__name__}")
        elif engine and engine not in engines.available():
            listed = ", ".join(engines.available())
            self.values.append(f"unknown engine {engine!r}: this build has {listed}")

    def bound(self, name: str, bound: Any) -> None:
        """A bound of lengths, or None."""
        if bound is None:
            return
        if not is_integer(bound):
            self.types.append(f"{name} must be an int or None, got {type(bound).__name__}")
        elif bound < 0:
            self.values.append(f"{name} must not be negative, got {shown(bound)}")

    def factor(self, name: str, value: float, remedy: str = "") -> None:
        """A factor in use: its products, quotients and log2 forms stay normal in fp32."""
        if not _LEAST_FACTOR <= abs(value) <= _MOST_FACTOR:
            self.values.append(
                f"{name} must be from 2^-60 to 2^60 (8.7e-19 to 1.2e18) in size, got {value}"
                f"{remedy}"
            )

    def scale(self, scale: Any, k_scale: Any = 1.0) -> None:
        """Factors of q.k; the first may be 0. None is the default scale."""
        if scale is None and type(k_scale) is float and k_scale == 1.0:
            return
        right = len(self.types) + len(self.values)
        if scale is not None:
            self.real("scale", scale)
        self.real("k_scale", k_scale, positive=True)
        if len(self.types) + len(self.values) > right or scale == 0:
            return
        product = as_float(k_scale) * (1.0 if scale is None else as_float(scale))
        self.factor("scale" if k_scale == 1 else "scale * k_scale", product)

    def scales(self, **scales: Any) -> None:
        """Positive factors, each by itself."""
        for name, number in scales.items():
            right = len(self.types) + len(self.values)
            remedy = ": None is no cap" if name == "soft_cap" else ""
            self.real(name, number, positive=True, remedy=remedy)
            if len(self.types) + len(self.values) == right:
                self.factor(name, as_float(number), remedy)

    def threshold(self, threshold: Any) -> None:
        """A threshold of LiteAttention."""
        if not is_real(threshold):
            self.types.append(f"threshold must be a number, got {type(threshold).__name__}")
        elif not as_float(threshold) <= 0:
            self.values.append(
                f"threshold is in log2 units and must be <= 0, got {shown(threshold)}"
            )

    def budget(self, budget: Any) -> None:
        """A budget of LiteAttention."""
        if not is_real(budget):
            self.types.append(f"budget must be a number, got {type(budget).__name__}")
        elif not 0 <= as_float(budget) < 1:
            self.values.append(
                f"budget is a share of softmax mass and must be from 0 to below 1, got "
                f"{shown(budget)}"
            )

    def limit(self, threshold: Any, budget: Any) -> None:
        """One of threshold and budget, the other None; a budget is looked at elsewhere."""
        if (threshold is None) == (budget is None):
            both = "got both" if budget is not None else "got neither"
            self.values.append(
                f"give a threshold (log2 units) or a budget (share of softmax mass), {both}"
            )
        if threshold is not None:
            self.threshold(threshold)

    # ------------------------------------------------------------------ tensors

    def usable(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors whose sizes, strides and memory can be looked at.

        No other rule may be asked about an argument that is not among them.
        """
        found = {}
        compiling = torch.compiler.is_compiling()  # it has looked itself
        for name, tensor in given.items():
            if type(tensor) is torch.Tensor and (
                compiling
                or (
                    tensor.layout is torch.strided
                    and not tensor.is_nested
                    and not tensor._is_zerotensor()
                    and not _wrapped(tensor)
                )
            ):
                found[name] = tensor
                continue
            of_type, of_value = _unusable(name, tensor)
            self.types += of_type
            self.values += of_value
            if not of_type and not of_value:
                found[name] = tensor
        return found

    def shaped(self, tensors: Mapping[str, torch.Tensor], dims: int, axes: str) -> bool:
        """``dims`` dimensions called ``axes``, the last of them contiguous.

        Returns whether all tensors have as many.
        """
        right = True
        for name, tensor in tensors.items():
            if tensor.dim() != dims:
                right = False
                self.values.append(
                    f"{name} must have {dims} dimensions ({axes}), got {list(tensor.shape)}"
                )
            elif tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                self.values.append(
                    f"{name} must be contiguous in its last dimension, got strides "
                    f"{list(tensor.stride())}: call .contiguous() on it"
                )
        return right

    def floating(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Dtypes that queries may have."""
        for name, tensor in tensors.items():
            if tensor.dtype not in FLOATS:
                self.types.append(f"{name} must be bf16, fp16 or fp32, got {tensor.dtype}")

    def no_derivative(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """No derivative is wanted with respect to a tensor: there is none.

        Reverse mode counts while gradients are recorded; a forward-mode tangent counts always.
        """
        forward = in_forward_mode()
        for name, tensor in tensors.items():
            if tensor.requires_grad and torch.is_grad_enabled():
                self.values.append(
                    f"{name} requires grad, and there is no backward pass: detach it or use "
                    "torch.no_grad()"
                )
            if forward and _tangent(tensor) is not None:
                self.values.append(
                    f"{name} carries a forward-mode tangent, and there is no derivative: detach it"
                )

    def one(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """One "dtype" or "device" for all tensors."""
        values = list(map(operator.attrgetter(what), tensors.values()))
        if values and values.count(values[0]) < len(values):
            listed = ", ".join(f"{n} {getattr(t, what)}" for n, t in tensors.items())
            found = self.types if what == "dtype" else self.values
            found.append(f"all tensors must have one {what}, got {listed}")

    def same_shape(self, a: str, b: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """One shape for two tensors."""
        if tensors[a].shape != tensors[b].shape:
            self.values.append(
                f"{a} and {b} must have one shape, got {list(tensors[a].shape)} and "
                f"{list(tensors[b].shape)}"
            )

    def heads(self, q_heads: int, kv_heads: int, *, none: bool = False) -> None:
        """Query heads that share key heads evenly. ``none``: there may be no heads at all."""
        if none and q_heads == kv_heads == 0:
            return
        if not q_heads or not kv_heads or q_heads % kv_heads:
            self.values.append(
                f"query heads must be a multiple of key heads, got {q_heads} and {kv_heads}"
            )

    def output(self, tensors: Mapping[str, torch.Tensor], v: str = "v") -> None:
        """``out``, where it is given: q's shape with v's head dim."""
        out, q, values = tensors.get("out"), tensors["q"], tensors.get(v)
        if out is None:
            return
        head_dim = q.shape[-1] if values is None else values.shape[-1]
        if out.shape[:-1] != q.shape[:-1] or out.shape[-1] != head_dim:
            whose = "q's shape" if head_dim == q.shape[-1] else "q's shape with v's head dim"
            expected = [*q.shape[:-1], head_dim]
            self.values.append(f"out must have {whose} {expected}, got {list(out.shape)}")

    def memory(
        self,
        written: Mapping[str, torch.Tensor | None],
        inputs: Mapping[str, torch.Tensor | None],
        remedy: str = "give it memory of its own",
    ) -> None:
        """Tensors that are written to: they overlap neither themselves, each other nor an input."""
        others = dict(inputs)
        for name, target in written.items():
            if target is not None:
                self.values += target_reasons(name, target)
                self.overlaps(name, target, others, remedy)
                others[name] = target

    def overlaps(
        self,
        name: str,
        target: torch.Tensor,
        others: Mapping[str, torch.Tensor | None],
        remedy: str = "give it memory of its own",
    ) -> None:
        """A tensor that is written to and shares no memory with others."""
        self.values += overlap_reasons(name, target, others, remedy)


def _unusable(name: str, tensor: Any) -> tuple[list[str], list[str]]:
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


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    unpacked: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    tangent: torch.Tensor | None = unpacked.tangent
    return tangent
