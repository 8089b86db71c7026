"""Copies, pickles and saves of enabled pipelines, models and layers are plain ones."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy

from .diffusers_cases import TILE, footprint
from .test_diffusers_models import wan_inputs

SKIPPING = SkipPolicy(threshold=-2.0, warmup_steps=0)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def traces(pipe: Any) -> list[Any]:
    """What `enable` leaves on modules, without the identities that copies cannot share."""
    found = []
    for item in footprint(pipe):
        if isinstance(item, tuple) and isinstance(item[0], int):
            item = item[1:]
        if isinstance(item, tuple) and isinstance(item[1], list):
            # An empty registry is what any run of a pipeline leaves behind.
            item = (item[0], [name for name in item[1] if name != "_diffusers_hook"], *item[2:])
        if item != ([], []):
            found.append(item)
    return found


@every_way
@pytest.mark.parametrize("shared", [False, True], ids=["own processors", "shared processors"])
def test_a_copied_transformer_is_plain(
    way: Any, shared: bool, pipe: Any, generate: Any, caplog: Any
) -> None:
    if shared:
        pipe.transformer.set_attn_processor(pipe.transformer.blocks[0].attn1.processor)
    plain = generate(pipe)
    before = traces(pipe)
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        skipping = generate(pipe)
        with caplog.at_level(logging.WARNING):
            twin = way(pipe.transformer)
        assert "this copy of an enabled WanTransformer3DModel runs without" in caplog.text
        run = handle.run
        original, pipe.transformer = pipe.transformer, twin
        assert np.array_equal(generate(pipe), plain) and handle.run == run
        assert traces(pipe) == before
        with torch.no_grad():  # the weights are its own
            for weight in twin.parameters():
                weight.mul_(0.5)
        pipe.transformer = original
        assert np.array_equal(generate(pipe), skipping) and handle.run == run + 1
    assert traces(pipe) == before


@every_way
def test_a_copy_is_enabled_on_its_own(way: Any, pipe: Any, generate: Any) -> None:
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        frames = generate(pipe)
        twin = way(pipe)
        with enable(twin, SKIPPING, geometry=TILE) as other:
            assert np.array_equal(generate(twin), frames)
            assert other.statistics.to_records() == handle.statistics.to_records()
            assert handle.run == other.run == 1
            assert np.array_equal(generate(pipe), frames)
            assert (handle.run, other.run) == (2, 1)
        assert handle.enabled and not other.enabled


@every_way
def test_a_copied_layer_is_plain_and_brings_nothing_along(way: Any, pipe: Any) -> None:
    module = pipe.transformer.blocks[0].attn1
    x = torch.randn(1, 24, module.to_q.in_features)
    with torch.no_grad(), enable(pipe, SKIPPING):
        twin = way(module)
        assert not twin._forward_hooks and "__reduce_ex__" not in vars(twin)
        # the size of the layer, not of the model
        assert len(pickle.dumps(module)) < len(pickle.dumps(pipe.transformer)) / 4
        got = twin(x)
    assert torch.equal(got, module(x))


def test_saved_to_a_folder(pipe: Any, generate: Any, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}
    with enable(pipe, SKIPPING, geometry=TILE):
        generate(pipe)
        pipe.save_pretrained(tmp_path)
        loaded = type(pipe.transformer).from_pretrained(tmp_path / "transformer")
    after = loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_forward_that_others_replaced_is_kept(pipe: Any, generate: Any) -> None:
    """accelerate's offloading puts its own ``forward`` on a model."""

    class Count(ModelHook):  # type: ignore[misc]
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    add_hook_to_module(pipe.transformer, Count())
    plain = generate(pipe)
    calls = pipe.transformer._hf_hook.calls
    with enable(pipe, SKIPPING, geometry=TILE):
        twin = copy.deepcopy(pipe.transformer)
        before, pipe.transformer = pipe.transformer, twin
        with torch.no_grad():
            for weight in before.parameters():
                weight.zero_()
        assert np.array_equal(generate(pipe), plain)
    assert twin._hf_hook.calls == 2 * calls and before._hf_hook.calls == calls


@torch.no_grad()
def test_a_wrapped_model_runs_and_is_copied() -> None:
    model = tiny.wan_transformer(peaked=1.5)
    with enable(model, SKIPPING, geometry=TILE) as handle:
        wrapped = torch.nn.DataParallel(model)
        for timestep in (900.0, 500.0):
            out = wrapped(**wan_inputs(timestep)).sample
        assert [row["step"] for row in handle.statistics.by_step()] == [0, 1]
        twin = copy.deepcopy(wrapped)
        dense = twin(**wan_inputs(500.0)).sample
    assert torch.equal(dense, model(**wan_inputs(500.0)).sample) and not torch.equal(dense, out)


def test_a_handle_says_why_it_is_not_copied(pipe: Any, generate: Any) -> None:
    with enable(pipe, SKIPPING, geometry=TILE) as handle:
        generate(pipe)
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to one enabled pipeline; copy its statis"):
                way(handle)
        twin = copy.deepcopy(handle.lite)
        layer = handle.layers[0]
        assert torch.equal(twin.lists(layer, "cond", handle.run), handle.lists(layer, "cond"))
        assert copy.deepcopy(handle.statistics).to_records() == handle.statistics.to_records()
