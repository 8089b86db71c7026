"""The terminal's side of :mod:`.serving_backends`: what is missing, the table, the JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import files, needs
from liteattention_rocm.cli.progress import activity

from . import serving_backends as benchmark
from .serving_backends import Machine, Plan, Row


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
