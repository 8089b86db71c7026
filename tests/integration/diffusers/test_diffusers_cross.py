"""Cross-attention on our engine, when it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy
from liteattention_rocm.contract import Bound, DenseRequest
from liteattention_rocm.engines.reference import ReferenceEngine

from .diffusers_cases import TILE, footprint

DENSE = SkipPolicy(enabled=False)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(Sq, Skv) of every dense call of the reference engine."""
    seen: list[tuple[int, int]] = []
    bind = ReferenceEngine.bind

    def recorded(self: ReferenceEngine, request: Any, like: Any) -> Bound:
        bound = bind(self, request, like)

        def run(tensors: Any) -> None:
            if type(request) is DenseRequest:
                seen.append((request.q_len, request.kv_len))
            bound(tensors)

        return run

    monkeypatch.setattr(ReferenceEngine, "bind", recorded)
    return seen


def test_cross_attention_is_ours_only_when_asked_for(
    pipe: Any, generate: Any, lengths: list[tuple[int, int]]
) -> None:
    own = generate(pipe)
    with enable(pipe, DENSE, engine="reference"):
        without = generate(pipe, num_inference_steps=1)
    video = lengths[0][0]
    assert set(lengths) == {(video, video)}
    calls = len(lengths)
    lengths.clear()
    before = footprint(pipe)
    with enable(pipe, DENSE, engine="reference", cross_attention=True) as handle:
        first = generate(pipe, num_inference_steps=1)
        assert handle.layers == ("blocks.0.attn1", "blocks.1.attn1")
        assert lengths.count((video, video)) == lengths.count((video, tiny.TEXT_LENGTH)) == calls
        assert len(lengths) == 2 * calls
        all_ours = generate(pipe)
    assert footprint(pipe) == before
    assert 0 < np.abs(first - without).max() < 1e-4
    assert 0 < np.abs(all_ours - own).max() < 1e-4


def test_cross_attention_stays_dense_while_self_attention_skips(
    pipe: Any, generate: Any, lengths: list[tuple[int, int]]
) -> None:
    with enable(
        pipe,
        SkipPolicy(threshold=-2.0, warmup_steps=0),
        geometry=TILE,
        engine="reference",
        cross_attention=True,
    ) as handle:
        generate(pipe)
        layers = {row["layer"] for row in handle.statistics.to_records()}
    assert layers == {"blocks.0.attn1", "blocks.1.attn1"}
    assert {kv for _, kv in lengths} == {tiny.TEXT_LENGTH}


def test_compiled_cross_attention_is_one_graph_and_equals_eager(
    pipe: Any, generate: Any, lengths: list[tuple[int, int]]
) -> None:
    torch._dynamo.reset()
    with enable(pipe, DENSE, engine="reference", cross_attention=True):
        eager = generate(pipe)
        calls = len(lengths)
        torch._dynamo.utils.counters.clear()
        pipe.transformer.compile(fullgraph=True, backend="aot_eager")
        compiled = generate(pipe)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert np.array_equal(compiled, eager) and len(lengths) == 2 * calls


def test_layers_that_the_engine_refuses_are_named() -> None:
    model = tiny.wan_transformer(head_dim=12)
    with pytest.raises(ValueError) as error:
        enable(model, DENSE, engine="cpu", cross_attention=True)
    for layer in ("blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2"):
        assert f"layer {layer}: engine 'cpu': head dim must be" in str(error.value)
    with pytest.raises(ValueError) as error:
        enable(model, DENSE, engine="cpu")
    assert "attn2" not in str(error.value)
