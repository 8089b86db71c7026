"""One attention layer of a model in SGLang's diffusion runtime.

Self-attention of the request being denoised goes through LiteAttention; cross-attention, causal
attention and everything outside a request is dense. What tells them apart is what the runtime
says: ``is_cross_attention`` when a layer is built, the forward context when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_group
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionImpl,
    AttentionMetadata,
)
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none

from liteattention_common import slots
from liteattention_rocm import attention

from . import BACKEND_NAME
from .diffusion_stages import generation_of, unclaimed
from .generation import Generation, dense_ring


class LiteAttentionImpl(AttentionImpl):
    """One attention layer of a model; tensors are [B,S,H,D].

    It holds no skip lists. Key of what it asks for: the request, this object, ``is_cfg_negative``,
    the step index and the forward context. Owner: the model's attention module. Lifetime: the
    module's. ``name`` is ``prefix`` where SGLang gives one (``named``), else that of the module in
    its model, once the model has attended in a request. Layers of a second denoiser have the
    denoiser's name in front, as in diffusers ("transformer_2.blocks.0.attn1"); ``placed`` says that
    this has been looked at.

    Raises:
        ValueError: dropout is asked for.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None:
        dropout = extra_impl_args.get("dropout_p") or 0.0
        if dropout:
            raise ValueError(
                f"attention backend {BACKEND_NAME!r} has no dropout, got {dropout} in "
                f"layer {prefix or '(unnamed)'}: it is for inference"
            )
        self.heads = num_heads
        self.scale = softmax_scale
        self.causal = causal
        self.name = prefix.removesuffix(".impl").strip(".")
        self.named = bool(self.name)
        self.placed = False
        self.name = self.name or "attention"
        self.slot: torch.Tensor | None = None
        if not causal and not extra_impl_args.get("is_cross_attention", False):
            self.slot = slots.new_slot(self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
        *,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Return attention [B,S,H,D], with ``return_softmax_lse`` also its LSE.

        The LSE is in natural log, fp32 [B,H,S]; calls that want it see only a part of the keys
        and do not say which, so they are dense. :func:`ring_attention` keeps those of
        self-attention in a ring from here.
        """
        if return_softmax_lse:
            return attention(
                query, key, value, scale=self.scale, causal=self.causal, return_lse=True
            )
        if self.slot is None:
            return attention(query, key, value, scale=self.scale, causal=self.causal)
        return slots.self_attention(query, key, value, self.slot, self.scale)

    def forward_into(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor | None,
        attn_metadata: AttentionMetadata | None,
    ) -> bool:
        """Write what :meth:`forward` returns into ``out``; True, as any inputs will do."""
        if out is not None:
            if self.slot is None:
                attention(query, key, value, scale=self.scale, causal=self.causal, out=out)
            else:
                self.attend(query, key, value, self.scale, out)
        return True

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        """Compute self-attention into ``out``: LiteAttention inside a request, else dense."""
        found = self._position()
        if found is None:
            attention(q, k, v, scale=scale, out=out)
        else:
            state, position = found
            heads = self._own_heads(q.shape[2]) if state.lite.policy.by_head else None
            state.attend(q, k, v, scale=scale, out=out, heads=heads, **position)

    def attend_split(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return self-attention of this rank's rows to those of all ranks of SGLang's ring."""
        group = get_sp_group().ring_group
        found = self._position()
        if found is None:
            return dense_ring(q, k, v, layer=self.name, scale=scale, group=group)
        state, position = found
        return state.attend_ring(q, k, v, scale=scale, group=group, **position)

    def _own_heads(self, count: int) -> tuple[int, ...] | None:
        """Which of the layer's query heads a call has: Ulysses gives each rank its part."""
        if count == self.heads:
            return None
        first = get_sp_group().ulysses_rank * count
        return tuple(range(first, first + count))

    def _position(self) -> tuple[Generation, dict[str, Any]] | None:
        """The request whose self-attention this is, and where in it the call stands.

        None outside a request's steps: an encoder, or a tool that runs a model by itself. Some
        pipelines leave the request out of their steps, too; :func:`.diffusion_stages.run_stage`
        notices those by the count of such calls.
        """
        context = get_forward_context_or_none()
        request = None if context is None else context.forward_batch
        if context is None or request is None or context.current_timestep is None:
            unclaimed.calls += 1
            return None
        state = generation_of(request)
        return state, {
            "layer": state.name(self, self.name),
            "step": context.current_timestep,
            "negative": bool(request.is_cfg_negative),
            "forward": context,
        }


def ring_attention(
    original: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_impl: AttentionImpl,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    return_softmax_lse: bool = False,
) -> Any:
    """Stand in for SGLang's ring, whose calls do not say whose keys they see.

    Ours does that for self-attention [B,S_local,H,D]; everything else is the original's.
    """
    ours = isinstance(attn_impl, LiteAttentionImpl) and attn_impl.slot is not None
    if not ours or return_softmax_lse:
        return original(query, key, value, attn_impl, is_causal, dropout_p, return_softmax_lse)
    return slots.split_self_attention(query, key, value, attn_impl.slot, attn_impl.scale)
