"""Registers the attention backend ``liteattention_rocm`` with SGLang's language-model runtime.

The entry point of the group ``sglang.srt.plugins``. SGLang calls :func:`register` before it reads
its arguments and again first thing in every process it starts, so nothing here imports kernels or
the model runtime: that waits in :mod:`.srt_attention` until a worker builds its attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    resolved_view,
    resolving_view,
    use_mla_backend,
)
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from . import BACKEND_NAME

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the backend to SGLang's choices; repeated calls change nothing."""
    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    if BACKEND_NAME not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND_NAME)(_create)
        register_resolution_hook("handle_attention_backend_compatibility")(_resolve)


def _create(runner: Any) -> Any:
    from .srt_attention import LiteAttentionBackend

    return LiteAttentionBackend(runner)


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what the backend cannot serve, and turn graphs off, while arguments are resolved.

    Raises:
        ValueError: with every reason, in the process the user started.
    """
    previous(server_args)
    prefill, decode = attention_backends_of(resolved_view(server_args))
    if BACKEND_NAME not in (prefill, decode):
        return
    view = resolving_view(server_args)
    reasons = _unsupported(view, use_mla_backend(server_args))
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: " + "; ".join(reasons))
    phases = [
        phase
        for phase, name in ((Phase.PREFILL, prefill), (Phase.DECODE, decode))
        if name == BACKEND_NAME
        and getattr(view.cuda_graph_config, phase).backend != Backend.DISABLED
    ]
    if phases:
        logger.info(
            "attention backend %r plans every step on the host: graphs are off for %s",
            BACKEND_NAME,
            " and ".join(phases),
        )
        config = view.cuda_graph_config
        for phase in phases:
            config = with_phase(config, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, BACKEND_NAME, cuda_graph_config=config)


def _unsupported(view: Any, mla: bool) -> list[str]:
    """Return every reason in the server's arguments why the backend cannot serve."""
    reasons = []
    if mla:
        reasons.append("it has no kernels for multi-head latent attention (MLA)")
    if view.speculative_algorithm is not None:
        reasons.append(
            f"it has no tree masks for speculative decoding "
            f"(--speculative-algorithm {view.speculative_algorithm}): leave that out"
        )
    if view.dcp_size > 1 or view.attn_cp_size > 1:
        reasons.append(
            f"it does not merge context-parallel parts (--dcp-size {view.dcp_size}, "
            f"--attn-cp-size {view.attn_cp_size}): use --tp-size"
        )
    for wanted, option in (
        (view.enable_dp_attention, "--enable-dp-attention"),
        (view.disaggregation_mode not in (None, "null"), "--disaggregation-mode"),
        (view.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        (view.enable_pdmux, "--enable-pdmux"),
        (view.enable_hisparse, "--enable-hisparse"),
        (view.enable_unified_memory, "--enable-unified-memory"),
        (view.enable_kv_cache_sharding, "--enable-kv-cache-sharding"),
        (view.dllm_algorithm is not None, "--dllm-algorithm"),
    ):
        if wanted:
            reasons.append(f"it was never tried with {option}: leave that out")
    return reasons
