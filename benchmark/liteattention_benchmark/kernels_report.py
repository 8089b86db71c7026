"""Tables and plots of :mod:`.kernels`: CSV, Markdown, PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from liteattention_rocm.cli import tables

from .cells import Cell, Config, Decode, Dense, Host, Lite, Prefill
from .contenders import OF_LISTS
from .kernels import Row
from .timing import Ceilings

_COLOURS = {
    "ours": "#c0392b",
    "ours, lite": "#c0392b",
    "ours, budget": "#7d3c98",
    "cuDNN (SDPA)": "#4c9a2a",
    "FA3": "#2f6db3",
    "FA2 (SDPA)": "#8fb8de",
    "FlexAttention": "#e8a33d",
    "FlexAttention, BlockMask": "#e8a33d",
    "efficient (SDPA)": "#b0b0b0",
}
_MARKERS = {"dense": "o", "lite": "s", "decode": "^", "prefill": "D"}


def to_csv(rows: Iterable[Row], environment: Mapping[str, str]) -> str:
    """One line per row; the environment is repeated in each, so that files can be joined."""
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        line = {**row.as_dict(), **environment}
        if writer is None:
            writer = csv.DictWriter(text, list(line), lineterminator="\n")
            writer.writeheader()
        writer.writerow(line)
    return text.getvalue()


def to_markdown(
    config: Config, rows: Iterable[Row], environment: Mapping[str, str], command: str
) -> str:
    """Tables by kind of cell, with what could not run below them."""
    listed = list(rows)
    out = [
        f"`{command}`",
        "",
        ", ".join(f"{name} {value}" for name, value in environment.items()),
        "",
        f"{config.rounds} rounds in random turns after {config.warmup} warm-up calls, "
        f"{'cold' if config.cold_l2 else 'warm'} L2; median milliseconds / "
        "TFLOP/s of the dense work that was asked for (decode: TB/s of keys and values).",
        "",
    ]
    dense = [cell for cell in config.cells if isinstance(cell, Dense)]
    lite = [cell for cell in config.cells if isinstance(cell, Lite)]
    decode = [cell for cell in config.cells if isinstance(cell, Decode)]
    if dense:
        out += ["Dense, B,H,S,D:", "", *_wide("dense", dense, listed), ""]
    if lite:
        out += ["LiteAttention, B,H,S,D and tiles skipped:", "", *_lite(lite, listed), ""]
    if decode:
        out += ["Decode, paged cache:", "", *_wide("decode", decode, listed), ""]
    prefill = [cell for cell in config.cells if isinstance(cell, Prefill)]
    if prefill:
        out += ["Prefill:", "", *_wide("prefill", prefill, listed), ""]
    host = [cell for cell in config.cells if isinstance(cell, Host)]
    if host:
        out += ["Host, microseconds of one call (no CUDA graph):", "", *_host(host, listed), ""]
    counted = [row for row in listed if row.matrix_percent is not None]
    if counted:
        out += ["Matrix units at work, per cent of the time (one call each):", ""]
        out += [*_counters(counted), ""]
    absent = sorted({(row.contender, row.absent) for row in listed if row.absent})
    out += [f"- {name}: {why}" for name, why in absent]
    return "\n".join(out).rstrip() + "\n"


def _found(rows: Iterable[Row], kind: str, cell: Cell) -> dict[str, Row]:
    return {
        row.contender: row
        for row in rows
        if row.kind == kind and row.cell == str(cell) and row.median_ms is not None
    }


def _text(row: Row | None) -> str:
    if row is None or row.median_ms is None or row.figure is None:
        return ""
    digits = 3 if row.median_ms < 1 else 2
    figure = f"{row.figure:.2f}" if row.kind == "decode" else f"{row.figure:.0f}"
    return f"{row.median_ms:.{digits}f} / {figure}"


def _wide(kind: str, cells: Iterable[Cell], rows: list[Row]) -> list[str]:
    """A line per cell, a column per contender, and the largest error of ours."""
    names = list(
        dict.fromkeys(row.contender for row in rows if row.kind == kind and not row.absent)
    )
    names.sort(key=lambda name: (not name.startswith("ours"), name))
    lines = []
    for cell in cells:
        found = _found(rows, kind, cell)
        ours = found.get("ours")
        error = "" if ours is None else f"{ours.error:.1e}"
        lines.append([str(cell), *(_text(found.get(name)) for name in names), error])
    return tables.markdown(["", *names, "our error"], lines)


def _host(cells: Iterable[Host], rows: list[Row]) -> list[str]:
    """A line per cell, a column per contender, and what ours takes more than SDPA."""
    names = ["ours", "SDPA", "ours, lite"]
    lines = []
    for cell in cells:
        found = _found(rows, "host", cell)
        times = [found[name].median_ms if name in found else None for name in names]
        values = ["" if t is None else f"{1e3 * t:.1f}" for t in times]
        ours, base = times[:2]
        more = "" if ours is None or base is None else f"{1e3 * (ours - base):+.1f}"
        lines.append([str(cell), *values, more])
    return tables.markdown(["", *names, "ours - SDPA"], lines)


def _counters(rows: list[Row]) -> list[str]:
    """A line per cell, a column per contender."""
    names = sorted({row.contender for row in rows}, key=lambda n: (not n.startswith("ours"), n))
    cells = list(dict.fromkeys((row.kind, row.cell) for row in rows))
    found = {(row.kind, row.cell, row.contender): row.matrix_percent for row in rows}
    lines = []
    for cell in cells:
        values = [found.get((*cell, name)) for name in names]
        lines.append([cell[1], *("" if v is None else f"{v:.0f}" for v in values)])
    return tables.markdown(["", *names], lines)


def _lite(cells: Iterable[Lite], rows: list[Row]) -> list[str]:
    """Time against the dense call's share: ratio = lite / (tiles kept * dense)."""
    names = [
        "ours, lite", "ours, budget", "ours", "cuDNN (SDPA)", "FA3", "FlexAttention, BlockMask",
        "SpargeAttn (int8), same tiles", "SDPA",
    ]  # fmt: skip
    present = {row.contender for row in rows if row.kind == "lite" and not row.absent}
    names = [name for name in names if name in present] + sorted(present - set(names))
    head = [name.replace("ours", "ours, dense") if name == "ours" else name for name in names]
    lines = []
    for cell in cells:
        found = _found(rows, "lite", cell)
        times = [found[name].median_ms if name in found else None for name in names]
        values = ["" if t is None else f"{t:.3f}" for t in times]
        mine, base = found.get("ours, lite"), found.get("ours")
        ratios = ["", ""]
        for i, name in enumerate(("ours, lite", "ours, budget")):
            one = found.get(name)
            if one is not None and base is not None and one.median_ms and base.median_ms:
                ratios[i] = f"{one.median_ms / (_kept(cell, one) * base.median_ms):.3f}"
        error = "" if mine is None else f"{mine.error:.1e}"
        kept = "" if mine is None else f"{_kept(cell, mine):.1%}"
        lines.append([str(cell), kept, *values, *ratios, error])
    titles = [f"{name} ms" for name in head]
    shares = [f"{name} / share of dense" for name in ("lite", "budget")]
    return tables.markdown(["", "tiles kept", *titles, *shares, "error"], lines)


def _kept(cell: Lite, row: Row) -> float:
    """Share of the tiles that were computed: of few K blocks other than was asked for."""
    return 1 - cell.sparsity if row.kept is None else row.kept


def _figure(width: float, height: float) -> Any:
    """A figure in inches that needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def roofline(config: Config, rows: list[Row], roofs: Ceilings, folder: Path) -> Path:
    """Write a PNG: work done per second against work per byte, under what the device reaches.

    Work and bytes are those that have to be done and moved (tiles that stay, each tensor once).

    Raises:
        ImportError: matplotlib is not installed (extra: bench).
    """
    figure = _figure(7.5, 4.8)
    axis = figure.subplots()
    cells = {
        (type(cell).__name__.lower(), str(cell)): cell
        for cell in config.cells
        if not isinstance(cell, Host)
    }
    points: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for row in rows:
        # beside LiteAttention, dense contenders do other work than the cell's
        full = row.kind == "lite" and row.contender not in OF_LISTS
        cell = cells.get((row.kind, row.cell))
        if cell is None or row.median_ms is None or full or row.contender == "device copy":
            continue
        x, y = points.setdefault((row.kind, row.contender), ([], []))
        x.append(cell.work / cell.traffic)
        y.append(cell.work / row.median_ms / 1e9)
    for (kind, name), (x, y) in sorted(points.items()):
        axis.scatter(
            x, y, s=22, alpha=0.8, label=f"{name} ({kind})", color=_COLOURS.get(name),
            marker=_MARKERS[kind],
        )  # fmt: skip
    low = min((min(x) for x, _ in points.values()), default=1.0) / 2
    high = 2 * max((max(x) for x, _ in points.values()), default=1e4)
    ridge = roofs.tflops / roofs.tbps
    corners = [low, ridge, max(high, ridge)]
    axis.plot(corners, [min(roofs.tbps * x, roofs.tflops) for x in corners], "-", color="black")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("floating-point operations per byte")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(
        f"roof: {roofs.tflops:.3g} TFLOP/s in a bf16 matrix product, "
        f"{roofs.tbps:.3g} TB/s in a copy",
        fontsize=8,
    )
    axis.legend(fontsize=6, loc="lower right")
    path = folder / "kernels-roofline.png"
    figure.savefig(path, dpi=130)
    return path


def plot(config: Config, rows: list[Row], folder: Path) -> list[Path]:
    """Write PNGs: throughput by shape, and time against sparsity with the ideal line.

    Raises:
        ImportError: matplotlib is not installed (extra: bench).
    """
    written = []
    dense = [cell for cell in config.cells if isinstance(cell, Dense)]
    if dense:
        figure = _figure(9, 4.5)
        axis = figure.subplots()
        names = sorted({row.contender for row in rows if row.kind == "dense" and not row.absent})
        width = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            found = [_found(rows, "dense", cell).get(name) for cell in dense]
            heights = [0.0 if row is None else row.figure or 0.0 for row in found]
            places = [x + (i - len(names) / 2 + 0.5) * width for x in range(len(dense))]
            axis.bar(places, heights, width, label=name, color=_COLOURS.get(name))
        axis.set_xticks(range(len(dense)), [str(cell) for cell in dense], fontsize=7, rotation=20)
        axis.set_ylabel("TFLOP/s")
        figure.legend(fontsize=7, ncols=len(names), loc="outside upper center")
        written.append(folder / "kernels-dense.png")
        figure.savefig(written[-1], dpi=130)
    groups: dict[str, list[Lite]] = {}
    for cell in config.cells:
        if isinstance(cell, Lite):
            shape = f"{cell.batch},{cell.heads},{cell.length},{cell.head_dim}"
            groups.setdefault(f"{shape} {cell.pattern}", []).append(cell)
    if groups:
        figure = _figure(4.2 * min(2, len(groups)), 3.4 * -(-len(groups) // 2))
        axes = figure.subplots(-(-len(groups) // 2), min(2, len(groups)), squeeze=False).ravel()
        for axis, (title, cells) in zip(axes, groups.items(), strict=False):
            ordered = sorted(cells, key=lambda cell: cell.sparsity)
            x = [cell.sparsity for cell in ordered]
            names = sorted({r.contender for c in ordered for r in _found(rows, "lite", c).values()})
            for name in names:
                found = [_found(rows, "lite", cell).get(name) for cell in ordered]
                y = [float("nan") if row is None else row.median_ms for row in found]
                style = "--" if name == "ours" else "-"
                axis.plot(x, y, style, marker="o", ms=3, label=name, color=_COLOURS.get(name))
            base = [_found(rows, "lite", cell).get("ours") for cell in ordered]
            if base[0] is not None and base[0].median_ms:
                ideal = [(1 - s) * base[0].median_ms for s in x]
                axis.plot(x, ideal, ":", color="black", label="(1 - s) x our dense")
            axis.set_title(title, fontsize=8)
            axis.set_xlabel("share of tiles skipped", fontsize=8)
            axis.set_ylabel("ms", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=6)
        written.append(folder / "kernels-lite.png")
        figure.savefig(written[-1], dpi=130)
    return written
