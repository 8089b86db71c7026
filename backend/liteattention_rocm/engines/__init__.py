"""The engines: which there are, which one a device gets, and what the environment says."""

from __future__ import annotations

from .registry import available, check, check_device, choose, get
from .settings import ENGINE_VARIABLE, ISA_VARIABLE, LIBRARY_VARIABLE, architecture, settings

__all__ = [
    "ENGINE_VARIABLE",
    "ISA_VARIABLE",
    "LIBRARY_VARIABLE",
    "architecture",
    "available",
    "check",
    "check_device",
    "choose",
    "get",
    "settings",
]
