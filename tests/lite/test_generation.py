"""The state of a request in SGLang's video plugin, without SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liteattention_rocm import SkipPolicy
from liteattention_sglang.generation import Generation

pytestmark = pytest.mark.usefixtures("limit")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_layers_in_a_ring_and_layers_by_themselves_are_both_reported(group: Any) -> None:
    request = Generation(SkipPolicy(threshold=-1.0), 3)
    q, k, v = torch.randn(3, 1, 300, 2, 32, generator=torch.Generator().manual_seed(0)).abs()
    k[:, 64:] *= -1  # all keys but the first block's are negligible
    for step in range(3):
        position: dict[str, Any] = {"step": step, "negative": False, "scale": None}
        request.attend(q, k, v, layer="alone", out=torch.empty_like(q), **position)
        request.attend_ring(q, k, v, layer="ring", group=group, **position)
    assert list(request.lists()) == ["alone/cond", "ring/cond/0"]
    layers = request.report(["r"])["records"]
    assert {record["layer"] for record in layers} == {"alone", "ring"}
    # One rank's ring is the whole, so both made the same lists.
    lists = request.lists()
    assert torch.equal(lists["alone/cond"], lists["ring/cond/0"])
    alone, ring = (
        [r["tiles_computed"] for r in layers if r["layer"] == name] for name in ("alone", "ring")
    )
    assert alone == ring and alone[-1] < alone[0]
