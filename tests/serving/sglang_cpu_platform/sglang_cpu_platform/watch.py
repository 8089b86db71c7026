"""Counts what our backend computes in a server's processes, and breaks it when a test asks.

A server is watched if ``LITEATTENTION_TEST_WATCH`` names a folder. Each of its processes that
builds our attention writes ``<pid>.calls`` there, :data:`COUNTS` as 64-bit integers; a memory map,
so that it outlives a killed process. The folder's file ``fault``, if there is one, holds the number
of a fault of :data:`FAULTS`: tests must see wrong tokens then.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "LITEATTENTION_TEST_WATCH"
#: Calls (one per layer and step), their query rows, calls of decode steps only, calls with a
#: cached prefix under several new rows, calls with single rows beside several new rows.
COUNTS = ("calls", "rows", "decode", "prefix", "mixed")
#: What can be broken.
FAULTS = ("none", "no causal mask", "wrong slot", "swapped GQA heads", "scale x 1.02")


def read(folder: Path) -> dict[int, dict[str, int]]:
    """Return the counts by process id."""
    form = f"{len(COUNTS)}q"
    return {
        int(file.stem): dict(zip(COUNTS, struct.unpack(form, file.read_bytes()), strict=True))
        for file in folder.glob("*.calls")
    }


def set_fault(folder: Path, fault: str) -> None:
    """Break every later call of the watched processes in this way; "none" heals them."""
    (folder / "fault").write_bytes(bytes([FAULTS.index(fault)]))


def register() -> None:
    """Wrap the creation of our backend in this process, if it is to be watched."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from liteattention_sglang import srt

    srt.register()
    create = ATTENTION_BACKENDS[srt.BACKEND_NAME]

    def watched(runner: Any) -> Any:
        backend = create(runner)
        from liteattention_sglang import srt_attention

        watch = _Watch(Path(folder), srt_attention.attention_paged)
        srt_attention.attention_paged = watch
        return backend

    ATTENTION_BACKENDS[srt.BACKEND_NAME] = watched


class _Watch:
    def __init__(self, folder: Path, function: Callable[..., Any]) -> None:
        size = 8 * len(COUNTS)
        path = folder / f"{os.getpid()}.calls"
        path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._counts = memoryview(self._memory).cast("q")
        self._fault = folder / "fault"
        self._function = function
        self._kinds: tuple[Any, tuple[int, int, int]] = (None, (0, 0, 0))

    def __call__(self, q: Any, k: Any, v: Any, batch: Any, **options: Any) -> Any:
        if self._kinds[0] is not batch:  # the layers of a step share it
            rows = batch.q_start.diff()
            several = rows > 1
            self._kinds = (
                batch,
                (
                    int(batch.max_q_len == 1),
                    int((several & (batch.kv_len > rows)).any()),
                    int(bool(several.any()) and bool((rows == 1).any())),
                ),
            )
        rows = int(batch.q_start[-1])
        for i, count in enumerate((1, rows, *self._kinds[1])):
            self._counts[i] += count
        number = self._fault.read_bytes()[0] if self._fault.exists() else 0
        fault = FAULTS[number]
        if fault == "no causal mask":
            options["causal"] = False
        elif fault == "wrong slot":
            batch = _misplaced(batch, k.shape[1])
        elif fault == "swapped GQA heads":
            k, v = k.flip(2), v.flip(2)
        elif fault == "scale x 1.02":
            options["scale"] *= 1.02
        return self._function(q, k, v, batch, **options)


def _misplaced(batch: Any, page_size: int) -> Any:
    """Let every request's last page be the one before it (its first: page 0, which is nobody's)."""
    table = batch.page_table.clone()
    last = (batch.kv_len.long() - 1) // page_size
    for row, page in enumerate(last.tolist()):
        table[row, page] = table[row, page - 1] if page else 0
    return type(batch)(
        batch.q_start, batch.kv_len, table, max_q_len=batch.max_q_len, max_kv_len=batch.max_kv_len
    )
