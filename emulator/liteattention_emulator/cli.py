"""``liteattention-rocm emulate``: run gfx942 code objects on the CPU and see what they did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from liteattention_emulator import device, hazards, native, waits
from liteattention_emulator.recording import Recording
from liteattention_emulator.timing import command

app = typer.Typer(help="The software MI300X: run code objects on the CPU.", no_args_is_help=True)

_TYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u32": np.uint32}
_TYPES |= {"i64": np.int64, "u8": np.uint8, "bf16": np.uint16}


class _Bad(ValueError):
    """Arguments of a command that do not work; one reason per line."""


@app.callback(invoke_without_command=True, no_args_is_help=True)
def emulate(
    context: typer.Context,
    library: Annotated[
        bool, typer.Option("--library", help="Print the path for LITEATTENTION_HIP_LIBRARY.")
    ] = False,
) -> None:
    """Print the emulator's library, or run a command."""
    if library and context.invoked_subcommand is not None:
        _fail(f"--library runs no command: leave it or {context.invoked_subcommand} out")
    if library:
        try:
            typer.echo(native.library())
        except native.EmulatorError as error:
            _fail(str(error))
        raise typer.Exit


@app.command("kernels")
def kernels(
    file: Annotated[Path, typer.Argument(help="Code object or offload bundle.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the kernels of a code object: registers, memory, arguments, what is not emulated."""
    found = _try(file, lambda: device.kernels(file.read_bytes()))
    if as_json:
        rows = [
            {name: getattr(kernel, name) for name in kernel.__slots__ if name != "arguments"}
            | {"arguments": [[a.name, a.kind, a.offset, a.size] for a in kernel.arguments]}
            for kernel in found.values()
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(box=None, padding=(0, 1, 0, 0))  # within 80 columns
    table.add_column("kernel", no_wrap=True)
    for column in ("VGPR", "AGPR", "SGPR", "LDS", "scratch", "args"):
        table.add_column(column, justify="right")
    table.add_column("not emulated", overflow="fold")
    for kernel in found.values():
        table.add_row(
            kernel.name,
            *(str(n) for n in (kernel.vgprs, kernel.agprs, kernel.sgprs)),
            *(str(n) for n in (kernel.lds_bytes, kernel.scratch_bytes)),
            str(sum(not argument.hidden for argument in kernel.arguments)),
            " ".join(kernel.unimplemented) or "-",
        )
    Console().print(table)


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="Code object or offload bundle.")],
    kernel: Annotated[str, typer.Option(help="Kernel to run.")],
    grid: Annotated[str, typer.Option(help="Workgroups: X[,Y[,Z]].")] = "1",
    block: Annotated[str, typer.Option(help="Work-items of a workgroup: X[,Y[,Z]].")] = "64",
    args: Annotated[
        list[str] | None,
        typer.Option(
            help="One per argument, in order: a number (1, 0.5), null, a buffer TYPE:COUNT[:VALUE] "
            "(f32, f16, bf16, i32, u32, i64, u8; VALUE is a number, iota or random), or a .npy "
            "file, which is read and written back; of bytes (uint8) for a struct by value."
        ),
    ] = None,
    lds: Annotated[int, typer.Option(help="Dynamic LDS, bytes.", min=0, max=2**32 - 1)] = 0,
    check: Annotated[bool, typer.Option(help="Run the checkers.")] = True,
    order: Annotated[
        str, typer.Option(help="round-robin[:QUANTUM], random:SEED, first-ahead, last-ahead.")
    ] = "round-robin",
    threads: Annotated[
        int, typer.Option(help="Host threads; 0: one per core.", min=0, max=4096)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Save a workgroup's instruction streams here (.npz).")
    ] = None,
    workgroup: Annotated[
        int, typer.Option(help="The one that --record records.", min=0, max=2**63 - 1)
    ] = 0,
) -> None:
    """Run a kernel once and print what it executed and what the checkers found."""
    reasons = native.environment_problems()
    loads = not reasons  # code objects are refused else, for the same reasons

    def tried(action: Callable[[], Any]) -> Any:
        """What it returns; why it does not goes to ``reasons``."""
        try:
            return action()
        except KeyError as error:
            reasons.append(str(error.args[0]))
        except (native.EmulatorError, OSError, TypeError) as error:
            reasons.append(_about(file, error))
        except _Bad as error:
            reasons.append(str(error))

    files = [Path(text) for text in args or [] if text.endswith(".npy")]
    written = [("--args", path) for path in files] + [("--out", out), ("--record", record)]
    before = len(reasons)
    values = [tried(partial(_value, text, number)) for number, text in enumerate(args or [])]
    values_read = len(reasons) == before
    grid_sizes = tried(lambda: _sizes(grid, "--grid"))
    block_sizes = tried(lambda: _sizes(block, "--block"))
    if record is None and workgroup:
        reasons.append(
            "--workgroup is the one that --record records: give --record, or leave it out"
        )
    elif grid_sizes is not None and workgroup >= math.prod(grid_sizes):
        reasons.append(
            f"--workgroup must be below {math.prod(grid_sizes)}, the workgroups of --grid {grid}, "
            f"got {workgroup}"
        )
    reasons += [
        f"{option}: {why}"
        for option, path in written
        if path is not None and (why := command.unwritable(path))
    ]
    native_options = {"order": order, "threads": str(threads), "count": "on"}
    native_options["check"] = "on" if check else "off"
    image = tried(file.read_bytes)
    if not native.library_problem():
        for name, setting in native_options.items():
            tried(partial(native.set_option, name, setting))
    if loads:
        kernels = None if image is None else tried(lambda: device.kernels(image))
        found = None if kernels is None else tried(lambda: device.named(kernels, kernel))
        if found is not None and values_read:
            tried(lambda: device.packed(found, values))
    if reasons:
        _fail("\n".join(reasons))
    try:
        with device.Module(image) as module:
            wanted = None if record is None else workgroup
            report = module.launch(
                kernel, grid_sizes, block_sizes, values, dynamic_lds=lds, record=wanted
            )
    except native.LaunchFailed as error:
        for line in str(error).splitlines():
            typer.echo(line, err=True)
        raise typer.Exit(1) from error
    except (native.EmulatorError, TypeError) as error:
        _fail(_about(file, error))
    data = report.to_dict()
    outputs: list[tuple[Path, Callable[[Path], object]]] = [
        (Path(text), partial(np.save, arr=array))
        for text, array in zip(args or [], values, strict=True)
        if text.endswith(".npy")
    ]
    if out is not None:
        outputs.append((out, lambda part: part.write_text(json.dumps(data, indent=1) + "\n")))
    if record is not None and report.recording is not None:
        outputs.append((record, report.recording.save))
    lost = []
    for path, save in outputs:
        try:
            with command.written(path) as part:
                save(part)
        except OSError as error:
            lost.append(_about(path, error))
    if as_json:
        typer.echo(json.dumps(data, indent=1))
    else:
        show(data)
    if lost:  # the run is over: what can be had of it is above and in the other files
        _fail("\n".join(lost))


@app.command("report")
def report(
    file: Annotated[Path, typer.Argument(help="JSON that `emulate run --out` wrote.")],
) -> None:
    """Print the tables of a saved report."""
    try:
        show(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        _fail(_about(file, error))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        _fail(f"{file}: not a report; `emulate run FILE --out REPORT` writes one")


@app.command("model")
def model(
    file: Annotated[Path, typer.Argument(help="Recording that `emulate run --record` saved.")],
    overrides: command.Overrides = None,
    ranges: command.Ranges = True,
    top: command.Top = 12,
    matrix_per_block: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Matrix instructions of a wave per block: also clk per block.",
        ),
    ] = None,
    timeline: command.Timeline = None,
    clock_ghz: command.ClockGhz = None,
    as_json: command.AsJson = False,
) -> None:
    """Model how long the recorded workgroup takes on a CU, in clk, and where they go.

    An iteration is what lies between two executions of a wave's most frequent backward branch
    (of those around its matrix instructions). The first tenth and the last are left out.
    """
    try:
        options = command.Options.of(overrides, ranges, top, timeline, clock_ghz, as_json)
        command.run(_try(file, lambda: Recording.load(file)), options, matrix_per_block)
    except command.BadOptions as error:
        _fail(str(error))
    except (native.EmulatorError, OSError) as error:
        _fail(_about(file, error))


@app.command("hazards")
def find_hazards(files: Annotated[list[Path], typer.Argument(help="Code objects.")]) -> None:
    """Look for missing wait states and waits in machine code, on all paths, without running it."""
    states: list[tuple[Path, hazards.Hazard]] = []
    early: list[tuple[Path, waits.EarlyUse]] = []
    reasons = []
    for file in files:
        try:
            states += [(file, each) for each in hazards.check(file)]
            early += [(file, each) for each in waits.check(file)]
        except (native.EmulatorError, OSError, ValueError) as error:
            reasons.append(_about(file, error))
    if reasons:
        _fail("\n".join(reasons))
    for file, found in [*states, *early]:
        typer.echo(f"{file}: {found}")
    typer.echo(
        f"missing wait states: {len(states)}, loads used too early: {len(early)} "
        f"(code objects: {len(files)})"
    )
    if states or early:
        raise typer.Exit(1)


def show(data: dict[str, Any]) -> None:
    """Print a report (``Report.to_dict``) as tables."""
    console = Console()
    console.print(
        f"[bold]{data['kernel']}[/]: {data['workgroups']} workgroups, {data['waves']} waves, "
        f"{data['instructions']:,} wave instructions",
        highlight=False,
    )
    console.print(
        f"emulated in {data['emulation_seconds']:.3f} s by {data['emulated_by_threads']} host "
        f"threads ({data['emulated_instructions_per_second'] / 1e6:.1f} M instructions/s); this is "
        "no time of a GPU",
        highlight=False,
    )
    units = Table("unit", "instructions", "per wave")
    for unit, count in data["by_unit"].items():
        units.add_row(unit, f"{count:,}", f"{data['by_unit_per_wave'][unit]:,.1f}")
    console.print(units)
    names = Table("most frequent", "instructions")
    for name, count in list(data["by_name"].items())[:12]:
        names.add_row(name, f"{count:,}")
    console.print(names)
    counters = Table("counter", "value")
    for name, count in data["counters"].items():
        counters.add_row(name, f"{count:,}")
    console.print(counters)
    if data["bank_conflicts"]:
        conflicts = Table("LDS bank conflicts at", "instruction", "cycles without", "extra cycles")
        for row in data["bank_conflicts"][:12]:
            phases, extra = f"{row['lds_phases']:,}", f"{row['extra_cycles']:,}"
            conflicts.add_row(f"0x{row['offset']:x}", row["name"], phases, extra)
        console.print(conflicts)


def _value(text: str, number: int) -> Any:
    if text == "null":
        return None
    if text.endswith(".npy"):
        try:
            return np.load(text)
        except (OSError, ValueError) as error:
            raise _Bad(f"--args {text}: {error}") from error
    if ":" in text:
        return _buffer(text, number)
    for convert in (lambda: int(text, 0), lambda: float(text)):
        try:
            return convert()
        except ValueError:
            continue
    raise _Bad(f"--args {text}: not a number, null, TYPE:COUNT[:VALUE] or a .npy file")


def _buffer(text: str, number: int) -> Any:
    name, count, *rest = text.split(":")
    if name not in _TYPES or not count.isdecimal() or len(rest) > 1:
        raise _Bad(f"--args {text}: not TYPE:COUNT[:VALUE] with a type of {', '.join(_TYPES)}")
    if _too_large(count):
        raise _Bad(f"--args {text}: COUNT must be below 2^32")
    try:
        return _filled(text, name, int(count), rest[0] if rest else "0", number)
    except MemoryError as error:
        raise _Bad(f"--args {text}: {error}") from error


def _filled(text: str, name: str, size: int, how: str, number: int) -> Any:
    # bf16 has no numpy type: the upper halves of float32.
    kind = np.float32 if name == "bf16" else _TYPES[name]
    if how == "iota":
        values = np.arange(size).astype(kind)
    elif how == "random":
        generator = np.random.default_rng(number)
        real = np.issubdtype(kind, np.floating)
        drawn = generator.standard_normal(size) if real else generator.integers(0, 100, size)
        values = drawn.astype(kind)
    else:
        try:
            value = float(how)
        except ValueError as error:
            raise _Bad(f"--args {text}: VALUE must be a number, iota or random") from error
        if np.issubdtype(kind, np.integer):
            bounds: Any = np.iinfo(np.dtype(kind))
            least, most = bounds.min, bounds.max
            if not (value.is_integer() and least <= int(value) <= most):
                raise _Bad(f"--args {text}: VALUE must be whole, from {least} to {most}")
        values = np.full(size, value).astype(kind)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else values


def _too_large(digits: str) -> bool:
    return len(digits.lstrip("0")) > 10 or int(digits) >= 2**32


def _sizes(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(p.isdecimal() and p.strip("0") for p in parts):
        raise _Bad(f"{option} must be one to three positive numbers, got {text!r}")
    if any(map(_too_large, parts)):
        raise _Bad(f"{option} must have numbers below 2^32, as a launch has them, got {text!r}")
    return [int(part) for part in parts]


def _try(file: Path, action: Any) -> Any:
    try:
        return action()
    except (native.EmulatorError, OSError, ValueError) as error:
        _fail(_about(file, error))


def _about(file: Path, error: Exception) -> str:
    """Say what is wrong, and with which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or file}: {error.strerror}"
    text = str(error)
    return text if str(file) in text else f"{file}: {text}"


def _fail(text: str) -> Any:
    typer.echo(text, err=True)
    raise typer.Exit(2)
