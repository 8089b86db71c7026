"""The PTX that the Hopper kernels bring along, run warp by warp on a CPU.

What a kernel passes to ``inline_asm_elementwise`` for several numbers of a thread at a time depends
on who holds what: it shuffles, votes and branches. Here each of a warpgroup's four warps runs the
text in 32 lanes, NumPy's, on the numbers that the layout of a matrix product's result gives it. A
branch that a warp's lanes do not agree on is an error, and so is any instruction not listed below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Lanes = np.ndarray[Any, Any]
_LINE = re.compile(r"(?:@(?P<not>!?)(?P<guard>\w+) )?(?P<name>[\w.]+)(?: (?P<operands>.*))?")
_LANE = np.arange(32)
#: Enough for the longest text, and an end for one that loops.
_MOST_STEPS = 10_000


def _fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _saturated(a: Lanes) -> Lanes:
    return np.clip(a.astype(np.float64), -(2**31), 2**31 - 1).astype(np.int32)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mul.f32": np.multiply,
    "add.f32": np.add,
    "min.s32": np.minimum,
    "min.f32": np.fmin,  # of a number and a NaN the number, as in PTX
    "max.f32": np.fmax,
    "fma.rn.f32": _fused,
    "rcp.approx.ftz.f32": np.reciprocal,
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "selp.f32": lambda a, b, chosen: np.where(chosen, a, b),
    "setp.eq.f32": np.equal,
    "setp.eq.s32": np.equal,
    "setp.gt.f32": np.greater,
    "setp.lt.s32": np.less,
    "setp.gt.or.f32": lambda a, b, also: (a > b) | also,
    "setp.gtu.f32": lambda a, b: ~(a <= b),  # true for a NaN
    "or.b32": np.bitwise_or,
    "setp.neu.f32": np.not_equal,  # true for a NaN
    "setp.neu.or.f32": lambda a, b, also: (a != b) | also,
    "vote.sync.any.pred": lambda chosen, lanes: np.full(32, bool(chosen.any())),
    "cvt.rn.f32.s32": lambda a: a.astype(np.float32),
    "cvt.rpi.s32.f32": lambda a: _saturated(np.ceil(np.nan_to_num(a))),
    "redux.sync.max.u32": lambda a, lanes: np.full(32, a.view(np.uint32).max()).view(a.dtype),
    "redux.sync.add.s32": lambda a, lanes: np.full(32, a.sum(dtype=np.int32)),
    "shfl.sync.bfly.b32": lambda a, by, width, lanes: a[_LANE ^ int(by[0])],
}


def _constant(text: str) -> Lanes:
    if text.startswith("0f"):  # the bits of a float
        return np.full(32, np.array(int(text[2:], 16), np.uint32).view(np.float32))
    if "." in text:
        return np.full(32, float(text), np.float32)
    return np.full(32, int(text, 0), np.int64)


def _run_warp(text: str, operands: dict[str, Lanes]) -> None:
    """Run ``text`` in one warp: what ``$0`` and so on hold, and what is left in them."""
    code = [piece.strip() for piece in re.split(r"[;{}\n]", text)]
    code = [piece for piece in code if piece and not piece.startswith(".reg")]
    held = operands

    def value(name: str) -> Lanes:
        return held[name] if name in held else _constant(name)

    at = 0
    for _ in range(_MOST_STEPS):
        if at == len(code):
            return
        line, at = code[at], at + 1
        if line.endswith(":"):
            continue
        found = _LINE.fullmatch(line)
        assert found is not None, line
        active = np.full(32, True)
        if found["guard"]:
            active = held[found["guard"]] != bool(found["not"])
        names = [name.strip() for name in (found["operands"] or "").split(",")]
        if found["name"] == "bra":
            assert active.all() or not active.any(), f"lanes disagree on {line!r}"
            if active.all():
                at = code.index(f"{names[0]}:")
            continue
        with np.errstate(all="ignore"):
            result = _ARITHMETIC[found["name"]](*map(value, names[1:]))
        result = np.asarray(result)
        held[names[0]] = np.where(active, result, held.get(names[0], np.zeros_like(result)))
    raise AssertionError("no end")


def _places(shape: Sequence[int], number: int, warp: int) -> tuple[Lanes, Lanes]:
    """Rows and columns of a warp's lanes' ``number``-th element, [64, N] or by lane [64, 4]."""
    if shape[1] == 4:
        return 16 * warp + 8 * number + _LANE // 4, _LANE % 4
    half, pair, group = number >> 1 & 1, number & 1, number >> 2
    return 16 * warp + 8 * half + _LANE // 4, 8 * group + 2 * (_LANE % 4) + pair


def run_each(
    text: str, constraints: str, inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Run ``text``, which takes a number of each of ``inputs``, for all of them: its one result."""
    kinds = constraints.split(",")[1:]
    assert len(kinds) == len(inputs), "as many operands as inputs"
    result = torch.zeros(inputs[0].shape, dtype=dtype)
    for first in range(0, result.numel(), 32):
        operands: dict[str, Lanes] = {}
        for i, kind in enumerate(kinds):
            numbers = inputs[i].flatten()[first : first + 32].numpy()
            operands[f"${i + 1}"] = numbers
            if kind.isdecimal():
                operands[f"${kind}"] = numbers
        _run_warp(text, operands)
        result.view(-1)[first : first + 32] = torch.from_numpy(operands["$0"]).to(dtype)
    return result


def run(
    text: str, constraints: str, inputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Run ``text`` in all threads that hold [64, N], of each tensor all of a thread's numbers.

    ``constraints`` are LLVM's: results, then operands, of which a number names the result that it
    begins in. Returns the results, of the shape of the inputs.
    """
    shape = inputs[0].shape
    assert shape[0] == 64 and all(x.shape == shape for x in inputs)
    pack = shape[1] // 2 if shape[1] > 4 else 2
    kinds = constraints.split(",")
    assert len(kinds) == pack * (len(inputs) + len(dtypes)), "as many operands as numbers"
    results = [torch.zeros(shape, dtype=dtype) for dtype in dtypes]
    first = pack * len(dtypes)
    for warp in range(4):
        operands: dict[str, Lanes] = {}
        for i, kind in enumerate(kinds[first:]):
            numbers = inputs[i // pack].numpy()[_places(shape, i % pack, warp)]
            operands[f"${first + i}"] = numbers
            if kind.isdecimal():
                operands[f"${kind}"] = numbers
        _run_warp(text, operands)
        for i in range(first):
            if f"${i}" in operands:  # others mean nothing
                place, dtype = _places(shape, i % pack, warp), dtypes[i // pack]
                found = torch.from_numpy(operands[f"${i}"])
                bits = dtype == torch.int32 and found.dtype == torch.float32
                results[i // pack][place] = found.view(dtype) if bits else found.to(dtype)
    return results
