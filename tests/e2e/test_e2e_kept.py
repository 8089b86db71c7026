"""What a run leaves: nothing is lost where it cannot write, where it is stopped, where it fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from liteattention_e2e import artefacts, report, runner, turns
from liteattention_e2e.runs import Run
from liteattention_rocm.cli import files

PROMPT = "a red circle moves left on a blue background"
OPTIONS = (
    "--height", "32", "--width", "32", "--frames", "4", "--steps", "3", "--guidance", "1",
    "--dtype", "float32", "--threads", "1", "--threshold", "-2",
)  # fmt: skip


def unusable(kind: str, folder: Path) -> Path:
    """An output folder in which nothing can be written."""
    file = folder / "file"
    file.write_text("mine")
    if kind == "a file":
        return file
    if kind == "below a file":
        return file / "deep" / "er"
    if kind == "read-only":
        return Path("/proc/liteattention")
    if kind == "a link to nothing":
        (folder / "link").symlink_to(folder / "nowhere")
        return folder / "link"
    (folder / "report.json").write_text('{"of": "somebody else"}')
    return folder


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a file", "is no folder"),
        ("below a file", "is a file, so that there can be no folder"),
        ("read-only", "cannot write into '/proc/liteattention'"),
        ("a link to nothing", "is no folder"),
        ("taken", "is not a report of this suite: name another folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_said_before_the_model_is_loaded(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, says: str
) -> None:
    monkeypatch.setattr(runner, "load", lambda config: pytest.fail("the model was loaded"))
    out = unusable(kind, tmp_path)
    for command in (["generate"], ["e2e", "--attention", "dense"]):
        outcome = CliRunner().invoke(app, [*command, "--out", str(out)])
        assert outcome.exit_code == 2, outcome.output
        assert says in " ".join(outcome.stderr.split())
    outcome = CliRunner().invoke(app, ["e2e", "--out", str(out), "--fps", "0"])
    text = " ".join(outcome.stderr.split())
    assert says in text and "--fps=0: " in text  # with all else that is wrong


def one_after_the_other(tasks: Sequence[turns.Task[Run]]) -> Iterator[Run]:
    """Videos in their order, so that a test knows which of them are ready."""
    for task in tasks:
        while not task.go_on():
            pass
        yield task.result


Stop = Callable[[], None]


def crash() -> None:
    raise RuntimeError("the engine is gone")


@pytest.mark.parametrize(
    ("stop", "code", "word"),
    [
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "stopped"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, "stopped"),
        (crash, 1, "failed"),
    ],
    ids=["SIGTERM", "SIGINT", "crash"],
)
def test_a_run_that_ends_early_keeps_what_it_has(
    app: typer.Typer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Stop,
    code: int,
    word: str,
) -> None:
    out = tmp_path / "out"
    in_turns = runner.Runner.in_turns
    seen: list[dict[str, Any]] = []

    def third_stops(self: runner.Runner, items: Any, *arguments: Any) -> Iterator[Run]:
        ordered = sorted(items, key=lambda item: ("diffusers", "dense", "lite").index(item.kind))
        made = in_turns(self, ordered, *arguments)
        for _ in range(2):
            one = next(made)
            seen.append({"before": (out / "report.json").exists()})
            yield one
        seen.append(json.loads((out / "report.json").read_text()))
        stop()
        yield from made

    monkeypatch.setattr(runner.Runner, "in_turns", third_stops)
    monkeypatch.setattr(turns, "take", one_after_the_other)
    outcome = CliRunner().invoke(
        app, ["generate", PROMPT, "--model", str(model), "--out", str(out), *OPTIONS]
    )
    assert outcome.exit_code == code, outcome.output
    assert f"{word}: 2 of 3 runs were made" in outcome.stderr
    # what a kill would have left, and what the end of the command made of it
    assert [seen[0]["before"], seen[1]["before"]] == [False, True]
    for found in (seen[2], json.loads((out / "report.json").read_text())):
        assert (found["complete"], found["runs_done"], found["runs_planned"]) == (False, 2, 3)
        assert [each["name"] for each in found["configurations"]] == ["diffusers", "dense"]
        assert found["artefacts"]["videos"] == ["diffusers_p0_s0.mp4", "dense_p0_s0.mp4"]
    assert found["configurations"][1]["quality"]["vs_diffusers"]["videos"] == 1
    assert found["artefacts"]["contact_sheets"] == ["contact_sheet_p0_s0.png"]
    assert "**Incomplete: 2 of 3 runs were made.**" in (out / "report.md").read_text()
    assert len((out / "report.csv").read_text().splitlines()) == 3
    assert "Incomplete: 2 of 3 runs were made." in (out / "report.html").read_text()
    with np.load(out / "frames_p0_s0.npz") as frames:
        assert sorted(frames) == ["dense", "diffusers"]
        assert frames["dense"].shape == (4, 32, 32, 3)
    for name in found["artefacts"]["videos"]:
        assert imageio_ffmpeg.count_frames_and_secs(str(out / name))[0] == 4
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("stop", [lambda: signal.raise_signal(signal.SIGTERM), crash])
@pytest.mark.parametrize(
    ("module", "name", "error", "said"),
    [
        (artefacts, "write_text", OSError(28, "No space left"), "could not write all of"),
        (report, "table", KeyError("name"), "could not finish the report: KeyError: 'name'"),
    ],
    ids=["a full disk", "a bug"],
)
def test_a_report_that_fails_hides_neither_the_error_nor_the_exit_code(
    app: typer.Typer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Stop,
    module: Any,
    name: str,
    error: Exception,
    said: str,
) -> None:
    in_turns = runner.Runner.in_turns

    def second_stops(self: runner.Runner, *arguments: Any) -> Iterator[Run]:
        made = in_turns(self, *arguments)
        yield next(made)
        stop()

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(runner.Runner, "in_turns", second_stops)
    monkeypatch.setattr(module, name, fails)
    outcome = CliRunner().invoke(
        app, ["generate", PROMPT, "--model", str(model), "--out", str(tmp_path), *OPTIONS]
    )
    assert "1 of 3 runs were made" in outcome.stderr and said in outcome.stderr
    if stop is crash:
        assert str(outcome.exception) == "the engine is gone"
    else:
        assert outcome.exit_code == 143


def test_a_run_stopped_before_its_first_video_leaves_earlier_results_alone(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", PROMPT, "--model", str(model), "--out", str(tmp_path), *OPTIONS]
    assert CliRunner().invoke(app, command).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stopped(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "run", stopped)
        outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 130
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # the next whole run moves them aside, all of them, and says where
    (tmp_path / "mine.txt").write_text("mine")
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    (earlier,) = tmp_path.glob("earlier-*")
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert str(earlier) in outcome.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / "report.json").read_text())["complete"] is True


def test_what_a_killed_run_left_is_moved_aside_without_a_report(tmp_path: Path) -> None:
    left = {"frames_p0_s0.npz", "tiles_p1_s3.npz", "lite_-4_p0_s0.mp4"}
    for name in (*left, "mine.npz", "mine.mp4"):
        (tmp_path / name).write_bytes(b"of another run")
    found = artefacts.earlier_files(tmp_path)
    assert left <= set(found) and not any("mine" in name for name in found)


def test_a_disk_that_fills_up_costs_no_measurement(
    app: typer.Typer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = artefacts.write_mp4, [2]

    def full(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] in (0, 1):
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(artefacts, "write_mp4", full)
    outcome = CliRunner().invoke(
        app, ["generate", PROMPT, "--model", str(model), "--out", str(tmp_path), *OPTIONS]
    )
    assert outcome.exit_code == 0, outcome.output  # there was room again at the end
    assert outcome.stderr.count("No space left on device") == 2
    found = json.loads((tmp_path / "report.json").read_text())
    assert len(found["artefacts"]["videos"]) == 3 and found["complete"]
    left[0] = 10**9
    monkeypatch.setattr(artefacts, "write_text", lambda *_: full_text())
    outcome = CliRunner().invoke(
        app, ["generate", PROMPT, "--model", str(model), "--out", str(tmp_path), *OPTIONS]
    )
    assert outcome.exit_code == 1
    assert "could not write all of" in outcome.stderr and "lite -2" in outcome.stderr


def full_text() -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    files.write_text(path, "one")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as part:
        assert part.suffix == ".csv"
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "one"
    path.chmod(0o600)
    files.write_text(path, "two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["table.csv"]


def test_asking_whether_a_folder_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    assert files.problem(tmp_path / "a" / "b") is None
    assert files.file_problem(tmp_path) is not None
    assert list(tmp_path.iterdir()) == []
