"""A launch of one of aiter's kernels for gfx942, its results beside float64.

The code objects are those of ROCm/aiter, unmodified, and none is in this repository:
``AITER_HSA`` names the folder ``hsa/gfx942`` of a checkout.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from liteattention_emulator.device import Module, Report, registered
from tests.oracle.attention import TINY, Exact, exact_rows

VARIABLE = "AITER_HSA"
SLOT = 16  # bytes: every argument, whatever its size, begins a slot
FP8 = torch.float8_e4m3fnuz


def folder() -> Path | None:
    """The folder with the code objects; None where the variable names no such folder."""
    found = Path(os.environ.get(VARIABLE, "nowhere"))
    return found if all((found / name).is_dir() for name in ("fmha_v3_fwd", "pa")) else None


def packed(*arguments: torch.Tensor | float | int | None) -> bytes:
    """An argument buffer: addresses take 8 bytes of a slot, floats and integers 4."""
    slots = []
    for value in arguments:
        if value is None or isinstance(value, torch.Tensor):
            field = struct.pack("<Q", 0 if value is None else value.data_ptr())
        else:
            field = struct.pack("<f" if isinstance(value, float) else "<I", value)
        slots.append(field.ljust(SLOT, b"\0"))
    return b"".join(slots)


def on_a_page(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins a page: where its lines fall in L1 does not change from run to run."""
    page = 4096 // x.element_size()
    raw = torch.empty(x.numel() + page, dtype=x.dtype)
    begin = -raw.data_ptr() % 4096 // x.element_size()
    return raw[begin : begin + x.numel()].view(x.shape).copy_(x)


@dataclass(frozen=True)
class Arithmetic:
    """Where a kernel rounds, as the largest errors, relative unless said otherwise.

    ``p``: of a probability; ``p_floor``: absolute, of exp(score - maximum); ``out``: of the output;
    ``score``: absolute, of a score in natural units.
    """

    p: float
    out: float
    p_floor: float = 0.0
    score: float = 4e-6


@dataclass
class Request:
    """q and out [S, Hq, D], k and v [N, Hkv, D] as the kernel has them, dequantised; lse [Hq, S].

    uneven [N, Hkv]: how much more than `Arithmetic` says the floor of P is at each key. parts:
    where several works share the keys, their outputs [parts, S, Hq, D] and log-sum-exps
    [parts, S, Hq], float32, instead of out.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None = None
    uneven: torch.Tensor | None = None
    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def result(self) -> torch.Tensor:
        """The output in float64, its parts merged."""
        if self.parts is None:
            return self.out.double()
        outs, lses = (x.double() for x in self.parts)
        return (outs * torch.softmax(lses, 0)[..., None]).sum(0)


@dataclass
class Launch:
    """A launch that is ready to run; a context manager that unloads the code object.

    grid: workgroups; block: work-items; ``arguments``: the whole argument buffer, with addresses of
    ``tensors``, which are all that the kernel may touch and live as long as this. ``out``, one of
    them, is NaN until it runs.
    """

    module: Module
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: bytes
    tensors: tuple[torch.Tensor, ...]
    out: torch.Tensor
    requests: list[Request]
    causal: bool
    scale: float
    arithmetic: Arithmetic

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.module.close()

    def run(self, record: int | None = None) -> Report:
        """Run it, with the checks as they are set. Raises LaunchFailed on a finding.

        record: the workgroup whose instructions are recorded.
        """
        with registered(*self.tensors):
            return self.module.launch_packed(
                self.kernel, self.grid, self.block, self.arguments, record=record
            )

    def compare(self) -> Comparison:
        """What ``run`` has stored, beside float64."""
        total = Comparison()
        for request in self.requests:
            q, k, v = (x.double() for x in (request.q, request.k, request.v))
            total.add(request, exact_rows(q, k, v, causal=self.causal, scale=self.scale), self)
        return total


@dataclass
class Comparison:
    """Sums over requests: squares of the errors and of the exact output, and the worst of each."""

    errors: float = 0.0
    outputs: float = 0.0
    of_bound: float = 0.0
    """The largest error of an element of the output, in units of what it may have."""
    lse: float = 0.0
    """The largest error of a log-sum-exp, absolute."""

    @property
    def relative(self) -> float:
        """Error of the output relative to the output, both as Euclidean norms."""
        return math.sqrt(self.errors / self.outputs)

    def add(self, request: Request, want: Exact, launch: Launch) -> None:
        rounds = launch.arithmetic
        error = (request.result - want.out).abs().nan_to_num(math.inf)
        before = (rounds.p + rounds.score) * want.weight
        if rounds.p_floor:
            before += rounds.p_floor * flat_weight(request, want.lse, launch)
        allowed = before + rounds.out * (want.out.abs() + before) + TINY[request.out.dtype]
        self.errors += float(error.square().sum())
        self.outputs += float(want.out.square().sum())
        self.of_bound = max(self.of_bound, float((error / allowed).max()))
        if request.lse is not None:
            error = (request.lse.double() - want.lse).abs().nan_to_num(math.inf)
            self.lse = max(self.lse, float(error.max()))


def flat_weight(request: Request, lse: torch.Tensor, launch: Launch) -> torch.Tensor:
    """What an absolute error of each exp(score - maximum) weighs in the output, [S, Hq, 1 or D].

    It is the sum of |v| over the keys that a row sees, divided by the row's sum.
    """
    at_key = 1.0 if request.uneven is None else request.uneven.double()[..., None]
    q, k, v = (x.double().transpose(0, 1) for x in (request.q, request.k, request.v * at_key))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    rows, keys = q.shape[1], k.shape[1]
    seen = torch.ones(rows, keys).tril(keys - rows if launch.causal else keys).double()
    scores = (q @ k.mT * launch.scale).masked_fill(seen == 0, -math.inf)
    return (torch.exp(scores.amax(-1) - lse)[..., None] * (seen @ v.abs())).transpose(0, 1)
