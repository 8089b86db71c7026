"""Fixtures of the emulator's tests."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from liteattention_emulator import native, snippet

from . import hip_calls

# `make test-machine-code` installs Triton and runs it.
collect_ignore = [] if find_spec("triton") else ["test_triton.py"]
S_ENDPGM = bytes.fromhex("000081bf")
VARIANTS = ("avx512", "avx2", "portable")
OPTIONS = ("check", "count", "threads", "order", "variant", "steps")


def missing(variant: str) -> str:
    """Why this machine cannot run a variant of the emulator; "" if it can."""
    library = native.functions()
    try:
        if library.lae_set_option(b"variant", variant.encode()) != 0:
            return f"this processor has no {variant}"
        snippet.run(S_ENDPGM, snippet.State())
    except native.EmulatorError as problem:
        return str(problem)
    finally:
        library.lae_set_option(b"variant", b"")
    return ""


AVAILABLE = [name for name in VARIANTS if not missing(name)]


@pytest.fixture(autouse=True)
def default_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees options of the environment or of another test."""
    for name in OPTIONS:
        monkeypatch.delenv(f"LITEATTENTION_EMULATOR_{name.upper()}", raising=False)
    yield
    for name in OPTIONS:
        native.set_option(name, "")


@pytest.fixture(params=AVAILABLE)
def variant(request: pytest.FixtureRequest, default_options: None) -> str:
    """Each variant that this machine can run: test_toolchain.py skips once for each other one."""
    native.set_option("variant", request.param)
    return str(request.param)


@pytest.fixture
def hip() -> Any:
    """The library's HIP functions, without an error from before."""
    return hip_calls.opened()
