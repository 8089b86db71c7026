"""Markdown tables of reports, and what is counted in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others, which hold figures, to the right.

    Raises:
        ImportError: tabulate is not installed (extra: bench).
    """
    from tabulate import tabulate

    text: str = tabulate(
        list(rows),
        head,
        tablefmt="pipe",
        colalign=("left", *["right"] * (len(head) - 1)),
        disable_numparse=True,
    )
    return text.splitlines()


def counted(count: int, what: str) -> str:
    """Return ``2 threads``, and ``1 thread`` of one."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")
