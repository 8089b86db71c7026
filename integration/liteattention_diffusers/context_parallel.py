"""Attention over several processes, as diffusers splits it: by heads, in a ring, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import attention_dispatch as dispatch

from liteattention_common import slots


def ring_degree(parallel_config: Any) -> int:
    """Return how many processes keys and values go round; 1 for none."""
    context = getattr(parallel_config, "context_parallel_config", None)
    return 1 if context is None else int(context.ring_degree)


def is_ours(parallel_config: Any) -> bool:
    """Whether the layers that are taken over exchange the tensors themselves; else diffusers does.

    diffusers does not say whose keys a call in its ring sees, nor which heads one in its Ulysses
    has. Unequal parts (``ulysses_anything``) stay its own.
    """
    context = getattr(parallel_config, "context_parallel_config", None)
    return context is not None and not getattr(context, "ulysses_anything", False)


def split(
    slot: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    context: Any,
) -> torch.Tensor:
    """Attend over the sequence of all processes, [B,S_local,H,D] each.

    With both degrees, rows are exchanged for heads, in their order, around a ring.
    """
    if context.ulysses_degree == 1 or context.ring_degree == 1:
        alone: torch.Tensor = slots.split_self_attention(query, key, value, slot, scale)
        return alone
    exchange = dispatch.SeqAllToAllDim.apply
    group = context._ulysses_mesh.get_group()
    query, key, value = (exchange(group, x, 2, 1) for x in (query, key, value))
    out = slots.split_self_attention(query, key, value, slot, scale)
    exchanged: torch.Tensor = exchange(group, out, 1, 2)
    return exchanged


def gather(
    run: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    parallel_config: Any,
) -> Any:
    """Let diffusers exchange the tensors, [B,S_local,H,D] each, around ``run``."""
    return dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        None,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        forward_op=functools.partial(_forward, run),
        backward_op=_backward,
        _parallel_config=parallel_config,
    )


def _forward(
    run: Callable[..., Any],
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    return run(query, key, value, is_causal, scale, return_lse)


def _backward(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "the attention backend 'liteattention_rocm' has no backward pass: use it under "
        "torch.no_grad()"
    )
