"""``liteattention-rocm bench serving``: the command, what is missing, the tables, the JSON."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import dtypes as names_of_dtypes
from liteattention_rocm.cli import files, needs, options, tables
from liteattention_rocm.cli.progress import activity

from . import serving_backends as benchmark
from .cli_common import kept, kept_file
from .serving_backends import Machine, Plan, Row


def serving(
    framework: Annotated[str, typer.Option(help="vllm or sglang: that of this environment.")],
    device: Annotated[
        str, typer.Option(help="cpu or cuda (NVIDIA and AMD GPUs, vllm only).")
    ] = "cpu",
    sizes: Annotated[
        str | None,
        typer.Option(
            help="vllm: a model of these sizes, backend against backend: llama-3-8b (the default "
            "on GPUs), qwen2-7b, gemma-3-4b or tiny."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="With sizes: attention backends of vLLM; CUSTOM is ours.", metavar="LIST"
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="decode|prefill,BATCH,CONTEXT, one an option.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=options.MOST_ROUNDS, help="Counted rounds.")
    ] = 5,
    dtype: Annotated[
        str, typer.Option(help=names_of_dtypes.both("bf16", "fp16", "fp32"))
    ] = "bfloat16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="With sizes: auto, fp8, fp8_e4m3 or fp8_e5m2.")
    ] = "auto",
    tokens: Annotated[
        int,
        typer.Option(
            min=8, max=1_000_000, help="With sizes: new tokens of a request in a decode case."
        ),
    ] = 128,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Without sizes: 64 or 128.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, max=options.MOST_THREADS, help="OpenMP threads of each engine.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write the JSON here, case by case; with sizes also a page beside it (.html)."
        ),
    ] = None,
) -> None:
    """Compare a serving engine's tokens per second with our attention and with others.

    On the CPU its own; with --sizes or on a GPU, vLLM's backends for that device, and also times to
    the first token and between tokens. Run it in the environment of the framework; see
    docs/serving.md.
    """
    from . import serving as on_cpu
    from . import serving_sglang, serving_vllm
    from .serving_sizes import SIZES

    frameworks = {"vllm": serving_vllm, "sglang": serving_sglang}
    dtype = names_of_dtypes.long(dtype)
    reasons: list[str] = []
    backends = options.listed(backend, "--backend", reasons)
    if framework not in frameworks:
        reasons.append(f"--framework must be one of {', '.join(frameworks)}, got {framework!r}")
    if dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"--dtype must be bfloat16, float16 or float32, got {dtype!r}")
    sized = device == "cuda" or sizes is not None
    if head_dim not in (None, 64, 128):
        reasons.append(f"--head-dim must be 64 or 128, got {head_dim}")
    if device not in ("cpu", "cuda"):
        reasons.append(f"--device must be cpu or cuda, got {device!r}")
    if sizes not in (None, *SIZES):
        reasons.append(f"--sizes must be one of {', '.join(SIZES)}, got {sizes!r}")
    if kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        reasons.append(
            f"--kv-cache-dtype must be auto, fp8, fp8_e4m3 or fp8_e5m2, got {kv_cache_dtype!r}"
        )
    if sized:
        if framework == "sglang":
            reasons.append("--sizes and --device cuda are for --framework vllm")
        if head_dim is not None:
            reasons.append("--head-dim is not for --sizes, which have one of their own")
    elif backends or kv_cache_dtype != "auto" or tokens != 128:
        reasons.append("--backend, --kv-cache-dtype and --tokens need --sizes")
    unwritable = None if out is None else files.file_problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if sized and out is not None and out.suffix == ".html":
        reasons.append("--out names the JSON; the page is written beside it, with the suffix .html")
    cases = []
    for text in case or ():
        kind, _, numbers = text.partition(",")
        if kind not in ("decode", "prefill") or not re.fullmatch(r"[1-9]\d*,[1-9]\d*", numbers):
            reasons.append(f"--case must be decode|prefill,BATCH,CONTEXT, got {text!r}")
        else:
            cases.append(on_cpu.Case(kind, *map(int, numbers.split(","))))  # type: ignore[arg-type]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    if sized:
        asked = Plan(
            device, sizes or "llama-3-8b", tuple(backends or ()),
            tuple(cases or benchmark.DEFAULT_CASES), rounds, dtype, kv_cache_dtype, tokens, threads,
        )  # fmt: skip
        console = Console(stderr=as_json)
        ready, machine = prepare(asked)
        with kept_file(out, console):
            compare(ready, machine, console, as_json, out)
        return
    needs.need("bench serving", "torch", framework)
    console = Console(stderr=as_json)
    result: dict[str, Any] = {
        "environment": collect_env.collect(),
        "framework": framework,
        "threads": threads,
        "dtype": dtype,
        "head_dim": head_dim or 64,
        "rounds": rounds,
    }

    def save(rows: Sequence[on_cpu.Row], complete: bool = False) -> None:
        result.update(complete=complete, rows=[row.as_dict() for row in rows])
        if out is not None:
            files.write_text(out, json.dumps(result, indent=2) + "\n")

    names = () if out is None else (out.name,)
    with kept(out, names, console), activity(console, "starting") as say:
        rows = on_cpu.run(
            frameworks[framework],
            cases or on_cpu.DEFAULT_CASES,
            rounds,
            dtype,
            head_dim or 64,
            threads,
            say,
            save,
        )
        save(rows, complete=True)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    table = Table(
        title=f"{framework} on the CPU, {dtype}, head dim {head_dim or 64}, "
        f"{tables.counted(threads, 'thread')}: tokens/s"
    )
    for name in ("case", "ours", "built-in", "ratio, median", "least"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(
            str(row.case),
            f"{row.ours:.1f}",
            f"{row.built_in:.1f}",
            f"{row.ratio:.2f}",
            f"{min(row.ratios):.2f}",
        )
    console.print(table)


def prepare(plan: Plan) -> tuple[Plan, Machine]:
    """Choose backends where none are named; say everything that is missing and exit with 1."""
    reasons = []
    advice = needs.lacking("torch", "vllm")
    if advice:
        reasons.append(f"it {advice}")
    if plan.device == "cuda" and needs.installed("torch") and advice:
        import torch

        from .serving_vllm import NO_GPU

        if not torch.cuda.is_available():
            reasons.append(NO_GPU)
    if not advice:
        backends = plan.backends or benchmark.backends_of(plan.device)
        plan = replace(plan, backends=tuple(dict.fromkeys(backends)))
        machine, reasons = benchmark.look(plan)
        if machine is not None and not reasons:
            return plan, machine
    lines = "\n".join(f"- {reason}" for reason in reasons)
    typer.echo(f"liteattention-rocm bench serving cannot run here:\n{lines}", err=True)
    raise typer.Exit(1)


def compare(
    plan: Plan, machine: Machine, console: Console, as_json: bool, out: Path | None
) -> None:
    """Run the plan and print what it found.

    ``out`` and the page beside it are written again after every case.
    """
    from . import pages  # needs jinja2, which comes with torch

    result: dict[str, Any] = {
        "environment": collect_env.collect() | machine.facts,
        "framework": "vllm",
        "platform": machine.platform,
        "in_turns": benchmark.in_turns(plan, machine),
        **asdict(plan),
    }

    def save(rows: Sequence[Row], starts: dict[str, float], complete: bool = False) -> None:
        result.update(complete=complete, start_s=starts, rows=[row.as_dict() for row in rows])
        result["ratios"] = [each.as_dict() for each in benchmark.ratios(rows)]
        if out is not None:
            files.write_text(out, json.dumps(result, indent=2) + "\n")
            page = pages.serving(result, command, benchmark.OURS)
            files.write_text(out.with_suffix(".html"), page)

    command = " ".join(["liteattention-rocm", *sys.argv[1:]])
    with activity(console, "starting") as say:
        rows = benchmark.run(plan, machine, say, save)
    save(rows, result["start_s"], complete=True)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    console.print(table(plan, machine, rows))
    for ratio in benchmark.ratios(rows):
        rates = ratio.rates
        latency = f"; first token {ratio.first:.2f}"
        latency += f", between tokens {ratio.between:.2f}" if ratio.between else ""
        console.print(
            f"{ratio.case}: {statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f}) "
            f"of {ratio.peer}{latency}",
            highlight=False,
        )
    how = "in turns" if result["in_turns"] else "one backend after the other"
    facts = ", ".join(f"{name} {value}" for name, value in machine.facts.items())
    versions = ", ".join(f"{name} {result['environment'][name]}" for name in ("torch", "commit"))
    console.print(f"{how}; ratios above 1: ours is better; {facts}, {versions}", highlight=False)


def table(plan: Plan, machine: Machine, rows: Sequence[Row]) -> Table:
    """Medians, and the least and the most of the rounds' tokens per second."""
    found = Table(
        title=f"vllm on {machine.platform}, {plan.sizes}, {plan.dtype}, cache "
        f"{plan.kv_cache_dtype}, {plan.rounds} rounds",
        box=None,  # within 80 columns
        padding=(0, 1, 0, 0),
    )
    for name in ("case", "backend", "tokens/s", "least", "most", "first ms", "between ms"):
        found.add_column(name, justify="left" if name in ("case", "backend") else "right")
    for row in rows:
        rates = [each.rate for each in row.rounds]
        found.add_row(
            f"{row.case.kind} {row.case.batch} x {row.case.context}",
            row.backend,
            f"{row.rate:,.1f}",
            f"{min(rates):,.1f}",
            f"{max(rates):,.1f}",
            f"{1e3 * row.first:,.1f}",
            "" if row.between is None else f"{1e3 * row.between:,.2f}",
        )
    return found
