"""Sizes that fit a model, known before its weights are loaded, and how long a video will take."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from liteattention_e2e import cli, runner, tiny
from liteattention_e2e.config import Configuration, load_config
from liteattention_e2e.estimate import Cost
from liteattention_e2e.runs import Settings
from liteattention_e2e.sizes import Grid, own_multiple, without_weights
from liteattention_rocm.cli import progress


def sized(height: int, width: int, frames: int) -> Settings:
    return Settings(height, width, frames, 20, 3.0, None, None)


def test_wrong_sizes_are_said_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load", lambda config: pytest.fail("the model was loaded"))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cli.generate)
    outcome = CliRunner().invoke(
        app, ["--height", "100", "--width", "7", "--frames", "257", "--out", str(tmp_path / "out")]
    )
    assert outcome.exit_code == 2
    lines = [line.strip() for line in outcome.stderr.splitlines()[-3:]]
    why = "for this model (VAE factor 2 x patch 2; WanPipeline takes multiples of 16 only)"
    assert lines == [
        f"height must be a multiple of 16 {why}, got 100 (nearest: 96 or 112)",
        f"width must be a multiple of 16 {why}, got 7 (nearest: 16)",
        "frames must be at most 256 for this model, got 257",
    ]


def test_a_pipeline_is_asked_for_its_own_rule() -> None:
    for pipe, multiple in (
        (tiny.wan_pipeline(), 16),
        (object.__new__(diffusers.LTXPipeline), 32),
        (object.__new__(diffusers.CogVideoXPipeline), 8),
    ):
        assert {own_multiple(pipe, name) for name in ("height", "width")} == {multiple}
    assert own_multiple(object(), "height") == 1


def test_the_grid_of_wan_2_1() -> None:
    wan = Grid(spatial=8, temporal=4, patch=(1, 2, 2), own=(16, 16), positions=1024)
    assert wan.problems(sized(480, 832, 81)) == []
    assert wan.tokens(sized(480, 832, 81)) == 32760
    (problem,) = wan.problems(sized(480, 832, 80))
    assert "frames must be a multiple of 4 plus 1" in problem and "77 or 81" in problem
    assert len(wan.problems(sized(481, 20000, 80))) == 3
    pairs = Grid(spatial=8, temporal=4, patch=(2, 2, 2))
    assert pairs.problems(sized(16, 16, 13)) == []  # four latent frames, in two patches
    assert "5 or 13" in pairs.problems(sized(16, 16, 9))[0]


def test_the_skeleton_of_a_pipeline_has_its_sizes_and_no_weights(tmp_path: Path) -> None:
    pipe = tiny.wan_pipeline()
    pipe.save_pretrained(tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    empty = without_weights(str(tmp_path), diffusers)
    assert empty is not None and empty.transformer.device.type == "meta"
    assert Grid.of(empty) == Grid.of(pipe)
    assert empty.tokenizer.model_max_length == tiny.TEXT_LENGTH


def test_a_cost_passes_through_its_measurements() -> None:
    cost = Cost.through((512, 0.198), (2048, 1.605))
    assert cost.seconds(512) == pytest.approx(0.198)
    assert cost.seconds(2048) == pytest.approx(1.605)
    # measured at 4,608 tokens, one thread: 5.97 s
    assert cost.seconds(4608) == pytest.approx(5.97, rel=0.15)
    linear = Cost.through((100, 1.0), (200, 1.5))  # noise: cheaper per token at more tokens
    assert (linear.quadratic, linear.seconds(200)) == (0.0, 1.5)
    square = Cost.through((100, 0.1), (200, 1.0))
    assert (square.linear, square.seconds(200)) == (0.0, 1.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> runner.Runner:
    where = tmp_path_factory.mktemp("model")
    tiny.wan_pipeline().save_pretrained(where)
    options = {"model": str(where), "prompts": ["a red circle"], "thresholds": "-4"}
    return runner.Runner(load_config(options | {"height": 32, "width": 32, "frames": 4}))


def test_a_busy_machine_does_not_change_what_a_step_costs(
    loaded: runner.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, threads = loaded.pipeline.transformer, torch.get_num_threads()
    forward = model.forward

    def interrupted(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.3)  # the processor is somebody else's
        assert torch.get_num_threads() == 1
        return forward(*arguments, **more)

    monkeypatch.setattr(model, "forward", interrupted)
    own = Configuration("diffusers", "diffusers", None)
    assert 0 < loaded.step_seconds(own, loaded.settings) < 0.3
    assert torch.get_num_threads() == threads


def test_a_size_is_chosen_by_what_all_runs_cost(
    loaded: runner.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Any, item: Configuration, chosen: Settings, steps: int = 3) -> float:
        tokens = self.tokens(chosen)
        return 1e-4 * tokens + (1e-7 if item.kind == "diffusers" else 5e-8) * tokens**2

    monkeypatch.setattr(runner.Runner, "step_seconds", step)
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    # three configurations, each warmed up for two steps
    steps = loaded.settings.steps + 2
    needed = [
        steps * (3e-4 * n + (1e-7 + 2 * 5e-8) * n**2) / threads
        for n in (loaded.tokens(sized(*size)) for size in cli._SIZES)
    ]
    found = {}
    for seconds in (needed[0] * 1.01, needed[0] * 0.99, 0.0):
        said = io.StringIO()
        console = Console(file=said, width=80)
        chosen = cli._size_within(loaded, seconds, console)
        found[seconds] = (chosen.height, chosen.width, chosen.frames)
        assert "tokens squared" in said.getvalue() and "\r" not in said.getvalue()
    assert list(found.values()) == [cli._SIZES[0], cli._SIZES[1], cli._SIZES[1]]
    assert f"about {needed[0]:.0f} s, over 0 s (--time-limit)" in said.getvalue()


def test_without_a_terminal_plain_lines_show_that_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.02)
    said = io.StringIO()
    console = Console(file=said, width=40)
    with progress.activity(console, "loading a model"):
        time.sleep(0.1)
    with progress.Steps(console, 6) as steps:
        for name in ("diffusers", "dense, prompt 0, seed 0"):
            steps.part(name, 3)
            for _ in range(3):
                steps.done()
                time.sleep(0.05)
    text = said.getvalue()
    lines = text.splitlines()
    assert "\r" not in text and "\x1b" not in text
    assert lines[0] == "loading a model" and "loading a model: 0 s" in lines[1:]
    assert "diffusers: step 0 of 3; 0 of 6 in 0 s" in lines
    assert "dense, prompt 0, seed 0: step 2 of 3; 5 of 6 in 0 s, about 0 s left" in lines
    after = len(lines)
    time.sleep(0.1)
    assert len(said.getvalue().splitlines()) == after  # its thread has ended
