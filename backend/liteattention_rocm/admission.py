"""Whether the engine of a device takes the layers of a model: asked before a model is served.

Each function returns every reason against, prefixed by the engine's name; none means yes.
"""

from __future__ import annotations

import dataclasses

import torch

from . import engines
from .arguments import Reasons
from .contract import DenseRequest, LiteRequest, RaggedRequest, TileGeometry, WriteRequest


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
    lookahead: int | None = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> list[str]:
    """Ask whether a layer of a language model can be served from a paged cache.

    A page size of 0 is no cache: keys and values are packed, as those of an encoder. ``window``,
    ``lookahead``: as in :class:`RaggedRequest`, causal by default.
    """
    try:
        engine = engines.choose(device)
    except ValueError as error:
        return [str(error)]
    wrong = Reasons()
    wrong.scale(scale, k_scale)
    wrong.scales(v_scale=v_scale, **({"soft_cap": soft_cap} if soft_cap else {}))
    found = wrong.types + wrong.values
    found += engine.reasons(
        RaggedRequest(
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
            max_kv_len=page_size or 1,
            scale=head_dim**-0.5 if scale is None else scale,
            lookahead=lookahead,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            rounding="rtne",
            return_lse=False,
        )
    )
    if page_size:
        found += engine.reasons(
            WriteRequest(
                1, kv_heads, head_dim, dtype, kv_dtype, device, 1, page_size, k_scale, v_scale
            )
        )
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
        engines.check_device(chosen, device)
    except ValueError as error:
        return [str(error)]
    tile = geometry or chosen.geometry(head_dim)
    length = tile.q_block
    request: DenseRequest = LiteRequest(
        1, heads, kv_heads, length, length, head_dim, dtype, device, "bshd", head_dim**-0.5,
        False, "rtne", False, tile, -1.0, False, False,
    )  # fmt: skip
    if not skips:
        names = [field.name for field in dataclasses.fields(DenseRequest)]
        request = DenseRequest(**{name: getattr(request, name) for name in names})
    return [f"engine {chosen.name!r}: {reason}" for reason in chosen.reasons(request)]
