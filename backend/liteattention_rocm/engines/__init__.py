"""The engines, and the one place that chooses among them.

An engine is chosen by the device of the tensors, once per device, and the choice is logged once.
``LITEATTENTION_ENGINE`` or an ``engine=`` argument overrides it. A request that the chosen engine
cannot run raises with every reason and names an engine that can: there is no silent fallback.
"""

from __future__ import annotations

import functools
import logging
import os
import threading

import torch

from .base import (
    LAYOUTS,
    MI300X_GEOMETRY,
    ROUNDINGS,
    AttentionSpec,
    Engine,
    Layout,
    LiteSpec,
    RaggedBatch,
    RaggedSpec,
    Rounding,
    TileGeometry,
)

__all__ = [
    "LAYOUTS",
    "MI300X_GEOMETRY",
    "ROUNDINGS",
    "AttentionSpec",
    "Engine",
    "Layout",
    "LiteSpec",
    "RaggedBatch",
    "RaggedSpec",
    "Rounding",
    "TileGeometry",
    "architecture",
    "available",
    "choose",
    "get",
    "refuse",
    "refuse_device",
    "refuse_ragged",
]

logger = logging.getLogger(__name__)

ENGINE_VARIABLE = "LITEATTENTION_ENGINE"

_announced: set[tuple[str, str]] = set()
_announce_lock = threading.Lock()


def available() -> tuple[str, ...]:
    """Names of the engines in this build, in the order in which they are suggested."""
    return ("cpu", "gfx942", "portable", "reference")


@functools.cache
def get(name: str) -> Engine:
    """Return the engine called ``name``; it is made once per process.

    Raises:
        ValueError: no engine has that name.
    """
    if name == "cpu":
        from .cpu import CpuEngine

        return CpuEngine()
    if name == "gfx942":
        from .gfx942 import Gfx942Engine

        return Gfx942Engine()
    if name == "portable":
        from .portable import PortableEngine

        return PortableEngine()
    if name == "reference":
        from .reference import ReferenceEngine

        return ReferenceEngine()
    raise ValueError(f"unknown engine {name!r}: this build has {', '.join(available())}")


def choose(device: torch.device | str, requested: str | None = None) -> Engine:
    """Return the engine for tensors on ``device``, logging the choice once per process.

    ``requested`` wins over ``LITEATTENTION_ENGINE``, which wins over the device's default: cpu
    for CPU tensors, gfx942 for those on an MI300X, portable for those on any other GPU.

    Raises:
        ValueError: the name is unknown, or no engine of this build runs on the device.
    """
    source = "engine="
    name = requested
    if not name:
        name, source = os.environ.get(ENGINE_VARIABLE), ENGINE_VARIABLE
    if not name:
        name, source = _default(torch.device(device)), f"device {device}"
    engine = get(name)
    if not torch.compiler.is_compiling():
        _announce(engine.name, source)
    return engine


def architecture(device: torch.device) -> str:
    """Architecture of a GPU as its compiler calls it ("gfx942", "sm_90"), "" for anything else."""
    if device.type != "cuda":
        return ""
    if device.index is not None:
        return _architecture(device.index)
    return _architecture(torch.cuda.current_device()) if torch.cuda.is_available() else ""


@functools.cache
def _architecture(index: int) -> str:
    if not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    # "gfx942:sramecc+:xnack-": target features follow the name
    return str(properties.gcnArchName).partition(":")[0]


def _default(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "gfx942" if architecture(device) == "gfx942" else "portable"
    raise ValueError(
        f"no engine of this build runs on device type {device.type!r}: move the tensors to the "
        f"CPU (engines: {', '.join(available())})"
    )


def refuse(
    engine: Engine, reasons: list[str], spec: AttentionSpec, lite: LiteSpec | None
) -> ValueError:
    """Build the error for a request that ``engine`` cannot run, naming an engine that can."""
    others = [
        name for name in available() if name != engine.name and not get(name).supports(spec, lite)
    ]
    return _refusal(engine, "this", reasons, others)


def refuse_ragged(engine: Engine, reasons: list[str], spec: RaggedSpec) -> ValueError:
    """Build the error for a ragged call that ``engine`` cannot run, naming one that can."""
    others = [
        name for name in available() if name != engine.name and not get(name).ragged_reasons(spec)
    ]
    return _refusal(engine, "this", reasons, others)


def refuse_device(engine: Engine, reasons: list[str], device: torch.device) -> ValueError:
    """Build the error for an engine that cannot run on ``device``, naming one that can."""
    others = [
        name for name in available() if name != engine.name and not get(name).unavailable(device)
    ]
    return _refusal(engine, "here", reasons, others)


def _refusal(engine: Engine, what: str, reasons: list[str], others: list[str]) -> ValueError:
    remedy = (
        f"use engine={others[0]!r}"
        if others
        else "no other engine of this build supports it either"
    )
    return ValueError(f"engine {engine.name!r} cannot run {what}: {'; '.join(reasons)} ({remedy})")


def _announce(name: str, source: str) -> None:
    key = (name, source)
    if key in _announced:
        return
    with _announce_lock:
        if key not in _announced:
            _announced.add(key)
            logger.info("attention engine %s (chosen by %s)", name, source)
