"""Messages stay short however much is wrong: the first few items, and how many more there are."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

#: Wrong items that a message names, and characters that it gives each value or name.
MOST_NAMED, MOST_CHARACTERS = 4, 60

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MOST_CHARACTERS
_repr.maxlevel = 2


def shown(value: Any) -> str:
    """Return a value as messages show it: ASCII, at most ``MOST_CHARACTERS`` characters."""
    if isinstance(value, int) and abs(value) >= 2**64:  # Python refuses to print very long ones
        return f"an integer of {value.bit_length()} bits"
    try:
        text = _repr.repr(value)
    except Exception:  # whatever a value of any type raises
        return f"a {type(value).__name__}"
    return shortened(text)


def shortened(text: str) -> str:
    """Return a text in ASCII and without its middle if it is longer than messages want it."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2 - 2
        text = f"{text[:half]}...{text[-half:]}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


def first_few(items: Sequence[str], between: str = "; ", most: int = MOST_NAMED) -> str:
    """Join the first items and say how many more there are."""
    text = between.join(items[:most])
    more = len(items) - most
    return f"{text}{between}and {more:,} more" if more > 0 else text
