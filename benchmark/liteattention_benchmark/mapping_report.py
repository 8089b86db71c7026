"""Tables and pictures of :mod:`.mapping`: CSV, Markdown, PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from liteattention_emulator.memory_constants import MI300X
from liteattention_rocm.cli import tables

from .mapping import MAPPINGS, Kernel, Row, Shape
from .mapping_published import compared

SHORT = {name: name.removesuffix("_first").replace("_", " ") for name in MAPPINGS}
_BOTH = " / ".join(SHORT.values())


def to_csv(rows: Iterable[Row]) -> str:
    """One line per launch."""
    lines = [row.as_dict() for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def constants() -> list[str]:
    """The table of the model's constants."""
    lines = [
        [
            each.name,
            f"{each.value:g}" if each.value < 1e6 else f"{int(each.value):,}",
            each.unit,
            "" if each.low is None else f"{each.low:g} to {each.high:g}",
            each.source + ("; **fitted**" if each.fitted else ""),
        ]
        for each in MI300X
    ]
    return tables.markdown(["constant", "value", "unit", "range", "source"], lines)


def validation(rows: Sequence[Row]) -> list[str]:
    """Published figures beside the model's."""
    lines = []
    for each, row in compared(rows):
        wanted = f"{each.low:g}" if each.low == each.high else f"{each.low:g} to {each.high:g}"
        figure = "L2 hit rate" if each.figure == "l2" else "relative speed"
        off = each.off(row)
        lines.append(
            [
                f"{each.source}: {each.case.shape}, {SHORT[each.case.mapping]}, {figure}",
                wanted,
                f"{each.modelled(row):.1f}",
                f"{off:.1f}",
                "fitted" if each.fitted else "",
                "yes" if off <= 5 else f"**no**{': ' if each.why else ''}{each.why}",
            ]
        )
    head = ["published, %", "measured", "modelled", "points off", "", "within 5"]
    return tables.markdown(head, lines)


def _by_shape(rows: Iterable[Row], kernel: Kernel) -> dict[Shape, dict[str, Row]]:
    found: dict[Shape, dict[str, Row]] = {}
    for row in rows:
        if row.case.kernel == kernel:
            found.setdefault(row.case.shape, {})[row.case.mapping] = row
    return found


def study(rows: Sequence[Row], kernel: Kernel) -> list[str]:
    """A line per shape; each cell has the four mappings in turn."""
    lines = []
    for shape, by_mapping in _by_shape(rows, kernel).items():
        each = [by_mapping[mapping] for mapping in MAPPINGS]
        whole = "" if all(row.case.whole for row in each) else " *"
        lines.append(
            [
                f"{shape}{whole}",
                " / ".join(f"{100 * row.l2:.0f}" for row in each),
                " / ".join(f"{100 * row.cache:.0f}" for row in each),
                " / ".join(_amount(row.bytes_by_level["l2"]) for row in each),
                " / ".join(_amount(row.bytes_by_level["infinity_cache"]) for row in each),
                " / ".join(_amount(row.bytes_by_level["hbm"]) for row in each),
                " / ".join(f"{100 * row.relative:.0f}" for row in each),
            ]
        )
    head = ["", "L2 %", "Infinity Cache %", "GB from L2", "from Infinity Cache", "from HBM"]
    return tables.markdown([*head, "speed %"], lines)


def _amount(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e12 else f"{size / 1e9:.0f}"


def to_markdown(
    rows: Sequence[Row], checked: Sequence[Row], kernels: Sequence[Kernel], command: str
) -> str:
    """All tables."""
    out = [
        f"`{command}`", "", "Everything here is modelled.", "",
        "## Constants", "", *constants(), "",
        "## Published figures beside the model", "", *validation(checked), "",
    ]  # fmt: skip
    for kernel in kernels:
        out += [
            f"## {kernel.name}", "",
            f"In every cell: {_BOTH}. Speed is relative to swizzled head-first. "
            "* a window of the launch, scaled.", "",
            *study(rows, kernel), "",
        ]  # fmt: skip
    return "\n".join(out)


def plot(rows: Sequence[Row], kernel: Kernel, path: Path) -> None:
    """Write a PNG: L2 hit rate and relative speed, a column per mapping and a line per shape.

    Raises:
        ImportError: matplotlib is not installed (extra: bench).
    """
    from matplotlib.figure import Figure

    shapes = _by_shape(rows, kernel)
    figure = Figure(figsize=(8.2, 1.2 + 0.17 * len(shapes)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    panels: dict[str, Callable[[Row], float]] = {
        "L2 hit rate, %": lambda row: 100 * row.l2,
        "from HBM, % of reads": lambda row: 100 * row.bytes_by_level["hbm"] / row.case.total_bytes,
        "relative speed, %": lambda row: 100 * row.relative,
    }
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        cells = [[value(each[m]) for m in MAPPINGS] for each in shapes.values()]
        colours = "viridis_r" if "HBM" in title else "viridis"
        axis.imshow(cells, aspect="auto", vmin=0, vmax=100, cmap=colours)
        for y, line in enumerate(cells):
            for x, number in enumerate(line):
                dark = (number < 60) != ("HBM" in title)
                colour = "white" if dark else "black"
                axis.text(x, y, f"{number:.0f}", ha="center", va="center", fontsize=6, color=colour)
        names = [SHORT[m].replace(" ", "\n") for m in MAPPINGS]
        axis.set_xticks(range(len(MAPPINGS)), names, fontsize=6)
        axis.set_title(title, fontsize=8)
    axes[0].set_yticks(range(len(shapes)), [str(shape) for shape in shapes], fontsize=6)
    figure.suptitle(f"{kernel.name}: modelled", fontsize=9)
    figure.savefig(path, dpi=130)
