"""torch.compile sees one opaque call per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)


@pytest.mark.parametrize("how", ["transformer", "blocks"])
def test_compiled_pipeline_is_one_graph_and_equals_eager(
    pipe: Any, generate: Any, how: str
) -> None:
    torch._dynamo.reset()
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        eager = generate(pipe)
        statistics = handle.statistics.by_step()
        handle.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            if how == "transformer":
                pipe.transformer.compile(fullgraph=True, backend="aot_eager")
            else:
                pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            compiled = generate(pipe)
            again = generate(pipe)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        records = handle.statistics.to_records()
    assert np.array_equal(compiled, eager)
    assert np.array_equal(again, eager)
    assert graphs == 1
    first = [row for row in records if row["generation"] == records[0]["generation"]]
    for step in statistics:
        computed = sum(row["tiles_computed"] for row in first if row["step"] == step["step"])
        assert computed == step["tiles_computed"]


def test_operator_passes_opcheck() -> None:
    model = tiny.wan_transformer()
    with enable(model, geometry=TILE) as handle:
        slot = next(iter(handle._layers)).slot
        q, k, v = torch.randn(3, 1, 64, 2, 32)
        torch.library.opcheck(
            torch.ops.liteattention_layers.self_attention.default,
            (q, k, v, slot, None),
            test_utils=("test_schema", "test_faketensor"),
        )
