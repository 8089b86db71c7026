"""Which XCD computes a tile of a LiteAttention step, and when.

count_tiles, and plan_lpt or pack_lists.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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
    kept: torch.Tensor, slots: int = 0, together: int = 152, shift: int = 0, units: int = 0
) -> list[list[int]]:
    _, q_blocks = kept.shape
    sizes = {"together": together, "shift": shift, "units": units}
    found = machine.plan(listed(kept), slots=slots, **sizes).tolist()
    assert found == lpt.order(kept.flatten().tolist(), q_blocks, len(found), **sizes)
    return found


def like(shape: tuple[int, int], mean: int, *, swing: float = 0.25) -> torch.Tensor:
    """Lists that grow and shrink within a head, by so much of the mean."""
    rows, q_blocks = shape
    wave = torch.sin(torch.linspace(0, 12, q_blocks)) * swing
    return (mean * (1 + wave)).round().int().expand(rows, -1).contiguous()


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


@pytest.mark.parametrize(
    ("shape", "together", "units"),
    [
        ((1, 1), 152, 38),
        ((7, 1), 152, 3),
        ((12, 64), 152, 38),  # all of a run is packed
        ((24, 64), 152, 38),  # 40 tiles before them that are ordered head by head
        ((40, 37), 40, 10),
        ((32, 125), 19, 38),  # hundreds before them
        ((3, 257), 19, 5),
        ((500, 1), 152, 63),
        ((2, 255), 19, 1),
    ],
)
def test_few_tiles_are_packed(shape: tuple[int, int], together: int, units: int) -> None:
    for kept in (like(shape, 200), random(shape, 400), random(shape, 9) ** 3):
        found = torch.tensor(expect_order(kept, together=together, units=units))
        assert torch.equal(found[found >= 0].sort().values, torch.arange(kept.numel()))


@pytest.mark.parametrize("heads", [6, 10, 12, 20])
def test_packed_lists_end_together(heads: int) -> None:
    """At 32,760 tokens: in LPT's order it takes 5 to 11 % longer than an equal share."""
    kept = like((heads, 128), 297, swing=0.5)
    work = kept.flatten() + lpt.TILE_BLOCKS
    share = int(work.sum()) / (8 * 38)

    def end(order: list[list[int]]) -> float:
        queues = ([int(work[tile]) for tile in x if tile >= 0] for x in zip(*order, strict=True))
        return max(lpt.finish(queue, 38)[-1] for queue in queues) / share

    by_lpt, packed = end(expect_order(kept)), end(expect_order(kept, units=38))
    assert by_lpt > 1.045 and packed < 1 + (by_lpt - 1) * 0.6


def test_what_does_not_fit_keeps_the_order_of_lpt() -> None:
    even = torch.full((6, 128), 512)  # two tiles and a half for each unit
    assert expect_order(even, units=38) == expect_order(even)
    longest = even.clone()
    longest[5, 7] = 4000  # longer than an equal share of all
    plain, packed = (torch.tensor(expect_order(longest, units=units)) for units in (0, 38))
    xcd = int((plain == 5 * 128 + 7).any(0).int().argmax())
    assert torch.equal(packed[:, xcd], plain[:, xcd])


def greedy_end(order: list[list[int]], kept: torch.Tensor, engines: tuple[int, ...]) -> float:
    """When the last XCD is done, over an equal share of the work (:func:`end_of`)."""
    work = (kept.flatten() + lpt.TILE_BLOCKS).tolist()
    taken = [
        [work[tile] if tile >= 0 else 0 for tile in column] for column in zip(*order, strict=True)
    ]
    return max(end_of(each, engines) for each in taken) / (sum(work) / (8 * sum(engines)))


def end_of(work: Sequence[int], engines: tuple[int, ...]) -> float:
    """When an XCD is done with this work.

    engines: the compute units of each shader engine. A workgroup goes to the next engine in turn,
    and waits for it before those behind it.
    """
    loads, now = [[0.0] * units for units in engines], 0.0
    for place, blocks in enumerate(work):
        free = loads[place % len(engines)]
        now = max(now, free[0])
        heapq.heapreplace(free, now + blocks)
    return max(map(max, loads))


@pytest.mark.parametrize("seed", range(4))
def test_packed_lists_are_never_modelled_to_end_later(seed: int) -> None:
    """Nor much later where an XCD's four shader engines are served strictly in turn."""
    strict = []
    for kept in (
        random((12, 64), 250, seed=seed),
        like((10 + seed, 128), 200, swing=0.1 * (1 + seed)),
        6 + torch.arange(19 * 64).view(19, 64) % 4,
        random((24, 64), 9, seed=seed) ** 2 + 60,
    ):
        plain, packed = expect_order(kept), expect_order(kept, units=38)
        assert greedy_end(packed, kept, (38,)) <= greedy_end(plain, kept, (38,))
        engines = (10, 10, 9, 9)
        strict.append(greedy_end(packed, kept, engines) / greedy_end(plain, kept, engines))
    assert sum(strict) / len(strict) < 1.04 and max(strict) < 1.12


def test_runs_without_room_or_too_long_for_packing_keep_the_order_of_lpt() -> None:
    light = random((8, 100), 3)
    light.flatten()[400:] += 500
    many = random((1, 6400), 4)
    many[0, 3200:] += 40
    for kept, slots in ((light, 0), (light, 100), (many, 0), (many, 6400)):
        expect_order(kept, slots=slots, units=38)


@pytest.mark.parametrize("waves", ["round-robin:1", "first-ahead", "last-ahead", "random:1"])
def test_the_order_of_waves_does_not_matter(waves: str) -> None:
    import liteattention_emulator as emulator

    emulator.set_option("order", waves)
    try:
        expect_order(random((4, 90), 50))
        expect_order(random((8, 100), 3) + 500 * (torch.arange(800) > 400).view(8, 100))
        expect_order(like((12, 60), 200), units=10)
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
    slots, together = -(-tiles // 8) + pick(0, 3), pick(1, 80)
    expect_order(kept, slots=slots, together=together)
    expect_order(kept, slots=slots, together=together, units=pick(1, 63), shift=pick(0, 2))


def expect_parts(
    kept: torch.Tensor, units: int, together: int = 152
) -> tuple[list[list[tuple[int, int, int]]], int]:
    """Each XCD's (tile, first K block, last one plus 1), in order; and how many lists are cut."""
    _, q_blocks = kept.shape
    found = machine.cut(listed(kept), units, together=together)
    counts, slots = kept.flatten().tolist(), len(found.order)
    expected = lpt.placed(counts, q_blocks, slots, together, units)
    assert found.order.tolist() == expected.order and found.cuts.tolist() == expected.cuts
    parts = found.parts.tolist()
    xcds: list[list[tuple[int, int, int]]] = [[] for _ in range(8)]
    for row, here, tiles in zip(expected.parts, parts, expected.order, strict=True):
        for x, (part, written, tile) in enumerate(zip(row, here, tiles, strict=True)):
            if part is None:
                continue
            assert written == part
            first, end, slot, _ = part
            xcds[x].append((tile, first, counts[tile] if slot < 0 else end))
    return xcds, sum(many > 0 for _, many in expected.cuts)


@pytest.mark.parametrize(
    ("shape", "together", "units"),
    [
        ((1, 1), 152, 38),  # one list for an XCD, or none
        ((1, 9), 152, 3),
        ((3, 128), 152, 38),
        ((12, 64), 152, 38),
        ((24, 64), 152, 38),
        ((32, 125), 19, 38),
        ((3, 257), 19, 5),
        ((40, 10), 7, 1),
        ((100, 1), 152, 63),
    ],
)
def test_lists_are_cut_into_equal_stretches(
    shape: tuple[int, int], together: int, units: int
) -> None:
    cut = 0
    for kept in (
        torch.full(shape, 512),
        like(shape, 200, swing=0.9),
        random(shape, 400),
        random(shape, 9) ** 3,
        random(shape, 3) // 3 * 900,  # most of them empty
    ):
        parts, here = expect_parts(kept, units, together)
        cut += here
        # Each list is computed once, from its first block to its last.
        each = sorted(part for xcd in parts for part in xcd)
        covered = torch.zeros(kept.numel(), dtype=torch.int64)
        for tile, first, end in each:
            assert covered[tile] == first and (end > first or kept.flatten()[tile] == 0)
            assert end - first >= min(lpt.LEAST_PART, int(kept.flatten()[tile]))
            covered[tile] = end
        assert torch.equal(covered, kept.flatten().long())
        assert {tile for tile, _, _ in each} == set(range(kept.numel()))
    assert cut or units == 1


@pytest.mark.parametrize("heads", [1, 3, 5, 12])
def test_cut_lists_end_together(heads: int) -> None:
    """At 32,760 tokens: a stretch may end 8 blocks late, and its list start twice."""
    for kept in (
        torch.full((heads, 128), 512),
        like((heads, 128), 297, swing=0.5),
        random((heads, 128), 512) ** 2 // 512,
    ):
        parts, _ = expect_parts(kept, 38)
        work = [[end - first + lpt.TILE_BLOCKS for _, first, end in xcd] for xcd in parts]
        for x, taken in enumerate(work):
            share = max(sum(taken) / 38, lpt.LEAST_STRETCH)
            assert lpt.finish(taken, 38)[-1] <= share + lpt.CUT_COST, x


@pytest.mark.parametrize("heads", [1, 3, 5, 12])
def test_cut_lists_end_before_whole_ones(heads: int) -> None:
    """Nor much later where an XCD's four shader engines are served strictly in turn."""
    for kept in (
        torch.full((heads, 128), 512),
        like((heads, 128), 297, swing=0.5),
        random((heads, 128), 512) ** 2 // 512,
    ):
        whole = expect_order(kept, units=38, slots=len(kept.flatten()))
        parts, _ = expect_parts(kept, 38)
        work = [[end - first + lpt.TILE_BLOCKS for _, first, end in xcd] for xcd in parts]
        share = int((kept + lpt.TILE_BLOCKS).sum()) / 304
        for engines, most in (((38,), 1.0), ((10, 10, 9, 9), 1.09)):
            cut = max(end_of(each, engines) for each in work) / share
            assert cut <= most * greedy_end(whole, kept, engines), engines


@pytest.mark.parametrize("waves", ["round-robin:1", "first-ahead", "last-ahead", "random:1"])
def test_the_order_of_waves_does_not_matter_to_cut_lists(waves: str) -> None:
    import liteattention_emulator as emulator

    emulator.set_option("order", waves)
    try:
        _, cut = expect_parts(random((3, 90), 400), 38)
        assert cut
    finally:
        emulator.set_option("order", "")
