"""Guidance branches that share one list."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention

from .simulation import (
    SHARED,
    STEPS,
    Broken,
    By,
    branch_inputs,
    break_engine,
    call,
    expect_shared,
    inputs,
    judged,
    make,
    shared_step,
)

pytestmark = pytest.mark.usefixtures("limit")


def test_shared_branches_read_one_list_and_join_what_they_write() -> None:
    lite, by = make(SHARED), By()
    for step in range(STEPS):
        expect_shared(lite, by, step, branch_inputs(step))
        assert by.read is not None and torch.equal(lite.lists("blocks.0", "any"), by.read)
    computed = [row["tiles_computed"] for row in lite.statistics.to_records()]
    assert computed[0::2] == computed[1::2]  # both walked the same tiles


def test_shared_branches_called_again_in_any_order() -> None:
    lite, by = make(SHARED), By()
    orders = ("cond cond uncond", "cond uncond cond", "uncond cond uncond uncond")
    for step in range(STEPS):
        tensors = branch_inputs(step)
        want = shared_step(by, tensors)
        order = orders[step % 3].split()
        last = {name: at for at, name in enumerate(order)}
        for at, name in enumerate(order):
            if at == last[name]:
                assert torch.equal(call(lite, tensors[name], step, branch=name), want[name])
            else:  # votes of a call that is repeated with other tensors must vanish
                call(lite, inputs(step, clip=9), step, branch=name)
    assert by.read is not None and torch.equal(lite.lists("blocks.0"), by.read)


def test_shared_branches_with_three_and_with_one_that_rests() -> None:
    lite, by = make(SHARED), By()
    for step in range(STEPS):
        names = ("a", "b", "c") if step % 2 else ("b",)
        expect_shared(lite, by, step, branch_inputs(step, names))


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
    expect_shared(lite, by, 2, branch_inputs(2))


@pytest.mark.parametrize("steps", [0, 2], ids=["the first step", "other ranges"])
def test_shared_branches_in_threads_that_begin_together(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find that masks are to be made; the second one must not begin the step anew."""
    late, by_turns = make(SHARED), make(SHARED)
    for step in range(steps):
        for name, x in branch_inputs(step).items():
            assert torch.equal(*(call(one, x, step, branch=name) for one in (late, by_turns)))
    late.policy = by_turns.policy = judged(SHARED.model_copy(update={"must_do": ((0, 8),)}))
    tensors = branch_inputs(steps)
    new_tiles, first = LiteAttention._new_tiles, []
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as other:

        def wait(*given: Any) -> Any:
            patched.undo()
            first.append(other.submit(call, late, tensors["cond"], steps, branch="cond").result())
            return new_tiles(*given)

        patched.setattr(LiteAttention, "_new_tiles", wait)
        second = call(late, tensors["uncond"], steps, branch="uncond")
    for out, (name, x) in zip((*first, second), tensors.items(), strict=True):
        assert torch.equal(out, call(by_turns, x, steps, branch=name))
    assert torch.equal(late.lists("blocks.0"), by_turns.lists("blocks.0"))
    for name, x in branch_inputs(steps + 1).items():
        assert torch.equal(*(call(one, x, steps + 1, branch=name) for one in (late, by_turns)))


def test_shared_branches_new_generation_and_shape_warning(caplog: pytest.LogCaptureFixture) -> None:
    lite = make(SHARED)
    for _ in range(2):
        by = By()
        for step in range(3):
            expect_shared(lite, by, step, branch_inputs(step))
    assert not caplog.records
    call(lite, inputs(3), 3, branch="cond")
    call(lite, inputs(3, length=52), 3, branch="uncond")
    assert "came with different shapes in step 3" in caplog.text
