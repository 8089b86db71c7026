"""Which interpreters `make wheels` takes, and what it says when one is missing."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from liteattention_tools import wheels

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def script(folder: Path, version: str, text: str) -> None:
    path = folder / f"python{version}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def no_pyenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))


def test_an_interpreter_with_headers_is_found(tmp_path: Path) -> None:
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("this Python has no headers")
    script(tmp_path, HERE, f'exec "{sys.executable}" "$@"')
    found = wheels.interpreters([HERE], path=str(tmp_path))
    assert found == {HERE: tmp_path / f"python{HERE}"}


def test_all_that_are_missing_are_named_in_one_line(tmp_path: Path) -> None:
    script(tmp_path, "3.10", f'exec "{sys.executable}" "$@"')  # another version
    script(tmp_path, "3.12", "echo pyenv: python3.12: command not found >&2; exit 127")
    with pytest.raises(SystemExit, match=r"^missing: Python 3\.10, 3\.12, 3\.99 with C headers"):
        wheels.interpreters(["3.10", "3.12", "3.99"], path=str(tmp_path))


def test_the_versions_are_those_that_the_package_and_the_forge_name() -> None:
    import tomllib

    project = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())
    forge = project["tool"]["cibuildwheel"]["build"].split()
    assert forge == [f"cp{v.replace('.', '')}-*" for v in wheels.VERSIONS]
    assert project["project"]["requires-python"] == f">={wheels.VERSIONS[0]}"
    makefile = (wheels.ROOT / "Makefile").read_text()
    assert f"WHEELS ?= {' '.join(wheels.VERSIONS)}\n" in makefile


def test_a_newer_glibc_than_the_platform_is_refused() -> None:
    assert wheels._glibc("manylinux_2_24_x86_64") <= wheels._glibc(wheels.PLATFORM)
    for tag in ("manylinux_2_31_x86_64", "linux_x86_64"):
        assert wheels._glibc(tag) > wheels._glibc(wheels.PLATFORM)
