"""Which mapping of workgroups to tiles reads how much from where: attention on the memory model.

The study of "Optimizing Attention on GPUs by Exploiting GPU Architectural NUMA Effects", with the
mappings of our kernels (csrc/gfx942/geometry.h). A workgroup computes one tile of query rows and
reads all K/V blocks of its (batch, kv head); queries and outputs, each touched once, are left out.
Everything here is modelled, nothing measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from liteattention_emulator import memory_model
from liteattention_emulator.memory_constants import parameters
from liteattention_rocm import _core

MAPPINGS = (
    "swizzled_head_first", "naive_head_first", "swizzled_block_first", "naive_block_first",
)  # fmt: skip
MFMA_FLOPS = 2048
"""bf16 operations of a compute unit's matrix cores per clock."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel: rows of q of a workgroup, keys of a block, workgroups of a compute unit.

    ``matrix_use`` is the share of the matrix cores' peak that it reaches where no data are waited
    for.
    """

    name: str
    rows: int
    keys: int
    residency: int
    matrix_use: float

    def compute_clocks(self, head_dim: int) -> float:
        """Clocks of one step; head dims are computed in multiples of 32, the MFMA's."""
        padded = -(-head_dim // 32) * 32
        return 4 * self.rows * self.keys * padded / MFMA_FLOPS / self.matrix_use


PAPER = Kernel("paper, 128 rows", 128, 64, 1, 0.55)
"""BLOCK_M 128 and BLOCK_N 64, as the paper says. It says neither residency nor speed: assumed."""
OURS = Kernel("ours, 256 rows", _core.GFX942_Q_BLOCK, _core.GFX942_K_BLOCK, 1, 0.93)
"""attention_dense; its share of the matrix cores is an earlier result of the cycle model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Self-attention, bf16, not causal: lengths in tokens."""

    model: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.model}, {self.length // 1024}K, batch {self.batch}"


_MODELS = (
    *((f"MHA {heads}", heads, heads, 128) for heads in (8, 16, 32, 64, 128)),
    ("Llama-3 8B", 32, 8, 128),
    ("Llama-3 70B", 64, 8, 128),
    ("Llama-3 405B", 128, 8, 128),
    ("DeepSeek-V3", 128, 128, 56),
)


def shapes(batches: Iterable[int]) -> list[Shape]:
    """The paper's models and lengths."""
    return [
        Shape(model, batch, q_heads, kv_heads, length, dim)
        for model, q_heads, kv_heads, dim in _MODELS
        for batch in batches
        for length in (8192, 32768, 131072)
    ]


MOST_JITTER = 0.7


@dataclass(frozen=True, slots=True)
class Case:
    """One launch, or the beginning of it: as many workgroups as read ``million_reads`` blocks.

    At the least that is three rounds, in which every slot takes a workgroup once. Of a window the
    first round, in which all start together, is not counted.
    """

    shape: Shape
    mapping: str
    kernel: Kernel = PAPER
    cus_per_xcd: int = 38
    million_reads: float = 5.0

    @property
    def rows(self) -> int:
        """Rows of tiles: one per batch and query head."""
        return self.shape.batch * self.shape.q_heads

    @property
    def q_blocks(self) -> int:
        """Tiles of a row."""
        return -(-self.shape.length // self.kernel.rows)

    @property
    def k_blocks(self) -> int:
        """Blocks that a workgroup reads."""
        return -(-self.shape.length // self.kernel.keys)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values of all its tokens."""
        return 4 * self.kernel.keys * self.shape.head_dim

    @property
    def total_bytes(self) -> int:
        """Bytes of K and V that the workgroups of the whole launch ask for."""
        return self.rows * self.q_blocks * self.k_blocks * self.block_bytes

    @property
    def slots(self) -> int:
        """Workgroups that the chip holds."""
        return 8 * self.cus_per_xcd * self.kernel.residency

    @property
    def workgroups(self) -> int:
        """How many of the launch are run."""
        tiles = self.rows * self.q_blocks
        wanted = max(int(self.million_reads * 1e6) // self.k_blocks, 3 * self.slots)
        return tiles if wanted >= tiles else wanted // self.slots * self.slots

    @property
    def whole(self) -> bool:
        """All workgroups of the launch are run."""
        return self.workgroups == self.rows * self.q_blocks

    def chip(self) -> dict[str, float]:
        """The model's parameters.

        Workgroups that nothing holds together drift apart like the root of the rounds. In a window
        of n of N rounds steps therefore vary sqrt(N / n) times as much as in the whole launch, up
        to ``MOST_JITTER``, so that at its end they lie as far apart as at the launch's.
        """
        chip = dict(
            parameters(
                cus_per_xcd=self.cus_per_xcd,
                residency=self.kernel.residency,
                block_bytes=self.block_bytes,
                compute_clocks=self.kernel.compute_clocks(self.shape.head_dim),
            )
        )
        more = math.sqrt(self.rows * self.q_blocks / self.workgroups)
        chip["compute_jitter"] = min(chip["compute_jitter"] * more, MOST_JITTER)
        return chip

    def reads(self) -> npt.NDArray[np.uint64]:
        """What the workgroups read, as ``memory_model.run`` takes it."""
        shape = self.shape
        mapping = getattr(_core.Mapping, self.mapping)
        tiles = _core.tiles_of(mapping, self.rows, self.q_blocks, self.workgroups)
        row = tiles.astype(np.uint64) // self.q_blocks
        head = row % shape.q_heads // (shape.q_heads // shape.kv_heads)
        kv = row // shape.q_heads * shape.kv_heads + head
        reads = np.empty((len(kv), 3), np.uint64)
        reads[:, 0], reads[:, 1], reads[:, 2] = kv * self.k_blocks, 1, self.k_blocks
        return reads


@dataclass(frozen=True, slots=True)
class Row:
    """What the model says of a case: shares 0..1 of reads, bytes of the whole launch.

    ``speed`` is in query rows x keys per clock of the chip; ``relative`` that over swizzled
    head-first's.
    """

    case: Case
    l2: float
    l2_hits_on_miss: float
    cache: float
    bytes_by_level: dict[str, float]
    speed: float
    relative: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Flat, for CSV."""
        case = self.case
        head = asdict(case.shape) | {"kernel": case.kernel.name, "mapping": case.mapping}
        return head | {
            "l2_hit_rate": self.l2,
            "l2_hits_on_miss": self.l2_hits_on_miss,
            "infinity_cache_hit_rate": self.cache,
            **{f"{level}_bytes": round(size) for level, size in self.bytes_by_level.items()},
            "relative_speed": self.relative,
            "whole_launch": case.whole,
        }


def run_case(case: Case) -> Row:
    """Run one launch, or the window of it."""
    warm_up = 0 if case.whole else case.slots
    found = memory_model.run(case.chip(), case.reads(), warm_up, stop_at_drain=not case.whole)
    share = case.total_bytes / (found.l2.reads * case.block_bytes)
    return Row(
        case,
        found.l2.hit_rate,
        found.l2.hits_on_miss / found.l2.reads,
        found.cache.hit_rate,
        {level: size * share for level, size in found.bytes_by_level.items()},
        found.steps_per_clock * case.kernel.rows * case.kernel.keys,
    )


def run(cases: Sequence[Case], say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Run all cases, on all processors; rows in the order of the cases."""
    rows: dict[Case, Row] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(run_case, case): case for case in dict.fromkeys(cases)}
        try:
            for done in as_completed(waiting):
                rows[waiting[done]] = done.result()
                say(f"{len(rows)} of {len(waiting)} launches")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found = [rows[case] for case in cases]
    best = {
        replace(row.case, mapping=""): row.speed for row in found if row.case.mapping == MAPPINGS[0]
    }
    return [
        replace(row, relative=row.speed / best.get(replace(row.case, mapping=""), row.speed))
        for row in found
    ]


def study(batches: Iterable[int], kernel: Kernel, million_reads: float) -> list[Case]:
    """Every shape in every mapping."""
    return [
        Case(shape, mapping, kernel, million_reads=million_reads)
        for shape in shapes(batches)
        for mapping in MAPPINGS
    ]
