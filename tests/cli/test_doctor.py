"""``liteattention-rocm doctor`` on the software MI300X, on broken installations and without one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from liteattention_benchmark import doctor_times
from liteattention_emulator import library, listing, set_option
from liteattention_rocm import engines
from liteattention_rocm.cli.root import build
from liteattention_rocm.doctor import isolated, judge, report
from liteattention_rocm.doctor.cases import CASES, Case, Results, Run
from liteattention_rocm.engines import LIBRARY_VARIABLE
from liteattention_rocm.engines.gfx942 import manifest
from liteattention_rocm.engines.gfx942.engine import Gfx942Engine
from liteattention_rocm.engines.workspace import Workspaces
from tests import ROOT

from . import doctor_steps

CPU = torch.device("cpu")
OBJECTS = [entry.file for entry in manifest.read().objects]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets the variable, the checkers and what is read once: all are put back."""
    monkeypatch.setenv(LIBRARY_VARIABLE, "")
    yield
    set_option("check", "")
    manifest.read.cache_clear()


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["doctor", *arguments], env={"COLUMNS": "200"})


def examined(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the file, and what was printed."""
    file = folder / "report.json"
    result = doctor(*arguments, "--out", str(file))
    assert file.exists(), result.output
    return result.exit_code, json.loads(file.read_text()), result.output


def quickstart_says(printed: str) -> bool:
    """Whether docs/quickstart.md has the counts that the command ended with, without a GPU."""
    if torch.cuda.is_available():
        return True
    counts, file = printed.splitlines()[-2:]
    assert file.startswith("report: ")
    return f"`doctor` ends with `{counts}`" in (ROOT / "docs" / "quickstart.md").read_text()


def of(data: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in data["checks"] if check["group"] == group}


def test_on_the_software_mi300x_everything_passes(tmp_path: Path) -> None:
    code, data, printed = examined(tmp_path, "--emulate")
    assert code == 0, printed
    assert list(data) == [
        "format", "ok", "emulated", "installation", "gpus", "default_engines", "services", "checks",
        "times", "under_way",
    ]  # fmt: skip
    assert (data["format"], data["ok"], data["emulated"]) == (1, True, True)
    assert {check["status"] for check in data["checks"]} == {"ok"}
    assert list(of(data, "code objects")) == OBJECTS
    names = [case.name for case in CASES]
    assert list(of(data, "gfx942")) == list(of(data, "cpu")) == names
    assert {name: of(data, "gfx942")[name]["bits"] for name in names} == judge.read_expected()
    assert all(0 <= of(data, "cpu")[name]["error"] < 1 for name in names)
    for check in data["checks"]:
        kinds = [type(check[key]) for key in ("name", "detail", "seconds", "bits")]
        assert kinds == [str, str, float, dict]
    for name in ("liteattention-rocm", "torch", "python", "HIP run-time", "ROCm", "vllm"):
        assert data["installation"][name]
    for service in data["services"]:
        assert service["serves"] == (not service["reasons"])
    served = {(s["engine"], s["request"]) for s in data["services"] if s["serves"]}
    assert {("gfx942", "paged decode"), ("cpu", "LiteAttention, budget")} <= served
    assert "the expected bits" in printed and f"{len(data['checks'])} ok" in printed
    assert quickstart_says(printed)
    text = (tmp_path / "report.json").read_text()
    for private in (str(Path.home()), str(Path.cwd()), str(tmp_path), str(library().parent)):
        assert private not in text


@pytest.mark.parametrize("named", [False, True], ids=["option", "variable"])
def test_a_wrong_variable_of_the_emulator_is_no_broken_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("LITEATTENTION_EMULATOR_CHECK", "maybe")
    monkeypatch.setenv("LITEATTENTION_EMULATOR_ORDER", "up")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library()) if named else "")
    engines.settings.cache_clear()
    file = tmp_path / "report.json"
    result = doctor(*([] if named else ["--emulate"]), "--out", str(file))
    text = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and not file.exists()
    assert "LITEATTENTION_EMULATOR_CHECK must be on or off, got 'maybe'" in text
    assert "LITEATTENTION_EMULATOR_ORDER must be round-robin[:QUANTUM]" in text


def test_without_a_gpu_it_says_what_to_do_and_passes(tmp_path: Path) -> None:
    code, data, printed = examined(tmp_path)
    assert code == 0, printed
    assert {check["status"] for check in of(data, "gfx942").values()} == {"skipped"}
    for check in of(data, "code objects").values():
        assert check["status"] == "skipped" and "doctor --emulate" in check["detail"]
    assert {check["status"] for check in of(data, "cpu").values()} == {"ok"}
    assert quickstart_says(printed)


@pytest.mark.parametrize(
    ("variable", "value", "cure", "left_out"),
    [
        (
            "LITEATTENTION_ENGINE", "cqu",
            "unknown engine 'cqu': set one of cpu, gfx942, portable, reference, or unset it",
            {"engines"},
        ),
        (
            "LITEATTENTION_CPU_ISA", "avx9", "choose one of .*portable, or unset it",
            {"engines", "cpu"},
        ),
        (
            LIBRARY_VARIABLE, "libnone.so", "set LITEATTENTION_HIP_LIBRARY to .*, or unset it",
            {"code objects", "gfx942"},
        ),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_the_one_failure_and_no_bug(
    variable: str, value: str, cure: str, left_out: set[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(report, "CASES", [named("write_kv")])
    code, data, printed = examined(tmp_path)
    assert code == 1 and not data["ok"]
    (failed,) = (check for check in data["checks"] if check["status"] == "failed")
    assert (failed["group"], failed["name"]) == ("environment", variable)
    assert re.search(cure, failed["detail"])
    because = {c["group"] for c in data["checks"] if c["detail"] == f"{variable} is wrong"}
    assert because == left_out
    assert "attach" not in printed


def test_other_bits_than_expected_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(judge.EXPECTED.read_text())
    document["cases"]["write_kv"]["keys"] = "0" * 64
    (tmp_path / "expected.json").write_text(json.dumps(document))
    monkeypatch.setattr(judge, "EXPECTED", tmp_path / "expected.json")
    monkeypatch.setattr(report, "CASES", [named("write_kv")])
    code, data, printed = examined(tmp_path, "--emulate")
    assert code == 1 and not data["ok"]
    check = of(data, "gfx942")["write_kv"]
    assert check["status"] == "failed" and "bits differ from the expected ones" in check["detail"]
    assert "1 failed" in printed and "Please attach the file" in printed


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = copied(tmp_path, monkeypatch) / "write_kv.co"
    image = bytearray(file.read_bytes())
    image[entries(file)[0]] ^= 1
    file.write_bytes(image)
    monkeypatch.setattr(report, "CASES", [named("write_kv")])
    code, data, _ = examined(tmp_path, "--emulate")
    assert code == 1 and of(data, "gfx942")["write_kv"]["status"] == "failed"
    failed = [name for name, c in of(data, "code objects").items() if c["status"] == "failed"]
    assert failed == ["write_kv.co"]
    assert "manifest says" in of(data, "code objects")["write_kv.co"]["detail"]


@pytest.mark.parametrize("name", OBJECTS)
def test_kernels_that_do_nothing_are_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every code object, so each of them takes part in the cases that name it."""
    folder = copied(tmp_path, monkeypatch)
    file = folder / name
    image = bytearray(file.read_bytes())
    for place in entries(file):
        image[place : place + 4] = (0xBF810000).to_bytes(4, "little")  # s_endpgm
    file.write_bytes(image)
    document = json.loads((folder / "manifest.json").read_text())
    (entry,) = (entry for entry in document["objects"] if entry["file"] == name)
    entry["sha256"] = hashlib.sha256(image).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(document))
    manifest.read.cache_clear()
    take = Workspaces.take
    # A kernel that writes nothing must not find what an earlier one left there: NaN, and not -1
    # where that is what it would write.
    left = 0x7F if name == "count_tiles.co" else 0xFF
    monkeypatch.setattr(Workspaces, "take", lambda *given: take(*given).fill_(left))
    named = [case for case in CASES if name.removesuffix(".co") in case.kernels]
    engine = report.native_engine(str(library()))
    assert named and all(report.run_case(engine, CPU, x).status == "failed" for x in named)


@pytest.mark.parametrize(
    "case", [named("dense"), named("paged decode")], ids=lambda case: case.name
)
def test_bits_do_not_depend_on_the_order_of_sums(case: Case) -> None:
    expected = judge.read_expected()[case.name]
    engine = Gfx942Engine(kv_splits=3, library=str(library()))
    assert judge.judge(case, engine, CPU, expected).other_bits == []


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("out 1", "1 of 114688 numbers of out 1 are wrong"),
        ("lse 1", "lse 1 is further than 1e-05 from float64"),
        ("list 2", "list 2 is not the exact one"),
    ],
)
def test_one_wrong_number_is_found_without_expected_bits(result: str, reason: str) -> None:
    def run(given: Run) -> Results:
        results = CASES[1].run(given)
        if given.engine.name == "cpu":
            number = results[result].view(-1)[1:2]
            number += 1 if number.dtype == torch.int32 else 0.05
        return results

    check = report.run_case(engines.get("cpu"), CPU, Case("changed", (), run))
    assert (check.status, check.detail) == ("failed", reason)


def test_a_real_gpu_may_round_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "judge", lambda *_: judge.Verdict(other_bits=["out"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine = report.native_engine()
    check = report.run_case(engine, torch.device("cuda"), CASES[0])
    assert check.status == "differs" and "within the tolerance of float64" in check.detail
    assert report.run_case(engine, CPU, CASES[0]).status == "failed"
    wrong = judge.Verdict(wrong=["list 1 is not the exact one"], other_bits=["list 1"])
    monkeypatch.setattr(judge, "judge", lambda *_: wrong)
    assert report.run_case(engine, torch.device("cuda"), CASES[0]).status == "failed"


def test_a_fault_after_the_results_is_the_cases_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(judge, "judge", lambda *_: judge.Verdict())
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check = report.run_case(report.native_engine(), torch.device("cuda"), CASES[0])
    assert check.status == "failed" and "illegal memory access" in check.detail


def test_times_of_ours_and_of_peers() -> None:
    sizes = doctor_times.Sizes(2, 128, 4, 2, 2, 32, 2, 64)
    rows = list(doctor_times.measure(CPU, lambda text: None, sizes))
    found = {(row["what"].partition(",")[0], row["contender"]): row for row in rows}
    for what in ("dense", "prefill", "decode"):
        assert found[what, "ours"]["median_ms"] > 0 and found[what, "SDPA"]["median_ms"] > 0
        assert "not installed" in found[what, "AITER"]["reason"]
    assert found["dense", "LiteAttention, half of the tiles"]["median_ms"] > 0


def test_a_peer_may_raise_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> None:
        raise AssertionError

    monkeypatch.setitem(doctor_times._MAKERS, "AITER", make)
    sizes = doctor_times.Sizes(2, 128, 4, 2, 2, 32, 2, 64)
    rows = list(doctor_times.measure(CPU, lambda text: None, sizes))
    assert {row.get("reason") for row in rows if row["contender"] == "AITER"} == {"AssertionError"}
    assert all(row["median_ms"] > 0 for row in rows if row["contender"] != "AITER")


# ---- steps that take their process with them


def steps(*names: str) -> list[Any]:
    return list(isolated.each(doctor_steps.step, names, lambda _: 300.0))


def test_a_step_that_ends_its_process_costs_itself(capfd: pytest.CaptureFixture[str]) -> None:
    a, fault, b, c, raised, d = steps("a", "fault", "b", "c", "raise", "d")
    assert fault == isolated.Lost(
        f"its process ended with SIGABRT: printed by a / {doctor_steps.FAULT}"
    )
    assert raised.why.startswith("its process ended with exit code 1")
    assert raised.why.endswith("ValueError: no such luck")
    (first,), others, (last,) = ({x.split()[1] for x in xs} for xs in ([a], [b, c], [d]))
    assert len(others) == 1 and len({first, last, *others}) == 3  # processes
    assert str(os.getpid()) not in {first, last}
    assert capfd.readouterr() == ("", "")


def test_after_an_error_of_the_gpu_the_process_is_another() -> None:
    a, broken, b = (answer.rpartition(" ") for answer in steps("a", "in error", "b"))
    assert (a[0], broken[0], b[0]) == ("a", "in error", "b")
    assert a[2] == broken[2] != b[2]


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    seconds = {f"child {note}": 5.0, "after": 300.0}
    hung, after = isolated.each(doctor_steps.step, list(seconds), seconds.__getitem__)
    assert hung == isolated.Lost("no answer within 5 s, so it was ended", silent=True)
    assert isinstance(after, str) and after.startswith("after ")
    stat = Path(f"/proc/{note.read_text()}/stat")
    try:
        state = stat.read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return
    assert state in "ZX"  # ended, and nobody has asked how


def test_where_nothing_answers_any_more_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolated, "_START_SECONDS", 0.0)
    silent = isolated.Lost("its process did not start within 0 s", silent=True)
    left_out = isolated.Lost("left out, as the last 2 gave no answer")
    assert steps("a", "b", "c", "d") == [silent, silent, left_out, left_out]


def test_a_kernel_that_faults_is_one_line_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CASES", [named("write_kv"), named("dense"), named("paged decode")])
    monkeypatch.setattr(report, "_isolate", lambda device: True)
    monkeypatch.setattr(report, "run_task", doctor_steps.run_task)
    code, data, printed = examined(tmp_path)
    assert code == 1 and data["under_way"] == ""
    found = {name: (c["status"], c["detail"]) for name, c in of(data, "cpu").items()}
    fault = f"its process ended with SIGABRT: {doctor_steps.FAULT}"
    assert found == {
        "write_kv": ("ok", ""), "dense": ("failed", fault), "paged decode": ("ok", "")
    }  # fmt: skip
    assert "SIGABRT" in printed


def test_a_contender_that_faults_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_times, "time", doctor_steps.measured)
    rows = doctor_times.measure(torch.device("cuda", 0), lambda text: None)
    for row in rows:
        if row["contender"] == "SDPA":
            assert doctor_steps.FAULT in row["reason"] and "median_ms" not in row
        else:
            assert row["median_ms"] == 1.0


def test_code_objects_are_loaded_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_isolate", lambda device: True)
    emulated = report._loaded(str(library()), torch.device("cuda", 0))
    assert emulated == dict.fromkeys(OBJECTS, "")
    with pytest.raises(OSError, match=r"none\.so"):
        report._loaded("none.so", torch.device("cuda", 0))


def test_the_file_says_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_task(task: report.Task) -> report.Check:
        if task.case == "dense":
            raise KeyboardInterrupt
        return report.Check(task.engine, task.case, "ok")

    monkeypatch.setattr(report, "CASES", [named("write_kv"), named("dense")])
    monkeypatch.setattr(report, "run_task", run_task)
    code, data, printed = examined(tmp_path)
    assert code == 130 and data["under_way"] == "cpu: dense"
    assert of(data, "cpu")["write_kv"]["status"] == "ok"
    assert "stopped at: cpu: dense" in printed and "write_kv" in printed


def test_an_engine_that_nothing_here_gets_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_engines", lambda: [(engines.get("cpu"), CPU, False)])
    monkeypatch.setattr(judge, "judge", lambda *_: judge.Verdict(wrong=["all wrong"]))
    monkeypatch.setattr(report, "CASES", [named("dense")])
    code, data, printed = examined(tmp_path)
    assert code == 0 and data["ok"] and "1 warning" in printed
    check = of(data, "cpu")["dense"]
    assert check["status"] == "warning"
    assert check["detail"].startswith("all wrong; calls here get another engine, unless")


def test_a_gpu_that_pytorch_cannot_use_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no device answers")

    monkeypatch.setattr(report.facts, "gpus", broken)
    monkeypatch.setattr(report, "CASES", [named("write_kv")])
    code, data, _ = examined(tmp_path)
    assert code == 1 and of(data, "engines")["GPUs"]["detail"].endswith("no device answers")


def test_out_is_checked_before_the_work(tmp_path: Path) -> None:
    result = doctor("--out", str(tmp_path))
    assert result.exit_code == 2 and "is a folder" in result.output


def copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the code objects, which the package then takes."""
    there = folder / "objects"
    shutil.copytree(manifest.DIRECTORY, there)
    monkeypatch.setattr(manifest, "DIRECTORY", there)
    return there


def entries(file: Path) -> list[int]:
    """Where in a file its kernels begin."""
    found = listing.load(file)
    return [found.text_at + found.instructions[entry.first].offset for entry in found.entries]
