"""The attention backend that SGLang's diffusion workers run.

Importing this module hooks the end of pipeline stages (:mod:`.diffusion_stages`) and SGLang's ring
attention (:mod:`.diffusion_layer`), to know whose keys go round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

from . import BACKEND_NAME, diffusion
from .diffusion_layer import LiteAttentionImpl, ring_attention
from .diffusion_stages import run_stage

_RING = "sglang.multimodal_gen.runtime.layers.usp.ring_attn"
_STAGE = "sglang.multimodal_gen.runtime.pipelines_core.stages.base.PipelineStage.__call__"


class LiteAttentionBackend(AttentionBackend):
    """What SGLang asks about the backend."""

    accept_output_buffer = True

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        """Return the member that names this backend."""
        return diffusion.backend()

    @staticmethod
    def get_impl_cls() -> type[LiteAttentionImpl]:
        """Return the class of which every attention layer makes one object."""
        return LiteAttentionImpl

    @classmethod
    def supports_ring_rotation(cls) -> bool:
        """Say that it can: dense parts by their LSE, LiteAttention in a ring of our own."""
        return True

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """There is none of our own: step and request are in the forward context."""
        raise NotImplementedError(f"{BACKEND_NAME} has no attention metadata")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """See :meth:`get_metadata_cls`; SGLang takes the exception for "none"."""
        raise NotImplementedError(f"{BACKEND_NAME} has no attention metadata")


def _hook_runtime() -> None:
    hooks: dict[str, Callable[..., Any]] = {_STAGE: run_stage, _RING: ring_attention}
    for target, function in hooks.items():
        diffusion.hook(target, function, HookType.AROUND)
    HookRegistry.apply_hooks()
    missed = [target for target in hooks if target not in HookRegistry._patched]
    if missed:
        raise RuntimeError(
            f"attention backend {BACKEND_NAME!r} cannot hook {', '.join(missed)}: this "
            "version of SGLang is another than those it knows"
        )


_hook_runtime()
