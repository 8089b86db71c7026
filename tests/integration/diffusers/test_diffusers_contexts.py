"""Layers that are given another sequence, and calls whose attention PyTorch would change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import PRXTransformer2DModel, QwenImageTransformer2DModel
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.models.transformers.transformer_motif_video import MotifVideoTransformer3DModel
from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3DiTModel

import liteattention_diffusers
from liteattention_diffusers import enable
from liteattention_rocm import SkipPolicy, TileGeometry

TILE = TileGeometry(64, 64, 32)
DENSE = SkipPolicy(enabled=False)
SKIPPING = SkipPolicy(threshold=-0.5, warmup_steps=0)
TIMES = (0.9, 0.8, 0.7)


@pytest.fixture(autouse=True)
def _same_weights() -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        yield


def test_text_under_another_name_is_not_taken_for_self_attention() -> None:
    """Stable Audio 3 calls it ``context``: lists of its tiles would change the output."""
    model = StableAudio3DiTModel(
        io_channels=8, embed_dim=64, depth=1, num_heads=2, cond_token_dim=16,
        global_cond_dim=16, timestep_features_dim=32, num_memory_tokens=0,
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm.gamma" in name:
            torch.nn.init.constant_(parameter, 4.0)
    x = torch.randn(1, 8, 1) + 0.1 * torch.randn(1, 8, 128)
    text, whole = torch.randn(1, 4, 16).repeat_interleave(64, 1), torch.randn(1, 16)

    def steps() -> list[torch.Tensor]:
        given = {"encoder_hidden_states": text, "global_hidden_states": whole}
        return [model(x, torch.tensor([t]), **given, return_dict=False)[0] for t in TIMES]

    own = steps()
    with enable(model, SKIPPING, geometry=TILE, exclude=["*self_attn"]) as handle:
        ours = steps()
        assert len(handle.statistics) == 0
    assert all(map(torch.equal, ours, own))


def motif() -> tuple[torch.nn.Module, Any]:
    model = MotifVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=2, text_embed_dim=16, rope_axes_dim=(4, 6, 6),
    ).eval()  # fmt: skip
    latents, text = torch.randn(1, 4, 2, 16, 16), torch.randn(1, 8, 16)

    def steps() -> torch.Tensor:
        given = {"hidden_states": latents, "encoder_hidden_states": text, "return_dict": False}
        return torch.stack([model(timestep=torch.tensor([1000 * t]), **given)[0] for t in TIMES])

    return model, steps


def test_text_and_video_in_one_sequence_are_self_attention() -> None:
    """Motif's single-stream blocks are given the text beside the video, and join them."""
    model, steps = motif()
    own = steps()
    with enable(model, DENSE):
        assert 0 < (steps() - own).abs().max() < 1e-4
    with enable(model, SkipPolicy(threshold=-2.0, warmup_steps=0), geometry=TILE) as handle:
        steps()
        layers = {row["layer"] for row in handle.statistics.by_layer()}
        assert len(handle.layers) == 3 and layers == set(handle.layers)


def test_joined_sequences_compile_to_the_same() -> None:
    model, steps = motif()
    with enable(model, SKIPPING, geometry=TILE) as handle:
        eager, tiles = steps(), handle.statistics.by_layer()
    torch._dynamo.reset()
    for block in model.single_transformer_blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with enable(model, SKIPPING, geometry=TILE) as handle:
        assert torch.equal(steps(), eager)
        assert handle.statistics.by_layer() == tiles
    torch._dynamo.reset()


def test_queries_of_one_sequence_with_keys_of_two_stay_where_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2,
        depth=2, axes_dim=[8, 8],
    ).eval()  # fmt: skip
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 8, 16)

    def steps() -> torch.Tensor:
        given = {"return_dict": False}
        return torch.stack([model(x, torch.tensor([t]), text, **given)[0] for t in TIMES])

    own = steps()
    with enable(model, SkipPolicy(threshold=-2.0, warmup_steps=0)) as handle:
        assert torch.equal(steps(), own) and len(handle.statistics) == 0
    said = [record.message for record in caplog.records if "another sequence" in record.message]
    assert len(said) == 1 and "'blocks.0.attention', 'blocks.1.attention' (" in said[0]


def qwen(*, perturbed: bool = False) -> tuple[torch.nn.Module, Any]:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if perturbed:
        skip = LayerSkipConfig(
            indices=[0, 1], fqn="transformer_blocks", skip_attention=False, skip_ff=False,
            skip_attention_scores=True,
        )  # fmt: skip
        apply_layer_skip(model, skip)
    torch.manual_seed(1)
    image, text = torch.randn(1, 256, 16), torch.randn(1, 32, 32)

    def step() -> torch.Tensor:
        out: torch.Tensor = model(
            hidden_states=image, encoder_hidden_states=text, timestep=torch.tensor([0.5]),
            img_shapes=[[(1, 16, 16)]], encoder_hidden_states_mask=None, return_dict=False,
        )[0]  # fmt: skip
        return out

    return model, step


@pytest.mark.parametrize("way", ["enabled", "by name"])
def test_perturbed_guidance_takes_values_for_attention(way: str) -> None:
    torch.manual_seed(0)
    _, plain = qwen()
    torch.manual_seed(0)
    model, step = qwen(perturbed=True)
    own = step()
    assert (own - plain()).abs().max() > 1
    if way == "enabled":
        with enable(model, DENSE):
            assert torch.equal(step(), own)
    else:
        liteattention_diffusers.register()
        model.set_attention_backend(liteattention_diffusers.BACKEND_NAME)
        assert torch.equal(step(), own)


def test_autocast_says_in_which_dtype_attention_runs() -> None:
    """norm_q and norm_k return fp32 there, beside values of bf16."""
    model, step = qwen()
    with torch.autocast("cpu", torch.bfloat16):
        own = step()
        with enable(model, DENSE):
            ours = step()
    assert ours.dtype == own.dtype == torch.bfloat16
    assert (ours - own).norm() < 0.02 * own.norm()
