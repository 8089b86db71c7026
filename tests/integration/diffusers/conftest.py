"""Small pipelines of diffusers' own classes, and the calls the tests make on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch

from liteattention_e2e import pixel_vae, tiny

from .diffusers_cases import PROMPT


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    diffusers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _process_wide_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """``model.set_attention_backend`` also sets the process's backend, for all later tests."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def pipe() -> Any:
    """A fresh random Wan pipeline whose attention is peaked enough to skip tiles."""
    return tiny.wan_pipeline(peaked=1.5)


@pytest.fixture
def generate() -> Callable[..., np.ndarray]:
    """Run a Wan pipeline and return its float frames [F, H, W, C]."""

    def call(pipe: Any, **changes: Any) -> np.ndarray:
        arguments: dict[str, Any] = {
            "prompt": PROMPT, "height": 32, "width": 32,
            "num_frames": pixel_vae.pipeline_num_frames(8), "num_inference_steps": 4,
            "guidance_scale": 3.0, "generator": torch.Generator().manual_seed(0),
            "max_sequence_length": tiny.TEXT_LENGTH, "output_type": "np",
        }  # fmt: skip
        arguments.update(changes)
        return pipe(**arguments).frames[0]

    return call
