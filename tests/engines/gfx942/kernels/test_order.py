"""Which XCD computes a tile of a LiteAttention step, and when: count_tiles and plan_lpt."""

from __future__ import annotations

import pytest
import torch

from liteattention_rocm.lite import bitmap
from tests.oracle import lpt

from . import machine

pytestmark = pytest.mark.usefixtures("emulator")


def listed(kept: torch.Tensor) -> torch.Tensor:
    """A bitmap [1, rows, q_blocks, words] whose tiles keep so many K blocks, [rows, q_blocks]."""
    most = max(int(kept.max()), 1)
    blocks = torch.arange(-(-most // 32) * 32)
    return bitmap.pack(blocks < kept[None, ..., None])


def expect_order(
    kept: torch.Tensor, slots: int = 0, together: int = 152, shift: int = 0
) -> list[list[int]]:
    _, q_blocks = kept.shape
    found = machine.plan(listed(kept), slots=slots, together=together, shift=shift).tolist()
    assert found == lpt.order(kept.flatten().tolist(), q_blocks, len(found), together, shift)
    return found


def random(shape: tuple[int, int], most: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(0, most + 1, shape, generator=generator)


@pytest.mark.parametrize(
    ("shape", "together"),
    [
        ((1, 1), 1),  # seven XCDs have nothing
        ((7, 1), 152),
        ((2, 255), 19),
        ((2, 256), 152),
        ((3, 257), 19),
        ((1, 1100), 152),  # a head on all XCDs, more tiles than one piece of counts
        ((12, 128), 152),
        ((40, 37), 40),  # heads that runs end in the middle of, in and before what is together
        ((500, 1), 19),
        ((2, 2600), 7),
    ],
)
def test_every_tile_has_one_place(shape: tuple[int, int], together: int) -> None:
    kept = random(shape, 60)
    kept[:, ::3] = 4
    found = torch.tensor(expect_order(kept, together=together))
    assert torch.equal(found[found >= 0].sort().values, torch.arange(kept.numel()))
    # An XCD has an eighth of the work, but for the tiles at its ends.
    work = torch.where(found >= 0, kept.flatten()[found] + lpt.TILE_BLOCKS, 0).sum(0)
    assert (work - work.sum() / 8).abs().max() <= 60 + lpt.TILE_BLOCKS


def test_even_lists_are_dealt_evenly() -> None:
    for tiles in (320, 325):
        found = torch.tensor(expect_order(torch.full((1, tiles), 5)))
        sizes = (found >= 0).sum(0)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("light", [range(400), range(400, 800), range(100, 700), range(0, 800, 2)])
def test_what_an_xcd_has_no_room_for_goes_behind_the_others(light: range) -> None:
    """Tiles of next to no work, of which an eighth of the work is more than an XCD has room for."""
    kept = random((8, 100), 3)
    kept.flatten()[[i for i in range(800) if i not in light]] += 500
    found = torch.tensor(expect_order(kept))
    assert found.shape == (150, 8)
    assert torch.equal(found[found >= 0].sort().values, torch.arange(800))
    work = torch.where(found >= 0, kept.flatten()[found] + lpt.TILE_BLOCKS, 0).sum(0)
    assert work.max() <= 1.06 * work.sum() / 8 + 503
    # Just enough room for all tiles.
    full = torch.tensor(expect_order(kept, slots=100))
    assert (full >= 0).all()


def test_work_that_would_not_fit_into_32_bits_is_shifted() -> None:
    kept = random((9, 37), 60)
    for shift in (1, 3, 9):
        expect_order(kept, shift=shift)


def test_masks_and_the_last_word_count_as_they_are_computed() -> None:
    generator = torch.Generator().manual_seed(3)
    read, must_do, must_skip = (
        torch.rand(shape, generator=generator) < share
        for shape, share in (((1, 2, 170, 96), 0.4), ((96,), 0.2), ((96,), 0.2))
    )
    read[..., 70:] |= torch.rand(1, 2, 170, 1, generator=generator) < 0.5  # bits that do not count
    for blocks in (70, 96):
        for do, skip in ((None, None), (must_do, None), (None, must_skip), (must_do, must_skip)):
            kept = read | (do if do is not None else False)
            kept = kept & ~(skip if skip is not None else torch.tensor(False))
            found = machine.plan(
                bitmap.pack(read),
                must_do=None if do is None else bitmap.pack(do),
                must_skip=None if skip is None else bitmap.pack(skip),
                k_blocks=blocks,
            ).tolist()
            counts = kept[..., :blocks].sum(-1).flatten().tolist()
            assert found == lpt.order(counts, 170, len(found), 152)


@pytest.mark.parametrize("waves", ["round-robin:1", "first-ahead", "last-ahead", "random:1"])
def test_the_order_of_waves_does_not_matter(waves: str) -> None:
    import liteattention_emulator as emulator

    emulator.set_option("order", waves)
    try:
        expect_order(random((4, 90), 50))
        expect_order(random((8, 100), 3) + 500 * (torch.arange(800) > 400).view(8, 100))
    finally:
        emulator.set_option("order", "")


@pytest.mark.parametrize("seed", range(6))
def test_random_lists(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    kept = random((pick(1, 30), pick(1, 60)), pick(0, 200), seed=seed)
    kept[torch.rand(kept.shape[0], generator=generator) < 0.4] //= 50
    tiles = kept.numel()
    expect_order(kept, slots=-(-tiles // 8) + pick(0, 3), together=pick(1, 80))
