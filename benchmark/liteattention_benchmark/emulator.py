"""How fast the software MI300X runs the dense kernel: host time per wave instruction."""

from __future__ import annotations

import math
import resource
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from liteattention_emulator import library, set_option
from liteattention_emulator.device import last_launch
from liteattention_rocm import _core
from liteattention_rocm.cli import dimensions
from liteattention_rocm.contract import DenseRequest, DenseTensors
from liteattention_rocm.engines.gfx942 import Gfx942Engine


@dataclass(frozen=True)
class Row:
    """The dense launches of one configuration; times are host wall time on one thread."""

    shape: tuple[int, int, int, int]
    checks: bool
    wave_instructions: int
    median_s: float
    best_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with the time of one wave instruction and the rate."""
        return asdict(self) | {
            "us_per_instruction": self.median_s / self.wave_instructions * 1e6,
            "instructions_per_s": self.wave_instructions / self.median_s,
        }


def problems(shape: tuple[int, int, int, int]) -> list[str]:
    """Say why a shape [B,H,S,D] cannot be run; none means it can."""
    batch, heads, length, dim = shape
    found = list(_core.dense_reasons(_core.DenseShape(batch, heads, heads, length, length, dim)))
    # q, k, v and the output, and the fp32 numbers of which the last of them is made.
    return found + dimensions.memory_reasons(12 * math.prod(shape), "it")


def run(shape: tuple[int, int, int, int], rounds: int) -> tuple[list[Row], float]:
    """Run dense bf16 self-attention [B,H,S,D] `rounds` times with checks off and on, in turns.

    Returns the rows and the peak memory of the process in GB.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    batch, heads, length, dim = shape
    request = DenseRequest(
        batch, heads, heads, length, length, dim, q.dtype, q.device, "bhsd", dim**-0.5,
        causal=False, rounding="rtne", return_lse=False,
    )  # fmt: skip
    # One split: the dense kernel comes last, with no merge behind it.
    engine = Gfx942Engine(kv_splits=1, library=str(library()))
    tensors = DenseTensors(q, k, v, torch.empty_like(q), None)
    run_dense = engine.bind(request, tensors)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    executed = 0
    set_option("threads", "1")
    try:
        for number in range(rounds + 1):
            for checks in seconds:
                set_option("check", "on" if checks else "off")
                run_dense(tensors)
                report = last_launch()
                if report is None or "attention_dense" not in report.kernel:
                    raise RuntimeError("the last launch was not the dense kernel's")
                executed = report.instructions
                if number:  # the first round loads and binds the code
                    seconds[checks].append(report.seconds)
    finally:
        set_option("threads", "")
        set_option("check", "")
    rows = [
        Row(shape, checks, executed, median(times), min(times)) for checks, times in seconds.items()
    ]
    return rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
