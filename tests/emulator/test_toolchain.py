"""Where machine code comes from: the right release of LLVM, or what is stored, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from liteattention_emulator import llvm, native, snippet

from . import toolchain
from .conftest import VARIANTS, missing

OLD = """#!/bin/sh
echo "Debian LLVM version {release}.0.6"
[ "$1" = --version ] || echo "wrong machine code" >> "$0.ran"
"""


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, release: int) -> Path:
    path = folder / name
    path.write_text(OLD.format(release=release))
    path.chmod(0o755)
    return path


def test_another_release_is_not_taken(bin: Path) -> None:
    path = install(bin, "llvm-mc", 14)
    with pytest.raises(llvm.ToolMissing, match=r"llvm-mc is of release 14.*install llvm-19"):
        llvm.find("llvm-mc")
    with pytest.raises(native.EmulatorError, match="llvm-mc of LLVM 19 or newer is missing"):
        snippet.assemble("s_endpgm")
    assert not path.with_suffix(".ran").exists()


def test_the_release_decides_not_the_name(bin: Path) -> None:
    install(bin, "llvm-mc-19", 14)
    plain = install(bin, "llvm-mc", 19)
    assert llvm.find("llvm-mc") == str(plain)
    newer = install(bin, "llvm-nm", 21)
    assert llvm.find("llvm-nm", newer=True) == str(newer)
    with pytest.raises(llvm.ToolMissing, match="is of release 21"):
        llvm.find("llvm-nm")
    (bin / "clang++").write_text("#!/bin/sh\n")
    (bin / "clang++").chmod(0o755)
    with pytest.raises(llvm.ToolMissing, match=r"names no release.*install clang-19"):
        llvm.find("clang++")


def test_no_program_at_all(bin: Path) -> None:
    with pytest.raises(native.EmulatorError, match=r"is missing \(Debian: apt-get install llvm-19"):
        snippet.assemble("s_endpgm")


def store(path: Path, mode: str) -> toolchain.Store:
    out = toolchain.Store("none.json", bytes.hex, bytes.fromhex)
    out.path, out.mode = path, mode
    out._text = {"kept": "01"}
    return out


def never() -> bytes:
    raise AssertionError("LLVM is not asked")


def test_what_is_not_stored_is_said_with_the_command_that_adds_it(tmp_path: Path) -> None:
    stored = store(tmp_path / "s.json", "stored")
    assert stored.get("kept", "kept", never) == b"\x01"
    with pytest.raises(pytest.fail.Exception, match="--machine-code=update") as error:
        stored.get("new", "v_mov_b32 v0, v1", never)
    assert "v_mov_b32 v0, v1" in str(error.value) and "s.json" in str(error.value)
    assert stored.finish() == [] and not stored.path.exists()


def test_compare_finds_changes_and_leftovers(tmp_path: Path) -> None:
    stored = store(tmp_path / "s.json", "compare")
    with pytest.raises(pytest.fail.Exception, match=r"is not in s\.json"):
        stored.get("new", "new", lambda: b"\x02")
    assert stored.finish() == ["kept"]
    assert stored.get("kept", "kept", lambda: b"\x01") == b"\x01"
    assert stored.finish() == [] and not stored.path.exists()
    elsewhere = store(tmp_path / "s.json", "compare")
    elsewhere.note(stored.asked())
    assert elsewhere.finish() == []
    changed = store(tmp_path / "s.json", "compare")
    changed._text["kept"] = "03"
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(toolchain, "compiler", lambda: "clang 19")
        with pytest.raises(pytest.fail.Exception, match="make machine-code"):
            changed.get("kept", "kept", lambda: b"\x01")


def test_update_adds(tmp_path: Path) -> None:
    stored = store(tmp_path / "s.json", "update")
    assert stored.get("new", "new", lambda: b"\x02") == b"\x02"
    stored.finish()
    assert stored.path.read_text() == '{\n"kept": "01",\n"new": "02"\n}\n'


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_emulator_is_tried_on(variant: str) -> None:
    if problem := missing(variant):
        pytest.skip(f"{problem}: none of its tests is collected")
