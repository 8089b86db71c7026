"""Where the portable engine cannot run: every reason, with or without Triton."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from liteattention_rocm.engines.triton import engine, versions
from liteattention_rocm.lite import once

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    versions._asked.cache_clear()
    yield
    versions._asked.cache_clear()


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


@pytest.mark.parametrize(
    ("found", "compiles"),
    [("3.4.0", False), ("3.5.1", False), ("3.6.0+git9844da95", True), ("3.10.0", True)],
)
def test_old_tritons_run_plain_kernels_on_hopper_and_the_log_says_so(
    found: str, compiles: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton 3.5's Gluon has other functions than the Hopper kernels call."""
    module = types.ModuleType("triton")
    module.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    module.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(engine, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert versions.compiles_hopper() == compiles
    assert engine.PortableEngine._hopper(torch.device("cuda:0")) == compiles
    if found == "3.5.1":
        assert engine.PortableEngine().geometry(128).k_block == 64  # the plain kernel's
        once.warn_once.cache_clear()
        versions.warn_of_plain_kernels()
        (record,) = caplog.records
        assert "Triton 3.5 does not compile" in record.message
        assert "install Triton 3.6 or newer (PyTorch 2.10 or newer)" in record.message


@pytest.mark.parametrize(
    ("found", "tile"), [("3.6.0", (2, 64, 4)), ("3.8.0", (6, 64, 2)), ("3.10.0", (6, 64, 2))]
)
def test_decoding_steps_are_cut_for_the_programs_that_this_triton_fits(
    found: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """72 requests of 4,096 bf16 keys, 8 key heads x 128, on an H200: parts, keys and warps.

    With 3.8, two parts take 0.336 ms and six 0.303.
    """
    pytest.importorskip("triton")
    from liteattention_rocm.engines.triton import ragged_cut

    module = types.ModuleType("triton")
    module.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    module.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    assert ragged_cut._decode_cut(72 * 8, 132, 2, 128, 64) == tile
    # e4m3: the same tiles with every version
    assert ragged_cut._decode_cut(16 * 8, 132, 1, 128, 128) == (4, 128, 2)


def test_every_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reasons = engine.PortableEngine().unavailable(CPU)
    assert len(reasons) == 2
    assert "pip install triton" in reasons[0] and "runs on GPU tensors" in reasons[1]
