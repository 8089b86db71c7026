"""``liteattention-rocm bench``: figures that anyone can measure again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env

from . import cpu as cpu_benchmark
from . import serving as serving_benchmark
from . import serving_sglang, serving_vllm

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


@app.command("kernels")
def kernels(
    config: Annotated[
        Path, typer.Option(help="YAML file, or gpu or smoke for one that comes with the package.")
    ] = Path("gpu"),
    out: Annotated[Path, typer.Option(help="Folder for kernels.csv, kernels.md and plots.")] = Path(
        "out/kernels"
    ),
    fa3_library: Annotated[
        Path | None, typer.Option(help="_vllm_fa3_C.abi3.so of a vLLM wheel.", exists=True)
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE_OR_MODULE:FUNCTION of (q, k, v, causal, scale), contiguous tensors "
            "[B, H, S, D]; may be given several times."
        ),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Also run every call under ncu or rocprofv3.")
    ] = False,
) -> None:
    """Compare our attention with its peers on this machine's GPU, or on the CPU if it has none."""
    import yaml
    from pydantic import ValidationError

    from . import counters as counting
    from . import kernels as benchmark
    from . import kernels_report as report
    from . import peers

    path = _config(config)
    try:
        asked = benchmark.load(path)
        more = dict(map(peers.given, peer or ()))
    except OSError as error:
        raise typer.BadParameter(f"--config: {error}") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise typer.BadParameter(f"--config {path}: {error}") from error
    except ValueError as error:
        raise typer.BadParameter(f"--peer: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(stderr=True)
    stamp = benchmark.environment(device)
    roofs = benchmark.ceilings(device)
    stamp["matrix product TFLOP/s"] = f"{roofs.tflops:.3g}"
    stamp["device copy TB/s"] = f"{roofs.tbps:.3g}"
    rows = benchmark.run(
        asked, device, fa3_library, lambda text: console.print(text, style="dim"), more
    )
    uncounted = ""
    if counters:
        console.print("counters", style="dim")
        found, uncounted = counting.collect(path, fa3_library, peer or ())
        rows = counting.add(rows, found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.csv").write_text(report.to_csv(rows, stamp), encoding="utf-8")
    command = "liteattention-rocm " + " ".join(["bench", "kernels", "--config", str(config)])
    command += "".join(f" --peer {text!r}" for text in peer or ())
    command += " --counters" if counters else ""
    text = report.to_markdown(asked, rows, stamp, command)
    if uncounted:
        text += f"\n- counters: {uncounted}\n"
    (out / "kernels.md").write_text(text, encoding="utf-8")
    report.plot(asked, rows, out)
    report.roofline(asked, rows, roofs, out)
    typer.echo(text)


@app.command("video")
def video(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or wan2.1-1.3b or wan-smoke for one that comes with the package."
        ),
    ] = Path("wan2.1-1.3b"),
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the file's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for video.json and video.md.")] = Path(
        "out/video"
    ),
) -> None:
    """Denoise a video with a Wan transformer of random weights: seconds by self-attention."""
    import yaml
    from pydantic import ValidationError

    try:
        from . import video as benchmark  # needs diffusers
        from .kernels import environment
    except ImportError as error:
        raise typer.BadParameter(f"it needs diffusers (extra: diffusers): {error}") from error

    path = _config(config)
    try:
        asked = benchmark.load(path, steps)
    except OSError as error:
        raise typer.BadParameter(f"--config: {error}") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise typer.BadParameter(f"--config {path}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(stderr=True)
    rows = benchmark.run(asked, device, lambda text: console.print(text, style="dim"))
    stamp = environment(device)
    command = f"liteattention-rocm bench video --config {config}"
    command += "" if steps is None else f" --steps {steps}"
    text = benchmark.to_markdown(asked, rows, stamp, command)
    out.mkdir(parents=True, exist_ok=True)
    result = {"environment": stamp, "config": asked.model_dump(), "rows": rows}
    (out / "video.json").write_text(
        json.dumps(result, default=lambda row: row.as_dict(), indent=2) + "\n", encoding="utf-8"
    )
    (out / "video.md").write_text(text, encoding="utf-8")
    typer.echo(text)


def _config(name: Path) -> Path:
    """A file, or the name of one that comes with the package."""
    return name if name.exists() else Path(__file__).parent / "configs" / f"{name}.yaml"


@app.command("tune")
def tune(
    shape: Annotated[list[str], typer.Option(help="B,H,S,D; may be given several times.")],
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 9,
) -> None:
    """Measure the portable engine's tiles on this GPU; the fastest are used from then on.

    They are kept by shape class (dtype, head dim, causal, power of two of the length), device and
    versions in LITEATTENTION_CACHE_DIR, by default ~/.cache/liteattention_rocm.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    reasons = [] if dtype in dtypes else [f"--dtype must be bf16 or fp16, got {dtype!r}"]
    shapes = _shapes(shape, reasons)
    reasons += [
        f"D of --shape must be 64 or 128, got {s[3]}" for s in shapes if s[3] not in (64, 128)
    ]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    try:
        from . import tune as tuning_benchmark
    except ImportError as error:
        raise typer.BadParameter(
            f"it needs Triton, which comes with PyTorch for GPUs: {error}"
        ) from error

    console = Console()
    for sizes in shapes:
        with console.status("measuring") as status:
            shipped, ranked = tuning_benchmark.run(
                sizes, causal, dtypes[dtype], rounds, lambda text: status.update(text)
            )
        table = Table(title=",".join(map(str, sizes)) + (" causal" if causal else ""))
        table.add_column("tile")
        table.add_column("median ms", justify="right")
        for tile, taken in ranked.items():
            mark = " (shipped)" if tile == shipped else ""
            table.add_row(f"{tile}{mark}", f"{taken:.3f}")
        console.print(table)


@app.command("emulator")
def emulator(
    shape: Annotated[str, typer.Option(help="B,H,S,D; D is 64 or 128.")] = "1,2,1024,128",
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the software MI300X on one core: the dense kernel with checks off and on."""
    from . import emulator as emulator_benchmark  # needs the compiled core, which a GPU does not

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


@app.command("serving")
def serving(
    framework: Annotated[str, typer.Option(help="vllm or sglang: that of this environment.")],
    case: Annotated[
        list[str] | None,
        typer.Option(help="decode|prefill,BATCH,CONTEXT; may be given several times."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="64 or 128.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="OpenMP threads of each engine.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a serving engine with our attention and with its own on the CPU, tokens per second.

    Run it in the environment of the framework; see docs/serving.md.
    """
    reasons = []
    if framework not in _FRAMEWORKS:
        reasons.append(f"--framework must be one of {', '.join(_FRAMEWORKS)}, got {framework!r}")
    if dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"--dtype must be bfloat16, float16 or float32, got {dtype!r}")
    if head_dim not in (64, 128):
        reasons.append(f"--head-dim must be 64 or 128, got {head_dim}")
    cases = []
    for text in case or ():
        kind, _, sizes = text.partition(",")
        if kind not in ("decode", "prefill") or not re.fullmatch(r"[1-9]\d*,[1-9]\d*", sizes):
            reasons.append(f"--case must be decode|prefill,BATCH,CONTEXT, got {text!r}")
        else:
            cases.append(serving_benchmark.Case(kind, *map(int, sizes.split(","))))  # type: ignore[arg-type]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    console = Console(stderr=as_json)
    with console.status("starting") as status:
        rows = serving_benchmark.run(
            _FRAMEWORKS[framework],
            cases or serving_benchmark.DEFAULT_CASES,
            rounds,
            dtype,
            head_dim,
            threads,
            status.update,
        )
    if as_json:
        environment = {
            "environment": collect_env.collect(),
            "framework": framework,
            "threads": threads,
            "dtype": dtype,
            "head_dim": head_dim,
        }
        typer.echo(json.dumps(environment | {"rows": [row.as_dict() for row in rows]}, indent=2))
        return
    table = Table(
        title=f"{framework} on the CPU, {dtype}, head dim {head_dim}, {threads} threads: tokens/s"
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


_FRAMEWORKS = {"vllm": serving_vllm, "sglang": serving_sglang}


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
