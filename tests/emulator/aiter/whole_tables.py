"""The tables of docs/model.md on whole launches."""

from __future__ import annotations

import math
from pathlib import Path

from . import whole
from .published import COUNTED, ROUNDINGS, TIMES


def counted(root: Path) -> list[str]:
    """Counters of causal launches."""
    head = ["rows", "in workgroups, measured", "modelled", "CUs with one, measured", "modelled"]
    head += ["MfmaUtil, measured", "modelled", f"times {whole.FULL}"]
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for length, found in whole.counted(root):
        measured = COUNTED[length]
        cells = [100 * measured.inside, 100 * found.inside]
        cells += [100 * measured.held, 100 * found.found.occupied]
        cells += [measured.matrix_use, found.matrix_use, found.matrix_use * whole.FULL]
        note = " fitted" if length == max(COUNTED) else ""
        lines.append(f"| {length} | {' | '.join(f'{cell:.1f}' for cell in cells)}{note} |")
    return lines


def own(root: Path) -> list[str]:
    """AITER's times by shape over that of the longest, modelled over measured."""
    rows = whole.own_rows(root)
    lines = [
        "| B, H, S | " + " | ".join(x.upper() for x in ROUNDINGS) + " |",
        "|---|---:|---:|---:|",
    ]
    for shape in TIMES:
        off = [f"{modelled / value:.3f}" for at, _, value, modelled in rows if at == shape]
        if off:
            lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(off)} |")
    return lines


def ratios(root: Path, source: Path) -> list[str]:
    """AITER's time over the public kernel's."""
    law, rows = whole.clock_law(root, source), whole.rows(root, source)
    head = ["B, H, S", "rounding", "measured", "in clk", "with clocks", "off", ""]
    lines = [
        f"GHz = {law.at_full:.3f} use ^ {law.power:.3f}; of the public kernel {law.public:.3f} "
        "times that",
        "",
        f"| {' | '.join(head)} |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    offs, unchanged = [], []
    at_longest = {row.rounding: row.measured for row in rows if row.fitted}
    for row in rows:
        off = row.in_time / row.measured - 1
        cells = f"{row.measured:.3f} | {row.in_clk:.3f} | {row.in_time:.3f} | {off:+.1%}"
        shape = ", ".join(map(str, row.shape))
        note = "fitted" if row.fitted else ""
        lines.append(f"| {shape} | {row.rounding.upper()} | {cells} | {note} |")
        if not row.fitted:
            offs.append(abs(off))
            unchanged.append(abs(at_longest[row.rounding] / row.measured - 1))
    words = f"not fitted: {_near(offs)}; with the fitted shape's ratios: {_near(unchanged)}"
    return [*lines, "", words]


def _near(offs: list[float]) -> str:
    near = sum(off <= 0.08 for off in offs)
    mean = math.fsum(offs) / len(offs)
    return f"{near} of {len(offs)} within 8 %, {mean:.1%} off in the mean, {max(offs):.1%} at most"
