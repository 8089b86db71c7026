"""Registers the attention backend ``liteattention_rocm`` with SGLang's language-model runtime.

The entry point of the group ``sglang.srt.plugins``. SGLang calls :func:`register` before it reads
its arguments and again first thing in every process it starts, so nothing here imports kernels or
the model runtime: that waits in :mod:`.srt_attention` until a worker builds its attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
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

#: Models that SGLang's ``handle_model_specific_adjustments`` serves with the attention backends of
#: a list in its code only. The lists are of what was tried there; this backend was tried here.
_LISTED = (
    "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)
#: A backend of every one of those lists.
_ON_EVERY_LIST = "triton"
_BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def register() -> None:
    """Add the backend to SGLang's choices; repeated calls change nothing."""
    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    if BACKEND_NAME not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND_NAME)(_create)
        register_resolution_hook("handle_model_specific_adjustments")(_adjust)
        register_resolution_hook("handle_attention_backend_compatibility")(_resolve)


def whole_prompts(view: Any) -> bool:
    """Whether, by a server's arguments, no prompt shares another's prefix and none is cut."""
    size = view.chunked_prefill_size
    return bool(view.disable_radix_cache) and size is not None and size <= 0


def data_parallel_attention(view: Any) -> bool:
    """Whether, by a server's arguments, groups of its workers attend to requests of their own.

    SGLang moves the numbers of ``--dp-size N --enable-dp-attention`` into ``--attn-dp-size`` before
    it asks plugins, and clears that flag.
    """
    try:
        from sglang.srt.runtime_context import attn_dp_enabled_of
    except ImportError:
        return bool(view.enable_dp_attention or getattr(view, "attn_dp_size", 1) > 1)
    return bool(view.enable_dp_attention or attn_dp_enabled_of(view))


def _create(runner: Any) -> Any:
    from .srt_attention import LiteAttentionBackend

    return LiteAttentionBackend(runner)


def _adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let SGLang adjust its arguments to a model whose list of backends lacks this one.

    The lists cannot be added to, so a backend that is on them stands in while they are compared.
    Nothing else in that step looks at the backend of these models.
    """
    view = resolving_view(server_args)
    ours = [field for field in _BACKEND_FIELDS if getattr(view, field) == BACKEND_NAME]
    architectures = model_config_of(server_args).hf_config.architectures if ours else ()
    if not any(name in _LISTED for name in architectures):
        return previous(server_args)
    declare_resolution(server_args, BACKEND_NAME, **dict.fromkeys(ours, _ON_EVERY_LIST))
    previous(server_args)
    declare_resolution(server_args, BACKEND_NAME, **dict.fromkeys(ours, BACKEND_NAME))


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what the backend cannot serve, while arguments are resolved.

    Prompts of encoders are kept whole. On a CPU, whose engine plans every step on the host, graphs
    are turned off.

    Raises:
        ValueError: with every reason, in the process the user started.
    """
    previous(server_args)
    prefill, decode = attention_backends_of(resolved_view(server_args))
    if BACKEND_NAME not in (prefill, decode):
        return
    view = resolving_view(server_args)
    on_cpu = str(view.device).startswith("cpu")
    model = model_config_of(server_args)
    reasons = _unsupported(view, model, use_mla_backend(server_args))
    graphs = view.cuda_graph_config
    if prefill == BACKEND_NAME and not on_cpu and graphs.prefill.backend == Backend.FULL:
        reasons.append(
            "it captures no prompts whole: use --cuda-graph-backend-prefill=breakable or disabled"
        )
    if on_cpu and view.enable_torch_compile:
        reasons.append("it has no graphs on a CPU: leave out --enable-torch-compile")
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: " + "; ".join(reasons))
    if model.embedding_model_spec.bidirectional_attention and not whole_prompts(view):
        # What lies in the cache for a prefix depends on the tokens behind it.
        logger.info(
            "attention backend %r: rows of this model see later tokens, so prompts stay whole "
            "(--disable-radix-cache --chunked-prefill-size -1)",
            BACKEND_NAME,
        )
        declare_resolution(
            server_args, BACKEND_NAME, disable_radix_cache=True, chunked_prefill_size=-1
        )
    phases = [
        phase
        for phase, name in ((Phase.PREFILL, prefill), (Phase.DECODE, decode))
        if on_cpu and name == BACKEND_NAME and getattr(graphs, phase).backend != Backend.DISABLED
    ]
    if phases:
        logger.info(
            "attention backend %r plans every step on the host on a CPU: graphs are off for %s",
            BACKEND_NAME,
            " and ".join(phases),
        )
        for phase in phases:
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, BACKEND_NAME, cuda_graph_config=graphs)


def _unsupported(view: Any, model: Any, mla: bool) -> list[str]:
    """Return every reason in the server's arguments and ``config.json`` against this backend."""
    reasons = []
    if mla:
        reasons.append("it has no kernels for multi-head latent attention (MLA)")
    if model.is_encoder_decoder:
        reasons.append("it has no cross-attention: the model is an encoder-decoder")
    if model.attention_chunk_size is not None:
        reasons.append(
            f"it has no chunked local attention (attention_chunk_size {model.attention_chunk_size})"
        )
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
    if view.enable_deterministic_inference:
        # SGLang checks --attention-backend only, not the backends of single phases.
        reasons.append(
            "it is not deterministic in SGLang's sense, as the split of long requests follows the "
            "batch: leave out --enable-deterministic-inference (--rl-on-policy-target turns it "
            "on), or name another backend for both phases"
        )
    for wanted, option in (
        (
            data_parallel_attention(view),
            "data-parallel attention (--attn-dp-size, or --dp-size with --enable-dp-attention)",
        ),
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
