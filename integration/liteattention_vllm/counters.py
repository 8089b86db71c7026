"""Counters of this backend's calls, one set per process.

vLLM spreads over processes and, where a platform ignores ``--attention-backend``, falls back to
another backend with one line in a log. These counters tell which code ran:
:func:`statistics` in the same process, and for the other processes a file each in the folder that
``LITEATTENTION_STATISTICS_DIR`` names. A file is shared memory, written by every call, so it is
right even after a process was killed.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

__all__ = ["DIRECTORY_VARIABLE", "CallCounters", "counters", "read_statistics", "statistics"]

DIRECTORY_VARIABLE = "LITEATTENTION_STATISTICS_DIR"

#: What is counted. ``layers`` are attention layers built, ``steps`` batches planned,
#: ``attention_calls`` and ``attention_rows`` layer calls and the query rows in them (padding
#: included), ``cache_writes`` calls that wrote keys and values.
NAMES = ("layers", "steps", "attention_calls", "attention_rows", "cache_writes")
LAYERS, STEPS, CALLS, ROWS, WRITES = range(len(NAMES))
_SUFFIX = ".vllm-calls"
_FORMAT = f"={len(NAMES)}q"


class CallCounters:
    """The counters of this process: int64 each, in memory or in a mapped file.

    Key: none. Owner: this module, one per process. Lifetime: the process. They are not reset by
    requests and hold nothing about them. Engines call from one thread per process, so there is no
    lock. A fork counts on in its own file.
    """

    def __init__(self) -> None:
        self._pid = -1
        self._values = memoryview(bytearray(struct.calcsize(_FORMAT))).cast("q")

    def add(self, index: int, amount: int = 1) -> None:
        """Count ``amount`` more of ``NAMES[index]``: ``LAYERS``, ``STEPS`` or ``WRITES``."""
        if self._pid != os.getpid():
            self._open()
        self._values[index] += amount

    def attended(self, rows: int) -> None:
        """Count a layer's call of ``rows`` query rows."""
        if self._pid != os.getpid():
            self._open()
        self._values[CALLS] += 1
        self._values[ROWS] += rows

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(zip(NAMES, self._values.tolist(), strict=True))

    def _open(self) -> None:
        self._pid = os.getpid()
        size = struct.calcsize(_FORMAT)
        folder = os.environ.get(DIRECTORY_VARIABLE)
        if not folder:
            self._values = memoryview(bytearray(size)).cast("q")
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(Path(folder) / f"{self._pid}{_SUFFIX}", "w+b") as file:
            file.truncate(size)
            self._values = memoryview(mmap.mmap(file.fileno(), size)).cast("q")


counters = CallCounters()


def statistics() -> dict[str, int]:
    """Return what this process has counted so far, by name (see ``NAMES``)."""
    return counters.as_dict()


def read_statistics(folder: Path | str) -> dict[int, dict[str, int]]:
    """Return what every process that ran with ``LITEATTENTION_STATISTICS_DIR=folder`` counted.

    By process id; processes that never built a layer of this backend are missing, and so are those
    that are making their file just now: they have counted nothing.
    """
    found = {path: path.read_bytes() for path in sorted(Path(folder).glob(f"*{_SUFFIX}"))}
    return {
        int(path.stem): dict(zip(NAMES, struct.unpack(_FORMAT, values), strict=True))
        for path, values in found.items()
        if values
    }
