"""``liteattention-rocm emulate``, as typed."""

import builtins
import errno
import io
import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import liteattention_emulator as emulator
from liteattention_emulator import device
from liteattention_emulator.cli import app
from liteattention_rocm.engines.gfx942 import manifest

from .toolchain import compile_hip

SOURCE = Path(__file__).with_name("machine_kernels.hip")
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def code_object(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "kernels.co"
    path.write_bytes(compile_hip(SOURCE))
    return str(path)


def call(*words: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, words)
    return result.exit_code, result.output


def test_the_command_is_registered() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    line = next(row for row in text.splitlines() if row.startswith("emulate = "))
    value = line.partition("=")[2].strip().strip('"')
    assert EntryPoint("emulate", value, "liteattention_rocm.commands").load() is app


def test_library_path() -> None:
    code, text = call("--library")
    assert code == 0 and Path(text.strip()) == emulator.library()


def test_kernels(code_object: str) -> None:
    code, text = call("kernels", code_object, "--json")
    rows = {row["name"]: row for row in json.loads(text)}
    assert code == 0 and rows["reverse"]["lds_bytes"] == 2048
    assert rows["not_emulated"]["unimplemented"] == ["s_rfe_b64"]
    code, text = call("kernels", code_object)
    assert code == 0 and "leave_early" in text


def test_run_and_report(code_object: str, tmp_path: Path) -> None:
    data, saved = tmp_path / "data.npy", tmp_path / "report.json"
    np.save(data, np.arange(64, dtype=np.float32))
    words = ["run", code_object, "--kernel", "halve", "--args", str(data), "--out", str(saved)]
    code, text = call(*words)
    assert code == 0 and "halve" in text and "no time of a GPU" in text.replace("\n", " ")
    assert np.load(data).tolist() == [i / 2 for i in range(64)]
    assert call(*words[:-2], "--record", str(tmp_path / "halve.npz"))[0] == 0
    assert emulator.Recording.load(tmp_path / "halve.npz").kernel == "halve"
    report = json.loads(saved.read_text())
    assert report["counters"]["global_load_bytes"] == 256
    assert report["by_unit_per_wave"]["vmem"] == 2
    assert call("report", str(saved))[1].count("v_mul_f32") == 1
    code, text = call(*words, "--json", "--no-check", "--order", "last-ahead")
    assert code == 0 and json.loads(text)["by_unit"] == report["by_unit"]


def test_findings_fail_the_run(code_object: str) -> None:
    words = ("run", code_object, "--kernel", "all_emulated")
    code, text = call(*words, "--args", "u32:60")
    assert code == 1 and "out of bounds" in text
    assert call(*words, "--args", "u32:64")[0] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--args", "f64:3"), "not TYPE:COUNT"),
        (("--args", "f32:3:x"), "VALUE must be"),
        (("--args", "many"), "not a number"),
        (("--args", "none.npy"), "none.npy"),
        (("--grid", "0"), "--grid must be"),
        (("--block", "1,2,3,4"), "--block must be"),
        (("--block", "²"), "--block must be"),
        (("--grid", "1,99999999999999999999"), "--grid must have numbers below 2^32"),
        (("--args", "f32:99999999999999999999:iota"), "COUNT must be below 2^32"),
        (("--args", "i32:3:1e99"), "VALUE must be whole, from -2147483648 to 2147483647"),
        (("--args", "u8:3:0.5"), "VALUE must be whole, from 0 to 255"),
        (("--args", "u8:3:nan"), "VALUE must be whole, from 0 to 255"),
        (("--args", str(2**64)), f"takes 8 bytes, which {2**64} does not fit"),
        (("--args", "f32:64", "--workgroup", "1"), "--workgroup is the one that --record records"),
        (
            ("--args", "f32:64", "--grid", "2,3", "--workgroup", "6", "--record", "x.npz"),
            "--workgroup must be below 6, the workgroups of --grid 2,3, got 6",
        ),
        (("--lds", str(2**32)), "--lds"),
        (("--order", "up"), "order 'up'"),
        ((), "takes 1 arguments"),
        (("--kernel", "absent"), "no kernel absent; there are"),
    ],
)
def test_bad_input_is_one_line(code_object: str, words: tuple[str, ...], reason: str) -> None:
    code, text = call("run", code_object, "--kernel", "halve", *words)
    assert code == 2 and reason in text and "Traceback" not in text


def test_every_wrong_argument_of_a_run_is_named(
    code_object: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITEATTENTION_EMULATOR_CHECK", "maybe")
    words = ("run", code_object, "--grid", "0", "--block", "x", "--order", "up")
    words += ("--args", "f64:3", "--args", "many", "--out", str(tmp_path / "none" / "x"))
    code, text = call(*words, "--kernel", "absent")
    assert code == 2
    for part in (
        "LITEATTENTION_EMULATOR_CHECK must be on or off, got 'maybe'", "--grid must be",
        "--block must be", "order 'up'", "--args f64:3: not", "--args many: not", "--out: there is",
    ):  # fmt: skip
        assert text.count(part) == 1
    monkeypatch.delenv("LITEATTENTION_EMULATOR_CHECK")
    code, text = call("run", code_object, "--kernel", "absent", "--grid", "0")
    assert code == 2 and "--grid must be" in text and "no kernel absent; there are" in text
    words = ("run", code_object, "--kernel", "halve", "--grid", "0")
    code, text = call(*words)
    assert code == 2 and "--grid must be" in text and "takes 1 arguments" in text
    code, text = call("run", str(tmp_path / "none.co"), *words[2:])
    assert code == 2 and "--grid must be" in text and "none.co: No such file" in text


def test_every_wrong_argument_of_a_launch_is_named(code_object: str) -> None:
    with emulator.Module(code_object) as module:
        count = sum(not each.hidden for each in module.kernels["calls"].arguments)
        with pytest.raises(TypeError) as refused:
            module.launch("calls", [1], [64], ["x"] * count)
    assert count > 1
    for number in range(count):
        assert f"calls: argument {number} " in str(refused.value)


def test_a_struct_by_value_is_a_file_of_bytes(tmp_path: Path) -> None:
    """As of the shipped kernels. Of zeros, its pointers are null, and the run says so."""
    file = manifest.DIRECTORY / "pack_lists.co"
    (kernel, *_) = device.kernels(file.read_bytes()).values()
    (struct,) = (argument for argument in kernel.arguments if not argument.hidden)
    given = tmp_path / "struct.npy"
    words = ("run", str(file), "--kernel", kernel.name, "--args")
    code, text = call(*words, "1")
    assert code == 2 and f"takes {struct.size} bytes, not an integer: give them as an arr" in text
    for array, why in (
        (np.zeros(struct.size, np.float32), "is a struct, got float32: give them as an array of"),
        (np.zeros(3, np.uint8), f"takes {struct.size} bytes, got 3"),
    ):
        np.save(given, array)
        code, text = call(*words, str(given))
        assert code == 2 and why in text
    np.save(given, np.zeros(struct.size, np.uint8))
    code, text = call(*words, str(given))
    assert code != 2 and "takes" not in text


def test_where_nothing_can_be_written_nothing_runs(
    code_object: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Module, "launch", lambda *_, **__: pytest.fail("it ran"))
    words = ("run", code_object, "--kernel", "halve", "--args", "f32:64")
    for option in ("--out", "--record"):
        code, text = call(*words, option, str(tmp_path / "none" / "x"))
        assert (code, text) == (2, f"{option}: there is no folder '{tmp_path / 'none'}'\n")


def test_a_file_that_cannot_be_written_back_is_said_before_the_run(
    code_object: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Module, "launch", lambda *_, **__: pytest.fail("it ran"))

    def access(path: Path, mode: int) -> bool:  # root may write to any file
        return mode != os.W_OK or bool(os.stat(path).st_mode & 0o200)

    monkeypatch.setattr(os, "access", access)
    data, saved = tmp_path / "data.npy", tmp_path / "report.json"
    np.save(data, np.arange(64, dtype=np.float32))
    saved.write_text("")
    for file in (data, saved):
        file.chmod(0o444)
    code, text = call(
        "run", code_object, "--kernel", "halve", "--args", str(data), "--out", str(saved)
    )
    assert code == 2
    assert text == f"--args: cannot write to '{data}'\n--out: cannot write to '{saved}'\n"


@pytest.mark.parametrize("failing", ["data.npy", "report.json", "halve.npz"])
def test_a_full_disk_at_the_end_is_one_line_and_loses_nothing_else(
    code_object: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The files that could be written are whole, and the one that could not is as it was."""
    own = io.open

    def full(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        opened = own(file, mode, *rest, **more)
        if "w" in mode and Path(str(file)).suffix == Path(failing).suffix:
            opened.write(b"half" if "b" in mode else "half")
            opened.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened

    paths = [tmp_path / name for name in ("data.npy", "report.json", "halve.npz")]
    np.save(paths[0], np.arange(64, dtype=np.float32))
    for path in paths[1:]:
        path.write_text("before")
    data, saved, recording = map(str, paths)
    before = {path.name: path.read_bytes() for path in paths}
    words = ["run", code_object, "--kernel", "halve", "--args", data, "--out", saved]
    with monkeypatch.context() as patched:
        for module in (builtins, io):
            patched.setattr(module, "open", full)
        result = RUNNER.invoke(app, [*words, "--record", recording])
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path / failing}: No space left on device\n"
    assert "no time of a GPU" in result.stdout.replace("\n", " ")
    assert {path.name for path in tmp_path.iterdir()} == set(before)
    assert {path.name for path in paths if path.read_bytes() == before[path.name]} == {failing}


def test_a_full_device_is_said_and_stays(code_object: str, tmp_path: Path) -> None:
    data = tmp_path / "data.npy"
    np.save(data, np.arange(64, dtype=np.float32))
    words = ["run", code_object, "--kernel", "halve", "--args", str(data)]
    result = RUNNER.invoke(app, [*words, "--out", "/dev/full", "--record", "/dev/full"])
    said = "/dev/full: No space left on device\n"
    assert (result.exit_code, result.stderr) == (2, 2 * said)
    assert Path("/dev/full").is_char_device()
    link = tmp_path / "link.json"
    link.symlink_to("report.json")
    for out in ("/dev/null", str(link)):
        assert call(*words, "--out", out)[0] == 0
    assert Path("/dev/null").is_char_device() and link.is_symlink()
    assert json.loads((tmp_path / "report.json").read_text())["kernel"] == "halve"


def test_library_runs_nothing_else() -> None:
    code, text = call("--library", "kernels", "x.co")
    assert code == 2 and "leave it or kernels out" in text
    assert call()[0] == 2


def test_no_code_object(tmp_path: Path) -> None:
    (tmp_path / "bad.co").write_bytes(bytes(500))
    for name, reason in (("absent.co", "No such file"), ("bad.co", "neither an ELF")):
        for command in (["kernels"], ["run", "--kernel", "x"]):
            code, text = call(command[0], str(tmp_path / name), *command[1:])
            assert code == 2 and reason in text


def test_hazards_of_several_files(code_object: str, tmp_path: Path) -> None:
    """All are looked at, and all that cannot be are named."""
    bad = tmp_path / "bad.co"
    bad.write_bytes(bytes(500))
    code, text = call("hazards", "none.co", code_object, str(bad))
    assert code == 2 and "none.co: No such file or directory\n" in text and f"{bad}: " in text
    assert call("hazards", code_object, code_object)[1].endswith("(code objects: 2)\n")


def test_errors_name_the_file(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for words in (["report"], ["kernels"], ["hazards"], ["run", "--kernel", "any"]):
        code, text = call(*words, str(other))
        assert code == 2 and text.startswith(f"{other}: "), text
        assert call(*words, "missing.co") == (2, "missing.co: No such file or directory\n")
    for text in ("[]", "1", "[" * 100_000 + "]" * 100_000):
        other.write_text(text)
        code, said = call("report", str(other))
        assert code == 2 and said.startswith(f"{other}: not a report; "), said
    other.write_text("no JSON")
    code, text = call("report", str(other))
    assert (code, text) == (
        2, f"{other}: not a report; `emulate run FILE --out REPORT` writes one\n"
    )  # fmt: skip
