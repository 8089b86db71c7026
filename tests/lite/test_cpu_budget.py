"""The CPU engine's masses against float64, and its choice of tiles, bit for bit, from its masses.

Calls as in test_cpu_lists: scores are exact in fp32, so masses differ by the rounding of
exponentials and of sums alone.
"""

from __future__ import annotations

import math

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.contract import LiteRequest
from liteattention_rocm.engines import ISA_VARIABLE
from liteattention_rocm.engines.cpu import available_isas
from liteattention_rocm.engines.reference import shares
from liteattention_rocm.lite import bitmap, budget
from tests.conftest import forget
from tests.guards import wrong_masses

from .test_cpu_lists import Case, draw, mask, tensors

BUDGETS = (2.0**-30, 0.03, 0.1, 0.3, 0.6)


def case_of(seed: int) -> Case:
    case = draw(seed)
    # Within 2^126 of each other, whatever the head dim: what underflows weighs nothing.
    case.scale *= 0.25
    return case


def request_of(case: Case, share: float, descending: bool) -> LiteRequest:
    return LiteRequest(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.dtype,
        torch.device("cpu"), case.layout, case.scale, False, "rtne", False, case.tile, -math.inf,
        descending, False, share,
    )  # fmt: skip


def rounding(case: Case) -> float:
    """How far a row's share in fp32, and a mean of such, may be from the exact one.

    Each of the 64 keys of a tile and each K block before it rounds a sum (2^-24 of it); a group of
    K blocks shrinks it by an exponential (2^-23, and two products); the two exponentials of a
    share have an argument x rounded three times, and x 2^-x < 0.54. Doubled.
    """
    blocks = case.tile.k_blocks(case.kv_len)
    return 2 * (64 + blocks + blocks + 16) * 2.0**-24


@pytest.mark.parametrize("group", range(4))
def test_masses_are_near_and_choices_exact(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    isas = available_isas()
    walked = dropped = 0
    for seed in range(group * 15, group * 15 + 15):
        forget()
        monkeypatch.setenv(ISA_VARIABLE, isas[seed % len(isas)])
        case, share = case_of(seed), BUDGETS[seed % len(BUDGETS)]
        k_blocks = case.tile.k_blocks(case.kv_len)
        must_do = torch.zeros(k_blocks, dtype=torch.bool)
        if case.must_do is not None:
            must_do = bitmap.unpack(case.must_do, k_blocks)
        read = bitmap.full(case.batch, case.heads, case.tile.q_blocks(case.q_len), k_blocks)
        for step in range(3):
            given = tensors(case, 1000 * seed + step)
            options = {
                "layout": case.layout, "scale": case.scale, "budget": share,
                "descending": case.descending ^ (step % 2 == 1), "must_do": case.must_do,
                "must_skip": case.must_skip, "geometry": case.tile,
            }  # fmt: skip
            write = torch.full_like(read, 0x3C3C3C3C)
            mass = torch.full((*read.shape[:3], k_blocks), math.nan)
            lite_attention(*given, read, write, mass=mass, engine="cpu", **options)
            kept = read if case.must_do is None else read | case.must_do
            kept = kept if case.must_skip is None else kept & ~case.must_skip
            here = bitmap.unpack(kept, k_blocks)
            note = f"seed {seed}, step {step}, {isas[seed % len(isas)]}, {case}"
            chosen = budget.select(mass, here, must_do, share)
            assert torch.equal(write, bitmap.pack(chosen)), note
            exact = shares(request_of(case, share, options["descending"]), *given[:2], read,
                           case.must_do, case.must_skip)[1]  # fmt: skip
            assert not wrong_masses(mass, exact, case.tile.q_block, rounding(case)).any(), note
            assert not bool(mass[~here].any())
            without = torch.empty_like(write)  # no tensor for masses: the same choice
            lite_attention(*given, read, without, engine="cpu", **options)
            assert torch.equal(without, write), note
            walked += int(here.sum())
            dropped += int(here.sum()) - int(bitmap.count(write))
            read = write
    assert 0.02 < dropped / walked < 0.95


@pytest.mark.parametrize("engine", ["reference", *available_isas()])
@pytest.mark.parametrize("descending", [False, True])
def test_a_row_keeps_the_tile_that_it_looks_at(
    engine: str, descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 30 has 0.004 more or less than the guard of what it has seen in tile 2 or 3.

    All other rows have less than 0.01.

    The other q block drops the tile.
    """
    if engine != "reference":
        monkeypatch.setenv(ISA_VARIABLE, engine)
    q, k, v = torch.zeros(1, 172, 1, 16), torch.zeros(1, 640, 1, 16), torch.randn(1, 640, 1, 16)
    tile, seen = (3, 448) if descending else (2, 192)  # keys walked up to the tile's end
    k[0, tile * 64 : tile * 64 + 64, 0, 0] = 1.0
    q[..., 0] = -6.0
    write = torch.empty(1, 1, 2, 1, dtype=torch.int32)
    for share, kept in ((budget.ROW_GUARD + 0.004, True), (budget.ROW_GUARD - 0.004, False)):
        q[0, 30, 0, 0] = math.log(share / (1 - share) * (seen - 64) / 64)
        mass = torch.empty(1, 1, 2, 10)
        lite_attention(
            q, k, v, bitmap.full(1, 1, 2, 10), write, scale=1.0, budget=0.1, mass=mass,
            descending=descending, engine="reference" if engine == "reference" else "cpu",
        )  # fmt: skip
        assert (mass[0, 0, 0, tile] == 1) == kept and mass[0, 0, 1, tile] < 0.01
        assert bitmap.unpack(write, 10)[0, 0, :, tile].tolist() == [kept, False]


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_few_rows_that_look_at_one_block_lose_nothing(engine: str) -> None:
    """Four of each 128 rows; their tile has 0.03 of the q block's mass, the others 0.06 each."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1024, 1, 64, generator=generator) * s for s in (0.3, 0.3, 1.0))
    key = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    k[0, -64:] = key * 6
    few = (torch.arange(1024) % 128) < 4
    q[0, few, 0] = key * 12
    q[0, ~few, 0] -= ((q[0, ~few, 0] @ key) + 2)[:, None] * key
    right = attention(q, k, v, engine="reference")
    lite = LiteAttention(SkipPolicy(budget=0.2, warmup_steps=0), engine=engine)
    for step in range(4):
        out = lite(q, k, v, step=step, layer="x")
    error = (out - right).norm(dim=-1) / right.norm(dim=-1)
    assert error[0, few].max() < 1e-3 < error[0, ~few].mean()
    assert lite.statistics.sparsity > 0.1


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("rise", [60.0, 100.0, 150.0, 500.0])
def test_what_a_later_block_dwarfs_weighs_nothing(
    rise: float, descending: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maximum of a row rises by ``rise`` (log2) in the last of a group of four K blocks.

    What lies before then has a mass of 2^-rise. Shares of what was seen are 1 and 1 / 2 and 1 / 3
    in the first group, and nearly 0 where the second group begins 60 below the first. So masses lie
    between that of the whole row and that of what was seen.
    """
    monkeypatch.setenv(ISA_VARIABLE, isa)
    q, v = torch.zeros(1, 100, 1, 16), torch.randn(1, 512, 1, 16)
    q[..., 0] = 1.0
    heights = torch.tensor([0.0, -30.0, 5.0, rise, rise - 60, rise - 70, rise - 65, 2 * rise])
    heights = heights.flip(0) if descending else heights
    k = torch.zeros(1, 512, 1, 16)
    k[..., 0] = heights.repeat_interleave(64)[:, None] * math.log(2)
    read, write = bitmap.full(1, 1, 1, 8), torch.empty(1, 1, 1, 1, dtype=torch.int32)
    mass = torch.empty(1, 1, 1, 8)
    lite_attention(
        q, k, v, read, write, scale=1.0, budget=0.05, mass=mass, descending=descending, engine="cpu"
    )
    exact = heights.double().exp2()
    walked = exact.flip(0) if descending else exact
    share = walked / walked.cumsum(0)
    share = share.flip(0) if descending else share
    least, most = exact / exact.sum(), torch.where(share > budget.ROW_GUARD, 1.0, share)
    error = 1e-4  # scores of up to 1,000, whose last bit is 2^-14 of a power of two
    assert ((least - error <= mass[0, 0, 0]) & (mass[0, 0, 0] <= most + error)).all(), mass


@pytest.mark.parametrize("seed", range(8))
def test_a_full_list_equals_dense_bit_for_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighing tiles changes no output, whatever is dropped for the next step."""
    isas = available_isas()
    monkeypatch.setenv(ISA_VARIABLE, isas[seed % len(isas)])
    case = draw(seed)
    q, k, v = tensors(case, seed)
    q_blocks, k_blocks = case.tile.q_blocks(case.q_len), case.tile.k_blocks(case.kv_len)
    read = bitmap.full(case.batch, case.heads, q_blocks, k_blocks)
    common = {
        "layout": case.layout, "scale": case.scale, "rounding": case.rounding,
        "return_lse": True, "engine": "cpu",
    }  # fmt: skip
    out, lse = lite_attention(
        q, k, v, read, torch.empty_like(read), budget=0.3, geometry=case.tile, **common
    )
    dense, dense_lse = attention(q, k, v, **common)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_keeps_its_tile_and_later_ones(
    isa: str, engine: str, number: float, descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite key has scores of both signs, by the signs of the queries."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 150, 1, 64, generator=generator).repeat(1, 1, 8, 1, 1)[:, :, :1100]
    k[0, 700, 0, 3] = number
    read, write = bitmap.full(1, 1, 9, 18), torch.empty(1, 1, 9, 1, dtype=torch.int32)
    lite_attention(q, k, v, read, write, budget=0.5, descending=descending, engine=engine)
    kept = bitmap.unpack(write, 18)
    nan = 700 // 64
    assert bool(kept[..., : nan + 1].all() if descending else kept[..., nan:].all())
    before = kept[..., nan + 1 :] if descending else kept[..., :nan]
    assert not bool(before.all())


@pytest.mark.parametrize("isa", available_isas())
def test_must_do_is_neither_dropped_nor_counted(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    generator = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 1, 640, 1, 64, generator=generator)
    read = bitmap.full(1, 1, 5, 10)
    dropped = {}
    for forced in ((), (7, 8, 9)):
        must_do, write = mask(list(forced), 10), torch.empty_like(read)
        lite_attention(q, k, v, read, write, budget=0.25, must_do=must_do, engine="cpu")
        kept = bitmap.unpack(write, 10)
        dropped[forced] = ~kept
        assert bool(kept[..., list(forced)].all())
    assert bool(dropped[()][..., 7:].any())
    assert bool((dropped[7, 8, 9][..., 1:7] & ~dropped[()][..., 1:7]).any())


@pytest.mark.parametrize("isa", available_isas())
def test_heads_have_budgets_of_their_own(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose limit is 0 keeps all, also what weighs nothing."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    shares = (0.1, 0.0, 2.0**-30, 0.4, 0.02, 0.25)
    limits = budget.limits(shares)
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(2, 300, 6, 64, generator=generator)
    k, v = torch.randn(2, 2, 700, 2, 64, generator=generator)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, 256:320, :, 0] = -2000.0  # K block 4 lies 250 below the others
    q_blocks, k_blocks = 3, 11
    must_do, read = mask([10], k_blocks), bitmap.full(2, 6, q_blocks, k_blocks)
    found = {}
    for forced in (None, must_do):
        write = torch.full_like(read, 0x3C3C3C3C)
        mass = torch.full((2, 6, q_blocks, k_blocks), math.nan)
        options = {"budget": max(shares), "must_do": forced, "limits": limits, "engine": "cpu"}
        lite_attention(q, k, v, read, write, mass=mass, **options)
        assert not bool(mass[..., 4].any())
        here, do = bitmap.unpack(read, k_blocks), torch.zeros(k_blocks, dtype=torch.bool)
        do[10] = forced is not None
        each = [budget.select(mass[:, h], here[:, h], do, share) for h, share in enumerate(shares)]
        assert torch.equal(write, bitmap.pack(torch.stack(each, 1)))
        kept = bitmap.unpack(write, k_blocks)
        assert kept[:, 1:3].all() and not kept[:, [0, 3, 4, 5], :, 4].any()
        without = torch.empty_like(write)
        lite_attention(q, k, v, read, without, **options)
        assert torch.equal(without, write)
        found[forced is None] = kept
    assert not torch.equal(found[True], found[False])
    assert len({int(found[True][:, head].sum()) for head in range(6)}) == 5


def test_heads_without_a_budget_walk_as_those_of_the_model_beside_them() -> None:
    """A process that has such heads alone gives the same bits as one that has all of them."""
    torch.manual_seed(0)
    policy = SkipPolicy(budget=0.2, layer_budgets={"x": (0.0, 0.45)}, warmup_steps=0)
    tile = TileGeometry(64, 64, 64)
    together, alone = (LiteAttention(policy, geometry=tile, engine="cpu") for _ in range(2))
    for step in range(4):
        q, k, v = torch.randn(3, 1, 512, 2, 64)
        wanted = together(q, k, v, step=step, layer="x")[:, :, :1]
        out = alone(*(x[:, :, :1] for x in (q, k, v)), step=step, layer="x", heads=(0,))
        assert torch.equal(out, wanted)
        assert torch.equal(alone.lists("x"), together.lists("x")[:, :1])
