"""What tests of skip state share."""

from __future__ import annotations

import pytest

from . import simulation


@pytest.fixture(params=["threshold", "budget"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with tiles voted on and with tiles weighed."""
    name: str = request.param
    monkeypatch.setattr(simulation, "LIMIT", name)
    return name
