"""Fixtures of the emulator's tests."""

from collections.abc import Iterator

import pytest

from liteattention_emulator import native, snippet

from . import cached


@pytest.fixture(params=["avx512", "avx2", "portable"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each host instruction set that this machine has."""
    library = native.functions()
    if library.lae_set_option(b"variant", request.param.encode()) != 0:
        pytest.skip(f"no {request.param} here")
    try:
        cached.run("s_nop 0", snippet.State())
    except native.EmulatorError as problem:
        library.lae_set_option(b"variant", b"")
        pytest.skip(str(problem))
    yield request.param
    library.lae_set_option(b"variant", b"")
