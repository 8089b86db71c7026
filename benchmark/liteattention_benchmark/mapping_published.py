"""Published measurements of the mappings of attention on AMD GPUs, and the model beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .mapping import PAPER, Case, Kernel, Row, Shape

_NUMA = "NUMA paper"
_LONG = Shape("MHA 128", 1, 128, 128, 131072)
_LONG8 = Shape("MHA 128", 8, 128, 128, 131072)
_SMALL = Shape("MHA 8", 1, 8, 8, 8192)
_LLAMA = Shape("Llama-3 405B", 8, 128, 8, 131072)
_DEEPSEEK = Shape("DeepSeek-V3", 8, 128, 128, 131072, 56)
_FLYDSL = Shape("MHA 64", 1, 64, 64, 65536)
_FLYDSL_KERNEL = Kernel("FlyDSL, 256 rows", 256, 64, 1, 0.74)
"""gfx950 has 32 compute units a die; its caches' rates and delays are taken to be gfx942's. Its use
of gfx942's peak follows from 928 TFLOP/s (FlyDSL PR 225) at 2.4 GHz on 256 compute units."""

MILLION_READS = 16.0
"""Of each launch here: workgroups drift apart over many rounds, which a short window would miss."""


@dataclass(frozen=True, slots=True)
class Published:
    """A measured L2 hit rate ("l2") or speed relative to swizzled head-first ("speed"), per cent.

    ``fitted``: constants of the model were chosen with it. ``why``: the likely cause of a miss.
    """

    source: str
    case: Case
    figure: str
    low: float
    high: float
    fitted: bool = False
    why: str = ""

    def modelled(self, row: Row) -> float:
        """The model's figure, per cent."""
        return 100 * (row.l2 if self.figure == "l2" else row.relative)

    def off(self, row: Row) -> float:
        """Points between the model's figure and the published range; 0 within it."""
        value = self.modelled(row)
        return max(self.low - value, value - self.high, 0.0)


def _paper(
    shape: Shape, mapping: str, figure: str, low: float, high: float, fitted: bool = False,
    why: str = "",
) -> Published:  # fmt: skip
    case = Case(shape, mapping, PAPER, million_reads=MILLION_READS)
    return Published(_NUMA, case, figure, low, high, fitted, why)


def _flydsl(mapping: str, value: float, why: str = "") -> Published:
    case = Case(_FLYDSL, mapping, _FLYDSL_KERNEL, 32, MILLION_READS)
    return Published("FlyDSL PR 919, gfx950", case, "l2", value, value, why=why)


_HELD = (
    "in the model a saturated HBM delays whoever leads, which keeps workgroups of a head together; "
    "the paper gives one figure for all batches"
)
_SLICES = "the model has no price for eight L2s that ask one slice of the Infinity Cache at once"
_ALIKE = (
    "38 workgroups of an XCD read 38 heads in both block-first orders, which the model therefore "
    "cannot tell apart"
)
_UNSTATED = "neither batch nor earlier mapping are stated; at batch 4 the model gives 0"

PUBLISHED: tuple[Published, ...] = (
    _paper(_LONG, "swizzled_head_first", "l2", 90, 96, True),
    _paper(_LONG, "naive_head_first", "l2", 40, 60, True),
    _paper(_LONG8, "naive_block_first", "speed", 64, 70, True),
    _paper(_LONG, "swizzled_block_first", "l2", 0, 2, why=_HELD),
    _paper(_LONG, "naive_block_first", "l2", 0, 2, why=_HELD),
    _paper(_LONG, "swizzled_block_first", "speed", 64, 70, why=_HELD),
    _paper(_LONG, "naive_block_first", "speed", 64, 70, why=_HELD),
    _paper(_LONG8, "swizzled_head_first", "l2", 90, 96),
    _paper(_LONG8, "naive_head_first", "l2", 40, 60),
    _paper(_LONG8, "swizzled_block_first", "l2", 0, 2),
    _paper(_LONG8, "naive_block_first", "l2", 0, 2),
    _paper(_LONG8, "swizzled_block_first", "speed", 64, 70),
    _paper(_SMALL, "swizzled_head_first", "l2", 90, 100),
    _paper(_SMALL, "naive_head_first", "l2", 90, 100),
    _paper(_SMALL, "swizzled_block_first", "l2", 90, 100),
    _paper(_SMALL, "naive_block_first", "l2", 90, 100),
    _paper(_LLAMA, "swizzled_block_first", "speed", 97, 103),
    _paper(_LLAMA, "naive_head_first", "speed", 90, 95, why=_SLICES),
    _paper(_DEEPSEEK, "naive_block_first", "speed", 60, 65, why=_ALIKE),
    _paper(_DEEPSEEK, "swizzled_block_first", "speed", 76, 76),
    _flydsl("naive_block_first", 2.36, _UNSTATED),
    _flydsl("swizzled_head_first", 93.62),
)


def cases() -> list[Case]:
    """What has to be run for the comparison, swizzled head-first of every shape included."""
    asked = [each.case for each in PUBLISHED]
    return list(
        dict.fromkeys([*asked, *(replace(case, mapping="swizzled_head_first") for case in asked)])
    )


def compared(rows: Sequence[Row]) -> list[tuple[Published, Row]]:
    """Every published figure with the model's row of its case."""
    found = {row.case: row for row in rows}
    return [(each, found[each.case]) for each in PUBLISHED]
