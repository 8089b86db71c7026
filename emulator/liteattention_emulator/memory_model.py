"""A model of the MI300X's memory: what comes from L2, Infinity Cache and HBM, and its delay.

Workgroups read blocks of equal size, one after the other, and compute on each. emulator/src/
memory_model/chip.h says how XCDs, caches and queues are modelled; ``memory_constants`` has the
numbers. Every result is modelled, none was measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from liteattention_emulator import native


@dataclass(frozen=True, slots=True)
class Level:
    """Reads of blocks at a cache. ``hits_on_miss`` found their block under way, not yet there."""

    reads: int
    hits: int
    hits_on_miss: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of the reads, 0..1, that asked no further level; AMD's profiler counts likewise."""
        return 1 - self.misses / self.reads if self.reads else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What was counted in the window of a launch.

    ``clocks`` is the window's length, ``compute_clocks`` those in which compute units computed, of
    all of them together. ``whole`` says that the launch ran to its end.
    """

    clocks: float
    steps: int
    compute_clocks: float
    l2_by_xcd: tuple[Level, ...]
    cache: Level
    started: int
    whole: bool
    block_bytes: int

    @property
    def l2(self) -> Level:
        """All XCDs' L2 caches together."""
        levels = self.l2_by_xcd
        return Level(
            sum(x.reads for x in levels), sum(x.hits for x in levels),
            sum(x.hits_on_miss for x in levels), sum(x.misses for x in levels),
        )  # fmt: skip

    @property
    def bytes_by_level(self) -> dict[str, int]:
        """Bytes that each level delivered: reads of compute units = l2 + infinity_cache + hbm."""
        l2, cache = self.l2, self.cache
        return {
            "l2": (l2.hits + l2.hits_on_miss) * self.block_bytes,
            "infinity_cache": (cache.hits + cache.hits_on_miss) * self.block_bytes,
            "hbm": cache.misses * self.block_bytes,
        }

    @property
    def steps_per_clock(self) -> float:
        """Steps of all workgroups per clock of the window: the modelled speed."""
        return self.steps / self.clocks


def run(
    parameters: Mapping[str, float],
    reads: npt.NDArray[np.uint64],
    warm_up: int = 0,
    stop_at_drain: bool = False,
) -> Run:
    """Run a launch of workgroups.

    Args:
        parameters: all of ``memory_constants.MI300X``, residency (workgroups that a compute unit
            holds), block_bytes and compute_clocks (of one step, alone on its compute unit).
        reads: [workgroups, 3]: number of the first block, distance of the next, number of blocks.
        warm_up: counting begins when this workgroup starts.
        stop_at_drain: end when the first XCD has none left to start: ``reads`` then begins a
            longer launch.

    Raises:
        ValueError: ``reads`` has another shape or type.
        EmulatorError: with every parameter that is missing, unknown or out of range.
    """
    if reads.ndim != 2 or reads.shape[1] != 3 or reads.dtype != np.uint64:
        raise ValueError(f"reads must be uint64 [workgroups, 3], got {reads.dtype} {reads.shape}")
    reads = np.ascontiguousarray(reads)
    text = "\n".join(f"{name}={value!r}" for name, value in parameters.items())
    found = native.json_of(
        native.functions().lae_run_chip(
            text.encode(), reads.ctypes.data, len(reads), warm_up, int(stop_at_drain)
        )
    )
    return Run(
        found["clocks"],
        found["steps"],
        found["compute_clocks"],
        tuple(Level(**level) for level in found["l2"]),
        Level(**found["cache"]),
        found["started"],
        found["whole"],
        int(parameters["block_bytes"]),
    )


def trace(sets: int, ways: int, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which accesses of a trace of block numbers hit in an LRU cache that is empty before it.

    Raises:
        ValueError: ``sets`` or ``ways`` is no number from 1 to 2^32 - 1.
    """
    blocks = np.ascontiguousarray(blocks, np.uint64)
    hits = np.zeros(len(blocks), np.uint8)
    limits = 0 < sets < 1 << 32 and 0 < ways < 1 << 32
    done = limits and native.functions().lae_trace_cache(
        ctypes.c_uint64(sets), ways, blocks.ctypes.data, len(blocks), hits.ctypes.data
    )
    if not limits or done != 0:
        raise ValueError(f"sets and ways must be from 1 to 2^32 - 1, got {sets} and {ways}")
    return hits.astype(bool)
