"""One dialect of options for all commands: lists, switches, numbers with bounds.

A list takes values separated by commas, or the option several times, or both; values that have
commas themselves (shapes, cases) come one an option. Switches are ``--name`` and ``--no-name``.
Every number has a smallest and a largest value. What earlier versions took for a switch is accepted
for one more minor version, with a line on standard error: see :func:`old_forms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

#: Largest values of numbers that a person may mean: more is a slip of the keyboard.
MOST_ROUNDS = 100_000
MOST_STEPS = 1000
MOST_PIXELS = 16_384
MOST_FRAMES = 10_000
MOST_THREADS = 4096
MOST_GPUS = 64

#: What earlier versions took for a switch: a value, and what says the same now.
SWITCH = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}

Function = TypeVar("Function", bound=Callable[..., Any])


class EmptyItem(ValueError):
    """A list has an item without text."""


def items(values: str | Sequence[str]) -> list[str]:
    """The items of a list option: ``-4,-2``, or ``["-4", "-2"]`` of an option given twice.

    Raises:
        EmptyItem: an item is empty, as between the commas of ``0.1,,0.2``.
    """
    texts = [values] if isinstance(values, str) else values
    found = [part.strip() for text in texts for part in text.split(",")]
    if not all(found):
        shown = " ".join(text for text in texts if not all(map(str.strip, text.split(","))))
        raise EmptyItem(f"{shown!r} has an empty item: leave the extra comma out")
    return found


def joined(values: Sequence[str] | None) -> str | None:
    """The text of a list option as if it were given once; None where it was not given."""
    return ",".join(values) if values else None


def listed(values: Sequence[str] | None, option: str, reasons: list[str]) -> list[str] | None:
    """:func:`items` of an option, None where it was not given; what is wrong joins ``reasons``."""
    if not values:
        return None
    try:
        return items(values)
    except EmptyItem as error:
        reasons.append(f"{option}: {error}")
        return None


def numbers(
    values: Sequence[str] | None,
    option: str,
    reasons: list[str],
    least: float = -math.inf,
    most: float = math.inf,
    kind: Callable[[str], Any] = int,
) -> list[Any] | None:
    """Numbers of a list option, from ``least`` to ``most``; what is wrong joins ``reasons``."""
    found = []
    for text in listed(values, option, reasons) or ():
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            what = "a whole number" if kind is int else "a number"
            bounds = f" from {least:,} to {most:,}" if math.isfinite(most) else ""
            reasons.append(f"{option} must be {what}{bounds}, got {text!r}")
        else:
            found.append(number)
    return found or None


def old_forms(**forms: Mapping[str, Sequence[str]]) -> Callable[[Function], Function]:
    """Let a command take what earlier versions took as the value of a switch.

    Args:
        forms: by option without its dashes, ``_`` for ``-``: value -> the options that say it now.
    """

    def mark(function: Function) -> Function:
        function.old_forms = {  # type: ignore[attr-defined]
            "--" + name.replace("_", "-"): values for name, values in forms.items()
        }
        return function

    return mark


def switch(name: str) -> dict[str, tuple[str, ...]]:
    """Old values of the switch ``--name`` that is off where it is not given."""
    return {value: (f"--{name}",) if on else (f"--no-{name}",) for value, on in SWITCH.items()}


class Command(TyperCommand):
    """A command that says a switch of an earlier version as it is said now."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace old forms, then parse."""
        forms = getattr(self.callback, "old_forms", {})
        new, said, at = [], [], 0
        while at < len(args):
            option, equals, value = args[at].partition("=")
            joined = args[at]
            at += 1
            if option not in forms:
                new.append(joined)
                continue
            if not equals and at < len(args) and args[at].lower() in forms[option]:
                value = args[at]
                joined += f" {value}"
                at += 1
            now = forms[option].get(value.lower())
            if now is None:
                new.append(joined)
                continue
            new += now
            said.append(f"{joined!r} is now {' '.join(now)!r}")
        if said and not ctx.resilient_parsing:
            typer.echo(
                f"deprecated, taken until the next minor version: {'; '.join(said)}", err=True
            )
        return super().parse_args(ctx, new)


def paragraphs(text: str | None) -> str | None:
    """Help text without the line ends of its source: a line for each paragraph."""
    if text is None:
        return None
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    return "\n\n".join(block for block in blocks if block)
