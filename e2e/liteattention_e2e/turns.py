"""Several videos made in turns: each goes on for one denoising step, then the next one does.

A machine that slows down or speeds up meanwhile does so for all of them alike. A pipeline's
``__call__`` cannot be left in its middle by ordinary means, so each runs in a greenlet: a stack of
its own in the same thread. Threads would do as well, but OpenMP gives each of them a team of
worker threads, and those of the videos that wait would spin beside the one that computes.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from greenlet import GreenletExit, greenlet

T = TypeVar("T")


class Task(Generic[T]):
    """Work that hands over now and then.

    Key: none. Owner: who calls :func:`take`. Lifetime: until it has returned or was stopped.

    Args:
        work: called with no argument, in a stack of its own; calls :meth:`hand_over` where another
            task may go on.
        turn: entered around every turn, so that what tasks share is in this one's state.
    """

    def __init__(
        self, work: Callable[[], T], turn: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._stack = greenlet(work)
        self._stack.gr_context = contextvars.copy_context()
        self._turn = turn
        self._result: T | None = None

    def hand_over(self) -> None:
        """End this turn; returns at the beginning of the next one. To be called by the work."""
        self._stack.parent.switch()

    def go_on(self) -> bool:
        """Run until the work hands over or returns; True if it has returned."""
        # Gradients are off in the whole thread while any task runs: each leaves the mode as it
        # found it, and they do not end in the order in which they began.
        with self._turn(), torch.no_grad():
            self._stack.parent = greenlet.getcurrent()
            found = self._stack.switch()
        if self._stack.dead:
            self._result = found
        return bool(self._stack.dead)

    @property
    def result(self) -> T:
        """What the work returned."""
        assert self._stack.dead
        return self._result  # type: ignore[return-value]

    def stop(self) -> None:
        """Unwind work that was begun and has not returned."""
        if self._stack:  # begun, and not over
            with torch.no_grad():
                self._stack.parent = greenlet.getcurrent()
                self._stack.throw(GreenletExit)


def take(tasks: Sequence[Task[T]]) -> Iterator[T]:
    """Let the tasks go on in turns and yield what each returns, as soon as it has.

    The order is another one in every round, so none always follows the same other one. If a task
    fails, or nobody asks for more results, the others are stopped.
    """
    left = list(tasks)
    number = 0
    try:
        while left:
            first = number % len(left)
            for task in [*left[first:], *left[:first]]:
                if task.go_on():
                    left.remove(task)
                    yield task.result
            number += 1
    finally:
        for task in left:
            task.stop()
