"""``liteattention-rocm kernels``: the shipped gfx942 code objects, inspected and rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import DIRECTORY, disassembly, metadata
from . import build as builder

app = typer.Typer(help="The gfx942 code objects: report, build, check.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """The gfx942 code objects: report, build, check."""


@app.command("report")
def report(
    directory: Annotated[Path, typer.Option(help="Where the code objects lie.")] = DIRECTORY,
) -> None:
    """Print registers, spills and LDS of every kernel, and what its hot loop consists of."""
    console = Console()
    paths = sorted(directory.glob("*.co"))
    if not paths:
        raise typer.BadParameter(f"no code objects in {directory}", param_hint="--directory")
    table = Table(title="Kernels (read from the code objects)")
    for column in ("kernel", "VGPR", "SGPR", "spills", "scratch B", "LDS B", "threads", "args B"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for path in paths:
        for kernel in metadata.kernels(path.read_bytes()):
            table.add_row(
                kernel.name,
                str(kernel.vgprs),
                str(kernel.sgprs),
                f"{kernel.vgpr_spills}+{kernel.sgpr_spills}",
                str(kernel.scratch_bytes),
                str(kernel.lds_bytes),
                str(kernel.max_workgroup),
                str(kernel.kernarg_bytes),
            )
    console.print(table)
    try:
        listings = [disassembly.disassemble(path) for path in paths]
    except disassembly.ToolMissing as error:
        console.print(f"No instruction mix: {error}.")
        return
    table = Table(title="Instructions of the hot loop (of all code where there is no loop)")
    table.add_column("kernel")
    for column in ("all", *disassembly.CLASSES):
        table.add_column(column, justify="right")
    for listing in listings:
        for name, code in listing.items():
            counts = disassembly.mix(disassembly.hot_loop(code))
            table.add_row(name, str(sum(counts.values())), *(str(n) for n in counts.values()))
    console.print(table)


@app.command("build")
def build(
    compiler: Annotated[str, typer.Option(help="clang++ 19 or hipcc.")] = builder.COMPILER,
    out: Annotated[Path, typer.Option(help="Where to write.")] = DIRECTORY,
) -> None:
    """Compile csrc/gfx942, pass the gate, and write code objects and manifest."""
    try:
        manifest = builder.build(out, compiler=compiler)
    except (builder.BuildError, disassembly.ToolMissing, FileNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    count = sum(len(o.kernels) for o in manifest.objects)
    typer.echo(f"{count} kernels in {len(manifest.objects)} code objects, {out}")
    if builder.hazards(out / manifest.objects[0].file) is None:
        typer.echo("wait-state hazards not checked: the emulator package is not installed")


@app.command("check")
def check() -> None:
    """Rebuild and compare byte for byte with the code objects that are committed."""
    try:
        differences = builder.check()
    except (builder.BuildError, disassembly.ToolMissing, FileNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if differences:
        typer.echo("the committed code objects are not what the sources build:", err=True)
        for difference in differences:
            typer.echo(f"- {difference}", err=True)
        raise typer.Exit(1)
    typer.echo("the committed code objects are byte for byte what the sources build")
