"""Write the options of every command into docs/commands.md: ``python docs/options.py``.

They stand between two marks, as the commands themselves describe them. A test compares the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from liteattention_rocm.cli.root import build

PAGE = Path(__file__).parent / "commands.md"
BEGIN, END = "<!-- options: python docs/options.py -->", "<!-- end of options -->"
#: Options of every command, which the page names once.
COMMON = ("--help",)


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those with commands below them first."""
    yield name, command
    for each, inner in sorted(getattr(command, "commands", {}).items()):
        yield from commands(inner, f"{name} {each}".strip())


def options(command: Any) -> list[Any]:
    """The options of one command, but for those that all have."""
    return [
        param
        for param in command.params
        if param.param_type_name == "option" and not set(param.opts) & set(COMMON)
    ]


def text() -> str:
    """The section: a table for each command that has options."""
    lines = []
    for name, command in commands(typer.main.get_command(build())):
        rows = [_row(param) for param in options(command)]
        if rows:
            heading = f"liteattention-rocm {name}".strip()
            lines += [f"### {heading}", "", "| option | what |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(param: Any) -> str:
    names = [*param.opts, *param.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names)
    help_text = " ".join((param.help or "").split())
    default = param.default
    words = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    if words and "default" not in help_text:
        help_text += f" Default: `{default}`."
    return f"| {shown} | {_escaped(help_text)} |"


def _escaped(words: str) -> str:
    """Text of a table's cell."""
    return re.sub(r"(?<!`)([|<*])", r"\\\1", words.replace("[", r"\["))


def with_options(page: str) -> str:
    """The page with the section as it is now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{text()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_options(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
