"""Loops of a kernel and what they consist of, by the emulator's decoder."""

from __future__ import annotations

from collections import Counter

from liteattention_emulator.cfg import Graph
from liteattention_emulator.listing import Instruction

#: Instruction classes in the order in which reports list them.
CLASSES = (
    "VALU",
    "MFMA",
    "trans",
    "SALU",
    "branch",
    "waitcnt",
    "nop",
    "barrier",
    "ds",
    "vmem",
    "LDS-DMA",
    "scratch",
    "smem",
)
_OF_UNITS = {"valu": "VALU", "mfma": "MFMA", "salu": "SALU", "wait": "waitcnt"}


def kind(inst: Instruction) -> str:
    """The class of an instruction, one of :data:`CLASSES`."""
    if inst.name == "s_nop":
        return "nop"
    if inst.name.startswith("s_endpgm"):
        return "branch"
    if inst.name.startswith("scratch_"):
        return "scratch"
    if inst.unit == "vmem" and ("lds" in inst.flags or "_lds_" in inst.name):
        return "LDS-DMA"
    return _OF_UNITS.get(inst.unit, inst.unit)


def hot(graph: Graph) -> list[Instruction]:
    """The loop with the most matrix instructions (else the longest), or all that is reached."""
    loop = graph.hot_loop()
    if loop is None:
        return [graph.instructions[index] for index in sorted(graph.next)]
    return graph.body(loop)


def mix(code: list[Instruction]) -> dict[str, int]:
    """Count instructions by class, every class of :data:`CLASSES` present."""
    counts = Counter(map(kind, code))
    return {name: counts[name] for name in CLASSES}


def scratch_in_loops(graph: Graph) -> list[Instruction]:
    """Scratch instructions that may run again: a loop of any shape leads back to them."""
    return [
        graph.instructions[index]
        for index in sorted(graph.next)
        if kind(graph.instructions[index]) == "scratch" and _runs_again(graph, index)
    ]


def _runs_again(graph: Graph, index: int) -> bool:
    seen: set[int] = set()
    pending = list(graph.next[index])
    while pending:
        at = pending.pop()
        if at not in seen:
            seen.add(at)
            pending += graph.next[at]
    return index in seen
