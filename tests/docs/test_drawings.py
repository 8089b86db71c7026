"""The pictures of concepts.md are those that their script draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def drawings() -> Any:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_pictures_are_what_the_script_draws(
    drawings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawings, "HERE", tmp_path)
    for name in ("tiles", "steps", "budget", "order", "contract"):
        getattr(drawings, name)()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in (ROOT / "docs").glob("concept-*.svg")}
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert all(f"]({name})" in page for name in drawn)


def test_a_free_unit_takes_the_next_job(drawings: Any) -> None:
    assert drawings.schedule([3, 1, 1, 4], 2) == [[(0, 3)], [(0, 1), (1, 1), (2, 4)]]
