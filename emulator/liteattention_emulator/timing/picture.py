"""A picture of what the waves of a workgroup do over time. It needs matplotlib (extra "bench")."""

from pathlib import Path
from typing import Any

import numpy as np

from liteattention_emulator.listing import Instruction

from .loops import steady
from .model import Replay

COLOURS = {
    "matrix": "#1f4e9c",
    "exp and other transcendentals": "#d1495b",
    "packed fp32": "#edae49",
    "other vector": "#66a182",
    "LDS and memory": "#8d6a9f",
    "scalar, branches": "#9aa0a6",
    "wait": "#d9dce3",
    "barrier": "#f2c6c6",
}
ITERATIONS = 2


def draw(result: Replay, path: Path, clocks: tuple[int, int] | None = None) -> Path:
    """Draw the waves, one row each, from clk to clk; return the path.

    clocks: by default two iterations of wave 0's loop from the first one accounted for, or what is
    accounted for where it has none. What a wave does from an instruction's issue on lasts as long
    as the instruction itself; the rest of the time to the next issue is a wait. Raises ImportError
    without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin, end = _span(result) if clocks is None else clocks
    waves = len(result.issued)
    figure = Figure(figsize=(12, 0.42 * waves + 1.6), dpi=120)
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for wave in range(waves):
        for kind, bars in _bars(result, wave, begin, end).items():
            axis.broken_barh(bars, (wave - 0.4, 0.8), facecolors=COLOURS[kind], linewidth=0)
    axis.set_yticks(range(waves), [f"wave {w}, SIMD {w % 4}" for w in range(waves)], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(begin, end)
    axis.set_xlabel("clk (modelled)", fontsize=9)
    name = result.recording.kernel or "recorded code"
    axis.set_title(f"{name}: matrix cores in use {result.use:.1%}", fontsize=10)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.09 if waves > 3 else 0.25, 1, 1))
    figure.savefig(path)
    return path


def _span(result: Replay) -> tuple[int, int]:
    loop = result.loops[0]
    if loop is None:
        return result.begin, max(result.end, result.begin + 1)
    first = int(np.searchsorted(loop.starts, steady(loop, 0)[0]))
    last = min(first + ITERATIONS, len(loop.starts) - 1)
    times = result.issued[0]
    return int(times[loop.starts[first]]), int(times[loop.starts[last]])


def _bars(result: Replay, wave: int, begin: int, end: int) -> dict[str, list[tuple[int, int]]]:
    """(from, how long) by kind of work."""
    times, stream = result.issued[wave], result.recording.waves[wave]
    instructions = result.recording.instructions
    first = max(int(np.searchsorted(times, begin)) - 1, 0)
    bars: dict[str, list[tuple[int, int]]] = {kind: [] for kind in COLOURS}
    for step in range(first, len(times)):
        at = int(times[step])
        if at >= end:
            break
        after = int(times[step + 1]) if step + 1 < len(times) else at + 4
        kind, length = _work(instructions[stream.steps[step]["index"]], result.constants)
        length = min(length, after - at)
        bars[kind].append((at, length))
        if after > at + length:
            rest = "barrier" if kind == "barrier" else "wait"
            bars[rest].append((at + length, after - at - length))
    return bars


def _work(inst: Instruction, constants: Any) -> tuple[str, int]:
    """The kind of an instruction and how long it lasts, in clk."""
    if inst.unit == "mfma":
        return "matrix", int(inst.passes * constants["matrix_pass"])
    if inst.unit == "trans":
        return "exp and other transcendentals", int(constants["trans_issue"])
    if inst.unit == "valu":
        packed = inst.name.startswith("v_pk_") and inst.name.endswith("_f32")
        return ("packed fp32" if packed else "other vector"), int(constants["valu_issue"])
    if inst.unit in ("ds", "vmem", "smem"):
        return "LDS and memory", int(constants["salu_issue"])
    if inst.unit == "barrier":
        return "barrier", int(constants["salu_issue"])
    return "scalar, branches", int(constants["salu_issue"])
