"""A HIP run-time that replays graphs wrongly is named where graphs are captured, and by doctor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from liteattention_benchmark import doctor as command
from liteattention_rocm import collect_env, engines, hip_graphs
from liteattention_rocm.doctor import facts, report
from liteattention_rocm.lite import once


class Library:
    def __init__(self, version: str, emulated: bool = False) -> None:
        self.emulated, self._version = emulated, version

    def version(self) -> str:
        return self._version


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say which run-time is loaded."""
    once.warn_once.cache_clear()

    def use(built: str | None, loaded: Library | None) -> None:
        def library() -> Library:
            if loaded is None:
                raise RuntimeError("no HIP run-time")
            return loaded

        monkeypatch.setattr(torch.version, "hip", built)
        monkeypatch.setattr(engines.get("gfx942"), "library", library)

    return use


@pytest.mark.parametrize(
    ("built", "loaded", "wrong"),
    [
        ("7.2.26015-fc0010cf6a", None, True),
        ("7.1.25424", Library("7.2.53211"), True),  # another run-time than PyTorch was built with
        ("7.2.26015", Library("7.1.25424"), False),
        ("7.1.25424-4179531dcd", None, False),
        ("7.13.26160", Library("7.13.26160"), False),
        ("6.4.43484", Library("6.4.43484"), False),
        ("7.2.26015", Library("7.2.0", emulated=True), False),
        (None, Library("7.2.26015"), False),
    ],
)
def test_series_7_2_is_warned_of(
    rocm: Any, built: str | None, loaded: Library | None, wrong: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rocm(built, loaded)
    with caplog.at_level(logging.WARNING):
        hip_graphs.warn("vLLM")
        hip_graphs.warn("vLLM")
    assert len(caplog.messages) == wrong
    for message in caplog.messages:
        assert message.startswith("vLLM captures graphs: HIP run-time 7.2.")
        assert "ROCm 7.2.0 to 7.2.3" in message and "turn graphs off" in message
    found = report.Report(False, {}, [], {}, [])
    for name in ("_defaults", "_code_objects", "_cases"):
        monkeypatch.setattr(report, name, lambda *_: [])
    report.examine(found, lambda text: None)
    assert [check.status for check in found.checks if check.name == "HIP graphs"] == (
        ["warning"] if wrong else []
    )


def test_a_missing_rocm_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = engines.get("gfx942").unavailable(torch.device("cpu"))
    if not reason or "is not set" not in reason[0]:
        pytest.skip("this machine has a HIP run-time")
    assert command._short(reason[0]) == "no ROCm: no libamdhip64 here"
    (row, *_) = [each for each in facts.services() if each["engine"] == "gfx942"]
    assert row["reasons"] == reason  # the file has what was tried
    damaged = reason[0].replace("No such file or directory", "invalid ELF header", 1)
    assert command._short(damaged) == damaged
    assert not collect_env.no_rocm("it needs Triton")
