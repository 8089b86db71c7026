"""Calls that fail or are refused: they leave no votes behind, and say everything wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, attention

from .simulation import (
    STEPS,
    THRESHOLD,
    TILE,
    Broken,
    By,
    Tensors,
    break_engine,
    call,
    expect,
    inputs,
    judged,
    make,
)

pytestmark = pytest.mark.usefixtures("limit")


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


def test_ranges_that_do_not_fit_cost_nobody_lists_or_statistics() -> None:
    q, k, v = inputs(0)
    lite = make(
        SkipPolicy(threshold=THRESHOLD, must_do=[(0, k.shape[1])], warmup_steps=0),
        max_generations=1,
    )
    for step in range(2):
        call(lite, (q, k, v), step)
    held, records = lite.lists("blocks.0"), lite.statistics.to_records()
    shorter = [x[:, : k.shape[1] // 2] for x in (q, k, v)]
    for generation in (0, 1):
        with pytest.raises(ValueError, match=r"must_do: .* ends past the"):
            call(lite, shorter, 0, generation=generation)
    assert torch.equal(lite.lists("blocks.0"), held)
    assert lite.statistics.to_records() == records


def refused_by_the_engine(lite: LiteAttention, tensors: Tensors, step: int, match: str) -> None:
    """In the place of the generation that there is, and in that of another one."""
    held, records = lite.lists("blocks.0"), lite.statistics.to_records()
    for generation in (0, 1):
        with pytest.raises(ValueError, match=match):
            call(lite, tensors, step, generation=generation)
    assert torch.equal(lite.lists("blocks.0"), held)
    assert lite.statistics.to_records() == records


def test_a_call_that_the_engine_refuses_costs_nobody_lists_or_statistics() -> None:
    """Nor does it when the tile is what is refused, which dense steps do not have."""
    policy = judged(SkipPolicy(threshold=THRESHOLD, warmup_steps=1))
    lite = LiteAttention(policy, engine="cpu", max_generations=1)
    tensors = q, k, v = inputs(0, length=300)
    for step in range(3):
        call(lite, tensors, step)
    assert lite.lists("blocks.0").any()
    for step in (0, 1, 3):
        narrow = (q[..., :4], k[..., :4], v[..., :4])
        refused_by_the_engine(lite, narrow, step, "head dim must be a multiple of 8")
    lite.geometry = TILE
    for step in (1, 2, 3):
        refused_by_the_engine(lite, tensors, step, "k_block must be 64, got 4")
    assert torch.equal(call(lite, tensors, 0, generation=1), attention(*tensors))


def test_a_replay_past_the_end_costs_nobody_lists_or_statistics() -> None:
    lite, by = make(max_generations=1), By()
    with lite.noting() as noting:
        call(lite, inputs(0), 0, layer="any length", generation="noted")
        call(lite, inputs(0), 0, num_steps=2, layer="two steps", generation="noted")
    for step in range(2):
        expect(lite, by, step, inputs(step))
    records = lite.statistics.to_records()
    for generation in (0, 1):
        assert lite.begin_again(noting.calls, generation, 2) is None
    assert lite.statistics.to_records() == records
    expect(lite, by, 2, inputs(2))


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
        ({"generation": torch.zeros(2)}, TypeError, r"generation must be comparable, got tensor"),
        ({"generation": (1, torch.zeros(2))}, TypeError, "generation must be comparable"),
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
        make(
            SkipPolicy(threshold=THRESHOLD, last_step=-1, warmup_steps=0),
            max_generations=np.int64(2),
        ),
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


def test_refused_names_and_tensors_are_listed_together() -> None:
    q, k, v = inputs(0)
    with pytest.raises(TypeError) as caught:
        make()(q, k[0], v, step=-1, layer=3, rounding="up", heads=(0, 0, 1))  # type: ignore[arg-type]
    for part in (
        "layer must be a string",
        "step must be >= 0",
        "k must have 4 dimensions",
        "rounding must be one of",
        "heads must be different heads",
        "heads must name the 2 query heads that q has, got 3",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "policy",
    [
        SkipPolicy(budget=0.1, layer_budgets={"*": (0.0, 0.9)}, warmup_steps=0),
        SkipPolicy(threshold=-6.0, warmup_steps=0),
        SkipPolicy(enabled=False),
    ],
    ids=["by head", "alike", "off"],
)
@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        (3, TypeError, "heads must be a tuple of integers or None, got 3"),
        ([1, 0], TypeError, "heads must be a tuple of integers"),
        ((1.0, 0), TypeError, "heads must be a tuple of integers"),
        ((True, False), TypeError, "heads must be a tuple of integers"),
        ((1, 1), ValueError, r"heads must be different heads of the model, from 0, got \(1, 1\)"),
        ((0, -1), ValueError, r"heads must be different heads of the model, from 0, got \(0, -1\)"),
        ((0,), ValueError, "heads must name the 2 query heads that q has, got 1"),
    ],
)
def test_refused_heads(heads: Any, error: type[Exception], message: str, policy: Any) -> None:
    lite = LiteAttention(policy, geometry=TILE, engine="reference")
    with pytest.raises(error, match=message):
        call(lite, inputs(0), 0, heads=heads)
    assert len(lite.statistics) == 0
    call(lite, inputs(0), 0, heads=(np.int64(1), 0))


def test_refused_construction() -> None:
    with pytest.raises(TypeError) as caught:
        LiteAttention({"threshold": -3}, geometry=(1, 2), engine=3, max_generations="4")  # type: ignore[arg-type]
    for part in (
        "policy must be a SkipPolicy, got dict",
        "geometry must be a TileGeometry, got tuple",
        "engine must be a string or None, got int",
        "max_generations must be an integer, got '4'",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="max_generations must be >= 1, got 0"):
        LiteAttention(max_generations=0)


def test_negative_last_step_needs_num_steps() -> None:
    with pytest.raises(ValueError, match="last_step -1 counts from the end: give num_steps"):
        call(make(SkipPolicy(last_step=-1, threshold=-6.0, warmup_steps=0)), inputs(0), 0)
