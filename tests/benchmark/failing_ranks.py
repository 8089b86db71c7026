"""Processes that go wrong: without imports that take seconds in each of them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def fails(rank: int, *_: Any) -> None:
    """The second raises while the first would wait for long."""
    if rank == 1:
        raise ValueError("no such luck")
    time.sleep(600)


def is_killed(rank: int, *_: Any) -> None:
    """End as the system ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def outlives(_: int, note: str) -> None:
    """Ignore SIGINT, as ranks do, and note the process; then wait for the end of the parent."""
    from liteattention_benchmark import video_ranks

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    video_ranks.end_with_parent()
    with open(f"{note}.part", "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    os.replace(f"{note}.part", note)
    time.sleep(600)
