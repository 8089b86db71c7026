"""Generations, objects, threads, memory, and what else is not about steps."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, attention
from liteattention_rocm.engines.reference import ReferenceEngine
from liteattention_rocm.lite import bitmap

from .simulation import (
    SHARED,
    STEPS,
    By,
    branch_inputs,
    call,
    expect,
    expect_shared,
    inputs,
    make,
    watch_engine,
)


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


def test_a_forgotten_list_starts_over_and_no_other() -> None:
    lite = make()
    gone, branch, layer = By(), By(), By()
    for step in range(6):
        if step == 3:
            lite.forget("blocks.0")
            lite.forget("never seen")
            lite.forget("blocks.0", "", "never seen")
            gone = By()
        expect(lite, gone, step, inputs(step))
        expect(lite, branch, step, inputs(step, clip=1), branch="uncond")
        expect(lite, layer, step, inputs(step, clip=2), layer="blocks.1")
    assert len(lite.statistics.to_records()) == 6 * 3


def test_all_branches_of_a_forgotten_list_that_they_share_start_over() -> None:
    lite, by = make(SHARED), By()
    for step in range(4):
        if step == 2:
            lite.forget("blocks.0", "uncond")
            by = By()
        expect_shared(lite, by, step, branch_inputs(step))


def test_end_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lite = make()
    seen: list[weakref.ref[torch.Tensor]] = []
    watch_engine(monkeypatch, lambda t: seen.extend((weakref.ref(t.read), weakref.ref(t.write))))
    for step in range(3):
        call(lite, inputs(step), step)
    lite.end()
    gc.collect()
    assert len(seen) == 6 and not [ref for ref in seen if ref() is not None]


def test_an_object_that_nobody_holds_is_gone_with_its_lists() -> None:
    """At once: the collector may take its time, and lists are memory of a GPU."""
    lite = make()
    call(lite, inputs(0), 0)
    gone = weakref.ref(lite)
    gc.disable()
    try:
        del lite
        assert gone() is None
    finally:
        gc.enable()


def test_a_generation_under_an_old_name_has_no_records_of_the_one_before() -> None:
    lite = make()
    for step in range(STEPS):
        call(lite, inputs(step), step)
        call(lite, inputs(step), step, layer="blocks.1")
    lite.end()
    assert len(lite.statistics) == 2 * STEPS  # readable until another begins
    for step in range(2):
        call(lite, inputs(step), step)
    records = lite.statistics.to_records()
    assert [r["step"] for r in records if r["layer"] == "blocks.0"] == [0, 1]
    assert [r["step"] for r in records if r["layer"] == "blocks.1"] == list(range(STEPS))
    call(lite, inputs(0), 0, generation="next")
    lite.end("next")
    lite.hand_on(0, "next")
    assert {r["generation"] for r in lite.statistics.to_records()} == {0}


def test_a_generation_that_was_pushed_out_keeps_its_records() -> None:
    lite = make(max_generations=1)
    for step in range(2):
        call(lite, inputs(step), step)
    call(lite, inputs(0), 0, generation=1)
    call(lite, inputs(2), 2)
    records = [r for r in lite.statistics.to_records() if r["generation"] == 0]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert records[2]["tiles_computed"] == 100


def test_a_step_below_0_is_refused_after_lists_were_handed_on() -> None:
    lite = make()
    for step in range(2):
        call(lite, inputs(step), step)
    lite.hand_on(0, 1)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        call(lite, inputs(0), -1, generation=1)


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
    watch_engine(monkeypatch, lambda t: pointers.append((t.read.data_ptr(), t.write.data_ptr())))
    made: list[torch.Tensor] = []
    for step in range(STEPS):
        for name in ("cond", "uncond"):
            call(lite, inputs(step, branch=name), step, branch=name)
        if step == 0:
            for name in ("full", "empty_like", "empty", "zeros"):
                function = getattr(torch, name)

                def watched(*args: Any, _real: Any = function, **options: Any) -> Any:
                    result = _real(*args, **options)
                    if result.dtype == torch.int32:  # and not the output, or what the engine makes
                        made.append(result)
                    return result

                monkeypatch.setattr(torch, name, watched)
    assert not made
    lists = {p for pair in pointers for p in pair} - {pointers[0][0]}
    assert len(lists) == 3  # one to read, one for each branch to write
    assert all(read != write for read, write in pointers)


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
        kept.append(int(bitmap.unpack(lite.lists("blocks.0"), 10).sum()))
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
                merged = int(bitmap.unpack(before, 10).sum())
                assert shared.statistics.to_records()[-1]["tiles_computed"] == merged


def test_tiles_are_counted_where_a_profiler_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an engine that counts for itself, in calls that are not bound."""

    def counted() -> list[dict[str, Any]]:
        lite = make(SHARED)
        for step in range(3):
            for name, x in branch_inputs(step).items():
                call(lite, x, step, branch=name)
        return lite.statistics.to_records()

    expected = counted()
    assert expected[-1]["tiles_computed"] < 100
    monkeypatch.setattr(ReferenceEngine, "tallies", True)
    with torch.profiler.profile():
        assert counted() == expected


def test_arguments_reach_the_engine() -> None:
    lite, by = make(), By()
    q, k, v = (x.transpose(1, 2) for x in inputs(0))
    out = torch.empty(inputs(0)[0].shape, dtype=torch.bfloat16).transpose(1, 2)
    result = lite(
        q, k, v, step=0, layer="blocks.0", layout="bhsd", scale=0.2, rounding="rtz",
        return_lse=True, out=out,
    )  # fmt: skip
    want = attention(
        q, k, v, layout="bhsd", scale=0.2, rounding="rtz", return_lse=True, engine="reference"
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


UP = {"direction": "ascending"}  # the same bits in every step that skips nothing


@pytest.mark.parametrize(
    ("fields", "num_steps", "fault"),
    [
        ({"warmup_steps": 4}, 4, "with warmup_steps 4, num_steps 4 it has no step"),
        ({"warmup_steps": 3}, 4, "with warmup_steps 3, num_steps 4 it has a single step"),
        ({"warmup_steps": 1, "last_step": -3}, 4, "last_step -3, num_steps 4 it has a single step"),
        ({"last_step": 0}, 4, "with last_step 0 it has a single step"),
        ({"last_step": 0}, None, "raise last_step, set soft_skip=True, or say enabled=False"),
        ({"budget": 0.5, "last_step": 0}, 4, "raise last_step, or say enabled=False"),
        (
            {"retest_every": 1} | UP,
            None,
            "with retest_every 1 it walks the full list in every step",
        ),
        ({"last_step": 0, "soft_skip": True}, 4, ""),
        ({"last_step": 0, "must_skip": [(0, 64)]}, 4, ""),
        ({"warmup_steps": 2}, 4, ""),
        ({"warmup_steps": 2, "last_step": 3}, None, ""),
        ({"retest_every": 2}, None, ""),
    ],
)
def test_a_policy_that_can_skip_nothing_is_reported_once(
    fields: dict[str, Any], num_steps: int | None, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = torch.randn(3, 1, 320, 2, 32, generator=torch.Generator().manual_seed(0)).abs()
    k[:, 128:] *= -1  # keys that are negligible
    dense, skipped = attention(q, k, v), False
    if "budget" not in fields:
        fields = {"threshold": -6.0, **fields}
    for _ in range(2):
        lite = LiteAttention(SkipPolicy(**{"warmup_steps": 0, **fields}))
        for step in range(4):
            for layer in "ab":
                out = lite(q, k, v, step=step, layer=layer, num_steps=num_steps)
                skipped |= not torch.equal(out, dense)
    assert skipped == (not fault)
    assert len(caplog.records) == bool(fault) and fault in caplog.text
