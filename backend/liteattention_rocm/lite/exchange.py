"""Rows of all heads for all rows of some heads, and back: what the ranks of Ulysses exchange.

What goes from rank to rank is a run of rows of a few heads. On the side of attention that is one
piece of memory, in the tensors that attention reads and writes: nothing is copied there. On the
other side heads are packed into a message or taken out of one, in any order of heads. A rank's own
share is no message: it is copied to its place while the messages are under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

#: A tensor and the rank of the group that it goes to or comes from.
Message = tuple[torch.Tensor, int]


def post(
    sent: Sequence[Message], received: Sequence[Message], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Begin to send and to receive, in this order between each two ranks; wait for the result.

    On a GPU that is the current stream's waiting, not the host's.
    """
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    messages = [
        dist.P2POp(way, x, dist.get_global_rank(whole, peer), group)
        for way, pairs in ((dist.isend, sent), (dist.irecv, received))
        for x, peer in pairs
    ]
    return list(dist.batch_isend_irecv(messages)) if messages else []


def rows_for_heads(
    tensors: Sequence[torch.Tensor],
    orders: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """[B, S_local, H, D] each -> [B, S, H / ranks, D] each, contiguous.

    ``orders`` has for each tensor the heads of all ranks in a row, on its device; None: in their
    order. Every tensor is under way while the next is packed.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    places, under_way = [], []
    given = [_words(x) for x in tensors]
    for x, order in zip(given, orders, strict=True):
        batch, rows, heads, width = x.shape
        place = x.new_empty((batch, ranks, rows, heads // ranks, width))
        sent, received = [], []
        for peer in _others(rank, ranks):
            packed = x[:, :, _share(order, peer, place)].contiguous()
            sent += [(packed[b], peer) for b in range(batch)]
            received += [(place[b, peer], peer) for b in range(batch)]
        under_way += post(sent, received, group)
        places.append(place)
    for x, order, place in zip(given, orders, places, strict=True):
        place[:, rank] = x[:, :, _share(order, rank, place)]
    for work in under_way:
        work.wait()
    return [place.flatten(1, 2).view(x.dtype) for place, x in zip(places, tensors, strict=True)]


def heads_for_rows(
    out: torch.Tensor, order: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[B, S, H / ranks, D] -> [B, S_local, H, D], contiguous: the way back."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = torch.unflatten(_words(out.contiguous()), 1, (ranks, -1))
    batch, _, rows, room, width = parts.shape
    shape = (batch, rows, room, width)
    arriving = {peer: parts.new_empty(shape) for peer in _others(rank, ranks)}
    sent = [(parts[b, peer], peer) for peer in arriving for b in range(batch)]
    received = [(x[b], peer) for peer, x in arriving.items() for b in range(batch)]
    under_way = post(sent, received, group)
    made: torch.Tensor = parts.new_empty((batch, rows, ranks * room, width))
    made[:, :, _share(order, rank, parts)] = parts[:, rank]
    for work in under_way:
        work.wait()
    for peer, x in arriving.items():
        made[:, :, _share(order, peer, parts)] = x
    return made.view(out.dtype)


def _others(rank: int, ranks: int) -> list[int]:
    """All other ranks, beginning with the next: not all of them with the same one."""
    return [(rank + i) % ranks for i in range(1, ranks)]


def _share(order: torch.Tensor | None, rank: int, parts: torch.Tensor) -> slice | torch.Tensor:
    """Which heads a rank has, where ``parts`` is [..., H / ranks, D]."""
    room = parts.shape[-2]
    mine = slice(rank * room, (rank + 1) * room)
    return mine if order is None else order[mine]


def _words(x: torch.Tensor) -> torch.Tensor:
    """The same memory as words of 8 bytes, if it can be: heads are copied word by word."""
    each = 8 // x.element_size()
    strides = x.stride()
    uneven = any(n % each for n in (x.shape[-1], x.storage_offset(), *strides[:-1]))
    return x if strides[-1] != 1 or uneven else x.view(torch.int64)
