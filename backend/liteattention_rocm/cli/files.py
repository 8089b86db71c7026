"""How commands write their results: checked before the work, whole or not at all, none lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType

from .text import unwritable


class Terminated(KeyboardInterrupt):
    """SIGTERM: what is under way stops as it does for Ctrl-C, and keeps what there is."""


def exit_code(error: KeyboardInterrupt) -> int:
    """What a shell expects of a command that a signal ended."""
    number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    return 128 + number


def problem(folder: Path) -> str | None:
    """Why nothing could be written into ``folder``, which need not exist; None if it could be.

    It is tried: permissions and mount options alone do not tell. Nothing is left behind.
    """
    nameless = unwritable(folder)
    if nameless is not None:
        return nameless
    try:
        if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
            return f"{str(folder)!r} is no folder"
        there = folder
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            return f"{str(there)!r} is a file, so that there can be no folder {str(folder)!r}"
        with tempfile.NamedTemporaryFile(dir=there, prefix=".liteattention-") as file:
            file.write(bytes(4096))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return f"cannot write into {str(folder)!r}: {why}"
    return None


def file_problem(path: Path) -> str | None:
    """Why ``path`` could not be written as a file, None if it could be."""
    if path.is_dir():
        return f"{str(path)!r} is a folder, a file is needed"
    return unwritable(path) or problem(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a file to write, which replaces ``path`` if all goes well.

    It has the suffix of ``path``, which libraries choose the format by, and the permissions of an
    earlier file. Folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, or leave ``path`` as it was."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def set_aside(folder: Path, names: Iterable[str], into: Path | None = None) -> Path | None:
    """Move earlier results out of the way, into a folder beside them that is named by their time.

    ``into``: what an earlier call returned for others of these results, which they join.

    Returns:
        That folder, None if none of ``names`` exists.
    """
    there = [path for name in names if (path := folder / name).is_file()]
    if not there:
        return None
    newest = max(path.stat().st_mtime for path in there)
    base = f"earlier-{datetime.fromtimestamp(newest):%Y%m%d-%H%M%S}"
    target, number = into or folder / base, 1
    while into is None and target.exists():
        number += 1
        target = folder / f"{base}-{number}"
    target.mkdir(exist_ok=True)
    for path in there:
        shutil.move(path, target / path.name)
    return target


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, so that a stopped command keeps what it has."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
