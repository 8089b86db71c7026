"""Patterns of layer names (``fnmatch``, of whole names): one that matches nothing is a mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite.by_layer import matches_any


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Say whether any of the patterns matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def of_policy(policy: SkipPolicy) -> dict[str, Iterable[str]]:
    """Return the patterns of a policy by field; a policy that is off looks none of them up."""
    if not policy.enabled:
        return {}
    return {"layer_thresholds": policy.layer_thresholds, "layer_budgets": policy.layer_budgets}


def reasons(
    given: Mapping[str, Iterable[str]], layers: Iterable[str], alone: Iterable[str] = ()
) -> list[str]:
    """Return one reason that lists every pattern which matches nothing; none if all match.

    ``given`` has patterns by where they were given. ``layers`` are the names of the self-attention
    layers of all denoisers; ``alone`` those of other attention, which ``exclude`` may name although
    it is left alone anyhow.
    """
    layers, alone = tuple(layers), tuple(alone)
    wrong = [
        f"{pattern!r} in {where}"
        for where, patterns in given.items()
        for pattern in patterns
        if not (
            any(fnmatchcase(name, pattern) for name in (*layers, *alone))
            if where == "exclude"
            else matches_any(pattern, layers)
        )
    ]
    if not wrong or not layers:
        return []
    return [
        f"patterns that match no self-attention layer: {', '.join(wrong)} (the layers are "
        f"{_some(layers)}): write patterns of whole names, or leave them out"
    ]


def _some(layers: Iterable[str]) -> str:
    """The first and the last of the names that differ in numbers only."""
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    return ", ".join(
        f"{names[0]} to {names[-1]}" if names[1:] else names[0] for names in kinds.values()
    )
