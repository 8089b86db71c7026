"""``python -m liteattention_tools``: the shipped gfx942 code objects, inspected and rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from liteattention_emulator import cfg, listing, llvm
from liteattention_rocm.engines.gfx942.manifest import DIRECTORY

from . import build as builder
from . import expected_bits, loops, metadata

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
    table = Table(title="Kernels, read from the code objects")
    table.add_column("kernel", no_wrap=True)
    for column in ("VGPR", "SGPR", "spills", "LDS B", "threads"):
        table.add_column(column, justify="right")
    rows = [
        (
            kernel.name,
            (
                str(kernel.vgprs),
                str(kernel.sgprs),
                # register spills and scratch bytes: the gate wants none of them in a loop
                str(kernel.vgpr_spills + kernel.sgpr_spills + kernel.scratch_bytes),
                str(kernel.lds_bytes),
                str(kernel.max_workgroup),
            ),
        )
        for path in paths
        for kernel in metadata.kernels(path.read_bytes())
    ]
    for name, figures in _alike(rows):
        table.add_row(name, *figures)
    console.print(table)
    console.print("Instructions of the hot loop (of all code where there is no loop):")
    mixes = []
    for path in paths:
        listed = listing.load(path)
        for entry in listed.entries:
            counts = loops.mix(loops.hot(cfg.Graph(listed.instructions, entry.first)))
            parts = " + ".join(f"{n} {label}" for label, n in counts.items() if n)
            mixes.append((entry.name, (f"{sum(counts.values())} = {parts}",)))
    for name, (text,) in _alike(mixes):
        console.print(f"[bold]{name}[/bold]: {text}")


def _alike(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """One row, ending in ``_*``, for kernels that differ in nothing but the rounding."""
    merged: list[tuple[str, tuple[str, ...]]] = []
    for name, figures in rows:
        stem, _, last = name.rpartition("_")
        shown = f"{stem}_*" if last in ("rtne", "rtna", "rtz") else name
        if (shown, figures) not in merged:
            merged.append((shown, figures))
    return merged


@app.command("build")
def build(
    compiler: Annotated[
        str | None, typer.Option(help="hipcc, say, instead of LLVM's clang++ 19.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write.")] = DIRECTORY,
) -> None:
    """Compile csrc/gfx942, pass the gate, and write code objects and manifest."""
    try:
        manifest = builder.build(out, compiler=compiler)
    except (builder.BuildError, llvm.ToolMissing, FileNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    count = sum(len(o.kernels) for o in manifest.objects)
    typer.echo(f"{count} kernels in {len(manifest.objects)} code objects, {out}")


@app.command("check")
def check() -> None:
    """Rebuild and compare byte for byte with the code objects that are committed."""
    try:
        differences = builder.check()
    except (builder.BuildError, llvm.ToolMissing, FileNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if differences:
        typer.echo("the committed code objects are not what the sources build:", err=True)
        for difference in differences:
            typer.echo(f"- {difference}", err=True)
        raise typer.Exit(1)
    typer.echo("the committed code objects are byte for byte what the sources build")


@app.command("expected")
def expected() -> None:
    """Run what `liteattention-rocm doctor` runs, on the emulator, and write its expected bits.

    Nothing is written unless every result is right by float64 and no checker found anything.
    """
    try:
        path = expected_bits.write()
    except (ValueError, RuntimeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"expected bits: {path}")


if __name__ == "__main__":
    app(prog_name="python -m liteattention_tools")
