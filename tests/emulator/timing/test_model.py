"""Replays as a whole: deterministic, complete accounts, loops, constants, and our dense kernel."""

import errno
import json
import os
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from liteattention_emulator import EmulatorError, Module, Recording
from liteattention_emulator.cli import app
from liteattention_emulator.recording import recorded, recording
from liteattention_emulator.timing import BadConstants, checked, find, replay, spread, table
from tests.emulator.attention_cases import Problem, code_object

from .streams import streams

K_BLOCKS = 12


@pytest.fixture(scope="module")
def dense() -> Recording:
    """One workgroup of our dense kernel, D = 128, over a few K blocks."""
    problem = Problem(128, 256, 64 * K_BLOCKS)
    assert problem.packed_v.size
    with recording(), Module(code_object("attention_dense")) as module:
        problem.run(module, "attention_dense_bf16_d128_rtne")
        return recorded()


def test_the_dense_kernel(dense: Recording) -> None:
    """The figures of docs/model.md, to 5 %: the data here grows, so that maxima rise more often."""
    found = replay(dense)
    assert found.per_matrix == pytest.approx(33.5, rel=0.03)
    assert 0.92 < found.use < 0.98
    for wave in range(8):
        loop = found.loops[wave]
        assert loop is not None and loop.matrix == 64 * (K_BLOCKS - 3)
        clocks = found.per_iteration(wave)
        assert clocks == pytest.approx(2 * 64 * found.per_matrix, rel=0.01)  # two waves a SIMD


def test_the_account_is_complete(dense: Recording) -> None:
    found = replay(dense)
    assert found.use + sum(found.causes.values()) == pytest.approx(1, abs=0.002)
    assert next(iter(found.causes)) == "transcendental holds the port"
    for row in found.idle:
        assert 0 <= row.instruction < len(dense.instructions) and row.clocks > 0


def test_it_is_deterministic(dense: Recording) -> None:
    first, second = replay(dense), replay(dense)
    assert first.idle == second.idle and first.clocks == second.clocks
    for a, b in zip(first.issued, second.issued, strict=True):
        assert np.array_equal(a, b)


def test_waves_issue_in_order_and_all_of_it(dense: Recording) -> None:
    found = replay(dense)
    for wave, times in zip(dense.waves, found.issued, strict=True):
        assert len(times) == len(wave.steps)
        assert (np.diff(times) > 0).all()


def test_a_saved_recording_gives_the_same(dense: Recording, tmp_path: Path) -> None:
    dense.save(tmp_path / "dense.npz")
    again = replay(Recording.load(tmp_path / "dense.npz"))
    assert again.clocks == replay(dense).clocks


def test_speed(dense: Recording) -> None:
    """64 K blocks are 390,000 steps and must take less than a minute; this is 50 times faster."""
    begin = process_time()
    replay(dense)
    assert dense.steps / (process_time() - begin) > 100_000


def test_other_constants_move_the_time_as_they_should(dense: Recording) -> None:
    base = replay(dense)
    slower = ("valu_issue", "trans_issue", "matrix_pass")
    for name in slower:
        moved = replay(dense, {name: 2 * base.constants[name]}, base.window)
        assert moved.span > 1.01 * base.span, name
    rows = spread(dense, {"vmem_issue": 4.0})
    names = [row.constant.name for row in rows]
    assert set(names) == {c.name for c in table() if c.open} - {"vmem_issue"}
    effects = [max(abs(row.at_low), abs(row.at_high)) for row in rows]
    assert effects == sorted(effects, reverse=True) and effects[0] > 0.005


def test_a_loop_is_the_one_around_the_matrix_instructions(dense: Recording) -> None:
    for wave in range(8):
        loop = find(dense, wave)
        assert loop is not None
        index = dense.waves[wave].steps["index"]
        assert (index[loop.starts] == loop.head).all()
        # Where a maximum rises late, two K blocks are one iteration: the way back is another.
        assert K_BLOCKS - 4 <= loop.iterations <= K_BLOCKS - 3
    assert find(streams(["MVVV"]), 0) is None


def test_constants_have_sources_and_bounds() -> None:
    assert len({constant.name for constant in table()}) == len(table())
    for constant in table():
        assert constant.low <= constant.value <= constant.high
        assert len(constant.source) > 15
        assert constant.open == (constant.low < constant.high)
        assert constant.open or "not measured" not in constant.source


def test_overrides_are_checked_all_at_once() -> None:
    assert checked({"valu_issue": 5})["valu_issue"] == 5
    with pytest.raises(BadConstants) as error:
        checked({"valu_isue": 5, "l1_bytes": 0, "l2_latency": float("nan")})
    for part in ("no constant valu_isue", "l1_bytes: ", "l2_latency: ", "constants: valu_issue, "):
        assert part in str(error.value)


def test_streams_that_cannot_be_replayed() -> None:
    with pytest.raises(EmulatorError, match="1 to 32 waves"):
        replay(streams(["V"] * 33))
    bad = streams(["V"])
    bad.waves[0].steps["index"] = 1000
    with pytest.raises(EmulatorError, match="instruction that is not there"):
        replay(bad, window=(0, 1))


# ---- the command


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["model", *words])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def file(dense: Recording, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "dense.npz"
    dense.save(path)
    return str(path)


def test_the_command_prints_what_the_model_found(file: str, dense: Recording) -> None:
    code, text = call(file, "--matrix-per-block", "64", "--json", "--set", "misaligned=0")
    data = json.loads(text)
    found = replay(dense, {"misaligned": 0})
    assert code == 0 and data["clk_per_32x32x8"] == found.per_matrix
    assert data["waves"][4]["clk_per_block"] == found.per_iteration(4)
    assert data["range"]["least"] <= 0 <= data["range"]["most"]
    assert "misaligned" not in [row["name"] for row in data["range"]["constants"]]
    assert "clock" not in data and data["constants"]["misaligned"] == 0
    top = data["at"][0]
    assert {"offset", "text", "line", "share", "causes"} == set(top)
    same = ("--set", "misaligned=0")  # with other constants another instruction may be the first
    code, text = call(file, "--no-range", "--top", "3", "--clock-ghz", "1.25", *same)
    assert code == 0 and "modelled, not measured" in text and "at 1.25 GHz, as you asked" in text
    flight = found.flight
    asked, fetched = (f"{n:,.0f}" for n in (flight.asked_under_way, flight.fetched_under_way))
    assert f"{asked} that loads ask for; {fetched} of whole lines of 128 bytes" in text
    assert (
        f"{found.recording.kernel}, workgroup 0" in text and " ".join(top["text"].split()) in text
    )


def test_the_command_draws(file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waves.png"
    assert call(file, "--no-range", "--timeline", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_leaves_no_half_of_a_picture(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def full(self: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(figure.Figure, "savefig", full)
    path = tmp_path / "waves.png"
    code, text = call(file, "--no-range", "--timeline", str(path))
    assert code == 2 and text.endswith(f"{path}: No space left on device")
    assert "clk" in text  # what was modelled is printed all the same
    assert not list(tmp_path.iterdir())


def test_the_command_names_every_mistake(file: str, tmp_path: Path) -> None:
    words = ("--set", "x", "--set", "y=1", "--set", "y=2", "--timeline", "waves.gif")
    code, text = call(file, *words)
    assert code == 2
    for part in (
        "--set has y several times: give one value",
        "got 'x'",
        "no constant y",
        ".png, .svg or .pdf",
    ):
        assert part in text
    code, text = call(__file__)
    assert code == 2 and "not a recording" in text
    code, text = call(str(tmp_path / "none.npz"))
    assert code == 2 and "No such file" in text
