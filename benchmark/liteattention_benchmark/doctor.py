"""``liteattention-rocm doctor``: does this installation compute what it should, and what serves."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import files
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import activity

if TYPE_CHECKING:
    from liteattention_rocm.doctor.report import Check, Report

_COLOURS = {
    "ok": "green", "failed": "bold red", "warning": "yellow", "differs": "yellow", "skipped": "dim"
}  # fmt: skip


def command(
    emulate: Annotated[
        bool, typer.Option(help="Take the software MI300X for the HIP run-time: needs no GPU.")
    ] = False,
    time: Annotated[
        bool, typer.Option("--time/--no-time", help="On a GPU, also time our calls and peers'.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write a JSON file to attach to a report.")
    ] = None,
) -> None:
    """Examine this installation: versions, GPUs, engines, code objects, results of all kernels.

    Every family of kernels runs once on tiny inputs. Results are compared with float64, those of
    the MI300X kernels also with the bits that the software MI300X computed. Exits with 1 if
    something that should work does not; a missing GPU is no failure. What runs on a GPU has a
    process of its own, so a kernel that faults or hangs is one line of the report. The file is
    written as checks come in. It holds versions and names of devices, nothing else of you or your
    machine.
    """
    need("doctor", "torch")
    problem = None if out is None else files.file_problem(out)
    if problem is not None:
        raise typer.BadParameter(problem, param_hint="--out")
    if emulate:
        _emulate()
    _check_emulator(emulate)
    import torch

    from liteattention_rocm.doctor import report as examination

    from . import doctor_times

    console = Console()
    with activity(Console(stderr=True), "looking at the installation") as say:
        report = examination.begin()

        def under_way(text: str) -> None:
            report.under_way = text
            say(text)
            if out is not None:
                files.write_text(out, json.dumps(report.to_dict(), indent=1) + "\n")

        try:
            examination.examine(report, under_way)
            if time and report.gpus and not emulate:
                device = torch.device("cuda", torch.cuda.current_device())
                report.times.extend(doctor_times.measure(device, under_way))
        except KeyboardInterrupt:
            show(report, console)
            raise
        under_way("")
    show(report, console)
    if out is not None:
        console.print(f"report: {out}", highlight=False, soft_wrap=True)
    if report.failures:
        raise typer.Exit(1)


def _emulate() -> None:
    """Make the software MI300X the HIP run-time of this process."""
    from liteattention_rocm.engines import LIBRARY_VARIABLE, settings

    try:
        # By name: it is a package of its own, which an installation need not have.
        emulator = importlib.import_module("liteattention_emulator")
        os.environ[LIBRARY_VARIABLE] = str(emulator.library())
    except (ImportError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint="--emulate") from error
    settings.cache_clear()


def _check_emulator(emulate: bool) -> None:
    """Refuse variables that launches of the software MI300X would: no kernel is broken then.

    ``emulate``: it was asked for, and its checkers are on.
    """
    from liteattention_rocm import engines

    if not emulate and not engines.get("gfx942").emulated:
        return
    try:
        emulator = importlib.import_module("liteattention_emulator")
    except ImportError:  # the library is of another installation
        return
    problems = emulator.environment_problems()
    if problems:
        raise typer.BadParameter("; ".join(problems))
    if emulate:
        emulator.set_option("check", "on")


def show(report: Report, console: Console) -> None:
    """Print a report as tables."""
    versions = _table("installation", "version")
    for name, value in report.installation.items():
        versions.add_row(name, value)
    for number, gpu in enumerate(report.gpus):
        versions.add_row(f"GPU {number}", _device(gpu))
    if not report.gpus:
        versions.add_row("GPU", "none that PyTorch sees")
    for device, name in report.default_engines.items():
        versions.add_row(f"engine for {device} tensors", name)
    console.print(versions)

    services = _table("engine", "tensors", "serves", "why not")
    for (engine, device), rows in _by_engine(report).items():
        serving = [row["request"] for row in rows if row["serves"]]
        reasons = dict.fromkeys(_short(reason) for row in rows for reason in row["reasons"])
        what = "every typical request" if len(serving) == len(rows) else ", ".join(serving)
        services.add_row(engine, device, what or "nothing here", "; ".join(reasons))
    console.print(services)

    checks = _table("check", "", "result", "detail")
    for _, alike in itertools.groupby(report.checks, _row):
        first, *more = alike
        result = f"[{_COLOURS[first.status]}]{first.status}[/]"
        name = f"{first.name} and {len(more)} more" if more else first.name
        checks.add_row(first.group, name, result, first.detail)
    console.print(checks)

    if report.times:
        times = _table("time of", "contender", "median ms")
        for row in report.times:
            taken = f"{row['median_ms']:.3f}" if "median_ms" in row else row["reason"]
            times.add_row(row["what"], row["contender"], taken)
        console.print(times)
    console.print(_summary(report), highlight=False)


def _short(reason: str) -> str:
    """A reason as the table has it; the file has it whole."""
    return "no ROCm: no libamdhip64 here" if collect_env.no_rocm(reason) else reason


def _row(check: Check) -> tuple[str, ...]:
    """What a row of the table is for: one check, or those of a group skipped for one reason."""
    name = "" if check.status == "skipped" else check.name
    return check.group, check.status, check.detail, name


def _summary(report: Report) -> str:
    count = {status: 0 for status in _COLOURS}
    for check in report.checks:
        count[check.status] += 1
    text = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    if report.emulated:
        text += "; gfx942 is the software MI300X"
    if count["differs"]:
        text += (
            "\nExponentials and reciprocals of a real MI300X may differ in the last bit from those "
            "of the software MI300X, which made the expected bits. What differs is right within "
            "its tolerance; please report it all the same, with the file of --out."
        )
    if report.under_way:
        text += f"; stopped at: {report.under_way}"
    if report.broken:
        text += "\nPlease attach the file of `liteattention-rocm doctor --out FILE` to a report."
    return text


def _device(gpu: dict[str, Any]) -> str:
    return (
        f"{gpu['name']} ({gpu['architecture']}, {gpu['compute units']} compute units, "
        f"{gpu['GiB']} GiB)"
    )


def _by_engine(report: Report) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report.services:
        found.setdefault((row["engine"], row["device"]), []).append(row)
    return found


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
