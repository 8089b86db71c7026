"""Models that others hook, too: offloaded ones, weights stored in fp8, processors put aside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE
from .test_diffusers_models import wan_inputs

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)


def offload(model: torch.nn.Module) -> None:
    """As accelerate does at the start, and diffusers again at the end of every run."""
    remove_hook_from_module(model)
    add_hook_to_module(model, ModelHook())


@torch.no_grad()
def test_an_offloaded_model_is_watched_in_every_run() -> None:
    model = tiny.wan_transformer(peaked=1.5)
    offload(model)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        for run in (1, 2):
            for timestep in (900.0, 500.0):
                for _ in range(2):
                    model(**wan_inputs(timestep))
            assert handle.run == run
            rows = [
                row for row in handle.statistics.to_records() if row["generation"] == handle.run
            ]
            assert {(row["step"], row["branch"]) for row in rows} == {
                (step, branch) for step in (0, 1) for branch in ("call0", "call1")
            }
            offload(model)
    assert not model._forward_pre_hooks and not hasattr(model, "_diffusers_hook")


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after", "again", "taken off"])
def test_offloading_is_left_as_it_is_found(when: str) -> None:
    class Count(ModelHook):  # type: ignore[misc]
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    model, count = tiny.wan_transformer(), Count()
    plain = model(**wan_inputs(500.0)).sample
    if when != "after":
        add_hook_to_module(model, count)
    handle = enable(model, SKIPPING, geometry=TILE)
    if when == "after":
        add_hook_to_module(model, count)
    elif when != "before":
        remove_hook_from_module(model)
    if when == "again":
        add_hook_to_module(model, count)
    handle.disable()
    assert torch.equal(model(**wan_inputs(500.0)).sample, plain)
    assert count.calls == (when != "taken off")
    remove_hook_from_module(model)
    assert torch.equal(model(**wan_inputs(500.0)).sample, plain)
    assert vars(model).get("forward") in (None, model.forward)
    assert getattr(model.forward, "__func__", None) is type(model).forward


def test_stored_and_offloaded_weights_do_not_say_what_calls_are_like() -> None:
    model = tiny.wan_transformer(peaked=1.5)
    with pytest.raises(ValueError, match="it runs on GPU tensors"):
        enable(model, SKIPPING, engine="portable")
    add_hook_to_module(model, ModelHook())
    enable(model, SKIPPING, engine="portable").disable()
    remove_hook_from_module(model)
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    with torch.no_grad(), enable(model, SKIPPING, geometry=TILE) as handle:
        for timestep in (900.0, 500.0):
            assert model(**wan_inputs(timestep)).sample.isfinite().all()
    assert handle.statistics.sparsity > 0


def test_a_processor_that_was_put_aside_comes_back_as_it_was() -> None:
    model = tiny.wan_transformer()
    before = model.attn_processors
    backends = {name: one._attention_backend for name, one in before.items()}
    handle = enable(model, SKIPPING, geometry=TILE)
    model.set_attn_processor({name: copy.copy(one) for name, one in before.items()})
    handle.disable()
    assert {name: one._attention_backend for name, one in before.items()} == backends
