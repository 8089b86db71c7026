"""What the environment says about engines, and which GPU a device is.

The variables are read once, when the first call asks: set them before. An argument of a call wins
over its variable.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

ENGINE_VARIABLE = "LITEATTENTION_ENGINE"
ISA_VARIABLE = "LITEATTENTION_CPU_ISA"
LIBRARY_VARIABLE = "LITEATTENTION_HIP_LIBRARY"


class Settings(NamedTuple):
    """Values of the variables; "" where one is not set."""

    engine: str
    cpu_isa: str
    hip_library: str


@functools.cache
def settings() -> Settings:
    """Return what the variables said when this was first asked; ``cache_clear()`` asks again."""
    names = (ENGINE_VARIABLE, ISA_VARIABLE, LIBRARY_VARIABLE)
    return Settings(*(os.environ.get(name, "") for name in names))


#: Oldest NVIDIA compute capability with fp8.
OLDEST_FP8 = 89


def architecture(device: torch.device) -> str:
    """Architecture of a GPU as its compiler calls it ("gfx942", "sm_90"), "" for anything else."""
    if device.type != "cuda":
        return ""
    if device.index is not None:
        return _architecture(device.index)
    return _architecture(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def converts_fp8(device: torch.device) -> bool:
    """Whether a GPU of NVIDIA has instructions that widen fp8; True of any other device."""
    found = architecture(device)
    return not found.startswith("sm_") or int(found.removeprefix("sm_")) >= OLDEST_FP8


@functools.cache
def _architecture(index: int) -> str:
    if not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    # "gfx942:sramecc+:xnack-": target features follow the name
    return str(properties.gcnArchName).partition(":")[0]
