"""Counters of vLLM's processes, as other processes read them. Without vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from liteattention_vllm import counters, read_statistics


def test_a_file_that_is_being_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process makes its file and gives it its size after that; others may read in between."""
    monkeypatch.setenv(counters.DIRECTORY_VARIABLE, str(tmp_path))
    mine = counters.CallCounters()
    mine.attended(5)
    (tmp_path / "1.vllm-calls").touch()
    found = read_statistics(tmp_path)
    assert list(found) == [os.getpid()] and found[os.getpid()]["attention_rows"] == 5
