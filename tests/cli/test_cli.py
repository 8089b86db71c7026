"""The command line and the environment report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import liteattention_rocm
from liteattention_benchmark.cli import app as bench
from liteattention_rocm import collect_env
from liteattention_rocm.cli import root, tables
from liteattention_rocm.engines import registry

RUNNER = CliRunner()


def test_collect_env_is_a_module_and_names_what_matters() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "liteattention_rocm.collect_env"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in (
        "python",
        "torch",
        "aiter",
        "diffusers",
        "cpu paths",
        "hip run-time",
        "default engine",
    ):
        assert f"\n{name} " in "\n" + done.stdout


@pytest.mark.parametrize(
    ("name", "installed", "expected"),
    [
        ("aiter", {"amd-aiter": "0.1.9"}, "0.1.9"),
        ("triton", {"triton": "3.7.0"}, "3.7.0"),
        ("triton", {"pytorch-triton-rocm": "3.5.1"}, "3.5.1"),
        (
            "triton",
            {"triton-rocm": "3.6.0", "triton": "3.7.0"},
            "3.7.0 (triton), 3.6.0 (triton-rocm)",
        ),
        ("vllm", {"triton": "3.7.0"}, "not installed"),
        ("aiter", {}, "not installed"),
    ],
)
def test_versions_are_found_under_the_names_of_rocms_builds(
    name: str, installed: dict[str, str], expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for distribution, number in installed.items():
        folder = tmp_path / f"{distribution.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {distribution}\nVersion: {number}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert collect_env.installed_version(name) == expected


def test_collect_env_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"{name} is broken")

    monkeypatch.setattr(collect_env, "_load", broken)
    monkeypatch.setenv("LITEATTENTION_ENGINE", "cpu")
    facts = collect_env.collect()
    assert facts["cpu paths"].startswith("unknown (OSError: ")
    assert facts["LITEATTENTION_ENGINE"] == "cpu"


@pytest.mark.parametrize(
    ("chip", "asked", "reported"),
    [
        ("gfx942", None, "gfx942 on the GPU, cpu on the CPU"),
        ("sm_90", None, "portable on the GPU, cpu on the CPU"),
        ("gfx942", "reference", "reference"),
        (None, None, "cpu"),
    ],
)
def test_the_default_engine_is_that_of_the_gpu(
    chip: str | None, asked: str | None, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LITEATTENTION_ENGINE", raising=False)
    if asked is not None:
        monkeypatch.setenv("LITEATTENTION_ENGINE", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: chip is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(registry, "architecture", lambda device: chip)
    assert collect_env._default_engines() == reported


def test_a_default_engine_that_cannot_run_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LITEATTENTION_ENGINE", "gfx942")
    monkeypatch.setenv("LITEATTENTION_HIP_LIBRARY", "/nowhere/libhip.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = collect_env.collect()["default engine"]
    assert found == "gfx942, by LITEATTENTION_ENGINE; it cannot run here"


def test_every_option_of_a_dtype_says_both_names() -> None:
    """Options take bf16 and bfloat16 alike."""
    helps: list[str] = []

    def look(command: Any) -> None:
        for each in getattr(command, "commands", {}).values():
            look(each)
        helps.extend(str(p.help) for p in command.params if p.name == "dtype")

    look(typer.main.get_command(root.build()))
    assert len(helps) >= 6
    for text in helps:
        assert "bf16 (bfloat16" in text and "fp16 (float16" in text
        assert ("fp32" in text) == ("fp32 (float32" in text)


def test_things_are_counted_in_words() -> None:
    assert [tables.counted(n, "thread") for n in (1, 2)] == ["1 thread", "2 threads"]


def without_torch(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where importing torch fails."""
    (folder / "torch.py").write_text("raise ImportError('torch is broken', name='torch')")
    paths = os.pathsep.join([str(folder), *(path for path in sys.path if path)])
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_a_broken_torch_is_reported_not_raised(tmp_path: Path) -> None:
    for command in (
        ("-m", "liteattention_rocm.collect_env"),
        (
            "-c",
            "import sys; from liteattention_rocm.cli.root import main; sys.argv[1:] = ['env'];"
            "main()",
        ),
    ):
        done = without_torch(tmp_path, *command)
        assert done.returncode == 0, done.stderr
        assert "unknown (ImportError: torch is broken)" in done.stdout
    done = without_torch(tmp_path, "-c", "from liteattention_rocm import attention")
    assert "ImportError: liteattention_rocm: torch is broken: install" in done.stderr


def test_a_commit_is_that_of_the_package_not_of_a_checkout_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for command in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(collect_env, "__file__", str(tmp_path / "collect_env.py"))
    assert collect_env.source_commit() is None
    assert collect_env.commit().startswith("unknown: built from sources without git")
    (tmp_path / "commit.txt").write_text("0123456789ab-dirty\n")  # a wheel's, from its build
    assert collect_env.commit() == "0123456789ab-dirty"


def test_bench_cpu_prints_rows_that_add_up() -> None:
    result = RUNNER.invoke(
        bench, ["cpu", "--json", "--shape", "1,2,512,64", "--rounds", "3", "--warmup", "1"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows) == ["sdpa", "dense", "lite 0 %", "budget 0 %", "lite 50 %", "lite 75 %"]
    assert rows["sdpa"]["ratio"] == 1.0
    assert all(0 < row["max_error"] < 0.02 for row in rows.values())
    assert all(row["p25_ms"] <= row["median_ms"] <= row["p75_ms"] for row in rows.values())
    assert report["environment"]["commit"]


def test_bench_cpu_lists_every_bad_option() -> None:
    result = RUNNER.invoke(
        bench, ["cpu", "--dtype", "int8", "--shape", "1,2", "--shape", "1,2,-8,64,64"]
    )
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert "--dtype must be one of bf16, fp16, fp32" in text
    assert "--shape must be four positive numbers B,H,S,D, got '1,2'" in text
    assert "got '1,2,-8,64,64'" in text


def script() -> EntryPoint:
    """What the installed command runs."""
    (found,) = entry_points(group="console_scripts", name="liteattention-rocm")
    return found


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {script().module} as m; m.{script().attr}()", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    commit = collect_env.source_commit()
    assert commit and done.stdout == f"{version('liteattention-rocm')} (commit {commit})\n"
    assert liteattention_rocm.__commit__ == commit


@pytest.mark.parametrize("module", ["torch", "typer"])
def test_an_interrupt_while_importing_ends_quietly(module: str, tmp_path: Path) -> None:
    """Ctrl-C arrives while a module is being imported."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    done = subprocess.run(
        [
            sys.executable, "-c",
            f"import {script().module} as m; m.{script().attr}()", "env",
        ],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


HINT = "(liteattention-rocm --verbose shows where)"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", "env", "plan --shape 1,16,1024,128"])
def test_output_that_cannot_be_written_is_one_line(command: str, unbuffered: str) -> None:
    run = f"import {script().module} as m; m.{script().attr}()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", run, *command.split()],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    said = f"liteattention-rocm: [Errno 28] No space left on device {HINT}\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_output_that_nobody_reads_ends_quietly() -> None:
    run = f"import {script().module} as m; m.{script().attr}()"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", run, "env"],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_file_that_cannot_be_read_is_one_line_and_verbose_shows_where() -> None:
    broken = "from liteattention_rocm import collect_env; collect_env.report = lambda: open('none')"
    run = f"{broken}; import {script().module} as m; m.{script().attr}()"
    for words in (["env"], ["--verbose", "env"]):
        done = subprocess.run(
            [sys.executable, "-c", run, *words], capture_output=True, text=True, check=False
        )
        said = f"liteattention-rocm: [Errno 2] No such file or directory: 'none' {HINT}\n"
        assert (done.returncode, done.stderr) == (1, said)
        assert ("Traceback" in done.stdout) == ("--verbose" in words)
