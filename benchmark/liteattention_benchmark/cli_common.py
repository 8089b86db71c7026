"""What commands of ``liteattention-rocm bench`` share: sizes, configurations, results kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console

from liteattention_rocm.cli import dimensions, files
from liteattention_rocm.cli.text import unwritable

Loaded = TypeVar("Loaded")


def shapes(texts: list[str], reasons: list[str]) -> tuple[tuple[int, int, int, int], ...]:
    """B,H,S,D of each text; what is wrong with them is added to ``reasons``."""
    found = [dimensions.parse(text, reasons) for text in texts]
    return tuple(each for each in found if each is not None)


def read_config(
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

    nameless = unwritable(config)
    if nameless is not None:
        reasons.append(f"--config: {nameless}")
        return config, None
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


@contextlib.contextmanager
def kept(out: Path | None, names: Sequence[str], console: Console) -> Iterator[None]:
    """Move earlier results aside; if the command is stopped, say what it leaves.

    If it ends before it has written anything, earlier results are moved back.
    """
    folder = None if out is None else out.parent if names == (out.name,) else out
    earlier = None if folder is None else files.set_aside(folder, names)
    if earlier is not None:
        console.print(f"earlier results: {earlier}", highlight=False, soft_wrap=True)
    try:
        with files.stoppable():
            yield
    except BaseException as error:
        left = [folder / name for name in names if folder and (folder / name).exists()]
        restored = ""
        if folder is not None and earlier is not None and not left:
            restored = _move_back(earlier, folder)
        if not isinstance(error, KeyboardInterrupt):
            if restored:
                console.print(f"nothing was written{restored}", highlight=False, soft_wrap=True)
            raise
        results = (
            f"incomplete results: {', '.join(map(str, left))}" if left else "nothing was written"
        )
        console.print(f"stopped; {results}{restored}", highlight=False, soft_wrap=True)
        raise typer.Exit(files.exit_code(error)) from error


def _move_back(earlier: Path, folder: Path) -> str:
    """Undo :func:`.files.set_aside`, and say so; what cannot be moved stays where it was named."""
    try:
        for path in earlier.iterdir():
            path.replace(folder / path.name)
        earlier.rmdir()
    except OSError as error:
        return f"; earlier results could not be moved back: {error}"
    return f"; earlier results are back in {folder}"


@contextlib.contextmanager
def kept_file(out: Path | None, console: Console) -> Iterator[None]:
    """:func:`kept` for a JSON file and the page beside it."""
    names = () if out is None else (out.name, out.with_suffix(".html").name)
    with kept(None if out is None else out.parent, names, console):
        yield
