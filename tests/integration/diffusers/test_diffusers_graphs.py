"""Forwards from graphs, on a CPU, by the stand-in of :mod:`.graph_stand_in`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig

from liteattention_diffusers import enable, enabling, graphs
from liteattention_diffusers.clock import Clock
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy
from liteattention_rocm.lite import state

from .diffusers_cases import TILE
from .graph_stand_in import StandIn

STEPS = 9


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: True)
    monkeypatch.setattr(enabling, "recorder_for", lambda model: StandIn(monkeypatch))


def records(handle: Any) -> list[Any]:
    return [
        {name: value for name, value in record.items() if name != "generation"}
        for record in handle.statistics.to_records()
        if record["generation"] == handle.run
    ]


def generations(
    pipe: Any, generate: Any, policy: SkipPolicy, seeds: tuple[int, ...], **options: Any
) -> tuple[list[np.ndarray], list[Any], dict[str, int]]:
    """Frames and statistics of generations in a row, and how their forwards were run."""
    frames, found = [], []
    with enable(pipe, policy, geometry=TILE, **options) as handle:
        for seed in seeds:
            drawn = torch.Generator().manual_seed(seed)
            frames.append(generate(pipe, num_inference_steps=STEPS, generator=drawn))
            found.append(records(handle))
        return frames, found, handle.graph_counts()


POLICIES = {
    "off": SkipPolicy(enabled=False),
    "threshold": SkipPolicy(threshold=-2.0, warmup_steps=0),
    "keeps all": SkipPolicy(threshold=-math.inf, warmup_steps=0),
    "budget": SkipPolicy(budget=0.05, warmup_steps=2),
    "by step": SkipPolicy(budget=(0.0, 0.02, 0.05), last_step=-2, warmup_steps=0),
    "by head": SkipPolicy(
        budget=0.05,
        layer_budgets={"blocks.0.*": (0.0, 0.2), "blocks.1.*": (0.3, 0.02)},
        warmup_steps=0,
    ),
    "by step and head": SkipPolicy(
        budget=0.05, layer_budgets={"blocks.0.*": ((0, 0), (0, 0.2), (0.1, 0.2))}, warmup_steps=1
    ),
    "by layer": SkipPolicy(threshold=-1.0, layer_thresholds={"blocks.0.*": -4.0}, warmup_steps=0),
    "shared, tested again": SkipPolicy(
        threshold=-2.0, branches="shared", retest_every=3, warmup_steps=0
    ),
    "upwards, ranges": SkipPolicy(
        threshold=-1.0,
        direction="ascending",
        must_do=((0, 16),),
        must_skip=((64, 80),),
        warmup_steps=0,
    ),
}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", POLICIES)
def test_graphs_make_the_same_frames_and_statistics(pipe: Any, generate: Any, name: str) -> None:
    policy, seeds = POLICIES[name], (0, 1, 0)
    frames, found, _ = generations(pipe, generate, policy, seeds)
    again, same, counts = generations(pipe, generate, policy, seeds, graphs=True)
    assert all(map(np.array_equal, frames, again))
    assert found == same
    forwards = 2 * STEPS * len(seeds)
    assert counts["eager"] + counts["replayed"] == forwards
    # In the third generation nothing is new, but where branches share lists: they lie elsewhere.
    if policy.branches == "separate":
        assert counts["replayed"] >= forwards - 2 * 14


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("forgotten", ["limit", "lists", "lists and direction"])
def test_what_a_graph_depends_on_is_noticed(
    pipe: Any, generate: Any, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: a signature that leaves something out must give other frames.

    Where every branch has lists of its own, they and the direction take turns together, so that
    either would do. Lists that branches share do not lie in the same place every other step.
    """
    shared = "shared" if forgotten == "lists" else "separate"
    thresholds = (-math.inf, -3.0, -1.0, -0.5, -2.0) if forgotten == "limit" else -1.0
    policy = SkipPolicy(threshold=thresholds, warmup_steps=1, branches=shared)
    whole = state.Turn.depends.fget  # type: ignore[attr-defined]

    def shorter(turn: Any) -> Any:
        kind, *lists = whole(turn)
        limit, direction = (None, None) if kind is None else kind
        held = [bool(lists)] if "lists" in forgotten else lists
        left = {"limit": direction, "lists": kind, "lists and direction": limit}
        return (kind is None, left[forgotten], *held)

    frames, found, _ = generations(pipe, generate, policy, (0, 1))
    monkeypatch.setattr(state.Turn, "depends", property(shorter))
    again, same, _ = generations(pipe, generate, policy, (0, 1), graphs=True)
    assert not all(map(np.array_equal, frames, again)) or found != same


@pytest.mark.usefixtures("on_a_gpu")
def test_generations_of_other_sizes_and_aborted_ones_leave_no_trace(
    pipe: Any, generate: Any
) -> None:
    policy = SkipPolicy(threshold=-2.0, warmup_steps=1)

    def stop(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return tensors

    def calls(handle: Any) -> list[np.ndarray]:
        made = [generate(pipe, num_inference_steps=STEPS)]
        made.append(generate(pipe, num_inference_steps=STEPS, height=48))
        with pytest.raises(KeyboardInterrupt):
            generate(pipe, num_inference_steps=STEPS, callback_on_step_end=stop)
        made.append(generate(pipe, num_inference_steps=5))
        handle.pause()
        handle.resume()
        made += [generate(pipe, num_inference_steps=STEPS) for _ in range(2)]
        return made

    with enable(pipe, policy, geometry=TILE) as handle:
        frames = calls(handle)
    with enable(pipe, policy, geometry=TILE, graphs=True) as handle:
        again = calls(handle)
        assert handle.graph_counts()["replayed"] > 2 * STEPS
    assert all(map(np.array_equal, frames, again))


@pytest.mark.usefixtures("on_a_gpu")
def test_changed_weights_and_modules_are_noticed_at_the_next_run(pipe: Any, generate: Any) -> None:
    policy = SkipPolicy(enabled=False)
    with enable(pipe, policy, geometry=TILE, graphs=True) as handle:
        before = generate(pipe, num_inference_steps=STEPS)
        layer = pipe.transformer.proj_out
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5, requires_grad=False)
        changed = generate(pipe, num_inference_steps=STEPS)
        pipe.transformer.blocks[0].ffn = torch.nn.Sequential(pipe.transformer.blocks[0].ffn)
        captured = handle.graph_counts()["captured"]
        wrapped = generate(pipe, num_inference_steps=STEPS)
        assert handle.graph_counts()["captured"] > captured
        # As PEFT keeps how far an adapter counts.
        layer.scaling = {"style": 1.0}
        generate(pipe, num_inference_steps=STEPS)
        captured = handle.graph_counts()["captured"]
        layer.scaling["style"] = 0.5
        generate(pipe, num_inference_steps=STEPS)
        assert handle.graph_counts()["captured"] > captured
    assert not np.array_equal(before, changed) and np.array_equal(changed, wrapped)


@pytest.mark.usefixtures("on_a_gpu")
def test_calls_that_are_more_than_launches_run_eagerly(pipe: Any) -> None:
    with enable(
        pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True
    ) as handle:
        model = pipe.transformer
        hidden = torch.randn(1, model.config.in_channels, 2, 8, 8, dtype=model.dtype)
        text = torch.randn(1, 8, model.config.text_dim, dtype=model.dtype)
        for step in (9, 8, 7):  # with gradients
            model(hidden, torch.tensor([step]), text, return_dict=False)
        with torch.no_grad(), torch.profiler.profile():
            model(hidden, torch.tensor([6]), text, return_dict=False)
        assert handle.graph_counts() == {"eager": 4, "captured": 0, "replayed": 0}


def test_what_graphs_cannot_serve_is_refused_with_every_reason(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="transformer: CUDA graphs need a model on a GPU, it is on"
    ):
        enable(pipe, graphs=True)
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: True)
    monkeypatch.setattr(enabling, "recorder_for", lambda model: StandIn(monkeypatch))
    with enable(pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        with pytest.raises(
            ValueError, match="cannot run from CUDA graphs: a cache decides by step"
        ):
            generate(pipe)
        pipe.transformer.disable_cache()
        generate(pipe)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_model_that_cannot_be_captured_says_so(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(recorder: Any, run: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StandIn, "capture", fails)
    with enable(
        pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True
    ) as handle:
        with pytest.raises(RuntimeError, match=r"cannot be captured.*graphs=False"):
            generate(pipe, num_inference_steps=STEPS)
        handle.pause()
        with pytest.raises(ValueError, match="only a paused handle"):
            enable(pipe).resume()


def test_pipelines_without_skip_state_run_from_graphs(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: True)
    pipe = tiny.wan_pipeline(peaked=1.5)
    own = generate(pipe, num_inference_steps=STEPS)
    held = graphs.StepGraphs(pipe.transformer, StandIn(monkeypatch))
    with graphs.attached(held):
        for _ in range(2):
            assert np.array_equal(own, generate(pipe, num_inference_steps=STEPS))
    assert held.counts == {"eager": 1, "captured": 1, "replayed": 4 * STEPS - 1}
    assert np.array_equal(own, generate(pipe, num_inference_steps=STEPS))
    assert held.counts["replayed"] == 4 * STEPS - 1


@pytest.mark.usefixtures("on_a_gpu")
def test_several_videos_of_a_prompt_have_a_timestep_that_is_expanded(
    pipe: Any, generate: Any
) -> None:
    options: dict[str, Any] = {"num_inference_steps": STEPS, "num_videos_per_prompt": 2}
    with enable(pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE):
        wanted = generate(pipe, **options)
    with enable(
        pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True
    ) as handle:
        for _ in range(2):
            assert np.array_equal(wanted, generate(pipe, **options))
        assert handle.graph_counts()["replayed"] > 2 * STEPS


@pytest.mark.usefixtures("on_a_gpu")
def test_a_transformer_of_its_own_has_its_weights_looked_at_in_every_run(pipe: Any) -> None:
    """No pipeline says there that a run is over: the clock finds out."""
    model = pipe.transformer
    hidden = torch.randn(1, model.config.in_channels, 2, 8, 8, dtype=model.dtype)
    text = torch.randn(1, 8, model.config.text_dim, dtype=model.dtype)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            steps = range(STEPS, 0, -1)
            return [model(hidden, torch.tensor([t]), text, return_dict=False)[0] for t in steps]

    with enable(
        model, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True
    ) as handle:
        first, second = run(), run()
        assert all(map(torch.equal, first, second)) and handle.graph_counts()["replayed"] > STEPS
        layer = model.proj_out
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5, requires_grad=False)
        changed = run()
    assert not any(map(torch.equal, first, changed))
    with enable(model, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE):
        assert all(map(torch.equal, run(), changed))


@pytest.mark.usefixtures("on_a_gpu")
def test_nobody_asks_the_clock_while_a_forward_is_captured(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to read from the device, which no capture allows."""
    capture, locate, captures = StandIn.capture, Clock.locate, [0]

    def watched(recorder: Any, run: Any) -> Any:
        def refused(*_: Any) -> Any:
            raise AssertionError("asked inside a capture")

        with monkeypatch.context() as patch:
            patch.setattr(Clock, "locate", refused)
            found = capture(recorder, run)
        captures[0] += 1
        assert Clock.locate is locate
        return found

    monkeypatch.setattr(StandIn, "capture", watched)
    with enable(pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True):
        generate(pipe, num_inference_steps=STEPS)
    assert captures[0] >= 2


@pytest.mark.usefixtures("on_a_gpu")
def test_votes_of_a_capture_that_fails_do_not_count(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(recorder: Any, run: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StandIn, "capture", fails)
    with enable(
        pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True
    ) as handle:
        with pytest.raises(RuntimeError, match="cannot be captured"):
            generate(pipe, num_inference_steps=STEPS)
        states = handle.lite._generations[handle.run].values()
        last = max(state.step for state in states)
        failed = [state for state in states if state.step == last]
        assert failed and all(state.started and not state.counts for state in failed)


@pytest.mark.usefixtures("on_a_gpu")
def test_graphs_go_with_the_handle_and_do_not_take_turns(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run needs more graphs than are kept, those that there are go on serving it."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
    handle = enable(pipe, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE, graphs=True)
    for _ in range(3):
        generate(pipe, num_inference_steps=STEPS)
    counts = handle.graph_counts()
    generate(pipe, num_inference_steps=STEPS)
    assert handle.graph_counts()["captured"] == counts["captured"] == 3
    assert handle.graph_counts()["replayed"] > counts["replayed"]
    (held,) = handle._graphs.values()
    handle.disable()
    assert not held._graphs and not held._families
