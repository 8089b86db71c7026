"""Fixtures of the CPU engine's tests."""

from __future__ import annotations

import pytest

from liteattention_rocm.engines import cpu


@pytest.fixture(params=["amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each instruction-set path in turn; skips those that this processor lacks."""
    name: str = request.param
    if name not in cpu.available_isas():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(cpu.ISA_VARIABLE, name)
    return name
