"""JSON that others wrote: whatever is wrong with it is a ``ValueError`` of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Levels of objects and lists; no file of this project has ten.
MOST_LEVELS = 64


def parse(
    text: str, what: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text.
        what: what messages call it.
        object_pairs_hook: as that of ``json.loads``.

    Raises:
        ValueError: it is not JSON, or nested deeper than :data:`MOST_LEVELS`.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:  # also a number with more digits than Python reads
        raise ValueError(f"{what} is not JSON: {error}") from error
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        level, depth = inner, depth + 1
        if depth > MOST_LEVELS + 1:
            raise _too_deep(what)
    return value


def _too_deep(what: str) -> ValueError:
    return ValueError(f"{what} is nested deeper than {MOST_LEVELS} levels: nothing here needs that")


def read(path: Path) -> Any:
    """Return the value of a JSON file in UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: see :func:`parse`; or it is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    return parse(text, str(path))
