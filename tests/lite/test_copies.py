"""Copies and pickles of LiteAttention, its statistics and SeqParallel."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liteattention_rocm import LiteAttention, SeqParallel, SkipPolicy

from .simulation import (
    POLICY,
    THRESHOLD,
    TILE,
    By,
    call,
    expect,
    inputs,
    judged,
    make,
    watch_engine,
)

pytestmark = pytest.mark.usefixtures("limit")


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_a_copy_goes_on_where_the_original_was_and_on_its_own(way: Callable[[Any], Any]) -> None:
    lite, by = make(), By()
    for step in range(3):
        expect(lite, by, step, inputs(step))
    twin, twin_by = way(lite), By(by.read, by.ordinal)
    assert twin is not lite and twin.policy == lite.policy and twin.geometry == lite.geometry
    assert twin.statistics.to_records() == lite.statistics.to_records()
    for step in range(3, 6):  # other tensors for the twin: what one learns the other must not see
        expect(lite, by, step, inputs(step))
        expect(twin, twin_by, step, inputs(step, clip=7))
    assert len(lite.statistics) == len(twin.statistics) == 6
    assert lite.statistics.to_records()[-1] != twin.statistics.to_records()[-1]
    twin.reset()
    expect(lite, by, 6, inputs(6))


@every_way
def test_a_copy_between_branches_of_a_step_keeps_the_votes_so_far(way: Callable[..., Any]) -> None:
    policy = SkipPolicy(threshold=THRESHOLD, branches="shared", warmup_steps=0)
    lite = make(policy)
    for step in range(2):
        for branch in ("cond", "uncond"):
            call(lite, inputs(step, branch=branch), step, branch=branch)
    call(lite, inputs(2, branch="cond"), 2, branch="cond")
    twin = way(lite)
    for one in (lite, twin):
        call(one, inputs(2, branch="uncond"), 2, branch="uncond")
    assert torch.equal(lite.lists("blocks.0"), twin.lists("blocks.0"))
    assert lite.statistics.to_records() == twin.statistics.to_records()


def test_a_copy_drops_the_votes_of_a_call_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lite, by = make(), By()
    for step in range(2):
        expect(lite, by, step, inputs(step))
    twins: list[LiteAttention] = []
    with monkeypatch.context() as patched:
        watch_engine(patched, lambda _: twins.append(copy.deepcopy(lite)))
        call(lite, inputs(2), 2)
    expect(twins[0], by, 2, inputs(2))


@every_way
def test_a_copy_made_in_inference_mode_works_outside(way: Callable[[Any], Any]) -> None:
    with torch.inference_mode():
        lite, by = make(), By()
        for step in range(2):
            expect(lite, by, step, inputs(step))
        twin = way(lite)
    for step in range(2, 5):
        expect(twin, by, step, inputs(step))


def test_copies_share_one_full_list_per_shape() -> None:
    lite = make()
    for layer in ("a", "b"):
        call(lite, inputs(0), 0, layer=layer)
    twin = copy.deepcopy(lite)
    tiles = {id(s.tiles) for states in twin._generations.values() for s in states.values()}
    assert len(tiles) == 1 and len(twin._tiles) == 1
    call(twin, inputs(0), 0, layer="c")
    assert len(twin._tiles) == 1


@every_way
def test_copies_of_statistics(way: Callable[[Any], Any]) -> None:
    lite = make()
    for step in range(3):
        call(lite, inputs(step), step, generation=("clip", 1))
    statistics = lite.statistics
    twin = way(statistics)
    assert twin.to_records() == statistics.to_records() and twin.sparsity == statistics.sparsity
    twin.discard(("clip", 1), "blocks.0", "")
    assert len(twin) == 0 and len(statistics) == 3
    call(lite, inputs(3), 3, generation=("clip", 1))
    assert len(twin) == 0 and len(statistics) == 4


def test_a_model_that_holds_one_is_copied_and_saved() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.attend = make(POLICY)

        def forward(self, step: int) -> torch.Tensor:
            q, k, v = inputs(step)
            result = self.attend(self.to_q(q), k, v, step=step, layer="a")
            assert isinstance(result, torch.Tensor)
            return result

    with torch.no_grad():
        model = Model()
        model(0)
        average = copy.deepcopy(model)
        assert torch.equal(average(1), model(1))
    assert average.attend is not model.attend


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [False, True], ids=["default group", "group of its own"])
@pytest.mark.parametrize("mode", ["ulysses", "peers", "ring"])
@pytest.mark.usefixtures("alone")
def test_copies_of_a_parallel_object_stay_in_the_group(mode: str, group: bool) -> None:
    own = dist.new_group([0]) if group else None
    parallel = SeqParallel(
        judged(POLICY), group=own, mode="ring" if mode == "ring" else "ulysses",
        peer_memory=mode == "peers", geometry=TILE, engine="reference",
    )  # fmt: skip
    by = By()
    split = 0 if mode == "ring" else None

    def go(one: SeqParallel, want: By, step: int, clip: int = 0) -> None:
        tensors = inputs(step, clip=clip)
        out, written = want.step(tensors)
        assert torch.equal(one(*tensors, step=step, layer="a"), out)
        assert torch.equal(one.lists("a", split=split), written)

    go(parallel, by, 0)
    for way in (copy.copy, copy.deepcopy):
        twin = way(parallel)
        assert twin.group is parallel.group
        go(twin, By(by.read, by.ordinal), 1, clip=3)
    go(parallel, by, 1)
    with pytest.raises(TypeError, match="cannot be pickled: it belongs to a group of running"):
        pickle.dumps(parallel)
