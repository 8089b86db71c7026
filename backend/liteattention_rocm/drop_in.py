"""Attention with the signature of torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch

from . import validation
from .arguments import Reasons, is_real
from .dense import attention

__all__ = ["sdpa"]


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` in code that calls it.

    Same arguments, same order, same meaning; forward only. What it cannot do is refused.

    Args:
        query: [B, Hq, Sq, D]; bf16, fp16 or fp32. Strides are free except that the last dimension
            of each tensor must be contiguous; nothing is copied to fit.
        key: [B, Hkv, Skv, D].
        value: shaped like ``key``.
        attn_mask: None. Masks are refused. For keys that only pad a batch use
            :func:`liteattention_rocm.attention_varlen`, which takes lengths.
        dropout_p: 0.
        is_causal: query i sees the keys j <= i. This is torch's alignment, top-left; that of
            :func:`liteattention_rocm.attention` is bottom-right. They differ if Sq != Skv.
        scale: factor on q.k, natural units, 0 or from 2^-60 to 2^60 in size; 1/sqrt(D) by default.
        enable_gqa: allow fewer key heads than query heads, Hq % Hkv == 0.

    Returns:
        [B, Hq, Sq, D] of query's dtype. bf16 is rounded to nearest even.

    Raises:
        TypeError: an argument has the wrong type or dtype; lists every reason.
        ValueError: a shape, a value or an option that is not supported, or the engine cannot run
            the request; lists every reason and says what to do instead.

    The engine is chosen by the device, or named by ``LITEATTENTION_ENGINE``.
    """
    if (
        attn_mask is not None
        or dropout_p != 0
        or not isinstance(is_causal, bool)
        or not (isinstance(query, torch.Tensor) and query.dim() == 4)
        or not (isinstance(key, torch.Tensor) and key.dim() == 4)
        or not (enable_gqa or key.shape[1] == query.shape[1])
    ):
        _refuse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not is_causal or key.shape[-2] == query.shape[-2]:
        return attention(query, key, value, layout="bhsd", scale=scale, causal=is_causal)
    rows, keys = query.shape[-2], key.shape[-2]
    seen = min(rows, keys)
    # Aligned at the top left, a square is causal. Keys to its right are seen by no row, and rows
    # below it see every key.
    square = attention(
        query[..., :seen, :],
        key[..., :seen, :],
        value[..., :seen, :],
        layout="bhsd",
        scale=scale,
        causal=True,
    )
    if seen == rows:
        return square
    below = attention(query[..., seen:, :], key, value, layout="bhsd", scale=scale)
    return torch.cat([square, below], dim=-2)


def _refuse(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> None:
    """Raise one error with what is not supported and all else that is wrong."""
    found = Reasons()
    if attn_mask is not None:
        found.values.append(
            "attn_mask must be None: for padded keys call attention_varlen with the lengths of "
            "the sequences, for other masks torch's scaled_dot_product_attention"
        )
    if not is_real(dropout_p):
        found.types.append(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    elif dropout_p != 0:
        found.values.append(
            f"dropout_p must be 0, got {dropout_p}: this is inference only, call torch's "
            "scaled_dot_product_attention to train"
        )
    found.flags(enable_gqa=enable_gqa)
    call = validation.dense(
        query, key, value, None, None, "bhsd", scale, is_causal, "rtne", False, None
    )
    heads = [x.shape[1] for x in (query, key) if isinstance(x, torch.Tensor) and x.dim() == 4]
    if len(heads) == 2 and heads[0] != heads[1] and not enable_gqa:
        found.values.append(
            f"query has {heads[0]} heads and key {heads[1]}: pass enable_gqa=True if groups of "
            "query heads share a key head"
        )
    found.add(call)
    found.raise_for("sdpa call")
