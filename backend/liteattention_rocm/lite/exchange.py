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


class Arriving:
    """Rows [B, S_local, H, D] on their way to be [B, S, H / ranks, D], from when this is made.

    ``order`` has the heads of all ranks in a row, on the tensor's device; None: in their order.
    """

    def __init__(
        self, x: torch.Tensor, order: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        given = _words(x)
        batch, rows, heads, width = given.shape
        place = given.new_empty((batch, ranks, rows, heads // ranks, width))
        sent, received = [], []
        for peer in _others(rank, ranks):
            packed = given[:, :, _share(order, peer, place)].contiguous()
            sent += [(packed[b], peer) for b in range(batch)]
            received += [(place[b, peer], peer) for b in range(batch)]
        self._under_way = post(sent, received, group)
        self._dtype = x.dtype
        self._given, self._heads = given, _share(order, rank, place)
        self._place, self._own = place, place[:, rank]

    def copy_own(self) -> None:
        """Copy the share that stays on this rank."""
        self._own.copy_(self._given[:, :, self._heads])

    def wait(self) -> torch.Tensor:
        """Return the whole, contiguous."""
        for work in self._under_way:
            work.wait()
        return self._place.flatten(1, 2).view(self._dtype)


def rows_for_heads(tensors: Sequence[Arriving]) -> list[torch.Tensor]:
    """Copy the shares that stay on this rank while the others arrive."""
    for x in tensors:
        x.copy_own()
    return [x.wait() for x in tensors]


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
