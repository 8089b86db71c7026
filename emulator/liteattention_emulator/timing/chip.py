"""From clk of workgroups to clk of a launch: rounds, tails, workgroups of unequal length.

No clock, so no time: ``Launch.microseconds`` asks for one. A workgroup's clk come from replays
(``Cost``), which know one CU alone; what CUs do to each other is the memory model's
(``liteattention_emulator.memory_model``) and is not in here.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from liteattention_emulator.memory_constants import parameters

REGISTERS, LDS_BYTES, SIMDS, MOST_WAVES = 512, 65536, 4, 8
"""Of a CU: vector registers of a lane and SIMD, LDS, SIMDs, waves of a SIMD (AMD, CDNA3 ISA)."""
_GRANULE = 8


def residency(registers: int, lds_bytes: int, waves: int) -> int:
    """Workgroups that a CU holds: AGPRs and VGPRs of a lane together, bytes, waves of one.

    Raises ValueError for one that no CU holds.
    """
    each = -(-max(registers, 1) // _GRANULE) * _GRANULE
    waves_of_simd = min(MOST_WAVES, REGISTERS // each)
    held = waves_of_simd * SIMDS // waves
    if lds_bytes:
        held = min(held, LDS_BYTES // lds_bytes)
    if held < 1:
        raise ValueError(
            f"no CU holds a workgroup of {waves} waves, {registers} registers and {lds_bytes} "
            "bytes of LDS"
        )
    return held


@dataclass(frozen=True, slots=True)
class Cost:
    """clk of a workgroup: ``fixed`` for its beginning and end, and ``per_block`` of its loop."""

    fixed: float
    per_block: float

    def __call__(self, blocks: float) -> float:
        """clk of a workgroup of that many blocks."""
        return self.fixed + self.per_block * blocks

    @staticmethod
    def of(points: Sequence[tuple[float, float]]) -> "Cost":
        """The line nearest to (blocks, clk) of replays, by relative squares; two at least."""
        blocks, clocks = (np.array(column, float) for column in zip(*points, strict=True))
        if len(set(blocks.tolist())) < 2:
            raise ValueError("a line needs replays of at least two lengths")
        slope, fixed = np.polyfit(blocks, clocks, 1, w=1 / clocks)
        return Cost(float(fixed), float(slope))


@dataclass(frozen=True, slots=True)
class Chip:
    """Who takes workgroups: XCD w % ``xcds`` the workgroup w, in order, in its first free slot.

    start: clk between two workgroups of a slot. dispatch: clk between two that an XCD starts.
    """

    xcds: int = int(parameters()["xcds"])
    cus_per_xcd: int = int(parameters()["cus_per_xcd"])
    start: float = parameters()["launch_clocks"]
    dispatch: float = parameters()["dispatch_clocks"]

    @property
    def cus(self) -> int:
        """All of them."""
        return self.xcds * self.cus_per_xcd


@dataclass(frozen=True, slots=True)
class Launch:
    """What became of a launch. clocks: from its first to its last clk. ``held``: the time for
    which CUs held workgroups, summed over workgroups, in clk.
    """

    chip: Chip
    workgroups: int
    slots: int
    clocks: float
    held: float

    @property
    def rounds(self) -> float:
        """Workgroups over the slots of the chip."""
        return self.workgroups / (self.slots * self.chip.cus)

    @property
    def occupied(self) -> float:
        """Share of the time of all slots in which they hold a workgroup, 0 to 1."""
        return self.held / (self.clocks * self.slots * self.chip.cus) if self.clocks else 0.0

    def matrix_use(self, matrix: float) -> float:
        """Share of the matrix cores' time, 0 to 1, that ``matrix`` clk of all of them make up."""
        return matrix / (self.clocks * SIMDS * self.chip.cus) if self.clocks else 0.0

    def microseconds(self, ghz: float) -> float:
        """At a clock that the caller answers for."""
        return self.clocks / ghz / 1e3


def launch(
    clocks: Sequence[float] | npt.NDArray[np.float64],
    *,
    slots: int = 1,
    speeds: Sequence[float] = (),
    chip: Chip | None = None,
) -> Launch:
    """Run workgroups that take ``clocks`` alone on a CU, in the order of their ids.

    slots: of a CU (``residency``). speeds: of each workgroup where 1, 2, ... are on its CU, as
    shares of its speed alone; by default 1, 1/2, ... as if they took turns. Raises ValueError for
    speeds that do not fit.
    """
    chip = chip or Chip()
    speeds = tuple(speeds) or tuple(1 / n for n in range(1, slots + 1))
    if len(speeds) != slots or min(speeds) <= 0:
        raise ValueError(f"{slots} slots need as many speeds above 0, got {speeds}")
    every = np.asarray(clocks, float)
    ends, held = zip(
        *(_run(chip, slots, speeds, every[xcd :: chip.xcds]) for xcd in range(chip.xcds)),
        strict=True,
    )
    return Launch(chip, len(every), slots, max(ends), sum(held))


class _Cu:
    """Workgroups by id, as the clk that they still need alone, as of ``at``."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = speeds
        self.at = 0.0
        self.left: dict[int, float] = {}
        self.version = 0

    @property
    def speed(self) -> float:
        return self.speeds[len(self.left) - 1]

    def next_end(self) -> float:
        return self.at + max(min(self.left.values()), 0.0) / self.speed

    def advance(self, now: float) -> float:
        """Work until ``now``; returns the clk for which it held workgroups, of all of them."""
        passed, held = now - self.at, len(self.left)
        if held:
            done = passed * self.speed
            self.left = {number: left - done for number, left in self.left.items()}
        self.at = now
        return passed * held


def _run(
    chip: Chip, slots: int, speeds: Sequence[float], clocks: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """One XCD: the clk of its last end, and for how long its CUs held workgroups."""
    cus = [_Cu(speeds) for _ in range(chip.cus_per_xcd)]
    # One slot of every CU before the second one of any: free since, order, CU.
    free = [(0.0, order, order % len(cus)) for order in range(slots * len(cus))]
    ends: list[tuple[float, int, int]] = []  # when, CU, version of it
    now = turn = held = 0.0

    def expect(number: int) -> None:
        cu = cus[number]
        cu.version += 1
        if cu.left:
            heapq.heappush(ends, (cu.next_end(), number, cu.version))

    workgroup = 0
    while workgroup < len(clocks) or ends:
        while ends and ends[0][2] != cus[ends[0][1]].version:
            heapq.heappop(ends)
        begin = max(turn, free[0][0]) if free and workgroup < len(clocks) else math.inf
        if ends and ends[0][0] < begin:
            now, number, _ = heapq.heappop(ends)
            cu = cus[number]
            held += cu.advance(now)
            cu.left.pop(min(cu.left, key=lambda w: cu.left[w]))
            heapq.heappush(free, (now + chip.start, number, number))
        elif begin < math.inf:
            _, _, number = heapq.heappop(free)
            held += cus[number].advance(begin)
            cus[number].left[workgroup] = float(clocks[workgroup])
            workgroup += 1
            turn = begin + chip.dispatch
        else:
            break
        expect(number)
    return now, held
