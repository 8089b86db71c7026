"""Calls of enabled layers that do not reach LiteAttention are counted, and said once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import WanAnimate2Transformer3DModel, WanTransformer3DModel
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from liteattention_diffusers import enable, reach
from liteattention_rocm import SkipPolicy

TIMES = (900.0, 600.0, 300.0)
POLICY = SkipPolicy(threshold=-4.0, warmup_steps=0)
LAYERS = ("blocks.0.attn1", "blocks.1.attn1")


class ByTorch(WanAttnProcessor):
    """Attends by torch's own function, as many processors from elsewhere do."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kw: Any) -> Any:
        x = attn.to_q(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


class Twice(WanAttnProcessor):
    """Attends to the sequence twice, through the dispatcher."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kw: Any) -> Any:
        x = attn.to_q(hidden_states).unflatten(2, (attn.heads, -1))
        for _ in range(2):
            x = attention_dispatch.dispatch_attention_fn(x, x, x, backend=self._attention_backend)
        return x.flatten(2)


def wan() -> Any:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    ).eval()  # fmt: skip


def step(model: Any, time: float) -> torch.Tensor:
    torch.manual_seed(1)
    x, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 6, 16)
    with torch.no_grad():
        return model(x, torch.tensor([time]), text, return_dict=False)[0]


def steps(model: Any) -> list[torch.Tensor]:
    return [step(model, time) for time in TIMES]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_model_that_is_taken_as_a_whole_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = wan()
    with enable(model, POLICY, engine="reference") as handle:
        steps(model)
        assert handle.calls == {key: {"LiteAttention": 3} for key in LAYERS}
        handle.reset()
        assert handle.calls == {key: {"LiteAttention": 0} for key in LAYERS}
    assert warnings(caplog) == []


def test_a_processor_that_calls_torch_itself(caplog: pytest.LogCaptureFixture) -> None:
    model = wan()
    model.blocks[0].attn1.processor = ByTorch()
    with enable(model, POLICY, engine="reference") as handle:
        before = warnings(caplog)
        assert len(before) == 1 and "blocks.0.attn1" in before[0]
        assert "calls torch's scaled_dot_product_attention itself" in before[0]
        steps(model)
        assert handle.calls == {
            LAYERS[0]: {"LiteAttention": 0, reach.ELSEWHERE: 3},
            LAYERS[1]: {"LiteAttention": 3},
        }
    after = warnings(caplog)[1:]
    assert len(after) == 1 and "'blocks.0.attn1' (" in after[0] and reach.ELSEWHERE in after[0]


def test_a_second_attention_of_a_module(caplog: pytest.LogCaptureFixture) -> None:
    model = wan()
    for block in model.blocks:
        block.attn1.processor = Twice()
    own = steps(model)
    with enable(model, SkipPolicy(threshold=-float("inf")), engine="reference") as handle:
        for ours, theirs in zip(steps(model), own, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert handle.calls == {key: {"LiteAttention": 3, reach.SECOND: 3} for key in LAYERS}
    assert len(warnings(caplog)) == 1 and reach.SECOND in warnings(caplog)[0]


def test_blocks_that_did_not_run_are_counted_and_layers_that_never_came_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a cache leaves out is meant; a layer that no call of a run reaches is said."""
    model = wan()
    with enable(model, POLICY, engine="reference") as handle:
        left_out = model.blocks[1]
        model.blocks[1] = torch.nn.Identity()
        model.blocks[1].forward = lambda x, *args: x
        step(model, TIMES[0])
        model.blocks[1] = left_out
        step(model, TIMES[1])
        assert handle.calls[LAYERS[1]] == {"LiteAttention": 1, reach.NOT_RUN: 1}
        assert warnings(caplog) == []
        model._diffusers_hook.reset_stateful_hooks(recurse=False)  # as a pipeline ends its run
        assert warnings(caplog) == []
        model.blocks[1] = torch.nn.Identity()
        model.blocks[1].forward = lambda x, *args: x
        steps(model)
        model._diffusers_hook.reset_stateful_hooks(recurse=False)
        model.blocks[1] = left_out
    assert len(warnings(caplog)) == 1 and "'blocks.1.attn1' (" in warnings(caplog)[0]


def test_compiled_blocks_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = wan()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    with enable(model, POLICY, engine="reference") as handle:
        steps(model)
        assert handle.calls == {key: {"LiteAttention": 3} for key in LAYERS}
    assert warnings(caplog) == []
    torch._dynamo.reset()


def test_a_backend_in_the_processor(caplog: pytest.LogCaptureFixture) -> None:
    """Wan-Animate 2 attends by FlexAttention in every step but the pass over its reference."""
    torch.manual_seed(0)
    model = WanAnimate2Transformer3DModel(
        patch_size=(1, 2, 2), text_len=16, in_dim=36, dim=64, ffn_dim=64, freq_dim=32,
        text_dim=24, out_dim=16, num_heads=2, num_layers=2, cross_attn_norm=True, use_img_emb=True,
    ).eval()  # fmt: skip
    size, text, clip = 8, [torch.randn(6, 24)], torch.randn(1, 3, 1280)
    given = {
        "encoder_hidden_states": text,
        "encoder_hidden_states_image": clip,
        "kv_cache": WanAnimate2KVCache(2),
    }
    with torch.no_grad(), enable(model, POLICY, engine="reference") as handle:
        said = warnings(caplog)
        assert len(said) == 1 and "AttentionBackendName.FLEX" in said[0] and "1 more" in said[0]
        model(
            [torch.randn(16, 2, size, size)], timestep=torch.tensor([1.0]), seq_len=2 * 16,
            condition_latents=[torch.randn(20, 2, size, size)], kv_cache_mode="extract",
            offset_grid_sizes=torch.tensor([[2, 4, 4]]), **copy.copy(given),
        )  # fmt: skip
        for time in TIMES:
            model(
                [torch.randn(16, 3, size, size)], timestep=torch.tensor([time]), seq_len=3 * 16,
                condition_latents=[torch.randn(20, 3, size, size)], kv_cache_mode="cached",
                reference_grid_sizes=torch.tensor([[2, 4, 4]]), origin_len=5,
                origin_area=[size * 8, size * 8], **given,
            )  # fmt: skip
        counts = set(map(str, handle.calls.values()))
        assert counts == {str({"LiteAttention": 1, reach.ELSEWHERE: 3})}
    after = warnings(caplog)[1:]
    assert len(after) == 1 and all(name in after[0] for name in handle.calls)


def test_what_enable_knows_is_said_by_class() -> None:
    assert reach.promises(WanAttnProcessor()) == []
    assert reach.promises(Twice()) == []
    assert reach.promises(ByTorch()) == ["calls torch's scaled_dot_product_attention itself"]
    assert reach.promises(object()) == []
