"""What users of diffusers are told: which model is meant, and what helps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import LTXVideoTransformer3DModel
from diffusers.models import attention_dispatch as dispatch

from liteattention_diffusers import enable
from liteattention_e2e import tiny
from liteattention_rocm import SkipPolicy


@pytest.fixture
def ltx() -> Any:
    torch.manual_seed(0)
    return LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=1, caption_channels=32,
    ).eval()  # fmt: skip


@pytest.fixture
def name_of_the_process() -> Iterator[None]:
    """Puts back the process-wide backend, which ``set_attention_backend`` of a model sets."""
    registry = dispatch._AttentionBackendRegistry
    before = registry.get_active_backend()[0]
    yield
    registry.set_active_backend(before)


def call(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        out: torch.Tensor = model(
            hidden_states=torch.randn(1, 32, 8, generator=generator),
            encoder_hidden_states=torch.randn(1, 6, 32, generator=generator),
            timestep=torch.tensor([500.0]),
            encoder_attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]),
            num_frames=2, height=4, width=4, return_dict=False,
        )[0]  # fmt: skip
    return out


@pytest.mark.parametrize("options", [None, {}, {"exclude": ["*.attn2"]}], ids=str)
def test_a_name_that_another_model_chose_is_named_with_what_helps(
    ltx: Any, options: dict[str, Any] | None, name_of_the_process: None
) -> None:
    own = call(ltx)
    tiny.wan_transformer().set_attention_backend("liteattention_rocm")

    def run() -> torch.Tensor:
        if options is None:
            return call(ltx)
        with enable(ltx, SkipPolicy(enabled=False), **options):
            return call(ltx)

    with pytest.raises(ValueError, match="makes this backend that of the whole process") as error:
        run()
    assert "call set_attention_backend('native') on this layer's model" in str(error.value)
    ltx.set_attention_backend("native")  # what the message says
    assert (run() - own).abs().max() < 1e-5


def test_layers_that_attend_to_another_sequence_alone_are_not_listed(ltx: Any) -> None:
    with enable(ltx, SkipPolicy(budget=0.1)) as handle:
        call(ltx)
        assert handle.layers == ("transformer_blocks.0.attn1",)
        assert {row["layer"] for row in handle.statistics.by_layer()} == set(handle.layers)


def test_a_run_broken_off_in_another_thread_names_reset() -> None:
    model = tiny.wan_transformer()
    arguments = (torch.randn(1, model.config.in_channels, 2, 8, 8), torch.tensor([500]))
    text = torch.randn(1, 8, model.config.text_dim)
    failures: list[BaseException] = []
    done = threading.Event()
    begun = threading.Event()

    def begin() -> None:
        with torch.no_grad():
            model(*arguments, text)
        begun.set()
        done.wait(60)  # the thread lives on, as in a pool

    with enable(model, SkipPolicy(budget=0.1)) as handle:
        thread = threading.Thread(target=begin, daemon=True)
        thread.start()
        assert begun.wait(60)
        with torch.no_grad():
            try:
                model(*arguments, text)
            except RuntimeError as error:
                failures.append(error)
            assert "If that run was broken off, call handle.reset() before" in str(failures[0])
            handle.reset()
            model(*arguments, text)
            done.set()
            thread.join()
