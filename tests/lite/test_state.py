"""LiteAttention's state: every call is compared with a simulation that holds its lists by hand."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import (
    LiteAttention,
    SkipPolicy,
    TileGeometry,
    attention,
    dense,
    lite_attention,
    skiplist,
)

TILE = TileGeometry(8, 4, 4)
THRESHOLD = -2.0
POLICY = SkipPolicy(threshold=THRESHOLD)
STEPS = 6

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    step: int, *, branch: str = "", clip: int = 0, batch: int = 1, length: int = 40
) -> Tensors:
    """q, k, v [B, S, 2, 8] of one step: keys that matter stay the same, the rest is noise."""
    fixed = torch.Generator().manual_seed(100 + clip)
    common = torch.randn(1, 1, 2, 8, generator=fixed)
    weight = torch.randn(batch, length, 1, 1, generator=fixed)
    noise = torch.Generator().manual_seed(1000 * clip + 10 * step + sum(map(ord, branch)))

    def randn() -> torch.Tensor:
        return torch.randn(batch, length, 2, 8, generator=noise)

    q = common + 0.5 * randn()
    k = common * weight + 0.5 * randn()
    return q.bfloat16(), k.bfloat16(), randn().bfloat16()


def make(policy: SkipPolicy = POLICY, **options: Any) -> LiteAttention:
    return LiteAttention(policy, geometry=TILE, engine="reference", **options)


def call(lite: LiteAttention, tensors: Tensors, step: int, **where: Any) -> torch.Tensor:
    result = lite(*tensors, step=step, **{"layer": "blocks.0", **where})
    assert isinstance(result, torch.Tensor)
    return result


@dataclass
class By:
    """Lists held by hand: what one layer and branch of one generation ought to do."""

    read: torch.Tensor | None = None
    ordinal: int = 0
    threshold: float = THRESHOLD
    soft_skip: bool = False
    direction: str = "alternate"
    must_do: torch.Tensor | None = None
    must_skip: torch.Tensor | None = None

    def full(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return skiplist.full(
            q.shape[0], q.shape[2], TILE.q_blocks(q.shape[1]), TILE.k_blocks(k.shape[1])
        )

    def step(self, tensors: Tensors, *, advance: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = tensors
        read = self.full(q, k) if self.read is None else self.read
        write = torch.zeros_like(read)
        descending = {"alternate": self.ordinal % 2 == 1, "ascending": False, "descending": True}
        out = lite_attention(
            q,
            k,
            v,
            read,
            write,
            threshold=self.threshold,
            descending=descending[self.direction],
            soft_skip=self.soft_skip,
            must_do=self.must_do,
            must_skip=self.must_skip,
            geometry=TILE,
            engine="reference",
        )
        assert isinstance(out, torch.Tensor)
        if advance:
            self.read, self.ordinal = write, self.ordinal + 1
        return out, write


def expect(lite: LiteAttention, by: By, step: int, tensors: Tensors, **where: Any) -> None:
    """Call ``lite`` and the simulation with the same tensors: same output, same next list."""
    out = call(lite, tensors, step, **where)
    want, want_list = by.step(tensors)
    assert torch.equal(out, want)
    listed = {k: v for k, v in where.items() if k in ("branch", "generation")}
    assert torch.equal(lite.lists(where.get("layer", "blocks.0"), **listed), want_list)


def test_scenario_tells_lists_and_directions_apart() -> None:
    by = By()
    sizes = []
    for step in range(STEPS):
        fresh = By().step(inputs(step), advance=False)
        other_way = By(by.read, by.ordinal + 1).step(inputs(step), advance=False)
        out, write = by.step(inputs(step))
        sizes.append(int(skiplist.count(write)))
        assert not torch.equal(other_way[1], write)
        if step:
            assert not torch.equal(fresh[0], out) and not torch.equal(fresh[1], write)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) >= 5, "lists must shrink"


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("direction", ["alternate", "ascending", "descending"])
def test_steps_feed_each_other(direction: Any, soft_skip: bool) -> None:
    policy = SkipPolicy(threshold=THRESHOLD, direction=direction, soft_skip=soft_skip)
    lite, by = make(policy), By(soft_skip=soft_skip, direction=direction)
    for step in range(STEPS):
        expect(lite, by, step, inputs(step))


def test_first_step_equals_dense_and_minus_infinity_always_does() -> None:
    assert torch.equal(call(make(), inputs(0), 0), attention(*inputs(0), engine="reference"))
    lite = make(SkipPolicy(threshold=-float("inf")))
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


class Broken(RuntimeError):
    pass


def break_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def scribble(q: Any, k: Any, v: Any, read: Any, write: torch.Tensor, **_: Any) -> None:
        write.fill_(0)
        raise Broken

    monkeypatch.setattr(dense, "lite_attention", scribble)


@pytest.mark.parametrize("failing", range(4))
def test_exception_then_the_same_step_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lite, by = make(), By()
    for step in range(STEPS):
        if step == failing:
            with monkeypatch.context() as broken:
                break_engine(broken)
                for _ in range(2):
                    with pytest.raises(Broken):
                        call(lite, inputs(step), step)
        expect(lite, by, step, inputs(step))
    assert len(lite.statistics) == STEPS


def test_exception_then_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lite, by = make(), By()
    for step in range(STEPS):
        if step in (0, 3):
            with monkeypatch.context() as broken:
                break_engine(broken)
                with pytest.raises(Broken):
                    call(lite, inputs(step), step)
        else:  # the step that failed does not count: same list, same direction as it had
            expect(lite, by, step, inputs(step))


def test_exception_in_a_repeated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lite, by = make(), By()
    expect(lite, by, 0, inputs(0))
    call(lite, inputs(1), 1)
    with monkeypatch.context() as broken:
        break_engine(broken)
        with pytest.raises(Broken):
            call(lite, inputs(1), 1)
    assert by.read is not None and torch.equal(lite.lists("blocks.0"), by.read)
    expect(lite, by, 2, inputs(2))


def test_exception_then_a_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = make()
    call(lite, inputs(0, clip=5), 0)
    with monkeypatch.context() as broken:
        break_engine(broken)
        with pytest.raises(Broken):
            call(lite, inputs(1, clip=5), 1)
    by = By()
    for step in range(3):
        expect(lite, by, step, inputs(step))


def test_a_refused_call_costs_nobody_the_lists() -> None:
    lite, by = make(), By()
    for step in range(4):
        q, k, v = inputs(step, length=52)
        with pytest.raises(ValueError, match="k and v must have one shape"):
            call(lite, (q, k, v[:, :3]), step)
        with pytest.raises(ValueError, match="q must have 4 dimensions"):
            call(lite, (q[0], k, v), step)
        with pytest.raises(TypeError, match="q must be a tensor, got NoneType"):
            call(lite, (None, k, v), step)  # type: ignore[arg-type]
        expect(lite, by, step, inputs(step))


def test_warmup_gap_and_last_step_are_dense() -> None:
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
    assert records[5]["threshold"] is None and records[4]["threshold"] == THRESHOLD


def test_thresholds_by_step_layer_and_length() -> None:
    policy = SkipPolicy(
        threshold=(-4.0, -1.0), layer_thresholds={"blocks.1": -3.0}, threshold_scale="length"
    )
    lite, plain, special = make(policy), By(), By()
    for step in range(3):
        drop = torch.log2(torch.tensor(40.0, dtype=torch.float64)).item()
        plain.threshold = (-4.0 if step == 0 else -1.0) - drop
        special.threshold = -3.0 - drop
        expect(lite, plain, step, inputs(step))
        expect(lite, special, step, inputs(step, clip=1), layer="blocks.1")


def test_retest_walks_the_full_list_again() -> None:
    lite, by = make(SkipPolicy(threshold=THRESHOLD, retest_every=3)), By()
    for step in range(7):
        if step % 3 == 0:
            by.read = None
        call(lite, inputs(step, clip=9), step)  # repeated calls of a retest step retest again
        expect(lite, by, step, inputs(step))
    sparsity = [row["sparsity"] for row in lite.statistics.by_step()]
    assert sparsity[3] == 0.0 == sparsity[6] and sparsity[2] > 0.0 < sparsity[5]


def test_must_do_and_must_skip() -> None:
    policy = SkipPolicy(threshold=THRESHOLD, must_do=[(5, 9)], must_skip=[(12, 17), (36, 40)])
    do, skip = policy.key_masks(40, 4)
    lite, by = make(policy), By(must_do=do, must_skip=skip)
    for step in range(4):
        expect(lite, by, step, inputs(step))
        kept = skiplist.unpack(lite.lists("blocks.0"), 10)
        assert bool(kept[..., 1:3].all()) and not bool(kept[..., [3, 9]].any())
    assert lite.statistics.by_step()[0]["sparsity"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"range 1 .36, 40. ends past the 36 keys"):
        call(lite, inputs(4, length=36), 4)
    expect(lite, by, 4, inputs(4))


# --- branches that share ---------------------------------------------------------------------


def shared_step(by: By, tensors: dict[str, Tensors]) -> dict[str, torch.Tensor]:
    """All branches read one list; the next one is the OR of what they write."""
    results = {name: by.step(x, advance=False) for name, x in tensors.items()}
    merged = torch.stack([write for _, write in results.values()])
    by.read = skiplist.pack(skiplist.unpack(merged, 10).any(0))
    by.ordinal += 1
    return {name: out for name, (out, _) in results.items()}


def branch_inputs(step: int, names: Iterable[str] = ("cond", "uncond")) -> dict[str, Tensors]:
    return {name: inputs(step, branch=name) for name in names}


SHARED = SkipPolicy(threshold=THRESHOLD, branches="shared")


def test_shared_branches_read_one_list_and_join_what_they_write() -> None:
    lite, by = make(SHARED), By()
    for step in range(STEPS):
        tensors = branch_inputs(step)
        want = shared_step(by, tensors)
        for name, x in tensors.items():
            assert torch.equal(call(lite, x, step, branch=name), want[name])
        assert by.read is not None and torch.equal(lite.lists("blocks.0", "any"), by.read)
    computed = [row["tiles_computed"] for row in lite.statistics.to_records()]
    assert computed[0::2] == computed[1::2]  # both walked the same tiles


def test_shared_branches_called_again_in_any_order() -> None:
    lite, by = make(SHARED), By()
    orders = (
        ("cond", "cond", "uncond"),
        ("cond", "uncond", "cond"),
        ("uncond", "cond", "uncond", "uncond"),
    )
    for step in range(STEPS):
        tensors = branch_inputs(step)
        want = shared_step(by, tensors)
        last = {name: at for at, name in enumerate(orders[step % 3])}
        for at, name in enumerate(orders[step % 3]):
            if at == last[name]:
                assert torch.equal(call(lite, tensors[name], step, branch=name), want[name])
            else:  # votes of a call that is repeated with other tensors must vanish
                call(lite, inputs(step, clip=9), step, branch=name)
    assert by.read is not None and torch.equal(lite.lists("blocks.0"), by.read)


def test_shared_branches_with_three_and_with_one_that_rests() -> None:
    lite, by = make(SHARED), By()
    for step in range(STEPS):
        names = ("a", "b", "c") if step % 2 else ("b",)
        tensors = branch_inputs(step, names)
        want = shared_step(by, tensors)
        for name, x in tensors.items():
            assert torch.equal(call(lite, x, step, branch=name), want[name])


def test_shared_branch_that_fails_keeps_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lite, by = make(SHARED), By()
    shared_step(by, first := branch_inputs(0))
    for name, x in first.items():
        call(lite, x, 0, branch=name)
    call(lite, inputs(1, branch="cond"), 1, branch="cond")
    with monkeypatch.context() as broken:
        break_engine(broken)
        with pytest.raises(Broken):
            call(lite, inputs(1, branch="uncond"), 1, branch="uncond")
    # going on: the votes of one branch alone could drop tiles that the other needs
    tensors = branch_inputs(2)
    want = shared_step(by, tensors)
    for name, x in tensors.items():
        assert torch.equal(call(lite, x, 2, branch=name), want[name])


def test_shared_branches_new_generation_and_shape_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lite = make(SHARED)
    for _ in range(2):
        by = By()
        for step in range(3):
            tensors = branch_inputs(step)
            want = shared_step(by, tensors)
            for name, x in tensors.items():
                assert torch.equal(call(lite, x, step, branch=name), want[name])
    assert not caplog.records
    call(lite, inputs(3), 3, branch="cond")
    call(lite, inputs(3, length=52), 3, branch="uncond")
    assert "came with different shapes in step 3" in caplog.text


# --- generations and objects -----------------------------------------------------------------


def test_generations_interleaved() -> None:
    lite = make()
    clips = {("request", n): By() for n in range(3)}
    for step in range(STEPS):
        for n, (generation, by) in enumerate(clips.items()):
            if step >= n:  # they start one after the other
                expect(lite, by, step - n, inputs(step - n, clip=n), generation=generation)


def test_least_recently_used_generation_is_evicted(caplog: pytest.LogCaptureFixture) -> None:
    lite = make(max_generations=2)
    one, two, three = By(), By(), By()
    for step in range(2):
        expect(lite, one, step, inputs(step, clip=1), generation=1)
        expect(lite, two, step, inputs(step, clip=2), generation=2)
    expect(lite, one, 2, inputs(2, clip=1), generation=1)
    assert not caplog.records
    expect(lite, three, 0, inputs(0, clip=3), generation=3)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "2 generations at most: dropped those of 2" in caplog.text
    expect(lite, one, 3, inputs(3, clip=1), generation=1)
    expect(lite, By(), 2, inputs(2, clip=2), generation=2)  # back, from the full list


def test_two_objects_do_not_share() -> None:
    first, second, by_first, by_second = make(), make(), By(), By()
    for step in range(3):
        expect(first, by_first, step, inputs(step))
        if step:
            expect(second, by_second, step, inputs(step, clip=1))
    second.reset()
    expect(first, by_first, 3, inputs(3))


def test_reset_forgets_and_end_frees() -> None:
    lite = make()
    for generation in ("a", "b", "c"):
        for step in range(2):
            call(lite, inputs(step), step, generation=generation)
    lite.reset("a")
    lite.end("b")
    lite.end("never seen")
    assert {r["generation"] for r in lite.statistics.by_generation()} == {"b", "c"}
    for generation in ("a", "b"):
        with pytest.raises(KeyError, match=f"no lists of generation '{generation}': there are"):
            lite.lists("blocks.0", generation=generation)
        expect(lite, By(), 2, inputs(2), generation=generation)
    lite.reset()
    assert len(lite.statistics) == 0
    with pytest.raises(KeyError, match="there are none"):
        lite.lists("blocks.0", generation="c")


def test_end_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = make()
    seen: list[weakref.ref[torch.Tensor]] = []
    real = dense.lite_attention

    def spy(q: Any, k: Any, v: Any, read: Any, write: Any, **options: Any) -> Any:
        seen.extend((weakref.ref(read), weakref.ref(write)))
        return real(q, k, v, read, write, **options)

    monkeypatch.setattr(dense, "lite_attention", spy)
    for step in range(3):
        call(lite, inputs(step), step)
    del spy
    lite.end()
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_lists_names_what_there_is() -> None:
    lite = make()
    call(lite, inputs(0), 0, branch="cond")
    with pytest.raises(KeyError, match=r"no list of layer 'x', branch '' .*\('blocks.0', 'cond'\)"):
        lite.lists("x")
    copied = lite.lists("blocks.0", "cond")
    copied.zero_()
    assert bool(lite.lists("blocks.0", "cond").any())


def test_buffers_swap_and_nothing_else_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = make(SHARED)
    pointers: list[tuple[int, int]] = []
    made: list[Any] = []
    real = dense.lite_attention

    def spy(q: Any, k: Any, v: Any, read: Any, write: Any, **options: Any) -> Any:
        pointers.append((read.data_ptr(), write.data_ptr()))
        return real(q, k, v, read, write, **options)

    monkeypatch.setattr(dense, "lite_attention", spy)
    for step in range(STEPS):
        for name in ("cond", "uncond"):
            call(lite, inputs(step, branch=name), step, branch=name)
        if step == 0:
            for name in ("full", "empty_like", "empty", "zeros"):
                function = getattr(torch, name)

                def watched(*args: Any, _real: Any = function, **options: Any) -> Any:
                    made.append(args)
                    return _real(*args, **options)

                monkeypatch.setattr(skiplist.torch, name, watched)
            monkeypatch.setattr(dense, "lite_attention", quiet_spy(spy, monkeypatch, made))
    assert not made
    lists = {p for pair in pointers for p in pair} - {pointers[0][0]}
    assert len(lists) == 3  # one to read, one for each branch to write
    assert all(read != write for read, write in pointers)


def quiet_spy(spy: Any, monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> Any:
    """What the engine itself makes (the output and, here, float64 copies) is not counted."""

    def run(*args: Any, **options: Any) -> Any:
        before = len(made)
        result = spy(*args, **options)
        del made[before:]
        return result

    return run


def test_switched_off_is_dense_and_keeps_nothing() -> None:
    lite = make(SkipPolicy(enabled=False))
    for step in range(2):
        want = attention(*inputs(step), engine="reference")
        assert torch.equal(call(lite, inputs(step), step), want)
    assert len(lite.statistics) == 0
    with pytest.raises(KeyError):
        lite.lists("blocks.0")


def test_statistics_count_the_lists() -> None:
    lite = make()
    kept = []
    for step in range(4):
        call(lite, inputs(step), step)
        kept.append(int(skiplist.unpack(lite.lists("blocks.0"), 10).sum()))
    records = lite.statistics.to_records()
    assert [r["tiles_kept"] for r in records] == kept
    assert [r["tiles_computed"] for r in records] == [100, *kept[:-1]]
    assert [r["descending"] for r in records] == [False, True, False, True]
    shared = make(SHARED)
    for step in range(3):
        for name, x in branch_inputs(step).items():
            before = None if step == 0 and name == "cond" else shared.lists("blocks.0")
            call(shared, x, step, branch=name)
            if name == "cond" and before is not None:
                merged = int(skiplist.unpack(before, 10).sum())
                assert shared.statistics.to_records()[-1]["tiles_computed"] == merged


def test_arguments_reach_the_engine() -> None:
    lite, by = make(), By()
    q, k, v = (x.transpose(1, 2) for x in inputs(0))
    out = torch.empty(inputs(0)[0].shape, dtype=torch.bfloat16).transpose(1, 2)
    result = lite(
        q,
        k,
        v,
        step=0,
        layer="blocks.0",
        layout="bhsd",
        scale=0.2,
        rounding="rtz",
        return_lse=True,
        out=out,
    )
    want = attention(
        q,
        k,
        v,
        layout="bhsd",
        scale=0.2,
        rounding="rtz",
        return_lse=True,
        engine="reference",
    )
    assert result[0] is out and torch.equal(result[0], want[0]) and torch.equal(result[1], want[1])
    expect(lite, by, 0, inputs(0))  # the other layout is the same attention: no new state
    expect(lite, by, 1, inputs(1))


def test_lists_outlive_inference_mode() -> None:
    lite, by = make(), By()
    for step in range(4):
        with torch.inference_mode(step % 2 == 0):
            expect(lite, by, step, inputs(step))
    assert lite.statistics.sparsity > 0


def test_threads_with_generations_of_their_own() -> None:
    lite = make(max_generations=8)
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            by = By()
            for step in range(12):
                expect(lite, by, step, inputs(step, clip=n), generation=n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(lite.statistics) == 48


def test_under_torch_compile_the_state_sees_runs_not_traces() -> None:
    lite, by = make(), By()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: int) -> torch.Tensor:
        return call(lite, (q * 1, k, v), step) + 0

    compiled = torch.compile(block, backend="eager")
    for step in range(4):
        want, want_list = by.step(inputs(step))
        assert torch.equal(compiled(*inputs(step), step), want)
        assert torch.equal(lite.lists("blocks.0"), want_list)
    assert len(lite.statistics) == 4
    # not traced into: validation, which a traced call leaves to the operators, still runs
    q, k, v = inputs(4)
    with pytest.raises(ValueError, match="invalid attention call: k and v must have one shape"):
        compiled(q, k, v[:, :3], 4)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"step": -1}, ValueError, "step must be >= 0, got -1"),
        ({"step": 1.0}, TypeError, r"step must be an integer, got float: use int\(step\)"),
        ({"step": True}, TypeError, "step must be an integer, got bool"),
        ({"layer": ""}, ValueError, "layer must not be empty"),
        ({"layer": 3}, TypeError, "layer must be a string, got int"),
        ({"branch": 0}, TypeError, "branch must be a string, got int"),
        ({"generation": []}, TypeError, r"generation must be hashable, got \[\]"),
        ({"generation": (1, [2])}, TypeError, r"generation must be hashable, got \(1, \[2\]\)"),
        ({"generation": float("nan")}, ValueError, "generation nan does not equal itself"),
        ({"generation": ("a", (float("nan"),))}, ValueError, "does not equal itself"),
        ({"step": np.bool_(True)}, TypeError, "step must be an integer, got bool"),
        ({"num_steps": True}, TypeError, "num_steps must be an integer or None, got bool"),
        ({"generation": None}, ValueError, "generation must not be None"),
        ({"num_steps": 0}, ValueError, "num_steps must be >= 1, got 0"),
        ({"num_steps": 2.0}, TypeError, "num_steps must be an integer or None, got float"),
        ({"step": 5, "num_steps": 5}, ValueError, "step 5 is not one of num_steps 5"),
    ],
)
def test_refused_names(where: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(*inputs(0), **{"step": 0, "layer": "a", **where})


def test_integers_of_every_kind_are_taken() -> None:
    lite, by = (
        make(SkipPolicy(threshold=THRESHOLD, last_step=-1), max_generations=np.int64(2)),
        By(),
    )
    for step in (np.int64(0), np.uint8(1), 2):
        expect(lite, by, step, inputs(int(step)), num_steps=np.int32(3))
    assert json.dumps(lite.statistics.to_records()) and lite.max_generations == 2
    with pytest.raises(ValueError, match=r"step 1000+ is not one of num_steps 3"):
        call(lite, inputs(0), 10**400, num_steps=3)


def test_refused_names_are_listed_together() -> None:
    with pytest.raises(TypeError) as caught:
        make()(*inputs(0), step=-1, layer=3, branch=4)  # type: ignore[arg-type]
    for part in ("layer must be a string", "branch must be", "step must be >= 0"):
        assert part in str(caught.value)


def test_refused_construction() -> None:
    with pytest.raises(TypeError) as caught:
        LiteAttention({"threshold": -3}, geometry=(1, 2), engine=3, max_generations="4")  # type: ignore[arg-type]
    for part in (
        "policy must be a SkipPolicy, got dict",
        "geometry must be a TileGeometry, got tuple",
        "engine must be the name of an engine, got int",
        "max_generations must be an integer, got '4'",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="max_generations must be >= 1, got 0"):
        LiteAttention(max_generations=0)


def test_negative_last_step_needs_num_steps() -> None:
    with pytest.raises(ValueError, match="last_step -1 counts from the end: give num_steps"):
        call(make(SkipPolicy(last_step=-1)), inputs(0), 0)
