"""What `bench video --gpus` says if a process never comes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed (extra: diffusers)")

from liteattention_benchmark import video, video_ranks

from . import missing_rank

SMOKE = Path(video.__file__).parent / "configs" / "wan-smoke.yaml"


def test_a_process_that_never_comes_ends_all_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = video_ranks.start_processes
    monkeypatch.setattr(
        video_ranks, "start_processes", lambda _, **options: start(missing_rank.work, **options)
    )
    with pytest.raises(video_ranks.Failed, match=r"(?s)process 0 of 2 failed:.*Timed out waiting"):
        video_ranks._run(video.load(SMOKE), 2, "ulysses", "cpu", tmp_path, lambda rows: None)
