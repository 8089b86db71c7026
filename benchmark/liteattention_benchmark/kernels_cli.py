"""Kernels timed on this machine: ``liteattention-rocm bench cpu``, ``kernels`` and ``tune``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import dimensions, files, options, processors, tables
from liteattention_rocm.cli import dtypes as names_of_dtypes
from liteattention_rocm.cli.needs import lacking, need
from liteattention_rocm.cli.progress import activity

from .cli_common import kept, read_config, shapes

_KERNEL_FILES = (
    "kernels.csv",
    "kernels.md",
    "kernels.html",
    "kernels-dense.png",
    "kernels-lite.png",
    "kernels-roofline.png",
)


def cpu(
    shape: Annotated[list[str] | None, typer.Option(help="B,H,S,D, one an option.")] = None,
    rounds: Annotated[
        int, typer.Option(min=3, max=options.MOST_ROUNDS, help="Counted rounds.")
    ] = 15,
    warmup: Annotated[
        int, typer.Option(min=0, max=options.MOST_ROUNDS, help="Rounds before counting.")
    ] = 3,
    dtype: Annotated[str, typer.Option(help=names_of_dtypes.both("bf16", "fp16", "fp32"))] = "bf16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads; one a processor at most.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Compare the CPU engine, dense and with tiles skipped, with torch's SDPA."""
    need("bench cpu", "torch")
    import torch

    from . import cpu as benchmark

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = names_of_dtypes.short(dtype)
    reasons = []
    if dtype not in dtypes:
        reasons.append(f"--dtype must be one of {', '.join(dtypes)}, got {dtype!r}")
    if threads is not None:
        reasons += [f"--threads {why}, got {threads}" for why in processors.thread_reasons(threads)]
    asked = shapes(shape, reasons) if shape else benchmark.DEFAULT_SHAPES
    for each in asked:
        against = benchmark.problems(each, dtypes.get(dtype, torch.bfloat16))
        reasons += [f"--shape {_text(each)}: {why}" for why in against]
    unwritable = None if out is None else files.file_problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    if threads:
        torch.set_num_threads(threads)

    console = Console(stderr=as_json)
    result: dict[str, Any] = {
        "environment": collect_env.collect(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "rounds": rounds,
    }

    def save(rows: Sequence[benchmark.Row], complete: bool) -> None:
        result.update(complete=complete, rows=[row.as_dict() for row in rows])
        if out is not None:
            files.write_text(out, json.dumps(result, indent=2) + "\n")

    with kept(out, (out.name,) if out else (), console), activity(console, "measuring") as say:
        rows = benchmark.run(
            asked,
            rounds,
            warmup,
            dtypes[dtype],
            lambda text: say(f"measuring {text}"),
            keep=lambda rows: save(rows, False),
        )
        save(rows, True)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    table = Table(
        title=f"CPU engine, {dtype}, {tables.counted(torch.get_num_threads(), 'thread')}",
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


def kernels(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or gpu, serving, chunks, short, lite, counters or smoke, which come "
            "with the package."
        ),
    ] = Path("gpu"),
    out: Annotated[
        Path, typer.Option(help="Folder for kernels.csv, kernels.md, kernels.html and plots.")
    ] = Path("out/kernels"),
    fa3_library: Annotated[
        Path | None,
        typer.Option(help="_vllm_fa3_C.abi3.so of a vLLM wheel.", exists=True, dir_okay=False),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE_OR_MODULE:FUNCTION of (q, k, v, causal, scale), contiguous tensors "
            "[B, H, S, D], timed beside dense calls and lists; one an option."
        ),
    ] = None,
    counters: Annotated[
        bool, typer.Option(help="Also run every call under ncu or rocprofv3.")
    ] = False,
) -> None:
    """Compare our attention with its peers on this machine's GPU.

    Without a GPU, on the CPU: take --config smoke, or a file with sizes of your own.
    """
    need("bench kernels", "torch", "yaml", "matplotlib", "tabulate", "jinja2")
    import torch

    from . import cells, pages, peers, timing
    from . import counters as counting
    from . import kernels as benchmark
    from . import kernels_report as report

    reasons: list[str] = []
    path, asked = read_config(config, cells.load, reasons)
    on_gpu = torch.cuda.is_available()
    if asked is not None and asked.needs_gpu and not on_gpu:
        reasons.append(
            f"--config {config}: its sizes are for a GPU, and PyTorch sees none: take --config "
            "smoke, or a file of your own without needs_gpu"
        )
    more = {}
    for text in peer or ():
        try:
            name, make = peers.given(text)
        except ValueError as error:
            reasons.append(f"--peer: {error}")
        else:
            if name in more:
                reasons.append(f"--peer: two are called {name!r}")
            more[name] = make
    uncountable = counting.problem() if counters else None
    if uncountable is not None:
        reasons.append(f"--counters: {uncountable}: install it, or leave --counters out")
    unwritable = files.problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if reasons or asked is None:
        raise typer.BadParameter("; ".join(reasons))
    device = torch.device("cuda" if on_gpu else "cpu")
    console = Console(stderr=True)
    stamp = timing.environment(device)
    roofs = timing.ceilings(device)
    stamp["matrix product TFLOP/s"] = f"{roofs.tflops:.3g}"
    stamp["device copy TB/s"] = f"{roofs.tbps:.3g}"
    command = "liteattention-rocm " + " ".join(["bench", "kernels", "--config", str(config)])
    command += "" if fa3_library is None else f" --fa3-library {fa3_library.name}"
    command += "".join(f" --peer {text!r}" for text in peer or ())
    command += " --counters" if counters else ""

    def save(rows: Sequence[benchmark.Row], more: str = "", **unfinished: str) -> str:
        text = report.to_markdown(asked, rows, stamp | unfinished, command) + more
        files.write_text(out / "kernels.csv", report.to_csv(rows, stamp | unfinished))
        files.write_text(out / "kernels.md", text)
        page = pages.kernels(asked, rows, stamp | unfinished, command, roofs)
        files.write_text(out / "kernels.html", page)
        return text

    def keep(rows: Sequence[benchmark.Row]) -> None:
        done = len({(row.kind, row.cell) for row in rows})
        save(rows, incomplete=f"{done} of {len(asked.cells)} cells")

    with kept(out, _KERNEL_FILES, console):
        rows = benchmark.run(
            asked, device, fa3_library, lambda text: console.print(text, style="dim"), more, keep
        )
        text = save(rows)
        if counters:
            console.print("counters", style="dim")
            found, uncounted = counting.collect(path, fa3_library, peer or ())
            rows = counting.add(rows, found)
            text = save(rows, f"\n- counters: {uncounted}\n" if uncounted else "")
        report.plot(asked, rows, out)
        report.roofline(asked, rows, roofs, out)
    typer.echo(text)


def tune(
    shape: Annotated[list[str] | None, typer.Option(help="B,H,S,D, one an option.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Causal prompts, requests,rows,keys,query heads,key heads,D,page size (0: packed "
            "keys), one an option."
        ),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = False,
    dtype: Annotated[str, typer.Option(help=names_of_dtypes.both("bf16", "fp16"))] = "bf16",
    rounds: Annotated[
        int, typer.Option(min=3, max=options.MOST_ROUNDS, help="Counted rounds.")
    ] = 9,
    fa3_library: Annotated[
        Path | None,
        typer.Option(
            help="_vllm_fa3_C.abi3.so of a vLLM wheel, timed beside.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    """Measure the portable engine's tiles on this GPU; the fastest are used from then on.

    They are kept by shape class (dtype, head dim, causal, powers of two of heads and length),
    device and versions in LITEATTENTION_CACHE_DIR, by default ~/.cache/liteattention_rocm.
    """
    need("bench tune", "torch")
    import torch
    from pydantic import ValidationError

    from .cells import Prefill
    from .cells import reasons as cell_reasons

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = names_of_dtypes.short(dtype)
    reasons = [] if dtype in dtypes else [f"--dtype must be bf16 or fp16, got {dtype!r}"]
    reasons += [] if shape or prompts else ["--shape or --prompts is needed"]
    asked = shapes(shape or [], reasons)
    reasons += [
        f"D of --shape must be 64 or 128, got {s[3]}" for s in asked if s[3] not in (64, 128)
    ]
    if not torch.cuda.is_available():
        reasons.append("tiles are measured on a GPU, and PyTorch sees none")
        without_triton = lacking("triton")
        reasons += [f"it {without_triton}"] if without_triton else []
    else:
        need("bench tune", "triton")  # comes with PyTorch for GPUs, as a rule
        without_triton = ""
    cells = []
    names = ("requests", "rows", "context", "q_heads", "kv_heads", "head_dim", "page_size")
    for text in prompts or []:
        numbers = [part.strip() for part in text.split(",")]
        if len(numbers) != len(names) or not all(
            part.isdecimal() and not dimensions.too_large(part) for part in numbers
        ):
            reasons.append(
                f"--prompts must be seven numbers up to 2^31 - 1, {', '.join(names)}, got {text!r}"
            )
            continue
        try:
            sizes = dict(zip(names, map(int, numbers), strict=True))
            cells.append(Prefill.model_validate({**sizes, "dtype": dtype}))
        except ValidationError as error:
            found = cell_reasons(error, {"dtype": "--dtype"})
            reasons += [f"--prompts {text!r}: {w}" for w in found if not w.startswith("--dtype")]
            continue
        if not without_triton:
            from .tune import problems

            reasons += [f"--prompts {text!r}: {why}" for why in problems(cells[-1])]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    from . import tune as benchmark

    console = Console()
    runs: list[tuple[str, Callable[..., Any]]] = [
        (
            ",".join(map(str, sizes)) + (" causal" if causal else ""),
            functools.partial(benchmark.run, sizes, causal, dtypes[dtype]),
        )
        for sizes in asked
    ]
    runs += [(str(cell), functools.partial(benchmark.run_prompts, cell)) for cell in cells]
    for title, run in runs:
        with activity(console, "measuring") as say:
            shipped, ranked = run(rounds, say, fa3_library)
        table = Table(title=title)
        table.add_column("tile")
        table.add_column("median ms", justify="right")
        for tile, taken in ranked.items():
            mark = " (shipped)" if tile == shipped else ""
            table.add_row(f"{tile}{mark}", f"{taken:.3f}")
        console.print(table)


def _text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
