"""Replays of a recording on the modelled CU, one or one for each bound of the open constants."""

import ctypes
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from liteattention_emulator import native
from liteattention_emulator.recording import Recording

from .constants import Constant, checked, table
from .loops import Loop, find, steady

SIMDS = 4
MATRIX_CLK = 32
"""clk of one matrix instruction 32x32x8 (bf16, fp16) or 32x32x16 (fp8), the unit of results."""

Clocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Idle:
    """clk in which matrix cores did nothing, or more than they need, for an instruction's sake.

    instruction: what a wave was at, or what held the port that its matrix instruction needed.
    clocks: of all SIMDs together.
    """

    instruction: int
    cause: str
    clocks: float


@dataclass(frozen=True, slots=True)
class Flight:
    """Loads from memory, to registers or LDS, that issued in a window of ``span`` clk, in bytes.

    asked: by instructions. fetched: of the lines of 128 bytes among them that L1 did not have.
    asked_clocks, fetched_clocks: the same, each times the clk from its issue until it was there.
    """

    asked: float
    fetched: float
    asked_clocks: float
    fetched_clocks: float
    span: int

    @property
    def asked_under_way(self) -> float:
        """Bytes under way at a time, the mean (Little's law)."""
        return self.asked_clocks / max(self.span, 1)

    @property
    def fetched_under_way(self) -> float:
        """The same of lines from beyond L1."""
        return self.fetched_clocks / max(self.span, 1)

    @property
    def rate(self) -> float:
        """B/clk from beyond L1."""
        return self.fetched / max(self.span, 1)


@dataclass(frozen=True, eq=False)
class Replay:
    """When the instructions of a recording issue on the modelled CU.

    constants: all of them by name. clocks: of the whole replay. begin, end: of what is accounted
    for (``window`` of wave 0's steps). matrix: clk of the matrix instructions issued in it, summed
    over the SIMDs. idle: the rest. lds_busy, address_busy: clk in which the banks of the LDS and
    the address unit of vector memory worked, in the whole replay. flight: of the window. issued: of
    each wave int64 [steps], the clk of issue.
    """

    recording: Recording
    constants: Mapping[str, float]
    window: tuple[int, int]
    loops: tuple[Loop | None, ...]
    clocks: int
    begin: int
    end: int
    matrix: float
    lds_busy: float
    address_busy: float
    l1_hits: int
    l1_misses: int
    flight: Flight
    idle: tuple[Idle, ...]
    issued: tuple[Clocks, ...]

    @property
    def span(self) -> int:
        """clk that are accounted for."""
        return self.end - self.begin

    @property
    def simds(self) -> int:
        """SIMDs that have waves."""
        return min(SIMDS, len(self.recording.waves))

    @property
    def use(self) -> float:
        """Share of the time in which the matrix cores work, 0 to 1."""
        return self.matrix / (self.span * self.simds) if self.span else 0.0

    @property
    def per_matrix(self) -> float | None:
        """clk per matrix instruction of 32 clk, or as many smaller ones; None without any."""
        return MATRIX_CLK / self.use if self.matrix else None

    @cached_property
    def causes(self) -> dict[str, float]:
        """Shares of the time of all SIMDs by what the matrix cores did not work for, largest first.

        They, ``use`` and each other add up to 1, but for what lies across the window's edges.
        """
        total = max(self.span * self.simds, 1)
        found: defaultdict[str, float] = defaultdict(float)
        for row in self.idle:
            found[row.cause] += row.clocks / total
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def per_iteration(self, wave: int) -> float | None:
        """clk of an iteration of the wave's loop, the edges left out; None without a loop."""
        loop = self.loops[wave]
        if loop is None:
            return None
        first, last = steady(loop, 0)
        times = self.issued[wave]
        count = int(np.searchsorted(loop.starts, last) - np.searchsorted(loop.starts, first))
        return float(times[last] - times[first]) / count


@dataclass(frozen=True, slots=True)
class Spread:
    """How far one open constant moves the time: shares of the replay with the table's values.

    ``at_low`` -0.02: with the constant at its lower bound the same steps take 2 % less time.
    """

    constant: Constant
    at_low: float
    at_high: float


def replay(
    recording: Recording,
    overrides: Mapping[str, float] | None = None,
    window: tuple[int, int] | None = None,
) -> Replay:
    """Replay a recording with the table's constants, some of them overridden.

    window: steps [begin, end) of wave 0 to account for; by default whole iterations of its loop,
    the first and last ones left out (``loops.steady``), without a loop everything. Raises
    BadConstants, EmulatorError for streams that cannot be replayed.
    """
    constants = checked(overrides)
    loops = tuple(find(recording, wave) for wave in range(len(recording.waves)))
    if window is None:
        window = steady(loops[0], len(recording.waves[0].steps)) if loops else (0, 0)
    steps = [np.ascontiguousarray(wave.steps) for wave in recording.waves]
    lines = [np.ascontiguousarray(wave.lines) for wave in recording.waves]
    issued = [np.zeros(len(wave), np.int64) for wave in steps]
    found = native.json_of(
        native.functions().lae_replay(
            recording.text,
            len(recording.text),
            recording.accum_offset,
            len(steps),
            _addresses(steps),
            _sizes([len(array) for array in steps]),
            _addresses(lines),
            _sizes([len(array) for array in lines]),
            _sizes(recording.workgroups or [0] * len(steps)),
            _sizes([0, *window]),
            (ctypes.c_double * len(constants))(*constants.values()),
            len(constants),
            _addresses(issued),
        )
    )
    idle = tuple(Idle(*row) for row in found.pop("idle"))
    sums: list[float] = found.pop("flight")
    flight = Flight(sums[0], sums[1], sums[2], sums[3], found["end"] - found["begin"])
    arrays = tuple(issued)
    return Replay(
        recording, constants, window, loops, flight=flight, idle=idle, issued=arrays, **found
    )


def spread(recording: Recording, overrides: Mapping[str, float] | None = None) -> list[Spread]:
    """What each open constant at its bounds does to the time, largest effect first.

    One constant at a time; an overridden one is taken as known.
    """
    base = replay(recording, overrides)
    fixed = dict(overrides or {})
    tasks = [constant for constant in table() if constant.open and constant.name not in fixed]

    def share(constant: Constant, value: float) -> float:
        if value == constant.value:
            return 0.0
        moved = replay(recording, fixed | {constant.name: value}, base.window)
        return moved.span / base.span - 1

    def both(constant: Constant) -> Spread:
        return Spread(constant, share(constant, constant.low), share(constant, constant.high))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(both, tasks))
    return sorted(rows, key=lambda row: -max(abs(row.at_low), abs(row.at_high)))


def _addresses(arrays: list[npt.NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def _sizes(values: Sequence[int]) -> Any:
    return (ctypes.c_size_t * len(values))(*values)
