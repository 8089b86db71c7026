"""What HBM asks of a CU: bytes under way, by its latency and the CU's share of its rate."""

from __future__ import annotations

from dataclasses import dataclass

from liteattention_emulator.memory_constants import MI300X


def _constant(name: str) -> tuple[float, float, float]:
    """A constant of the memory model: value, low, high."""
    [found] = [constant for constant in MI300X if constant.name == name]
    value = found.value
    return value, value if found.low is None else found.low, found.high or value


CUS = int(_constant("xcds")[0] * _constant("cus_per_xcd")[0])
HBM_LATENCY = _constant("hbm_latency")[0]
"""clk."""


@dataclass(frozen=True, slots=True)
class Need:
    """latency: clk. rate: B/clk of a CU when all read. needed: their product, what must be under
    way for that rate (Little's law); least, most: at the constants' bounds.
    """

    latency: float
    rate: float
    needed: float
    least: float
    most: float


def need() -> Need:
    """By the constants of the memory model."""
    rates = [value / CUS for value in _constant("hbm_rate")]
    products = [a * b for a, b in zip(rates, _constant("hbm_latency"), strict=True)]
    return Need(HBM_LATENCY, rates[0], *products)
