"""Options and fixtures of all tests.

Every test begins as a fresh process would: no call is remembered, the environment is unread.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liteattention_rocm import engines, remembered
from liteattention_rocm.engines import cpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--machine-code",
        choices=("stored", "compare", "update"),
        default="stored",
        help="the emulator's test programs: take the committed machine code (the default); make it "
        "with LLVM 19 and compare; or make it and add it to the committed one",
    )


def forget() -> None:
    remembered.forget()
    engines.settings.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest, fresh: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each path of the CPU engine on this processor: cpu/test_numerics.py names the others."""
    monkeypatch.setenv(engines.ISA_VARIABLE, request.param)
    return str(request.param)
