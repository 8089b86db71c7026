"""The results of ``bench kernels`` and ``bench serving`` as HTML pages of one file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liteattention_report import (
    Chart,
    Series,
    Table,
    bar_chart,
    chart,
    figure_cells,
    ratio_cells,
    render,
    text_cells,
)

from .cells import Config, Decode, Dense, Host, Lite, Prefill, kind_of
from .contenders import OF_LISTS
from .kernels import Row
from .timing import Ceilings

_TITLES = {
    "dense": "Dense attention: B,H,S,D",
    "lite": "LiteAttention: B,H,S,D and tiles skipped",
    "decode": "Decode, paged cache",
    "prefill": "Prefill",
    "host": "Host: one short call",
}
#: What the others of a kind of cell are held against.
_OURS = {"lite": "ours, lite"}
_UNITS = {"decode": "TB/s"}


def kernels(
    config: Config,
    rows: Sequence[Row],
    environment: Mapping[str, str],
    command: str,
    roofs: Ceilings,
) -> str:
    """The page of ``bench kernels``.

    Args:
        config: what was asked for.
        rows: what was measured of it.
        environment: commit, versions, device and clocks; "incomplete" if it was stopped.
        command: that was called.
        roofs: what the device reaches in a product and in a copy.
    """
    kinds = dict.fromkeys(kind_of(cell) for cell in config.cells)
    measured = {
        kind: [row for row in rows if row.kind == kind and not row.absent] for kind in kinds
    }
    facts = {name: text for name, text in environment.items() if name != "incomplete"}
    unfinished = environment.get("incomplete")
    return render(
        "benchmark",
        title="Attention kernels side by side",
        lead=f"{config.rounds} rounds in random turns after {config.warmup} warm-up calls, "
        f"{'cold' if config.cold_l2 else 'warm'} L2; medians. TFLOP/s are of the dense work that "
        "was asked for, TB/s of keys and values.",
        warnings=[f"Incomplete: {unfinished} were measured."] if unfinished else [],
        facts=[("Command", command), *facts.items()],
        notes=[],
        sizes="",
        charts=_kernel_charts(config, measured, rows, roofs),
        tables=[_kernel_table(kind, found) for kind, found in measured.items() if found],
        absent=sorted({f"{row.contender}: {row.absent}" for row in rows if row.absent}),
    )


def _kernel_table(kind: str, rows: Sequence[Row]) -> Table:
    ours = _OURS.get(kind, "ours")
    base = {row.cell: row.median_ms for row in rows if row.contender == ours}
    ratios = [
        row.median_ms / mine if row.median_ms and (mine := base.get(row.cell)) else None
        for row in rows
    ]
    columns = [
        ("case", text_cells(row.cell for row in rows)),
        ("contender", text_cells(row.contender for row in rows)),
        ("median ms", figure_cells((row.median_ms for row in rows), "{:.4g}")),
        ("p25", figure_cells((row.p25_ms for row in rows), "{:.4g}")),
        ("p75", figure_cells((row.p75_ms for row in rows), "{:.4g}")),
        (_UNITS.get(kind, "TFLOP/s"), figure_cells((row.figure for row in rows), "{:,.4g}")),
        (f"time / {ours}", ratio_cells(ratios, "{:.3f}")),
        ("error", figure_cells((row.error for row in rows), "{:.1e}")),
        ("matrix units at work", figure_cells((row.matrix_percent for row in rows), "{:.0f}%")),
    ]
    filled = [(name, cells) for name, cells in columns if any(cell.text for cell in cells)]
    return Table(
        _TITLES[kind],
        [name for name, _ in filled],
        list(zip(*(cells for _, cells in filled), strict=True)),
        "Above the mark, ours is faster.",
        text_columns=2,
    )


def _kernel_charts(
    config: Config, measured: Mapping[str, Sequence[Row]], rows: Sequence[Row], roofs: Ceilings
) -> list[Chart]:
    names = list(dict.fromkeys(row.contender for row in rows if not row.absent))
    names.sort(key=lambda name: (not name.startswith("ours"), name))
    colours = {name: i for i, name in enumerate(names)}
    times = {(row.kind, row.cell, row.contender): row.median_ms for row in rows}
    found = []
    wide = {"dense": config.dense, "decode": config.decode, "prefill": config.prefill}
    for kind, cells in wide.items():
        here = measured.get(kind, ())
        if here:
            figures = {(row.cell, row.contender): row.figure for row in here}
            series = [
                Series(
                    name, (), [figures.get((str(cell), name)) for cell in cells],
                    colour=colours[name],
                )
                for name in names
                if any((str(cell), name) in figures for cell in cells)
            ]  # fmt: skip
            title, unit = _TITLES[kind].partition(":")[0], _UNITS.get(kind, "TFLOP/s")
            found.append(bar_chart(title, [str(cell) for cell in cells], series, y_label=unit))
    groups: dict[str, list[Lite]] = {}
    for cell in config.lite:
        shape = f"{cell.batch},{cell.heads},{cell.length},{cell.head_dim}"
        groups.setdefault(f"{shape}, {cell.pattern}", []).append(cell)
    for title, listed in groups.items():
        ordered = sorted(listed, key=lambda cell: cell.sparsity)
        x = [100 * cell.sparsity for cell in ordered]
        lines = []
        for name in names:
            y = [times.get(("lite", str(cell), name)) for cell in ordered]
            if any(y):
                style = "dashed" if name == "ours" else "line"
                lines.append(Series(name, x, y, style=style, colour=colours[name]))  # type: ignore[arg-type]
        dense = times.get(("lite", str(ordered[0]), "ours"))
        if dense:
            ideal = [(1 - cell.sparsity) * dense for cell in ordered]
            lines.append(Series("(1 - s) x our dense", x, ideal, style="dotted", colour=None))
        if lines:
            found.append(
                chart(f"LiteAttention: {title}", lines, x_label="tiles skipped, %", y_label="ms")
            )
    return found + _roofline(config, rows, roofs, colours)


def _roofline(
    config: Config, rows: Sequence[Row], roofs: Ceilings, colours: Mapping[str, int]
) -> list[Chart]:
    """Work per second against work per byte, under what the device reaches; [] without points."""
    cells: dict[tuple[str, str], Dense | Lite | Decode | Prefill] = {
        (kind_of(cell), str(cell)): cell for cell in config.cells if not isinstance(cell, Host)
    }
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        # Beside LiteAttention, dense contenders do other work than the cell's.
        full = row.kind == "lite" and row.contender not in OF_LISTS
        cell = cells.get((row.kind, row.cell))
        if cell is None or not row.median_ms or full or row.contender == "device copy":
            continue
        rate = cell.work / row.median_ms / 1e9
        tip = f"{row.contender}, {row.cell}: {rate:.3g} TFLOP/s"
        points.setdefault(row.contender, []).append((cell.work / cell.traffic, rate, tip))
    if not points:
        return []
    series = []
    for name, listed in points.items():
        x, y, tips = zip(*listed, strict=True)
        series.append(Series(name, x, y, style="points", colour=colours[name], tips=tips))
    low = min(x for one in series for x in one.x)
    ridge = roofs.tflops / roofs.tbps
    corners = sorted({low, ridge, max(ridge, *(x for one in series for x in one.x))})
    roof = [min(roofs.tbps * x, roofs.tflops) for x in corners]
    series.append(Series("roof", corners, roof, style="dashed", colour=None))
    return [
        chart(
            "Roofline",
            series,
            x_label="floating-point operations per byte",
            y_label="TFLOP/s",
            log=True,
            note=f"Roof: {roofs.tflops:.3g} TFLOP/s in a bf16 matrix product, {roofs.tbps:.3g} "
            "TB/s in a copy.",
        )
    ]


def serving(result: Mapping[str, Any], command: str, ours: str) -> str:
    """The page of ``bench serving`` with sizes.

    Args:
        result: what its JSON holds.
        command: that was called.
        ours: name of our backend.
    """
    rows = result["rows"]
    environment = {
        name: text for name, text in result["environment"].items() if isinstance(text, str | int)
    }
    how = "in turns" if result["in_turns"] else "one backend after the other"
    return render(
        "benchmark",
        title=f"Serving {result['sizes']} with {result['framework']} on {result['platform']}",
        lead=f"{result['dtype']}, cache {result['kv_cache_dtype']}, {result['rounds']} rounds, "
        f"{how}; medians. Random weights of the model's sizes.",
        warnings=[] if result["complete"] else ["Incomplete: not all cases were measured."],
        facts=[
            ("Command", command),
            *((name, str(text)) for name, text in environment.items()),
            *((f"start of {name}", f"{took:.1f} s") for name, took in result["start_s"].items()),
        ],
        notes=[],
        sizes="",
        charts=_serving_charts(rows, ours),
        tables=[_serving_table(rows, ours)] if rows else [],
        absent=[],
    )


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['kind']} {row['batch']} x {row['context']}"


def _serving_table(rows: Sequence[Mapping[str, Any]], ours: str) -> Table:
    base = {_case(row): row["tokens_per_s"] for row in rows if row["backend"] == ours}
    gains = [base[_case(row)] / row["tokens_per_s"] if _case(row) in base else None for row in rows]
    between = [row["between_tokens_s"] for row in rows]
    columns = [
        ("case", text_cells(map(_case, rows))),
        ("backend", text_cells(row["backend"] for row in rows)),
        ("tokens/s", figure_cells((row["tokens_per_s"] for row in rows), "{:,.1f}")),
        ("least", figure_cells((row["tokens_per_s_min"] for row in rows), "{:,.1f}")),
        ("most", figure_cells((row["tokens_per_s_max"] for row in rows), "{:,.1f}")),
        ("first token ms", figure_cells((1e3 * row["first_token_s"] for row in rows), "{:,.1f}")),
        (
            "between tokens ms",
            figure_cells((None if each is None else 1e3 * each for each in between), "{:,.2f}"),
        ),
        (f"{ours} / backend, tokens/s", ratio_cells(gains, "{:.3f}")),
    ]
    return Table(
        "Tokens per second, time to the first token and between tokens",
        [name for name, _ in columns],
        list(zip(*(cells for _, cells in columns), strict=True)),
        f"Above the mark, {ours} (ours) is faster.",
        text_columns=2,
    )


def _serving_charts(rows: Sequence[Mapping[str, Any]], ours: str) -> list[Chart]:
    """Tokens per second of the cases of a kind: kinds are too far apart for one scale."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    backends.sort(key=lambda name: name != ours)
    rates = {(_case(row), row["backend"]): row["tokens_per_s"] for row in rows}
    found = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cases = list(dict.fromkeys(_case(row) for row in rows if row["kind"] == kind))
        series = [
            Series(name, (), [rates.get((case, name)) for case in cases], colour=i)
            for i, name in enumerate(backends)
        ]
        found.append(bar_chart(kind.capitalize(), cases, series, y_label="tokens/s"))
    return found
