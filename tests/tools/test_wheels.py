"""Which interpreters `make wheels` takes, what it says if one is missing, what a failure leaves."""

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


def test_wheels_are_replaced_when_all_new_ones_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "dist", tmp_path / "work"
    out.mkdir()
    for name in ("old-0.1.whl", "old-0.1.tar.gz", "notes.txt"):
        (out / name).write_text("old")
    fails = True

    def run(*command: object, **_: object) -> None:
        (Path(str(command[-2])) / "new.tar.gz").write_text("new")

    def build(version: str, *_: object) -> Path:
        if fails and version == "3.12":
            raise SystemExit("failed: pip wheel")
        return Path(f"new-{version}.whl")

    monkeypatch.setattr(wheels, "interpreters", lambda versions: {v: Path(v) for v in versions})
    for step in ("_compiler", "_requirements"):
        monkeypatch.setattr(wheels, step, lambda *_: Path())
    monkeypatch.setattr(wheels, "_run", run)
    monkeypatch.setattr(wheels, "_build", build)
    monkeypatch.setattr(wheels, "_repair", lambda raw, folder: (folder / raw).write_text("new"))
    command = ["wheels", "--python", "3.11", "3.12", "--out", str(out), "--work", str(work)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="failed: pip wheel"):
        wheels.main()
    assert {path.name for path in out.iterdir()} == {"old-0.1.whl", "old-0.1.tar.gz", "notes.txt"}
    fails = False
    wheels.main()
    made = {"new-3.11.whl", "new-3.12.whl", "new.tar.gz"}
    assert {path.name for path in out.iterdir()} == {*made, "notes.txt"}
