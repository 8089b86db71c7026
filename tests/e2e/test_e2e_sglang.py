"""What SGLang's runner reads of a request's report; without SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liteattention_e2e.config import Configuration
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
        (SkipPolicy(threshold=-2.0), 2, ["mine"]),
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
    assert len(runner._skips(Configuration("mine", "lite", policy), "e2e1")) == records
    assert list(runner.tiles) == pictures
