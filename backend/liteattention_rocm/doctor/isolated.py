"""Steps in processes of their own, so that one that ends its process costs only itself.

A kernel that faults leaves a GPU's context unusable, or ends the process ("Memory access fault by
GPU node"), and one that hangs never answers. What runs here loses that one step and goes on with
the next, in a new process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar, cast

import torch

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: A process that starts imports torch: 5 seconds, minutes from a slow disk.
_START_SECONDS = 300.0
#: So many silent steps in a row, and a GPU answers nobody any more: the rest is left out.
_MOST_SILENT = 2
#: Seconds in which a killed process ends, unless the driver holds it.
_END_SECONDS = 10.0
#: Lines of what a lost process printed last that are worth reading.
_LAST_LINES = 6


class Lost(NamedTuple):
    """A step whose process ended, or was ended, before it answered.

    ``silent``: it was ended, having said nothing for too long.
    """

    why: str
    silent: bool = False


def each(
    work: Callable[[Item], Answer], items: Sequence[Item], seconds: Callable[[Item], float]
) -> Iterator[Answer | Lost]:
    """Yield ``work(item)`` of each item, computed in one other process while that lives.

    A process is given up after an item that it did not survive, that took longer than
    ``seconds(item)``, or that left the current GPU in error. What it prints is not shown; the last
    lines of a lost one are part of why. After two items in a row that took too long, the rest is
    lost without being tried.

    Args:
        work: a function of a module. It should not raise: what it raises ends its process.
        items: what it is given; they and the answers can be pickled.
        seconds: how long an item may take. The start of a process does not count; it has
            ``_START_SECONDS``.
    """
    at = silent = 0
    while at < len(items) and silent < _MOST_SILENT:
        with _Process(work, items[at:]) as process:
            usable = True
            while usable and at < len(items):
                answer, usable = process.answer(seconds(items[at]))
                at += 1
                silent = silent + 1 if isinstance(answer, Lost) and answer.silent else 0
                yield cast("Answer | Lost", answer)
    for _ in items[at:]:
        yield Lost(f"left out, as the last {_MOST_SILENT} gave no answer")


def each_begun(
    work: Callable[[Item], Answer],
    items: Sequence[Item],
    seconds: Callable[[Item], float],
    begin: Callable[[Item], None],
    apart: bool,
) -> Iterator[tuple[Item, Answer | Lost]]:
    """Yield each item and its answer, after ``begin(item)``; see :func:`each`.

    ``apart``: in other processes, else in this one, without limits.
    """
    answers: Iterator[Answer | Lost] = each(work, items, seconds) if apart else map(work, items)
    for item in items:
        begin(item)
        yield item, next(answers)


class _Process:
    """The other process. Owner: :func:`each`; leaving it ends all that it has started."""

    def __init__(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> None:
        # spawn: a GPU's run-time does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._printed = tempfile.NamedTemporaryFile(prefix="liteattention-")  # noqa: SIM115
        self._link, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(theirs, self._printed.name, work, items)
        )
        self._process.start()
        self._up = False
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._link.close()
        self._printed.close()

    def answer(self, seconds: float) -> tuple[object, bool]:
        """Return the next answer, and whether the process is fit for more."""
        try:
            if not self._up:
                if not self._arrived(_START_SECONDS):
                    why = f"its process did not start within {_START_SECONDS:.0f} s"
                    return Lost(why, silent=True), False
                self._up = self._link.recv()
            if not self._arrived(seconds):
                why = f"no answer within {seconds:.0f} s, so it was ended"
                return Lost(why, silent=True), False
            answer, usable = self._link.recv()
        except (EOFError, OSError):  # it ended, maybe within a message
            self._process.join(_END_SECONDS)
            return Lost(self._death()), False
        return answer, usable

    def _arrived(self, seconds: float) -> bool:
        """Wait for a message, and end the process if none comes."""
        if self._link.poll(seconds):
            return True
        self._end()
        return False

    def _death(self) -> str:
        code = self._process.exitcode
        if code is None:
            how = "and is held by the driver"
        else:
            how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = self._printed.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = f": {' / '.join(lines[-_LAST_LINES:])}" if lines else ""
        return f"its process ended {how}{said}"

    def _end(self) -> None:
        if self._process.pid and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(_END_SECONDS)


def _serve(
    link: Connection, printed: str, work: Callable[[Item], Answer], items: Sequence[Item]
) -> None:
    os.setsid()  # a group of its own, which is ended as a whole
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    link.send(True)
    for item in items:
        answer = work(item)
        usable = not _gpu_in_error()
        link.send((answer, usable))
        if not usable:
            return


def _gpu_in_error() -> bool:
    """Whether the current GPU answers this process no more, as after a kernel that faulted."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
