"""Tables of a page: what stands in a cell, and what it is sorted by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """``text`` is shown. ``value`` is what the column is sorted by; None sorts last.

    ``bar`` is the length of a bar below the text, as a share of the cell's width, and ``mark`` the
    place of the ratio 1 on the same scale; None draws none.
    """

    text: str
    value: float | str | None = None
    bar: float | None = None
    mark: float | None = None


@dataclass(frozen=True)
class Table:
    """A sortable table. The first ``text_columns`` columns stand to the left, figures to the right.

    One that is ``folded`` shows its caption until it is opened.

    Raises:
        ValueError: a row has another number of cells than ``head``.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    text_columns: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        wrong = [i for i, row in enumerate(self.rows) if len(row) != len(self.head)]
        if wrong:
            raise ValueError(
                f"table {self.caption!r} has {len(self.head)} columns; rows {wrong} have others"
            )


def text_cells(values: Iterable[str]) -> list[Cell]:
    """A cell for each text, sorted as text."""
    return [Cell(value, value) for value in values]


def figure_cells(values: Iterable[float | None], form: str) -> list[Cell]:
    """A cell for each figure; an absent one is empty."""
    return [Cell("" if value is None else form.format(value), value) for value in values]


def ratio_cells(values: Sequence[float | None], form: str = "{:.2f}x") -> list[Cell]:
    """A cell with a bar for each ratio of a column; bars have one scale, on which 1 is marked."""
    most = max([1.0, *(value for value in values if value is not None)])
    return [
        Cell("") if value is None else Cell(form.format(value), value, value / most, 1 / most)
        for value in values
    ]
