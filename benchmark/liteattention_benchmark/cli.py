"""``liteattention-rocm bench``: figures that anyone can measure again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from liteattention_rocm import collect_env
from liteattention_rocm.cli import dimensions, files, tables
from liteattention_rocm.cli import dtypes as names_of_dtypes
from liteattention_rocm.cli.needs import lacking, need
from liteattention_rocm.cli.progress import activity

# torch and benchmarks are imported when a command runs: --help answers without them.

Loaded = TypeVar("Loaded")

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
    dtype: Annotated[str, typer.Option(help=names_of_dtypes.both("bf16", "fp16", "fp32"))] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads.")] = None,
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
    asked = _shapes(shape, reasons) if shape else benchmark.DEFAULT_SHAPES
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

    with _kept(out, (out.name,) if out else (), console), activity(console, "measuring") as say:
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


@app.command("kernels")
def kernels(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or gpu, serving, chunks, lite, counters or smoke, which come with the "
            "package."
        ),
    ] = Path("gpu"),
    out: Annotated[
        Path, typer.Option(help="Folder for kernels.csv, kernels.md, kernels.html and plots.")
    ] = Path("out/kernels"),
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
    path, asked = _load(config, cells.load, reasons)
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

    with _kept(out, _KERNEL_FILES, console):
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


@app.command("video")
def video(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or wan2.1-1.3b, wan2.1-14b, wan2.1-14b-720p or wan-smoke for one that "
            "comes with the package."
        ),
    ] = Path("wan2.1-1.3b"),
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the file's.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Instead of the file's: some layers stand for all.")
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of the file's: cudnn, fa2, flex, default, dense or lite; may be given "
            "several times."
        ),
    ] = None,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(help="Instead of the file's, of lite; may be given several times."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Instead of the file's: tiles that lite leaves out. uniform or clustered, as many "
            "in each head, or unequal."
        ),
    ] = None,
    compile_blocks: Annotated[
        str, typer.Option("--compile", help="torch.compile of the blocks: off, on or both.")
    ] = "off",
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of this host: one is measured, then all of them.")
    ] = 1,
    parallel: Annotated[
        str, typer.Option(help="With --gpus: ulysses (heads) or ring (rows), of diffusers.")
    ] = "ulysses",
    peer_memory: Annotated[
        bool, typer.Option(help="With --gpus: ours exchanges without messages, by GPUs' memory.")
    ] = False,
    runtime: Annotated[
        str, typer.Option(help="What runs the model: diffusers, or sglang's diffusion runtime.")
    ] = "diffusers",
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu; cpu with --gpus starts that many CPU processes."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for video.json and video.md.")] = Path(
        "out/video"
    ),
) -> None:
    """Denoise a video with a Wan transformer of random weights: seconds by self-attention."""
    if runtime == "sglang":
        need("bench video", "torch", "sglang", "yaml", "tabulate", extras=("sglang-diffusion",))
    else:
        need("bench video", "torch", "diffusers", "transformers", "yaml", "tabulate")
    import torch

    from . import video as benchmark
    from . import video_sglang
    from .timing import environment

    compiled = {"off": (False,), "on": (True,), "both": (False, True)}
    instead = {"steps": steps, "attention": attention, "sparsity": sparsity, "pattern": pattern}
    reasons: list[str] = []
    options = {name: f"--{name}" for name, value in instead.items() if value is not None}
    _, asked = _load(
        config, lambda path: benchmark.load(path, layers, **instead), reasons, options, video=True
    )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if compile_blocks not in compiled:
        reasons.append(f"--compile must be off, on or both, got {compile_blocks!r}")
    if kind not in ("cpu", "cuda"):
        reasons.append(f"--device must be cpu or cuda, got {device!r}")
    if parallel not in ("ulysses", "ring"):
        reasons.append(f"--parallel must be ulysses or ring, got {parallel!r}")
    if runtime not in ("diffusers", "sglang"):
        reasons.append(f"--runtime must be diffusers or sglang, got {runtime!r}")
    if peer_memory and (gpus == 1 or runtime == "sglang"):
        reasons.append("--peer-memory is for --gpus 2 or more with --runtime diffusers")
    if runtime == "sglang":
        reasons += [] if asked is None else video_sglang.problems(asked)
        reasons += ["--runtime sglang runs on one GPU"] if gpus > 1 else []
    elif gpus > 1:
        from . import video_ranks as several

        # without --device a host that has no GPU is not what was meant
        if asked is not None:
            reasons += several.problems(
                asked, gpus, parallel, device or "cuda", compile_blocks, peer_memory
            )
    elif kind == "cuda" and not torch.cuda.is_available():
        reasons.append("--device cuda: this machine has no GPU")
    unwritable = files.problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if reasons or asked is None:
        raise typer.BadParameter("; ".join(reasons))
    console = Console(stderr=True)
    stamp = environment(torch.device(kind))
    command = f"liteattention-rocm bench video --config {config}"
    command += "" if steps is None else f" --steps {steps}"
    command += "" if layers is None else f" --layers {layers}"
    command += "".join(f" --attention {name}" for name in attention or ())
    command += "".join(f" --sparsity {share:g}" for share in sparsity or ())
    command += "" if pattern is None else f" --pattern {pattern}"
    command += "" if compile_blocks == "off" else f" --compile {compile_blocks}"
    command += "" if gpus == 1 else f" --gpus {gpus} --parallel {parallel}"
    command += " --peer-memory" if peer_memory else ""
    command += "" if runtime == "diffusers" else f" --runtime {runtime}"
    command += "" if device is None else f" --device {device}"

    def write(text: str, rows: Sequence[Any], complete: bool) -> None:
        result = {"complete": complete, "environment": stamp, "config": asked.model_dump()}
        result["rows"] = rows
        files.write_text(out / "video.json", json.dumps(result, indent=2) + "\n")
        files.write_text(out / "video.md", text)

    def save(rows: Sequence[benchmark.Row], complete: bool = False) -> None:
        text = benchmark.to_markdown(asked, rows, stamp, command)
        text += "" if complete else f"\n**Incomplete: {len(rows)} contenders were timed.**\n"
        write(text, [row.as_dict() for row in rows], complete)

    def save_ranks(rows: Sequence[several.RankRow], complete: bool = False) -> None:
        text = several.to_markdown(asked, rows, gpus, parallel, kind, stamp, command, peer_memory)
        text += "" if complete else "\n**Incomplete: not all contenders were timed.**\n"
        write(text, [dataclasses.asdict(row) for row in rows], complete)

    with _kept(out, ("video.json", "video.md"), console):
        if gpus > 1:
            try:
                mode = cast(several.Mode, parallel)
                found = several.run(asked, gpus, mode, kind, save_ranks, peer_memory)
                save_ranks(found, complete=True)
            except several.Failed as error:
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(1) from error
        else:
            measure = video_sglang.run if runtime == "sglang" else benchmark.run
            rows = measure(
                asked,
                torch.device(kind),
                lambda text: console.print(text, style="dim"),
                keep=save,
                compiled=compiled[compile_blocks],
            )
            save(rows, complete=True)
    typer.echo((out / "video.md").read_text(encoding="utf-8"))


_KERNEL_FILES = (
    "kernels.csv",
    "kernels.md",
    "kernels.html",
    "kernels-dense.png",
    "kernels-lite.png",
    "kernels-roofline.png",
)


def _check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is measured."""
    unwritable = files.problem(out)
    if unwritable is not None:
        raise typer.BadParameter(f"--out: {unwritable}")


@contextlib.contextmanager
def _kept(out: Path | None, names: Sequence[str], console: Console) -> Iterator[None]:
    """Move earlier results aside; if the command is stopped, say what it leaves."""
    folder = None if out is None else out.parent if names == (out.name,) else out
    earlier = None if folder is None else files.set_aside(folder, names)
    if earlier is not None:
        console.print(f"earlier results: {earlier}", highlight=False, soft_wrap=True)
    try:
        with files.stoppable():
            yield
    except KeyboardInterrupt as error:
        left = [str(folder / name) for name in names if folder and (folder / name).exists()]
        kept = f"incomplete results: {', '.join(left)}" if left else "nothing was written"
        console.print(f"stopped; {kept}", highlight=False, soft_wrap=True)
        raise typer.Exit(files.exit_code(error)) from error


@contextlib.contextmanager
def _kept_file(out: Path | None, console: Console) -> Iterator[None]:
    """:func:`_kept` for a JSON file and the page beside it."""
    names = () if out is None else (out.name, out.with_suffix(".html").name)
    with _kept(None if out is None else out.parent, names, console):
        yield


def _load(
    config: Path,
    load: Callable[[Path], Loaded],
    reasons: list[str],
    options: Mapping[str, str] | None = None,
    video: bool = False,
) -> tuple[Path, Loaded | None]:
    """Read a file, or the one of that name that comes with the package; with its path.

    None if something is wrong with it, which is added to ``reasons``: with the option's name where
    one of ``options``, by field, was given instead of what the file has. ``video``: whether it is
    one of models, not of kernels.
    """
    import yaml
    from pydantic import ValidationError

    from .cells import reasons as field_reasons

    folder = Path(__file__).parent / "configs"
    path = config if config.exists() else folder / f"{config}.yaml"
    try:
        return path, load(path)
    except FileNotFoundError:
        stems = sorted(file.stem for file in folder.glob("*.yaml"))
        names = ", ".join(stem for stem in stems if stem.startswith("wan") == video)
        reasons.append(f"--config: no file {config}; those of the package are {names}")
    except OSError as error:
        reasons.append(f"--config: {error}")
    except ValidationError as error:
        for why in field_reasons(error, options):
            reasons.append(why if why.startswith("--") else f"--config {path}: {why}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reasons.append(f"--config {path} is no YAML" + (f" (line {mark.line + 1})" if mark else ""))
    except ValueError as error:
        reasons.append(f"--config {path}: {error}")
    return path, None


@app.command("tune")
def tune(
    shape: Annotated[
        list[str] | None, typer.Option(help="B,H,S,D; may be given several times.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Causal prompts, requests,rows,keys,query heads,key heads,D,page size (0: packed "
            "keys); may be given several times."
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    dtype: Annotated[str, typer.Option(help=names_of_dtypes.both("bf16", "fp16"))] = "bf16",
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 9,
    fa3_library: Annotated[
        Path | None, typer.Option(help="FlashAttention-3 library of a vLLM wheel, timed beside.")
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
    asked = _shapes(shape or [], reasons)
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


@app.command("emulator")
def emulator(
    shape: Annotated[str, typer.Option(help="B,H,S,D; D is 64 or 128.")] = "1,2,1024,128",
    rounds: Annotated[int, typer.Option(min=3, help="Counted rounds.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the software MI300X on one core: the dense kernel with checks off and on."""
    need("bench emulator", "torch")
    from . import emulator as benchmark  # needs the compiled core, which a GPU does not

    reasons: list[str] = []
    asked = _shapes([shape], reasons)
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


@app.command("mapping")
def mapping(
    out: Annotated[Path, typer.Option(help="Folder for mapping.csv, mapping.md and pictures.")] = (
        Path("out/mapping")
    ),
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65536, help="1 and 8 if not given; ours run the first."),
    ] = None,
    reads: Annotated[
        float, typer.Option(min=0.01, help="Million reads of a launch; longer ones are cut.")
    ] = 1.5,
) -> None:
    """Model what attention reads from L2, Infinity Cache and HBM of an MI300X, by mapping."""
    need("bench mapping", "torch", "matplotlib", "tabulate")
    from . import mapping as benchmark
    from . import mapping_published as published
    from . import mapping_report as report

    _check_folder(out)
    batches = tuple(dict.fromkeys(batch or (1, 8)))
    console = Console(stderr=True)
    command = f"liteattention-rocm bench mapping --reads {reads:g}"
    command += "".join(f" --batch {each}" for each in batches)
    pictures = {benchmark.PAPER: "mapping-128.png", benchmark.OURS: "mapping-256.png"}
    cases = benchmark.study(batches, benchmark.PAPER, reads)
    cases += benchmark.study(batches[:1], benchmark.OURS, reads)
    names = ("mapping.csv", "mapping.md", *pictures.values())
    with _kept(out, names, console), activity(console, "modelling") as say:
        rows = benchmark.run(cases, lambda text: say(f"modelling {text}"))
        checked = benchmark.run(published.cases(), lambda text: say(f"comparing, {text}"))
        files.write_text(out / "mapping.csv", report.to_csv(rows))
        text = report.to_markdown(rows, checked, list(pictures), command)
        files.write_text(out / "mapping.md", text)
        for kernel, name in pictures.items():
            report.plot(rows, kernel, out / name)
    typer.echo(text)


@app.command("model")
def model(
    ranges: Annotated[
        bool, typer.Option("--range/--no-range", help="Also vary the constants nobody measured.")
    ] = True,
    decode: Annotated[bool, typer.Option("--decode", help="Only the table of decode.")] = False,
) -> None:
    """Model our kernels' workgroups on a CU of an MI300X: the tables of docs/model.md."""
    need("bench model", "torch", "tabulate")
    from . import model_tables as report

    with activity(Console(stderr=True), "modelling") as say:
        rows = [] if decode else report.run(report.CASES, ranges, lambda x: say(f"modelling {x}"))
        spread = []
        if not decode:
            spread = [report.lists(rows, lambda x: say(f"modelling {x}")), report.prefill(rows)]
        decoded = report.run_decode(report.DECODE, lambda x: say(f"modelling {x}"))
    typer.echo(report.to_markdown(rows, decoded, spread))


@app.command("serving")
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
            help="With sizes: attention backends of vLLM; may be given several times. CUSTOM is "
            "ours."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="decode|prefill,BATCH,CONTEXT; may be given several times."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 5,
    dtype: Annotated[
        str, typer.Option(help=names_of_dtypes.both("bf16", "fp16", "fp32"))
    ] = "bfloat16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="With sizes: auto, fp8, fp8_e4m3 or fp8_e5m2.")
    ] = "auto",
    tokens: Annotated[
        int, typer.Option(min=8, help="With sizes: new tokens of a request in a decode case.")
    ] = 128,
    head_dim: Annotated[int | None, typer.Option(help="Without sizes: 64 or 128.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="OpenMP threads of each engine.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With sizes: also write the JSON here, case by case, and a page beside it (.html)."
        ),
    ] = None,
) -> None:
    """Compare a serving engine's tokens per second with our attention and with others.

    On the CPU its own; with --sizes or on a GPU, vLLM's backends for that device, and also times to
    the first token and between tokens. Run it in the environment of the framework; see
    docs/serving.md.
    """
    from . import serving as benchmark
    from . import serving_sglang, serving_vllm
    from .serving_sizes import SIZES

    frameworks = {"vllm": serving_vllm, "sglang": serving_sglang}
    dtype = names_of_dtypes.long(dtype)
    reasons = []
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
    elif backend or out or kv_cache_dtype != "auto" or tokens != 128:
        reasons.append("--backend, --out, --kv-cache-dtype and --tokens need --sizes")
    unwritable = None if out is None else files.file_problem(out)
    if unwritable is not None:
        reasons.append(f"--out: {unwritable}")
    if out is not None and out.suffix == ".html":
        reasons.append("--out names the JSON; the page is written beside it, with the suffix .html")
    cases = []
    for text in case or ():
        kind, _, numbers = text.partition(",")
        if kind not in ("decode", "prefill") or not re.fullmatch(r"[1-9]\d*,[1-9]\d*", numbers):
            reasons.append(f"--case must be decode|prefill,BATCH,CONTEXT, got {text!r}")
        else:
            cases.append(benchmark.Case(kind, *map(int, numbers.split(","))))  # type: ignore[arg-type]
    if reasons:
        raise typer.BadParameter("; ".join(reasons))
    if sized:
        from . import serving_cli
        from .serving_backends import DEFAULT_CASES, Plan

        asked = Plan(
            device, sizes or "llama-3-8b", tuple(backend or ()), tuple(cases or DEFAULT_CASES),
            rounds, dtype, kv_cache_dtype, tokens, threads,
        )  # fmt: skip
        console = Console(stderr=as_json)
        ready, machine = serving_cli.prepare(asked)
        with _kept_file(out, console):
            serving_cli.compare(ready, machine, console, as_json, out)
        return
    need("bench serving", "torch", framework)
    console = Console(stderr=as_json)
    with activity(console, "starting") as say:
        rows = benchmark.run(
            frameworks[framework],
            cases or benchmark.DEFAULT_CASES,
            rounds,
            dtype,
            head_dim or 64,
            threads,
            say,
        )
    if as_json:
        environment = {
            "environment": collect_env.collect(),
            "framework": framework,
            "threads": threads,
            "dtype": dtype,
            "head_dim": head_dim or 64,
        }
        typer.echo(json.dumps(environment | {"rows": [row.as_dict() for row in rows]}, indent=2))
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


def _shapes(texts: list[str], reasons: list[str]) -> tuple[tuple[int, int, int, int], ...]:
    """B,H,S,D of each text; what is wrong with them is added to ``reasons``."""
    found = [dimensions.parse(text, reasons) for text in texts]
    return tuple(each for each in found if each is not None)


def _text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
