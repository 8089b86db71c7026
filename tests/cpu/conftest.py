"""Fixtures of the CPU engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from liteattention_rocm import engines
from liteattention_rocm.engines import cpu


@pytest.fixture(params=["amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each instruction-set path in turn; skips those that this processor lacks."""
    name: str = request.param
    if name not in cpu.available_isas():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(engines.ISA_VARIABLE, name)
    return name


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small float64 oracles run faster without torch's waiting threads; some tests set more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
