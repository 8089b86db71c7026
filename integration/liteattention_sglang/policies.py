"""What a video request may skip: put together from three places, field by field.

The server's environment, the server's ``--attention-backend-config`` and the request. Knows nothing
of SGLang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from liteattention_rocm import SkipPolicy, brief

#: Where a request puts its options: ``diffusers_kwargs={"liteattention": {...}}``.
REQUEST_KEY = "liteattention"
#: The same place, as messages name it.
WHERE = f"diffusers_kwargs[{REQUEST_KEY!r}]"
#: What a request may hold: everything takes milliseconds then, wrong values included. The server's
#: own defaults have no bounds.
MOST_RANGES, MOST_PATTERNS, LONGEST_PATTERN = 512, 256, 256
MOST_VALUES, MOST_CHARACTERS, MOST_LEVELS = 2048, 8192, 5
#: Environment: the server's defaults, a JSON object with fields of :class:`SkipPolicy`.
POLICY_VARIABLE = "LITEATTENTION_POLICY"


class _Server:
    """The defaults that were asked for last, so that requests do not validate them again.

    Key: the text of ``LITEATTENTION_POLICY`` and the config. Owner: this module, one for the
    process. Lifetime: until others are asked for.
    """

    latest: tuple[str, dict[str, Any], SkipPolicy] | None = None


_server = _Server()


def server_policy(config: Mapping[str, Any] | None) -> SkipPolicy:
    """Return the server's defaults: ``LITEATTENTION_POLICY``, then ``config`` on top of it.

    ``config`` holds fields of :class:`SkipPolicy`, thresholds in log2 units. Raises
    ``ValueError`` naming the source and every reason.
    """
    text, given = os.environ.get(POLICY_VARIABLE, ""), dict(config or {})
    if _server.latest is not None and _server.latest[:2] == (text, given):
        return _server.latest[2]
    fields: Any = {}
    if text.strip():
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{POLICY_VARIABLE} is not JSON ({error}): {brief.shown(text)}"
            ) from error
        if not isinstance(fields, dict):
            raise ValueError(
                f"{POLICY_VARIABLE} must be a JSON object with fields of SkipPolicy, for example "
                f'{{"budget": 0.05}}, got {brief.shown(text)}'
            )
    policy = _merge(SkipPolicy(), fields, POLICY_VARIABLE)
    policy = _merge(policy, given, "--attention-backend-config")
    _server.latest = text, given, policy
    return policy


def request_policy(extra: Mapping[str, Any] | None, defaults: SkipPolicy) -> SkipPolicy:
    """Return the policy of a request: the server's defaults with the request's fields in them.

    ``extra`` is the request's ``diffusers_kwargs``. Its ``"liteattention"`` is an object with
    fields of :class:`SkipPolicy` (thresholds in log2 units), or false for dense attention. Raises
    ``ValueError`` listing every reason.
    """
    options = own_options(extra)
    if options is None:
        return defaults
    if options is False:
        return defaults.model_copy(update={"enabled": False})
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{WHERE} must be an object with fields of SkipPolicy, for example "
            '{"budget": 0.05, "warmup_steps": 4}, or false for dense attention, got '
            f"{brief.shown(options)}"
        )
    reasons = _too_much(options)
    if reasons:
        raise ValueError(
            f"{WHERE}: {'; '.join(reasons)}: give so much as the server's defaults "
            "(--attention-backend-config), which have no bounds"
        )
    return _merge(defaults, dict(options), WHERE)


def _too_much(options: Mapping[str, Any]) -> list[str]:
    """Say which bounds of a request its options exceed, before anything looks at their values."""
    reasons = []
    for field in ("must_do", "must_skip"):
        ranges = options.get(field)
        if isinstance(ranges, list | tuple) and len(ranges) > MOST_RANGES:
            reasons.append(
                f"{field} has {len(ranges):,} ranges, of which a request may have {MOST_RANGES}"
            )
    for field in ("layer_thresholds", "layer_budgets"):
        patterns = options.get(field)
        if not isinstance(patterns, Mapping):
            continue
        if len(patterns) > MOST_PATTERNS:
            reasons.append(
                f"{field} has {len(patterns):,} patterns, of which a request may have "
                f"{MOST_PATTERNS}"
            )
        elif any(isinstance(one, str) and len(one) > LONGEST_PATTERN for one in patterns):
            reasons.append(
                f"{field} has patterns of more than {LONGEST_PATTERN} characters, which no layer's "
                "name has"
            )
    return reasons or _too_large(options)


def _too_large(options: Mapping[str, Any]) -> list[str]:
    """Count values, characters and levels, and stop where one is past its bound."""
    values = characters = 0
    level: list[Any] = [options]
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for one in level:
            inside: Any = ()
            if isinstance(one, Mapping | list | tuple):
                inside = one.values() if isinstance(one, Mapping) else one
                values += len(one)
            if values > MOST_VALUES:
                return [f"a request may hold {MOST_VALUES:,} values in all"]
            texts = one if isinstance(one, Mapping) else (one,)
            characters += sum(len(text) for text in texts if isinstance(text, str | bytes))
            if characters > MOST_CHARACTERS:
                return [f"names and texts of a request may have {MOST_CHARACTERS:,} characters"]
            below.extend(inside)
        level = below
        if not level:
            return []
    return [f"values of a request lie within at most {MOST_LEVELS} levels of lists and objects"]


def own_options(extra: Mapping[str, Any] | None) -> Any:
    """Return what a request itself says, unchecked; None if it says nothing."""
    return (extra or {}).get(REQUEST_KEY)


def asks(extra: Mapping[str, Any] | None) -> bool:
    """Say whether a request has options of its own."""
    return own_options(extra) is not None


def for_warm_up(policy: SkipPolicy) -> SkipPolicy:
    """Return the policy of a warm-up request, which may be of any size and number of steps.

    Token ranges and a last step are about a real request and need not fit it.
    """
    return policy.model_copy(update={"must_do": (), "must_skip": (), "last_step": None})


def _merge(policy: SkipPolicy, fields: dict[str, Any], where: str) -> SkipPolicy:
    if not fields:
        return policy
    try:
        return policy.model_copy(update=fields)
    except ValidationError as error:
        reasons = []
        for item in error.errors(include_url=False):  # the first few, see SkipPolicy
            field = ".".join(str(part) for part in item["loc"])
            reason = item["msg"].removeprefix("Value error, ")
            reasons.append(f"{field}: {reason}" if field else reason)
        raise ValueError(f"{where}: {'; '.join(reasons)}") from error
