"""Every test begins as a fresh process would: no call is remembered, the environment is unread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liteattention_rocm import engines, remembered


def forget() -> None:
    remembered.forget()
    engines.settings.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()
