"""``liteattention-rocm bench video --gpus``, with CPU processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is not installed (extra: diffusers)")

import liteattention_diffusers
from liteattention_benchmark import cli, video
from liteattention_benchmark import video_ranks as several
from liteattention_rocm import TileGeometry
from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.state import Shape

from . import failing_ranks

SMOKE = Path(video.__file__).parent / "configs" / "wan-smoke.yaml"
SIZES = """
transformer: {layers: 1, heads: 8, head_dim: 64, ffn_dim: 64, text_dim: 32, channels: 4}
height: 256
width: 128
frames: 13
text_tokens: 16
steps: 3
warmup_steps: 1
attention: [dense, lite]
sparsity: [0.42]
pattern: unequal
"""


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["video", *arguments])


@pytest.mark.parametrize("peer_memory", [False, True])
def test_one_and_two_processes_in_one_command(tmp_path: Path, peer_memory: bool) -> None:
    config = tmp_path / "sizes.yaml"
    config.write_text(SIZES)
    arguments = ("--config", str(config), "--gpus", "2", "--device", "cpu", "--out", str(tmp_path))
    result = command(*arguments, *(["--peer-memory"] if peer_memory else []))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "video.json").read_text())
    assert report["complete"] and len(report["rows"]) == 2 + 2 * 3
    gains = {
        gain.contender: gain
        for gain in several.gains([several.RankRow(**row) for row in report["rows"]], 2)
    }
    dense, in_order, dealt = gains.values()
    assert list(gains) == ["ours, dense", "ours, lite 42%", "ours, lite 42%, balanced"]
    for gain in (dense, dealt, in_order):
        assert gain.finite and not gain.absent and gain.alone and gain.together
        assert gain.efficiency == pytest.approx(gain.alone[0] / gain.together / 2)
        for parts in zip(gain.attending, gain.exchanging, gain.waiting, strict=True):
            assert len(gain.attending) == 2 and min(parts) > 0
    assert dealt.dealing and dense.dealing is None and in_order.dealing is None
    for row in report["rows"]:  # heads are dealt before the second and third of three steps
        if row["contender"].endswith("balanced"):
            assert row["step"] == row["steps"][0]
            assert row["dealing"] == pytest.approx(sum(row["steps"][1:]) / 2)
    assert sum(dealt.tiles) == sum(in_order.tiles) and dealt.skipped == in_order.skipped
    assert dealt.skipped == pytest.approx(0.42, abs=0.05)  # few tiles to share out
    assert dealt.uneven is not None and in_order.uneven is not None
    assert dealt.uneven < 1.04 < in_order.uneven
    text = (tmp_path / "video.md").read_text()
    way = ", ours through each other's memory" if peer_memory else ""
    assert f"(gloo), which time nothing, ulysses{way}. 1 layers, 8 heads x 64" in text
    assert (" --peer-memory" in text) == peer_memory
    assert "| ours, lite 42%: tiles" in text and "efficiency" in text


def test_gpus_by_themselves_each_denoise_the_whole_video(tmp_path: Path) -> None:
    config = video.load(SMOKE, steps=1, attention=["lite"])
    several._run(config, 2, "ulysses", "cpu", tmp_path, lambda _: None, together=False)
    rows = several._collect(tmp_path, 2)
    assert [(row.rank, row.ranks, row.contender) for row in rows] == [
        (0, 1, "ours, lite 50%"),
        (1, 1, "ours, lite 50%"),
    ]
    assert rows[0].tiles == rows[1].tiles and all(row.finite and row.step for row in rows)


def test_seconds_are_of_steps_whose_heads_were_dealt_before() -> None:
    assert several.settled(7, {1, 2, 4}) == [3, 5, 6]
    assert len(several.settled(50, {1, 2, 4, 8, 16, 32})) == 43
    assert several.settled(4, set()) == [0, 1, 2, 3]
    assert several.settled(3, {1, 2}) == [0]
    watch = several._Watch(torch.device("cpu"))
    watch.dealt = {1, 2, 4}
    watch.steps = [(float(step), 10.0 + step, 20.0 + step) for step in range(7)]
    assert watch.medians() == (5.0, 15.0, 25.0)


def test_unlike_gpus_are_compared_with_one_of_their_mean_speed() -> None:
    """Shared without loss, work that takes them 2 and 3 seconds takes both 1.2."""
    times = {(1, 0): 2.0, (1, 1): 3.0, (2, 0): 1.25, (2, 1): 1.2}
    rows = [
        several.RankRow("ours, dense", ranks, rank, step, (step,), *(None,) * 6, True)
        for (ranks, rank), step in times.items()
    ]
    (gain,) = several.gains(rows, 2)
    assert gain.alone == (2.0, 3.0) and gain.one == pytest.approx(2.4)
    assert gain.speed_up == pytest.approx(2.4 / 1.25)
    assert gain.efficiency == pytest.approx(1.2 / 1.25)
    table = several.to_markdown(video.load(SMOKE), rows, 2, "ulysses", "cuda", {}, "command")
    text = " ".join(table.split())
    assert "| ours, dense | 2.400 | 1.250 | 1.92x | 0.960 |" in text
    assert "| ours, dense | 2.000 | 3.000 |" in text


def test_peer_memory_reaches_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def enable(*_: Any, **options: Any) -> Any:
        given.append(options["peer_memory"])
        raise RuntimeError("seen")

    monkeypatch.setattr(liteattention_diffusers, "enable", enable)
    config = video.load(SMOKE, steps=1, attention=["dense"])
    for peer_memory in (True, False):
        several._measure(config, 0, 1, "ulysses", torch.device("cpu"), tmp_path, peer_memory)
    assert given == [True, False]


def test_a_ring_and_what_it_cannot_run(tmp_path: Path) -> None:
    config = video.load(SMOKE, steps=1, attention=["default", "lite"])
    kept: list[int] = []
    several._run(config, 2, "ring", "cpu", tmp_path, lambda rows: kept.append(len(rows)))
    rows = several._collect(tmp_path, 2)
    assert [row.rank for row in rows] == [0, 0, 1, 1] and all(n in (2, 4) for n in kept)
    default, lite = several.gains(rows, 2)
    assert "return_lse" in default.absent and default.together is None
    assert lite.finite and lite.together and sum(lite.tiles) == 72  # one more for empty q blocks
    text = several.to_markdown(config, rows, 2, "ring", "cpu", {}, "command")
    assert "- diffusers' default: " in text and "| ours, lite 50%: tiles" in text


def test_every_reason_against_a_request_is_said_at_once(tmp_path: Path) -> None:
    result = command(
        "--config", "wan-smoke", "--gpus", "3", "--attention", "flex", "--compile",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    for reason in (
        "--gpus 3: this machine has 0 GPUs",
        "--gpus 3 cannot share 4 heads equally",
        "--gpus 3 cannot share 256 tokens equally",
        "flex is not for several processes",
        "--compile is for one GPU",
    ):
        assert reason in text
    for gpus in ("1", "2"):
        result = command(
            "--config", "wan-smoke", "--gpus", gpus, "--parallel", "tree", "--eager",
            "--device", "cpu", "--out", str(tmp_path), "--peer-memory",
        )  # fmt: skip
        text = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and "--eager is for --compile" in text
        assert text.count("--parallel must be ulysses or ring, got 'tree'") == 1
        assert ("--peer-memory is for --gpus 2 or more" in text) == (gpus == "1")
    config = video.load(SMOKE)
    assert several.problems(config, 2, "ulysses", "cpu", False) == []
    assert several.problems(config, 8, "ring", "cpu", False) == []
    assert several.problems(config, 8, "ring", "cpu", False, True) == [
        "--peer-memory is for --parallel ulysses"
    ]


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (failing_ranks.fails, "process 1 of 2 failed:.*no such luck"),
        (failing_ranks.is_killed, "process . of 2 ended with SIGKILL"),
    ],
)
def test_a_process_that_fails_ends_all_with_its_error(
    work: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = several.start_processes

    def starting(_: Any, **options: Any) -> Any:
        started.append(start(work, **options))
        return started[-1]

    monkeypatch.setattr(several, "start_processes", starting)
    begin = time.monotonic()
    with pytest.raises(several.Failed) as caught:
        several._run(video.load(SMOKE), 2, "ring", "cpu", tmp_path, lambda rows: None)
    assert time.monotonic() - begin < 60 and re.search(said, str(caught.value), re.DOTALL)
    assert not any(process.is_alive() for context in started for process in context.processes)


def test_wrong_tiles_are_no_absent_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise video.WrongTiles("other tiles")

    monkeypatch.setattr(several, "_time", wrong)
    config = video.load(SMOKE, steps=1, attention=["lite"])
    with pytest.raises(video.WrongTiles, match="other tiles"):
        several._measure(config, 0, 1, "ulysses", torch.device("cpu"), tmp_path)


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "process"
    code = (
        "from torch.multiprocessing.spawn import start_processes\n"
        f"from {failing_ranks.__name__} import outlives\n"
        f"if __name__ == '__main__': start_processes(outlives, args=({str(note)!r},), nprocs=1)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    parent = subprocess.Popen([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path})
    try:
        wait_for(note.exists)
    finally:
        parent.kill()
        parent.wait()
    process = Path("/proc") / note.read_text()
    wait_for(lambda: not process.exists())


def wait_for(happened: Any) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_failure_is_shown_and_the_exit_code_is_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise several.Failed("process 1 of 2 failed:\nValueError: no such luck")

    monkeypatch.setattr(several, "run", failing)
    arguments = ("--config", "wan-smoke", "--gpus", "2", "--device", "cpu", "--out", str(tmp_path))
    result = command(*arguments)
    assert result.exit_code == 1 and "ValueError: no such luck" in result.output


def test_a_part_of_a_ring_has_the_tiles_at_its_place() -> None:
    tile = TileGeometry(64, 32, 32)
    whole = torch.zeros(1, 2, 8, 16, dtype=torch.bool)  # 512 rows and keys
    whole[:, 0, 4, 9] = whole[:, 1, 7, 15] = True
    shape = Shape(1, 2, 2, 256, 256, 64, torch.bfloat16, torch.device("cpu"), tile)
    part = several.ring_part(bitmap.pack(whole), shape, 256, 256, 512)
    found = bitmap.unpack(part, 8)
    wanted = whole[:, :, 4:, 8:].clone()
    wanted[..., 0] |= ~wanted.any(-1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("sparsity", [0.25, 0.42, 0.57])
def test_unequal_heads_leave_out_as_much_in_all(sparsity: float) -> None:
    shares = video.unequal_shares(sparsity, 40, seed=1)
    assert sum(shares) / 40 == pytest.approx(sparsity, abs=0.005)
    assert min(shares) < 0.05 and max(shares) > 0.75
    assert shares != video.unequal_shares(sparsity, 40, seed=2)
