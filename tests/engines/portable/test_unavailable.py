"""Where the portable engine cannot run: every reason, with or without Triton."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from liteattention_rocm.engines.triton import engine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    engine._without_triton.cache_clear()
    yield
    engine._without_triton.cache_clear()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("3.4.0+rocm7.0", "it needs Triton 3.5 or newer, as PyTorch 2.9 has it, got 3.4.0+rocm7.0"),
        ("3.5.1", ""),
        ("3.10.0", ""),
        ("4.0", ""),
        (None, "it needs Triton, which cannot be imported: "),
    ],
)
def test_the_version_of_triton(
    found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("triton")
    module.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    if found:
        module.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reasons = engine.PortableEngine().unavailable(CPU)
    assert [said[: len(reason)] for said in reasons] == ([reason] if reason else [])


def test_every_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reasons = engine.PortableEngine().unavailable(CPU)
    assert len(reasons) == 2
    assert "pip install triton" in reasons[0] and "runs on GPU tensors" in reasons[1]
