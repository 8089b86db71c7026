"""The one place that chooses among the engines.

An engine is chosen by the device of the tensors, and the choice is logged once.
``LITEATTENTION_ENGINE`` or an ``engine=`` argument overrides it. A request that the chosen engine
cannot run raises with every reason and names an engine that can: there is no silent fallback.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

import torch

from ..contract import Engine, Request
from .environment import ENGINE_VARIABLE, architecture, settings

logger = logging.getLogger(__name__)

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
        from .triton import PortableEngine

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
        name, source = settings().engine, ENGINE_VARIABLE
    if not name:
        name, source = _default(torch.device(device)), f"device {device}"
    if name not in available():
        given = f" (from {source})" if source == ENGINE_VARIABLE else ""
        raise ValueError(f"unknown engine {name!r}{given}: this build has {', '.join(available())}")
    engine = get(name)
    if (engine.name, source) not in _announced and not torch.compiler.is_compiling():
        _announce(engine, source)
    return engine


def _default(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "gfx942" if architecture(device) == "gfx942" else "portable"
    raise ValueError(
        f"no engine of this build runs on device type {device.type!r}: move the tensors to the "
        f"CPU (engines: {', '.join(available())})"
    )


def admit(request: Request, requested: str | None) -> Engine:
    """Return the engine for a request.

    Raises:
        ValueError: as :func:`choose`, or the engine cannot run the request; lists every reason and
            names an engine that can.
    """
    engine = choose(request.device, requested)
    reasons = engine.reasons(request)
    if reasons:
        raise ValueError(_refusal(engine, "this", reasons, lambda e: e.reasons(request)))
    return engine


def check_device(engine: Engine, device: torch.device) -> None:
    """Raise a ``ValueError`` if ``engine`` cannot run on ``device`` at all; as :func:`admit`."""
    reasons = engine.unavailable(device)
    if reasons:
        raise ValueError(_refusal(engine, "here", reasons, lambda e: e.unavailable(device)))


def _refusal(
    engine: Engine, what: str, reasons: list[str], against: Callable[[Engine], list[str]]
) -> str:
    others = [name for name in available() if name != engine.name and not against(get(name))]
    remedy = (
        f"use engine={others[0]!r}"
        if others
        else "no other engine of this build supports it either"
    )
    return f"engine {engine.name!r} cannot run {what}: {'; '.join(reasons)} ({remedy})"


def _announce(engine: Engine, source: str) -> None:
    key = (engine.name, source)
    with _announce_lock:
        if key not in _announced:
            _announced.add(key)
            try:
                described = engine.described
            except ValueError:  # a code path that is not there: calls say so
                described = engine.name
            logger.info("attention engine %s (chosen by %s)", described, source)
