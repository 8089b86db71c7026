"""AITER's Triton attention in the cycle model, beside what was measured of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from liteattention_emulator.timing import replay

from . import clocks, launch, triton_forward

FOLDER = launch.folder()
SOURCE = None if FOLDER is None else triton_forward.source(FOLDER)
pytestmark = [
    pytest.mark.aiter,
    pytest.mark.skipif(SOURCE is None, reason=f"{launch.VARIABLE} is in no whole checkout"),
]


def test_two_workgroups_of_a_cu_take_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    recording, error = triton_forward.record(SOURCE or Path(), 1536)
    assert error < 4e-3
    assert set(recording.workgroups) == {0, 1} and len(recording.waves) == 8
    measured, off = clocks.TRITON
    together = replay(recording).per_matrix
    assert together == pytest.approx(measured, rel=off)
    first = replace(recording, waves=recording.waves[:4], workgroups=())
    alone = replay(first).per_matrix
    assert together is not None and alone is not None and alone > 1.2 * together
