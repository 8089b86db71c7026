"""The rule by which a budget chooses tiles, its bound, and who refuses it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liteattention_rocm import (
    LiteAttention,
    TileGeometry,
    _core,
    attention,
    engines,
    lite_attention,
)
from liteattention_rocm.contract import WEIGHING, LiteRequest
from liteattention_rocm.lite import bitmap, budget

from .simulation import By, expect, inputs, make

TILE = TileGeometry(16, 8, 8)

masses = st.one_of(
    st.sampled_from([0.0, 2.0**-30, 2.0**-24, 0.01, 0.25, 1.0, 1.5, math.nan, math.inf]),
    st.floats(0, 1, width=32),
)
rows = st.lists(
    st.tuples(masses, st.sampled_from([True, True, True, False]), st.booleans()),
    min_size=1,
    max_size=70,
)


def slow_select(row: list[tuple[float, bool, bool]], share: float) -> list[bool]:
    """Try every cut, in exact arithmetic."""
    unit = 2**24
    weight = [
        unit if not m < 1 else math.ceil(Fraction(m) * unit) if walked else 0
        for m, walked, _ in row
    ]
    largest = max((w for w, (_, walked, _) in zip(weight, row, strict=True) if walked), default=0)
    limit = Fraction(share) * unit
    loose = [walked and not must for _, walked, must in row]
    kept = [walked for _, walked, _ in row]
    if limit < 1:
        return kept
    for cut in sorted({w for w, free in zip(weight, loose, strict=True) if free}):
        together = [free and w <= cut for w, free in zip(weight, loose, strict=True)]
        if cut >= largest or sum(w for w, go in zip(weight, together, strict=True) if go) > limit:
            break
        kept = [k and not go for k, go in zip(kept, together, strict=True)]
    return kept


def test_all_engines_have_one_guard() -> None:
    assert budget.ROW_GUARD == _core.CPU_ROW_GUARD == _core.GFX942_ROW_GUARD < 1


@settings(max_examples=300, deadline=None)
@given(rows, st.floats(2.0**-40, 0.999))
def test_the_rule_is_what_it_says(row: list[tuple[float, bool, bool]], share: float) -> None:
    mass, walked, must = (torch.tensor([entry[i] for entry in row]) for i in range(3))
    chosen = budget.select(mass.float(), walked.bool(), must.bool(), share)
    assert chosen.tolist() == slow_select(row, share)


@settings(max_examples=50, deadline=None)
@given(rows, st.lists(st.sampled_from([0.0, 2.0**-30, 0.01, 0.3, 0.9]), min_size=1, max_size=4))
def test_heads_choose_by_their_own(
    row: list[tuple[float, bool, bool]], budgets: list[float]
) -> None:
    """Two videos, two q blocks of each head, which differ in what they walked."""
    mass, walked, must = (torch.tensor([entry[i] for entry in row]) for i in range(3))
    shape = (2, len(budgets), 2, len(row))
    mass, walked = mass.float().expand(shape), walked.bool().expand(shape).clone()
    walked[:, :, 1, ::2] = False
    chosen = budget.select(mass, walked, must.bool(), budgets)
    for head, share in enumerate(budgets):
        alone = budget.select(mass[:, head], walked[:, head], must.bool(), share)
        assert torch.equal(chosen[:, head], alone)


def test_ties_go_together_and_the_heaviest_stays() -> None:
    def kept(*mass: float, share: float = 0.5) -> list[bool]:
        ones = torch.ones(len(mass), dtype=torch.bool)
        return budget.select(torch.tensor(mass), ones, ~ones, share).tolist()

    assert kept(0.2, 0.2, 0.2, 0.4) == [True, True, True, True]  # 0.6 is more than the budget
    assert kept(0.125, 0.1875, 0.1875, 0.5) == [False, False, False, True]
    assert kept(0.125, 0.1875, 0.1875, 0.5, share=0.499) == [False, True, True, True]
    assert kept(0.3) == [True] and kept(0.1, 0.1) == [True, True]
    assert kept(math.nan, 0.1, 0.9) == [True, False, True]
    assert kept(0.0, 0.9, share=2.0**-24) == [False, True]
    assert kept(0.0, 0.9, share=2.0**-25) == [True, True]
    assert kept(0.0, 0.9, share=0.0) == [True, True]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_step_drops_more_than_its_budget(seed: int, descending: bool) -> None:
    """Against softmax itself: masses, and the outputs of the next step with the same tensors."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(1, 2, 40, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 76, 8, generator=generator, dtype=torch.float64)
    read = bitmap.full(1, 2, 3, 10)
    share = (0.05, 0.2, 0.4)[seed % 3]
    common = {"layout": "bhsd", "geometry": TILE, "engine": "reference"}
    write, mass = torch.empty_like(read), torch.empty(1, 2, 3, 10)
    dense = lite_attention(
        q, k, v, read, write, budget=share, descending=descending, mass=mass, **common
    )
    assert torch.equal(dense, attention(q, k, v, layout="bhsd", engine="reference"))

    exact = torch.softmax(q @ k.mT / math.sqrt(8), -1)
    tiles = torch.nn.functional.pad(exact, (0, 4)).unflatten(-1, (10, 8)).sum(-1)
    kept = bitmap.unpack(write, 10)
    dropped = (~kept).repeat_interleave(16, dim=2)[:, :, :40]
    lost = (tiles * dropped).sum(-1)  # of each row
    for block, listed in enumerate(torch.split(tiles, 16, dim=2)):
        assert bool((mass[:, :, block] >= listed.mean(2) * (1 - 1e-6)).all())
        assert bool((torch.split(lost, 16, dim=2)[block].mean(-1) <= share).all())
    assert bool(kept.any(-1).all())
    assert share < 0.2 or not bool(kept.all())

    out = lite_attention(q, k, v, write, torch.empty_like(read), budget=share, **common)
    spread = torch.cdist(v, v).amax((-2, -1))[..., None]
    assert bool(((out - dense).norm(dim=-1) <= lost * spread * (1 + 1e-9)).all())


def test_the_first_tile_walked_weighs_one_and_turns_with_the_walk() -> None:
    q, k, v = inputs(0)
    for descending in (False, True):
        mass, write = torch.empty(1, 2, 5, 10), torch.empty(1, 2, 5, 1, dtype=torch.int32)
        lite_attention(
            q, k, v, By().full(q, k), write, budget=0.1, descending=descending, mass=mass,
            geometry=TileGeometry(8, 4, 4), engine="reference",
        )  # fmt: skip
        first, last = (9, 0) if descending else (0, 9)
        assert bool((mass[..., first] == 1).all()) and bool((mass[..., last] < 1).all())


def test_budget_zero_equals_dense_at_every_step_and_one_percent_does_not() -> None:
    for share, sparse in ((0.0, False), (0.1, True)):
        lite = make(make().policy.model_copy(update={"budget": share}))
        for step in range(3):
            out = lite(*inputs(step), step=step, layer="a")
            dense = attention(*inputs(step), engine="reference")
            assert torch.equal(out, dense) is (not sparse or step == 0)
        assert (lite.statistics.sparsity > 0) is sparse


def test_requests_with_budgets_of_their_own_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies at once, as a server has them: each request is judged by its own."""
    shares = (0.05, 0.3)
    alone = []
    for clip, share in enumerate(shares):
        lite = make(make().policy.model_copy(update={"budget": share}))
        alone.append([lite(*inputs(s, clip=clip), step=s, layer="a") for s in range(5)])
    both = [make(make().policy.model_copy(update={"budget": share})) for share in shares]
    for step in range(5):
        for clip, lite in enumerate(both):
            lite(*inputs(step, clip=9), step=step, layer="a")  # repeated with other tensors
            out = lite(*inputs(step, clip=clip), step=step, layer="a")
            assert torch.equal(out, alone[clip][step])
    less, more = (lite.statistics.sparsity for lite in both)
    assert 0 < less < more


def test_a_policy_that_changes_its_rule_counts_from_the_next_call() -> None:
    lite, by = make(), By()
    expect(lite, by, 0, inputs(0))
    lite.policy = lite.policy.model_copy(update={"budget": 0.2})
    write = torch.empty_like(by.read)
    q, k, v = inputs(1)
    lite_attention(
        q, k, v, by.read, write, budget=0.2, descending=True, geometry=TileGeometry(8, 4, 4),
        engine="reference",
    )  # fmt: skip
    lite(q, k, v, step=1, layer="blocks.0")
    assert torch.equal(lite.lists("blocks.0"), write)


def test_every_engine_weighs_and_one_that_could_not_would_say_who_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = engines.available()
    assert tuple(other for other in found if engines.get(other).weighs) == WEIGHING
    name = "portable"
    engine = engines.get(name)
    monkeypatch.setattr(type(engine), "weighs", False)
    request = LiteRequest(
        1, 1, 1, 384, 384, 128, torch.bfloat16, torch.device("cuda", 0), "bshd", 0.1, False,
        "rtne", False, engine.geometry(128), -math.inf, False, False, 0.02,
    )  # fmt: skip
    (reason,) = [text for text in engine.reasons(request) if "budget" in text]
    assert reason.endswith("use a threshold, or engine 'cpu', 'gfx942', 'portable' or 'reference'")
    with pytest.raises(ValueError, match=f"engine '{name}' cannot run this.*it cannot weigh tiles"):
        engines.admit(request, name)


def test_nothing_of_a_generation_with_a_budget_is_left_behind() -> None:
    lite = LiteAttention(make().policy.model_copy(update={"budget": 0.1}), engine="reference")
    q, k, v = torch.randn(3, 1, 300, 1, 16)
    for generation in range(3):
        for step in range(3):
            lite(q, k, v, step=step, layer="a", generation=generation)
        lite.end(generation)
    assert not lite._generations and not lite._tiles
