"""What an SGLang model or its cache asks for that the engine or this adapter has not."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from liteattention_rocm import admission

from .srt import whole_prompts

#: Pools whose layers are [slots, Hkv, D]. Subclasses may lay them out otherwise.
_LAYOUT = "nhd"
#: How a pool writes such layers, which this backend does in its place. Subclasses may write more.
_WRITERS = {name: getattr(MHATokenToKVPool, name) for name in ("set_kv_buffer", "_store_kv_layer")}


def attended(model: torch.nn.Module, pool: Any) -> list[Any]:
    """Return the layers of a model that this backend serves.

    In hybrids (Mamba, gated delta rule, short convolutions) those are the layers of full attention.
    SGLang computes the others itself; some of them are of the same class (lightning attention).
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention)]
    if not isinstance(pool, HybridLinearKVPool):
        return layers
    return [layer for layer in layers if layer.layer_id in pool.full_attention_layer_id_mapping]


def reasons(runner: Any, layers: list[Any], page_size: int) -> list[str]:
    """Return every reason why the model in ``runner`` cannot be served here; none means it can."""
    return [*_runner_reasons(runner), *_layer_reasons(layers, runner, page_size)]


def _runner_reasons(runner: Any) -> list[str]:
    reasons = []
    pool = runner.token_to_kv_pool
    if getattr(runner, "prefill_aware_swa", False):
        reasons.append("its sliding windows hide the prompt too, which this model keeps in sight")
    if runner.is_draft_worker:
        reasons.append("it does not serve draft models: leave the speculative options out")
    if runner.kv_index_translator.is_translating:
        reasons.append("it does not read unified memory pools: leave --enable-unified-memory out")
    for part in _parts(pool):
        if not isinstance(part, MHATokenToKVPool):
            reasons.append(f"it reads MHATokenToKVPool, the cache is a {type(part).__name__}")
        elif part.kv_cache_layout != _LAYOUT:
            reasons.append(
                f"it reads the cache layout {_LAYOUT!r}, got {part.kv_cache_layout!r}: unset "
                "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
            )
        elif part.is_quantized_kv_cache:
            reasons.append(
                f"it does not read caches quantised by blocks (--kv-cache-dtype {part.dtype})"
            )
        elif any(getattr(type(part), name) is not own for name, own in _WRITERS.items()):
            reasons.append(
                f"it writes keys and values itself, a {type(part).__name__} writes its own way"
            )
    return reasons


def _parts(pool: Any) -> list[Any]:
    """Return the pools that hold keys and values.

    Of subclasses, SGLang reads some in ways of its own (sparse attention of Qwen): they stay whole,
    and are refused by their names.
    """
    if isinstance(pool, SWAKVPool):
        return [pool.full_kv_pool, pool.swa_kv_pool]
    return [pool.full_kv_pool] if type(pool) is HybridLinearKVPool else [pool]


def _layer_reasons(layers: list[Any], runner: Any, page_size: int) -> list[str]:
    """Return every reason against the model's layers, each once, with the layers it is about."""
    found: dict[str, list[int]] = {}
    device = runner.req_to_token_pool.req_to_token.device
    for layer in layers:
        reasons = []
        if layer.is_cross_attention:
            reasons.append("it has no cross-attention")
        if not is_causal(layer) and not whole_prompts(resolved_view(runner.server_args)):
            reasons.append(
                "its rows see later tokens, so prompts must stay whole: use "
                "--disable-radix-cache --chunked-prefill-size -1"
            )
        if layer.v_head_dim != layer.head_dim:
            reasons.append(
                f"keys and values must have one head dim, got {layer.head_dim} and "
                f"{layer.v_head_dim}"
            )
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            reasons.append(f"logits are capped by tanh, not {layer.logit_capping_method!r}")
        if layer.xai_temperature_len > 0:
            reasons.append("it has no temperature by position (attn_temperature_len)")
        fp8 = runner.kv_cache_dtype.itemsize == 1
        reasons += admission.serving_reasons(
            device,
            q_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            dtype=runner.dtype,
            kv_dtype=runner.kv_cache_dtype,
            page_size=page_size,
            scale=layer.scaling or None,
            window=window_of(layer) or 0,
            soft_cap=float(layer.logit_cap or 0.0),
            k_scale=scale_of(layer, "k_scale") if fp8 else 1.0,
            v_scale=scale_of(layer, "v_scale") if fp8 else 1.0,
            lookahead=lookahead_of(layer),
        )
        for reason in reasons:
            found.setdefault(reason, []).append(layer.layer_id)
    return [
        reason if len(at) == len(layers) else f"{reason} (layers {', '.join(map(str, at))})"
        for reason, at in found.items()
    ]


def scale_of(layer: Any, name: str) -> float:
    """Return a layer's ``k_scale`` or ``v_scale`` of an fp8 cache, 1.0 if it has none.

    A checkpoint's scale is there as a tensor and, under another name, as a number. That of
    ``--quantization-param-path`` is a number in the tensor's place, which leaves the other as it
    was; SGLang's pool divides by it.
    """
    scale = getattr(layer, name)
    if scale is None or isinstance(scale, torch.Tensor):
        number = getattr(layer, f"{name}_float")
        scale = scale if number is None else number
    return 1.0 if scale is None else float(scale)


def is_causal(layer: Any) -> bool:
    """Return whether a row sees no later token: not in encoders, nor in decoders made of such."""
    return bool(layer.attn_type == AttentionType.DECODER)


def window_of(layer: Any) -> int | None:
    """Return our window: SGLang counts the keys before a row, we count that row's own as well."""
    before = layer.sliding_window_size
    return None if before is None or before < 0 else before + 1


def lookahead_of(layer: Any) -> int | None:
    """Return how many keys after a row it sees, None for all: as many as before it in a window."""
    if is_causal(layer):
        return 0
    before = layer.sliding_window_size
    return None if before is None or before < 0 else before
