"""HIP run-times that replay graphs wrongly: ROCm 7.2.0 to 7.2.3.

Reported for vLLM on MI300X and bisected to the run-time: replayed graphs give corrupt outputs,
the same launches without a graph are right, and so are graphs with ROCm 7.1.1 and 7.13. The
run-time's version tells the 7.2 series, not the release in it.
"""

from __future__ import annotations

import re

import torch

from . import engines
from .lite.once import warn_once

_WRONG = (7, 2)


def problem() -> str | None:
    """Say what is wrong with graphs on this process's HIP run-time; None where nothing is known.

    None without ROCm and on the software MI300X.
    """
    if torch.version.hip is None:
        return None
    version = _version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) != _WRONG:
        return None
    return (
        f"HIP run-time {version}: ROCm 7.2.0 to 7.2.3 replay HIP graphs wrongly, and outputs may "
        "be corrupt: use ROCm 7.1.1 or 7.13, or turn graphs off"
    )


def _version() -> str:
    """Version of the run-time that is loaded, else of the one that PyTorch was built with."""
    try:
        library = engines.get("gfx942").library()  # type: ignore[attr-defined]
        return "" if library.emulated else str(library.version())
    except RuntimeError:
        return str(torch.version.hip)


def warn(who: str) -> None:
    """Log, once a process, that ``who`` captures graphs which this run-time replays wrongly."""
    found = problem()
    if found is not None:
        warn_once(f"{who} captures graphs: {found}")
