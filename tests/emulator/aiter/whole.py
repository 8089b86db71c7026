"""Whole launches on the modelled chip, beside what ``published`` has of an MI300X.

What is fitted: ``FULL`` to the occupancy of the longest of the counted launches; the clock law to
the six times of the longest of the timed shapes. Everything else is modelled without them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from liteattention_emulator.memory_constants import parameters
from liteattention_emulator.recording import Recording
from liteattention_emulator.timing import Chip, Cost, Launch, Replay, launch, replay

from . import public_kernel
from .cases import prepare
from .prefill import Prefill
from .published import COUNTED, LONGEST, ROUNDINGS, TIMES

Shape = tuple[int, int, int]
BLOCK = 64
CUS = Chip().cus
LENGTHS = (1536, 4096)
"""Keys of the replays that a workgroup's cost is drawn through."""
FULL = 0.925
"""Share of a launch's time for which counters see a CU hold a workgroup, over the modelled share.
Fitted to the launch of 16384 rows; the same within 0.2 % at 8192 and 4096."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """rows: of a workgroup. longest: the replay of most keys."""

    rows: int
    cost: Cost
    longest: Replay

    @property
    def use(self) -> float:
        """The matrix cores' share of the time of its loop, 0 to 1."""
        return self.longest.use


def _record(file: Path, shape: Prefill) -> Recording:
    with prepare(file, shape) as ready:
        found = ready.run(record=0).recording
    assert found is not None
    return found


# ---- causal launches and their counters


@dataclass(frozen=True, slots=True)
class Causal:
    """A causal launch of AITER's rtna kernel at B 16, H 16. matrix: clk of all SIMDs."""

    found: Launch
    matrix: float
    flops: int

    @property
    def inside(self) -> float:
        """Matrix cores' share of the time for which CUs hold workgroups."""
        return self.matrix / (4 * self.found.held)

    @property
    def matrix_use(self) -> float:
        """Of the launch, per cent, as modelled."""
        return 100 * self.found.matrix_use(self.matrix)


@cache
def _causal_points(root: Path) -> tuple[tuple[int, int, float], ...]:
    """Of some lengths: length, clk of a workgroup, clk of its matrix instructions on four SIMDs."""
    points = []
    for length in (512, 1024, 2048, 4096):
        file = root / "fmha_v3_fwd/MI300/fwd_hd128_bf16_causal_rtna.co"
        recording = _record(file, Prefill(((length, length),), 1, 1))
        found = replay(recording, window=(0, len(recording.waves[0].steps)))
        points.append((length, found.clocks, found.matrix))
    return tuple(points)


def causal(root: Path, length: int) -> Causal:
    """A workgroup takes a tile of either end of a sequence: all have the same work."""
    points = _causal_points(root)
    cost = Cost.of([(n, clocks) for n, clocks, _ in points])
    matrix = Cost.of([(n, clocks) for n, _, clocks in points])
    count = 16 * 16 * length // 512
    found = launch([cost(length)] * count)
    return Causal(found, count * matrix(length), round(count * matrix(length) * 512))


# ---- dense launches and their times


@cache
def aiter(root: Path, rounding: str) -> Kernel:
    """AITER's kernel of MI300."""
    file = root / f"fmha_v3_fwd/MI300/fwd_hd128_bf16_{rounding}.co"
    return _kernel(256, [_record(file, Prefill(((256, keys),), 1, 1)) for keys in LENGTHS])


@cache
def public(source: Path, rounding: str) -> Kernel:
    """That of moonmath-ai/amd-kernels."""
    with tempfile.TemporaryDirectory() as folder:
        file = public_kernel.build(source, rounding, Path(folder))
        recordings = [public_kernel.record(file, keys)[0] for keys in LENGTHS]
    return _kernel(public_kernel.ROWS, recordings)


def _kernel(rows: int, recordings: Sequence[Recording]) -> Kernel:
    found = [replay(recording) for recording in recordings]
    points = [(keys / BLOCK, each.clocks) for keys, each in zip(LENGTHS, found, strict=True)]
    return Kernel(rows, Cost.of(points), found[-1])


def clocks_of(kernel: Kernel, shape: Shape, *, split: bool) -> float:
    """clk of a dense launch of (B, H, S); ``split``: with the public kernel's passes and tail."""
    batch, heads, length = shape
    tiles, blocks = batch * heads * -(-length // kernel.rows), -(-length // BLOCK)
    whole = kernel.cost(blocks)
    if not split:
        return launch([whole] * tiles).clocks
    packing = 2 * 2 * 128 * batch * heads * length / parameters()["hbm_rate"]
    tail = tiles % CUS
    parts, cost = _tail_parts(tail, blocks)
    work = [whole] * (tiles - tail) + [kernel.cost(blocks / parts)] * (tail * parts)
    return (
        packing
        + launch(work if parts > 1 else [whole] * tiles).clocks
        + cost * (kernel.cost.per_block if parts > 1 else 0)
    )


def _tail_parts(tail: int, blocks: int) -> tuple[int, int]:
    """Parts of a tail tile along the keys, as their write-up says, and blocks' time for a merge."""
    merge = 3
    if tail == 0 or tail > 0.95 * CUS or blocks < 48:
        return 1, merge
    most = max(min(2 * CUS // tail, blocks // 4), 1)
    spans = {parts: -(-tail * parts // CUS) * -(-blocks // parts) for parts in range(1, most + 1)}
    return min(spans, key=lambda parts: spans[parts]), merge


# ---- clocks


@dataclass(frozen=True, slots=True)
class ClockLaw:
    """GHz = ``at_full`` * use ** ``power``, use of the matrix cores in the loop.

    ``public``: how much faster the public kernel is clocked at the same use.
    """

    at_full: float
    power: float
    public: float

    def of(self, kernel: Kernel, *, public: bool) -> float:
        """GHz."""
        return self.at_full * kernel.use**self.power * (self.public if public else 1)


def ghz(kernel: Kernel, milliseconds: float, shape: Shape, *, split: bool) -> float:
    """The clock at which the modelled clk take a measured time."""
    return clocks_of(kernel, shape, split=split) / milliseconds / 1e6


def clock_law(root: Path, source: Path) -> ClockLaw:
    """Fitted to the six times of ``LONGEST``."""
    points, ours = [], []
    for rounding, (mine, theirs) in zip(ROUNDINGS, TIMES[LONGEST], strict=True):
        kernel, other = aiter(root, rounding), public(source, rounding)
        points.append((math.log(kernel.use), math.log(ghz(kernel, theirs, LONGEST, split=False))))
        ours.append((other, ghz(other, mine, LONGEST, split=True)))
    power, at_full = np.polyfit(*np.array(points).T, 1)
    law = ClockLaw(math.exp(at_full), float(power), 1.0)
    faster = [math.log(clock / law.of(kernel, public=False)) for kernel, clock in ours]
    return ClockLaw(law.at_full, law.power, math.exp(sum(faster) / len(faster)))


@dataclass(frozen=True, slots=True)
class Row:
    """AITER's time over the public kernel's: measured; by clk alone; with clocks."""

    shape: Shape
    rounding: str
    measured: float
    in_clk: float
    in_time: float

    @property
    def fitted(self) -> bool:
        """The clock law was drawn through this shape."""
        return self.shape == LONGEST


def rows(root: Path, source: Path) -> list[Row]:
    """All 27."""
    law, found = clock_law(root, source), []
    for shape, times in TIMES.items():
        for rounding, (mine, theirs) in zip(ROUNDINGS, times, strict=True):
            kernel, other = aiter(root, rounding), public(source, rounding)
            clocks = clocks_of(kernel, shape, split=False) / clocks_of(other, shape, split=True)
            speed = law.of(other, public=True) / law.of(kernel, public=False)
            found.append(Row(shape, rounding, theirs / mine, clocks, clocks * speed))
    return found


def own_rows(root: Path) -> list[tuple[Shape, str, float, float]]:
    """AITER's times over its own at ``LONGEST``: shape, rounding, measured, modelled.

    No clock is in it: a kernel's is taken as the same at every shape.
    """
    return [
        (
            shape, rounding, theirs / longest,
            clocks_of(aiter(root, rounding), shape, split=False)
            / clocks_of(aiter(root, rounding), LONGEST, split=False),
        )
        for shape, times in TIMES.items() if shape != LONGEST
        for rounding, (_, theirs), (_, longest) in zip(
            ROUNDINGS, times, TIMES[LONGEST], strict=True
        )
    ]  # fmt: skip


def counted(root: Path) -> list[tuple[int, Causal]]:
    """The counted launches, modelled."""
    return [(length, causal(root, length)) for length in COUNTED]
