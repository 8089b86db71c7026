"""Models that are not Wan: other branch names, steps from the scheduler, joint attention, masks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    HeunDiscreteScheduler,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
    UNet2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.hooks.hooks import CacheContext
from transformers import T5Config, T5EncoderModel

from liteattention_diffusers import enable
from liteattention_diffusers.clock import MOST_CALLS, Clock
from liteattention_diffusers.discovery import find
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy, TileGeometry

from .diffusers_cases import TILE

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)
DENSE = SkipPolicy(enabled=False)


def peaked(model: torch.nn.Module) -> Any:
    """Make self-attention look at like tokens, so that tiles can be skipped."""
    with torch.no_grad():
        for layer in find(model):
            module: Any = layer.module
            if layer.name.endswith("attn2"):
                continue
            module.to_k.load_state_dict(module.to_q.state_dict())
            module.norm_q.weight.mul_(2)
            module.norm_k.weight.mul_(2)
    return model.eval()


@pytest.fixture
def ltx() -> LTXPipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
            cross_attention_dim=32, num_layers=2, caption_channels=32,
        )  # fmt: skip
        vae = AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        )
        words = tiny.tokenizer()
        text = T5EncoderModel(
            T5Config(vocab_size=len(words), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        )
    pipe = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text.eval(),
        tokenizer=words,
        transformer=peaked(model),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_ltx(pipe: LTXPipeline, **changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "prompt": "a red circle moves left on a blue background",
        "height": 256,
        "width": 256,
        "num_frames": 41,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "generator": torch.Generator().manual_seed(0),
        "max_sequence_length": tiny.TEXT_LENGTH,
        "output_type": "latent",
    }
    arguments.update(changes)
    return pipe(**arguments).frames


def test_ltx_takes_its_steps_from_the_scheduler(ltx: LTXPipeline) -> None:
    own = run_ltx(ltx)
    with enable(ltx, DENSE):
        dense = run_ltx(ltx)
    torch.testing.assert_close(dense, own, atol=1e-4, rtol=1e-4)
    with enable(ltx, SKIPPING, geometry=TILE) as handle:
        first = run_ltx(ltx)
        assert torch.equal(run_ltx(ltx), first)
        records = handle.statistics.to_records()
        assert {row["generation"] for row in records} == {1, 2}
        # LTX batches both guidance branches into one call, and gives it one name.
        assert {row["branch"] for row in records} == {"cond_uncond"}
        # attn2 gets the text in each call and its mask: it stays where it was.
        assert {row["layer"] for row in records} == {
            "transformer_blocks.0.attn1",
            "transformer_blocks.1.attn1",
        }
        for run in (1, 2):
            steps = [row["step"] for row in records if row["generation"] == run]
            assert sorted(set(steps)) == [0, 1, 2, 3]
        sparsity = [row["sparsity"] for row in handle.statistics.by_step()]
        assert sparsity[0] == 0.0 and sparsity[-1] > 0.01
    assert not torch.equal(first, dense)
    assert torch.equal(run_ltx(ltx), own)


def test_ltx_after_an_exception(ltx: LTXPipeline) -> None:
    def fail(_: Any, step: int, *__: Any) -> Any:
        raise RuntimeError("stop")

    with enable(ltx, SKIPPING, geometry=TILE):
        expected = run_ltx(ltx)
    with enable(ltx, SKIPPING, geometry=TILE) as handle:
        with pytest.raises(RuntimeError, match="stop"):
            run_ltx(ltx, callback_on_step_end=fail)
        assert torch.equal(run_ltx(ltx), expected)
        assert handle.run == 2


def test_another_pipeline_with_the_transformer_is_counted_by_its_timesteps(
    ltx: LTXPipeline,
) -> None:
    """Before the first run of the one that is enabled, and after one: its scheduler rests."""
    enabled, other = (
        LTXPipeline(**{**ltx.components, "scheduler": FlowMatchEulerDiscreteScheduler()})
        for _ in range(2)
    )
    for pipe in (enabled, other):
        pipe.set_progress_bar_config(disable=True)
    with enable(ltx.transformer, SKIPPING, geometry=TILE):
        six = run_ltx(other, num_inference_steps=6)
        four = run_ltx(enabled)
    enabled.scheduler = FlowMatchEulerDiscreteScheduler()
    with enable(enabled, SKIPPING, geometry=TILE) as handle:
        for _ in range(2):
            assert torch.equal(run_ltx(other, num_inference_steps=6), six)
            assert torch.equal(run_ltx(enabled), four)
        seen = sorted({(row["generation"], row["step"]) for row in handle.statistics.to_records()})
    lengths = enumerate((6, 4, 6, 4), 1)
    assert seen == [(run, step) for run, steps in lengths for step in range(steps)]
    from_the_end = SkipPolicy(threshold=-2.0, last_step=-2, warmup_steps=0)
    with enable(enabled, from_the_end, geometry=TILE):
        run_ltx(enabled)
        with pytest.raises(ValueError, match="last_step -2 counts from the end: give num_steps"):
            run_ltx(other)


@torch.no_grad()
def test_a_loop_of_ones_own_is_counted_by_the_scheduler() -> None:
    """It may have set the timesteps before the pipeline was enabled."""
    pipe = tiny.wan_pipeline(peaked=1.5)
    pipe.scheduler.set_timesteps(3)
    with enable(
        pipe, SkipPolicy(threshold=-2.0, last_step=-2, warmup_steps=0), geometry=TILE
    ) as handle:
        for timestep in pipe.scheduler.timesteps:
            inputs = wan_inputs(float(timestep))
            out = pipe.transformer(**inputs, return_dict=False)[0]
            pipe.scheduler.step(out, timestep, inputs["hidden_states"])
        records = handle.statistics.to_records()
    assert {(row["step"], row["dense"]) for row in records} == {(0, False), (1, False), (2, True)}


def wan_inputs(timestep: float) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(int(timestep))
    return {
        "hidden_states": torch.randn(1, 12, 8, 16, 16, generator=noise),
        "timestep": torch.tensor([timestep]),
        "encoder_hidden_states": torch.randn(1, 4, 32, generator=noise),
    }


@torch.no_grad()
def test_bare_transformer_counts_timesteps_and_calls() -> None:
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        for _ in range(2):
            for timestep in (900.0, 500.0, 100.0):
                for _ in ("cond", "uncond"):
                    model(**wan_inputs(timestep))
        records = handle.statistics.to_records()
    seen = {(row["generation"], row["step"], row["branch"]) for row in records}
    assert seen == {
        (run, step, branch) for run in (1, 2) for step in (0, 1, 2) for branch in ("call0", "call1")
    }


@torch.no_grad()
def test_bare_transformer_ends_a_run_when_its_hooks_are_reset() -> None:
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        # The second run starts at a later step than the first one ended, as after a run that was
        # broken off: only the pipeline's reset at the end of a run tells them apart.
        for steps in ((0, 1), (3, 4)):
            for step in steps:
                with model.cache_context("cond", step_index=step, num_inference_steps=5):
                    model(**wan_inputs(500.0))
            model._reset_stateful_cache()
        records = handle.statistics.to_records()
    assert {(row["generation"], row["step"]) for row in records} == {(1, 0), (1, 1), (2, 3), (2, 4)}
    first_of_run = [row for row in records if row["step"] in (0, 3)]
    assert all(row["tiles_computed"] == row["tiles_total"] for row in first_of_run)


@torch.no_grad()
def test_bare_transformer_counts_from_0_after_a_reset() -> None:
    """Also where timesteps go on falling, so that they do not tell a new run."""
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SkipPolicy(threshold=-2.0, warmup_steps=1), geometry=TILE) as handle:
        for timestep in (999.0, 900.0, 800.0):
            with model.cache_context("cond"):
                model(**wan_inputs(timestep))
            model._reset_stateful_cache()
        records = handle.statistics.to_records()
    assert {(row["generation"], row["step"]) for row in records} == {(1, 0), (2, 0), (3, 0)}
    assert all(row["dense"] for row in records)


def test_a_timestep_for_each_frame_is_watched() -> None:
    """As in SkyReels V2, whose scheduler never steps: its pipeline has a timestep for each."""
    now = torch.tensor([999.0, 999.0, 999.0])
    scheduler = SimpleNamespace(timesteps=torch.tensor([999.0, 500.0]), step_index=None)
    pipeline = mock.Mock(scheduler=scheduler, _current_timestep=now)
    clock = Clock(pipeline)
    assert not clock.has_steps
    seen = []
    for timestep in (999.0, 500.0, 999.0):
        for _ in ("cond", "uncond"):
            clock.watch(0, torch.full((3,), timestep))
            found = clock.locate(None)
            seen.append((found.run, found.step, found.branch))
    assert seen == [
        (run, step, branch)
        for run, step in ((1, 0), (1, 1), (2, 0))
        for branch in ("call0", "call1")
    ]


def test_skyreels_v2_skips_from_step_to_step() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wan = tiny.wan_pipeline()
        size = wan.transformer.config
        model = SkyReelsV2Transformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=size.in_channels,
            out_channels=size.out_channels, text_dim=size.text_dim, freq_dim=32, ffn_dim=32,
            num_layers=1, patch_size=tuple(size.patch_size),
        ).eval()  # fmt: skip
        vae = AutoencoderKLWan(
            base_dim=8, z_dim=size.in_channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.0] * size.in_channels, latents_std=[1.0] * size.in_channels,
        )  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = SkyReelsV2DiffusionForcingPipeline(
        tokenizer=wan.tokenizer, text_encoder=wan.text_encoder, transformer=model, vae=vae,
        scheduler=scheduler,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        for _ in range(2):
            pipe(
                prompt="a red circle", height=64, width=64, num_frames=17, num_inference_steps=3,
                max_sequence_length=tiny.TEXT_LENGTH, output_type="latent",
            )  # fmt: skip
        records = handle.statistics.to_records()
    assert {(row["generation"], row["step"], row["branch"]) for row in records} == {
        (run, step, branch) for run in (1, 2) for step in range(3) for branch in ("cond", "uncond")
    }


@pytest.fixture(scope="module")
def video_to_video() -> WanVideoToVideoPipeline:
    """Shares its scheduler with :func:`tiny.wan_pipeline`'s, as ``from_pipe`` does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wan = tiny.wan_pipeline(peaked=1.5)
        channels = wan.transformer.config.in_channels
        vae = AutoencoderKLWan(
            base_dim=8, z_dim=channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.0] * channels, latents_std=[1.0] * channels,
        )  # fmt: skip
    pipe = WanVideoToVideoPipeline(
        tokenizer=wan.tokenizer, text_encoder=wan.text_encoder, transformer=wan.transformer,
        vae=vae, scheduler=wan.scheduler,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def change_a_video(pipe: Any, strength: float) -> None:
    pipe(
        prompt="a red circle", height=32, width=32, num_inference_steps=5, strength=strength,
        latents=torch.randn(1, 12, 4, 16, 16, generator=torch.Generator().manual_seed(0)),
        max_sequence_length=tiny.TEXT_LENGTH, output_type="latent",
    )  # fmt: skip


@pytest.mark.parametrize("enabled", ["itself", "the one it was made from"])
@pytest.mark.parametrize(
    ("limits", "dense"),
    [
        ({"warmup_steps": 2}, [True, True, False]),
        ({"last_step": -2}, [False, False, True]),
        ({"threshold": (-math.inf, -math.inf, -2.0), "last_step": 1}, [False, False, True]),
    ],
    ids=["first", "last", "by step"],
)
def test_steps_count_from_the_first_that_a_video_to_video_run_executes(
    video_to_video: WanVideoToVideoPipeline, enabled: str, limits: dict[str, Any], dense: list[bool]
) -> None:
    """At strength 0.6 three of five steps are executed: those of a run are 0, 1 and 2."""
    pipe = video_to_video
    if enabled != "itself":
        text = {name: part for name, part in pipe.components.items() if name != "vae"}
        pipe = WanPipeline(**text, vae=video_to_video.vae)
    with enable(
        pipe, SkipPolicy(**{"threshold": -2.0, "warmup_steps": 0, **limits}), geometry=TILE
    ) as handle:
        for strength in (0.6, 1.0, 0.6):
            change_a_video(video_to_video, strength)
        records = handle.statistics.to_records()
    seen = {(row["generation"], row["step"]): row["dense"] for row in records}
    for run in (1, 3):
        assert {step: seen[run, step] for step in range(3)} == dict(enumerate(dense))
    assert sorted(seen) == [
        (run, i) for run, steps in ((1, 3), (2, 5), (3, 3)) for i in range(steps)
    ]


def at_steps(clock: Clock, scheduler: Any, indices: list[int | None]) -> list[tuple[int, int]]:
    """Run and step of calls where the scheduler is at these indices."""
    found = []
    for index in indices:
        scheduler.step_index = index
        position = clock.locate(None)
        found.append((position.run, position.step))
    return found


def test_a_pipeline_may_say_where_in_the_schedule_it_begins() -> None:
    """As those from image to image do, before the scheduler's first step."""
    scheduler = SimpleNamespace(timesteps=torch.arange(9.0).flip(0), begin_index=4, step_index=None)
    pipeline = mock.Mock(scheduler=scheduler, _current_timestep=None)
    clock = Clock(pipeline)
    scheduler.timesteps = torch.arange(9.0).flip(0)
    assert at_steps(clock, scheduler, [None, None, 5, 6]) == [(1, 0), (1, 0), (1, 1), (1, 2)]
    assert clock.locate(None).num_steps == 5
    clock.end_run()  # by hand, amid the steps: the schedule goes on
    assert at_steps(clock, scheduler, [7, 8]) == [(2, 3), (2, 4)]


def test_a_run_that_is_first_seen_amid_its_steps_keeps_the_numbers_of_its_schedule() -> None:
    """Its first step is not the first that is seen: Wan 2.2's second transformer, enabled alone."""
    scheduler = SimpleNamespace(timesteps=torch.arange(9.0).flip(0), begin_index=0, step_index=None)
    pipeline = mock.Mock(scheduler=scheduler, _current_timestep=None)
    clock = Clock(pipeline)
    for begins in (0, None):
        scheduler.begin_index, scheduler.timesteps = begins, torch.arange(9.0).flip(0)
        assert [step for _, step in at_steps(clock, scheduler, [3, 4])] == [3, 4]


def test_of_equal_timesteps_a_run_begins_at_the_second_as_its_scheduler_does() -> None:
    scheduler = HeunDiscreteScheduler()
    scheduler.set_timesteps(4)
    pipeline = mock.Mock(scheduler=scheduler, _current_timestep=None)
    clock = Clock(pipeline)
    scheduler.set_timesteps(4)  # seven: all but the first come twice
    sample = torch.zeros(2)
    steps = []
    for timestep in scheduler.timesteps[2:]:
        pipeline._current_timestep = timestep
        steps.append(clock.locate(None).step)
        assert clock.locate(None).num_steps == 5
        scheduler.step(sample, timestep, sample)
    assert steps == [0, 1, 2, 3, 4]


def test_a_scheduler_without_an_index_is_asked_for_the_timestep() -> None:
    """As DDIM's in CogVideoX from video to video."""
    scheduler = DDIMScheduler()
    pipeline = mock.Mock(scheduler=scheduler, _current_timestep=None)
    clock = Clock(pipeline)
    for _ in range(2):
        scheduler.set_timesteps(5)
        found = []
        for pipeline._current_timestep in scheduler.timesteps[2:]:
            found.append(clock.locate(None))
        assert [(each.step, each.num_steps) for each in found] == [(0, 3), (1, 3), (2, 3)]
    assert found[-1].run == 2
    clock.end_run()  # by hand, amid the steps
    assert (clock.locate(None).run, clock.locate(None).step) == (3, 2)


def test_exclude_is_a_sequence_of_patterns() -> None:
    with pytest.raises(TypeError, match=r"exclude must be a sequence.*use \['blocks.0.attn1'\]"):
        enable(tiny.wan_transformer(), SKIPPING, exclude="blocks.0.attn1")


def test_every_pattern_that_matches_no_layer_is_refused() -> None:
    model = tiny.wan_transformer(layers=3)
    by_layer = {"transformer.blocks.0.*": -math.inf, "*.attn2": -8.0, "blocks.2.*": -4.0}
    policy = SkipPolicy(threshold=-6.0, layer_thresholds=by_layer, warmup_steps=0)
    with pytest.raises(ValueError) as error:
        enable(model, policy, exclude=["blocks.1", "blocks.1.*", "block.*"], engine="warp")
    for part in (
        "unknown engine 'warp'",  # with all else that is wrong
        "'blocks.1' in exclude, 'block.*' in exclude, 'transformer.blocks.0.*' in "
        "layer_thresholds, '*.attn2' in layer_thresholds (the layers are blocks.0.attn1 to "
        "blocks.2.attn1)",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no self-attention layer: 'block\.0' in layer_budgets"):
        enable(model, SkipPolicy(budget=0.0, layer_budgets={"block.0": 0.1}, warmup_steps=0))
    with enable(model):  # nothing was taken
        pass


@pytest.mark.parametrize("exclude", [["*.attn2"], ["blocks.2.*"], ["blocks.0.attn1"]], ids=str)
def test_patterns_may_name_what_is_left_alone_anyhow(exclude: list[str]) -> None:
    """Cross-attention is, and a policy may have more patterns than an exclusion leaves layers."""
    policy = SkipPolicy(
        threshold=-6.0, layer_thresholds={"blocks.[02].attn1": -8.0, "*": -4.0}, warmup_steps=0
    )
    with enable(tiny.wan_transformer(layers=3), policy, exclude=exclude) as handle:
        assert not set(exclude) & set(handle.layers)
    off = SkipPolicy(
        enabled=False, layer_thresholds={"transformer.*": -1.0}, threshold=-6.0, warmup_steps=0
    )
    with enable(tiny.wan_transformer(), off):  # no pattern of it is looked up
        pass


def test_one_policy_serves_both_transformers_of_a_pipeline() -> None:
    """A pattern that matches a layer of either is no mistake; one that matches neither is."""
    pipe = tiny.wan_pipeline()
    pipe.register_modules(transformer_2=tiny.wan_transformer(layers=1))
    by_layer = {"blocks.1.*": 0.1, "transformer_2.blocks.0.attn1": 0.2}
    policy = SkipPolicy(budget=0.0, layer_budgets=by_layer, warmup_steps=0)
    with enable(pipe, policy, exclude=["transformer_2.*"]) as handle:
        assert handle.layers == ("blocks.0.attn1", "blocks.1.attn1")
    with enable(pipe, policy) as handle:
        assert handle.layers[-1] == "transformer_2.blocks.0.attn1"
    with pytest.raises(ValueError) as error:
        enable(pipe, policy, exclude=["transformer_2.blocks.1.*"])
    names = "blocks.0.attn1 to blocks.1.attn1, transformer_2.blocks.0.attn1"
    assert f"'transformer_2.blocks.1.*' in exclude (the layers are {names})" in str(error.value)
    with pytest.raises(ValueError, match=r"'transformer_2\.blocks\.0\.attn1' in layer_budgets"):
        enable(pipe.transformer, policy)


@torch.no_grad()
def test_a_policy_that_is_set_afterwards_must_match_layers() -> None:
    model = tiny.wan_transformer()
    with enable(model, SKIPPING, geometry=TILE) as handle:
        model(**wan_inputs(900.0))
        handle.lite.policy = SkipPolicy(
            threshold=-2.0, layer_thresholds={"block.0.*": -9.0}, warmup_steps=0
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'block\.0\.\*' in layer_thresholds \(the lay"):
                model(**wan_inputs(500.0))
        handle.lite.policy = SkipPolicy(
            threshold=-2.0, layer_thresholds={"blocks.0.*": -9.0}, warmup_steps=0
        )
        model(**wan_inputs(500.0))
        assert handle.policy.layer_thresholds == {"blocks.0.*": -9.0}


def test_a_transformer_with_two_names_is_taken_once() -> None:
    pipe = tiny.wan_pipeline()
    pipe.register_modules(transformer_2=pipe.transformer)
    with enable(pipe, SKIPPING) as handle:
        assert handle.layers == ("blocks.0.attn1", "blocks.1.attn1")
    with enable(pipe.transformer, SKIPPING):
        pass


@torch.no_grad()
def test_joint_attention_without_a_mask() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peaked(
            FluxTransformer2DModel(
                in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16,
                num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
            )
        )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 256, 8, generator=torch.Generator().manual_seed(1)),
        "encoder_hidden_states": torch.randn(1, 32, 32),
        "pooled_projections": torch.randn(1, 32),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(16.0)),
        "txt_ids": torch.zeros(32, 3),
    }
    text_of = inputs["encoder_hidden_states"]
    own = model(timestep=torch.tensor([1.0]), **inputs).sample
    with enable(model, SKIPPING, geometry=TILE) as handle:
        assert handle.layers == ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
        first = model(timestep=torch.tensor([1.0]), **inputs).sample
        torch.testing.assert_close(first, own, atol=1e-4, rtol=1e-4)
        model(timestep=torch.tensor([0.5]), **inputs)
        rows = handle.statistics.by_step()
        assert [row["tiles_total"] for row in rows] == [2 * 2 * 9 * 5] * 2
        for branch, text in (("short", 32), ("long", 200)):  # each has keys of its own
            inputs["encoder_hidden_states"] = torch.randn(1, text, 32)
            inputs["txt_ids"] = torch.zeros(text, 3)
            with model.cache_context(branch):
                model(timestep=torch.tensor([0.2]), **inputs)
        kept = [handle.kept_tiles(handle.layers[0], branch) for branch in ("short", "long")]
        assert [tuple(one.shape) for one in kept] == [(1, 2, 9, 5), (1, 2, 15, 8)]
    inputs["encoder_hidden_states"], inputs["txt_ids"] = text_of, torch.zeros(32, 3)
    assert torch.equal(model(timestep=torch.tensor([1.0]), **inputs).sample, own)


@torch.no_grad()
def test_joint_attention_with_a_mask_raises_and_can_be_excluded() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
            num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1,
            guidance_embeds=False, text_embed_dim=16, pooled_projection_dim=8,
            rope_axes_dim=(4, 4, 8),
        ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "pooled_projections": torch.randn(1, 8),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    }
    own = model(**inputs).sample
    with (
        enable(model, DENSE) as handle,
        pytest.raises(ValueError, match=r"takes no attention mask.*exclude"),
    ):
        model(**inputs)
    assert torch.equal(model(**inputs).sample, own)
    assert handle.layers == ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
    with enable(model, DENSE, exclude=["transformer_blocks.*"]) as handle:
        assert handle.layers == ("single_transformer_blocks.0.attn",)
    with pytest.raises(ValueError, match="all of it is excluded"):
        enable(model, DENSE, exclude=["*attn"])


def test_vace_layers_are_found_by_structure() -> None:
    model = WanVACETransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=12, out_channels=12, text_dim=32,
        freq_dim=32, ffn_dim=32, num_layers=2, vace_layers=[0], vace_in_channels=12,
    )  # fmt: skip
    assert {layer.name for layer in find(model)} == {
        "blocks.0.attn1",
        "blocks.1.attn1",
        "vace_blocks.0.attn1",
    }


def test_model_outside_the_dispatcher_is_refused() -> None:
    model = UNet2DModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    with pytest.raises(ValueError, match="no self-attention of transformer goes through"):
        enable(model)


def test_every_unsupported_layer_is_listed_at_once() -> None:
    model = tiny.wan_transformer(layers=3, head_dim=36)
    with pytest.raises(ValueError) as error:
        enable(model, engine="cpu")
    for index in range(3):
        assert f"layer blocks.{index}.attn1: engine 'cpu': head dim must be" in str(error.value)
    assert "got 36" in str(error.value)


def test_wrong_arguments_are_reported_together() -> None:
    with pytest.raises(TypeError) as error:
        enable(object(), policy="fast", geometry=(128, 64, 32))  # type: ignore[arg-type]
    for part in ("SkipPolicy, got str", "TileGeometry, got tuple", "transformer, got object"):
        assert part in str(error.value)


def test_enabling_twice_is_refused() -> None:
    model = tiny.wan_transformer()
    with enable(model), pytest.raises(ValueError, match=r"already enabled: disable\(\) it first"):
        enable(model)
    from liteattention_diffusers import disable

    with pytest.raises(ValueError, match="not enabled"):
        disable(model)


@torch.no_grad()
def test_backend_changed_behind_the_handle_raises() -> None:
    model = tiny.wan_transformer()
    with enable(model, geometry=TileGeometry(32, 64, 16)):
        model.blocks[0].attn1.set_attention_backend("native")
        with pytest.raises(RuntimeError, match=r"blocks.0.attn1 .* call disable\(\) before"):
            model(**wan_inputs(500.0))


@torch.no_grad()
def test_dropout_and_masks_by_name_raise_with_every_reason() -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError) as error:
        dispatch_attention_fn(
            q, q, q, attn_mask=torch.zeros(8, 8), dropout_p=0.5, backend="liteattention_rocm"
        )
    assert "attn_mask of shape [8, 8]" in str(error.value)
    assert "dropout_p=0.5" in str(error.value)


@torch.no_grad()
def test_by_name_causal_and_gqa_match_sdpa() -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2, 40, 4, 16, generator=noise)
    k, v = torch.randn(2, 2, 40, 2, 16, generator=noise)
    out = dispatch_attention_fn(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True, backend="liteattention_rocm"
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    np.testing.assert_allclose(out.double(), expected, atol=2e-6)


def test_a_run_of_another_length_is_another_run() -> None:
    """What a broken-off run leaves behind, where a transformer is enabled without its pipeline."""
    clock = Clock(None)

    def run(step: int, steps: int | None) -> int:
        return clock.locate(CacheContext("cond", step, steps)).run

    assert [run(0, 20), run(9, 20), run(20, 50), run(21, None), run(22, 50)] == [1, 1, 2, 2, 2]
    clock.end_run()
    assert run(23, 20) == 3


def test_calls_at_one_timestep_are_not_branches_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, seen = Clock(None), []
    for _ in range(2 * MOST_CALLS):
        clock.watch(1, 500.0)
        seen.append(clock.locate(None))
    assert {place.branch for place in seen} == {f"call{i}" for i in range(MOST_CALLS)}
    assert [place.run for place in seen] == [1] * MOST_CALLS + [2] * MOST_CALLS
    assert caplog.text.count("taken for a new run") == 1
