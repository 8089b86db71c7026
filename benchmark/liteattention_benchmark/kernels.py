"""Attention kernels side by side: one process, the same tensors, in random turns.

A *cell* is a shape, a *contender* one implementation of it. Every round runs each contender of a
cell once, in a new random order, because a GPU at its power limit is slower right after a hungry
contender; times are of device events around the call alone, after the L2 cache was overwritten
(which also hides the launch: what is timed is the device). Each row carries the error of the timed
contender's own output against float64 on sampled query rows.

Contenders that are not installed or cannot run a cell are reported with the reason.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .cells import Cell, Config, Decode, Host, kind_of
from .contenders import Job, make
from .peers import Maker, Unavailable
from .timing import flush_buffer, host_milliseconds, milliseconds


@dataclass(frozen=True)
class Row:
    """One contender in one cell. ``figure``: TFLOP/s, or TB/s of a decode cell, or None.

    Times in milliseconds. ``error``: norm of the difference to float64 over the norm, on sampled
    rows. ``absent``: why there is no time. ``matrix_percent``: share of the time in which the
    matrix units worked, from :mod:`.counters`, None if nobody counted. ``kept``: share of the tiles
    that a LiteAttention cell computes.
    """

    kind: str
    cell: str
    contender: str
    median_ms: float | None
    p25_ms: float | None
    p75_ms: float | None
    figure: float | None
    error: float | None
    absent: str
    matrix_percent: float | None = None
    kept: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return asdict(self)


def run(
    config: Config,
    device: torch.device,
    fa3_library: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    more: Mapping[str, Maker] | None = None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure every cell and return a row per contender.

    ``fa3_library``: the FlashAttention-3 library of a vLLM wheel, where the package
    ``flash_attn_interface`` is not installed. ``more``: further peers, see :func:`peers.given`.
    ``keep`` is called with the rows so far after each cell.
    """
    rows: list[Row] = []
    import torch._dynamo  # FlexAttention compiles anew for every shape, and there may be many

    with torch._dynamo.config.patch(recompile_limit=1 << 10):
        for cell in config.cells:
            progress(str(cell))
            job = make(cell, device, fa3_library, more or {})
            rows += _measure(cell, job, config, device)
            keep(rows)
            del job
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def _why(error: Exception) -> str:
    expected = isinstance(error, Unavailable | RuntimeError | ValueError | NotImplementedError)
    text = " ".join(str(error).split())
    return (text if expected and text else f"{type(error).__name__}: {text}")[:200]


def _measure(cell: Cell, job: Job, config: Config, device: torch.device) -> list[Row]:
    """Time the calls of a cell in random turns."""
    kind = kind_of(cell)
    absent = dict(job.absent)
    errors: dict[str, float] = {}
    for name, call in list(job.calls.items()):
        try:
            for _ in range(config.warmup):
                out = call()
            errors[name] = job.error(name, out)
        except Exception as error:  # a peer may raise anything: it is its row alone
            absent[name] = _why(error)
            del job.calls[name]
    host = isinstance(cell, Host)
    flush = flush_buffer(device) if config.cold_l2 and not host else None
    times: dict[str, list[float]] = {name: [] for name in job.calls}
    turns = random.Random(0)
    for _ in range(config.rounds):
        order = list(job.calls)
        turns.shuffle(order)
        for name in order:
            if host:
                times[name].append(host_milliseconds(job.calls[name], device))
            else:
                times[name].append(milliseconds(job.calls[name], device, flush))
    rows = []
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        figure = None
        if not isinstance(cell, Host):
            work = cell.bytes if isinstance(cell, Decode) else cell.flops
            figure = work / middle / 1e9
        quartiles = (middle, low, high)
        row = Row(kind, str(cell), name, *quartiles, figure, errors[name], "", kept=job.kept)
        rows.append(row)
    rows.sort(key=lambda row: row.median_ms or 0.0)
    return rows + [
        Row(kind, str(cell), name, None, None, None, None, None, why)
        for name, why in absent.items()
    ]
