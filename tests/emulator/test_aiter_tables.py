"""The program of the tables makes what it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulator.aiter import __main__ as program


def test_a_table_that_cannot_be_made_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_triton(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(program, "folder", lambda: tmp_path)
    monkeypatch.setattr(program, "table_cases", list)
    monkeypatch.setattr(program.clocks, "MODELLED", ())
    monkeypatch.setattr(program.triton_forward, "source", lambda root: tmp_path)
    monkeypatch.setattr(program.triton_forward, "record", without_triton)
    monkeypatch.setattr(program.public_kernel, "folder", lambda: None)
    monkeypatch.setattr(program.bounds, "lines", lambda root: ["the bounds"])
    monkeypatch.setattr(program.whole_tables, "counted", lambda root: ["the counts"])
    monkeypatch.setattr(program.whole_tables, "own", lambda root: ["our launches"])
    with pytest.raises(SystemExit) as end:
        program.main()
    printed = capsys.readouterr().out
    assert end.value.code == 1
    assert "Triton: not made: ModuleNotFoundError: No module named 'triton'" in printed
    for table in ("the bounds", "the counts", "our launches"):
        assert f"\n{table}\n" in printed
