"""The processors of this machine that a command may use, and how many threads they are for."""

from __future__ import annotations

import os


def available() -> int:
    """How many processors this process may run on: fewer than there are under taskset and cpusets.

    A hardware thread counts as one.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_reasons(threads: int) -> list[str]:
    """Say why so many threads are too many: those without a processor make the others wait."""
    there = available()
    if threads <= there:
        return []
    return [f"must be at most {there}, as many as there are processors for"]
