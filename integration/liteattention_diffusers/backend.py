"""The attention backend ``liteattention_rocm`` of diffusers' dispatcher.

diffusers keeps its backend names in a closed ``str`` enum, so the name is added as a member by
hand. The backend function is called with tensors only; which layer is calling is said just
before by a hook on the attention module (:mod:`.layers`) in a note (:mod:`.note`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.hooks import layer_skip
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from liteattention_common import slots
from liteattention_common.enums import add_member
from liteattention_rocm import attention

from . import context_parallel, reach
from . import note as notes

#: What a backend returns: the output, or (output, LSE).
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

BACKEND_NAME = "liteattention_rocm"
#: The same backend, as enabled layers have it: a user who sets it by the name above is noticed.
ENABLED_NAME = "_liteattention_rocm_enabled"


def _liteattention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Result:
    """Attention on [B,S,H,D]: with skip state inside an enabled layer, dense elsewhere.

    ``return_lse`` also returns the LSE in natural log as [B,S,H], as ring attention wants it.

    Under context parallelism each rank keeps the lists of what it computes: in Ulysses those of
    its heads, in a ring those of its rows against the keys of each rank.

    Raises:
        ValueError: a mask, dropout or, with skip state, causal attention, the LSE or a ring of
            unequal parts is asked for; lists every reason.
    """
    # `enable_gqa` needs no handling: the head counts say it. It is named because the dispatcher
    # silently drops what a backend does not name.
    note = notes.read()
    slot, previous, inside, engine = note.slot, note.previous, note.inside, note.engine
    note.slot = None  # one module call holds one self-attention; what follows is an adapter's
    why = None
    if slot is not None and note.beside is not None:
        slot, why = _of_both(slot, query, key, attn_mask, note.beside)
    elif note.given and query.shape[1] == key.shape[1]:
        why = reach.SECOND
    note.reached, note.given = True, note.given or slot is not None
    if why is not None and note.missed is not None and not torch.compiler.is_compiling():
        note.missed(why)
    left = inside and slot is None and not note.dense  # to the backend that the module had
    replaced = _replaced()
    if left or replaced:
        own = previous or dispatch._AttentionBackendRegistry.get_active_backend()[0]
        if own in (BACKEND_NAME, ENABLED_NAME) and replaced:
            own = AttentionBackendName.NATIVE
        if own not in (BACKEND_NAME, ENABLED_NAME):
            delegated: Result = dispatch.dispatch_attention_fn(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                backend=own,
                parallel_config=_parallel_config,
            )
            return delegated
    query, key, value = _autocast(query, key, value)
    _refuse(slot, attn_mask, dropout_p, is_causal, return_lse, _parallel_config)
    if slot is not None and context_parallel.is_ours(_parallel_config):
        return context_parallel.split(
            slot, query, key, value, scale, _parallel_config.context_parallel_config
        )
    run = functools.partial(_run, slot, engine)
    if _parallel_config is not None:
        gathered: Result = context_parallel.gather(
            run, query, key, value, is_causal, scale, enable_gqa, return_lse, _parallel_config
        )
        return gathered
    return run(query, key, value, is_causal, scale, return_lse)


def _of_both(
    slot: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    beside: notes.Beside,
) -> tuple[torch.Tensor | None, str | None]:
    """The slot if queries and keys, [B,S,H,D], are of a module's own sequence and another together.

    Else None, and why, if keys are of both: a mask, or queries of one of them only.
    """
    rows, keys = query.shape[1], key.shape[1]
    if keys == rows > beside.rows and attn_mask is None:
        return slot, None
    if keys <= beside.rows:
        return None, None
    how = "with queries of one of them only" if attn_mask is None else "with a mask"
    return None, (
        f"it attends to its own and another sequence {how} and stays with the attention backend "
        "that it had"
    )


def _replaced() -> bool:
    """Whether diffusers replaces PyTorch's attention in this call, as perturbed guidance does."""
    if torch.compiler.is_compiling():  # Modes are not seen there: such guidance needs eager blocks.
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, layer_skip.AttentionScoreSkipFunctionMode) for mode in modes)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype in which ``torch.autocast`` lets attention run."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _run(
    slot: torch.Tensor | None,
    engine: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Result:
    if slot is not None:
        out: torch.Tensor = slots.attend(query, key, value, slot, scale)
        return out
    if return_lse:
        dense, lse = attention(
            query, key, value, scale=scale, causal=is_causal, return_lse=True, engine=engine
        )
        return dense, lse.transpose(1, 2)
    return attention(query, key, value, scale=scale, causal=is_causal, engine=engine)


def _refuse(
    slot: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    return_lse: bool,
    parallel_config: Any,
) -> None:
    reasons = []
    if attn_mask is not None:
        cure = "leave this layer on another backend (enable(..., exclude=[pattern of layer names]))"
        if slot is None:
            cure = (
                "call set_attention_backend('native') on this layer's model (before enable(), if "
                f"it is enabled). set_attention_backend({BACKEND_NAME!r}) of any model makes this "
                "backend that of the whole process, also for models that have not chosen one"
            )
        reasons.append(
            f"it takes no attention mask, got attn_mask of shape {list(attn_mask.shape)}: {cure}"
        )
    if dropout_p:
        reasons.append(f"it has no dropout, got dropout_p={dropout_p}: call .eval() on the model")
    if slot is not None:
        if is_causal:
            reasons.append("LiteAttention is not causal: exclude this layer")
        if return_lse:
            reasons.append("LiteAttention does not hand out an LSE here: exclude this layer")
        if context_parallel.ring_degree(parallel_config) > 1 and getattr(
            parallel_config.context_parallel_config, "ring_anything", False
        ):
            reasons.append(
                "ring_anything splits the rows unequally, and a ring of LiteAttention needs equal "
                "parts: leave it off, or use ulysses_degree (with ulysses_anything) instead"
            )
    if reasons:
        raise ValueError(f"attention backend {BACKEND_NAME!r}: " + "; ".join(reasons))


def register() -> AttentionBackendName:
    """Add ``liteattention_rocm`` to diffusers' attention backends; repeated calls change nothing.

    Returns the enum member, beside which there is one for enabled layers. They stay for the life of
    the process, so that pickled or copied processors that name them keep working.
    """
    _register(ENABLED_NAME)
    return _register(BACKEND_NAME)


def _register(name: str) -> AttentionBackendName:
    if name in AttentionBackendName._value2member_map_:
        return AttentionBackendName(name)
    member = add_member(AttentionBackendName, name)
    dispatch._AttentionBackendRegistry.register(
        member,
        constraints=[dispatch._check_device, dispatch._check_shape],
        supports_context_parallel=True,
    )(_liteattention)
    return member
