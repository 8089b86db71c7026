"""Shapes as options: numbers that calls can have, of tensors that this machine can hold."""

from __future__ import annotations

import os

#: No size of a call is larger: the engines count rows, keys and heads in 32 bits.
MOST = 2**31 - 1


def parse(
    text: str, reasons: list[str], option: str = "--shape", names: str = "B,H,S,D"
) -> tuple[int, int, int, int] | None:
    """Return the four positive numbers of a text; what is wrong is added to ``reasons``."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(part.isdecimal() and part.strip("0") for part in parts):
        reasons.append(f"{option} must be four positive numbers {names}, got {text!r}")
        return None
    large = [part for part in parts if too_large(part)]
    if large:
        reasons.append(
            f"numbers of {option} must be at most 2^31 - 1, got {', '.join(large)} in {text!r}"
        )
        return None
    first, heads, length, dim = map(int, parts)
    return first, heads, length, dim


def too_large(digits: str) -> bool:
    """Say whether decimal digits, of which there may be any number, are more than ``MOST``."""
    return len(digits.lstrip("0")) > len(str(MOST)) or int(digits) > MOST


def memory_reasons(size: int, what: str) -> list[str]:
    """Say why ``size`` bytes, which ``what`` takes, cannot be had on this machine's host."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size <= there:
        return []
    return [f"{what} takes {size / 2**30:,.1f} GiB, and this machine has {there / 2**30:,.1f} GiB"]
