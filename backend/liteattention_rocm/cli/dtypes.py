"""Names of dtypes as options: short ones and PyTorch's mean the same."""

from __future__ import annotations

_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHORT = {long: short for short, long in _LONG.items()}


def long(name: str) -> str:
    """Return PyTorch's name of a dtype, anything else as it is."""
    return _LONG.get(name, name)


def short(name: str) -> str:
    """Return the short name of a dtype, anything else as it is."""
    return _SHORT.get(name, name)


def both(*names: str, default: str = "") -> str:
    """Both names of dtypes, given by their short ones, as help texts list them."""
    marks = {default: ", the default"}
    *most, last = [f"{name} ({long(name)}{marks.get(name, '')})" for name in names]
    return f"{', '.join(most)} or {last}."
