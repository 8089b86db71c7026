"""The kernel that copies heads between GPUs: every element and no other, whatever the programs."""

from collections.abc import Iterator

import pytest
import torch
from triton import knobs

from liteattention_rocm.engines.triton import copies

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
HEADS = 6
UNTOUCHED = -77


def tensor(rows: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, rows, heads, width] of numbers that all differ, in memory with gaps between its heads."""
    numbers = torch.arange(2 * rows * heads * (width + 3), device=DEVICE)
    return (numbers % 251).to(dtype).view(2, rows, heads, width + 3)[..., :width]


def calls() -> Iterator[tuple[torch.dtype, int, int, int]]:
    """(dtype, width, rows, programs)."""
    yield torch.int64, 32, 300, 4  # head dim 128 in words of 8 bytes
    yield torch.int64, 16, 128, 64  # more programs than there is work
    yield torch.int64, 24, 1, 1
    yield torch.bfloat16, 5, 257, 3  # what has no words


@pytest.mark.parametrize(("dtype", "width", "rows", "programs"), calls())
@pytest.mark.parametrize("into", [False, True], ids=["out of", "into"])
@pytest.mark.parametrize("heads", [slice(2, 5), [5, 0, 3]], ids=["a run", "dealt"])
def test_heads_are_copied_and_nothing_else(
    dtype: torch.dtype, width: int, rows: int, programs: int, into: bool, heads: slice | list[int]
) -> None:
    every, some = tensor(rows, HEADS, width, dtype), tensor(rows, 3, width, dtype)
    place = torch.full((2, rows, HEADS if into else 3, width + 1), UNTOUCHED, device=DEVICE)
    place = place.to(dtype)
    target, source = place[..., :width], some if into else every
    wanted = target.clone()
    if into:
        wanted[:, :, heads] = source
    else:
        wanted.copy_(source[:, :, heads])
    which = heads if isinstance(heads, slice) else torch.tensor(heads, device=DEVICE)
    copies.copy(target, source, which, into=into, programs=programs)
    assert torch.equal(target, wanted)
    assert (place[..., width] == UNTOUCHED).all()
