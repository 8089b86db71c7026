"""``bench video --runtime sglang``: SGLang's own worker denoises, on a CPU.

VENV/bin/python -m pytest tests/serving/sglang_diffusion_bench.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from liteattention_benchmark import video, video_sglang

from .sglang_worker import environment

COMMAND = ("liteattention-rocm", "bench", "video", "--config", "wan-smoke", "--runtime", "sglang")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        env=environment(SGLANG_TORCH_COMPILE_MODE="default"),
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compiled ones show the processes; what is compiled runs as it is in the environment here."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench("--compile", "--eager", "--out", str(folder), "--attention", "fa2",
                 "--attention", "dense", "--attention", "lite")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("`liteattention-rocm bench video"), "SGLang logs into the table"
    found: dict[str, Any] = json.loads((folder / "video.json").read_text())
    return found


def test_every_contender_denoises_and_leaves_out_what_it_was_told_to(
    result: dict[str, Any],
) -> None:
    assert result["complete"]
    names = ["SGLang's torch_sdpa", "ours, dense", "ours, lite 50%"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == [*names, *(f"{name}, compiled" for name in names)]
    for name, row in rows.items():
        assert not row["absent"] and row["finite"], name
        assert len(row["steps"]) == 2 and sum(row["steps"]) == row["seconds"] > 0
        assert row["skipped"] == (pytest.approx(0.5) if "lite" in name else None)


def test_a_backend_that_the_platform_has_not_is_a_row_that_says_so(tmp_path: Path) -> None:
    done = bench("--out", str(tmp_path), "--attention", "cudnn", "--attention", "default")
    assert done.returncode == 0, done.stderr[-3000:]
    absent, own = json.loads((tmp_path / "video.json").read_text())["rows"]
    assert absent["contender"] == "SGLang's torch_cudnn_sdpa" and absent["seconds"] is None
    assert "torch_cudnn_sdpa" in absent["absent"].lower()
    assert own["contender"] == "SGLang's torch_sdpa" and own["seconds"] > 0


def test_what_cannot_run_is_refused_with_every_reason(tmp_path: Path) -> None:
    done = bench("--out", str(tmp_path), "--attention", "flex", "--gpus", "2", "--device", "cpu")
    assert done.returncode == 2
    assert "flex is not in SGLang's runtime" in " ".join(done.stderr.split())
    assert "one GPU" in " ".join(done.stderr.split())


def test_a_process_that_is_killed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = video.load(Path(video.__file__).parent / "configs" / "wan-smoke.yaml")
    monkeypatch.setattr(video_sglang, "_measure", _killed)
    with pytest.raises(RuntimeError, match=r"ended \(exit code -9\) before .*ours, dense"):
        video_sglang.run(config, torch.device("cpu"))


def _killed(*given: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_fails_ends_the_run_with_its_error() -> None:
    config = video.load(Path(video.__file__).parent / "configs" / "wan-smoke.yaml")
    unable = config.model_copy(update={"text_tokens": -1})
    with pytest.raises(RuntimeError, match="Traceback"):
        video_sglang.run(unable, torch.device("meta"))
