"""What commands that model a recording have in common: their options and what they print."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from liteattention_emulator.recording import Recording

from . import picture, report
from .constants import BadConstants, checked
from .model import Replay, replay, spread

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a constant of the model; one an option."),
]
Ranges = Annotated[
    bool, typer.Option("--range/--no-range", help="Also vary the constants nobody has measured.")
]
Top = Annotated[int, typer.Option(min=0, max=100_000, help="Instructions to list.")]
Timeline = Annotated[
    Path | None, typer.Option(help="Draw what the waves do over two iterations (.png, .svg, .pdf).")
]
ClockGhz = Annotated[
    float | None,
    typer.Option(min=0.1, max=100, help="Clock of the CU, GHz: also print microseconds at it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class BadOptions(ValueError):
    """Options that do not work; every reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of a command. ``matrix_per_block`` as in ``report.to_dict``."""

    overrides: dict[str, float]
    ranges: bool
    top: int
    timeline: Path | None
    clock_ghz: float | None
    as_json: bool

    @staticmethod
    def of(
        overrides: list[str] | None,
        ranges: bool,
        top: int,
        timeline: Path | None,
        clock_ghz: float | None,
        as_json: bool,
    ) -> Options:
        """Raises BadOptions with every reason."""
        values: dict[str, float] = {}
        reasons = []
        for text in overrides or ():
            name, _, value = text.partition("=")
            if name.strip() in values:
                reasons.append(f"--set has {name.strip()} several times: give one value")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                reasons.append(f"--set must be NAME=NUMBER, got {text!r}")
        try:
            checked(values)
        except BadConstants as error:
            reasons.append(f"--set: {error}")
        if timeline is not None and timeline.suffix not in (".png", ".svg", ".pdf"):
            reasons.append(f"--timeline must end in .png, .svg or .pdf, got {str(timeline)!r}")
        elif timeline is not None and (why := unwritable(timeline)):
            reasons.append(f"--timeline: {why}")
        if timeline is not None and not _draws():
            reasons.append("--timeline needs matplotlib: pip install 'liteattention-rocm[bench]'")
        if reasons:
            raise BadOptions("; ".join(reasons))
        return Options(values, ranges, top, timeline, clock_ghz, as_json)


def unwritable(path: Path) -> str:
    """Why :func:`written` can write no file there; "" if it can."""
    folder = path.resolve().parent
    if path.is_dir():
        return f"{str(path)!r} is a folder, a file is needed"
    if path.exists() and not os.access(path, os.W_OK):
        return f"cannot write to {str(path)!r}"
    if _opened(path):
        return ""
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    try:  # permissions alone do not tell
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".liteattention-") as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"cannot write into {str(folder)!r}: {error.strerror}"
    return ""


def _opened(path: Path) -> bool:
    """Whether ``path`` is written as it stands: a device, a pipe, /dev/stdout whatever it is."""
    special = str(path.absolute().parent) in ("/dev", "/dev/fd")
    return path.exists() and (special or not path.is_file())


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give the name of a file to write, which becomes ``path`` if all goes well.

    Raises OSError that names ``path``; what was there before stays then.
    """
    try:
        # What a link points to is written, and the link stays.
        aside = contextlib.nullcontext(path) if _opened(path) else _replacing(path.resolve())
        with aside as part:
            yield part
    except OSError as error:
        # Of arrays NumPy says only how much of them it wrote.
        why = error.strerror or f"not written whole: {error}"
        raise OSError(error.errno, why, str(path)) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place, suffix and permissions if all goes well."""
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _draws() -> bool:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return False
    return True


def run(
    recording: Recording,
    options: Options,
    matrix_per_block: float | None = None,
    more: Callable[[Replay, dict[str, Any]], str] | None = None,
) -> None:
    """Replay a recording, draw it and print the result. Raises EmulatorError, OSError.

    What is printed does not depend on whether the picture could be drawn and written.

    more: may add to what ``--json`` prints, and says the same in words, or nothing.
    """
    result = replay(recording, options.overrides)
    ranges = spread(recording, options.overrides) if options.ranges else None
    data = report.to_dict(
        result,
        ranges,
        matrix_per_block=matrix_per_block,
        top=options.top,
        clock_ghz=options.clock_ghz,
    )
    words = "" if more is None else more(result, data)
    try:
        if options.timeline is not None:
            with written(options.timeline) as part:
                picture.draw(result, part)
    finally:
        if options.as_json:
            typer.echo(json.dumps(data, indent=1))
        else:
            report.show(data, Console())
            if words:
                Console().print(words, highlight=False, soft_wrap=True)
