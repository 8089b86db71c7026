"""The command ``liteattention-rocm calibrate``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from liteattention_rocm.cli import files, options, tables
from liteattention_rocm.cli.needs import need
from liteattention_rocm.cli.progress import Steps

from . import cli

if TYPE_CHECKING:
    from .calibrate import Calibration, Choice
    from .config import CalibrationOptions
    from .runs import AnyRunner

#: Options by field, where they are not called as fields are.
_CALLED = {"budgets": "--trial-budgets"}
#: What the command writes.
POLICIES, CALIBRATION, SUMMARY = "policies.json", "calibration.json", "calibration.md"


def calibrate(
    psnr: Annotated[
        list[str] | None,
        cli.option("Wanted qualities, mean PSNR against dense in dB; 40,33 by default.", "LIST"),
    ] = None,
    runner: cli.RunnerName = None,
    model: cli.Model = None,
    prompts: cli.Prompts = None,
    trial_budgets: Annotated[
        list[str] | None,
        cli.option("Budgets that each group or head is tried with; 0.01,0.05,0.25.", "LIST"),
    ] = None,
    dense_steps: Annotated[
        list[str] | None,
        cli.option(
            "First steps that run dense; 4 by default. Of several, with --by-head, each head takes "
            "one.",
            "LIST",
        ),
    ] = None,
    groups: Annotated[
        str | None, cli.option("Groups of neighbouring layers; by default each layer is one.", "N")
    ] = None,
    by_head: Annotated[
        bool, typer.Option(help="Give each head of a group a budget of its own.")
    ] = False,
    rounds: Annotated[
        str | None, cli.option("Policies to run for a quality, at most; 3 by default.", "N")
    ] = None,
    steps: Annotated[str | None, cli.option("Denoising steps.", "N")] = None,
    height: cli.Height = None,
    width: cli.Width = None,
    frames: cli.Frames = None,
    guidance: cli.Guidance = None,
    max_sequence_length: cli.TextLength = None,
    seeds: cli.Seeds = None,
    geometry: cli.Geometry = None,
    engine: cli.Engine = None,
    threads: cli.Threads = None,
    dtype: cli.Dtype = None,
    device: cli.Device = None,
    out: cli.Out = None,
) -> None:
    """Choose budgets by layer, or by head, for a wanted quality, and write them as policies.

    It makes (groups x trial budgets + 1 + rounds x qualities) videos for each prompt and seed; with
    --by-head, heads times as many trials, and that for each number of --dense-steps. By default
    these are 200 videos of the small model, which take two cores almost three hours. Fewer
    --prompts, --groups or --steps and smaller videos take less.
    """
    need("calibrate", *cli.FRAMEWORK[runner == "sglang"], extras=cli.EXTRAS[runner == "sglang"])
    from pydantic import ValidationError

    from .config import CalibrationOptions, reasons

    console = Console(stderr=True)
    asked = {
        "psnr": options.joined(psnr), "budgets": options.joined(trial_budgets),
        "dense_steps": options.joined(dense_steps), "groups": groups,
        "rounds": rounds, "by_head": by_head,
    }  # fmt: skip
    problems = []
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        aims = CalibrationOptions.model_validate(given)
    except ValidationError as error:
        problems = reasons(error, functools.partial(cli.as_options, called=_CALLED))
    folder = Path(out or "out")
    for name in (POLICIES, CALIBRATION, SUMMARY):
        if (folder / name).is_dir():
            problems.append(f"--out: {files.file_problem(folder / name)}")
    loaded = cli.load(
        {
            "runner": runner, "model": model, "prompts": prompts, "attention": "dense",
            "steps": steps, "height": height, "width": width, "frames": frames,
            "guidance": guidance, "max_sequence_length": max_sequence_length,
            "seeds": options.joined(seeds), "geometry": geometry, "engine": engine,
            "threads": threads, "dtype": dtype, "device": device, "out": out,
        },
        console,
        _CALLED,
        problems,
    )  # fmt: skip
    Command(loaded, aims, console).run()


class Command:
    """One calibration from the command line. Lifetime: the call."""

    def __init__(self, loaded: AnyRunner, options: CalibrationOptions, console: Console) -> None:
        self._loaded, self._options, self._console = loaded, options, console
        self._out = loaded.config.out
        self._environment: dict[str, Any] = {}
        #: Files that were written, and where earlier ones of their names went.
        self._replaced: set[str] = set()
        self._earlier: Path | None = None
        #: What could not be written when it was measured.
        self._late: Calibration | None = None

    def run(self) -> None:
        """Measure, choose and write; one that is stopped or fails keeps what it has measured.

        A folder that cannot be written to at some time ends nothing: it is tried again with the
        next result and at the end, and what cannot be written then is printed.
        """
        from .calibrate import Calibrator, in_groups

        options, console = self._options, self._console
        with files.stoppable():
            try:
                videos = len(self._loaded.config.prompts) * len(self._loaded.config.seeds)
                with Steps(console, self._steps(videos)) as progress:
                    work = Calibrator(
                        self._loaded,
                        options.dense_steps,
                        options.budgets,
                        self._keep,
                        progress.part,
                        progress.done,
                    )
                    groups = in_groups(work.layers(), options.groups)
                    heads = self._heads() if options.by_head else None
                    progress.expect(self._steps(videos, len(groups) * (heads or 1)))
                    work.measure(groups, heads)
                    for target in options.psnr:
                        work.aim(target, options.rounds)
            except BaseException as error:
                written = self._write_late()
                if isinstance(error, ValueError):
                    cli.say([str(error)], console)
                    raise typer.Exit(2) from error
                if isinstance(error, KeyboardInterrupt):
                    if not self._environment:  # it is looked at with the first result
                        console.print("stopped: nothing was measured yet")
                    elif written:
                        console.print(f"stopped: what was measured is in {self._out / CALIBRATION}")
                    raise typer.Exit(files.exit_code(error)) from error
                raise
        written = self._write_late()
        self._show(work.made)
        if not written:
            raise typer.Exit(1)
        console.print(f"policies: {self._out / POLICIES}", highlight=False, soft_wrap=True)

    def _heads(self) -> int:
        found = self._loaded.heads()
        if found is None:
            raise ValueError(
                "--by-head: the model's configuration does not say num_attention_heads, or its "
                "denoisers differ in it: leave the option out"
            )
        return found

    def _steps(self, videos: int, units: int = 1) -> int:
        options = self._options
        trials = units * len(options.dense_steps) * len(options.budgets)
        runs = 1 + trials + options.rounds * len(options.psnr)
        return 2 + runs * videos * self._loaded.settings.steps

    def _keep(self, made: Calibration) -> None:
        self._late = made  # also if it is stopped while it writes
        try:
            self._write(made)
            self._late = None
        except OSError as error:
            self._console.print(f"not written yet: {error}", markup=False, highlight=False)

    def _write_late(self) -> bool:
        """Write what could not be written before; if it still cannot be, print it."""
        if self._late is None:
            return True
        try:
            self._write(self._late)
        except OSError as error:
            text = f"could not write all of {self._out}: {error}; standard output has it instead"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            typer.echo(json.dumps(self._data(self._late), indent=1))
            return False
        self._late = None
        return True

    def _data(self, made: Calibration) -> dict[str, Any]:
        """What the JSON files hold, by name."""
        from . import suite

        self._environment = self._environment or suite.environment(self._loaded)
        data = {
            "environment": self._environment,
            "prompts": list(self._loaded.config.prompts),
            "seeds": list(self._loaded.config.seeds),
            "tokens": self._loaded.tokens(),
            "steps": self._loaded.settings.steps,
            **made.to_json(),
        }
        return {CALIBRATION: data, POLICIES: made.policies()}

    def _write(self, made: Calibration) -> None:
        """Write all files, after moving earlier ones aside. Raises OSError.

        Earlier policies stay until there are new ones.
        """
        texts = {
            name: json.dumps(data, indent=1) + "\n"
            for name, data in self._data(made).items()
            if name != POLICIES or data
        }
        texts[SUMMARY] = "\n".join(summary(made)) + "\n"
        new = [name for name in texts if name not in self._replaced]
        self._earlier = files.set_aside(self._out, new, self._earlier) or self._earlier
        self._replaced.update(new)
        for name, text in texts.items():
            files.write_text(self._out / name, text)

    def _show(self, made: Calibration) -> None:
        console = self._console
        table = Table(title="calibrated policies", box=box.SIMPLE)
        for name in _ROUNDS:
            table.add_column(name, justify="right")
        for target in made.rounds:
            for cells in _rounds(made, target):
                table.add_row(*cells)
        console.print(table)
        for target in made.rounds:
            best = made.best(target)
            if best is None or best.psnr_db < target:
                console.print(
                    f"{target:g} dB was not met: raise --rounds or --dense-steps, or try smaller "
                    "--trial-budgets",
                    highlight=False,
                )


_ROUNDS = ("wanted dB", "predicted", "PSNR", "worst", "skipped", "taken")


def _rounds(made: Calibration, target: float) -> list[list[str]]:
    best = made.best(target)
    return [
        [
            f"{target:g}",
            f"{item.predicted_db:.1f}",
            f"{item.psnr_db:.1f}",
            f"{item.worst_db:.1f}",
            f"{item.skipped:.1%}",
            "yes" if item is best else "",
        ]
        for item in made.rounds[target]
    ]


def summary(made: Calibration) -> list[str]:
    """The calibration as Markdown: the trials, the policies run, the budgets taken."""
    what = "layer" if made.heads is None else "head"
    lines = [f"# Budgets by {what}", "", "One of these skips, the others are kept whole:", ""]
    lines += tables.markdown(
        ["layers", "dense steps", "budget", "PSNR dB", "skipped in them"],
        [
            [
                _unit(item.layers, item.head),
                str(item.dense_steps),
                f"{item.budget:g}",
                f"{item.psnr_db:.1f}",
                f"{item.skipped:.1%}",
            ]
            for item in made.trials
        ],
    )
    if not made.rounds:
        return lines
    lines += ["", "Policies run:", ""]
    lines += tables.markdown(
        list(_ROUNDS), [cells for target in made.rounds for cells in _rounds(made, target)]
    )
    taken = [(target, best) for target in made.rounds if (best := made.best(target)) is not None]
    lines += ["", "Budgets taken:", ""]
    lines += tables.markdown(
        ["layers", *(f"{target:g} dB" for target, _ in taken)],
        [
            [_unit(*unit), *(_choice(made, best.choices[i]) for _, best in taken)]
            for i, unit in enumerate(made.units)
        ],
    )
    return lines


def _choice(made: Calibration, choice: Choice) -> str:
    start = f" from step {choice.dense_steps}" if made.dense_steps[1:] else ""
    return f"{choice.budget:.3g}{start}"


def _unit(layers: tuple[str, ...], head: int | None) -> str:
    span = f"`{layers[0]}` to `{layers[-1]}`" if layers[1:] else f"`{layers[0]}`"
    return span if head is None else f"{span}, head {head}"
