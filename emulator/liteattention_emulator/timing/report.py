"""A replay as JSON-ready values and as tables."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .model import MATRIX_CLK, Replay, Spread
from .work import PER_MFLOP, Work, work

SMALL = 0.0005
"""Shares of the time below this are left out of tables, and effects of constants."""


WORK_HEAD = (
    *("matrix", "plain", "packed", "exp", "LDS", "memory", "scalar"),
    *("LDS B", "L1 B", "L2 B", "matrix operands B", "other operands B"),
)
"""Columns of ``work_row``: instructions per MFLOP, then bytes per flop."""


def work_row(spent: Work) -> list[str]:
    """Cells of a table."""
    return [
        f"{value:.1f}" if name in PER_MFLOP else f"{value:.4f}"
        for name, value in spent.to_dict().items()
    ]


def to_dict(
    result: Replay,
    ranges: Sequence[Spread] | None = None,
    *,
    matrix_per_block: float | None = None,
    top: int = 12,
    clock_ghz: float | None = None,
) -> dict[str, Any]:
    """Everything that ``show`` prints, and all constants.

    matrix_per_block: matrix instructions of a wave that make up what the caller calls a block; the
    clk of one are given where the wave has a loop. ranges: what ``spread`` returned. clock_ghz: of
    the CU; only with it are there microseconds.
    """
    recording = result.recording
    flight, spent = result.flight, work(result)
    data: dict[str, Any] = {
        "kernel": recording.kernel,
        "workgroup": recording.workgroup,
        "workgroups": len(set(recording.workgroups)) or 1,
        "instructions": recording.steps,
        "clk": result.clocks,
        "accounted": {"begin": result.begin, "end": result.end, "steps_of_wave_0": result.window},
        "clk_per_32x32x8": result.per_matrix,
        "matrix_use": result.use,
        "not_used": result.causes,
        "waves": [_wave(result, wave, matrix_per_block) for wave in range(len(result.issued))],
        "at": _places(result, top),
        "l1_hits": result.l1_hits,
        "l1_misses": result.l1_misses,
        "lds_busy": result.lds_busy / max(result.clocks, 1),
        "address_unit_busy": result.address_busy / max(result.clocks, 1),
        "under_way": {
            "asked_bytes": flight.asked_under_way,
            "fetched_bytes": flight.fetched_under_way,
            "fetched_bytes_per_clk": flight.rate,
        },
        "per_mflop_or_flop": None if spent is None else spent.to_dict(),
        "constants": dict(result.constants),
    }
    if ranges is not None:
        moves = [0.0, *(move for row in ranges for move in (row.at_low, row.at_high))]
        data["range"] = {"least": min(moves), "most": max(moves)}
        data["range"]["constants"] = [
            {"name": row.constant.name, "unit": row.constant.unit}
            | {"low": row.constant.low, "high": row.constant.high}
            | {"at_low": row.at_low, "at_high": row.at_high}
            for row in ranges
        ]
    if clock_ghz is not None:
        data["clock"] = {"ghz": clock_ghz, "accounted_us": result.span / clock_ghz / 1e3}
    return data


def _wave(result: Replay, wave: int, matrix_per_block: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"wave": wave, "simd": wave % 4, "loop": None}
    loop, clocks = result.loops[wave], result.per_iteration(wave)
    if loop is None or clocks is None:
        return row
    head = result.recording.instructions[loop.head]
    matrix = loop.matrix / loop.iterations
    row["loop"] = {
        "offset": head.offset,
        "line": result.recording.line(head.offset),
        "iterations": loop.iterations,
        "matrix_instructions": matrix,
        "clk": clocks,
    }
    if matrix_per_block and matrix:
        row["clk_per_block"] = clocks * matrix_per_block / matrix
    return row


def _places(result: Replay, top: int) -> list[dict[str, Any]]:
    total = max(result.span * result.simds, 1)
    at: defaultdict[int, float] = defaultdict(float)
    for row in result.idle:
        at[row.instruction] += row.clocks
    rows = []
    for instruction, clocks in sorted(at.items(), key=lambda item: -item[1])[:top]:
        inst = result.recording.instructions[instruction]
        causes = {
            row.cause: row.clocks / total for row in result.idle if row.instruction == inst.index
        }
        rows.append(
            {"offset": inst.offset, "text": inst.text, "line": result.recording.line(inst.offset)}
            | {"share": clocks / total}
            | {"causes": dict(sorted(causes.items(), key=lambda item: -item[1]))}
        )
    return rows


def show(data: dict[str, Any], console: Console) -> None:
    """Print what ``to_dict`` returned."""
    name = data["kernel"] or "the recorded code"
    say = console.print
    which = f"workgroup {data['workgroup']}"
    if data["workgroups"] > 1:
        which += f" and {data['workgroups'] - 1} beside it on the CU"
    say(f"[bold]{name}[/], {which}: modelled, not measured", highlight=False, soft_wrap=True)
    begin, end = data["accounted"]["begin"], data["accounted"]["end"]
    say(
        f"{data['instructions']:,} instructions in {data['clk']:,} clk; accounted for: clk "
        f"{begin:,} to {end:,}",
        highlight=False,
        soft_wrap=True,
    )
    if data["clk_per_32x32x8"] is not None:
        say(
            f"{data['clk_per_32x32x8']:.2f} clk per {MATRIX_CLK} clk of matrix instruction "
            f"(one 32x32x8), matrix cores in use {data['matrix_use']:.1%}",
            highlight=False,
            soft_wrap=True,
        )
    if "range" in data and data["clk_per_32x32x8"] is not None:
        least, most = (
            data["clk_per_32x32x8"] * (1 + data["range"][end]) for end in ("least", "most")
        )
        say(
            f"{least:.2f} to {most:.2f} over the bounds of the open constants, one at a time",
            highlight=False,
            soft_wrap=True,
        )
    if "clock" in data:
        clock = data["clock"]
        say(
            f"at {clock['ghz']:g} GHz, as you asked: {clock['accounted_us']:.1f} us for what is "
            "accounted for; which clock a kernel reaches is not modelled",
            highlight=False,
            soft_wrap=True,
        )
    under_way = data["under_way"]
    say(
        f"vector memory, bytes under way (mean): {under_way['asked_bytes']:,.0f} that loads ask "
        f"for; {under_way['fetched_bytes']:,.0f} of whole lines of 128 bytes from beyond L1, which "
        f"gives {under_way['fetched_bytes_per_clk']:.1f} B/clk",
        highlight=False,
        soft_wrap=True,
    )
    say(_wave_table(data))
    say(_share_table(data))
    if data["per_mflop_or_flop"]:
        say(_work_table(data))
    if data["at"]:
        say(_place_table(data))
    if "range" in data:
        say(_range_table(data))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _wave_table(data: dict[str, Any]) -> Table:
    block = any("clk_per_block" in row for row in data["waves"])
    columns = ["wave", "loop at", "iterations", "matrix each", "clk each"]
    table = _table(*columns, *(["clk per block"] if block else []))
    for row in data["waves"]:
        loop = row["loop"]
        if loop is None:
            table.add_row(str(row["wave"]), "no loop")
            continue
        cells = [f"0x{loop['offset']:x}", f"{loop['iterations']}"]
        cells += [f"{loop['matrix_instructions']:.0f}", f"{loop['clk']:,.0f}"]
        cells += [f"{row['clk_per_block']:,.0f}"] if "clk_per_block" in row else []
        table.add_row(str(row["wave"]), *cells)
    return table


def _share_table(data: dict[str, Any]) -> Table:
    table = _table("matrix cores", "share of the time")
    table.add_row("in use", f"{data['matrix_use']:.1%}")
    for cause, share in data["not_used"].items():
        if share >= SMALL:
            table.add_row(cause, f"{share:.1%}")
    return table


def _work_table(data: dict[str, Any]) -> Table:
    table = _table("what its flops cost", "")
    for name, value in data["per_mflop_or_flop"].items():
        counted = name in PER_MFLOP
        what = name if counted else f"{name.replace('_bytes', '').replace('_', ' ')} bytes"
        unit = "instructions per MFLOP" if counted else "per flop"
        table.add_row(f"{what} {unit}", f"{value:.1f}" if counted else f"{value:.4f}")
    return table


def _place_table(data: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("idle at", "share", "instruction", "mostly"):
        table.add_column(column, justify="right" if column == "share" else "left")
    for row in data["at"]:
        where = f"0x{row['offset']:x}" + (f" {row['line']}" if row["line"] else "")
        table.add_row(where, f"{row['share']:.1%}", row["text"], next(iter(row["causes"])))
    return table


def _range_table(data: dict[str, Any]) -> Table:
    table = _table("open constant", "low", "high", "time at low", "time at high")
    for row in data["range"]["constants"]:
        if max(abs(row["at_low"]), abs(row["at_high"])) >= SMALL:
            table.add_row(
                row["name"],
                f"{row['low']:g} {row['unit']}",
                f"{row['high']:g} {row['unit']}",
                f"{row['at_low']:+.1%}",
                f"{row['at_high']:+.1%}",
            )
    return table
