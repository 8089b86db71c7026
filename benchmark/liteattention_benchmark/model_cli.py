"""``liteattention-rocm model``: the cycle model of one CU, on a recording or a shipped kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from liteattention_emulator import EmulatorError, Recording, environment_problems
from liteattention_emulator.timing import Replay, command
from liteattention_rocm.cli import dimensions, files
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import activity

from . import hbm

if TYPE_CHECKING:
    from .model import Case

#: Options of what --shape runs.
_OF_SHAPE = ("--kernel", "--rounding", "--kv-heads", "--page-size", "--q-len", "--record")
KERNELS = ("dense", "lite", "weigh", "prefill", "decode")


def beside_hbm(result: Replay, data: dict[str, Any]) -> str:
    """Add what HBM asks for to a report; in words."""
    asks, there = hbm.need(), result.flight.fetched_under_way
    data["hbm"] = {
        "latency_clk": asks.latency,
        "bytes_per_clk_of_a_cu": asks.rate,
        "needed_bytes": asks.needed,
        "needed_least": asks.least,
        "needed_most": asks.most,
        "under_way_over_needed": there / asks.needed,
    }
    return (
        f"HBM: a CU's share is {asks.rate:.1f} B/clk; at a latency of {asks.latency:.0f} clk it "
        f"takes {asks.needed:,.0f} bytes under way ({asks.least:,.0f} to {asks.most:,.0f}), and "
        f"there are {there / asks.needed:.1f} times as many."
    )


def launched(case: Case, clock_ghz: float | None, result: Replay, data: dict[str, Any]) -> str:
    """Add what a launch of the case's whole shape takes to a report; in words."""
    from . import launches

    per_block = data["waves"][0].get("clk_per_block")
    if per_block is None:
        return ""
    found, data["launch"] = launches.of(case, result, per_block)
    at = data["launch"]
    alone = case.resident == 1
    rounds = "rounds" if alone else f"rounds of {case.resident} to a CU"
    words = (
        f"A launch: {at['workgroups']:,} workgroups, {at['rounds']:.2f} {rounds}, "
        f"{at['clk']:,.0f} clk; {'CUs' if alone else 'these places'} in use "
        f"{at['cus_in_use']:.1%}, matrix cores {at['matrix_use']:.1%}."
    )
    if at["pass_clk"]:
        words += f" Passes before and after, by HBM's rate: {at['pass_clk']:,.0f} clk."
    if clock_ghz is not None:
        at["us"] = found.microseconds(clock_ghz)
        words += f" At {clock_ghz:g} GHz, as you asked: {at['us']:,.0f} us."
    return words


def _recording(file: Path, reasons: list[str]) -> Recording | None:
    """Read a recording; why it cannot be is added to ``reasons``."""
    try:
        return Recording.load(file)
    except OSError as error:
        reasons.append(f"{file}: {error.strerror or error}")
    except ValueError as error:
        reasons.append(str(error) if str(file) in str(error) else f"{file}: {error}")
    return None


def _typed(context: typer.Context, option: str) -> bool:
    """Whether an option was given, be it with its default."""
    source = context.get_parameter_source(option.removeprefix("--").replace("-", "_"))
    return source is not None and source.name != "DEFAULT"


def model(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="Recording that `emulate run --record` or --record saved.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="B,H,S,D: run workgroups of our kernel instead.")
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="With --shape: dense, lite, weigh, prefill or decode.")
    ] = "dense",
    rounding: Annotated[str, typer.Option(help="With --shape: rtne, rtna or rtz.")] = "rtne",
    kv_heads: Annotated[
        int,
        typer.Option(
            min=0, max=dimensions.MOST, help="With prefill and decode: key heads; 0: as many as H."
        ),
    ] = 0,
    page_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=dimensions.MOST,
            help="With prefill and decode: tokens of a page of the cache.",
        ),
    ] = 16,
    q_len: Annotated[
        int, typer.Option(min=1, max=dimensions.MOST, help="With decode: query rows of a request.")
    ] = 1,
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
    decode, and dense and prefill at D = 64, are two workgroups, as a CU holds two of them. prefill
    is the last tile of a causal request of S tokens. decode has S keys a workgroup, which come from
    HBM: l2_latency is its latency, unless --set. The others also give the clk of a launch of the
    whole shape, rounds and tails included.
    """
    reasons = []
    sizes = None
    if (file is None) == (shape is None):
        reasons.append("give a recording or --shape, one of both")
    if kernel not in KERNELS:
        reasons.append(f"--kernel must be dense, lite, weigh, prefill or decode, got {kernel!r}")
    if rounding not in ("rtne", "rtna", "rtz"):
        reasons.append(f"--rounding must be rtne, rtna or rtz, got {rounding!r}")
    if shape is not None:
        reasons += environment_problems()
        sizes = dimensions.parse(shape, reasons)
    else:
        typed = ", ".join(name for name in _OF_SHAPE if _typed(context, name))
        if typed:
            reasons.append(
                f"{typed}: only with --shape, which runs a kernel; a recording has had its run: "
                "leave out, or give --shape in place of the recording"
            )
    unwritable = None if record is None else files.file_problem(record)
    if unwritable is not None:
        reasons.append(f"--record: {unwritable}")
    recorded = None if file is None else _recording(file, reasons)
    options = None
    try:
        options = command.Options.of(overrides, ranges, top, timeline, clock_ghz, as_json)
    except command.BadOptions as error:
        reasons.append(str(error))
    case = None
    if sizes is not None:
        need("model --shape", "torch")
        from . import model as launch

        if kernel in KERNELS:
            case = launch.Case(sizes, kernel, rounding, kv_heads, page_size, q_len)  # type: ignore[arg-type]
            reasons += case.reasons()
        elif all(sizes[3] not in dims for dims in launch.DIMS.values()):
            reasons.append(f"D of --shape: no kernel has {sizes[3]}")
    if reasons or options is None:
        raise typer.BadParameter("; ".join(reasons))
    try:
        if recorded is not None:
            command.run(recorded, options)
            return
        assert case is not None
        more: Callable[[Replay, dict[str, Any]], str] = beside_hbm
        if case.kernel == "decode":
            overrides_of_decode = {"l2_latency": hbm.HBM_LATENCY} | options.overrides
            options = replace(options, overrides=overrides_of_decode)
        else:
            more = partial(launched, case, clock_ghz)
        with activity(Console(stderr=True), "running the kernel on the software MI300X"):
            found, per_block = launch.record(case)
        lost = None
        if record is not None:
            try:
                record.parent.mkdir(parents=True, exist_ok=True)
                with command.written(record) as part:
                    found.save(part)
            except OSError as error:  # said after what can be had
                lost = error
        command.run(found, options, per_block, more)
        if lost is not None:
            raise lost
    except (EmulatorError, OSError, ValueError) as error:
        typer.echo(f"liteattention-rocm model: {error}", err=True)
        raise typer.Exit(1) from error
