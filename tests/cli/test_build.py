"""What is built says which sources it was built from."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
from email import message_from_string
from email.message import Message
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


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """What an index gets, as the backend makes it."""
    folder = tmp_path_factory.mktemp("metadata")
    code = "import sys; sys.path.insert(0, 'cmake'); import liteattention_build as b\n"
    code += f"b.prepare_metadata_for_build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("*/METADATA")
    return message_from_string(file.read_text(encoding="utf-8"))


def test_the_long_description_has_links_that_work_anywhere(metadata: Message) -> None:
    readme, long = (ROOT / "README.md").read_text(), str(metadata.get_payload())
    links = r"""(?:\]\(|\b(?:href|src|srcset)=")([^)"\s]+)"""
    shown, ours = re.findall(links, long), re.findall(links, readme)
    assert len(shown) == len(ours) > 30
    assert [link for link in shown if not re.match(r"https?://|mailto:|#", link)] == []
    home = "https://github.com/liteattention-rocm/liteattention-rocm/blob/HEAD/"
    pictures = "https://raw.githubusercontent.com/liteattention-rocm/liteattention-rocm/HEAD/"
    for link, source in zip(shown, ours, strict=True):
        assert link in (source, home + source, pictures + source)
        if link.startswith((home, pictures)):
            assert (ROOT / source.partition("#")[0]).exists()
            assert link.startswith(pictures) == source.endswith((".png", ".svg", ".gif"))
    assert long.splitlines()[0] == readme.splitlines()[0]


def test_the_project_has_an_address(metadata: Message) -> None:
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())
