"""What the engine of vLLM's platform, and vLLM's runner, have against a layer.

Dtypes are in vLLM's names.
"""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from liteattention_rocm import admission, engines

#: How vLLM tags the models that draft token by token while it builds their layers.
_DRAFTERS = ("eagle_head", "draft_model")
#: Page size to ask an engine about while vLLM has not decided on one.
USUAL_BLOCK = 16


def fp8_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Return what an fp8 cache, which vLLM hands out as bytes, really holds."""
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        dtype: torch.dtype = current_platform.fp8_dtype()
        return dtype
    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else None


def engine_reasons(
    *,
    q_heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    block_size: int,
    sinks: bool,
    window: int = 0,
    lookahead: int | None = 0,
    soft_cap: float = 0.0,
) -> list[str]:
    """Ask the engine of this platform whether it takes such a layer; block size 0: no cache."""
    named = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    kv_dtype = fp8_dtype(kv_cache_dtype) or named.get(kv_cache_dtype, dtype)
    if not block_size:
        kv_dtype = dtype
    return admission.serving_reasons(
        device(),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=block_size,
        window=window,
        lookahead=lookahead,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def drafting_reasons() -> list[str]:
    """Return what vLLM's runner has against the layer that is being built, if a draft model's.

    On ROCm the V1 model runner drafts a second token only over the metadata of backends in a list
    of its own. It says so in the first step that drafts, when the server is up already.
    """
    # Not at the top: vLLM assigns it anew for every model that it builds.
    from vllm.compilation.backends import model_tag

    config = get_current_vllm_config_or_none()
    drafts = None if config is None else config.speculative_config
    if config is None or drafts is None or model_tag not in _DRAFTERS:
        return []
    if drafts.num_speculative_tokens < 2 or drafts.parallel_drafting:
        return []
    if not current_platform.is_rocm() or config.use_v2_model_runner:
        return []
    return [
        "on ROCm vLLM's V1 model runner drafts one token at most with it, got "
        f"num_speculative_tokens={drafts.num_speculative_tokens}: take the V2 runner (leave "
        "VLLM_USE_V2_MODEL_RUNNER unset, and what vLLM's log says V2 lacks), or draft one token, "
        "or from n-grams, or name another attention_backend in the speculative config"
    ]


def image_reasons() -> list[str]:
    """Return what vLLM's runner has against a model whose images are seen both ways, if it is one.

    It does not tell microbatches where the images of their requests are.
    """
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if config is None or model is None or not model.is_mm_prefix_lm:
        return []
    if not config.parallel_config.use_ubatching:
        return []
    return [
        "microbatches do not know the images of this model, whose tokens see each other: leave "
        "--enable-dbo and --ubatch-size out, or serve text only (--limit-mm-per-prompt "
        "'{\"image\": 0}')"
    ]


def plans_from_bounds() -> bool:
    """Whether the engine of this platform needs no lengths from the host: graphs may replay it."""
    return engines.choose(device()).plans_from_bounds


def device() -> torch.device:
    """Return the device of this platform, whose engine attends."""
    return torch.device(current_platform.device_type)
