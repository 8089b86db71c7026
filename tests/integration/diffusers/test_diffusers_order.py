"""Guidance branches without names: told apart by the order of calls, while their number stays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from liteattention_diffusers import enable, enabling, graphs
from liteattention_diffusers.clock import Clock
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE
from .graph_stand_in import StandIn

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)
FEW, BOTH = ("cond",), ("uncond", "cond")

Steps = Sequence[tuple[str, ...]]


def texts(seed: int = 0) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(1, 4, 32, generator=noise) for name in ("cond", "uncond", "skip")}


@torch.no_grad()
def denoise(
    model: Any, steps: Steps, *, held: bool = True, named: bool = False, counted: bool = False
) -> list[torch.Tensor]:
    """Run the passes of each step; texts are the same tensors in all of them, or made anew."""
    text, made = texts(), []
    for i, passes in enumerate(steps):
        noise = torch.Generator().manual_seed(i)
        latents = torch.randn(1, 12, 8, 16, 16, generator=noise)
        where = {"step_index": i, "num_inference_steps": len(steps)} if counted else {}
        for name in passes:
            told = model.cache_context(name, **where) if named else contextlib.nullcontext()
            with told:
                made.append(
                    model(
                        hidden_states=latents,
                        timestep=torch.tensor([900.0 - 100 * i]),
                        encoder_hidden_states=text[name] if held else text[name].clone(),
                        return_dict=False,
                    )[0]
                )
    return made


def full(handle: Any) -> dict[str, list[bool]]:
    """By branch, for each of its steps: whether it went through all tiles."""
    found: dict[str, dict[int, bool]] = {}
    for row in handle.statistics.to_records():
        if row["generation"] == handle.run:
            steps = found.setdefault(row["branch"], {})
            every = row["tiles_computed"] == row["tiles_total"]
            steps[row["step"]] = steps.get(row["step"], True) and every
    return {branch: [steps[i] for i in sorted(steps)] for branch, steps in found.items()}


def tiles(handle: Any, branch: str) -> dict[tuple[int, str], tuple[int, int]]:
    return {
        (row["step"], row["layer"]): (row["tiles_computed"], row["tiles_total"])
        for row in handle.statistics.to_records()
        if row["branch"] == branch
    }


ENDS: Steps = [BOTH, BOTH, BOTH, FEW, FEW, FEW, FEW]
STARTS: Steps = [FEW, FEW, FEW, BOTH, BOTH, BOTH]


@pytest.mark.parametrize(
    ("steps", "held", "expected"),
    [
        # In the first step with another number only texts can tell who calls.
        (ENDS, True, {"call0": "FssFFss", "call1": "Fss"}),
        (ENDS, False, {"call0": "FsssFss", "call1": "Fss"}),
        (STARTS, True, {"call0": "FssFFs", "call1": "FFs"}),
        (STARTS, False, {"call0": "FsssFs", "call1": "FFs"}),
    ],
    ids=["ends", "ends, texts anew", "starts", "starts, texts anew"],
)
def test_lists_start_over_where_guidance_begins_or_ends(
    steps: Steps, held: bool, expected: dict[str, str]
) -> None:
    with enable(tiny.wan_transformer(peaked=1.5), SKIPPING, geometry=TILE) as handle:
        for _ in range(2):  # the second run expects nothing of the first one's order
            denoise(handle._denoisers[0][0], steps, held=held)
            seen = full(handle)
            assert {
                branch: "".join("F" if one else "s" for one in found)
                for branch, found in seen.items()
            } == expected
        assert handle.run == 2


@torch.no_grad()
def test_steps_of_a_scheduler_are_compared_too() -> None:
    pipe, text = tiny.wan_pipeline(peaked=1.5), texts()
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        for _ in range(2):
            pipe.scheduler.set_timesteps(len(ENDS))
            latents = torch.randn(1, 12, 8, 16, 16, generator=torch.Generator().manual_seed(0))
            for timestep, passes in zip(pipe.scheduler.timesteps, ENDS, strict=True):
                for name in passes:
                    out = pipe.transformer(latents, timestep[None], text[name]).sample
                latents = pipe.scheduler.step(out, timestep, latents).prev_sample
            seen = full(handle)
            assert seen["call0"] == [True, False, False, True, True, False, False]
            assert seen["call1"] == [True, False, False]
        assert handle.run == 2


def test_after_a_change_lists_are_those_of_the_pass_that_goes_on() -> None:
    """As those of a run that began there."""
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        whole = denoise(model, ENDS)[-3:]
        kept = [handle.kept_tiles(layer, "call0") for layer in handle.layers]
        with pytest.raises(KeyError, match="call1"):
            handle.lists(handle.layers[0], "call1")
    with enable(model, SKIPPING, geometry=TILE) as handle:
        late = denoise(model, [(), (), (), (), FEW, FEW, FEW])
        assert all(map(torch.equal, whole, late))
        for layer, tiles_kept in zip(handle.layers, kept, strict=True):
            assert torch.equal(handle.kept_tiles(layer, "call0"), tiles_kept)


@pytest.mark.parametrize("held", [True, False], ids=["texts held", "texts anew"])
@pytest.mark.parametrize("passes", [FEW, BOTH, ("cond", "skip", "uncond")], ids=len)
def test_with_as_many_passes_in_each_step_lists_are_carried_on(
    passes: tuple[str, ...], held: bool
) -> None:
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        named = denoise(model, [passes] * 4, named=True)
        expected = [tiles(handle, name) for name in passes]
    with enable(model, SKIPPING, geometry=TILE) as handle:
        assert all(map(torch.equal, denoise(model, [passes] * 4, held=held), named))
        assert [tiles(handle, f"call{i}") for i in range(len(passes))] == expected
        assert all(steps == [True, False, False, False] for steps in full(handle).values())


@pytest.mark.parametrize("counted", [True, False], ids=["steps named", "steps by timesteps"])
@pytest.mark.parametrize("steps", [ENDS, STARTS], ids=["ends", "starts"])
def test_branches_that_a_context_names_keep_their_lists(steps: Steps, counted: bool) -> None:
    with enable(tiny.wan_transformer(peaked=1.5), SKIPPING, geometry=TILE) as handle:
        denoise(handle._denoisers[0][0], steps, named=True, counted=counted)
        for name, found in full(handle).items():
            count = sum(name in passes for passes in steps)
            assert found == [True] + [False] * (count - 1)


def test_shared_lists_suit_every_pass_and_stay() -> None:
    policy = SkipPolicy(threshold=-2.0, branches="shared", warmup_steps=0)
    with enable(tiny.wan_transformer(peaked=1.5), policy, geometry=TILE) as handle:
        denoise(handle._denoisers[0][0], ENDS)
        assert full(handle)["call0"] == [True] + [False] * 6


def test_parts_of_a_split_sequence_start_over_too() -> None:
    with enable(tiny.wan_transformer(peaked=1.5), SKIPPING, geometry=TILE) as handle:
        split = mock.Mock()
        handle._splits[mock.Mock(), "ring"] = split
        denoise(handle._denoisers[0][0], ENDS, held=False)
        assert split.forget.call_args_list == [
            mock.call(layer, branch, 1) for layer in handle.layers for branch in ("call0", "call1")
        ]


@pytest.mark.parametrize("steps", [ENDS, STARTS], ids=["ends", "starts"])
def test_graphs_know_of_lists_that_start_over(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: True)
    monkeypatch.setattr(enabling, "recorder_for", lambda model: StandIn(monkeypatch))
    model, seen = tiny.wan_transformer(peaked=1.5), []
    for graphed in (False, True):
        with enable(model, SKIPPING, geometry=TILE, graphs=graphed) as handle:
            made = [each for _ in range(3) for each in denoise(model, steps)]
            seen.append((made, handle.statistics.to_records()))
            assert bool(handle.graph_counts()["replayed"]) == graphed
    assert all(map(torch.equal, seen[0][0], seen[1][0]))
    assert seen[0][1] == seen[1][1]


def test_a_change_while_the_handle_is_paused_is_noticed() -> None:
    model = tiny.wan_transformer(peaked=1.5)

    class Pausing(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for i, passes in enumerate(super().__iter__()):
                if i == 3:
                    handle.pause()
                    handle.resume()
                yield passes

    with enable(model, SKIPPING, geometry=TILE) as handle:
        denoise(model, Pausing(ENDS), held=False)
        assert full(handle)["call0"] == [True, False, False, False, True, False, False]


def told(
    clock: Clock, step: int, passes: Sequence[Any], denoiser: int = 1
) -> list[tuple[str, list[str]]]:
    found = []
    for text in passes:
        clock.watch(denoiser, 900.0 - step, text)
        found.append((clock.locate(None).branch, clock.mixed_up(denoiser)))
        assert not clock.mixed_up(denoiser)
    return found


def test_a_number_that_changes_in_each_step_leaves_no_order() -> None:
    clock = Clock(None)
    found = [told(clock, step, [None] * count) for step, count in enumerate((2, 1, 2, 1, 1, 1))]
    assert found == [
        [("call0", []), ("call1", [])],
        [("call0", [])],
        [("call0", ["call0", "call1"]), ("call1", [])],
        [("call0", ["call0", "call1"])],
        [("call0", ["call0"])],
        [("call0", [])],
    ]


def test_texts_that_travel_are_not_other_passes() -> None:
    """Each step with a text of its own, all of them alive; a text that stayed and changes is."""
    clock, many = Clock(None), [texts(i) for i in range(4)]
    order = [(one["uncond"], one["cond"]) for one in many]
    assert not any(mixed for i in range(4) for _, mixed in told(clock, i, order[i]))
    assert not told(clock, 4, order[3])[0][1]
    assert told(clock, 5, order[2])[0] == ("call0", ["call0", "call1"])
    # Two that change places.
    clock = Clock(None)
    told(clock, 0, order[0])
    assert told(clock, 1, order[0][::-1])[0] == ("call0", ["call0", "call1"])


def test_a_pass_with_the_text_of_another_is_seen_by_the_number_of_passes() -> None:
    clock, text = Clock(None), texts()
    cond, uncond = text["cond"], text["uncond"]
    steps = [(cond, cond), (cond, uncond, cond), (cond, uncond, cond), (cond, uncond, cond)]
    mixed = [[names for _, names in told(clock, i, one)] for i, one in enumerate(steps)]
    three = ["call0", "call1", "call2"]
    assert mixed == [[[], []], [[], [], []], [three, [], []], [[], [], []]]


def test_calls_are_counted_for_each_denoiser() -> None:
    clock = Clock(None)
    seen: dict[int, list[str]] = {1: [], 2: []}
    for step in range(3):
        for _ in range(2):  # in turns
            for denoiser in seen:
                seen[denoiser] += told(clock, step, [None], denoiser)[0][:1]
    assert seen == {1: ["call0", "call1"] * 3, 2: ["call0", "call1"] * 3}
    for step, expected in ((3, []), (4, ["call0", "call1"])):  # one pass of the second alone
        assert told(clock, step, [None, None], 1) == [("call0", []), ("call1", [])]
        assert told(clock, step, [None], 2) == [("call0", expected)]


def test_a_run_that_was_broken_off_says_nothing_about_the_next_one() -> None:
    clock = Clock(None)
    for _ in range(2):
        for step, count in enumerate((2, 2, 1)):
            assert not any(names for _, names in told(clock, step, [None] * count))
    assert clock.run == 2
