"""What vLLM asks an attention backend before it builds a model: what it takes, and its classes.

The builder (:mod:`.builder`) makes one batch per step and group of layers, which holds what the
layers share. The implementation (:mod:`.layer`) is one per layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from .admission import USUAL_BLOCK, engine_reasons
from .builder import LiteAttentionBuilder
from .layer import ATTENTION_TYPES, LiteAttentionImpl


class LiteAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM's registry holds under ``CUSTOM``, and what it may be used for.

    Sizes and dtypes are the engine's to judge, by the platform's device; the flags here are what
    the backend as a whole does. Whatever is not named (MLA, sparse attention, ALiBi, decode
    context parallelism, ...) is refused by vLLM with these declarations.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    #: The layer calls ``do_kv_cache_update`` before ``forward``.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enum that stands for this backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LiteAttentionImpl]:
        """Return the implementation's class."""
        return LiteAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LiteAttentionBuilder]:
        """Return the builder's class."""
        return LiteAttentionBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any page size: pages are looked up token by token."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's cache spec as it is; vLLM asks when it sizes the caches.

        Raises:
            ValueError: keys and values are of different head dims.
        """
        if spec.head_size_v != spec.head_size:
            raise ValueError(
                "liteattention_rocm: keys and values must have one head dim, this model's have "
                f"{spec.head_size} and {spec.head_size_v}: use another --attention-backend"
            )
        return spec

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Any order in memory; first those in which a head's tokens of a block lie together.

        On a CPU decoding from them takes 0.5 to 0.8 of the time, as prefetchers follow a head.
        """
        together = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
        return (*together, *(layout for layout in KVCacheLayout if layout not in together))

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks: one more logit per head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders that keep no cache (embeddings, rerankers), and cross-attention.

        vLLM computes the encoders of encoder-decoders by other backends.
        """
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Decoders whose rows see all keys of their request, by step."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Prompts in which the tokens of an image see each other (Gemma 3, PaliGemma, Molmo 2)."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: plans rest on the lengths that the host knows."""
        return False

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Say everything against a layer, by vLLM's keywords.

        An encoder keeps no cache: block size 0. :meth:`supports_combination` is not told the kind.
        """
        if asked.get("attn_type") == AttentionType.ENCODER_ONLY:
            asked["block_size"] = 0
        reasons: list[str] = super().validate_configuration(**asked)
        return reasons

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Say everything the engine of this platform has against it; None when nothing.

        Block size 0 is no cache, None one that vLLM has not decided on.
        """
        reasons = engine_reasons(
            q_heads=1,
            kv_heads=1,
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype or "auto",
            block_size=USUAL_BLOCK if block_size is None else block_size,
            sinks=has_sink,
        )
        return "; ".join(reasons) or None
