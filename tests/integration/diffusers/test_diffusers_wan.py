"""The state matrix on a Wan pipeline: what a run reads, and that nothing leaks between runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName

import liteattention_diffusers
from liteattention_diffusers import disable, enable
from liteattention_diffusers.layers import Layer
from liteattention_e2e import pixel_vae, tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE, footprint

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)
DENSE = SkipPolicy(enabled=False)
either_rule = pytest.mark.parametrize(
    "policy", [SKIPPING, SkipPolicy(budget=0.02, warmup_steps=0)], ids=["threshold", "budget"]
)


def run_under(pipe: Any, generate: Any, policy: SkipPolicy, **changes: Any) -> np.ndarray:
    with enable(pipe, policy, geometry=TILE):
        return generate(pipe, **changes)


def by_step(handle: Any, run: int | None = None) -> list[tuple[int, str, str, int]]:
    run = handle.run if run is None else run
    return [
        (row["step"], row["layer"], row["branch"], row["tiles_computed"])
        for row in handle.statistics.to_records()
        if row["generation"] == run
    ]


def test_dense_is_as_close_to_float64_as_diffusers_own_attention(generate: Any) -> None:
    exact = tiny.wan_pipeline(peaked=1.5, dtype=torch.float64)
    own = tiny.wan_pipeline(peaked=1.5)
    truth = generate(exact)
    error_own = np.abs(generate(own) - truth).max()
    error_ours = np.abs(run_under(own, generate, DENSE) - truth).max()
    assert 0 < error_ours <= 2 * error_own


@pytest.mark.parametrize("limit", [{"threshold": -math.inf}, {"budget": 0.0}], ids=str)
def test_a_rule_that_keeps_everything_is_bit_equal_to_dense(
    pipe: Any, generate: Any, limit: dict[str, float]
) -> None:
    dense = run_under(pipe, generate, DENSE)
    kept = run_under(pipe, generate, SkipPolicy(warmup_steps=0, **limit))
    assert np.array_equal(dense, kept)


@either_rule
def test_skips_grow_by_step_in_every_layer_and_branch(
    pipe: Any, generate: Any, policy: SkipPolicy
) -> None:
    dense = run_under(pipe, generate, DENSE)
    with enable(pipe, policy, geometry=TILE) as handle:
        frames = generate(pipe)
        seen: dict[tuple[str, str], list[int]] = {}
        for step, layer, branch, computed in by_step(handle):
            assert step == len(seen.setdefault((layer, branch), []))
            seen[layer, branch].append(computed)
        assert handle.layers == ("blocks.0.attn1", "blocks.1.attn1")
        assert set(seen) == {(name, cfg) for name in handle.layers for cfg in ("cond", "uncond")}
        for counts in seen.values():
            assert counts[0] == 2 * 16 * 8  # heads x q blocks x K blocks: all, on the first step
            assert all(b <= a for a, b in itertools.pairwise(counts))
            assert counts[-1] < counts[0]
        # Text first matters after the cross-attention of block 0.
        last = [handle.kept_tiles("blocks.1.attn1", branch) for branch in ("cond", "uncond")]
        assert not torch.equal(*last)
        kept = handle.kept_tiles("blocks.0.attn1", "cond")
        assert kept.shape == (1, 2, 16, 8) and kept.dtype == torch.bool
        handle.statistics.clear()
        assert torch.equal(handle.kept_tiles("blocks.0.attn1", "cond"), kept)
    assert 0 < np.abs(frames - dense).max() < 0.5


@either_rule
def test_two_runs_are_bit_equal_and_do_not_share_lists(
    pipe: Any, generate: Any, policy: SkipPolicy
) -> None:
    with enable(pipe, policy, geometry=TILE) as handle:
        first = generate(pipe)
        second = generate(pipe)
        assert np.array_equal(first, second)
        assert handle.run == 2
        assert by_step(handle, 1) == by_step(handle, 2)


def test_without_guidance_there_is_one_branch(pipe: Any, generate: Any) -> None:
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        generate(pipe, guidance_scale=1.0)
        assert {row["branch"] for row in handle.statistics.to_records()} == {"cond"}


class Boom(RuntimeError):
    pass


@either_rule
@pytest.mark.parametrize("fail_at", range(4))
def test_run_after_an_exception_is_right(
    pipe: Any, generate: Any, fail_at: int, policy: SkipPolicy
) -> None:
    expected = run_under(pipe, generate, policy)

    def fail(_: Any, step: int, *__: Any) -> Any:
        if step == fail_at:
            raise Boom
        return {}

    with enable(pipe, policy, geometry=TILE) as handle:
        with pytest.raises(Boom):
            generate(pipe, callback_on_step_end=fail)
        assert np.array_equal(generate(pipe), expected)
        assert handle.run == 2


def test_run_after_an_exception_inside_a_layer_is_right(pipe: Any, generate: Any) -> None:
    expected = run_under(pipe, generate, SKIPPING)
    feed_forward = pipe.transformer.blocks[1].attn1.to_out[0]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise Boom

    with enable(pipe, SKIPPING, geometry=TILE):
        hook = feed_forward.register_forward_pre_hook(fail)
        with pytest.raises(Boom):
            generate(pipe)
        hook.remove()
        assert np.array_equal(generate(pipe), expected)


def test_run_after_a_resolution_change_is_right(pipe: Any, generate: Any) -> None:
    small = run_under(pipe, generate, SKIPPING)
    large = run_under(pipe, generate, SKIPPING, height=48, width=64)
    with enable(pipe, SKIPPING, geometry=TILE):
        assert np.array_equal(generate(pipe), small)
        assert np.array_equal(generate(pipe, height=48, width=64), large)
        assert np.array_equal(generate(pipe), small)


def test_fewer_steps_begin_a_new_run(pipe: Any, generate: Any) -> None:
    short = run_under(pipe, generate, SKIPPING, num_inference_steps=2)
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        generate(pipe)
        assert np.array_equal(generate(pipe, num_inference_steps=2), short)
        assert max(step for step, *_ in by_step(handle)) == 1


def test_disable_leaves_nothing_behind(pipe: Any, generate: Any) -> None:
    untouched = footprint(pipe)
    handle = enable(pipe, SKIPPING, geometry=TILE)
    assert footprint(pipe) != untouched
    disable(pipe)
    assert footprint(pipe) == untouched
    assert not handle.enabled
    before = generate(pipe)
    after_a_run = footprint(pipe)
    with enable(pipe, SKIPPING, geometry=TILE):
        assert not np.array_equal(generate(pipe), before)
    assert footprint(pipe) == after_a_run
    assert np.array_equal(generate(pipe), before)


def test_a_handle_that_cannot_be_resumed_stays_paused(
    pipe: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because of processors that were set meanwhile, or of anything else."""

    class Plain:
        def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return hidden_states

    generate(pipe)  # its pipeline then has all attributes that a run leaves on it
    own = footprint(pipe)
    policy = SkipPolicy(threshold=-2.0, warmup_steps=0)
    with enable(pipe, policy, geometry=TILE) as handle:
        want, layers = generate(pipe), handle.layers
        handle.pause()
        modules = [pipe.transformer.get_submodule(name) for name in layers]
        processors = [module.processor for module in modules]
        for module in modules[1:]:
            module.processor = Plain()
        with pytest.raises(ValueError, match="cannot resume: ") as refused:
            handle.resume()
        assert [name in str(refused.value) for name in layers] == [False] + [True] * len(layers[1:])
        for module, processor in zip(modules, processors, strict=True):
            module.processor = processor
        assert not handle.enabled and footprint(pipe) == own

        init, made = Layer.__init__, []

        def fails(*args: Any, **kwargs: Any) -> None:
            made.append(args)
            if len(made) == len(layers):
                raise RuntimeError("gone")
            init(*args, **kwargs)

        with monkeypatch.context() as broken:
            broken.setattr(Layer, "__init__", fails)
            with pytest.raises(RuntimeError, match="gone"):
                handle.resume()
        assert not handle.enabled and handle.layers == layers and footprint(pipe) == own

        handle.resume()
        assert handle.enabled and np.array_equal(generate(pipe), want)
    assert footprint(pipe) == own


def test_disable_keeps_a_backend_chosen_before(pipe: Any, generate: Any) -> None:
    block = pipe.transformer.blocks[0]
    block.attn1.set_attention_backend("_native_math")
    block.attn2.set_attention_backend("_native_math")
    generate(pipe)
    before = footprint(pipe)
    with enable(pipe, SKIPPING, geometry=TILE):
        assert block.attn2.processor._attention_backend == "_native_math"
        generate(pipe)
    assert block.attn1.processor._attention_backend == "_native_math"
    assert footprint(pipe) == before


def test_shared_processor_is_not_taken_from_cross_attention(pipe: Any, generate: Any) -> None:
    shared = pipe.transformer.blocks[0].attn1.processor
    pipe.transformer.set_attn_processor(shared)
    expected = run_under(tiny.wan_pipeline(peaked=1.5), generate, SKIPPING)
    with enable(pipe, SKIPPING, geometry=TILE):
        assert pipe.transformer.blocks[0].attn2.processor is shared
        assert shared._attention_backend is None
        assert np.array_equal(generate(pipe), expected)
    assert all(block.attn1.processor is shared for block in pipe.transformer.blocks)


def test_cross_attention_keeps_diffusers_own_attention(pipe: Any, generate: Any) -> None:
    lengths = set()
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lengths.add((query.shape[-2], key.shape[-2]))
        return original(query, key, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        run_under(pipe, generate, SKIPPING)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    text = tiny.TEXT_LENGTH
    assert lengths == {(text, text), (512, text)}  # the text encoder and cross-attention


def test_works_with_first_block_cache(pipe: Any, generate: Any) -> None:
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.9))
        cached = generate(pipe, num_inference_steps=8)
        first = [row for row in by_step(handle) if row[1] == "blocks.0.attn1"]
        second = [row for row in by_step(handle) if row[1] == "blocks.1.attn1"]
        assert len(first) == 16
        assert 2 <= len(second) < 16  # the cache skipped whole blocks, and they did not call
        assert np.array_equal(generate(pipe, num_inference_steps=8), cached)
        pipe.transformer.disable_cache()
        plain = generate(pipe)
    assert np.array_equal(plain, run_under(pipe, generate, SKIPPING))


def test_several_pipelines_do_not_mix(generate: Any) -> None:
    pipes = [tiny.wan_pipeline(peaked=1.5, seed=seed) for seed in (0, 1)]
    policies = [SKIPPING, SkipPolicy(threshold=-1.0, warmup_steps=0)]
    expected = [
        run_under(pipe, generate, policy) for pipe, policy in zip(pipes, policies, strict=True)
    ]
    inner: list[np.ndarray] = []

    def run_the_other(_: Any, step: int, *__: Any) -> Any:
        inner.append(generate(pipes[1]))
        return {}

    with (
        enable(pipes[0], policies[0], geometry=TILE) as first,
        enable(pipes[1], policies[1], geometry=TILE) as second,
    ):
        outer = generate(pipes[0], callback_on_step_end=run_the_other)
        assert np.array_equal(outer, expected[0])
        assert all(np.array_equal(frames, expected[1]) for frames in inner)
        assert (first.run, second.run) == (1, 4)


def test_pipelines_in_two_threads_do_not_mix(generate: Any) -> None:
    pipes = [tiny.wan_pipeline(peaked=1.5, seed=seed) for seed in (0, 1)]
    expected = [run_under(pipe, generate, SKIPPING) for pipe in pipes]
    with (
        enable(pipes[0], SKIPPING, geometry=TILE),
        enable(pipes[1], SKIPPING, geometry=TILE),
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(3):
            made = list(pool.map(generate, pipes))
            assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True))


def test_one_transformer_in_two_threads_is_refused(pipe: Any, generate: Any) -> None:
    """One after the other they are right, also after the error and after a run that died."""
    other = copy.copy(pipe)
    other.scheduler = copy.deepcopy(pipe.scheduler)
    step = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> dict[str, Any]:
        with contextlib.suppress(threading.BrokenBarrierError):
            step.wait()
        return {}

    def both(which: Any) -> Any:
        try:
            return generate(which, callback_on_step_end=meet)
        finally:
            step.abort()

    def dies(which: Any) -> Any:
        def end(*_: Any) -> dict[str, Any]:
            raise KeyError("no more")

        with pytest.raises(KeyError):
            generate(which, callback_on_step_end=end)

    alone = generate(pipe), run_under(pipe, generate, SKIPPING)
    with (
        enable(pipe, SKIPPING, geometry=TILE),
        ThreadPoolExecutor(1, "one") as one,
        ThreadPoolExecutor(1, "two") as two,
    ):
        runs = [one.submit(both, pipe), two.submit(both, other)]
        errors = [str(run.exception()) for run in runs if run.exception() is not None]
        assert errors and all("and that has not ended" in error for error in errors)
        assert "thread 'one_0'" in errors[0] and "thread 'two_0'" in errors[0]
        for thread in (two, one, two):
            assert np.array_equal(thread.submit(generate, pipe).result(), alone[1])
            one.submit(dies, pipe).result()
    assert not np.array_equal(*alone)


def test_transformer_alone_takes_the_steps_of_the_pipeline(pipe: Any, generate: Any) -> None:
    expected = run_under(pipe, generate, SKIPPING)
    with enable(pipe.transformer, SKIPPING, geometry=TILE) as handle:
        assert np.array_equal(generate(pipe), expected)
        assert np.array_equal(generate(pipe), expected)
        assert handle.run == 2


def test_reset_forgets_lists_and_statistics(pipe: Any, generate: Any) -> None:
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        frames = generate(pipe)
        handle.reset()
        assert handle.statistics.to_records() == []
        with pytest.raises(KeyError):
            handle.kept_tiles("blocks.0.attn1", "cond")
        assert np.array_equal(generate(pipe), frames)


def test_by_name_it_is_the_dense_kernel_everywhere(pipe: Any, generate: Any) -> None:
    own = generate(pipe)
    name = liteattention_diffusers.BACKEND_NAME
    seen: set[tuple[int, int]] = set()
    original = liteattention_diffusers.backend.attention

    def spy(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.add((q.shape[1], k.shape[1]))
        return original(q, k, *args, **kwargs)

    active = footprint(pipe)[0]
    try:
        liteattention_diffusers.backend.attention = spy
        pipe.transformer.set_attention_backend(name)
        ours = generate(pipe)
    finally:
        liteattention_diffusers.backend.attention = original
        pipe.transformer.reset_attention_backend()
        liteattention_diffusers.backend.dispatch._AttentionBackendRegistry.set_active_backend(
            active
        )
    assert seen == {(512, 512), (512, tiny.TEXT_LENGTH)}
    np.testing.assert_allclose(ours, own, atol=1e-5)
    assert np.array_equal(generate(pipe), own)


def test_enable_on_top_of_the_name(pipe: Any, generate: Any) -> None:
    registry = liteattention_diffusers.backend.dispatch._AttentionBackendRegistry
    active = registry._active_backend
    try:
        pipe.transformer.set_attention_backend(liteattention_diffusers.BACKEND_NAME)
        by_name = generate(pipe)
        assert np.array_equal(run_under(pipe, generate, DENSE), by_name)
        assert np.array_equal(generate(pipe), by_name)
    finally:
        registry.set_active_backend(active)


@pytest.mark.parametrize("shared", [False, True], ids=["own processors", "shared processors"])
@pytest.mark.parametrize("cross_attention", [False, True])
@pytest.mark.parametrize("name", [liteattention_diffusers.BACKEND_NAME, "_native_math", None])
def test_a_backend_set_while_enabled_is_refused_and_stays(
    pipe: Any, generate: Any, name: str | None, cross_attention: bool, shared: bool
) -> None:
    registry = liteattention_diffusers.backend.dispatch._AttentionBackendRegistry
    active = registry._active_backend
    blocks = pipe.transformer.blocks
    if shared:  # of self-attention alone, so that no other layer has the processor itself
        for block in blocks:
            block.attn1.processor = blocks[0].attn1.processor
    blocks[0].attn1.set_attention_backend("native")
    before = [block.attn1.processor for block in blocks]
    try:
        handle = enable(pipe, SKIPPING, geometry=TILE, cross_attention=cross_attention)
        if name is None:
            pipe.transformer.reset_attention_backend()
        else:
            pipe.transformer.set_attention_backend(name)
        with pytest.raises(RuntimeError, match=r"blocks.0.attn1 .* backend is now .*disable\(\)"):
            generate(pipe)
        plain = copy.deepcopy(pipe.transformer)
        handle.disable()
        for model in (plain, pipe.transformer):
            layers = [layer for block in model.blocks for layer in (block.attn1, block.attn2)]
            assert {layer.processor._attention_backend for layer in layers} == {name}
        assert all(block.attn1.processor is own for block, own in zip(blocks, before, strict=True))
        after = generate(pipe)
        run_under(pipe, generate, SKIPPING)
        assert np.array_equal(generate(pipe), after)
    finally:
        registry.set_active_backend(active)


def test_processors_kept_while_enabled_have_the_backend_from_before(
    pipe: Any, generate: Any
) -> None:
    """Layers that share a processor get copies of it, and somebody may keep those."""
    blocks = pipe.transformer.blocks
    own = [block.attn1.processor for block in blocks]
    try:
        for block in blocks:
            block.attn1.processor = blocks[0].attn1.processor
        plain = generate(pipe)
        with enable(pipe, SKIPPING, geometry=TILE):
            kept = [block.attn1.processor for block in blocks]
            assert all(each is not own[0] for each in kept)
        for block, each in zip(blocks, kept, strict=True):
            assert each._attention_backend is None
            block.attn1.processor = each
        assert np.array_equal(generate(pipe), plain)
    finally:
        for block, each in zip(blocks, own, strict=True):
            block.attn1.processor = each


@pytest.mark.parametrize(
    "name", [liteattention_diffusers.BACKEND_NAME, liteattention_diffusers.backend.ENABLED_NAME]
)
def test_a_call_does_not_come_back_to_itself(name: str) -> None:
    """Cross-attention of a layer that had our backend before, by either of its names: dense."""
    backend, note = liteattention_diffusers.backend, liteattention_diffusers.note
    q, k, v = torch.randn(3, 1, 16, 2, 64)
    note.enter(None, AttentionBackendName(name))
    try:
        out = backend._liteattention(q, k, v)
    finally:
        note.leave()
    assert torch.equal(out, backend.attention(q, k, v))


def test_registering_again_changes_nothing() -> None:
    before = list(AttentionBackendName)
    member = liteattention_diffusers.register()
    assert member is AttentionBackendName("liteattention_rocm")
    assert AttentionBackendName.LITEATTENTION_ROCM is member  # type: ignore[attr-defined]
    assert list(AttentionBackendName) == before
    assert member in before


def test_frames_of_a_bf16_pipeline(generate: Any) -> None:
    pipe = tiny.wan_pipeline(peaked=1.5, dtype=torch.bfloat16)
    dense = run_under(pipe, generate, DENSE)
    assert np.array_equal(
        run_under(pipe, generate, SkipPolicy(threshold=-math.inf, warmup_steps=0)), dense
    )
    assert np.abs(dense - generate(pipe)).max() < 0.1


def test_pipeline_num_frames_gives_the_frames_asked_for(pipe: Any, generate: Any) -> None:
    frames = generate(pipe, num_frames=pixel_vae.pipeline_num_frames(5), num_inference_steps=1)
    assert frames.shape == (5, 32, 32, 3)
