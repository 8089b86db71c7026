"""What a kernel makes the machine do for its flops: what energy is spent on, without any joules.

Counted in the recording, nothing of it is modelled but which lines miss L1. Which of these counts
costs how much is not published for gfx942; docs/model.md says what is.
"""

import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from liteattention_emulator.listing import VECTOR_MASK, Instruction

from .loops import steady
from .model import Replay

LANES = 64
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_")
_SCALAR = ("salu", "wait", "barrier", "branch", "smem")


@dataclass(frozen=True, slots=True)
class Work:
    """Instructions per MFLOP of the matrix cores, and bytes per flop.

    matrix, plain (vector, one result a lane), packed (fp32, two), exp (and the other
    transcendental ones), lds, memory (vector loads and stores), scalar (waits, barriers and
    branches included): instructions of waves. lds_bytes: to and from LDS, copies from memory
    included. l1_bytes: asked for by vector memory instructions. l2_bytes: of the lines among them
    that miss L1. matrix_operands, other_operands: bytes of vector registers that matrix
    instructions and all others read and write, all lanes.
    """

    matrix: float
    plain: float
    packed: float
    exp: float
    lds: float
    memory: float
    scalar: float
    lds_bytes: float
    l1_bytes: float
    l2_bytes: float
    matrix_operands: float
    other_operands: float

    def to_dict(self) -> dict[str, float]:
        """By field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


PER_MFLOP = ("matrix", "plain", "packed", "exp", "lds", "memory", "scalar")
"""The fields of `Work` that count instructions."""


def flops(inst: Instruction) -> int:
    """Of one matrix instruction of a wave, by its name; 0 of any other one."""
    shape = _SHAPE.search(inst.name) if inst.unit == "mfma" else None
    if shape is None:
        return 0
    m, n, k = (int(size) for size in shape.groups()[:3])
    return 2 * m * n * k * int(shape[4] or 1)


def work(result: Replay) -> Work | None:
    """Count over whole iterations of each wave's loop, its edges left out (``loops.steady``).

    None where those have no matrix instruction.
    """
    recording = result.recording
    table = recording.instructions
    counts: Counter[str] = Counter()
    total = 0.0
    for wave, loop in zip(recording.waves, result.loops, strict=True):
        begin, end = steady(loop, len(wave.steps))
        steps = wave.steps[begin:end]
        times = np.bincount(steps["index"], minlength=len(table))
        sizes = np.bincount(steps["index"], weights=steps["bytes"], minlength=len(table))
        for index in np.flatnonzero(times):
            inst, count = table[index], int(times[index])
            total += count * flops(inst)
            kind = _kind(inst)
            counts[kind] += count
            counts["matrix_operands" if kind == "matrix" else "other_operands"] += (
                count * _register_bytes(inst)
            )
            if kind in ("lds", "memory"):
                counts["lds_bytes" if kind == "lds" else "l1_bytes"] += int(sizes[index])
            if kind == "memory" and "lds" in inst.flags:
                counts["lds_bytes"] += int(sizes[index])
    if not total:
        return None
    window = _flops_of_window(result)
    values: dict[str, Any] = {
        field.name: counts[field.name] / total * (1e6 if field.name in PER_MFLOP else 1)
        for field in fields(Work)
    }
    values["l2_bytes"] = result.flight.fetched / window if window else 0.0
    return Work(**values)


def _kind(inst: Instruction) -> str:
    if inst.name.startswith("v_pk_") and inst.name.endswith("_f32"):
        return "packed"
    if inst.unit in _SCALAR:
        return "scalar"
    names = {"mfma": "matrix", "valu": "plain", "trans": "exp", "ds": "lds", "vmem": "memory"}
    return names[inst.unit]


def _register_bytes(inst: Instruction) -> int:
    dwords = sum((mask & VECTOR_MASK).bit_count() for mask in (inst.reads, inst.writes))
    return 4 * LANES * dwords


def _flops_of_window(result: Replay) -> float:
    """Of all matrix instructions that issued in the part that is accounted for."""
    table = result.recording.instructions
    each = np.array([flops(inst) for inst in table])
    found = 0
    for wave, times in zip(result.recording.waves, result.issued, strict=True):
        inside = (times >= result.begin) & (times < result.end)
        found += int(each[wave.steps["index"][inside]].sum())
    return float(found)
