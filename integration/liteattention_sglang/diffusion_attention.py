"""The attention backend that SGLang's diffusion workers run.

Self-attention of the request being denoised goes through LiteAttention; cross-attention, causal
attention and everything outside a request is dense. What tells them apart is what the runtime
says: ``is_cross_attention`` when a layer is built, the forward context when it is called.

The skip lists of a request are in the request (:class:`.generation.Generation` in ``Req.extra``)
and die with it, whatever becomes of it. Importing this module hooks the end of pipeline stages, to
free them earlier and to report, and SGLang's ring attention, to know whose keys go round.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    get_sp_group,
    get_world_rank,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

from liteattention_rocm import SkipPolicy, attention
from liteattention_rocm.parallel import SeqParallel

from . import BACKEND_NAME, diffusion
from .generation import (
    REPORT_VARIABLE,
    Generation,
    asks,
    for_warm_up,
    request_policy,
)

logger = logging.getLogger(__name__)

# SGLang leaves keys that begin with an underscore out when it sends requests elsewhere.
_STATE = "_liteattention_rocm"
_RING = "sglang.multimodal_gen.runtime.layers.usp.ring_attn"
_STAGE = "sglang.multimodal_gen.runtime.pipelines_core.stages.base.PipelineStage.__call__"

#: Self-attention layers by number. Weak: a layer belongs to its model.
_layers: weakref.WeakValueDictionary[int, LiteAttentionImpl] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class LiteAttentionBackend(AttentionBackend):
    """What SGLang asks about the backend."""

    accept_output_buffer = True

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        """Return the member that names this backend."""
        return diffusion.backend()

    @staticmethod
    def get_impl_cls() -> type[LiteAttentionImpl]:
        """Return the class of which every attention layer makes one object."""
        return LiteAttentionImpl

    @classmethod
    def supports_ring_rotation(cls) -> bool:
        """Say that it can: dense parts by their LSE, LiteAttention in a ring of our own."""
        return True

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """There is none of our own: step and request are in the forward context."""
        raise NotImplementedError(f"{BACKEND_NAME} has no attention metadata")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """See :meth:`get_metadata_cls`; SGLang takes the exception for "none"."""
        raise NotImplementedError(f"{BACKEND_NAME} has no attention metadata")


class LiteAttentionImpl(AttentionImpl):
    """One attention layer of a model; tensors are [B,S,H,D].

    It holds no skip lists. Key of what it asks for: the request, this object (``prefix`` is its
    name where SGLang gives one), ``is_cfg_negative`` and the step index. Owner: the model's
    attention module. Lifetime: the module's.

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
        self.scale = softmax_scale
        self.causal = causal
        self.name = prefix.removesuffix(".impl") or "attention"
        self.slot: torch.Tensor | None = None
        if not causal and not extra_impl_args.get("is_cross_attention", False):
            number = next(_numbers)
            _layers[number] = self
            # A graph takes the layer's number as an input, so that all layers share one. The
            # device is said because models are built under a default device, "meta" mostly.
            self.slot = torch.tensor(number, dtype=torch.int64, device="cpu")

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
        and do not say which, so they are dense. :func:`_ring_attention` keeps those of
        self-attention in a ring from here.
        """
        if return_softmax_lse:
            return attention(
                query, key, value, scale=self.scale, causal=self.causal, return_lse=True
            )
        if self.slot is None:
            return attention(query, key, value, scale=self.scale, causal=self.causal)
        return _self_attention(query, key, value, self.slot, self.scale)

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
            state.attend(q, k, v, scale=scale, out=out, **position)

    def attend_ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return self-attention of this rank's rows to those of all ranks of SGLang's ring."""
        group = get_sp_group().ring_group
        found = self._position()
        if found is None:
            dense = SeqParallel(SkipPolicy(enabled=False), group=group, mode="ring")
            return dense(q, k, v, step=0, layer=self.name, scale=scale)
        state, position = found
        return state.attend_ring(q, k, v, scale=scale, group=group, **position)

    def _position(self) -> tuple[Generation, dict[str, Any]] | None:
        """The request whose self-attention this is, and where in it the call stands.

        None outside a request: an encoder, or a tool that runs a model by itself.
        """
        context = get_forward_context_or_none()
        request = None if context is None else context.forward_batch
        if request is None:
            return None
        state = _generation(request)
        return state, {
            "layer": state.name(self, self.name),
            "step": int(context.current_timestep),
            "negative": bool(request.is_cfg_negative),
        }


@torch.library.custom_op("liteattention_rocm_sglang::self_attention", mutates_args=())
def _self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    # Opaque to torch.compile: the request and the step are looked up when it runs, not when it
    # is traced, and tracing twice is not calling twice.
    out = q.new_empty(q.shape)
    _layers[int(slot)].attend(q, k, v, scale, out)
    return out


@_self_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("liteattention_rocm_sglang::ring_self_attention", mutates_args=())
def _ring_self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return _layers[int(slot)].attend_ring(q, k, v, scale)


@_ring_self_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return q.new_empty(q.shape)


def _ring_attention(
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
    return _ring_self_attention(query, key, value, attn_impl.slot, attn_impl.scale)


def _generation(request: Any) -> Generation:
    """Return the skip lists of a request, made on its first call."""
    state = request.extra.get(_STATE)
    if state is None:
        policy = request_policy(request.extra.get("diffusers_kwargs"), diffusion.defaults())
        if request.is_warmup:
            policy = for_warm_up(policy)
        timesteps = request.timesteps
        steps = request.num_inference_steps if timesteps is None else len(timesteps)
        state = request.extra[_STATE] = Generation(policy, steps)
    assert isinstance(state, Generation)
    return state


def _run_stage(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """Stand around a pipeline stage: the lists that a request made in it end with it."""
    extra = getattr(batch, "extra", None)
    if not isinstance(extra, dict):
        return original(stage, batch, server_args)
    options = extra.get("diffusers_kwargs")
    if asks(options):
        request_policy(options, diffusion.defaults())  # refuse it before anything has been computed
    try:
        result = original(stage, batch, server_args)
    except BaseException:
        state = extra.pop(_STATE, None)
        if state is not None:
            state.free()  # a logged traceback may keep the object for long
        raise
    state = extra.pop(_STATE, None)
    if state is not None:
        _report(batch, state)
    elif asks(options) and stage.role_affinity == RoleType.DENOISER:
        raise ValueError(
            "the request has options for LiteAttention, but no self-attention layer ran on it: "
            f"start the server with --attention-backend {BACKEND_NAME}"
        )
    return result


def _report(request: Any, state: Generation) -> None:
    """Log what a request skipped and write its report if the server wants reports."""
    if request.is_warmup:
        return
    # Requests that SGLang has batched are one to us; rows of the lists are in this order.
    names = getattr(request, "merged_request_ids", None) or [request.request_id or "request"]
    rank = get_world_rank()
    if rank == 0:
        statistics = state.statistics
        logger.info(
            "LiteAttention: request %s skipped %.1f %% of the tiles of self-attention (engine %s)",
            ", ".join(names),
            100 * statistics.sparsity,
            state.engine,
        )
    folder = os.environ.get(REPORT_VARIABLE)
    if folder:
        for name in names:
            state.write(Path(folder), name if rank == 0 else f"{name}.rank{rank}", names)


def _hook_runtime() -> None:
    hooks = {_STAGE: _run_stage, _RING: _ring_attention}
    for target, hook in hooks.items():
        if not any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missed = [target for target in hooks if target not in HookRegistry._patched]
    if missed:
        raise RuntimeError(
            f"attention backend {BACKEND_NAME!r} cannot hook {', '.join(missed)}: this "
            "version of SGLang is another than those it knows"
        )


_hook_runtime()
