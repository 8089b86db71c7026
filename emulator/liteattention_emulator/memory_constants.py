"""What the memory model knows of an MI300X: every number, its range and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """A parameter of the model.

    ``low`` and ``high`` enclose what is plausible where nobody measured it or where sources
    differ; None where it is known. ``fitted``: ``value`` was chosen to match
    published hit rates.
    """

    name: str
    value: float
    unit: str
    low: float | None
    high: float | None
    source: str
    fitted: bool = False


CLOCK_GHZ = (1.2, 1.7, 2.1)
"""Low, middle and high of the clock, by which published bytes per second become bytes per clock."""

_CDNA3 = "AMD CDNA 3 white paper"
_RRZE = "RRZE-HPC/gpu-benches, MI300X"

MI300X = (
    Constant("xcds", 8, "", None, None, _CDNA3),
    Constant("cus_per_xcd", 38, "", None, None, _CDNA3),
    Constant("l2_bytes", 4 << 20, "B", None, None, f"{_CDNA3}: per XCD"),
    Constant("l2_ways", 16, "", None, None, _CDNA3),
    Constant("cache_bytes", 256 << 20, "B", None, None, f"{_CDNA3}: Infinity Cache"),
    Constant("cache_ways", 16, "", None, None, _CDNA3),
    Constant("cu_rate", 43, "B/clk", 43, 61, f"{_RRZE}: L2 to one CU while all read"),
    Constant(
        "link_rate", 600, "B/clk", 400, 1000,
        "an eighth of the Infinity Cache's rate; not measured by itself",
    ),
    Constant(
        "cache_rate", 5000, "B/clk", 3100, 7000,
        "5.3 to 7 TB/s by one source, 11.9 by another, 17.2 nominal; 8.5 TB/s at 1.7 GHz",
    ),
    Constant(
        "hbm_rate", 1800, "B/clk", 1250, 3500,
        f"4.2 TB/s of one stream ({_RRZE}), 2,470 at 1.7 GHz; many streams reach less", True,
    ),
    Constant("l2_latency", 213, "clk", None, None, _RRZE),
    Constant("cache_latency", 470, "clk", 456, 492, _RRZE),
    Constant("hbm_latency", 876, "clk", 800, 900, _RRZE),
    Constant("dispatch_clocks", 100, "clk", 20, 1000, "between two workgroups of an XCD: assumed"),
    Constant("launch_clocks", 500, "clk", 200, 5000, "between workgroups of a slot: assumed"),
    Constant(
        "prefetch", 0, "blocks", 0, 2, "assumed: asked for in its step; ours asks for K one ahead"
    ),
    Constant(
        "slack_clocks", 1350, "clk", 0, 3700,
        "part of a block's delay that its own step covers, as V is needed after K", True,
    ),
    Constant(
        "compute_jitter", 0.17, "share", 0.05, 0.7,
        "of a step's clocks, uniform; nobody measured how steps vary", True,
    ),
    Constant("latency_jitter", 0.2, "share", 0, 0.5, "of a miss's delay, uniform: assumed"),
    Constant("seed", 1, "", None, None, "of the jitters"),
)  # fmt: skip
"""All parameters but those of the kernel: residency, block_bytes, compute_clocks."""


def parameters(**changes: float) -> Mapping[str, float]:
    """The values of MI300X by name, some of them changed or added.

    Raises:
        ValueError: a name is none of the model's.
    """
    values = {constant.name: constant.value for constant in MI300X}
    known = values.keys() | {"residency", "block_bytes", "compute_clocks"}
    if unknown := sorted(changes.keys() - known):
        raise ValueError(f"no parameters of the memory model: {', '.join(unknown)}")
    return values | changes
