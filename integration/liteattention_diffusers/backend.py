"""The attention backend ``liteattention_rocm`` of diffusers' dispatcher, and the operator in it.

diffusers keeps its backend names in a closed ``str`` enum, so the name is added as a member by
hand. The backend function is called with tensors only; which layer is calling is said just
before by a hook on the attention module (:mod:`.layers`) in a per-thread note. The layer travels
into a ``torch.library`` operator as a 0-dim tensor holding its number, so that a compiled graph
holds no Python state, needs no guard on the layer and finds the skip state when it runs.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import Any, Protocol

import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from liteattention_rocm import attention

#: What a backend returns: the output, or (output, LSE).
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

BACKEND_NAME = "liteattention_rocm"
_MEMBER_NAME = "LITEATTENTION_ROCM"


class AttendingLayer(Protocol):
    """What the operator calls: one self-attention layer that has skip state."""

    name: str

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        """Compute attention on [B,S,H,D] tensors into ``out``."""

    def attend_ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return attention of this rank's rows to those of all ranks of a ring, [B,S_local,H,D]."""


class _Note:
    """Who is calling the dispatcher: written by a module's hook, read once by the backend.

    Owner: this module; one per thread, plus one for code that ``torch.compile`` is tracing.
    Lifetime: set when an attention module is entered, cleared when it is left.
    """

    def __init__(self) -> None:
        self.inside = False
        self.slot: torch.Tensor | None = None
        self.previous: AttentionBackendName | None = None
        self.dense = False
        self.engine: str | None = None


class _ThreadNote(_Note, threading.local):
    pass


_thread_note = _ThreadNote()
# Dynamo cannot trace a thread-local. What it traces it replays in program order, and the slot
# itself is baked into the graph as an input, so one plain object is enough while compiling.
_traced_note = _Note()

#: Layers by number. Weak: a layer belongs to its handle.
_layers: weakref.WeakValueDictionary[int, AttendingLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_slot(layer: AttendingLayer) -> torch.Tensor:
    """Number a layer and return that number as the operator takes it: int64, 0-dim, CPU."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def enter(
    slot: torch.Tensor | None,
    previous: AttentionBackendName | None,
    *,
    dense: bool = False,
    engine: str | None = None,
) -> None:
    """Note that an attention module is entered; ``slot`` None says: not self-attention.

    ``previous`` is the backend the module had before, None for the process-wide one; a call
    without a slot goes there unless ``dense`` says that ours takes it, on ``engine``.
    """
    note = _traced_note if torch.compiler.is_compiling() else _thread_note
    note.inside, note.slot, note.previous = True, slot, previous
    note.dense, note.engine = dense, engine


def leave() -> None:
    """Note that the attention module is left."""
    note = _traced_note if torch.compiler.is_compiling() else _thread_note
    note.inside, note.slot, note.previous = False, None, None
    note.dense, note.engine = False, None


@torch.library.custom_op("liteattention_rocm_diffusers::self_attention", mutates_args=())
def _self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    out = q.new_empty(q.shape)
    _layers[int(slot)].attend(q, k, v, scale, out)
    return out


@_self_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("liteattention_rocm_diffusers::ring_self_attention", mutates_args=())
def _ring_self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return _layers[int(slot)].attend_ring(q, k, v, scale)


@_ring_self_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return q.new_empty(q.shape)


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
    note = _traced_note if torch.compiler.is_compiling() else _thread_note
    if not note.inside and not torch.compiler.is_compiling():
        # The hook ran in a compiled frame that broke before this call.
        note = _traced_note
    slot, previous, inside, engine = note.slot, note.previous, note.inside, note.engine
    note.slot = None  # one module call holds one self-attention; what follows is an adapter's
    if inside and slot is None and not note.dense:
        own = previous or dispatch._AttentionBackendRegistry.get_active_backend()[0]
        if own != BACKEND_NAME:
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
    _refuse(slot, attn_mask, dropout_p, is_causal, return_lse, _parallel_config)
    if slot is not None and _ring_degree(_parallel_config) > 1:
        return _ring(slot, query, key, value, scale, _parallel_config.context_parallel_config)
    if _parallel_config is not None:
        gathered: Result = dispatch._templated_context_parallel_attention(
            query,
            key,
            value,
            None,
            0.0,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            forward_op=functools.partial(_parallel_forward, slot, engine),
            backward_op=_parallel_backward,
            _parallel_config=_parallel_config,
        )
        return gathered
    return _run(slot, engine, query, key, value, is_causal, scale, return_lse)


def _ring_degree(parallel_config: Any) -> int:
    context = getattr(parallel_config, "context_parallel_config", None)
    return 1 if context is None else int(context.ring_degree)


def _ring(
    slot: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    context: Any,
) -> torch.Tensor:
    """Attend in a ring of our own: diffusers' does not say whose keys a call sees.

    With ``ulysses_degree`` too, rows are exchanged for heads around it.
    """
    exchange = dispatch.SeqAllToAllDim.apply
    if context.ulysses_degree > 1:
        group = context._ulysses_mesh.get_group()
        query, key, value = (exchange(group, x, 2, 1) for x in (query, key, value))
    out: torch.Tensor = _ring_self_attention(query, key, value, slot, scale)
    return exchange(group, out, 1, 2) if context.ulysses_degree > 1 else out


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
        out: torch.Tensor = _self_attention(query, key, value, slot, scale)
        return out
    if return_lse:
        dense, lse = attention(
            query, key, value, scale=scale, causal=is_causal, return_lse=True, engine=engine
        )
        return dense, lse.transpose(1, 2)
    return attention(query, key, value, scale=scale, causal=is_causal, engine=engine)


def _parallel_forward(
    slot: torch.Tensor | None,
    engine: str | None,
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
) -> Result:
    return _run(slot, engine, query, key, value, is_causal, scale, return_lse)


def _parallel_backward(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"the attention backend {BACKEND_NAME!r} has no backward pass: use it under torch.no_grad()"
    )


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
        reasons.append(
            f"it takes no attention mask, got attn_mask of shape {list(attn_mask.shape)}: leave "
            "this layer on another backend (enable(..., exclude=[pattern of layer names]))"
        )
    if dropout_p:
        reasons.append(f"it has no dropout, got dropout_p={dropout_p}: call .eval() on the model")
    if slot is not None:
        if is_causal:
            reasons.append("LiteAttention is not causal: exclude this layer")
        if return_lse:
            reasons.append("LiteAttention does not hand out an LSE here: exclude this layer")
        if _ring_degree(parallel_config) > 1 and getattr(
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

    Returns the enum member. It stays for the life of the process, so that pickled or copied
    processors that name it keep working.
    """
    known = AttentionBackendName.__members__.get(_MEMBER_NAME)
    if known is not None:
        return known
    member = str.__new__(AttentionBackendName, BACKEND_NAME)
    member._name_ = _MEMBER_NAME
    member._value_ = BACKEND_NAME
    member.__objclass__ = AttentionBackendName
    member._sort_order_ = len(AttentionBackendName._member_names_)
    type.__setattr__(AttentionBackendName, _MEMBER_NAME, member)
    AttentionBackendName._member_names_.append(_MEMBER_NAME)
    AttentionBackendName._member_map_[_MEMBER_NAME] = member
    AttentionBackendName._value2member_map_[BACKEND_NAME] = member
    dispatch._AttentionBackendRegistry.register(
        member,
        constraints=[dispatch._check_device, dispatch._check_shape],
        supports_context_parallel=True,
    )(_liteattention)
    return member
