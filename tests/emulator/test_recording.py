"""Recorded instruction streams: they say what the counters say, and survive a file."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from liteattention_emulator import (
    BadRecording,
    EmulatorError,
    Module,
    Recording,
    Report,
    last_launch,
    native,
    registered,
)
from liteattention_emulator.recording import recorded, recording

from .attention_cases import Problem, code_object
from .toolchain import compile_hip

SOURCE = Path(__file__).with_name("machine_kernels.hip")
KERNEL = "attention_dense_bf16_d128_rtne"


@pytest.fixture(scope="module")
def dense() -> tuple[Report, Recording]:
    """One workgroup of the dense kernel over three K blocks."""
    problem = Problem(128, 256, 150)
    assert problem.packed_v.size
    with recording(), Module(code_object("attention_dense")) as module:
        problem.run(module, KERNEL)
    report = last_launch()
    assert report is not None
    return report, recorded()


def test_sums_are_the_counters(dense: tuple[Report, Recording]) -> None:
    report, found = dense
    executed: Counter[int] = Counter()
    phases: Counter[int] = Counter()
    conflicts: Counter[int] = Counter()
    totals: Counter[str] = Counter()
    for wave in found.waves:
        for step in wave.steps:
            inst = found.instructions[step["index"]]
            executed[inst.offset] += 1
            phases[inst.offset] += int(step["phases"])
            conflicts[inst.offset] += int(step["conflicts"])
            totals[f"{inst.unit} bytes"] += int(step["bytes"])
            totals["lines"] += int(step["lines"])
        assert len(wave.lines) == wave.steps["lines"].sum()
    for row in report.executed:
        assert executed[row.offset] == row.times
        assert (phases[row.offset], conflicts[row.offset]) == (row.lds_phases, row.bank_conflicts)
    counters = report.counters
    assert found.steps == report.instructions == executed.total()
    assert len(found.waves) == report.waves == 8
    assert totals["lines"] == counters["vmem_lines"]
    assert totals["ds bytes"] == counters["lds_bytes"]
    moved = counters["global_load_bytes"] + counters["global_store_bytes"]
    assert totals["vmem bytes"] == moved


def test_streams_follow_the_code(dense: tuple[Report, Recording]) -> None:
    _, found = dense
    for wave in found.waves:
        insts = [found.instructions[index] for index in wave.steps["index"]]
        assert insts[-1].name == "s_endpgm"
        for step, inst, after in zip(wave.steps, insts, insts[1:], strict=False):
            goes = inst.target if step["taken"] else inst.index + 1
            assert after.index == goes, inst.text
        assert any(wave.steps["taken"])


def test_lines_are_those_of_the_workgroup() -> None:
    data = np.zeros((3, 64), np.uint32)
    with Module(compile_hip(SOURCE)) as module:
        report = module.launch("reverse", [3], [64], [data, 1], dynamic_lds=256, record=2)
    assert report.recording is not None
    assert (report.recording.kernel, report.recording.workgroup) == ("reverse", 2)
    (wave,) = report.recording.waves
    begin = data[2].ctypes.data
    once = list(range(begin // 128, (begin + 255) // 128 + 1))
    assert wave.lines.tolist() == once * 2  # loaded, then stored


def test_recording_changes_no_result_and_costs_nothing_later() -> None:
    with Module(compile_hip(SOURCE)) as module:
        data = np.arange(64, dtype=np.float32)
        assert module.launch("halve", [1], [64], [data], record=0).recording is not None
        assert data.tolist() == [i / 2 for i in range(64)]
        native.set_option("count", "off")
        report = module.launch("halve", [1], [64], [data], record=0)
        assert report.recording is not None and report.executed  # recording counts
        report = module.launch("halve", [1], [64], [data])
        assert report.recording is None and not report.executed
        with pytest.raises(EmulatorError, match="recorded nothing"):
            recorded()


def test_one_kernel_of_several() -> None:
    """Launches of others in between neither record nor take the recording away."""
    with Module(compile_hip(SOURCE)) as module:
        data = np.arange(64, dtype=np.float32)
        with recording(0, "hal"):
            with pytest.raises(EmulatorError, match="recorded nothing"):
                recorded()
            module.launch("halve", [1], [64], [data])
            module.launch("reverse", [1], [64], [data, 1], dynamic_lds=256)
            assert recorded().kernel == "halve"
        with recording():
            module.launch("reverse", [1], [64], [data, 1], dynamic_lds=256)
            assert recorded().kernel == "reverse"


def test_a_workgroup_that_is_not_there() -> None:
    with Module(compile_hip(SOURCE)) as module:
        data = np.zeros(64, np.float32)
        with pytest.raises(EmulatorError, match="its grid does not have the workgroup"):
            module.launch("halve", [1], [64], [data], record=1)
        with pytest.raises(ValueError, match="at least 0"):
            module.launch("halve", [1], [64], [data], record=-1)


def test_a_buffer_of_packed_arguments(dense: tuple[Report, Recording]) -> None:
    with Module(compile_hip(SOURCE)) as module:
        data = np.arange(64, dtype=np.float32)
        typed = module.launch("halve", [1], [64], [data], record=0).recording
        with registered(data):
            buffer = data.ctypes.data.to_bytes(8, "little")
            packed = module.launch_packed("halve", [1], [64], buffer, record=0).recording
    assert typed is not None and packed is not None
    assert np.array_equal(typed.waves[0].steps, packed.waves[0].steps)


def test_saved_and_loaded(dense: tuple[Report, Recording], tmp_path: Path) -> None:
    _, found = dense
    path = tmp_path / "dense.npz"
    found.save(path)
    again = Recording.load(path)
    assert (again.kernel, again.workgroup, again.text) == (KERNEL, 0, found.text)
    assert (again.source, again.accum_offset) == (found.source, found.accum_offset)
    assert again.instructions == found.instructions
    for old, new in zip(found.waves, again.waves, strict=True):
        assert np.array_equal(old.steps, new.steps) and np.array_equal(old.lines, new.lines)


def test_what_is_no_recording(dense: tuple[Report, Recording], tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    path.write_bytes(b"PK no archive")
    with pytest.raises(BadRecording, match="not a recording"):
        Recording.load(path)
    np.savez(path, text=np.zeros(3))
    with pytest.raises(BadRecording, match="not a recording"):
        Recording.load(path)
    _, found = dense
    Recording(found.text[:64], found.waves).save(path)
    with pytest.raises(BadRecording, match="instructions that the text does not have"):
        Recording.load(path)
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.npz")
