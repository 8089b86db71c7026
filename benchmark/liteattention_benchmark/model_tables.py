"""Tables of docs/model.md about our kernels: the cycle model on workgroups of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from liteattention_emulator.timing import Replay, Work, replay, spread, work
from liteattention_emulator.timing.report import WORK_HEAD, work_row
from liteattention_rocm.cli import tables

from . import launches
from .cells import Lite
from .hbm import HBM_LATENCY, Need, need
from .model import BLOCK, Case, record

KEYS = 4096
GROUPED = {"kv_heads": 8}
CASES = {
    "dense, D = 128": Case((1, 24, KEYS, 128), "dense", "rtne"),
    "dense, D = 128, RTNA": Case((1, 24, KEYS, 128), "dense", "rtna"),
    "dense, D = 128, RTZ": Case((1, 24, KEYS, 128), "dense", "rtz"),
    "lite, D = 128, every tile kept": Case((1, 24, KEYS, 128), "lite", "rtne"),
    "weigh, D = 128": Case((1, 24, KEYS, 128), "weigh", "rtne"),
    "dense, D = 64, two workgroups": Case((1, 24, KEYS, 64), "dense", "rtne"),
    "lite, D = 64, every tile kept": Case((1, 24, KEYS, 64), "lite", "rtne"),
    "weigh, D = 64": Case((1, 24, KEYS, 64), "weigh", "rtne"),
    "prefill, D = 128": Case((1, 32, KEYS, 128), "prefill", "rtne", **GROUPED),
    "prefill, D = 64, two workgroups": Case((1, 32, KEYS, 64), "prefill", "rtne", **GROUPED),
    "prefill, D = 256": Case((1, 32, KEYS, 256), "prefill", "rtne", **GROUPED),
}
DECODE = {
    f"decode, D = {dim}, {group} heads to a key head": Case(
        (1, 8 * group, KEYS, dim), "decode", "rtne", **GROUPED
    )
    for dim in (64, 128, 256)
    for group in (4, 8)
}


LISTED = "weigh, D = 128"
"""Whose workgroups the lists of the last table are for."""
#: One of four GPUs that share 12 heads, and of eight that share 40, have 3 and 5.
SHAPES = (
    (1, 3, 32760),
    (1, 5, 32760),
    (1, 12, 16384),
    (1, 12, 32760),
    (2, 24, 16384),
    (1, 5, 75600),
    (1, 40, 32760),
    (1, 40, 75600),
)
_Pattern = Literal["uniform", "clustered", "uneven"]
LISTS: tuple[tuple[float, _Pattern], ...] = (
    (0.0, "uniform"),
    (0.42, "clustered"),
    (0.42, "uneven"),
    (0.8, "uneven"),
)


PREFILL = "prefill, D = 128"
"""Whose workgroups the table of prefill launches is for."""
#: Rows and keys of a request, query heads and key heads: a GPU of eight that share a model with 64
#: and 8 heads, and one alone with 32 and 8.
CHUNKS = (
    (512, 33280, 8, 1),
    (2048, 34816, 8, 1),
    (8192, 40960, 8, 1),
    (2048, 2048, 8, 1),
    (8192, 8192, 8, 1),
    (512, 8704, 32, 8),
    (2048, 34816, 32, 8),
    (512, 512, 32, 8),
    (2048, 2048, 32, 8),
    (8192, 8192, 32, 8),
)


@dataclass(frozen=True)
class Row:
    """A replay of the workgroups that a CU holds.

    span: its time at the open constants' bounds, over the time.
    """

    name: str
    result: Replay
    per_block: float | None
    span: tuple[float, float] | None

    @property
    def clocks_per_block(self) -> float | None:
        """clk of the first wave per 64 keys."""
        return launches.clocks_of_block(self.result, self.per_block)


@dataclass(frozen=True)
class DecodeRow:
    """Two decode workgroups of a CU, alone with HBM's latency, and with its share of HBM's rate."""

    name: str
    alone: Replay
    saturated: Replay
    need: Need


def run(
    cases: dict[str, Case], ranges: bool, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Record and replay; ``ranges``: also over the bounds of the open constants."""
    rows = []
    for name, case in cases.items():
        say(name)
        found, per_block = record(case)
        result = replay(found)
        moves = [0.0]
        if ranges:
            moves += [at for each in spread(found) for at in (each.at_low, each.at_high)]
        span = (1 + min(moves), 1 + max(moves)) if ranges else None
        rows.append(Row(name, result, per_block, span))
    return rows


def run_decode(
    cases: dict[str, Case], say: Callable[[str], None] = lambda _: None
) -> list[DecodeRow]:
    """Record and replay pairs of decode workgroups."""
    rows = []
    for name, case in cases.items():
        say(name)
        found, _ = record(case)
        wanted = need()
        alone = replay(found, {"l2_latency": HBM_LATENCY})
        shared = {"l2_latency": HBM_LATENCY, "l2_bytes": wanted.rate}
        rows.append(DecodeRow(name, alone, replay(found, shared), wanted))
    return rows


def clocks(rows: Sequence[Row]) -> list[str]:
    """How long they take."""
    lines = []
    for row in rows:
        per_matrix, block = row.result.per_matrix or 0.0, row.clocks_per_block
        span = "" if row.span is None else " to ".join(f"{per_matrix * x:.1f}" for x in row.span)
        use = f"{row.result.use:.0%}"
        cells = [row.name, f"{per_matrix:.1f}", span, use, "" if block is None else f"{block:.0f}"]
        lines.append(cells)
    head = ["kernel", "clk per 32x32x8", "over the open constants", "matrix cores in use"]
    return tables.markdown([*head, "clk per wave and 64 keys"], lines)


def spent(rows: Sequence[Row]) -> list[str]:
    """What their flops take."""
    found: list[tuple[str, Work | None]] = [(row.name, work(row.result)) for row in rows]
    lines = [[name, *work_row(each)] for name, each in found if each is not None]
    return tables.markdown(["kernel", *WORK_HEAD], lines)


def lists(rows: Sequence[Row], say: Callable[[str], None] = lambda _: None) -> list[str]:
    """clk of launches over those of evenly spread work: no order, whole lists, and cut ones."""
    row = next(row for row in rows if row.name == LISTED)
    assert row.clocks_per_block is not None
    cost = launches.cost_of(row.result, row.clocks_per_block, KEYS // BLOCK)
    lines = []
    for (batch, heads, length), (sparsity, pattern) in product(SHAPES, LISTS):
        cell = Lite(
            batch=batch, heads=heads, length=length, head_dim=128, sparsity=sparsity,
            pattern=pattern,
        )  # fmt: skip
        say(f"lists of {cell}")
        work = [launches.work_of_lists(cell, order) for order in launches.ORDERS]
        even = launches.even(work[0].blocks, cost)
        ratios = [launches.clocks(each, cost) / even for each in work]
        shape = f"{batch}, {heads}, {length:,}"
        lines.append([shape, f"{sparsity:.0%} {pattern}", *(f"{ratio:.3f}" for ratio in ratios)])
    return tables.markdown(["B, H, S", "skipped", "without an order", "whole", "cut"], lines)


def prefill(rows: Sequence[Row]) -> list[str]:
    """clk of prefill launches, with whole tiles and in parts along the keys."""
    row = next(row for row in rows if row.name == PREFILL)
    assert row.clocks_per_block is not None
    cost = launches.cost_of(row.result, row.clocks_per_block, KEYS // BLOCK)
    lines = []
    for q_len, kv_len, heads, kv_heads in CHUNKS:
        shape = (1, q_len, kv_len, heads, kv_heads, 128)
        whole, planned = (launches.work_of_prefill(*shape, splits=splits) for splits in (1, 0))
        taken = [launches.clocks(each, cost) for each in (whole, planned)]
        even = launches.even(whole.blocks, cost)
        lines.append([
            f"{q_len:,} of {kv_len:,}", f"{heads} on {kv_heads}",
            f"{np.count_nonzero(whole.blocks):,}", f"{np.count_nonzero(planned.blocks):,}",
            *(f"{clocks / even:.2f}" for clocks in taken), f"{taken[0] / taken[1]:.2f}",
        ])  # fmt: skip
    head = ["rows of keys", "heads", "tiles", "workgroups", "whole tiles", "as planned", "gain"]
    return tables.markdown(head, lines)


def decode(rows: Sequence[DecodeRow]) -> list[str]:
    """What decode has under way, beside what HBM asks for."""
    lines = []
    for row in rows:
        flight, full = row.alone.flight, row.saturated.flight
        lines.append(
            [
                row.name,
                f"{flight.fetched_under_way / 1024:.0f} KB",
                f"{flight.fetched_under_way / row.need.needed:.0f}",
                f"{flight.rate:.1f}",
                f"{full.fetched_under_way / 1024:.0f} KB",
                f"{full.rate:.1f}",
            ]
        )
    head = ["", "under way", "of what HBM needs, times", "B/clk", "at HBM's rate", "B/clk"]
    return tables.markdown(head, lines)


def to_markdown(
    rows: Sequence[Row], decoded: Sequence[DecodeRow], spread_of_launches: Sequence[list[str]]
) -> str:
    """All tables."""
    parts = [clocks(rows), spent(rows)] if rows else []
    parts += [table for table in spread_of_launches if table]
    return "\n\n".join("\n".join(part) for part in [*parts, decode(decoded)])
