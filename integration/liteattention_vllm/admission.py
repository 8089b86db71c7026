"""What the engine of vLLM's platform has against a layer, in vLLM's names of dtypes."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from liteattention_rocm import admission, engines

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


def plans_from_bounds() -> bool:
    """Whether the engine of this platform needs no lengths from the host: graphs may replay it."""
    return engines.choose(device()).plans_from_bounds


def device() -> torch.device:
    """Return the device of this platform, whose engine attends."""
    return torch.device(current_platform.device_type)
