"""The software MI300X, for all tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liteattention_emulator import library, set_option
from liteattention_rocm.engines import LIBRARY_VARIABLE


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """It is this test's HIP run-time, and its checkers are on: a finding fails the call."""
    path = str(library())
    monkeypatch.setenv(LIBRARY_VARIABLE, path)
    set_option("check", "on")
    yield path
    set_option("check", "")
