"""The software MI300X, for all tests of the engine."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def hole(tmp_path: Path) -> Callable[[int], torch.Tensor]:
    """Make that many bf16 numbers, any number of GiB, that take no memory until written to."""

    def make(numbers: int) -> torch.Tensor:
        with (tmp_path / "hole").open("w+b") as file:
            file.truncate(2 * numbers)
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.bfloat16)

    return make
