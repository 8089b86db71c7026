"""Repeated calls of LiteAttention: they go straight to the engine, and only if nothing changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, validation
from tests.conftest import forget

from .simulation import POLICY, SHARED, THRESHOLD, By, call, expect, inputs, make

pytestmark = pytest.mark.usefixtures("limit")

PACKAGE = str(Path(liteattention_rocm.__file__).parent)


def entered(run: Callable[[], Any]) -> tuple[int, int]:
    """Functions of the package that are entered, and the files that they are in."""
    found: set[tuple[str, str]] = set()

    def watch(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(found), len({file for file, _ in found})


@pytest.mark.parametrize("given", [False, True], ids=["made", "out"])
@pytest.mark.parametrize("warmup", [0, 99], ids=["lite", "dense"])
def test_a_repeated_call_takes_few_functions(warmup: int, given: bool) -> None:
    lite = LiteAttention(SkipPolicy(threshold=-3.0, warmup_steps=warmup))
    q, k, v = torch.randn(3, 1, 128, 2, 64).bfloat16()
    out = torch.empty_like(q) if given else None
    for step in range(5):
        lite(q, k, v, step=step, layer="a", out=out)
    functions, files = entered(lambda: lite(q, k, v, step=5, layer="a", out=out))
    assert functions <= 9 and files <= 4


def test_layers_of_one_shape_are_checked_by_themselves_and_share_what_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[Any] = []
    bound: list[Any] = []
    dense, bind = validation.dense, liteattention_rocm.engines.reference.ReferenceEngine.bind
    monkeypatch.setattr(validation, "dense", lambda *a, **k: checks.append(a) or dense(*a, **k))
    monkeypatch.setattr(
        liteattention_rocm.engines.reference.ReferenceEngine,
        "bind",
        lambda *a: bound.append(a) or bind(*a),
    )
    forget()
    lite = make()
    for step in range(4):
        for layer in ("a", "b", "c"):
            call(lite, inputs(step), step, layer=layer)
    assert len(checks) == 3 and len(bound) == 2  # upwards and downwards


def test_options_of_every_call_are_looked_at() -> None:
    lite, by = (
        make(SkipPolicy(threshold=-float("inf"), warmup_steps=0)),
        By(threshold=-float("inf")),
    )
    for step in range(2):
        expect(lite, by, step, inputs(step))
    q, k, v = inputs(2)
    options: dict[str, Any]
    for options in (
        {"scale": 0.1}, {"scale": 0}, {"rounding": "rtz"}, {"return_lse": True}, {"scale": None},
    ):  # fmt: skip
        want = attention(q, k, v, engine="reference", **options)
        got = lite(q, k, v, step=2, layer="blocks.0", **options)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
            assert torch.equal(a, b)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    moved = lite(*turned, step=2, layer="blocks.0")
    assert torch.equal(moved, attention(q, k, v, engine="reference"))


def test_another_policy_engine_or_geometry_counts_from_the_next_call() -> None:
    lite, by = make(), By()
    for step in range(2):
        expect(lite, by, step, inputs(step))
    lite.policy = SkipPolicy(threshold=-0.5, warmup_steps=0)
    by.threshold = -0.5
    expect(lite, by, 2, inputs(2))
    lite.engine = "cpu"
    with pytest.raises(ValueError, match="k_block must be 64, got 4"):
        call(lite, inputs(3), 3)
    lite.engine = "reference"
    expect(lite, by, 3, inputs(3))
    lite.geometry = TileGeometry(16, 4, 4)
    assert torch.equal(call(lite, inputs(4), 4), attention(*inputs(4), engine="reference"))


@pytest.mark.parametrize("generation", [0, 1], ids=["the same generation", "another one"])
def test_ranges_of_another_policy_count_from_the_next_call(generation: int) -> None:
    """Lists of other ranges start from the full one; ranges that stay keep what was learnt."""
    ranges = ({"must_skip": [(0, 16)]}, {"must_do": [(0, 8)]}, {})
    lite = make(SkipPolicy(threshold=-1.0, warmup_steps=0))
    for step in range(2):
        call(lite, inputs(step), step)
    for turn, change in enumerate(ranges):
        policy = SkipPolicy(threshold=-1.0, warmup_steps=0, **change)
        fresh = make(policy)
        for step in range(2 * turn + 2, 2 * turn + 4):
            lite.policy = policy.model_copy()
            out = call(lite, inputs(step), step, generation=generation)
            assert torch.equal(out, call(fresh, inputs(step), step))
            row, wanted = (x.statistics.to_records()[-1] for x in (lite, fresh))
            assert row["tiles_computed"] == wanted["tiles_computed"]
            lists = [x.lists("blocks.0", "", n) for x, n in ((lite, generation), (fresh, 0))]
            assert torch.equal(*lists)


def test_bad_calls_after_good_ones_are_refused_and_change_nothing() -> None:
    lite, by = make(POLICY), By()
    for step in range(3):
        expect(lite, by, step, inputs(step), num_steps=9)
    q, k, v = inputs(3)
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"step": True}, TypeError, "step must be an integer, got bool"),
        ({"step": 9}, ValueError, "step 9 is not one of num_steps 9"),
        ({"num_steps": 3.0}, TypeError, "num_steps must be an integer or None"),
        ({"layer": ["a"]}, TypeError, "layer must be a string, got list"),
        ({"generation": {}}, TypeError, "generation must be hashable"),
        ({"layout": "sbhd"}, ValueError, "layout must be one of bshd, bhsd"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"out": q}, ValueError, "out must not overlap q"),
        ({"out": torch.empty(1, 40, 2, 8)}, TypeError, "all tensors must have one dtype"),
    )
    for change, error, message in refused:
        with pytest.raises(error, match=message):
            lite(q, k, v, **{"step": 3, "layer": "blocks.0", "num_steps": 9, **change})
    out = torch.empty(2, *q.shape, dtype=q.dtype)
    lite(q, k, v, step=3, layer="blocks.0", num_steps=9, out=out[0])
    out[1].copy_(q)
    with pytest.raises(ValueError, match="out must not overlap q"):
        lite(out[1], k, v, step=3, layer="blocks.0", num_steps=9, out=out[1])
    with pytest.raises(ValueError, match="requires grad"):
        call(lite, (q.clone().requires_grad_(), k, v), 3, num_steps=9)
    expect(lite, by, 3, (q, k, v), num_steps=9)
    shared = make(SHARED)
    for step in range(2):
        call(shared, inputs(step), step, branch="cond")
    with pytest.raises(TypeError, match="branch must be a string, got int"):
        call(shared, inputs(2), 2, branch=3)


def test_a_profiler_sees_the_operators_of_repeated_calls() -> None:
    policy = SkipPolicy(threshold=THRESHOLD, warmup_steps=2)
    lite, by = make(policy), By()
    for step in range(6):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = call(lite, inputs(step), step)
        if step >= 2:
            assert torch.equal(out, by.step(inputs(step))[0])
        names = {event.key for event in profile.key_averages()}
        assert f"liteattention_rocm::{'attention' if step < 2 else 'lite_attention'}" in names
    expect(lite, by, 6, inputs(6))
