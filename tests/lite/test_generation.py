"""The state of a request in SGLang's video plugin, without SGLang."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liteattention_rocm import LiteAttention, SkipPolicy, attention
from liteattention_sglang.generation import MOST_PASSES, Generation

pytestmark = pytest.mark.usefixtures("limit")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_layers_in_a_ring_and_layers_by_themselves_are_both_reported(group: Any) -> None:
    request = Generation(SkipPolicy(threshold=-1.0, warmup_steps=0), 3)
    q, k, v = torch.randn(3, 1, 300, 2, 32, generator=torch.Generator().manual_seed(0)).abs()
    k[:, 64:] *= -1  # all keys but the first block's are negligible
    for step in range(3):
        position: dict[str, Any] = {"step": step, "negative": False, "scale": None}
        request.attend(q, k, v, layer="alone", out=torch.empty_like(q), **position)
        request.attend_ring(q, k, v, layer="ring", group=group, **position)
    assert list(request.lists()) == ["alone/cond", "ring/cond/0"]
    layers = request.report(["r"])["records"]
    assert {record["layer"] for record in layers} == {"alone", "ring"}
    # One rank's ring is the whole, so both made the same lists.
    lists = request.lists()
    assert torch.equal(lists["alone/cond"], lists["ring/cond/0"])
    alone, ring = (
        [r["tiles_computed"] for r in layers if r["layer"] == name] for name in ("alone", "ring")
    )
    assert alone == ring and alone[-1] < alone[0]


# --- whose list a call reads, where the runtime says no branch ------------------------------


class Pass:
    """Stands for a forward pass; a new object lies where the last one lay, more often than not."""


def tensors(branch: str) -> list[torch.Tensor]:
    """Queries, keys and values of a branch: each attends to a part of the keys of its own."""
    draw = torch.Generator().manual_seed(ord(branch))
    which = ord(branch) % 5
    q = torch.randn(1, 320, 2, 32, generator=draw).abs()
    k, v = torch.randn(2, 1, 320, 2, 32, generator=draw)
    k = -k.abs()
    k[:, 64 * which : 64 * (which + 1)] *= -1
    return [q, k, v]


VOTES = SkipPolicy(threshold=-1.0, warmup_steps=0)


def attended(state: Generation, branch: str, **call: Any) -> torch.Tensor:
    q, k, v = tensors(branch)
    out = torch.full_like(q, float("nan"))
    state.attend(q, k, v, out=out, **{"layer": "a", "negative": False, "scale": None, **call})
    return out


@pytest.mark.parametrize(
    ("steps", "afresh"),
    [
        (["A", "A", "A", "A"], []),
        # MOVA: the second step cannot know yet that there are two in every step
        (["AB", "AB", "AB", "AB"], [1]),
        # Wan-Animate: a pass over a reference comes before the first step
        (["RAB", "AB", "AB", "AB", "AB"], [1, 2]),
        (["RA", "A", "A", "A"], [1, 2]),
        # guidance in some of the steps, as MOSS-Image's
        (["A", "A", "AB", "AB", "AB", "A", "A", "A"], [3, 6]),
        (["AB", "AB", "AB", "A", "A", "AB", "AB", "AB"], [1, 4, 6]),
        (["ABC", "ABC", "ABC", "ABC"], [1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_branches_that_the_runtime_does_not_name_have_lists_of_their_own(
    steps: list[str], afresh: list[int], warmup_steps: int
) -> None:
    """Against a LiteAttention for each branch, which starts over in the steps ``afresh``."""
    policy = SkipPolicy(threshold=-1.0, warmup_steps=warmup_steps)
    state = Generation(policy, len(steps))
    own: dict[str, LiteAttention] = {}
    for step, branches in enumerate(steps):
        if step in afresh:
            own.clear()
        for branch in branches:
            own.setdefault(branch, LiteAttention(policy))
            found = attended(state, branch, step=step, forward=Pass())
            wanted = own[branch](*tensors(branch), step=step, layer="x", num_steps=len(steps))
            assert torch.equal(found, wanted), (step, branch)
            exact = attention(*tensors(branch))
            assert float((found - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert state.statistics.by_step()[-1]["sparsity"] > 0.5, "nothing is skipped: no test of lists"
    assert state.dense == []
    lists = state.lists()
    for branch in set("".join(steps)):
        number = max(names.find(branch) + 1 for names in steps[max(afresh, default=0) :])
        name = f"a/cond#{number}" if number > 1 else "a/cond"
        if number:
            assert torch.equal(lists.pop(name), own[branch].lists("x")), branch
    assert lists == {}


def test_a_branch_that_the_runtime_names_is_not_counted() -> None:
    state = Generation(VOTES, 3)
    own = {"A": LiteAttention(VOTES), "B": LiteAttention(VOTES)}
    for step in range(3):
        for branch, negative in (("A", False), ("B", True)):
            found = attended(state, branch, step=step, negative=negative, forward=Pass())
            assert torch.equal(found, own[branch](*tensors(branch), step=step, layer="x"))
    assert list(state.lists()) == ["a/cond", "a/uncond"]


def test_branches_that_share_lists_need_no_order() -> None:
    policy = VOTES.model_copy(update={"branches": "shared"})
    state, own = Generation(policy, 4), LiteAttention(policy)
    for step, branches in enumerate(["RAB", "AB", "BA", "B"]):
        for branch in branches:
            found = attended(state, branch, step=step, forward=Pass())
            wanted = own(*tensors(branch), step=step, layer="x", branch=branch)
            assert torch.equal(found, wanted), (step, branch)
    assert state.statistics.by_step()[-1]["sparsity"] > 0


def test_a_schedule_that_starts_again_finds_no_list_of_the_round_before() -> None:
    """Tiles of an upscaled video, chunks of a streamed one: each has all steps for itself."""
    state = Generation(VOTES, 4)
    rounds = [(["AC", "AC", "AC"], 1), (["B", "B", "BD", "BD"], 3)]
    for branches, afresh in rounds:
        own: dict[str, LiteAttention] = {}
        for step, names in enumerate(branches):
            if step == afresh:
                own.clear()
            for name in names:
                own.setdefault(name, LiteAttention(VOTES))
                found = attended(state, name, step=step, forward=Pass())
                assert torch.equal(found, own[name](*tensors(name), step=step, layer="x"))


def test_a_call_that_failed_and_comes_again_is_no_further_branch() -> None:
    state, own = Generation(VOTES, 4), LiteAttention(VOTES)
    for step in range(4):
        if step == 2:
            q, k, v = tensors("A")
            with pytest.raises(ValueError, match="v"):
                state.attend(
                    q, k, v[:, 1:], layer="a", step=2, negative=False, scale=None,
                    out=torch.empty_like(q), forward=Pass(),
                )  # fmt: skip
        found = attended(state, "A", step=step, forward=Pass())
        assert torch.equal(found, own(*tensors("A"), step=step, layer="x"))
    assert list(state.lists()) == ["a/cond"]


def test_without_a_pass_the_same_step_again_is_a_repetition() -> None:
    state, own = Generation(VOTES, 3), LiteAttention(VOTES)
    for step in (0, 0, 1, 1, 2):
        found = attended(state, "A", step=step)
        assert torch.equal(found, own(*tensors("A"), step=step, layer="x"))
    assert list(state.lists()) == ["a/cond"]


def test_a_pass_is_known_by_itself_and_not_held() -> None:
    state, one = Generation(VOTES, 3), Pass()
    attended(state, "A", step=0, forward=one)
    gone = weakref.ref(one)
    del one
    assert gone() is None
    other = Pass()  # mostly at the same address
    attended(state, "B", step=0, forward=other)
    assert list(state.lists()) == ["a/cond", "a/cond#2"] and state.dense == []


@pytest.mark.parametrize("passes", [[1, 1, 1], [2, 2, 2], [1, 2, 1]], ids=str)
def test_a_layer_that_one_pass_calls_twice_is_dense_from_then_on(passes: list[int]) -> None:
    """Which of the calls is which branch, or which part of a video, nobody says."""
    state, own = Generation(VOTES, len(passes)), LiteAttention(VOTES)
    told = True
    for step, calls in enumerate(passes):
        now = Pass()
        for branch in "AB"[:calls]:
            told = told and branch == "A"
            found = attended(state, branch, step=step, forward=now)
            if told:
                wanted = own(*tensors(branch), step=step, layer="x")
            else:
                wanted = attention(*tensors(branch))
            assert torch.equal(found, wanted), (step, branch)
            # another layer goes on
            attended(state, branch, step=step, layer=f"b{branch}", forward=now)
    dense = state.report(["r"])["dense"]
    assert [item["layers"] for item in dense] == ([] if told else [["a"]])
    assert told or "does not say which call" in dense[0]["reason"]
    assert state.statistics.by_step()[-1]["sparsity"] > 0


def test_lists_of_a_step_have_an_end() -> None:
    state = Generation(VOTES, 2)
    for _ in range(MOST_PASSES + 3):
        attended(state, "A", step=0, forward=Pass())
    assert len(state.lists()) == MOST_PASSES
    assert [list(item.layers) for item in state.dense] == [["a"]]


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_warm_up_may_be_too_short_to_skip(
    warm_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = Generation(SkipPolicy(threshold=-1.0, warmup_steps=4), 1, warm_up=warm_up)
    attended(state, "A", step=0, forward=Pass())
    assert ("skips nothing" in caplog.text) != warm_up


# --- steps that are none --------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "given", [999, 50, torch.tensor(999.0), torch.tensor(3), 3.0, True, None, "3"], ids=repr
)
def test_what_is_no_index_of_a_step_makes_the_request_dense(given: object, enabled: bool) -> None:
    state = Generation(SkipPolicy(threshold=-1.0, enabled=enabled, warmup_steps=0), 50)
    # A scheduler's timesteps end at 0: the last of them must not be taken for steps.
    for step in (given, 3, 2, 1, 0, 1):
        found = attended(state, "A", step=step, forward=Pass())
        assert torch.equal(found, attention(*tensors("A")))
    report = state.report(["r"])
    assert report["records"] == [] and state.lists() == {}
    (dense,) = report["dense"]
    assert dense["layers"] == ["a"]
    said = "999" if given == 999 and type(given) is int else type(given).__name__
    assert "schedule of 50" in dense["reason"] and (said in dense["reason"] or given == 50)
    assert state.layers == ["a"]


def test_a_pass_between_steps_is_dense_alone() -> None:
    """LingBot-World says -1 while it fills its cache."""
    state, own = Generation(VOTES, 4), LiteAttention(VOTES)
    for step in range(4):
        assert torch.equal(attended(state, "B", step=-1, forward=Pass()), attention(*tensors("B")))
        found = attended(state, "A", step=step, forward=Pass())
        assert torch.equal(found, own(*tensors("A"), step=step, layer="x"))
    assert state.statistics.by_step()[-1]["sparsity"] > 0.5
    (dense,) = state.report(["r"])["dense"]
    assert "current_timestep -1" in dense["reason"]


def test_calls_in_a_ring_are_told_apart_in_the_same_way(group: Any) -> None:
    state = Generation(VOTES, 4)
    own: dict[str, LiteAttention] = {}
    for step, branches in enumerate(["RAB", "AB", "AB", "AB"]):
        for branch in branches:
            if branch not in own or step in (1, 2):
                own[branch] = LiteAttention(VOTES)
            found = state.attend_ring(
                *tensors(branch), layer="a", step=step, negative=False, scale=None, group=group,
                forward=Pass(),
            )  # fmt: skip
            wanted = own[branch](*tensors(branch), step=step, layer="x")
            torch.testing.assert_close(found, wanted)
    found = state.attend_ring(
        *tensors("A"), layer="a", step=999, negative=False, scale=None, group=group, forward=Pass()
    )
    torch.testing.assert_close(found, attention(*tensors("A")))
    assert [list(item.layers) for item in state.dense] == [["a"]]


def test_patterns_that_match_no_layer_are_named() -> None:
    policy = SkipPolicy(
        layer_thresholds={"a": -1, "blocks.0.*": -10, "?": -3, "b*": -4},
        threshold=-6.0,
        warmup_steps=0,
    )
    state = Generation(policy, 2)
    attended(state, "A", step=0, forward=Pass())
    assert state.unmatched == ["blocks.0.*", "b*"]
    attended(state, "A", step=0, layer="bee", forward=Pass())
    assert state.unmatched == ["blocks.0.*"] == state.report(["r"])["unmatched_patterns"]
    assert Generation(SkipPolicy(threshold=-6.0, warmup_steps=0), 2).unmatched == []
