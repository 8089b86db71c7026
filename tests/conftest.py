"""Options and fixtures of all tests."""

from __future__ import annotations

import pytest

from liteattention_rocm.engines import cpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--machine-code",
        choices=("stored", "compare", "update"),
        default="stored",
        help="the emulator's test programs: take the committed machine code (the default); make it "
        "with LLVM 19 and compare; or make it and add it to the committed one",
    )


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each path of the CPU engine on this processor: cpu/test_numerics.py names the others."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, request.param)
    return str(request.param)
