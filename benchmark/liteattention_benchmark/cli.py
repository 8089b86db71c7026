"""``liteattention-rocm bench``: figures that anyone can measure again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env

from . import cpu as cpu_benchmark
from . import emulator as emulator_benchmark

app = typer.Typer(help="Measure kernels against their peers.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure kernels against their peers."""


@app.command("cpu")
def cpu(
    shape: Annotated[
        list[str] | None, typer.Option(help="B,H,S,D; may be given several times.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before counting.")] = 3,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Compare the CPU engine, dense and with tiles skipped, with torch's SDPA."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    reasons = []
    if dtype not in dtypes:
        reasons.append(f"--dtype must be one of {', '.join(dtypes)}, got {dtype!r}")
    shapes = _shapes(shape, reasons) if shape else cpu_benchmark.DEFAULT_SHAPES
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    if threads:
        torch.set_num_threads(threads)

    console = Console(stderr=as_json)
    with console.status("measuring") as status:
        rows = cpu_benchmark.run(
            shapes, rounds, warmup, dtypes[dtype], lambda text: status.update(f"measuring {text}")
        )
    result = {
        "environment": collect_env.collect(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "rounds": rounds,
        "rows": [row.as_dict() for row in rows],
    }
    text = json.dumps(result, indent=2)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    table = Table(
        title=f"CPU engine, {dtype}, {torch.get_num_threads()} threads",
        box=None,  # within 80 columns
        padding=(0, 1, 0, 0),
    )
    for name in ("B,H,S,D", "contender", "median ms", "p25", "p75", "TFLOP/s", "ratio", "error"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for row in rows:
        table.add_row(
            ",".join(map(str, row.shape)),
            row.contender,
            f"{row.median_ms:.2f}",
            f"{row.p25_ms:.2f}",
            f"{row.p75_ms:.2f}",
            f"{row.tflops:.2f}",
            f"{row.ratio:.3f} x {row.against}",
            f"{row.max_error:.1e}",
        )
    console.print(table)


@app.command("emulator")
def emulator(
    shape: Annotated[str, typer.Option(help="B,H,S,D; D is 64 or 128.")] = "1,2,1024,128",
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the software MI300X on one core: the dense kernel with checks off and on."""
    reasons: list[str] = []
    shapes = _shapes([shape], reasons)
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    rows, memory = emulator_benchmark.run(shapes[0], rounds)
    if as_json:
        result = {"environment": collect_env.collect(), "peak_memory_gb": memory}
        typer.echo(json.dumps(result | {"rows": [row.as_dict() for row in rows]}, indent=2))
        return
    table = Table(title=f"software MI300X, one core, {shape}, peak memory {memory:.2f} GB")
    for name in ("checks", "wave instructions", "median s", "us each", "million/s"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = row.as_dict()
        table.add_row(
            "on" if row.checks else "off",
            f"{row.wave_instructions:,}",
            f"{row.median_s:.3f}",
            f"{figures['us_per_instruction']:.3f}",
            f"{figures['instructions_per_s'] / 1e6:.1f}",
        )
    Console().print(table)


def _shapes(texts: list[str], reasons: list[str]) -> tuple[tuple[int, int, int, int], ...]:
    """B,H,S,D of each text; what is wrong with them is added to ``reasons``."""
    shapes = []
    for text in texts:
        parts = text.split(",")
        if len(parts) != 4 or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
            reasons.append(f"--shape must be four positive numbers B,H,S,D, got {text!r}")
            continue
        batch, heads, length, dim = map(int, parts)
        shapes.append((batch, heads, length, dim))
    return tuple(shapes)
