"""Renders a template into one HTML file that loads nothing."""

from __future__ import annotations

import base64
import functools
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_STATIC = files(__package__) / "static"


def render(template: str, *, scripts: tuple[str, ...] = (), **values: Any) -> str:
    """The text of a page.

    Args:
        template: name in ``templates``, without ``.html.j2``.
        scripts: names in ``static``, without ``.js``, that the page runs after the common ones.
        values: what the template shows; text is escaped, :class:`markupsafe.Markup` is not.

    Raises:
        jinja2.UndefinedError: the template asks for a value that is not given.
    """
    sources = [_source(f"{name}.js") for name in ("common", *scripts)]
    return (
        _environment()
        .get_template(f"{template}.html.j2")
        .render(style=_source("report.css"), scripts=sources, **values)
    )


def size_text(number: int) -> str:
    """Bytes for people: '840 B', '12.3 kB', '4.5 MB'."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def base64_text(data: bytes) -> str:
    """Bytes as text that stands in a page as it is."""
    return base64.b64encode(data).decode("ascii")


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = size_text
    return made


@functools.cache
def _source(name: str) -> Markup:
    """A style sheet or a script of this package, which needs no escaping."""
    return Markup((_STATIC / name).read_text(encoding="utf-8"))
