"""Progress of long commands: a live line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two plain lines.
INTERVAL = 10.0


@contextlib.contextmanager
def activity(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` while something of unknown length goes on; yields what changes the text."""
    if _live(console):
        with console.status(text) as status:
            yield status.update
        return
    shown = text
    start = time.monotonic()

    def update(new: str) -> None:
        nonlocal shown
        shown = new

    _print(console, text)
    with _every(INTERVAL, lambda: _print(console, f"{shown}: {_clock(start)}")):
        yield update


class Steps:
    """Steps of known number, in named parts. Enter it, then :meth:`part` and :meth:`done`."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._name, self._size, self._in_part = "", 0, 0
        self._start = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> Steps:
        if _live(self._console):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._stack.enter_context(self._bar)
            self._task = self._bar.add_task("", total=self._total)
        else:
            self._stack.enter_context(_every(INTERVAL, self._say))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def expect(self, total: int) -> None:
        """Set the number of steps, once more is known."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def part(self, name: str, size: int) -> None:
        """Begin a part of ``size`` steps."""
        self._name, self._size, self._in_part = name, size, 0
        if self._bar is not None:
            self._bar.update(self._task, description=name)
        else:
            self._say()

    def done(self) -> None:
        """Count one step."""
        self._done += 1
        self._in_part += 1
        if self._bar is not None:
            self._bar.advance(self._task)

    def _say(self) -> None:
        line = f"{self._name}: step {self._in_part} of {self._size}; "
        line += f"{self._done} of {self._total} in {_clock(self._start)}"
        if self._done:
            passed = time.monotonic() - self._start
            left = passed / self._done * (self._total - self._done)
            line += f", about {left:.0f} s left"
        _print(self._console, line)


def _live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _clock(start: float) -> str:
    return f"{time.monotonic() - start:.0f} s"


@contextlib.contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call again and again from a thread of its own while this is entered."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            call()

    thread = threading.Thread(target=run, daemon=True, name="liteattention-progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
