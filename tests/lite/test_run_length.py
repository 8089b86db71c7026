"""Run-length rows of LiteAttention, imported and exported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.run_length import from_run_length, to_run_length

from .test_bitmap import patterns


def naive_row(bits: list[bool], descending: bool) -> list[int]:
    """A LiteAttention row, walked block by block as its kernel does."""
    order = list(range(len(bits)))
    step = 1
    if descending:
        order, step = order[::-1], -1
    row, inside = [], False
    for j in order:
        if bits[j] != inside:
            row.append(j)
        inside = bits[j]
    if inside:
        row.append(order[-1] + step)
    return [len(row), *row, *[0] * (len(bits) + 1 - len(row))]


def read_opposite(row: list[int], reader_descending: bool) -> list[int]:
    """Blocks in the order in which a reader walks the row of a writer of the other direction."""
    step = -1 if reader_descending else 1
    walked = []
    for i in range(row[0], 1, -2):
        walked += list(range(row[i] + step, row[i - 1] + step, step))
    return walked


@given(patterns, st.booleans())
def test_run_length_round_trip(bits: list[bool], descending: bool) -> None:
    packed = bitmap.pack(torch.tensor(bits))
    rows = to_run_length(packed, len(bits), writer_descending=descending)
    assert rows.dtype == torch.int16 and rows.tolist() == naive_row(bits, descending)
    back = from_run_length(rows, len(bits), writer_descending=descending)
    assert torch.equal(back, packed)
    # the kernel that reads the row walks the other way and meets the same blocks
    walked = read_opposite(rows.tolist(), reader_descending=not descending)
    expected = [j for j, bit in enumerate(bits) if bit]
    assert walked == (expected if descending else expected[::-1])


def test_compute_all_seed_for_an_ascending_reader() -> None:
    rows = to_run_length(bitmap.full(1, 2, 3, 40), 40, writer_descending=True)
    assert rows.shape == (1, 2, 3, 42)
    assert rows[0, 1, 2, :3].tolist() == [2, 39, -1]


def test_import_ignores_what_lies_behind_the_length() -> None:
    row = torch.tensor([[2, 1, 3, 77, -5, 9]], dtype=torch.int16)
    assert bitmap.unpack(from_run_length(row, 4), 4).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize(
    ("row", "descending", "message"),
    [
        ([3, 0, 1, 2], False, "length 3 must be even"),
        ([-2, 0, 1, 2], False, "length -2 must be even, >= 0"),
        ([8, 0, 1, 2, 3], False, "leave room in a row of 5 numbers"),
        ([2, 3, 0, 0], False, "run 3, 0 does not walk up: is writer_descending=True meant?"),
        ([2, 0, 3, 0], True, "run 0, 3 does not walk down: is writer_descending=False meant?"),
        ([2, 1, 1, 0], False, "run 1, 1 does not walk up"),
        ([2, 3, 9, 0], False, "run 3, 9 leaves the 6 K blocks"),
        ([2, 3, -2, 0], True, "run 3, -2 leaves the 6 K blocks"),
        ([4, 0, 3, 2, 4], False, "run 2, 4 overlaps or precedes the run before it"),
        ([4, 3, 5, 0, 2], False, "run 0, 2 overlaps or precedes"),
    ],
)
def test_import_refuses_broken_rows(row: list[int], descending: bool, message: str) -> None:
    good = naive_row([True] * 3, descending)[: len(row)]
    good += [0] * (len(row) - len(good))
    rows = torch.tensor([good, row], dtype=torch.int16)
    with pytest.raises(ValueError, match="row 1: ") as caught:
        from_run_length(rows, 6, writer_descending=descending)
    assert message in str(caught.value) and "row 0" not in str(caught.value)


def test_import_lists_eight_rows_and_counts_the_rest() -> None:
    rows = torch.tensor([[1, 0, 0]] * 11, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"row 7: .*; and 3 more rows"):
        from_run_length(rows, 4)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 0)])
@pytest.mark.parametrize("descending", [False, True])
def test_no_blocks_are_no_runs(shape: tuple[int, ...], descending: bool) -> None:
    empty = torch.zeros(shape, dtype=torch.int32)
    rows = to_run_length(empty, 0, writer_descending=descending)
    assert rows.shape == (*shape[:-1], 2) and not rows.any()
    assert torch.equal(from_run_length(rows, 0, writer_descending=descending), empty)


def test_run_length_limits_and_types() -> None:
    largest = to_run_length(bitmap.full(1, 1, 1, 32767), 32767)
    assert largest[0, 0, 0, :3].tolist() == [2, 0, 32767]
    assert torch.equal(from_run_length(largest, 32767), bitmap.full(1, 1, 1, 32767))
    alternating = torch.arange(32767) % 2 == 1
    row = to_run_length(bitmap.pack(alternating), 32767)
    assert row[0] == 32766 and torch.equal(from_run_length(row, 32767), bitmap.pack(alternating))
    with pytest.raises(ValueError, match="16384 runs of kept K blocks do not fit an int16"):
        to_run_length(bitmap.pack(~alternating), 32767)
    with pytest.raises(ValueError, match="32768 K blocks do not fit int16"):
        to_run_length(bitmap.full(1, 1, 1, 32768), 32768)
    with pytest.raises(ValueError, match="32768 K blocks do not fit int16"):
        from_run_length(torch.zeros(1, 3, dtype=torch.int16), 32768)
    with pytest.raises(TypeError, match=r"rows are int16, got torch.int32"):
        from_run_length(torch.zeros(1, 3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="got none"):
        from_run_length(torch.zeros((), dtype=torch.int16), 4)
