"""The CPU engine's masses against float64, and its choice of tiles, bit for bit, from its masses.

Calls as in test_cpu_lists: scores are exact in fp32, so masses differ by the rounding of
exponentials and of sums alone.
"""

from __future__ import annotations

import math

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.engines import ISA_VARIABLE
from liteattention_rocm.engines.cpu import available_isas
from liteattention_rocm.lite import bitmap, budget
from tests.conftest import forget

from .test_cpu_lists import Case, draw, mask, tensors

BUDGETS = (2.0**-30, 0.03, 0.1, 0.3, 0.6)


def case_of(seed: int) -> Case:
    case = draw(seed)
    # Within 2^126 of each other, whatever the head dim: what underflows weighs nothing.
    case.scale *= 0.25
    return case


def rounding(case: Case) -> float:
    """How far an fp32 mass may be from the exact one.

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
            found = {}
            for engine in ("cpu", "reference"):
                write = torch.full_like(read, 0x3C3C3C3C)
                mass = torch.full((*read.shape[:3], k_blocks), math.nan)
                lite_attention(*given, read, write, mass=mass, engine=engine, **options)
                found[engine] = (write, mass)
            write, mass = found["cpu"]
            kept = read if case.must_do is None else read | case.must_do
            kept = kept if case.must_skip is None else kept & ~case.must_skip
            here = bitmap.unpack(kept, k_blocks)
            note = f"seed {seed}, step {step}, {isas[seed % len(isas)]}, {case}"
            chosen = budget.select(mass, here, must_do, share)
            assert torch.equal(write, bitmap.pack(chosen)), note
            error = (mass - found["reference"][1]).abs().max()
            assert error <= rounding(case), f"{float(error / rounding(case)):.3g}: {note}"
            assert not bool(mass[~here].any())
            without = torch.empty_like(write)  # no tensor for masses: the same choice
            lite_attention(*given, read, without, engine="cpu", **options)
            assert torch.equal(without, write), note
            walked += int(here.sum())
            dropped += int(here.sum()) - int(bitmap.count(write))
            read = write
    assert 0.02 < dropped / walked < 0.95


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
