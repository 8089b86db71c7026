"""LiteAttention's state from step to step: every call is compared with the simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.engines.reference import ReferenceEngine
from liteattention_rocm.lite import bitmap

from .simulation import BUDGET, STEPS, THRESHOLD, TILE, By, call, expect, inputs, make

pytestmark = pytest.mark.usefixtures("limit")


def test_scenario_tells_lists_and_directions_apart() -> None:
    by = By()
    sizes = []
    for step in range(STEPS):
        fresh = By().step(inputs(step), advance=False)
        other_way = By(by.read, by.ordinal + 1).step(inputs(step), advance=False)
        out, write = by.step(inputs(step))
        sizes.append(int(bitmap.count(write)))
        assert not torch.equal(other_way[1], write)
        if step:
            assert not torch.equal(fresh[0], out) and not torch.equal(fresh[1], write)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) >= 5, "lists must shrink"


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("direction", ["alternate", "ascending", "descending"])
def test_steps_feed_each_other(direction: Any, soft_skip: bool) -> None:
    policy = SkipPolicy(
        threshold=THRESHOLD, direction=direction, soft_skip=soft_skip, warmup_steps=0
    )
    lite, by = make(policy), By(soft_skip=soft_skip, direction=direction)
    for step in range(STEPS):
        expect(lite, by, step, inputs(step))


def test_first_step_equals_dense_and_minus_infinity_always_does() -> None:
    assert torch.equal(call(make(), inputs(0), 0), attention(*inputs(0), engine="reference"))
    lite = make(SkipPolicy(threshold=-float("inf"), warmup_steps=0))
    for step in range(3):
        dense = attention(*inputs(step), engine="reference")
        assert torch.equal(call(lite, inputs(step), step), dense)
    assert lite.statistics.sparsity == 0.0


def test_layers_keep_apart() -> None:
    lite = make()
    layers = {f"blocks.{n}": By() for n in range(3)}
    for step in range(3):
        for n, (layer, by) in enumerate(layers.items()):
            expect(lite, by, step, inputs(step, clip=n), layer=layer)


def test_guidance_branches_interleaved() -> None:
    lite = make()
    branches = {"cond": By(), "uncond": By()}
    for step in range(STEPS):
        for branch, by in branches.items():
            expect(lite, by, step, inputs(step, branch=branch), branch=branch)


def test_guidance_branches_batched() -> None:
    lite, by = make(), By()
    for step in range(STEPS):
        expect(lite, by, step, inputs(step, batch=2))


def test_a_branch_that_joins_late_or_rests() -> None:
    lite, cond, uncond = make(), By(), By()
    for step in range(STEPS):
        expect(lite, cond, step, inputs(step, branch="c"), branch="cond")
        if step in (2, 3, 5):  # a guidance interval
            expect(lite, uncond, step, inputs(step, branch="u"), branch="uncond")


@pytest.mark.parametrize("repeats", [2, 3])
def test_calls_repeated_within_a_step_change_nothing(repeats: int) -> None:
    lite, by = make(), By()
    for step in range(STEPS):
        want, want_list = by.step(inputs(step))
        for _ in range(repeats):
            assert torch.equal(call(lite, inputs(step), step), want)
            assert torch.equal(lite.lists("blocks.0"), want_list)
    assert len(lite.statistics) == STEPS


def test_a_repeated_call_may_bring_other_tensors() -> None:
    """The last call of a step counts; what a warm-up run with random tensors voted is gone."""
    lite, by = make(), By()
    for step in range(STEPS):
        call(lite, inputs(step, clip=9), step)
        expect(lite, by, step, inputs(step))


def test_steps_that_were_left_out_do_not_count() -> None:
    lite, by = make(), By()
    for step in (0, 3, 4, 9, 11):
        expect(lite, by, step, inputs(step))


def test_new_generation_of_the_same_shape_starts_over() -> None:
    lite = make()
    for clip in range(3):
        by = By()
        for step in range(STEPS):
            expect(lite, by, step, inputs(step, clip=clip))
    assert len(lite.statistics) == STEPS  # those of the latest run under this name


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("aborted_at", range(STEPS))
def test_generation_aborted_at_every_step(aborted_at: int, warmup: int) -> None:
    """Aborted between two layers of a step: some layers have seen it, some have not."""
    policy = SkipPolicy(threshold=THRESHOLD, warmup_steps=warmup)
    lite = make(policy)
    for step in range(aborted_at + 1):
        call(lite, inputs(step, clip=7), step, layer="early")
        if step < aborted_at:
            call(lite, inputs(step, clip=8), step, layer="late")
    layers = {"early": By(), "late": By()}
    for step in range(STEPS):
        for clip, (layer, by) in enumerate(layers.items()):
            tensors = inputs(step, clip=clip)
            if step < warmup:
                dense = attention(*tensors, engine="reference")
                assert torch.equal(call(lite, tensors, step, layer=layer), dense)
            else:
                expect(lite, by, step, tensors, layer=layer)


@pytest.mark.parametrize("branches", ["separate", "shared"])
def test_a_new_generation_starts_over_in_layers_that_come_late(branches: Any) -> None:
    """A second denoiser begins at a later step than it ended at, and a branch comes no more."""
    lite = make(SkipPolicy(threshold=THRESHOLD, branches=branches, warmup_steps=0))
    for step in range(4):
        layer = "high" if step < 2 else "low"
        for branch in ("cond", "uncond"):
            call(lite, inputs(step, clip=7), step, layer=layer, branch=branch)
    layers = {"high": By(), "low": By()}
    for step in range(6, 12):
        layer = "high" if step < 8 else "low"
        if step == 6:
            call(lite, inputs(0), 0, layer=layer, branch="cond")
            layers[layer].step(inputs(0))
        expect(lite, layers[layer], step, inputs(step % STEPS), layer=layer, branch="cond")
    rows = lite.statistics.to_records()
    assert [(row["layer"], row["branch"], row["step"]) for row in rows] == [
        *(("high", "cond", step) for step in (0, 6, 7)),
        *(("low", "cond", step) for step in range(8, 12)),
    ]


def test_statistics_of_a_shorter_generation_hold_nothing_of_the_longer_one() -> None:
    lite = make()
    for steps in (STEPS, 2):
        for step in range(steps):
            for branch in ("cond", "uncond"):
                call(lite, inputs(step), step, branch=branch)
    assert [row["step"] for row in lite.statistics.by_step()] == [0, 1]


def test_resolution_change_and_back() -> None:
    lite = make()
    for length in (40, 52, 40):
        by = By()
        for step in range(3):
            expect(lite, by, step, inputs(step, length=length))


def test_resolution_change_within_a_generation() -> None:
    lite, low, high = make(), By(), By()
    for step in range(3):
        expect(lite, low, step, inputs(step, length=40))
    for step in range(3, 6):
        expect(lite, high, step, inputs(step, length=52))
    assert [row["tiles_total"] for row in lite.statistics.by_step()] == [100] * 3 + [182] * 3


@pytest.mark.parametrize("change", ["batch", "dtype", "kv_len", "heads", "geometry"])
def test_any_other_change_of_shape_starts_over(change: str) -> None:
    lite, by = make(), By()
    for step in range(2):
        expect(lite, by, step, inputs(step))
    q, k, v = inputs(2)
    if change == "batch":
        q, k, v = inputs(2, batch=2)
    elif change == "dtype":
        q, k, v = q.half(), k.half(), v.half()
    elif change == "kv_len":
        k, v = k[:, :36], v[:, :36]  # the same number of words and, for 37..40 keys, of blocks
    elif change == "heads":
        k, v = k[:, :, :1], v[:, :, :1]
    else:
        lite.geometry = TileGeometry(8, 8, 4)
        dense = attention(q, k, v, engine="reference")
        assert torch.equal(call(lite, (q, k, v), 2), dense)
        assert lite.statistics.by_step()[2]["tiles_total"] == 2 * 5 * 5
        return
    expect(lite, By(), 2, (q, k, v))


def test_lists_have_the_tiles_that_the_engine_prefers_for_so_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All heads and batch entries count; lists and statistics have the same tiles."""

    def geometry(self: ReferenceEngine, head_dim: int, rows: int | None = None) -> TileGeometry:
        return TileGeometry(8 if rows is not None and rows <= 160 else 16, 8, 4)

    monkeypatch.setattr(ReferenceEngine, "geometry", geometry)
    lite = LiteAttention(SkipPolicy(threshold=-2.0, warmup_steps=0), engine="reference")
    for batch, q_blocks in ((1, 5), (2, 5), (3, 3)):  # 80, 160 and 240 rows
        for step in range(2):
            call(lite, inputs(step, batch=batch, length=40), step)
        assert lite.lists("blocks.0").shape == (batch, 2, q_blocks, 1)
        records = lite.statistics.to_records()
        assert records[-1]["tiles_total"] == batch * 2 * q_blocks * 5
        lite.reset()


def test_warmup_gap_and_last_step_are_dense(limit: str) -> None:
    lite, by = make(SkipPolicy(threshold=THRESHOLD, warmup_steps=2, last_step=-2)), By()
    for step in range(STEPS):
        tensors = inputs(step)
        if 2 <= step <= STEPS - 2:
            expect(lite, by, step, tensors, num_steps=STEPS)
        else:
            dense = attention(*tensors, engine="reference")
            assert torch.equal(call(lite, tensors, step, num_steps=STEPS), dense)
    records = lite.statistics.to_records()
    assert [row["dense"] for row in records] == [True, True, False, False, False, True]
    assert records[5]["sparsity"] == 0.0 and records[4]["sparsity"] > 0.0
    assert records[5]["threshold"] is None is records[5]["budget"]
    used = [{"threshold": row["threshold"], "budget": row["budget"]} for row in records[2:5]]
    wanted = {"threshold": THRESHOLD, "budget": None}
    assert used == 3 * [{"threshold": None, "budget": BUDGET} if limit == "budget" else wanted]


def test_budgets_by_step_and_layer() -> None:
    policy = SkipPolicy(budget=(0.02, 0.2), layer_budgets={"blocks.1": 0.0}, warmup_steps=0)
    lite, read = make(policy), None
    for step, budget in enumerate((0.02, 0.2, 0.2)):
        q, k, v = inputs(step)
        read = By().full(q, k) if read is None else read
        write = torch.empty_like(read)
        lite_attention(
            q, k, v, read, write, budget=budget, descending=step == 1, geometry=TILE,
            engine="reference",
        )  # fmt: skip
        call(lite, (q, k, v), step)
        call(lite, (q, k, v), step, layer="blocks.1")
        read = write
        assert torch.equal(lite.lists("blocks.0"), read)
        assert torch.equal(lite.lists("blocks.1"), By().full(q, k))
    records = lite.statistics.to_records()
    assert [row["budget"] for row in records] == [0.02, 0.0, 0.2, 0.0, 0.2, 0.0]


def test_budgets_by_head() -> None:
    """Each head is dropped from as if it were alone; a call with other heads is refused."""
    heads = inputs(0)[0].shape[2]
    budgets = tuple(0.0 if h == 1 else 0.1 * (h + 1) for h in range(heads))
    together = make(SkipPolicy(budget=0.9, layer_budgets={"blocks.0": budgets}, warmup_steps=0))
    alone = [make(SkipPolicy(budget=share, warmup_steps=0)) for share in budgets]
    for step in range(3):
        tensors = inputs(step)
        out = call(together, tensors, step)
        for h, lite in enumerate(alone):
            assert torch.equal(out[:, :, h], call(lite, tensors, step)[:, :, h])
            assert torch.equal(together.lists("blocks.0")[:, h], lite.lists("blocks.0")[:, h])
        some = tuple(reversed(range(heads)))
        mirrored = tuple(x.flip(2) for x in tensors)
        other = call(together, mirrored, step, generation="mirrored", heads=some)
        assert torch.equal(other.flip(2), out)
    records = [row for row in together.statistics.to_records() if row["generation"] == 0]
    assert [row["budget"] for row in records] == 3 * [list(budgets)]
    with pytest.raises(ValueError, match=f"{heads} budgets by head, but the call has 1 query"):
        call(together, tuple(x[:, :, :1] for x in inputs(0)), 0, generation="other")


@pytest.mark.parametrize("warmup", [0, 1])
def test_budgets_by_step_and_head(warmup: int) -> None:
    """Each head begins at its own step, as if it were alone with its budgets by step."""
    heads = inputs(0)[0].shape[2]
    budgets = tuple(
        tuple(0.1 * (h + 1) if step > h else 0.0 for h in range(heads)) for step in range(heads + 1)
    )
    assert len(set(budgets)) == len(budgets)
    together = make(
        SkipPolicy(budget=0.9, layer_budgets={"blocks.0": budgets}, warmup_steps=warmup)
    )
    alone = [
        make(SkipPolicy(budget=own, warmup_steps=warmup)) for own in zip(*budgets, strict=True)
    ]
    full = By().full(*inputs(0)[:2])
    for step in range(heads + 2):
        tensors = inputs(step)
        out = call(together, tensors, step)
        for h, lite in enumerate(alone):
            assert torch.equal(out[:, :, h], call(lite, tensors, step)[:, :, h])
            if step >= warmup:
                own = together.lists("blocks.0")[:, h]
                assert torch.equal(own, lite.lists("blocks.0")[:, h])
                assert torch.equal(own, full[:, h]) == (step <= h)
    used = [row["budget"] for row in together.statistics.to_records()]
    assert used == [
        None if step < warmup else list(budgets[min(step, heads)]) for step in range(heads + 2)
    ]


def test_thresholds_by_step_layer_and_length() -> None:
    policy = SkipPolicy(
        threshold=(-4.0, -1.0),
        layer_thresholds={"blocks.1": -3.0},
        threshold_scale="length",
        warmup_steps=0,
    )
    lite, plain, special = make(policy), By(), By()
    for step in range(3):
        drop = torch.log2(torch.tensor(40.0, dtype=torch.float64)).item()
        plain.threshold = (-4.0 if step == 0 else -1.0) - drop
        special.threshold = -3.0 - drop
        expect(lite, plain, step, inputs(step))
        expect(lite, special, step, inputs(step, clip=1), layer="blocks.1")


def test_retest_walks_the_full_list_again() -> None:
    lite, by = make(SkipPolicy(threshold=THRESHOLD, retest_every=3, warmup_steps=0)), By()
    for step in range(7):
        if step % 3 == 0:
            by.read = None
        call(lite, inputs(step, clip=9), step)  # repeated calls of a retest step retest again
        expect(lite, by, step, inputs(step))
    sparsity = [row["sparsity"] for row in lite.statistics.by_step()]
    assert sparsity[3] == 0.0 == sparsity[6] and sparsity[2] > 0.0 < sparsity[5]


def test_kept_tiles_are_the_bits_of_the_list() -> None:
    lite = make()
    for length, generation in ((40, 0), (52, 1)):
        for step in range(2):
            call(lite, inputs(step, length=length), step, branch="a", generation=generation)
    for blocks, (columns, generation) in ((5, (10, 0)), (7, (13, 1))):
        kept = lite.kept_tiles("blocks.0", "a", generation)
        assert kept.shape == (1, 2, blocks, columns) and kept.dtype == torch.bool
        assert torch.equal(bitmap.pack(kept), lite.lists("blocks.0", "a", generation))
        rows = [r for r in lite.statistics.to_records() if r["generation"] == generation]
        assert int(kept.sum()) == rows[-1]["tiles_kept"] < kept.numel()
    with pytest.raises(KeyError, match=r"no list of layer 'blocks.0', branch 'b'"):
        lite.kept_tiles("blocks.0", "b")


def test_must_do_and_must_skip() -> None:
    policy = SkipPolicy(
        threshold=THRESHOLD, must_do=[(5, 9)], must_skip=[(12, 17), (36, 40)], warmup_steps=0
    )
    do, skip = policy.key_masks(40, 4)
    lite, by = make(policy), By(must_do=do, must_skip=skip)
    for step in range(4):
        expect(lite, by, step, inputs(step))
        kept = bitmap.unpack(lite.lists("blocks.0"), 10)
        assert bool(kept[..., 1:3].all()) and not bool(kept[..., [3, 9]].any())
    assert lite.statistics.by_step()[0]["sparsity"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"range 1 .36, 40. ends past the 36 keys"):
        call(lite, inputs(4, length=36), 4)
    expect(lite, by, 4, inputs(4))
