"""What SGLang's runner reads of a request's report; without SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from liteattention_e2e.config import Configuration, load_config
from liteattention_e2e.runs import Settings
from liteattention_e2e.sglang_runner import SglangRunner
from liteattention_rocm import SkipPolicy
from liteattention_sglang.generation import Generation


def denoised(policy: SkipPolicy, folder: Path) -> None:
    """Write the report of a request with one layer and two steps."""
    made = Generation(policy, num_steps=2)
    q = torch.randn(1, 256, 2, 64, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        out = torch.empty_like(q)
        made.attend(q, q, q, layer="a", step=step, negative=False, scale=None, out=out)
    made.write(folder / "reports", "e2e1", ["e2e1"])


@pytest.mark.parametrize(
    ("policy", "records", "pictures"),
    [
        (SkipPolicy(threshold=-2.0, warmup_steps=0), 2, ["mine"]),
        (SkipPolicy(threshold=-2.0, warmup_steps=2), 2, []),
        (SkipPolicy(enabled=False), 0, []),
    ],
    ids=["skips", "dense steps only", "off"],
)
def test_a_policy_may_skip_nothing_or_be_off(
    tmp_path: Path, policy: SkipPolicy, records: int, pictures: list[str]
) -> None:
    denoised(policy, tmp_path)
    runner = object.__new__(SglangRunner)  # its own start needs SGLang
    runner._folder, runner.tiles = tmp_path, {}
    mine = Configuration("mine", "lite", policy)
    assert len(runner._skips(mine, "e2e1", keep_tiles=True)) == records
    assert list(runner.tiles) == pictures


@pytest.mark.parametrize("given", [{}, {"keep_tiles": True}, {"keep_tiles": False}], ids=str)
def test_a_run_keeps_tiles_only_where_they_are_wanted(
    tmp_path: Path, given: dict[str, bool]
) -> None:
    policy = SkipPolicy(threshold=-2.0, warmup_steps=0)
    denoised(policy, tmp_path)
    made = SimpleNamespace(
        frames=[np.zeros((16, 16, 3), np.uint8)],
        metrics={"stages": {}, "steps": [1.0, 1.0]},
        peak_memory_mb=0.0,
    )
    runner = object.__new__(SglangRunner)  # its own start needs SGLang
    runner._folder, runner.tiles, runner._count = tmp_path, {}, 0
    runner._generator = SimpleNamespace(generate=lambda sampling_params_kwargs: made)
    runner.config = load_config({"model": "x", "prompts": ["p"]})
    runner.settings = Settings(16, 16, 1, 2, 3.0, None, None)
    run = runner.run(Configuration("mine", "lite", policy), 0, 0, 0, **given)
    assert len(run.skips) == 2
    assert list(runner.tiles) == (["mine"] if given.get("keep_tiles", True) else [])
