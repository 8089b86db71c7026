"""Whether the engine of a device takes the layers of a model: asked before a model is served.

Each function returns every reason against, prefixed by the engine's name; none means yes.
"""

from __future__ import annotations

import torch

from . import engines
from .engines import AttentionSpec, LiteSpec, RaggedSpec, TileGeometry


def serving_reasons(
    device: torch.device,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> list[str]:
    """Ask whether a layer of a language model can be served from a paged cache."""
    try:
        engine = engines.choose(device)
    except ValueError as error:
        return [str(error)]
    found = engine.ragged_reasons(
        RaggedSpec(
            requests=1,
            rows=1,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            page_size=page_size,
            max_q_len=1,
            max_kv_len=page_size,
            scale=head_dim**-0.5 if scale is None else scale,
            causal=True,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            rounding="rtne",
            return_lse=False,
        )
    )
    found += engine.write_reasons(dtype, kv_dtype, device)
    return [f"engine {engine.name!r}: {reason}" for reason in dict.fromkeys(found)]


def video_reasons(
    device: torch.device,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    skips: bool = True,
    engine: str | None = None,
    geometry: TileGeometry | None = None,
) -> list[str]:
    """Ask whether a layer of a diffusion model can run; with ``skips``, with LiteAttention."""
    try:
        chosen = engines.choose(device, engine)
    except ValueError as error:
        return [str(error)]
    missing = chosen.unavailable(device)
    if missing:
        return [str(engines.refuse_device(chosen, missing, device))]
    tile = geometry or chosen.geometry(head_dim)
    spec = AttentionSpec(
        batch=1,
        q_heads=heads,
        kv_heads=kv_heads,
        q_len=tile.q_block,
        kv_len=tile.q_block,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        layout="bshd",
        scale=head_dim**-0.5,
        causal=False,
        rounding="rtne",
        return_lse=False,
    )
    lite = LiteSpec(tile, -1.0, False, False) if skips else None
    return [f"engine {chosen.name!r}: {reason}" for reason in chosen.supports(spec, lite)]
