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
    "Rounding",
    "TileGeometry",
    "available",
    "choose",
    "get",
    "refuse",
]

logger = logging.getLogger(__name__)

ENGINE_VARIABLE = "LITEATTENTION_ENGINE"

_DEFAULT_BY_DEVICE = {"cpu": "cpu"}
_announced: set[tuple[str, str]] = set()
_announce_lock = threading.Lock()


def available() -> tuple[str, ...]:
    """Names of the engines in this build, in the order in which they are suggested."""
    return ("cpu", "reference")


@functools.cache
def get(name: str) -> Engine:
    """Return the engine called ``name``; it is made once per process.

    Raises:
        ValueError: no engine has that name.
    """
    if name == "cpu":
        from .cpu import CpuEngine

        return CpuEngine()
    if name == "reference":
        from .reference import ReferenceEngine

        return ReferenceEngine()
    raise ValueError(f"unknown engine {name!r}: this build has {', '.join(available())}")


def choose(device_type: str, requested: str | None = None) -> Engine:
    """Return the engine for tensors on ``device_type``, logging the choice once per process.

    ``requested`` wins over ``LITEATTENTION_ENGINE``, which wins over the device's default.

    Raises:
        ValueError: the name is unknown, or no engine of this build runs on the device.
    """
    source = "engine="
    name = requested
    if not name:
        name, source = os.environ.get(ENGINE_VARIABLE), ENGINE_VARIABLE
    if not name:
        name, source = _DEFAULT_BY_DEVICE.get(device_type), f"device {device_type}"
    if not name:
        raise ValueError(
            f"no engine of this build runs on device type {device_type!r}: "
            f"move the tensors to the CPU (engines: {', '.join(available())})"
        )
    engine = get(name)
    if not torch.compiler.is_compiling():
        _announce(engine.name, source)
    return engine


def refuse(
    engine: Engine, reasons: list[str], spec: AttentionSpec, lite: LiteSpec | None
) -> ValueError:
    """Build the error for a request that ``engine`` cannot run, naming an engine that can."""
    others = [
        name for name in available() if name != engine.name and not get(name).supports(spec, lite)
    ]
    remedy = (
        f"use engine={others[0]!r}"
        if others
        else "no other engine of this build supports it either"
    )
    return ValueError(f"engine {engine.name!r} cannot run this: {'; '.join(reasons)} ({remedy})")


def _announce(name: str, source: str) -> None:
    key = (name, source)
    if key in _announced:
        return
    with _announce_lock:
        if key not in _announced:
            _announced.add(key)
            logger.info("attention engine %s (chosen by %s)", name, source)
