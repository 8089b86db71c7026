"""The commands ``liteattention-rocm generate`` and ``liteattention-rocm e2e``."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from liteattention_rocm.cli import dtypes, files, options
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import activity

# Model libraries are imported when a command runs: --help answers without them.
if TYPE_CHECKING:
    from .artefacts import Writer
    from .config import Place
    from .runner import Runner
    from .runs import AnyRunner, Run, Settings
    from .suite import Result

#: What the runners need: diffusers', then SGLang's, whose diffusion runtime is an extra of its own.
FRAMEWORK = (("torch",), ("torch", "sglang"))
EXTRAS = (("diffusers", "bench"), ("sglang-diffusion", "bench"))

DEFAULT_PROMPT = "a red circle moves right and a green square moves up on a white background"
#: What LiteAttention runs by default in `generate`; see docs/budget.md.
RECOMMENDED = {"budget": "0.05", "dense_steps": "4"}
#: `generate` takes the largest of these that its time limit allows: 8,192 and 4,608 tokens of
#: the default model.
_SIZES = ((128, 128, 8), (96, 96, 8))
_TIME_LIMIT = 300.0
"""Seconds."""
#: Options by field, where they are not called as fields are.
_OF_E2E = {
    "thresholds": "--threshold",
    "layer_thresholds": "--layer-threshold",
    "layer_budgets": "--layer-budget",
    "warmup_steps": "--dense-steps",
    "retest_every": "--retest",
}
_OF_GENERATE = {
    "prompts": "PROMPT",
    "warmup_steps": "--dense-steps",
    "thresholds": "--threshold",
    "budgets": "--budget",
    "seeds": "--seed",
}
#: What `generate` makes of the default model on the software MI300X: 1,024 tokens, a minute.
_EMULATED = {"height": "64", "width": "64", "frames": "4", "steps": "8"}


# Every option is text here and is checked, all of them together, by the configuration.
def option(text: str, metavar: str = "TEXT", *names: str) -> Any:
    """An option with this help text, None where it is left out."""
    # typer 0.27 takes a metavar that is the option's own name for the option: --DEVICE
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


# Options that several commands have.
RunnerName = Annotated[
    str | None, option("diffusers (default), or sglang: SGLang's own pipeline.", "WORD")
]
Prompts = Annotated[str | None, option("A prompt per line, or a JSON list.", "FILE")]
TextLength = Annotated[str | None, option("Text tokens to pad prompts to.", "N")]
Seeds = Annotated[list[str] | None, option("Seeds, each with every prompt; 0 by default.", "LIST")]
Model = Annotated[
    str | None, option("Directory or hub id of a diffusers text-to-video pipeline.", "DIR|ID")
]
Height = Annotated[str | None, option("Pixels.", "N")]
Width = Annotated[str | None, option("Pixels.", "N")]
Frames = Annotated[str | None, option("Frames of the video.", "N")]
Guidance = Annotated[str | None, option("Classifier-free guidance scale.", "X")]
Geometry = Annotated[
    str | None, option("cpu (the engine's own), mi300x or QxKxV such as 128x64x32.", "TILE")
]
Engine = Annotated[
    str | None, option("cpu, portable, gfx942 or reference; by default by device.", "NAME")
]
Threads = Annotated[str | None, option("CPU threads; by default PyTorch's.", "N")]
Dtype = Annotated[str | None, option(dtypes.both("bf16", "fp16", "fp32", default="bf16"), "WORD")]
Device = Annotated[str | None, option("cpu (default), cuda, cuda:1 ...", "NAME")]
Out = Annotated[str | None, option("Folder for videos and report; out by default.", "DIR")]


def as_options(place: Place, called: Mapping[str, str]) -> str:
    """Name a place in a configuration as the command line does.

    ``called`` has the fields whose options are not called as they are. Of a list nothing says
    which item it is: the item itself follows.
    """
    named = place[1:] if place[:1] == ("policy",) else place
    if not named:
        return ""
    field, *keys = named
    option = called.get(str(field)) or "--" + str(field).replace("_", "-")
    return " ".join([option, *(key for key in keys if isinstance(key, str))])


def load(
    given: dict[str, Any], console: Console, called: Mapping[str, str], problems: Sequence[str] = ()
) -> AnyRunner:
    """Check the options and load the model; says everything that is wrong and exits with 2.

    ``called``: see :func:`as_options`. ``problems`` are those that the caller has found already.
    """
    from .artefacts import earlier_files
    from .config import load_config

    problems = list(problems)
    out = Path(given["out"] or "out")
    unwritable = files.problem(out)
    if unwritable is not None:
        problems.append(f"--out: {unwritable}")
    else:
        try:
            earlier_files(out)
        except ValueError as error:
            problems.append(f"--out: {error}")
    problems += _of_emulator(given)
    try:
        config = load_config(given, functools.partial(as_options, called=called))
        if not problems:
            with activity(console, f"loading {config.model}"):
                if config.runner == "sglang":
                    from .sglang_runner import SglangRunner

                    return SglangRunner(config)
                from .runner import Runner

                return Runner(config)
    except ValueError as error:
        problems = [*(_in_short(line, called) for line in str(error).splitlines()), *problems]
    say(problems, console)
    raise typer.Exit(2)


def _in_short(line: str, called: Mapping[str, str]) -> str:
    """A reason without what the loader says of each name; with --emulate where there is that."""
    line = re.sub(r"; libamdhip64\S*: cannot open shared object file: [^;:]*", "", line)
    if called is _OF_GENERATE and line.startswith("engine 'gfx942' cannot run here: "):
        line += "; or add --emulate, which runs it in software"
    return line


def say(problems: Sequence[str], console: Console) -> None:
    """Print what is wrong with the options."""
    console.print("[bold red]these options do not work:[/]")
    for line in problems:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@options.old_forms(soft_skip=options.switch("soft-skip"))
def e2e(
    runner: RunnerName = None,
    model: Model = None,
    prompts: Prompts = None,
    negative_prompt: Annotated[str | None, option("What guidance leads away from.")] = None,
    attention: Annotated[
        list[str] | None,
        option(
            "Of diffusers (the pipeline's own), dense (our dense kernel), lite (LiteAttention at "
            "each threshold); all three by default.",
            "LIST",
        ),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        option(
            "Thresholds of lite, log2 units; -inf,-8,-6,-4 by default (-inf skips nothing).", "LIST"
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None,
        option(
            "Budgets of lite, shares of softmax mass that a step may drop, such as 0.05,0.1; "
            "without --threshold they are run in place of the default thresholds.",
            "LIST",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        option("JSON object: name -> fields of SkipPolicy; each adds a lite run.", "FILE"),
    ] = None,
    threshold_scale: Annotated[
        str | None, option("absolute, or length: subtract log2(tokens).", "WORD")
    ] = None,
    layer_threshold: Annotated[
        list[str] | None, option("PATTERN=THRESHOLD of layers by name.", "LIST")
    ] = None,
    layer_budget: Annotated[
        list[str] | None, option("PATTERN=BUDGET of layers by name.", "LIST")
    ] = None,
    dense_steps: Annotated[str | None, option("First steps that run dense.", "N")] = None,
    last_step: Annotated[
        str | None, option("Last step that may skip; negative counts from the end.", "N")
    ] = None,
    retest: Annotated[str | None, option("Walk the full list again every N-th step.", "N")] = None,
    branches: Annotated[
        str | None, option("separate or shared lists for the guidance branches.", "WORD")
    ] = None,
    soft_skip: Annotated[
        bool | None,
        typer.Option(help="Drop tiles in the step that finds them.", show_default=False),
    ] = None,
    direction: Annotated[str | None, option("alternate, ascending or descending.", "WORD")] = None,
    steps: Annotated[str | None, option("Denoising steps.", "N")] = None,
    short_steps: Annotated[
        str | None, option("Also run everything on a schedule of so few steps.", "N")
    ] = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    guidance: Guidance = None,
    max_sequence_length: TextLength = None,
    seeds: Seeds = None,
    repeats: Annotated[str | None, option("Timed runs of everything; 1 by default.", "N")] = None,
    warmup: Annotated[
        str | None,
        option("Untimed runs per configuration, dense steps and two more; 1 by default.", "N"),
    ] = None,
    geometry: Geometry = None,
    engine: Engine = None,
    cross_attention: Annotated[
        str | None,
        option(
            "own (the pipeline's) or dense (our kernel); own by default, dense on gfx942.", "WORD"
        ),
    ] = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile of the transformer's blocks, in every row alike.",
        ),
    ] = False,
    graphs: Annotated[
        bool, typer.Option(help="Run the transformer from CUDA graphs, in every row alike.")
    ] = False,
    check_prompts: Annotated[
        bool,
        typer.Option(
            help="Read shapes, colours and directions from the videos: prompts of the small model."
        ),
    ] = False,
    fps: Annotated[
        str | None, option("Frames per second of the videos; 8 by default.", "N")
    ] = None,
    out: Out = None,
    print_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on standard output.")
    ] = False,
) -> None:
    """Compare attention configurations end to end: time, memory, sparsity, quality, videos."""
    need("e2e", *FRAMEWORK[runner == "sglang"], extras=EXTRAS[runner == "sglang"])
    console = Console(stderr=True)
    policy = {
        "threshold_scale": threshold_scale,
        "layer_thresholds": layer_threshold or None,
        "layer_budgets": layer_budget or None,
        "warmup_steps": dense_steps,
        "last_step": last_step,
        "retest_every": retest,
        "branches": branches,
        "soft_skip": soft_skip,
        "direction": direction,
    }
    given = {
        "runner": runner,
        "model": model,
        "prompts": prompts,
        "negative_prompt": negative_prompt,
        "attention": options.joined(attention),
        "thresholds": options.joined(threshold),
        "budgets": options.joined(budgets),
        "policies": policies,
        "policy": {name: value for name, value in policy.items() if value is not None},
        "steps": steps,
        "short_steps": short_steps,
        "height": height,
        "width": width,
        "frames": frames,
        "guidance": guidance,
        "max_sequence_length": max_sequence_length,
        "seeds": options.joined(seeds),
        "repeats": repeats,
        "warmup": warmup,
        "geometry": geometry,
        "engine": engine,
        "cross_attention": cross_attention,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "compiled": compiled,
        "graphs": graphs,
        "check_prompts": check_prompts,
        "fps": fps,
        "out": out,
    }
    problems = []
    kinds = [part.strip() for text in attention or () for part in text.split(",")]
    if geometry is not None and kinds and "lite" not in kinds:
        # Not of the configuration: calibrate has a tile without such a row.
        problems.append(
            "--geometry: no row has lists of tiles: add lite to --attention, or leave it out"
        )
    report = _suite(load(given, console, _OF_E2E, problems), console)
    if print_json:
        typer.echo(json.dumps(report, allow_nan=False))


def generate(
    prompt: Annotated[
        str, typer.Argument(help="What the video shows.", show_default=True)
    ] = DEFAULT_PROMPT,
    model: Model = None,
    out: Out = None,
    threshold: Annotated[
        str | None, option("Threshold of LiteAttention in log2 units, in place of a budget.", "X")
    ] = None,
    steps: Annotated[str | None, option("Denoising steps; 20 by default, 8 emulated.", "N")] = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    guidance: Guidance = None,
    seed: Annotated[str | None, option("Seed; 0 by default.", "N")] = None,
    engine: Engine = None,
    emulate: Annotated[
        bool,
        typer.Option(
            help="Engine gfx942 on the software MI300X: short for --engine gfx942 with "
            "LITEATTENTION_HIP_LIBRARY=$(liteattention-rocm emulate --library)."
        ),
    ] = False,
    geometry: Geometry = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            max=1e9,
            help="Seconds, 300 by default; a smaller video is made if the large one would not fit. "
            "Not with --model, --emulate or a size, which leave nothing to choose.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None, option("Share of softmax mass that a step may drop; 0.05 by default.", "X")
    ] = None,
    dense_steps: Annotated[
        str | None, option("First steps that run dense; 4 by default with a budget, else 0.", "N")
    ] = None,
) -> None:
    """Make one video with diffusers' attention, our dense kernel and LiteAttention, and compare.

    With --emulate our attention, self and cross, dense and LiteAttention, is
    the machine code for the MI300X, run in software on this processor: a small
    video by default.
    """
    need("generate", *FRAMEWORK[False], extras=EXTRAS[False])
    console = Console(stderr=True)
    problems: list[str] = []
    if emulate:
        problems = _emulate(engine, device)
        engine, device = None if problems else "gfx942", None
    if time_limit is not None and not time_limit >= 1:
        problems.append(f"--time-limit must be at least 1, got {time_limit:g}")
    if threshold is None:  # the setting that docs/budget.md recommends
        budget = RECOMMENDED["budget"] if budget is None else budget
        dense_steps = RECOMMENDED["dense_steps"] if dense_steps is None else dense_steps
    given: dict[str, Any] = {
        "model": model,
        "prompts": [prompt],
        "thresholds": threshold,
        "budgets": budget,
        "policy": {} if dense_steps is None else {"warmup_steps": dense_steps},
        "steps": steps,
        "height": height,
        "width": width,
        "frames": frames,
        "guidance": guidance,
        "seeds": seed,
        "engine": engine,
        "geometry": geometry,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "out": out,
    }
    changes, emulated = _engine_options(given)
    given |= changes
    if model is None:
        defaults = _EMULATED if emulated else {"steps": "20"}
        given |= {name: value for name, value in defaults.items() if given[name] is None}
    sized = any(given[name] is not None for name in ("model", "height", "width", "frames"))
    if sized and time_limit is not None:
        problems.append(
            "--time-limit chooses between sizes: leave it out with --model, --height, --width, "
            "--frames or an emulated engine"
        )
    loaded = load(given, console, _OF_GENERATE, problems)
    if not sized:
        limit = _TIME_LIMIT if time_limit is None else time_limit
        loaded.settings = _size_within(cast("Runner", loaded), limit, console)
    report = _suite(loaded, console)
    folder = Path(out or "out")
    for name in report["artefacts"]["videos"]:
        console.print(f"video          {folder / name}", highlight=False, soft_wrap=True)
    for name in report["artefacts"]["contact_sheets"]:
        console.print(f"contact sheet  {folder / name}", highlight=False, soft_wrap=True)


def _emulate(engine: str | None, device: str | None) -> list[str]:
    """Make the software MI300X the HIP run-time of this process; returns why it cannot be."""
    from liteattention_rocm.engines import LIBRARY_VARIABLE

    problems = []
    if engine not in (None, "gfx942"):
        problems.append(f"--emulate is for engine gfx942, got --engine {engine}")
    if device not in (None, "cpu"):
        problems.append(f"--emulate runs on the CPU: leave --device {device} out")
    try:
        # By name: it is a package of its own, which an installation need not have.
        emulator = importlib.import_module("liteattention_emulator")
        os.environ[LIBRARY_VARIABLE] = str(emulator.library())
    except (ImportError, RuntimeError) as error:
        problems.append(f"--emulate: {error}")
    return problems


def _of_emulator(options: Mapping[str, Any]) -> list[str]:
    """What the environment asks of the software MI300X that it cannot do, if it is the engine."""
    if not _engine_options(options)[1]:
        return []
    try:
        emulator = importlib.import_module("liteattention_emulator")
    except ImportError:  # the library is of another installation
        return []
    return list(emulator.environment_problems())


def _engine_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """What the engine makes different, and whether it is emulated.

    Nothing is run only to warm up an emulator.
    """
    from liteattention_rocm import engines

    changes: dict[str, Any] = {}
    try:
        engine = engines.choose(options["device"] or "cpu", options["engine"])
    except (ValueError, RuntimeError):  # the configuration says it, with all else that is wrong
        return changes, False
    if engine.emulated:
        changes["warmup"] = "0"
    return changes, engine.emulated


def _size_within(loaded: Runner, time_limit: float, console: Console) -> Settings:
    """The largest size of the default model whose runs fit into ``time_limit`` seconds."""
    from .estimate import Estimate

    with activity(console, "how fast is this machine?"):
        estimate = Estimate(loaded)
    for height, width, frames in _SIZES:
        chosen = replace(loaded.settings, height=height, width=width, frames=frames)
        needed = estimate.seconds(chosen)
        line = f"{width} x {height} x {frames} frames, {loaded.tokens(chosen):,} tokens: "
        line += f"about {needed:.0f} s"
        if needed <= time_limit or (height, width, frames) == _SIZES[-1]:
            break
        line += f", over {time_limit:.0f} s (--time-limit): taking the next smaller size"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{line} ({estimate.assumed})", highlight=False, soft_wrap=True)
    return chosen


def _suite(loaded: AnyRunner, console: Console) -> dict[str, Any]:
    """Run everything and write it; a run that is stopped keeps and shows what it has."""
    from . import artefacts, suite

    result = suite.Result.before(loaded)
    out = loaded.config.out
    writer = artefacts.Writer(result, out)

    def keep(made: Run) -> None:
        try:
            writer.add(made)
        except OSError as error:  # it is tried again at the end
            console.print(f"not written yet: {error}", markup=False, highlight=False)

    with files.stoppable():
        try:
            suite.run(result, console, keep)
        except BaseException as error:
            what = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            done = f"{len(result.runs)} of {result.planned} runs were made"
            console.print(f"{what}: {done}", highlight=False)
            if result.runs:
                _finish_after(writer, result, console)
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(files.exit_code(error)) from error
            raise
        return _finish(writer, result, console)


def _finish_after(writer: Writer, result: Result, console: Console) -> None:
    """:func:`_finish` of a run that an error ended, which no later one may hide."""
    try:
        _finish(writer, result, console)
    except typer.Exit:
        pass  # it has said what it could not write
    except Exception as error:
        why = f"could not finish the report: {type(error).__name__}: {error}"
        console.print(why, markup=False, highlight=False, soft_wrap=True)


def _finish(writer: Writer, result: Result, console: Console) -> dict[str, Any]:
    from . import report, suite

    out = result.config.out
    failure = None
    try:
        written = writer.finish()
    except OSError as error:
        written, failure = suite.summarise(result), error
    settings = written["settings"]
    console.print(
        report.table(
            written,
            f"{settings['width']} x {settings['height']} x {settings['frames']} frames, "
            f"{settings['tokens']:,} tokens, {settings['steps']} steps"
            + (", emulated" if settings["emulated"] else "")
            + ("" if written["complete"] else ", incomplete"),
        )
    )
    for line in report.load_lines(written):
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    for note in written["notes"]:
        console.print(note, highlight=False, markup=False)
    if writer.earlier is not None:
        console.print(f"earlier results: {writer.earlier}", highlight=False, soft_wrap=True)
    if failure is not None:
        console.print(f"could not write all of {out}: {failure}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    for name in ("report.md", "report.html"):
        console.print(f"report: {out / name}", highlight=False, soft_wrap=True)
    return written
