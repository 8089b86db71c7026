"""What is built says which sources it was built from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from liteattention_rocm import collect_env
from tests import ROOT


def backend(root: Path) -> Any:
    """The build backend of a source tree."""
    spec = importlib.util.spec_from_file_location("b", root / "cmake" / "liteattention_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this checkout, unpacked where no git repository is."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; sys.path.insert(0, 'cmake'); import liteattention_build as b\n"
    code += f"b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture
def no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(collect_env.COMMIT_VARIABLE, raising=False)


@pytest.mark.usefixtures("no_statement")
def test_a_source_archive_carries_the_commit(archive: Path) -> None:
    found = collect_env.source_commit()
    assert found and (archive / "COMMIT").read_text() == f"{found}\n"
    assert backend(archive).commit() == found
    assert not (ROOT / "COMMIT").exists()


@pytest.mark.usefixtures("no_statement")
def test_sources_without_git_say_so_and_can_be_told(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = backend(archive)
    monkeypatch.setattr(module, "CARRIED", archive / "none")
    assert module.commit() == ""
    monkeypatch.setenv(collect_env.COMMIT_VARIABLE, "feed")
    assert module.commit() == "feed"


@pytest.mark.usefixtures("no_statement")
def test_a_wheel_is_built_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = backend(ROOT), []
    monkeypatch.setattr(module.backend, "build_wheel", lambda *words: given.append(words) or "w")
    assert module.build_wheel("out", {"build-dir": "b"}) == "w"
    ((_, settings, _),) = given
    assert settings == {
        "build-dir": "b",
        "cmake.define.LITEATTENTION_COMMIT": collect_env.source_commit(),
    }
    installed = (ROOT / "CMakeLists.txt").read_text()
    assert 'CONTENT "@LITEATTENTION_COMMIT@\\n"' in installed
    assert "/commit.txt DESTINATION liteattention_rocm" in installed
