"""Self-attention of a numbered layer as an operator that ``torch.compile`` does not look into.

A layer's skip state is Python, and so is what a framework says about the request and the step. A
compiled graph must hold neither. The layer travels into the operator as a 0-dim tensor with its
number, its *slot*: all layers share one graph, which needs no guard on the layer and finds the
state when it runs. Tracing it twice is not calling it twice.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from liteattention_rocm.remembered import watched


class AttendingLayer(Protocol):
    """What the operators call: one self-attention layer that has skip state."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        """Compute attention on [B,S,H,D] tensors into ``out``."""

    def attend_split(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return attention of this rank's rows to those of all ranks, [B,S_local,H,D]."""


#: Layers by number. Weak: a layer belongs to its model or handle.
_layers: weakref.WeakValueDictionary[int, AttendingLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_slot(layer: AttendingLayer) -> torch.Tensor:
    """Number a layer and return that number as the operators take it: int64, 0-dim, CPU."""
    number = next(_numbers)
    _layers[number] = layer
    # The device is said because models are built under a default device, "meta" mostly.
    return torch.tensor(number, dtype=torch.int64, device="cpu")


#: A recorded graph repeats launches and no Python, which here knows the step and swaps the lists:
#: ``torch.compile(mode="reduce-overhead")`` records what lies between these calls. PyTorch knows
#: that tag from 2.9 on.
_TAGS = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe")


@torch.library.custom_op("liteattention_layers::self_attention", mutates_args=(), tags=_TAGS)
def self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return :meth:`AttendingLayer.attend` of the layer in ``slot``."""
    out = q.new_empty(q.shape)
    _layers[int(slot)].attend(q, k, v, scale, out)
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Same as :func:`self_attention`, without the operator where nothing has to see one.

    The operator takes 20 us of the host, as much as a whole call of our kernel: a compiler, a
    mode, a transform or a derivative must see it, and a call of eager inference need not.
    """
    if torch.compiler.is_compiling() or watched() or torch.is_grad_enabled():
        seen: torch.Tensor = self_attention(q, k, v, slot, scale)
        return seen
    out = q.new_empty(q.shape)
    _layers[int(slot)].attend(q, k, v, scale, out)
    return out


@torch.library.custom_op("liteattention_layers::split_self_attention", mutates_args=(), tags=_TAGS)
def split_self_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return :meth:`AttendingLayer.attend_split` of the layer in ``slot``."""
    return _layers[int(slot)].attend_split(q, k, v, scale)


@self_attention.register_fake
@split_self_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, scale: float | None
) -> torch.Tensor:
    return q.new_empty(q.shape)
