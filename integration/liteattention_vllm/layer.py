"""What every attention layer of a model holds: its constants, and its sinks in fp32.

vLLM's cache of a layer is [blocks, Hkv, block, 2 D] in logical order, keys beside values; the
order in memory is vLLM's choice. Keys and values are views of it, nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from liteattention_rocm import attention_paged, attention_varlen, engines, write_kv

from .admission import (
    USUAL_BLOCK,
    device,
    drafting_reasons,
    engine_reasons,
    fp8_dtype,
    image_reasons,
)
from .builder import EncoderMetadata, Images, StepMetadata, refresh_sinks
from .counters import LAYERS, WRITES, counters

#: Below vLLM's own logger: it is the one that vLLM configures.
logger = init_logger("vllm.liteattention_rocm")

#: What layers may be: see :meth:`.backend.LiteAttentionBackend.supports_attn_type`.
ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)
#: Scales of keys and values in other caches. No function's work: it is done for every layer.
_UNSCALED: tuple[Any, Any] = (1.0, 1.0)
#: Attribute of a cache that holds the views of it.
_VIEWS = "_liteattention_rocm"


class LiteAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """One attention layer: its constants.

    Sinks that are not fp32 are copied. Owner of the copy: the layer. It stays at its place, where
    graphs read it, and is written anew in every step (:func:`.builder.refresh_sinks`).
    """

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
        self.sinks = sinks if sinks is None else sinks.detach()
        #: The copy and what it is of, where there is one.
        self.copied_sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        if sinks is not None and sinks.dtype != torch.float32:
            self.sinks = torch.zeros_like(sinks, dtype=torch.float32, requires_grad=False)
            self.copied_sinks = self.sinks, sinks.detach()
        self._encodes = attn_type == AttentionType.ENCODER_ONLY
        # vLLM's window reaches both ways where rows see later keys.
        self._lookahead = None if sliding_window is None else sliding_window - 1
        self._fp8 = fp8_dtype(kv_cache_dtype)

        reasons = [
            f"it has no option {name} ({value!r})"
            for name, value in unknown.items()
            if value is not None and value is not False
        ]
        if sliding_window is not None and sliding_window < 1:
            reasons.append(f"sliding_window must be at least 1 or None, got {sliding_window}")
        if alibi_slopes is not None:
            reasons.append("it has no ALiBi")
        if attn_type not in ATTENTION_TYPES:
            reasons.append(f"it has no {attn_type} attention, only {', '.join(ATTENTION_TYPES)}")
        elif attn_type == AttentionType.ENCODER_DECODER and sliding_window is not None:
            reasons.append("it has no sliding window in cross-attention")
        if sinks is not None and sinks.shape != (num_heads,):
            reasons.append(f"sinks must be [{num_heads}], got {list(sinks.shape)}")
        reasons += engine_reasons(
            q_heads=num_heads,
            kv_heads=self.num_kv_heads,
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            block_size=0 if self._encodes else USUAL_BLOCK,
            sinks=sinks is not None,
            window=max(sliding_window or 0, 0),
            soft_cap=self.logits_soft_cap or 0.0,
            lookahead=0 if attn_type == AttentionType.DECODER else self._lookahead,
        )
        reasons += drafting_reasons()
        reasons += image_reasons()
        if reasons:
            raise ValueError(
                f"liteattention_rocm cannot run this layer: {'; '.join(reasons)} (use another "
                "--attention-backend)"
            )
        name = engines.choose(device()).described
        logger.info_once("liteattention_rocm attends on engine %s.", name)
        counters.add(LAYERS)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Copy the sinks, which are loaded by now.

        vLLM does not call this wherever weights change: steps copy them, too.
        """
        if self.copied_sinks is not None:
            refresh_sinks([self.copied_sinks])

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
        slots. An encoder has no cache, and nothing is written.
        """
        if self._encodes:
            return
        rows = slot_mapping.shape[0]
        if rows != key.shape[0]:
            key, value = key[:rows], value[:rows]
        keys, values = vars(kv_cache).get(_VIEWS) or self._view(kv_cache)
        k_scale, v_scale = _UNSCALED if self._fp8 is None else self._scales(layer)
        write_kv(key, value, keys, values, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        counters.add(WRITES)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | EncoderMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of ``query`` [T, Hq, D] over the cache into ``output`` (same shape).

        Keys and values of the step are in the cache already; an encoder has none, and its rows see
        those of their request, ``key`` and ``value`` [T, Hkv, D]. Without metadata (profiling)
        there is nothing to attend to, and the output is zeros.

        Raises:
            NotImplementedError: the output is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "liteattention_rocm does not quantize its output: turn the fusion of attention "
                "and quantization off (pass_config.fuse_attn_quant)"
            )
        if attn_metadata is None:
            return output.zero_()
        if isinstance(attn_metadata, EncoderMetadata):
            return self._encode(query, key, value, attn_metadata, output)
        causal = attn_metadata.causal
        keys, values = vars(kv_cache).get(_VIEWS) or self._view(kv_cache)
        k_scale, v_scale = _UNSCALED if self._fp8 is None else self._scales(layer)
        attention_paged(
            query,
            keys,
            values,
            attn_metadata.batch,
            causal=causal,
            window=self.sliding_window,
            lookahead=None if causal else self._lookahead,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=output,
        )
        if attn_metadata.images is not None:
            self._see_images(query, keys, values, attn_metadata.images, k_scale, v_scale, output)
        counters.attended(query.shape[0])
        return output

    def _see_images(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        images: Images,
        k_scale: Any,
        v_scale: Any,
        output: torch.Tensor,
    ) -> None:
        """Compute the rows of images again: each sees the keys up to the end of its image."""
        output[images.rows] = attention_paged(
            query[images.rows],
            keys,
            values,
            images.batch,
            causal=False,
            window=self.sliding_window,
            lookahead=None,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _encode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: EncoderMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Let the rows of each request see its keys, those within a window on either side."""
        attention_varlen(
            query,
            key,
            value,
            step.starts,
            step.starts,
            max_seqlen_q=step.longest,
            max_seqlen_k=step.longest,
            window=self.sliding_window,
            lookahead=self._lookahead,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            scale=self.scale,
            out=output,
        )
        counters.attended(query.shape[0])
        return output

    def _scales(self, layer: Any) -> tuple[Any, Any]:
        """Scales of the layer's keys and values in an fp8 cache.

        vLLM's own tensors, read at every launch: a captured graph follows weights that are loaded
        again.
        """
        return layer._k_scale, layer._v_scale

    def _view(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [blocks, block, Hkv, D] each, of a [blocks, Hkv, block, 2 D].

        They live with the cache, as an attribute of it: what a layer held would keep a cache alive
        that vLLM has dropped, as after it has measured the memory of graphs.
        """
        cache = kv_cache.data  # no view of it: the views would hold the one that holds them
        if self._fp8 is not None:
            cache = cache.view(self._fp8)
        keys, values = cache.transpose(1, 2).chunk(2, -1)
        found = vars(kv_cache)[_VIEWS] = keys, values
        return found
