"""What the kernel tests share: the host replay programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

HERE = Path(__file__).parent
SOURCES = ROOT / "csrc" / "gfx942"


def host_program(name: str, folder: Path) -> Path:
    """tests/engines/gfx942/kernels/NAME.cpp, compiled for the host."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (Debian: g++)")
    program = folder / name
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}",
         str(HERE / f"{name}.cpp"), "-o", str(program)],
        check=True,
    )  # fmt: skip
    return program


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_program("layout_replay", tmp_path_factory.mktemp("replay"))
