"""What `make` would do in a fresh checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests" / "serving", tmp_path / "tests" / "serving", ignore=ignored)
    return tmp_path


def commands(checkout: Path, *targets: str) -> list[str]:
    """The pip commands of targets, none of them run."""
    clean = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    make = ["make", "-n", *targets]
    text = subprocess.run(make, cwd=checkout, env=clean, capture_output=True, check=True).stdout
    return [line for line in text.decode().splitlines() if " -m pip " in line]


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_a_serving_environment_needs_one_wheel_and_no_torch_to_build_it(
    checkout: Path, framework: str
) -> None:
    requirements, wheel = commands(checkout, f".venv-{framework}/ready.stamp")
    assert "install" in requirements and "build.txt" in requirements
    assert " pip wheel " in wheel and "--no-deps" in wheel


def test_every_build_uses_the_object_files_of_the_others(checkout: Path) -> None:
    # An environment per build would move the headers, and with them everything is compiled again.
    targets = (".venv/run.stamp", ".venv/dev.stamp", "build/wheel/stamp")
    builds = [c for c in commands(checkout, *targets) if " wheel " in c or " -e " in c]
    assert len(builds) == 3
    assert all("--no-build-isolation" in command for command in builds)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (["CXX=none-such"], "missing: a C++ compiler (Debian: apt-get install g++)"),
        (
            ["PYTHON=", "CXX=none-such"],
            "missing: Python 3.11 or newer, a C++ compiler "
            "(Debian: apt-get install python3.11 python3.11-venv python3.11-dev g++)",
        ),
        (
            ["PYTHON=./python3.12", "CXX=none-such"],
            "missing: the venv module of python3.12, the C headers of python3.12, a C++ compiler "
            "(Debian: apt-get install python3.12-venv python3.12-dev g++)",
        ),
    ],
    ids=["compiler", "python", "all"],
)
def test_all_that_the_machine_lacks_is_said_at_once(
    checkout: Path, lacking: list[str], said: str
) -> None:
    python = checkout / "python3.12"
    python.write_text("#!/bin/sh\nexit 1\n")  # a Python without venv and headers
    python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        ["make", "-s", "tools", *lacking], cwd=checkout, env=clean, capture_output=True, text=True
    )
    assert done.returncode != 0 and done.stdout == f"{said}\n"
