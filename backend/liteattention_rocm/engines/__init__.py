"""The engines: which there are, which one a device gets, and what the environment says."""

from __future__ import annotations

from .environment import ENGINE_VARIABLE, ISA_VARIABLE, LIBRARY_VARIABLE, architecture, settings
from .registry import admit, available, check_device, choose, get

__all__ = [
    "ENGINE_VARIABLE",
    "ISA_VARIABLE",
    "LIBRARY_VARIABLE",
    "admit",
    "architecture",
    "available",
    "check_device",
    "choose",
    "get",
    "settings",
]
