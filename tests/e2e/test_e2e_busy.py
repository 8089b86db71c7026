"""Configurations take turns by steps, and times that something else made give no speed-up."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from liteattention_e2e import busy, page, report, runner, suite, turns
from liteattention_e2e.config import SuiteConfig, load_config
from liteattention_e2e.runs import Run

PROMPT = "a red circle moves left on a blue background"
SIZES: dict[str, Any] = {
    "height": 32, "width": 32, "frames": 4, "steps": 4, "guidance": 1, "dtype": "float32",
    "threads": 1,
}  # fmt: skip


RECORD = {"generation": 1, "step": 1, "layer": "blocks.0.attn1", "branch": "", "tiles_total": 4,
          "tiles_computed": 3, "tiles_kept": 2}  # fmt: skip


def made(configuration: str, *, outside: float, attention: float, waited: float | None) -> Run:
    steps = [(outside + attention) / 4] * 4
    return Run(
        configuration, 0, 0, 0, encode=0.1, denoise=sum(steps), steps=steps, decode=0.1,
        total=sum(steps) + 0.2, attention=attention, peak_memory=1 << 20, digest=configuration,
        frames=np.zeros((2, 16, 16, 3), np.uint8), step_processor=[0.25] * 4, waited=waited,
        skips=[RECORD] if configuration.startswith("lite") else [],
    )  # fmt: skip


class Loaded:
    """A runner whose clock says what a test wants."""

    turns = "step"
    load_seconds = 1.0
    tiles: dict[str, Any] = {}

    def __init__(self, config: SuiteConfig, seconds: dict[str, dict[str, Any]]) -> None:
        self.config = config
        self.settings = runner.Settings(32, 32, 4, 4, 1.0, None, None)
        self._seconds = seconds

    def run(self, *_: Any, **__: Any) -> None:  # the warm-up
        pass

    def in_turns(self, items: Any, *_: Any) -> Iterator[Run]:
        for item in items:
            yield made(item.name, **self._seconds[item.name])

    def tokens(self, chosen: Any = None) -> int:
        return 256

    def heads(self) -> int:
        return 2

    def geometry(self) -> None:
        return None


# The seconds that were reported as "0.53x": the code outside attention took 128, 355 and 752 s.
DRIFT = {
    "diffusers": {"outside": 128.0, "attention": 555.0, "waited": None},
    "dense": {"outside": 355.0, "attention": 564.0, "waited": None},
    "lite -2": {"outside": 752.0, "attention": 973.0, "waited": None},
}
WAITS = {name: {"outside": 10.0, "attention": 5.0, "waited": 0.9} for name in DRIFT}
QUIET = {
    "diffusers": {"outside": 100.0, "attention": 300.0, "waited": 0.01},
    "dense": {"outside": 104.0, "attention": 200.0, "waited": 0.01},
    "lite -2": {"outside": 102.0, "attention": 100.0, "waited": 0.01},
}


def summary(seconds: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    options = {"model": "x", "prompts": [PROMPT], "thresholds": "-2", **SIZES, **more}
    loaded: Any = Loaded(load_config(options), seconds)
    result = suite.Result.before(loaded)
    from rich.console import Console

    suite.run(result, Console(quiet=True), lambda _: None)
    found = suite.summarise(result)
    found["artefacts"] = {"videos": [], "contact_sheets": [], "plots": [], "skipped_tiles": []}
    return found


@pytest.mark.parametrize(
    ("seconds", "sign"),
    [
        (DRIFT, "the code outside self-attention, the same in all, took 32 s a step in diffusers "
         "and 188 s in lite -2"),
        (WAITS, "threads waited for a processor 47% of their time"),
    ],
    ids=["drift", "waits"],
)  # fmt: skip
def test_load_gives_no_speed_ups(seconds: dict[str, dict[str, Any]], sign: str) -> None:
    found = summary(seconds)
    assert found["load"]["verdict"] == "machine was busy, no speed-ups"
    assert sign in found["load"]["busy"][0]["signs"][0]
    assert [item["speedup"] for item in found["configurations"]] == [
        {"vs_dense": None, "vs_diffusers": None}
    ] * 3
    text = report.markdown(found)
    assert "**Machine was busy, no speed-ups: " in text and "speed-up vs dense" not in text
    assert not any("x |" in line for line in text.splitlines())
    assert "Machine was busy, no speed-ups: " in " ".join(page._warnings(found))
    assert page._configurations(found)[2]["cards"]["speedup"] == (
        "none", "machine was busy, no speed-ups"
    )  # fmt: skip
    titles = [each.title for each in page._charts(found)]
    assert not any("econds" in title for title in titles)


def test_a_quiet_machine_gives_speed_ups() -> None:
    found = summary(QUIET)
    assert found["load"]["verdict"] is None and found["load"]["busy"] == []
    lite = found["configurations"][2]
    assert lite["speedup"]["vs_dense"]["median"] == pytest.approx(304 / 202)
    assert lite["seconds"]["outside_attention"]["median"] == pytest.approx(102)
    assert lite["seconds"]["processor"]["median"] == 1.0
    text = report.markdown(found)
    assert "busy, no" not in text and "1.50x" in text
    assert "configurations in turns, denoising step by step" in text


def test_cross_attention_on_our_engine_is_not_the_same_code() -> None:
    seconds = {**QUIET, "diffusers": {"outside": 50.0, "attention": 300.0, "waited": 0.01}}
    assert summary(seconds)["load"]["verdict"] is not None
    assert summary(seconds, cross_attention="dense")["load"]["verdict"] is None


def test_tasks_go_on_in_turns_and_each_keeps_its_place() -> None:
    seen: list[str] = []

    def work(name: str, rounds: int) -> str:
        with torch.no_grad():
            for i in range(rounds):
                seen.append(f"{name}{i}")
                tasks[name].hand_over()
            return name

    tasks = {
        name: turns.Task(lambda name=name, n=n: work(name, n), lambda: torch.no_grad())  # type: ignore[misc]
        for name, n in {"a": 3, "b": 1, "c": 2}.items()
    }
    assert list(turns.take(list(tasks.values()))) == ["b", "c", "a"]
    assert seen == ["a0", "b0", "c0", "c1", "a1", "a2"]
    assert torch.is_grad_enabled()


def test_tasks_are_unwound_where_one_fails() -> None:
    left = []

    def waits() -> None:
        try:
            tasks[0].hand_over()
        finally:
            left.append("unwound")

    def fails() -> None:
        raise ZeroDivisionError

    tasks = [turns.Task(work, torch.no_grad) for work in (waits, fails)]
    with pytest.raises(ZeroDivisionError):
        list(turns.take(tasks))
    assert left == ["unwound"] and torch.is_grad_enabled()


def test_videos_in_turns_are_those_made_alone(model: Path) -> None:
    """The same bits, tiles and lists of each step, whoever else has a turn in between."""
    config = load_config({"model": str(model), "prompts": [PROMPT], "thresholds": "-inf,-2",
                          "geometry": "32x64x16", **SIZES, "guidance": 3.0})  # fmt: skip
    loaded = runner.Runner(config)
    items = config.configurations()
    order: list[str] = []
    wait = runner._Stopwatch.step_end

    def noted(self: Any, pipe: Any, *arguments: Any) -> Any:
        order.append(next(v._configuration.name for v in loaded._making if v._clock is self))
        return wait(self, pipe, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._Stopwatch, "step_end", noted)
        together = {run.configuration: run for run in loaded.in_turns(items, 0, 0, 0)}
    names = [item.name for item in items]
    assert [sorted(order[i : i + 4]) for i in range(0, 16, 4)] == [sorted(names)] * 4
    for item in items:
        alone, run = loaded.run(item, 0, 0, 0), together[item.name]
        assert (run.digest, run.skips and [x | {"generation": 0} for x in run.skips]) == (
            alone.digest, alone.skips and [x | {"generation": 0} for x in alone.skips]
        )  # fmt: skip
        assert len(run.tiles) == len(alone.tiles)
        for mine, its in zip(run.tiles, alone.tiles, strict=True):
            assert mine.steps == its.steps and np.array_equal(mine.bits, its.bits)
        assert len(run.step_processor) == 4 and run.processor > 0
    assert not loaded.pipeline.transformer._forward_pre_hooks


def spin() -> None:
    while True:
        pass


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not count waiting"
)
def test_generate_beside_endless_loops_reports_no_speed_up(
    app: typer.Typer, model: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    count = 2 * len(os.sched_getaffinity(0))
    loops = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        given = {f"--{name}": str(value) for name, value in SIZES.items()}
        words = [word for pair in given.items() for word in pair if pair[0] != "--frames"]
        outcome = CliRunner().invoke(
            app, ["generate", PROMPT, "--model", str(model), "--threshold", "-2", "--out",
                  str(tmp_path), *words]
        )  # fmt: skip
    finally:
        for loop in loops:
            loop.kill()
    assert outcome.exit_code == 0, outcome.output
    assert "Machine was busy, no speed-ups: " in outcome.stderr
    assert "vs dense" not in outcome.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["load"]["verdict"] == busy.BUSY
    for item in found["configurations"]:
        assert item["speedup"] == {"vs_dense": None, "vs_diffusers": None}
    assert "Machine was busy, no speed-ups: " in (tmp_path / "report.html").read_text()
    assert "time_per_step.png" not in found["artefacts"]["plots"]
