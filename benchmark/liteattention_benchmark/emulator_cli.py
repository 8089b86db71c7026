"""The software MI300X, its speed and its models: ``bench emulator``, ``mapping`` and ``model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import files, options
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import activity

from .cli_common import kept, shapes


def emulator(
    shape: Annotated[str, typer.Option(help="B,H,S,D; D is 64 or 128.")] = "1,2,1024,128",
    rounds: Annotated[
        int, typer.Option(min=3, max=options.MOST_ROUNDS, help="Counted rounds.")
    ] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the software MI300X on one core: the dense kernel with checks off and on."""
    need("bench emulator", "torch")
    from liteattention_emulator import environment_problems

    from . import emulator as benchmark  # needs the compiled core, which a GPU does not

    reasons = environment_problems()
    asked = shapes([shape], reasons)
    reasons += [f"--shape {shape}: {why}" for each in asked for why in benchmark.problems(each)]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    rows, memory = benchmark.run(asked[0], rounds)
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


def mapping(
    out: Annotated[Path, typer.Option(help="Folder for mapping.csv, mapping.md and pictures.")] = (
        Path("out/mapping")
    ),
    batch: Annotated[
        list[str] | None,
        typer.Option(help="1 and 8 if not given; ours run the first.", metavar="LIST"),
    ] = None,
    reads: Annotated[
        float,
        typer.Option(min=0.01, max=1e6, help="Million reads of a launch; longer ones are cut."),
    ] = 1.5,
) -> None:
    """Model what attention reads from L2, Infinity Cache and HBM of an MI300X, by mapping."""
    need("bench mapping", "torch", "matplotlib", "tabulate")
    from . import mapping as benchmark
    from . import mapping_published as published
    from . import mapping_report as report

    reasons: list[str] = []
    asked = options.numbers(batch, "--batch", reasons, 1, 65536)
    unwritable = files.problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    batches = tuple(dict.fromkeys(asked or (1, 8)))
    console = Console(stderr=True)
    command = f"liteattention-rocm bench mapping --reads {reads:g}"
    command += f" --batch {','.join(map(str, batches))}"
    pictures = {benchmark.PAPER: "mapping-128.png", benchmark.OURS: "mapping-256.png"}
    cases = benchmark.study(batches, benchmark.PAPER, reads)
    cases += benchmark.study(batches[:1], benchmark.OURS, reads)
    names = ("mapping.csv", "mapping.md", *pictures.values())
    with kept(out, names, console), activity(console, "modelling") as say:
        rows = benchmark.run(cases, lambda text: say(f"modelling {text}"))
        checked = benchmark.run(published.cases(), lambda text: say(f"comparing, {text}"))
        files.write_text(out / "mapping.csv", report.to_csv(rows))
        text = report.to_markdown(rows, checked, list(pictures), command)
        files.write_text(out / "mapping.md", text)
        for kernel, name in pictures.items():
            report.plot(rows, kernel, out / name)
    typer.echo(text)


def model(
    ranges: Annotated[
        bool, typer.Option("--range/--no-range", help="Also vary the constants nobody measured.")
    ] = True,
    decode: Annotated[bool, typer.Option(help="Only the table of decode.")] = False,
) -> None:
    """Model our kernels' workgroups on a CU of an MI300X: the tables of docs/model.md."""
    need("bench model", "torch", "tabulate")
    from liteattention_emulator import environment_problems

    from . import model_tables as report

    reasons = environment_problems()
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    with activity(Console(stderr=True), "modelling") as say:
        rows = [] if decode else report.run(report.CASES, ranges, lambda x: say(f"modelling {x}"))
        spread = []
        if not decode:
            spread = [report.lists(rows, lambda x: say(f"modelling {x}")), report.prefill(rows)]
        decoded = report.run_decode(report.DECODE, lambda x: say(f"modelling {x}"))
    typer.echo(report.to_markdown(rows, decoded, spread))
