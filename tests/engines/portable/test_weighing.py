"""Tiles weighed by the portable kernels: masses against float64, choices bit for bit, outputs.

In Triton's interpreter on CPU tensors; on a machine with a GPU (``python -m pytest`` of this file,
without ``TRITON_INTERPRET``) with the compiled kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.contract import LOG2E
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap, budget

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from liteattention_rocm import remembered  # noqa: E402
from liteattention_rocm.engines.triton import hopper_softmax, kernels, launch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

masses = st.one_of(
    st.sampled_from([0.0, 2.0**-30, 2.0**-24, 0.01, 0.25, 1.0, 1.5, math.nan, math.inf]),
    st.floats(0, 1, width=32),
)
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def whole_lists(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those that are cut have shares of their own, see test_pieces.py."""
    monkeypatch.setattr(launch, "cut_for", lambda *_: 0)
    remembered.forget()
    yield
    remembered.forget()


@dataclass(frozen=True)
class Case:
    """Lengths, heads (queries, keys), head dim and tile of a call."""

    q_len: int
    kv_len: int
    heads: tuple[int, int]
    head_dim: int
    tile: TileGeometry
    masks: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of masses: [B, Hq, q_blocks, K_blocks]."""
        tile = self.tile
        return 1, self.heads[0], tile.q_blocks(self.q_len), tile.k_blocks(self.kv_len)


CASES = [
    Case(40, 600, (2, 1), 64, TileGeometry(32, 16, 16)),  # 38 K blocks: more than one word
    Case(70, 264, (4, 2), 128, TileGeometry(64, 32, 32), masks=True),
    Case(33, 100, (1, 1), 64, TileGeometry(16, 16, 16), masks=True),
    Case(130, 200, (2, 1), 64, TileGeometry(48, 32, 16), masks=True),  # rows that are no one's
]
if GPU:
    for dim in (64, 128):
        CASES += [
            Case(300, 1000, (4, 2), dim, TileGeometry(128, 128, 64), masks=True),  # Hopper's own
            Case(1000, 1000, (2, 2), dim, TileGeometry(128, 128, 64)),
            Case(130, 41 * 128 + 5, (2, 1), dim, TileGeometry(128, 128, 64)),
            Case(200, 300 * 128 - 9, (2, 1), dim, TileGeometry(128, 128, 64), masks=True),
            Case(300, 1000, (4, 2), dim, TileGeometry(128, 64, 64), masks=True),
            Case(90, 600 * 16, (1, 1), dim, TileGeometry(64, 16, 64)),
        ]
    CASES += [  # that of Hopper's dense calls at head dim 64
        Case(500, 1000, (4, 2), 64, TileGeometry(192, 128, 64), masks=True),
        Case(1000, 1000, (2, 2), 64, TileGeometry(192, 128, 64)),
        Case(200, 300 * 128 - 9, (2, 1), 64, TileGeometry(192, 128, 64), masks=True),
    ]


def grid(*shape: int, seed: int) -> torch.Tensor:
    """Eighths within +-4: every dot product is exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(shape, generator=generator) * 8).round() / 8).clamp(-4, 4).bfloat16()


def tensors(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [B, H, S, D]: K blocks at different heights along one direction."""
    q = grid(1, case.heads[0], case.q_len, case.head_dim, seed=seed)
    k, v = (grid(1, case.heads[1], case.kv_len, case.head_dim, seed=seed + i) for i in (1, 2))
    numbers = torch.arange(case.shape[-1])
    heights = torch.linspace(-3, 3, len(numbers))[(numbers * 7 + seed) % len(numbers)]
    k[..., 0] = heights.repeat_interleave(case.tile.k_block)[: case.kv_len].bfloat16()
    q[..., 0] = 2.0
    return q, k, v


def lists(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Must-do and must-skip."""
    numbers = torch.arange(case.shape[-1])
    if not case.masks:
        return None, None
    return bitmap.pack(numbers % 5 == 2), bitmap.pack(numbers % 7 == 3)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    case: Case,
    read: torch.Tensor,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """One call of the portable engine: out, lse, write and mass, on the CPU."""
    write = torch.full(read.shape, 0x3C3C3C3C, dtype=torch.int32, device=DEVICE)
    mass = torch.full(case.shape, math.nan, device=DEVICE)
    must_do, must_skip = (None if x is None else x.to(DEVICE) for x in lists(case))
    if "budget" in options:
        options["mass"] = mass
    out, lse = lite_attention(
        q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), read.to(DEVICE), write, must_do=must_do,
        must_skip=must_skip, geometry=case.tile, layout="bhsd", return_lse=True, scale=0.25,
        engine="portable", **options,
    )  # fmt: skip
    return {"out": out.cpu(), "lse": lse.cpu(), "write": write.cpu(), "mass": mass.cpu()}


def hopper(case: Case) -> bool:
    """Whether it is that kernel which runs."""
    return GPU and case.tile.q_block >= 128 and case.tile.k_block == 128


def share_rounding(case: Case, q: torch.Tensor, k: torch.Tensor) -> float:
    """How far the share of a row may be from the exact one.

    Relative, in units of 2^-24: the exponent of a probability comes of two products, each as large
    as the largest score (log2 units), and a difference, all rounded once, and an exponential
    (2 units; 2^-22 of ``ex2.approx`` on a GPU); each key of a tile, K block and rescaling rounds a
    sum. Twice, for numerator and denominator.
    """
    rows, keys = (x.double().norm(dim=-1).amax() for x in (q, k))
    score = 0.25 * LOG2E * float(rows * keys)
    return 2 * (3 * score + 8 + case.tile.k_block + 4 * case.shape[-1]) * 2.0**-24


def rounding(case: Case, q: torch.Tensor, k: torch.Tensor) -> float:
    """How far a mass may be from the exact one: :func:`share_rounding`, and what sums round.

    A weight is rounded up to 2^-24, in each warp of 16 rows; on Hopper by up to 2 units of 2^-21 of
    a divisor before that, in each of its 32 lanes.
    """
    blocks, warps = case.shape[-1], case.tile.q_block / 16
    fewest = (case.q_len - 1) % case.tile.q_block + 1  # rows, of the last q block
    lanes = max(math.ceil(rows / 16) / rows for rows in (fewest, case.tile.q_block)) * 32 * 2 * 8
    if not hopper(case):
        lanes = 0.0
    elif case.head_dim == 128:
        lanes *= min(blocks, hopper_softmax.MOST_AHEAD)
    return share_rounding(case, q, k) + (warps + lanes) * 2.0**-24


def parts_of(
    case: Case, q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, lanes: int = 1
) -> torch.Tensor:
    """What lies in each tile of rows, not divided by their sums: [B, H, rows, K_blocks].

    Or, where 4 ``lanes`` hold a row as Hopper's do, in two columns of each eight:
    [B, H, rows, K_blocks, lanes].
    """
    tile, group = case.tile, case.heads[0] // case.heads[1]
    scores = 0.25 * q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2)
    parts = torch.exp(scores - scores.amax(-1, keepdim=True))
    parts = torch.nn.functional.pad(parts, (0, -case.kv_len % tile.k_block))
    if lanes > 1:
        parts = parts.unflatten(-1, (-1, tile.k_block // 8, lanes, 2)).sum((-1, -3))
    else:
        parts = parts.unflatten(-1, (-1, tile.k_block, 1)).sum(-2)
    parts = parts * walked[:, :, torch.arange(case.q_len) // tile.q_block, :, None]
    return parts if lanes > 1 else parts[..., 0]


def means_of(case: Case, shares: torch.Tensor) -> torch.Tensor:
    """Of the rows of each q block: [B, H, q_blocks, K_blocks], 1 at most."""
    blocks = torch.arange(case.q_len) // case.tile.q_block
    means = [shares[:, :, blocks == block].mean(2) for block in range(case.shape[2])]
    return torch.stack(means, 2).clamp(max=1.0).float()


def shares_of(
    case: Case, q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, descending: bool,
    lanes: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Of what rows have seen by the end of each tile, float64 [B, H, rows, K_blocks].

    With ``lanes`` the largest of a row's lanes, of what they have seen.
    """
    parts = parts_of(case, q, k, walked, lanes)
    parts = parts if lanes > 1 else parts[..., None]
    turned = parts.flip(-2) if descending else parts
    shares = (turned / turned.cumsum(-2)).nan_to_num(0.0)
    return (shares.flip(-2) if descending else shares).amax(-1)


def limits_of(
    case: Case, q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, descending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest masses of Hopper's kernel at head dim 128, as ``walked``.

    Without the guard of rows. It divides what lies in a tile by sums that rows had seen before it,
    which may have grown by ``MOST_GROWTH`` since, and takes off again by how much those of all rows
    of a warp have grown by the end of the tile's word: by the end of the walk at most. The first
    divisor is up to ``MOST_AHEAD`` times the first tile's sum, and sums may grow to
    ``MOST_OF_DIVISOR`` times that; a row that has not grown takes off nothing. Each lane counts 4
    at most.
    """
    parts = parts_of(case, q, k, walked)
    turned = parts.flip(-1) if descending else parts
    seen = turned.cumsum(-1)
    before = seen - turned
    at_first = turned.gather(-1, (turned > 0).int().argmax(-1, keepdim=True))
    tiles = (turned > 0).sum(-1, keepdim=True)
    growth = hopper_softmax.MOST_OF_DIVISOR * tiles.clamp(max=hopper_softmax.MOST_AHEAD)
    growth = torch.where(before <= growth * at_first, growth, hopper_softmax.MOST_GROWTH)
    growth = growth.clamp(min=hopper_softmax.MOST_GROWTH)
    shares = (growth * turned / before).nan_to_num(0.0, 1.0).clamp(max=16.0)
    shares = shares.flip(-1) if descending else shares
    least = (parts / parts.sum(-1, keepdim=True)).nan_to_num(0.0)
    return means_of(case, least), means_of(case, shares)


def expect_masses(
    case: Case, q: torch.Tensor, k: torch.Tensor, walked: torch.Tensor, descending: bool,
    found: torch.Tensor, limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    by_lane: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Masses are 1 where a row has more than its guard, and near float64 elsewhere.

    ``limits``: the least and the largest there; without them the means of rows' shares. A share
    that is as near to the guard as roundings may fall on either side. In the tiles ``by_lane``,
    bool like ``found``, so does one of which a lane has more than the guard of what it has seen;
    by default these are all tiles of Hopper's kernel on a GPU. Returns which tiles are guarded for
    certain, bool like ``found``.
    """
    if by_lane is None:
        by_lane = torch.full_like(found, hopper(case), dtype=torch.bool)
    shares = shares_of(case, q, k, walked, descending)
    if limits is None:
        limits = (means_of(case, shares),) * 2
    may = shares
    if bool(by_lane.any()):
        rows = by_lane[:, :, torch.arange(case.q_len) // case.tile.q_block]
        may = torch.where(rows, shares_of(case, q, k, walked, descending, 4), shares)
    largest, largest_may = (
        torch.stack([rows.amax(2) for rows in x.split(case.tile.q_block, 2)], 2)
        for x in (shares, may)
    )
    error = torch.maximum(limits[0] - found, found - limits[1])
    allowed, near = rounding(case, q, k), share_rounding(case, q, k)
    plain = largest_may <= budget.ROW_GUARD - near
    certain = largest > budget.ROW_GUARD + near
    assert bool((found[certain] == 1).all()), "a row above its guard"
    assert not bool(plain.any()) or error[plain].max() <= allowed, f"{error[plain].max()}"
    unsure = ~plain & ~certain & (found != 1)
    assert not bool(unsure.any()) or error[unsure].max() <= allowed
    return certain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masses_are_near_choices_exact_and_outputs_unchanged(case: Case) -> None:
    """Three steps in turns of the walk: masses, the rule given them, and the step at -inf."""
    k_blocks = case.shape[-1]
    must_do, must_skip = lists(case)
    do = torch.zeros(k_blocks, dtype=torch.bool)
    if must_do is not None:
        do = bitmap.unpack(must_do, k_blocks)
    read = bitmap.full(*case.shape)
    read[0, -1, 0] = 0  # nothing to compute but what must be
    seen = dropped = guarded = 0
    dense_order = hopper(case)  # what a step at -inf walks, on either kernel
    for number, share in enumerate((0.02, 0.3, 0.1)):
        q, k, v = tensors(case, 10 * number)
        # Rows so alike that few tiles are guarded, K blocks so far apart that some weigh little.
        q[..., 0] *= 2
        q[..., 1:] *= 0.125
        descending = number % 2 == 1
        ours = step(q, k, v, case, read, budget=share, descending=descending)
        here = read if must_do is None else (read | must_do) & ~must_skip
        walked = bitmap.unpack(here, k_blocks)
        limits = None
        if dense_order and case.head_dim == 128:
            limits = limits_of(case, q, k, walked, descending)
        guarded += int(expect_masses(case, q, k, walked, descending, ours["mass"], limits).sum())
        assert not bool(ours["mass"][~walked].any())
        chosen = budget.select(ours["mass"], walked, do, share)
        assert torch.equal(ours["write"], bitmap.pack(chosen))
        if GPU:  # what warps add up does not depend on their order
            again = step(q, k, v, case, read, budget=share, descending=descending)
            assert all(torch.equal(ours[name], again[name]) for name in ours)
        if descending == dense_order:
            plain = step(q, k, v, case, read, threshold=-math.inf)
            assert torch.equal(ours["out"], plain["out"])
            assert torch.equal(ours["lse"], plain["lse"])
        seen += int(walked.sum())
        dropped += int(walked.sum()) - int(chosen.sum())
        read = ours["write"]
    assert 0.1 < dropped / seen < 0.95 and 0 < guarded / seen < 0.8, (dropped, guarded, seen)


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_votes_equal_the_oracle_bit_for_bit(case: Case, soft_skip: bool) -> None:
    """Three steps in turns of the walk; on a GPU, twice the same."""
    must_do, must_skip = lists(case)
    read = bitmap.full(*case.shape)
    read[0, -1, 0] = 0
    sparsities = []
    for number in range(3):
        q, k, v = tensors(case, 10 * number)
        options: dict[str, Any] = dict(
            threshold=-4.0, descending=number % 2 == 1, soft_skip=soft_skip
        )
        ours = step(q, k, v, case, read, **options)
        expected = torch.empty_like(read)
        out, lse = lite_attention(
            q, k, v, read, expected, must_do=must_do, must_skip=must_skip, geometry=case.tile,
            layout="bhsd", return_lse=True, scale=0.25, engine="reference", **options,
        )  # fmt: skip
        assert torch.equal(ours["write"], expected)
        assert torch.allclose(ours["out"].float(), out.float(), atol=0.02, rtol=0.01)
        assert torch.allclose(ours["lse"], lse, atol=1e-4)
        if GPU:
            again = step(q, k, v, case, read, **options)
            assert all(torch.equal(ours[name], again[name]) for name in ("out", "lse", "write"))
        read = expected
        sparsities.append(bitmap.sparsity(read, case.shape[-1]))
    assert 0.05 < sparsities[0] <= sparsities[-1] < 0.99


@pytest.mark.parametrize(
    "tile", [TileGeometry(32, 16, 16), *[TileGeometry(128, 128, 64)] * GPU], ids=str
)
def test_budgets_by_head(tile: TileGeometry) -> None:
    """Every head of two videos is chosen from by its own; a budget of 0 keeps every tile."""
    rows, keys = tile.q_block + 9, 41 * tile.k_block + 5
    case = Case(rows, keys, (4, 2), 64, tile)
    q, k, v = (torch.cat([x, x.flip(2)]).to(DEVICE) for x in tensors(case, 0))
    budgets = (0.3, 0.0, 0.02, 0.15)
    shape = (2, *case.shape[1:])
    read = bitmap.full(*shape).to(DEVICE)
    write, mass = torch.empty_like(read), torch.empty(shape, device=DEVICE)
    lite_attention(
        q, k, v, read, write, mass=mass, budget=max(budgets), layout="bhsd", geometry=tile,
        limits=budget.limits(budgets, DEVICE), scale=0.25, engine="portable",
    )  # fmt: skip
    walked = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    chosen = budget.select(mass, walked, ~walked[0, 0, 0], budgets)
    assert torch.equal(write, bitmap.pack(chosen))
    kept = chosen.float().mean((0, 2, 3)).tolist()
    assert kept[1] == 1 and kept[0] < kept[3] < kept[2] < 1


@pytest.mark.skipif(not GPU, reason="in the interpreter there is one kernel")
def test_tensors_off_their_boundaries_have_the_lists_of_others() -> None:
    """Another kernel computes them, of which 192 rows are three in four."""
    case = Case(500, 5000, (4, 2), 64, TileGeometry(192, 128, 64))
    read = bitmap.full(*case.shape).to(DEVICE)
    written = []
    for offset in (0, 1):
        moved = [
            torch.cat([torch.zeros(offset), x.flatten()]).bfloat16().to(DEVICE)[offset:].view_as(x)
            for x in tensors(case, 0)
        ]
        write = torch.empty_like(read)
        out = lite_attention(
            *moved, read, write, threshold=-0.5, geometry=case.tile, layout="bhsd", scale=0.25,
            engine="portable",
        )  # fmt: skip
        written.append((write, out))
    (write, out), (other_write, other_out) = written
    assert torch.equal(write, other_write) and bool((write != read).any())
    assert torch.allclose(out.float(), other_out.float(), atol=0.02, rtol=0.01)


@pytest.mark.skipif(not GPU, reason="in the interpreter: test_interpreter.py")
@pytest.mark.parametrize(
    "limit", [{"threshold": -math.inf}, {"threshold": -1e30}, {"budget": 1e-9}], ids=str
)
@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("shape", [(1, 2, 1000, 64), (1, 2, 1000, 128), (2, 3, 5000, 64)])
def test_a_step_that_keeps_every_tile_is_dense_bit_for_bit(
    shape: tuple[int, int, int, int], rows: int, limit: dict[str, float]
) -> None:
    if rows == 192 and shape[3] != 64:
        pytest.skip("not a geometry at this head dim")
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in range(3))
    tile = TileGeometry(rows, default_geometry(q).k_block, 64)
    read = bitmap.full(*shape[:2], tile.q_blocks(shape[2]), tile.k_blocks(shape[2]), DEVICE)
    found = lite_attention(
        q, k, v, read, read.clone(), layout="bhsd", geometry=tile, descending=True,
        return_lse=True, **limit,
    )  # fmt: skip
    dense = attention(q, k, v, layout="bhsd", return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, dense, strict=True))


def test_a_nan_score_keeps_its_tile_and_later_ones() -> None:
    case = Case(40, 200, (1, 1), 64, TileGeometry(32, 16, 16))
    q, k, v = tensors(case, 0)
    k[0, 0, 100, 3] = math.nan
    q[..., 1:] *= 0.25  # rows that are so alike that few tiles are guarded
    for descending in (False, True):
        found = step(q, k, v, case, bitmap.full(*case.shape), budget=0.5, descending=descending)
        kept = bitmap.unpack(found["write"], 13)
        later = kept[..., :7] if descending else kept[..., 6:]
        assert bool(later.all()) and not bool(kept.all())
        assert bool((found["mass"][..., 6] == 1).all())


def check_guard(dim: int, tile: TileGeometry) -> None:
    """A tile stays if a row has more than its guard there, whatever the mean of the rows.

    One row of the first q block has 0.02 more or less than the guard of what it has seen by then in
    the sixth tile, nearly all of it in eight keys, two of each lane on Hopper. Of the other rows it
    is 0.03, so that the other q block drops it.
    """
    size, last = tile.k_block, tile.q_block - 16  # rows of the last warp
    more, less = budget.ROW_GUARD + 0.02, budget.ROW_GUARD - 0.02
    case = Case(2 * tile.q_block, 7 * size, (1, 1), dim, tile)
    walked = torch.ones(case.shape, dtype=torch.bool)
    for number, (row, share) in enumerate([(5, more), (13, less), (14, more), (1, less)]):
        q, k, v = (torch.zeros(1, 1, n, dim) for n in (case.q_len, case.kv_len, case.kv_len))
        at = 5 * size + 8 * number
        k[0, 0, 5 * size : 6 * size, :2] = -8.0
        k[0, 0, at : at + 8, 0] = 8.0
        q[..., 1] = 1.0
        # Eight keys score 2 look, the others of the tile -2 look, and of five tiles before it 0.
        part = share / (1 - share) * 5 * size
        look = math.log((part + math.sqrt(part**2 - 32 * (size - 8))) / 16) / 2
        q[0, 0, last + row, :2] = torch.tensor([look, 0.0])
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        found = step(q, k, v, case, bitmap.full(*case.shape), budget=0.1)
        limits = None
        if hopper(case) and dim == 128:
            limits = limits_of(case, q, k, walked, False)
        certain = expect_masses(case, q, k, walked, False, found["mass"], limits)
        kept = bitmap.unpack(found["write"], 7)[0, 0, :, 5].tolist()
        assert kept == certain[0, 0, :, 5].tolist() == [share == more, False]


def check_guard_past_the_end(dim: int, tile: TileGeometry) -> None:
    """Rows past the end, whose scores are all 0, have most of theirs in the second tile walked."""
    case = Case(tile.q_block + 1, 4 * tile.k_block + 8, (1, 1), dim, tile)
    q, k, v = (torch.zeros(1, 1, n, dim) for n in (case.q_len, case.kv_len, case.kv_len))
    q[..., 0], k[0, 0, -8:, 0] = 3.0, 8.0  # of the first tile walked, in all lanes
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    read = bitmap.full(*case.shape)
    found = step(q, k, v, case, read, budget=0.1, descending=True)["mass"]
    assert bool((found[..., -1] == 1).all()) and bool((found[..., :-1] < 0.1).all())


def check_few_rows(tile: TileGeometry) -> None:
    """Two rows of each q block look at the last K block only, and the others past it.

    After two steps, one in each turn of the walk, their outputs are still those of dense attention.
    A K block that all rows ignore is dropped.
    """
    size, draw = tile.k_block, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4 * size, 1, 64, generator=draw) for _ in range(3))
    q, k, few = q * 0.3, k * 0.3, torch.arange(4 * size) % tile.q_block < 2
    k[0, -size:, 0, :2] = torch.tensor([6.0, 0.0])
    k[0, 2 * size : 3 * size, 0, :2] = torch.tensor([0.0, 6.0])
    q[0, :, 0, :2] = torch.where(few[:, None], torch.tensor([12.0, -6.0]), -6.0)
    q, k, v = (x.bfloat16().to(DEVICE) for x in (q, k, v))
    policy = SkipPolicy(budget=0.05, warmup_steps=0)
    lite = LiteAttention(policy, geometry=tile, engine="portable")
    for number in range(3):
        found = lite(q, k, v, step=number, layer="a")
    right = attention(q.cpu(), k.cpu(), v.cpu(), engine="reference").float()
    wrong = (found.cpu().float() - right).norm(dim=-1) / right.norm(dim=-1)
    assert wrong[0, few].max() < 0.05
    assert bitmap.unpack(lite.lists("a").cpu(), 4)[0, 0].sum(0).tolist()[2:] == [
        0, tile.q_blocks(4 * size)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tile", [TileGeometry(32, 64, 16), *[TileGeometry(128, 128, 64)] * GPU], ids=str
)
@pytest.mark.parametrize("dim", [64, *[128] * GPU])
def test_rows_are_guarded(dim: int, tile: TileGeometry) -> None:
    check_guard(dim, tile)
    check_guard_past_the_end(dim, tile)
    check_few_rows(tile)


@triton.jit
def _select_row(weights, write, mass, kept, k_blocks, words, limit, SPAN: tl.constexpr):
    tl.store(kept, kernels.select(weights, write, mass, k_blocks, words, limit, SPAN, True))


@settings(max_examples=25, deadline=None)
@example([(0.125, "w"), (0.1875, "w"), (0.1875, "w"), (0.5, "w")], 0.5)  # the budget exactly
@example([(0.125, "w"), (0.1875, "w"), (0.1875, "w"), (0.5, "w")], 0.499)
@example([(math.nan, "w"), (0.1, "d"), (0.9, "w"), (0.1, "n")] + [(1.0, "w")] * 60, 0.9)
@given(
    st.lists(st.tuples(masses, st.sampled_from("wwwdn")), min_size=1, max_size=70),
    st.floats(2.0**-40, 0.999),
)
def test_the_kernels_rule_is_the_rule(row: list[tuple[float, str]], share: float) -> None:
    """Weights given, the next row: ties, NaN (which weighs 1), must-do, tiles not walked."""
    mass = torch.tensor([entry[0] for entry in row])
    walked = torch.tensor([kind != "n" for _, kind in row])
    must = torch.tensor([kind == "d" for _, kind in row])
    weight = torch.where(must, budget.weights(mass) + (1 << 30), budget.weights(mass))
    weight = torch.where(walked, weight, -1).int().to(DEVICE)
    words = -(-len(row) // 32)
    write = torch.full((words,), -5, dtype=torch.int32, device=DEVICE)
    shares = torch.full((len(row),), math.nan, device=DEVICE)
    kept = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _select_row[(1,)](weight, write, shares, kept, len(row), words, budget.limit_of(share), 32)
    expected = budget.select(mass, walked, must, share)
    assert torch.equal(bitmap.unpack(write.cpu(), len(row)), expected)
    assert kept.item() == int(expected.sum())
    assert torch.equal((shares.cpu() * 2**24).long(), torch.where(walked, budget.weights(mass), 0))


def test_statistics_count_what_the_bitmaps_hold() -> None:
    """With budgets and with votes: numbers that the kernels counted, read late."""
    case = Case(40, 100, (1, 1), 64, TileGeometry(16, 16, 16))
    for policy in (
        SkipPolicy(budget=0.2, warmup_steps=0),
        SkipPolicy(threshold=-2.0, warmup_steps=0),
    ):
        lite = LiteAttention(policy, geometry=case.tile, engine="portable")
        expected = []
        for number in range(3):
            q, k, v = (x.to(DEVICE) for x in tensors(case, number))
            read = lite.lists("a") if number else bitmap.full(*case.shape)
            lite(q, k, v, step=number, layer="a", layout="bhsd", scale=0.25)
            expected.append((int(bitmap.count(read)), int(bitmap.count(lite.lists("a")))))
        found = [(r["tiles_computed"], r["tiles_kept"]) for r in lite.statistics.to_records()]
        assert found == expected and found[-1][1] < found[0][0]


@pytest.mark.parametrize("limit", [{"budget": 0.6}, {"threshold": -0.5}], ids=["budget", "votes"])
def test_policies_with_and_without_forced_tiles_do_not_share_a_kernel(
    limit: dict[str, Any],
) -> None:
    """One process, one shape, several policies, as a server has them, in every order."""
    torch.manual_seed(0)
    tensors = [2 * torch.randn(1, 160, 1, 64).bfloat16() for _ in range(3)]
    forced: list[dict[str, Any]] = [{}, {"must_do": ((0, 128),)}, {"must_skip": ((0, 48),)}]

    def lists(engine: str, more: dict[str, Any]) -> list[int]:
        policy = SkipPolicy(**limit, **more, warmup_steps=0)
        lite = LiteAttention(policy, geometry=TileGeometry(32, 16, 16), engine=engine)
        q, k, v = (x.to("cpu" if engine == "reference" else DEVICE) for x in tensors)
        for step in range(2):
            lite(q, k, v, step=step, layer="a")
        return list(lite.lists("a").flatten().tolist())

    wanted = [lists("reference", more) for more in forced]
    assert len({tuple(each) for each in wanted}) == 3
    for index in (0, 1, 0, 2, 0, 1, 2):
        assert lists("portable", forced[index]) == wanted[index], forced[index]
