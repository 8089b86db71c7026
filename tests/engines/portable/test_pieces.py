"""Lists cut along K: the rule, and the Hopper kernel that walks and merges pieces.

The kernel that lists tiles runs in Triton's interpreter, the other one on :mod:`.gluon_machine`, of
three multiprocessors; pieces have two tiles or more there.
"""

from __future__ import annotations

import heapq
import math
import os
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from liteattention_rocm import TileGeometry, attention, lite_attention
from liteattention_rocm.lite import bitmap, budget

from . import gluon_machine

triton = pytest.importorskip("triton")
from liteattention_rocm import remembered  # noqa: E402
from liteattention_rocm.engines.environment import architecture  # noqa: E402
from liteattention_rocm.engines.triton import kernels, launch  # noqa: E402
from liteattention_rocm.engines.triton.engine import PortableEngine  # noqa: E402

from . import test_weighing  # noqa: E402
from .test_hopper_machine import run_on_machine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if GPU else CPU
UNITS = 7
TILE = TileGeometry(128, 128, 64)
WIDE_TILE = TileGeometry(192, 128, 64)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors lie on a Hopper GPU; that or a real one has seven multiprocessors."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: UNITS)
    monkeypatch.setattr(launch, "LEAST_PIECE", 2)
    monkeypatch.setattr(launch, "_CUT_GROUPS", (2, 3))  # it works for both
    remembered.forget()
    if GPU and architecture(DEVICE) != "sm_90":
        pytest.skip("lists are cut on Hopper GPUs")
    if not GPU:
        monkeypatch.setattr(PortableEngine, "_hopper", staticmethod(lambda device: True))
        run_on_machine(monkeypatch, "hopper", gluon_machine.load("hopper"))
    yield
    remembered.forget()


def shortest_piece(fair: int, least: int) -> int:
    """Tiles of a piece at least, where lists are uneven."""
    return min(max(fair, -(-least // 2)), least)


def cut(lengths: list[int], units: int, least: int, even: bool = True) -> list[int]:
    """Number of pieces of each list: the rules once more, in exact arithmetic."""
    total = sum(lengths)
    fair, mean = -(-total // units), -(-total // len(lengths))
    aim = Fraction(1, 2) if len(lengths) <= 3 * units else Fraction(3, 4)
    shortest = shortest_piece(fair, least)
    found = []
    for length in lengths:
        goal = max(math.ceil(aim * fair), shortest)
        pieces = min(-(-length // goal), length // shortest, 16)
        found.append(max(pieces, 1) if length > max(1.125 * fair, 1.25 * mean) else 1)
    rest, longest = len(lengths) % units, max(lengths)
    slots = launch.cutting(len(lengths), units)[1]
    if not even or rest == 0 or longest > Fraction(9, 8) * mean:
        return found
    times = {
        number: math.ceil(Fraction(rest * number, units)) * -(-longest // number)
        for number in range(2, 9)
        if longest >= number * least and rest * number <= slots
    }
    number = min(times, key=lambda x: times[x], default=1)
    if number > 1 and times[number] < longest - longest // 8:
        for row in range(len(lengths) - rest, len(lengths)):
            found[row] = min(number, max(lengths[row] // least, 1))
    return found


def keep(lengths: list[int], shape: tuple[int, int, int, int], seed: int = 0) -> torch.Tensor:
    """A bitmap with as many tiles in each row as ``lengths`` says, drawn."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(shape, generator=generator).argsort(-1).argsort(-1)
    counts = torch.tensor(lengths).reshape(*shape[:3], 1)
    return bitmap.pack(rank < counts)


def tensors(rows: int, keys: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [B, H, S, D]: K blocks so far apart that some are negligible beside any other."""
    q, k, v = (
        test_weighing.grid(1, heads, n, dim, seed=heads + n)
        for heads, n in ((2, rows), (1, keys), (1, keys + 1))
    )
    heights = torch.randperm(-(-keys // 128), generator=torch.Generator().manual_seed(3)) - 7.0
    k[..., 0], q[..., 0] = heights.repeat_interleave(128)[:keys].bfloat16(), 4.0
    return q, k, v[:, :, 1:]


#: Lengths of lists by q block, of 15 K blocks.
UNEVEN = {
    "one-long": [15, 1, 2, 1, 0, 3],
    "two-long": [3, 15, 1, 1, 13, 2],
    "all-in-one": [0, 0, 15, 0, 0, 0],
}
SHAPE = (1, 2, 3, 15)


def masses(
    q: torch.Tensor, k: torch.Tensor, read: torch.Tensor, tile: TileGeometry, descending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tiles weigh, in float64: beside what their rows had seen, in later pieces beside all.

    And which of them are of whole lists and first pieces, where each lane guards its own part.
    """
    lists = bitmap.unpack(read, SHAPE[-1])[0]
    numbers = cut([int(n) for n in lists.sum(-1).flatten()], UNITS, 2)
    found, by_lane = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.bool)
    for row, pieces in enumerate(numbers):
        head, block = divmod(row, SHAPE[2])
        queries = q[0, head, block * tile.q_block : (block + 1) * tile.q_block].double()
        weights = (0.25 * queries @ k[0, 0].double().T).exp()
        walk = lists[head, block].nonzero().flatten().tolist()
        walk = walk[::-1] if descending else walk
        inside = [weights[:, 128 * j : 128 * j + 128].sum(-1) for j in walk]
        seen = torch.stack(inside).cumsum(0) if walk else None
        for i, j in enumerate(walk):
            assert seen is not None
            by_lane[0, head, block, j] = i < len(walk) // pieces
            sums = seen[i] if by_lane[0, head, block, j] else seen[-1]
            found[0, head, block, j] = (inside[i] / sums).mean()
    return found, by_lane


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: torch.Tensor, tile: TileGeometry,
    engine: str = "portable", **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One call: out, lse and the next bitmap, on the CPU; masks and masses lie there, too."""
    device = DEVICE if engine == "portable" else CPU
    write = torch.full_like(read, 0x3C3C3C3C, device=device)
    moved = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    out, lse = lite_attention(
        *(x.to(device) for x in (q, k, v, read)), write, geometry=tile, layout="bhsd", scale=0.25,
        return_lse=True, engine=engine, **moved,
    )  # fmt: skip
    if "mass" in options:
        options["mass"].copy_(moved["mass"])
    return out.cpu(), lse.cpu(), write.cpu()


def expect_near(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    assert torch.allclose(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.01, equal_nan=True)
    assert torch.allclose(found[1], wanted[1], atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("lengths", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_votes_of_pieces_equal_the_oracle_bit_for_bit(
    dim: int, tile: TileGeometry, lengths: list[int], machine: None
) -> None:
    assert max(cut(lengths, UNITS, 2)) > 1
    q, k, v = tensors(2 * tile.q_block + 70, 15 * 128 - 9, dim)
    read = keep(lengths, SHAPE)
    for descending in (False, True):
        how: dict[str, Any] = dict(threshold=-4.0, descending=descending)
        found, wanted = (step(q, k, v, read, tile, x, **how) for x in ("portable", "reference"))
        expect_near(found, wanted)
        assert torch.equal(found[2], wanted[2])
        assert bitmap.count(wanted[2]) < bitmap.count(read)


@pytest.mark.parametrize("descending", [False, True])
def test_votes_of_pieces_with_masks_and_a_nan(descending: bool, machine: None) -> None:
    """The rows that saw the NaN keep every later tile, in later pieces, too."""
    q, k, v = tensors(326, 15 * 128 - 9, 64)
    k[0, 0, 7 * 128 + 5, 3] = math.nan
    must_do, must_skip = bitmap.pack(torch.arange(15) == 2), bitmap.pack(torch.arange(15) == 9)
    read = keep(UNEVEN["two-long"], SHAPE)
    how: dict[str, Any] = dict(
        threshold=-4.0, descending=descending, must_do=must_do, must_skip=must_skip
    )
    found, wanted = (step(q, k, v, read, TILE, x, **how) for x in ("portable", "reference"))
    assert torch.equal(found[2], wanted[2]) and bool(wanted[1].isnan().any())
    expect_near(found, wanted)


@pytest.mark.parametrize("lengths", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_weights_of_pieces(dim: int, tile: TileGeometry, lengths: list[int], machine: None) -> None:
    """Masses near float64, the choice given them exact, outputs those of a step at -inf."""
    q, k, v = tensors(2 * tile.q_block + 70, 15 * 128 - 9, dim)
    read = keep(lengths, SHAPE)
    case = test_weighing.Case(2 * tile.q_block + 70, 15 * 128 - 9, (2, 1), dim, tile)
    for descending in (False, True):
        mass = torch.full(SHAPE, math.nan)
        found = step(q, k, v, read, tile, budget=0.2, mass=mass, descending=descending)
        expect_near(found, step(q, k, v, read, tile, "reference", threshold=-math.inf))
        exact, by_lane = masses(q, k, read, tile, descending)
        walked = bitmap.unpack(read, 15)
        limits = (exact, exact)
        if dim == 128:  # what is not divided by sums over all pieces
            limits = test_weighing.limits_of(case, q, k, walked, descending)
        guarded = test_weighing.expect_masses(case, q, k, walked, descending, mass, limits, by_lane)
        assert 0 < int(guarded.sum()) < int(walked.sum())
        chosen = budget.select(mass, walked, torch.zeros(15, dtype=torch.bool), 0.2)
        assert torch.equal(found[2], bitmap.pack(chosen)) and not torch.equal(found[2], read)
        if descending:  # the order of a step that keeps every tile
            plain = step(q, k, v, read, tile, threshold=-math.inf)
            assert torch.equal(plain[0], found[0]) and torch.equal(plain[1], found[1])
            assert torch.equal(plain[2], read)


@pytest.mark.parametrize("limit", [{"threshold": -4.0}, {"budget": 0.2}], ids=["votes", "weighs"])
def test_no_bit_depends_on_who_is_last_or_on_calls_before(
    limit: dict[str, float], machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of several sizes share a workspace, whatever it holds."""
    lists = [(15, UNEVEN["two-long"]), (6, [6, 0, 1, 0, 6, 0]), (15, UNEVEN["one-long"])]
    found: list[list[torch.Tensor]] = []
    for seed in range(4):
        if not GPU:
            run_on_machine(monkeypatch, "hopper", gluon_machine.load("hopper", 100 * seed))
        results: list[torch.Tensor] = []
        for k_blocks, lengths in lists:
            q, k, v = tensors(326, k_blocks * 128 - 9, 64)
            assert max(cut(lengths, UNITS, 2)) > 1
            results += step(q, k, v, keep(lengths, (1, 2, 3, k_blocks)), TILE, **limit)
        for held in launch.workspaces.held.values():
            held.random_(0, 255)
        found.append(results)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_a_step_that_keeps_every_tile_is_dense_bit_for_bit(machine: None) -> None:
    """Fewer q blocks than multiprocessors, and none is cut: all lists are as long."""
    q, k, v = tensors(326, 15 * 128 - 9, 64)
    full = bitmap.full(*SHAPE)
    out, lse, write = step(q, k, v, full, TILE, threshold=-math.inf)
    dense, dense_lse = attention(
        *(x.to(DEVICE) for x in (q, k, v)), layout="bhsd", scale=0.25, return_lse=True,
        engine="portable",
    )  # fmt: skip
    assert torch.equal(out, dense.cpu()) and torch.equal(lse, dense_lse.cpu())
    assert torch.equal(write, full)


def planned(
    lengths: list[int], heads: int, units: int, least: int, even: bool
) -> tuple[list[tuple[int, int, int, int, int]], torch.Tensor]:
    """What the kernel makes of lists: (row, first, length, piece, pieces) by turn; its counters."""
    k_blocks, q_blocks = 40, len(lengths) // heads
    read = keep(lengths, (1, heads, q_blocks, k_blocks))
    goal, slots = launch.cutting(len(lengths), units)
    items = torch.zeros(len(lengths), k_blocks, dtype=torch.int16)
    order, counts = (torch.full((len(lengths) + slots,), -1, dtype=torch.int32) for _ in range(2))
    counters = torch.full((4 + 2 * slots,), 7, dtype=torch.int32)
    tally, votes = torch.full((2,), 7), torch.zeros_like(read)
    kernels.plan[(len(lengths),)](
        read, read, read, items, counts, order, counters, votes, votes, tally, q_blocks, k_blocks,
        2, 1, 2, 16, False, False, False, False, units, 64, least, goal, slots, even,
        False,
    )  # fmt: skip
    number = int(counters[1])
    told = zip(order[:number].tolist(), counts[:number].tolist(), strict=True)
    assert bool((order[number:] == -1).all())
    return [
        (at & 0xFFFF, at >> 16, n & 0xFFFF, (n >> 16) & 15, (n >> 20) + 1) for at, n in told
    ], counters


def makespan(sizes: list[int], units: int) -> int:
    """Time until all are done, handed out in order to whoever is free first."""
    loads = [0] * units
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def in_order(lengths: list[int], heads: int, joint: int) -> list[int]:
    """Rows in the order of work that the kernel makes of lists that stay whole."""
    k_blocks, q_blocks = 40, len(lengths) // heads
    read = keep(lengths, (1, heads, q_blocks, k_blocks))
    items = torch.zeros(len(lengths), k_blocks, dtype=torch.int16)
    order, counts = (torch.full((len(lengths),), -1, dtype=torch.int32) for _ in range(2))
    counter, tally, votes = torch.ones(1).int(), torch.full((2,), 7), torch.zeros_like(read)
    kernels.plan[(len(lengths),)](
        read, read, read, items, counts, order, counter, votes, votes, tally, q_blocks, k_blocks,
        2, joint, 2, 16, False, False, False, False, 0, 0, 0, 0, 0, True, False,
    )  # fmt: skip
    assert counter.item() == 0 and counts.tolist() == [lengths[row] for row in order.tolist()]
    return [int(row) for row in order]


@pytest.mark.skipif(not INTERPRETED, reason="the kernel runs in the interpreter")
@settings(max_examples=40, deadline=None)
@example(lengths=[6, 5, 5, 4], heads=3, joint=2)
@example(lengths=[30, 28], heads=2, joint=2)  # 37 and 35 next: even, so head after head
@example(lengths=[4, 5, 4, 6], heads=3, joint=2)
@example(lengths=[40] + [0] * 8, heads=4, joint=1)
@given(
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_uneven_lists_of_the_last_heads_are_ordered_together(
    lengths: list[int], heads: int, joint: int
) -> None:
    lengths, joint = [(n + 7 * i) % 41 for i in range(heads) for n in lengths], min(joint, heads)
    q_blocks = len(lengths) // heads
    begin = (heads - joint) * q_blocks
    last = lengths[begin:]
    even = 4 * max(last) * len(last) <= 5 * sum(last)

    def key(row: int) -> tuple[int, int, int]:
        apart = row < begin or even
        return (row // q_blocks if apart else heads, -lengths[row], row)

    assert in_order(lengths, heads, joint) == sorted(range(len(lengths)), key=key)


@pytest.mark.skipif(not INTERPRETED, reason="the kernel runs in the interpreter")
def test_the_longest_list_does_not_begin_when_all_else_is_done() -> None:
    """Of twelve heads, on eight multiprocessors: 1.01 times the mean load instead of 1.18."""
    lengths, units = 12 * [40, 20, 8, 4, 2, 1, 1, 1], 8
    by_head, together = (
        makespan([lengths[row] for row in in_order(lengths, 12, joint)], units) for joint in (1, 4)
    )
    mean = sum(lengths) / units
    assert together < 1.02 * mean and by_head > 1.15 * mean


def test_so_many_heads_are_ordered_together_as_have_four_lists_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [launch.jointly(12, q_blocks, torch.device("cpu")) for q_blocks in (128, 256, 528)] == [
        5, 3, 1,
    ]  # fmt: skip
    assert launch.jointly(3, 33, torch.device("cpu")) == 3
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 304)
    assert launch.jointly(12, 128, torch.device("cuda", 0)) == 10


@pytest.mark.skipif(not INTERPRETED, reason="the kernel runs in the interpreter")
@settings(max_examples=60, deadline=None)
@example(lengths=[40] * 6, heads=2, units=8, least=2, even=False)
@example(lengths=[40] * 6, heads=2, units=8, least=2, even=True)
@example(lengths=[40] * 11 + [36] * 5, heads=1, units=11, least=19, even=True)
@example(lengths=[40] * 32, heads=2, units=20, least=8, even=True)
@example(lengths=[40] + [0] * 63, heads=1, units=132, least=2, even=True)
@example(lengths=[7] * 6, heads=2, units=1, least=2, even=True)
@given(
    st.one_of(
        st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=32),
        st.lists(st.integers(36, 40), min_size=1, max_size=32),
    ),
    st.integers(1, 2),
    st.integers(1, 20),
    st.integers(1, 8),
    st.booleans(),
)
def test_every_list_is_handed_out_once_in_pieces_of_a_fair_size(
    lengths: list[int], heads: int, units: int, least: int, even: bool
) -> None:
    lengths = lengths * heads
    numbers = cut(lengths, units, least, even)
    work, counters = planned(lengths, heads, units, least, even)
    assert counters[0] == 0 and not bool(counters[4:].any())
    # each piece of each list once, those of a list one after the other
    assert sorted(x[0] for x in work) == sorted(
        row for row, pieces in enumerate(numbers) for _ in range(pieces)
    )
    turn, slot, taken = 0, 0, set()
    while turn < len(work):
        row, first, length, _, pieces = work[turn]
        assert length == lengths[row] and pieces == numbers[row]
        assert work[turn : turn + pieces] == [
            (row, first, length, piece, pieces) for piece in range(pieces)
        ]
        if pieces > 1:
            assert first == slot and first // 2 not in taken
            taken.add(first // 2)
            slot += pieces
        turn += pieces
    assert slot <= launch.cutting(len(lengths), units)[1]
    assert even or max(numbers) == 1 or len(set(lengths)) > 1
    sizes = [n * (p + 1) // of - n * p // of for _, _, n, p, of in work]
    fair = -(-sum(lengths) // units)
    shortest = shortest_piece(fair, least)
    assert all(size >= shortest for size, x in zip(sizes, work, strict=True) if x[4] > 1)
    assert makespan(sizes, units) <= fair + max(sizes)
    longest = [-(-n // of) for _, _, n, _, of in work]
    if 4 * max(lengths) > fair:
        assert longest == sorted(longest, reverse=True)
    else:
        q_blocks = len(lengths) // heads
        assert [x[0] // q_blocks for x in work] == sorted(x[0] // q_blocks for x in work)


def longest_loads(lengths: list[int]) -> tuple[float, float]:
    """The longest load of 132 multiprocessors over the mean: of whole lists, and of pieces."""
    mean = sum(lengths) / 132
    sizes = []
    for n, of in zip(lengths, cut(lengths, 132, launch.LEAST_PIECE), strict=True):
        sizes += [n * (p + 1) // of - n * p // of for p in range(of)]
    pieces = makespan(sorted(sizes, reverse=True), 132)
    return round(makespan(lengths, 132) / mean, 2), round(pieces / mean, 2)


@pytest.mark.parametrize(
    ("rows", "k_blocks", "share", "whole", "pieces"),
    [
        (96, 48, 0.2, 6.54, 2.09),  # pieces have eight tiles, a fair share
        (96, 48, 0.4, 3.43, 1.93),  # and fourteen
        (192, 64, 0.2, 3.31, 1.63),
        (192, 64, 0.4, 1.72, 1.13),
        (256, 256, 0.2, 2.55, 1.16),
        (1536, 128, 0.2, 1.00, 1.00),
    ],
)
def test_how_evenly_uneven_lists_fill_132_multiprocessors(
    rows: int, k_blocks: int, share: float, whole: float, pieces: float
) -> None:
    """Lists that keep any share of their tiles: the longest load over the mean."""
    spread = [((i + 0.5) / rows) ** ((1 - share) / share) for i in range(rows)]
    lengths = [max(1, round(x * k_blocks)) for x in spread][::-1]
    assert longest_loads(lengths) == (whole, pieces)


@pytest.mark.parametrize(
    ("rows", "k_blocks", "whole", "pieces"),
    [
        (64, 256, 2.06, 1.03),  # half of the multiprocessors, in two pieces each
        (96, 128, 1.38, 1.03),
        (192, 64, 1.38, 1.03),  # a second round of 60
        (256, 256, 1.03, 1.03),  # nearly full rounds stay
        (300, 64, 1.32, 1.03),
    ],
)
def test_how_evenly_lists_of_one_length_fill_132_multiprocessors(
    rows: int, k_blocks: int, whole: float, pieces: float
) -> None:
    """Nothing skipped: the longest load over the mean."""
    lengths = [k_blocks] * rows
    assert longest_loads(lengths) == (whole, pieces)


@pytest.mark.parametrize("limit", [{"threshold": -4.0}, {"budget": 0.2}], ids=["votes", "weighs"])
def test_a_list_of_the_last_round(
    limit: dict[str, float], machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six lists of one length, five multiprocessors: outputs, votes, the choice given masses."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 5)
    assert cut([15] * 6, 5, 2) == [1] * 5 + [5]
    q, k, v = tensors(326, 15 * 128 - 9, 64)
    full = bitmap.full(*SHAPE)
    mass = torch.full(SHAPE, math.nan)
    how: dict[str, Any] = {**limit, "mass": mass} if "budget" in limit else limit
    found = step(q, k, v, full, TILE, **how)
    wanted = step(q, k, v, full, TILE, "reference", **limit)
    expect_near(found, wanted)
    chosen = wanted[2]
    if "budget" in limit:
        walked, do = torch.ones(SHAPE, dtype=torch.bool), torch.zeros(15, dtype=torch.bool)
        chosen = bitmap.pack(budget.select(mass, walked, do, 0.2))
    assert torch.equal(found[2], chosen) and not torch.equal(chosen, full)


#: What the kernel may lack, and what then is noticed: the machine's message or none.
BROKEN = [
    ("what pieces tell one another", 'first // 2 * 4 + GROUP, 1, sem="acq_rel"',
     'first // 2 * 4 + GROUP, 1, sem="relaxed"', "may not have stored"),
    ("what settling warps tell one another", 'first // 2 * 4 + 3, 1, sem="acq_rel"',
     'first // 2 * 4 + 3, 1, sem="relaxed"', "may not have stored"),
    ("a slot of its own", "((first + piece) * GROUPS + GROUP) * SIZE", "first * GROUPS * SIZE",
     None),
    ("who is last", "arrived == pieces - 1", "arrived == 0", None),
    ("where a piece begins", "begin = length * piece // pieces\n            count",
     "begin = 0\n            count", None),
    ("levels of pieces", "gl.store(mine + 64 * HEAD_DIM + row, level)",
     "gl.store(mine + 64 * HEAD_DIM + row, top)", None),
    ("the marks' fate", "if one > 0:", "if one > 1:", None),
    ("what rows saw before", "larger(top, top * 0.0 + _LOWEST)", "top * 0.0 + _LOWEST", None),
    ("the last mark", "mark(marks, count - 1, later, vote_mark(peak, top, bits, count - 1))",
     "pass", None),
    ("other marks", "mark(marks, i - 1, later, vote_mark(peak, top, bits, i - 1))", "pass", None),
    ("rows that are guarded in later pieces", "shares > _ROW_GUARD * sums_by_then",
     "shares > 2.0 * sums_by_then", "a row above its guard"),
    ("what rows saw in the first piece", "seen[:, None] + gl.associative_scan",
     "gl.associative_scan", None),
    ("what they saw in tiles before", "seen += gl.sum(shares, 1)", "pass", None),
]  # fmt: skip


@pytest.mark.skipif(GPU, reason="the kernel runs on the machine")
@pytest.mark.parametrize(
    ("before", "after", "message"), [x[1:] for x in BROKEN], ids=[x[0] for x in BROKEN]
)
def test_a_broken_kernel_is_noticed(
    before: str, after: str, message: str | None, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Larger pieces: whoever comes too early then meets those who are not through.
    monkeypatch.setattr(launch, "cutting", lambda rows, units: (6, 2 * units))
    with pytest.raises(AssertionError, match=message):
        for seed in range(5):
            broken = gluon_machine.load("hopper", 100 * seed, (before, after))
            run_on_machine(monkeypatch, "hopper", broken)
            if "sums_by_then" in before or "seen" in before:
                test_weights_of_pieces(64, TILE, UNEVEN["two-long"], None)
            else:
                test_votes_of_pieces_equal_the_oracle_bit_for_bit(
                    64, TILE, UNEVEN["two-long"], None
                )
