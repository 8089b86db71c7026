"""Text that can be written: what is given in bytes that are no UTF-8 cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def unwritable(value: Any) -> str | None:
    """Why text somewhere in ``value`` could not be written into a file; None if all of it could be.

    Args:
        value: text, a path, or lists and mappings of them, keys included; others are passed over.
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next((why for item in value if (why := unwritable(item)) is not None), None)
    if not isinstance(value, str | Path):
        return None
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        return f"{str(value)!r} has characters that are no UTF-8, so no report could name it"
    return None
