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

from liteattention_rocm import SkipPolicy

#: Where a request puts its options: ``diffusers_kwargs={"liteattention": {...}}``.
REQUEST_KEY = "liteattention"
#: The same place, as messages name it.
WHERE = f"diffusers_kwargs[{REQUEST_KEY!r}]"
#: Environment: the server's defaults, a JSON object with fields of :class:`SkipPolicy`.
POLICY_VARIABLE = "LITEATTENTION_POLICY"


def server_policy(config: Mapping[str, Any] | None) -> SkipPolicy:
    """Return the server's defaults: ``LITEATTENTION_POLICY``, then ``config`` on top of it.

    ``config`` holds fields of :class:`SkipPolicy`, thresholds in log2 units. Raises
    ``ValueError`` naming the source and every reason.
    """
    text = os.environ.get(POLICY_VARIABLE, "")
    fields: Any = {}
    if text.strip():
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{POLICY_VARIABLE} is not JSON ({error}): {text!r}") from error
        if not isinstance(fields, dict):
            raise ValueError(
                f"{POLICY_VARIABLE} must be a JSON object with fields of SkipPolicy, for example "
                f'{{"threshold": -6}}, got {text!r}'
            )
    policy = _merge(SkipPolicy(), fields, POLICY_VARIABLE)
    return _merge(policy, dict(config or {}), "--attention-backend-config")


def request_policy(extra: Mapping[str, Any] | None, defaults: SkipPolicy) -> SkipPolicy:
    """Return the policy of a request: the server's defaults with the request's fields in them.

    ``extra`` is the request's ``diffusers_kwargs``. Its ``"liteattention"`` is an object with
    fields of :class:`SkipPolicy` (thresholds in log2 units), or false for dense attention. Raises
    ``ValueError`` listing every reason.
    """
    options = (extra or {}).get(REQUEST_KEY)
    if options is None:
        return defaults
    if options is False:
        return defaults.model_copy(update={"enabled": False})
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{WHERE} must be an object with fields of SkipPolicy, for example "
            f'{{"threshold": -6, "warmup_steps": 4}}, or false for dense attention, got {options!r}'
        )
    return _merge(defaults, dict(options), WHERE)


def asks(extra: Mapping[str, Any] | None) -> bool:
    """Say whether a request has options of its own."""
    return (extra or {}).get(REQUEST_KEY) is not None


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
        for item in error.errors(include_url=False):
            field = ".".join(str(part) for part in item["loc"])
            reason = item["msg"].removeprefix("Value error, ")
            reasons.append(f"{field}: {reason}" if field else reason)
        raise ValueError(f"{where}: {'; '.join(reasons)}") from error
