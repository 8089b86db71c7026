"""``liteattention-rocm model``: the cycle model of one CU, on a recording or a shipped kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from liteattention_emulator import EmulatorError, Recording
from liteattention_emulator.timing import command
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import activity


def model(
    file: Annotated[
        Path | None, typer.Argument(help="Recording that `emulate run --record` or --record saved.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="B,H,S,D: run our kernel's first workgroup instead.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="With --shape: dense or lite.")] = "dense",
    rounding: Annotated[str, typer.Option(help="With --shape: rtne, rtna or rtz.")] = "rtne",
    record: Annotated[
        Path | None, typer.Option(help="With --shape: also save the recording here (.npz).")
    ] = None,
    overrides: command.Overrides = None,
    ranges: command.Ranges = True,
    top: command.Top = 12,
    timeline: command.Timeline = None,
    clock_ghz: command.ClockGhz = None,
    as_json: command.AsJson = False,
) -> None:
    """Model how many clk a workgroup takes on a CU of an MI300X and where they go.

    Give a recording or --shape. Nothing here is measured: see docs/model.md. With --shape a block
    is a K block of 64 keys, and clk per block are given by the matrix instructions that it takes.
    """
    reasons = []
    sizes = None
    if (file is None) == (shape is None):
        reasons.append("give a recording or --shape, one of both")
    if kernel not in ("dense", "lite"):
        reasons.append(f"--kernel must be dense or lite, got {kernel!r}")
    if rounding not in ("rtne", "rtna", "rtz"):
        reasons.append(f"--rounding must be rtne, rtna or rtz, got {rounding!r}")
    if shape is not None:
        parts = shape.split(",")
        if len(parts) == 4 and all(part.strip().isdecimal() and int(part) for part in parts):
            batch, heads, length, dim = map(int, parts)
            sizes = batch, heads, length, dim
            if dim not in (64, 128):
                reasons.append(f"D of --shape must be 64 or 128, got {dim}")
        else:
            reasons.append(f"--shape must be four positive numbers B,H,S,D, got {shape!r}")
    elif record is not None:
        reasons.append("--record goes with --shape")
    options = None
    try:
        options = command.Options.of(overrides, ranges, top, timeline, clock_ghz, as_json)
    except command.BadOptions as error:
        reasons.append(str(error))
    if reasons or options is None:
        raise typer.BadParameter("; ".join(reasons))
    try:
        if file is not None:
            command.run(Recording.load(file), options)
            return
        need("model --shape", "torch")
        from . import model as launch

        case = launch.Case(sizes, kernel, rounding)  # type: ignore[arg-type]
        with activity(Console(stderr=True), "running the kernel on the software MI300X"):
            found, per_block = launch.record(case)
        if record is not None:
            found.save(record)
        command.run(found, options, per_block)
    except (command.BadOptions, EmulatorError, OSError, ValueError) as error:
        typer.echo(f"liteattention-rocm model: {error}", err=True)
        raise typer.Exit(1) from error
