"""``liteattention-rocm bench video``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from liteattention_rocm.cli import files, options
from liteattention_rocm.cli.needs import need

from .cli_common import kept, read_config


@options.old_forms(
    compile={**options.switch("compile"), **dict.fromkeys(("both",), ("--compile", "--eager"))}
)
def video(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or wan2.1-1.3b, wan2.1-14b, wan2.1-14b-720p or wan-smoke for one that "
            "comes with the package."
        ),
    ] = Path("wan2.1-1.3b"),
    steps: Annotated[
        int | None, typer.Option(min=1, max=options.MOST_STEPS, help="Instead of the file's.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Instead of the file's: some layers stand for all."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of the file's: cudnn, fa2, flex, default, dense, lite.", metavar="LIST"
        ),
    ] = None,
    sparsity: Annotated[
        list[str] | None,
        typer.Option(help="Instead of the file's: shares of tiles of lite.", metavar="LIST"),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Instead of the file's: tiles that lite leaves out. uniform or clustered, as many "
            "in each head, or unequal."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile of the blocks.")
    ] = False,
    eager: Annotated[
        bool, typer.Option(help="With --compile: time the blocks without it, too.")
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            max=options.MOST_GPUS,
            help="GPUs of this host: each by itself, then all together.",
        ),
    ] = 1,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="With --gpus: ulysses (heads; the default) or ring (rows), of diffusers."
        ),
    ] = None,
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
    """Denoise a video with a Wan transformer of random weights: seconds by self-attention.

    Without a GPU, on the CPU: take --config wan-smoke, or a file with sizes of your own.
    """
    if runtime == "sglang":
        need("bench video", "torch", "sglang", "yaml", "tabulate", extras=("sglang-diffusion",))
    else:
        need("bench video", "torch", "diffusers", "transformers", "yaml", "tabulate")
    import torch

    from . import video as benchmark
    from . import video_sglang
    from .timing import environment

    reasons: list[str] = []
    names = options.listed(attention, "--attention", reasons)
    shares = options.numbers(sparsity, "--sparsity", reasons, kind=float)
    instead = {"steps": steps, "attention": names, "sparsity": shares, "pattern": pattern}
    given = {name: f"--{name}" for name, value in instead.items() if value is not None}
    _, asked = read_config(
        config, lambda path: benchmark.load(path, layers, **instead), reasons, given, video=True
    )
    on_gpu = torch.cuda.is_available()
    kind = device or ("cuda" if on_gpu else "cpu")
    if asked is not None and asked.needs_gpu and not on_gpu and device is None:
        reasons.append(
            f"--config {config}: its sizes are for a GPU, and PyTorch sees none: take --config "
            "wan-smoke --device cpu, or a file of your own without needs_gpu"
        )
    if eager and not compiled:
        reasons.append("--eager is for --compile: without it no block is compiled: leave it out")
    if kind not in ("cpu", "cuda"):
        reasons.append(f"--device must be cpu or cuda, got {device!r}")
    if parallel not in (None, "ulysses", "ring"):
        reasons.append(f"--parallel must be ulysses or ring, got {parallel!r}")
    if runtime not in ("diffusers", "sglang"):
        reasons.append(f"--runtime must be diffusers or sglang, got {runtime!r}")
    for name, asked_for in (("--parallel", parallel is not None), ("--peer-memory", peer_memory)):
        if asked_for and (gpus == 1 or runtime == "sglang"):
            reasons.append(
                f"{name} is for --gpus 2 or more with --runtime diffusers: leave it out otherwise"
            )
    mode = parallel or "ulysses"
    if runtime == "sglang":
        reasons += [] if asked is None else video_sglang.problems(asked)
        reasons += ["--runtime sglang runs on one GPU"] if gpus > 1 else []
    elif gpus > 1:
        from . import video_ranks as several

        # without --device a host that has no GPU is not what was meant
        if asked is not None:
            reasons += several.problems(asked, gpus, mode, device or "cuda", compiled, peer_memory)
    elif kind == "cuda" and not on_gpu:
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
    command += "" if names is None else f" --attention {','.join(names)}"
    command += "" if shares is None else f" --sparsity {','.join(f'{share:g}' for share in shares)}"
    command += "" if pattern is None else f" --pattern {pattern}"
    command += " --compile" if compiled else ""
    command += " --eager" if eager else ""
    command += "" if gpus == 1 else f" --gpus {gpus} --parallel {mode}"
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
        text = several.to_markdown(asked, rows, gpus, mode, kind, stamp, command, peer_memory)
        text += "" if complete else "\n**Incomplete: not all contenders were timed.**\n"
        write(text, [dataclasses.asdict(row) for row in rows], complete)

    with kept(out, ("video.json", "video.md"), console):
        if gpus > 1:
            try:
                way = cast(several.Mode, mode)
                found = several.run(asked, gpus, way, kind, save_ranks, peer_memory)
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
                compiled=(False, True) if eager else (compiled,),
            )
            save(rows, complete=True)
    typer.echo((out / "video.md").read_text(encoding="utf-8"))
