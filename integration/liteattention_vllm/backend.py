"""The three classes that vLLM asks an attention backend for: backend, builder, implementation.

The backend declares what it takes. The builder makes one :class:`PagedBatch` per step and group
of layers, which holds what the layers share: validated once, planned once. The implementation is
one per layer and holds the layer's constants only.

vLLM's cache of a layer is [blocks, Hkv, block, 2 D] in logical order, keys beside values; the
order in memory is vLLM's choice. Keys and values are views of it, nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from liteattention_rocm import PagedBatch, admission, attention_paged, engines, write_kv

from .counters import counters

__all__ = ["LiteAttentionBackend", "LiteAttentionBuilder", "LiteAttentionImpl", "StepMetadata"]

#: Below vLLM's own logger: it is the one that vLLM configures.
logger = init_logger("vllm.liteattention_rocm")

#: Page size to ask an engine about while vLLM has not decided on one.
_USUAL_BLOCK = 16


@dataclass(slots=True)
class StepMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one group share in one step.

    ``batch``: rows, lengths and pages of the requests, all of them causal.
    ``num_actual_tokens``: rows of the step, padding included.
    """

    batch: PagedBatch
    num_actual_tokens: int


class LiteAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM's registry holds under ``CUSTOM``, and what it may be used for.

    Sizes and dtypes are the engine's to judge, by the platform's device; the flags here are what
    the backend as a whole does. Whatever is not named (MLA, sparse attention, ALiBi, decode
    context parallelism, ...) is refused by vLLM with these declarations.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
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
        """Decoders only: encoders keep no cache, and cross-attention is another call."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: plans rest on the lengths that the host knows."""
        return False

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
        """Say everything the engine of this platform has against it; None when nothing."""
        reasons = _engine_reasons(
            q_heads=1,
            kv_heads=1,
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype or "auto",
            block_size=block_size or _USUAL_BLOCK,
            sinks=has_sink,
        )
        return "; ".join(reasons) or None


class LiteAttentionBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a step for one group of layers."""

    #: Calls have not been captured and replayed by vLLM on a GPU yet, so it must not try: it then
    #: captures the pieces between attention layers (PIECEWISE) and calls these eagerly.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        """Validate and remember the step's requests; the first layer's call plans it.

        Raises:
            NotImplementedError: requests of the step are not causal.
        """
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "liteattention_rocm takes no step in which some requests are causal and others "
                "are not: use another --attention-backend for this model"
            )
        if not common.causal:
            raise NotImplementedError(
                "liteattention_rocm serves causal decoders, and this step is not causal (vLLM and "
                "this backend also disagree on what a sliding window hides then): use another "
                "--attention-backend for this model"
            )
        requests = common.num_reqs
        batch = PagedBatch(
            common.query_start_loc[: requests + 1],
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            max_q_len=int(common.max_query_len),  # a NumPy number in chunked local attention
            max_kv_len=common.max_seq_len,
        )
        counters.add(1)
        return StepMetadata(batch, common.num_actual_tokens)


class LiteAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """One attention layer: its constants, and no state between steps."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        """Take the layer's constants as vLLM gives them; ``sinks`` is [num_heads].

        Raises:
            ValueError: the layer asks for what no kernel here does; lists every reason.
        """
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = self._loaded_sinks = sinks
        self._fp8 = _fp8_dtype(kv_cache_dtype)

        reasons = [
            f"it has no option {name} ({value!r})"
            for name, value in unknown.items()
            if value is not None and value is not False
        ]
        if sliding_window is not None and sliding_window < 1:
            reasons.append(f"sliding_window must be at least 1 or None, got {sliding_window}")
        if alibi_slopes is not None:
            reasons.append("it has no ALiBi")
        if attn_type != AttentionType.DECODER:
            reasons.append(f"it has no {attn_type} attention, only decoder attention")
        if sinks is not None and sinks.shape != (num_heads,):
            reasons.append(f"sinks must be [{num_heads}], got {list(sinks.shape)}")
        reasons += _engine_reasons(
            q_heads=num_heads,
            kv_heads=self.num_kv_heads,
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            block_size=_USUAL_BLOCK,
            sinks=sinks is not None,
            window=max(sliding_window or 0, 0),
            soft_cap=self.logits_soft_cap or 0.0,
        )
        if reasons:
            raise ValueError(
                f"liteattention_rocm cannot run this layer: {'; '.join(reasons)} (use another "
                "--attention-backend)"
            )
        chosen = engines.choose(torch.device(current_platform.device_type))
        logger.info_once("liteattention_rocm attends on engine %s.", chosen.name)
        counters.add(0)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Keep the sinks, which are loaded by now, as the kernels want them: fp32 [num_heads].

        Called again when weights are loaded anew, so it starts from the model's own parameter.
        """
        if self._loaded_sinks is not None:
            self.sinks = self._loaded_sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values, [T, Hkv, D] each, into the layer's cache.

        ``slot_mapping`` is int64 [T'] with T' <= T; rows past it are padding, and so are negative
        slots.
        """
        rows = slot_mapping.shape[0]
        if rows != key.shape[0]:
            key, value = key[:rows], value[:rows]
        keys, values = self._views(kv_cache)
        if self._fp8 is None:
            write_kv(key, value, keys, values, slot_mapping)
        else:
            write_kv(
                key,
                value,
                keys,
                values,
                slot_mapping,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
            )
        counters.add(4)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of ``query`` [T, Hq, D] over the cache into ``output`` (same shape).

        Keys and values of the step are in the cache already. Without metadata (profiling) there
        is nothing to attend to, and the output is zeros.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "liteattention_rocm does not quantize its output: turn the fusion of attention "
                "and quantization off (pass_config.fuse_attn_quant)"
            )
        if attn_metadata is None:
            return output.zero_()
        keys, values = self._views(kv_cache)
        attention_paged(
            query,
            keys,
            values,
            attn_metadata.batch,
            causal=True,
            window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            scale=self.scale,
            k_scale=1.0 if self._fp8 is None else layer._k_scale_float,
            v_scale=1.0 if self._fp8 is None else layer._v_scale_float,
            out=output,
        )
        counters.add(2)
        counters.add(3, query.shape[0])
        return output

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [blocks, block, Hkv, D] each, of a cache [blocks, Hkv, block, 2 D]."""
        if self._fp8 is not None:
            kv_cache = kv_cache.view(self._fp8)
        keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
        return keys, values


def _fp8_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Return what an fp8 cache, which vLLM hands out as bytes, really holds."""
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        dtype: torch.dtype = current_platform.fp8_dtype()
        return dtype
    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else None


def _engine_reasons(
    *,
    q_heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    block_size: int,
    sinks: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> list[str]:
    """Ask the engine of this platform whether it takes such a layer."""
    named = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    kv_dtype = _fp8_dtype(kv_cache_dtype) or named.get(kv_cache_dtype, dtype)
    return admission.serving_reasons(
        torch.device(current_platform.device_type),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=block_size,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
