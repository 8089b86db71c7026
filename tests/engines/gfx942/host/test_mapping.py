"""The four orders in which workgroups take tiles, against their definitions in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liteattention_rocm import _core

XCDS = 8
NAMES = ("swizzled_head_first", "naive_head_first", "swizzled_block_first", "naive_block_first")


def tiles(name: str, rows: int, q_blocks: int, count: int | None = None) -> list[int]:
    mapping = getattr(_core.Mapping, name)
    wanted = rows * q_blocks if count is None else count
    return [int(t) for t in _core.tiles_of(mapping, rows, q_blocks, wanted)]


def dealt(items: list[int]) -> list[int]:
    """Items in launch order such that each XCD gets a contiguous run, equal ones up to one."""
    size, larger = divmod(len(items), XCDS)
    runs = []
    for xcd in range(XCDS):
        length = size + (xcd < larger)
        runs.append(items[:length])
        items = items[length:]
    return [
        runs[xcd][turn] for turn in range(size + 1) for xcd in range(XCDS) if turn < len(runs[xcd])
    ]


def defined(name: str, rows: int, q_blocks: int) -> list[int]:
    if name == "naive_head_first":
        return list(range(rows * q_blocks))
    if name == "swizzled_head_first":
        return dealt(list(range(rows * q_blocks)))
    order = list(range(rows)) if name == "naive_block_first" else dealt(list(range(rows)))
    return [row * q_blocks + block for block in range(q_blocks) for row in order]


@given(name=st.sampled_from(NAMES), rows=st.integers(1, 70), q_blocks=st.integers(1, 40))
def test_a_mapping_is_a_bijection_and_as_it_is_defined(name: str, rows: int, q_blocks: int) -> None:
    found = tiles(name, rows, q_blocks)
    assert sorted(found) == list(range(rows * q_blocks))
    assert found == defined(name, rows, q_blocks)


def test_swizzled_head_first_keeps_a_head_on_one_xcd() -> None:
    for xcd in range(XCDS):
        heads = [tile // 86 for tile in tiles(NAMES[0], 64, 86)[xcd::XCDS]]
        assert sorted(set(heads)) == list(range(8 * xcd, 8 * xcd + 8))
        assert heads == sorted(heads)


def test_the_beginning_of_an_order_can_be_asked_for() -> None:
    for name in NAMES:
        assert tiles(name, 24, 9, 100) == tiles(name, 24, 9)[:100]
    with pytest.raises(ValueError, match="at most"):
        tiles(NAMES[0], 2, 3, 7)
