"""What benchmarks write: checked before they measure, kept when they are stopped."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from liteattention_benchmark import (
    cells,
    contenders,
    cpu,
    kernels,
    serving,
    serving_vllm,
    video,
    video_ranks,
)
from liteattention_benchmark.cli import app
from liteattention_rocm.cli import needs

RUNNER = CliRunner()
CELLS = """
rounds: 3
warmup: 1
dense:
  - {batch: 1, heads: 1, length: 64, head_dim: 64}
  - {batch: 1, heads: 1, length: 128, head_dim: 64}
"""
COMMANDS = {
    "cpu": ["--shape", "1,1,128,64", "--shape", "1,1,256,64", "--rounds", "3"],
    "kernels": ["--config", "smoke"],
    "video": ["--config", "wan-smoke"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu, kernels, video):
        monkeypatch.setattr(module, "run", lambda *_, **__: pytest.fail("it was measured"))
    file = tmp_path / "file"
    file.write_text("mine")
    out = file / "result.json" if name == "cpu" else file
    result = RUNNER.invoke(app, [name, *COMMANDS[name], "--out", str(out)])
    assert result.exit_code == 2
    assert "--out: " in result.output and file.read_text() == "mine"


def stop(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGTERM)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("it failed")


@pytest.mark.parametrize("end", [stop, fail])
@pytest.mark.parametrize("name", COMMANDS)
def test_earlier_results_stay_if_nothing_is_written(
    name: str, end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu, kernels, video):
        monkeypatch.setattr(module, "run", end)
    written = {
        "cpu": ["rows.json"], "kernels": ["kernels.md", "kernels.csv"], "video": ["video.json"]
    }[name]  # fmt: skip
    for file in written:
        (tmp_path / file).write_text(f"earlier {file}")
    out = tmp_path / "rows.json" if name == "cpu" else tmp_path
    result = RUNNER.invoke(app, [name, *COMMANDS[name], "--out", str(out)])
    assert result.exit_code == (143 if end is stop else 1), result.output
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {file: f"earlier {file}" for file in written}
    text = " ".join(result.output.split())
    assert f"nothing was written; earlier results are back in {tmp_path}" in text


def test_stopped_kernels_leave_the_cells_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "cells.yaml"
    config.write_text(CELLS)
    (tmp_path / "kernels.md").write_text("earlier")
    make = kernels.make

    def first_only(cell: cells.Cell, *arguments: Any) -> contenders.Job:
        return stop() if "128" in str(cell) else make(cell, *arguments)

    monkeypatch.setattr(kernels, "make", first_only)
    command = ["kernels", "--config", str(config), "--out", str(tmp_path)]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 143, result.output
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["cell"] for row in rows} == {"1,1,64,64"}
    assert {row["incomplete"] for row in rows} == {"1 of 2 cells"}
    assert "incomplete 1 of 2 cells" in (tmp_path / "kernels.md").read_text()
    assert "Incomplete: 1 of 2 cells were measured" in (tmp_path / "kernels.html").read_text()
    (earlier,) = tmp_path.glob("earlier-*")
    assert (earlier / "kernels.md").read_text() == "earlier"
    monkeypatch.setattr(kernels, "make", make)
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "incomplete" not in (tmp_path / "kernels.csv").read_text()
    assert "Incomplete" not in (tmp_path / "kernels.html").read_text()
    assert (tmp_path / "kernels-dense.png").exists()


def test_a_stopped_bench_cpu_leaves_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = cpu._shape
    monkeypatch.setattr(cpu, "_shape", lambda s, *more: stop() if s[2] == 256 else shape(s, *more))
    out = tmp_path / "rows.json"
    result = RUNNER.invoke(app, ["cpu", *COMMANDS["cpu"], "--out", str(out)])
    assert result.exit_code == 143, result.output
    found = json.loads(out.read_text())
    assert found["complete"] is False
    assert {tuple(row["shape"]) for row in found["rows"]} == {(1, 1, 128, 64)}
    assert str(out) in result.output.replace("\n", "")


@pytest.mark.parametrize("end", ["stopped", "failed", "done"])
def test_bench_serving_on_a_cpu_leaves_the_cases_that_were_measured(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: serving.Case, *_: Any) -> serving.Row:
        if case.batch == 2 and end == "stopped":
            stop()
        if case.batch == 2 and end == "failed":
            raise RuntimeError("the engine ended")
        return serving.Row(case, "TORCH_SDPA", 2.0, 1.0, (1.5, 2.0))

    engine = contextlib.nullcontext(SimpleNamespace(wait=lambda: 0.0))
    monkeypatch.setattr(serving, "engine_process", lambda *_: engine)
    monkeypatch.setattr(serving, "_measure", measure)
    monkeypatch.setattr(serving_vllm, "options", lambda *_: {})
    monkeypatch.setattr(needs, "installed", lambda name: True)
    out = tmp_path / "rows.json"
    out.write_text("earlier")
    command = ["serving", "--framework", "vllm", "--case", "decode,1,8", "--case", "decode,2,8"]
    result = RUNNER.invoke(app, [*command, "--rounds", "2", "--out", str(out)])
    assert result.exit_code == {"stopped": 143, "failed": 1, "done": 0}[end], result.output
    assert (str(result.exception) == "the engine ended") == (end == "failed")
    found = json.loads(out.read_text())
    assert found["complete"] is (end == "done")
    assert [row["batch"] for row in found["rows"]] == ([1, 2] if end == "done" else [1])
    assert (str(out) in result.output.replace("\n", "")) == (end == "stopped")
    (earlier,) = tmp_path.glob("earlier-*")
    assert (earlier / out.name).read_text() == "earlier"
    result = RUNNER.invoke(app, [*command, "--out", str(out / "x")])
    assert result.exit_code == 2 and "--out: " in result.output


def test_a_stopped_bench_video_leaves_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = video.Row("ours, dense", 1.0, (0.5, 0.5), None, None, True, 0)

    def one(config: Any, device: Any, progress: Any, keep: Any, compiled: Any) -> Any:
        keep([row])
        stop()

    monkeypatch.setattr(video, "run", one)
    result = RUNNER.invoke(app, ["video", *COMMANDS["video"], "--out", str(tmp_path)])
    assert result.exit_code == 143, result.output
    found = json.loads((tmp_path / "video.json").read_text())
    assert found["complete"] is False
    assert [each["contender"] for each in found["rows"]] == ["ours, dense"]
    assert "**Incomplete: 1 contenders were timed.**" in (tmp_path / "video.md").read_text()
    monkeypatch.setattr(video, "run", lambda *_, **__: [row])
    result = RUNNER.invoke(app, ["video", *COMMANDS["video"], "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "| ours, dense | 0.500 | 1.00 |" in text and "Incomplete" not in text
    assert json.loads((tmp_path / "video.json").read_text())["complete"] is True


def test_a_stopped_bench_video_on_several_processes_leaves_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = video_ranks.RankRow("ours, dense", 1, 0, 0.5, (0.5,), *(None,) * 6, True)

    def one(config: Any, gpus: Any, mode: Any, device: Any, keep: Any, peer_memory: Any) -> Any:
        keep([row])
        stop()

    monkeypatch.setattr(video_ranks, "run", one)
    several = [*COMMANDS["video"], "--gpus", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert RUNNER.invoke(app, ["video", *several]).exit_code == 143
    found = json.loads((tmp_path / "video.json").read_text())
    assert found["complete"] is False and found["rows"][0]["step"] == 0.5
    assert "**Incomplete: " in (tmp_path / "video.md").read_text()
