"""Line, point and bar charts as inline SVG: colours are the page's, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 440, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 40
_COLOURS = 10  # of the style sheet
_CHARACTER = 6.2  # width of one in labels, about

Style = Literal["line", "dashed", "dotted", "points"]


@dataclass(frozen=True)
class Series:
    """Values of one thing; a None in ``y`` interrupts its line.

    ``tips`` name each point to those who point at it (by default its numbers), ``names`` stand
    beside it. ``links`` are configurations that a point chooses in the suite's report. ``colour``
    is the number of a colour, None for that of text.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Style = "line"
    colour: int | None = 0
    tips: Sequence[str] = ()
    names: Sequence[str] = ()
    links: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A figure: its title, its picture, and names with colours for its legend."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str, str], ...]
    note: str = ""


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    zero: bool = True,
    log: bool = False,
    note: str = "",
    legend: bool = True,
) -> Chart:
    """Lines and points over numbers.

    Args:
        title: what it shows, as a heading and for those who cannot see it.
        series: at least one with a value.
        x_label, y_label: with units.
        zero: whether the y axis begins at 0.
        log: both axes logarithmic; all values must be above 0.
        note: a sentence below it.
        legend: whether names stand below it.

    Raises:
        ValueError: there is nothing to draw.
    """
    pairs = [(x, y) for one in series for x, y in zip(one.x, one.y, strict=True) if y is not None]
    if not pairs:
        raise ValueError(f"chart {title!r} has no values")
    across = _Axis.of([x for x, _ in pairs], (_LEFT, _WIDTH - _RIGHT), log=log)
    up = _Axis.of(
        [y for _, y in pairs] + ([0.0] if zero and not log else []),
        (_HEIGHT - _BOTTOM, _TOP),
        log=log,
    )
    parts = [_frame(up, y_label, x_label)]
    for place, text in across.ticks():
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                place, _HEIGHT - _BOTTOM + 15, text
            )
        )
    # Names keep clear of points and of each other.
    taken: list[_Box] = [
        (across.place(x) - 5, up.place(y) - 5, across.place(x) + 5, up.place(y) + 5)
        for one in series
        if one.names
        for x, y in zip(one.x, one.y, strict=True)
        if y is not None
    ]
    for one in series:
        parts.append(_drawn(one, across, up, taken))
    names = tuple((one.name, _class(one.colour), one.style) for one in series)
    return Chart(title, _svg(title, parts), names if legend else (), note)


def bar_chart(
    title: str, groups: Sequence[str], series: Sequence[Series], *, y_label: str, note: str = ""
) -> Chart:
    """Bars side by side: ``groups`` along the x axis, a bar of each series in each.

    ``x`` of a series is not looked at; its ``y`` has one value, or None, for each group.

    Raises:
        ValueError: there is nothing to draw, or a series has another number of values.
    """
    if any(len(one.y) != len(groups) for one in series):
        raise ValueError(f"chart {title!r}: every series needs {len(groups)} values")
    values = [y for one in series for y in one.y if y is not None]
    if not values:
        raise ValueError(f"chart {title!r} has no values")
    up = _Axis.of([0.0, *values], (_HEIGHT - _BOTTOM, _TOP))
    parts = [_frame(up, y_label, "")]
    room = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    width = 0.82 * room / len(series)
    # Where labels would run into each other, groups have numbers, which the note explains.
    numbered = max(map(len, groups)) * _CHARACTER > room
    for i, group in enumerate(groups):
        start = _LEFT + room * i
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                start + room / 2, _HEIGHT - _BOTTOM + 15, i + 1 if numbered else group
            )
        )
        for j, one in enumerate(series):
            value = one.y[i]
            if value is None:
                continue
            top = up.place(value)
            parts.append(
                Markup(
                    '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                    "<title>{}, {}: {:.4g}</title></rect>"
                ).format(
                    _class(one.colour),
                    start + 0.09 * room + width * j,
                    top,
                    max(width - 1, 1),
                    up.place(0) - top,
                    one.name,
                    group,
                    value,
                )
            )
    if numbered:
        listed = "; ".join(f"{i}: {group}" for i, group in enumerate(groups, 1))
        note = f"{listed}. {note}".strip()
    names = tuple((one.name, _class(one.colour), "bar") for one in series)
    return Chart(title, _svg(title, parts), names, note)


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high`` between two places of the picture."""

    low: float
    high: float
    places: tuple[float, float]
    step: float
    log: bool = False

    @staticmethod
    def of(values: Sequence[float], places: tuple[float, float], *, log: bool = False) -> _Axis:
        low, high = min(values), max(values)
        if log:
            low, high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            return _Axis(low, max(high, low + 1), places, 1.0, True)
        if low == high:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        step = _nice((high - low) / 5)
        # An axis begins and ends at a tick.
        return _Axis(math.floor(low / step) * step, math.ceil(high / step) * step, places, step)

    def place(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return self.places[0] + share * (self.places[1] - self.places[0])

    def ticks(self) -> list[tuple[float, str]]:
        count = round((self.high - self.low) / self.step)
        found = []
        for i in range(count + 1):
            value = self.low + i * self.step
            if self.log:
                found.append((self.place(10**value), _power(int(value))))
            else:
                digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
                found.append((self.place(value), f"{value:,.{digits}f}"))
        return found


def _power(exponent: int) -> str:
    if -2 <= exponent <= 4:
        return f"{10**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def _class(colour: int | None) -> str:
    return "text" if colour is None else f"s{colour % _COLOURS}"


def _svg(title: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, title, Markup("").join(parts)
    )


def _frame(up: _Axis, y_label: str, x_label: str) -> Markup:
    """Grid lines, numbers of the y axis, names of both."""
    parts = []
    for place, text in up.ticks():
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, place, place, _LEFT - 6, place + 4, text)
        )
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        Markup(
            '<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>'
            '<text class="label" text-anchor="middle" transform="translate(12 {}) rotate(-90)">{}'
            "</text>"
        ).format((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, middle, y_label)
    )
    return Markup("").join(parts)


_Box = tuple[float, float, float, float]


def _drawn(one: Series, across: _Axis, up: _Axis, taken: list[_Box]) -> Markup:
    """A series; the names of points where none has been drawn, which ``taken`` lists."""
    style = _class(one.colour)
    parts = []
    if one.style != "points":
        path, pen = [], "M"
        for x, y in zip(one.x, one.y, strict=True):
            if y is None:
                pen = "M"
                continue
            path.append(f"{pen}{across.place(x):.1f} {up.place(y):.1f}")
            pen = "L"
        parts.append(
            Markup('<path class="{} {}" data-series="{}" d="{}"><title>{}</title></path>').format(
                style, one.style, one.name, "".join(path), one.name
            )
        )
    if one.style in ("line", "points"):
        radius = 5 if one.style == "points" else 2.2
        for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
            if y is None:
                continue
            tip = one.tips[i] if one.tips else f"{one.name}: {x:.4g}, {y:.4g}"
            link = Markup("")
            if one.links:
                link = Markup(' data-choose="{}" role="button" tabindex="0" aria-label="{}"')
                link = link.format(one.links[i], tip)
            parts.append(
                Markup(
                    '<circle class="{}" data-series="{}" cx="{:.1f}" cy="{:.1f}" r="{}"{}>'
                    "<title>{}</title></circle>"
                ).format(style, one.name, across.place(x), up.place(y), radius, link, escape(tip))
            )
            if one.names:
                parts.append(_name(one, i, across.place(x), up.place(y), taken))
    return Markup("").join(parts)


def _name(one: Series, i: int, x: float, y: float, taken: list[_Box]) -> Markup:
    """The name of a point beside it, on the side where there is room; faint if there is none."""
    width = len(one.names[i]) * _CHARACTER
    for start, top in (
        (x + 9, y - 5),
        (x - 9 - width, y - 5),
        (x + 9, y + 13),
        (x - 9 - width, y + 13),
    ):
        box = (start, top - 10, start + width, top + 2)
        inside = start >= _LEFT and start + width <= _WIDTH
        if inside and not any(
            box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken
        ):
            taken.append(box)
            extra = ""
            break
    else:
        start, top, extra = x + 9, y - 5, " crowded"
    link = Markup(' data-choose="{}"').format(one.links[i]) if one.links else ""
    return Markup('<text class="name{}"{} x="{:.1f}" y="{:.1f}">{}</text>').format(
        extra, link, start, top, one.names[i]
    )
