"""Whether something else kept the machine busy while videos were made, so that times say nothing.

Two signs are looked at, for the videos that were made in turns:

* the share of time that threads which could have computed waited for a processor, as Linux counts
  it for each thread (``/proc/PID/task/TID/schedstat``, second number);
* the time outside self-attention, a step: all configurations run the same code there, so where it
  differs, load differed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from .runs import Run

#: Share of waiting in the time of threads that could compute; more is a busy machine. A quiet one
#: has 1 % and less, one with twice as many busy threads as processors about half.
MOST_WAITED = 0.1
#: How far the times outside attention may be apart, as a share of the smallest.
MOST_APART = 0.15
BUSY = "machine was busy, no speed-ups"


@dataclass(frozen=True)
class Processor:
    """Seconds of processors that a process got, and that its threads waited for one; both of all
    threads together. ``waited`` is None where the system does not say it."""

    used: float
    waited: float | None

    def since(self, before: Processor) -> Processor:
        """What came on top of ``before``. Threads that ended meanwhile take their count along."""
        waited = None
        if self.waited is not None and before.waited is not None:
            waited = max(0.0, self.waited - before.waited)
        return Processor(max(0.0, self.used - before.used), waited)


def own() -> Processor:
    """What this process got until now."""
    return Processor(time.process_time(), _waited("self"))


def with_children() -> Processor:
    """What this process and all below it got until now."""
    used, waited = time.process_time(), _waited("self")
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has ended
            continue
        more = _waited(str(child.pid))
        used += times.user + times.system
        waited = None if waited is None or more is None else waited + more
    return Processor(used, waited)


def _waited(process: str) -> float | None:
    found = list(_delays(process))
    return sum(found) / 1e9 if found else None


def _delays(process: str) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            try:
                with open(f"/proc/{process}/task/{thread}/schedstat") as file:
                    yield int(file.read().split()[1])
            except (OSError, IndexError, ValueError):  # ended, or a kernel without these counts
                continue
    except OSError:
        return


@dataclass
class Meter:
    """Seconds of the wall clock and of processors since it was started or last read.

    Owner: who measures. ``clock`` and ``processor`` are replaced where tests say what time it is.
    """

    clock: Callable[[], float] = time.perf_counter
    processor: Callable[[], Processor] = own
    _at: float = field(default=0.0, init=False)
    _had: Processor = field(default=Processor(0.0, 0.0), init=False)

    def start(self) -> None:
        """Start over. What it takes to look is in no time that it gives."""
        self._had = self.processor()
        self._at = self.clock()

    def read(self) -> tuple[float, Processor]:
        """Seconds since :meth:`start`, and what the process got of processors in them."""
        seconds = self.clock() - self._at
        return seconds, self.processor().since(self._had)


def signs(runs: Sequence[Run], same_outside: Mapping[str, bool]) -> list[str]:
    """What says that the machine was busy while these videos were made in turns; empty if nothing.

    Args:
        runs: all of one prompt, seed and repeat.
        same_outside: by configuration, whether it runs the others' code outside self-attention.
    """
    found = []
    shares = {
        run.configuration: run.waited / (run.waited + run.processor)
        for run in runs
        if run.waited is not None and run.waited + run.processor > 0
    }
    if shares and max(shares.values()) > MOST_WAITED:
        name = max(shares, key=lambda each: shares[each])
        found.append(
            f"threads waited for a processor {shares[name]:.0%} of their time ({name}; at most "
            f"{MOST_WAITED:.0%} on a quiet machine)"
        )
    outside = {
        run.configuration: run.outside / len(run.steps)
        for run in runs
        if run.outside is not None and same_outside[run.configuration]
    }
    if len(outside) > 1:
        least, most = (pick(outside, key=lambda each: outside[each]) for pick in (min, max))
        if outside[most] > (1 + MOST_APART) * outside[least]:
            found.append(
                f"the code outside self-attention, the same in all, took {outside[least]:.3g} s a "
                f"step in {least} and {outside[most]:.3g} s in {most}"
            )
    return found
