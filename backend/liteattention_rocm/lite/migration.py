"""Settings of LiteAttention 0.4.0 as policies: its token lists and its calibrated thresholds.

Format of both: the README of LiteAttention 0.4.0 (github.com/moonmath-ai/LiteAttention).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

from ..arguments import is_integer, is_real
from ..brief import first_few, shown
from .policy import Ranges, SkipPolicy

#: What a module of LiteAttention has that its file does not name.
DEFAULT_THRESHOLD = -10.0
_RUN, _DISABLED = "LiteAttentionRunConfig", "LiteAttentionDisabledConfig"


def ranges(tokens: Sequence[int]) -> Ranges:
    """Return a ``must_do_list`` or ``must_skip_list`` as ``must_do`` or ``must_skip``.

    Args:
        tokens: flat, starts and ends of token ranges in turns, ends exclusive. Strictly ascending
            as in 0.4.0, ``[2, 12, 40, 45]``, or strictly descending as in 0.2.0,
            ``[45, 40, 12, 2]``: both are ``((2, 12), (40, 45))``.

    Raises:
        ValueError: with every reason.
    """
    wrong = [f"{shown(token)} is no token position" for token in tokens if not is_integer(token)]
    if not wrong:
        steps = {(a < b) - (a > b) for a, b in pairwise(tokens)}
        if len(tokens) % 2:
            wrong.append(f"{len(tokens)} numbers are no pairs of start and end")
        if len(steps) > 1 or 0 in steps:
            wrong.append("the numbers neither ascend nor descend strictly")
        if any(token < 0 for token in tokens):
            wrong.append("a token position is negative")
    if wrong:
        raise ValueError("not a list of LiteAttention: " + first_few(wrong))
    edges = sorted(int(token) for token in tokens)
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def policy_of_registry(
    file: str | os.PathLike[str],
    *,
    names: Callable[[str], str] | None = None,
    passes: int = 1,
    **fields: Any,
) -> SkipPolicy:
    """Return the policy of a file that ``LiteAttentionRegistry.save_if_calib()`` wrote.

    Thresholds are in log2 units there and here. Steps in which skipping is disabled are dense; they
    have to come first. Layers that the file does not name have LiteAttention's default of -10.

    Args:
        file: the TOML file: by name of a module a table, or a table for each call, with ``_type``
            and ``threshold``.
        names: gives the name that a layer has here for that of its module in the file, such as
            ``lambda name: name.replace(".self_attn.attn", ".attn1")``; by default the same.
        passes: forward passes in a step that call a module one after the other: 2 where guidance
            runs two. Of their thresholds the one farthest from 0 counts.
        fields: further fields of :class:`SkipPolicy`.

    Raises:
        ValueError: the file is no such file, or holds what a policy cannot say; lists every reason.
        OSError: it cannot be read.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ImportError("TOML files need Python 3.11, or `pip install tomli`") from error
    with open(file, "rb") as opened:
        try:
            modules = tomllib.load(opened)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(file)!r} is no TOML file: {error}") from error
    wrong: list[str] = []
    if not is_integer(passes) or passes < 1:
        wrong.append(f"passes must be an integer >= 1, got {shown(passes)}")
        passes = 1
    layers: dict[str, list[float | None]] = {}
    for module, configs in modules.items():
        calls = _thresholds(module, configs, wrong)
        name = module if names is None else names(module)
        if name in layers:
            wrong.append(f"two modules would be layer {shown(name)}")
        if len(calls) > 1 and len(calls) % passes:
            wrong.append(f"{shown(module)}: {len(calls)} calls are not {passes} in each step")
        steps = [calls[i : i + passes] for i in range(0, len(calls), passes)]
        layers[name] = [None if None in step else min(cast(list[float], step)) for step in steps]
        if None in (tail := layers[name][_dense_steps(layers[name]) :]):
            step = len(layers[name]) - len(tail) + tail.index(None)
            wrong.append(
                f"{shown(module)}: skipping is disabled in step {step}, after steps that skip; a "
                "policy has dense steps at the beginning of a layer, and at the end (last_step)"
            )
    if not layers:
        wrong.append("there is no module in it")
    if wrong:
        raise ValueError(f"{os.fspath(file)!r} gives no policy: {first_few(wrong)}")
    given = {
        "threshold": DEFAULT_THRESHOLD,
        "layer_thresholds": {name: _by_step(steps) for name, steps in layers.items()},
        "warmup_steps": min(map(_dense_steps, layers.values())),
    }
    return SkipPolicy(**{**given, **fields})


def _thresholds(module: str, configs: Any, wrong: list[str]) -> list[float | None]:
    """Thresholds of a module by call, None where skipping is disabled; notes what is wrong."""
    found: list[float | None] = []
    for call, config in enumerate(configs if isinstance(configs, list) else [configs]):
        where = f"{shown(module)}, call {call}"
        kind = config.get("_type") if isinstance(config, dict) else None
        threshold = config.get("threshold") if isinstance(config, dict) else None
        if kind == _DISABLED:
            found.append(None)
        elif kind != _RUN:
            wrong.append(f"{where}: _type is {shown(kind)}, not {_RUN} or {_DISABLED}")
        elif not is_real(threshold) or math.isnan(cast(float, threshold)):
            wrong.append(f"{where}: threshold {shown(threshold)} is no number")
        else:
            found.append(float(cast(float, threshold)))
    return found


def _dense_steps(steps: list[float | None]) -> int:
    """How many steps at the beginning are dense."""
    return next((i for i, value in enumerate(steps) if value is not None), len(steps))


def _by_step(steps: list[float | None]) -> float | tuple[float, ...]:
    """Thresholds by step; -inf in dense ones, which is the same where nothing was dropped yet."""
    values = [-math.inf if value is None else value for value in steps]
    return values[0] if len(set(values)) == 1 else tuple(values)
