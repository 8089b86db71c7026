"""Rows of all heads for all rows of some heads, and back: what the ranks of Ulysses exchange.

What goes from rank to rank is a run of rows of a few heads. On the side of attention that is one
piece of memory, in the tensors that attention reads and writes: nothing is copied there. On the
other side heads are packed into a message or taken out of one, in any order of heads. A rank's own
share is no message: it is copied to its place while the messages are under way.

This module sends messages. :mod:`.peers` does the same through memory that all ranks reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

#: A tensor and the rank of the group that it goes to or comes from.
Message = tuple[torch.Tensor, int]
#: What a tensor is to attention; only one of each is under way at a time.
Role = Literal["q", "k", "v"]


class Exchange(Protocol):
    """How the ranks of a group exchange; all of them make the same calls in the same order."""

    def send(self, role: Role, x: torch.Tensor, order: torch.Tensor | None) -> Any:
        """Begin to send rows [B, S_local, H, D], which are to be [B, S, H / ranks, D].

        ``order`` has the heads of all ranks in a row, on the tensor's device; None: in their order.
        """

    def rows_for_heads(self, sent: Sequence[Any]) -> list[torch.Tensor]:
        """What came of :meth:`send`, each contiguous; good until the next output is exchanged."""

    def drop(self, sent: Any) -> None:
        """Let what nobody takes up arrive."""

    def output(self, q: torch.Tensor) -> torch.Tensor | None:
        """Where attention shall write, shaped as the ``q`` that it reads; None: anywhere."""

    def heads_for_rows(self, out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """[B, S, H / ranks, D] -> [B, S_local, H, D], contiguous, new memory: the way back.

        ``out`` lies in :meth:`output`, if there is one.
        """

    def free(self) -> None:
        """Give back memory that is held from call to call; a later call has its own again."""


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
    """Rows on their way to be those of some heads, from when this is made: :class:`Exchange`."""

    def __init__(
        self, x: torch.Tensor, order: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        given = words(x)
        batch, rows, heads, width = given.shape
        place = given.new_empty((batch, ranks, rows, heads // ranks, width))
        sent, received = [], []
        for peer in others(rank, ranks):
            packed = given[:, :, share(order, peer, heads // ranks)].contiguous()
            sent += [(packed[b], peer) for b in range(batch)]
            received += [(place[b, peer], peer) for b in range(batch)]
        self._under_way = post(sent, received, group)
        self._dtype = x.dtype
        self._given, self._heads = given, share(order, rank, heads // ranks)
        self._place, self._own = place, place[:, rank]

    def copy_own(self) -> None:
        """Copy the share that stays on this rank."""
        self._own.copy_(self._given[:, :, self._heads])

    def wait(self) -> torch.Tensor:
        """Return the whole, contiguous."""
        for work in self._under_way:
            work.wait()
        return self._place.flatten(1, 2).view(self._dtype)


class Messages:
    """Exchange by messages of torch.distributed: any device, any backend, any number of hosts."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def send(self, role: Role, x: torch.Tensor, order: torch.Tensor | None) -> Arriving:
        """See :class:`Exchange`."""
        return Arriving(x, order, self._group)

    def rows_for_heads(self, sent: Sequence[Arriving]) -> list[torch.Tensor]:
        """Copy the shares that stay on this rank while the others arrive."""
        for x in sent:
            x.copy_own()
        return [x.wait() for x in sent]

    def drop(self, sent: Arriving) -> None:
        """Wait: later messages come after it, and it needs its place."""
        sent.wait()

    def output(self, q: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        return None

    def heads_for_rows(self, out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """See :class:`Exchange`; ``out`` may lie in memory as it likes."""
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        parts = torch.unflatten(words(out.contiguous()), 1, (ranks, -1))
        batch, _, rows, room, width = parts.shape
        shape = (batch, rows, room, width)
        arriving = {peer: parts.new_empty(shape) for peer in others(rank, ranks)}
        sent = [(parts[b, peer], peer) for peer in arriving for b in range(batch)]
        received = [(x[b], peer) for peer, x in arriving.items() for b in range(batch)]
        under_way = post(sent, received, self._group)
        made: torch.Tensor = parts.new_empty((batch, rows, ranks * room, width))
        made[:, :, share(order, rank, room)] = parts[:, rank]
        for work in under_way:
            work.wait()
        for peer, x in arriving.items():
            made[:, :, share(order, peer, room)] = x
        return made.view(out.dtype)

    def free(self) -> None:
        """See :class:`Exchange`; a message has memory of its own."""


def others(rank: int, ranks: int) -> list[int]:
    """All other ranks, beginning with the next: not all of them with the same one."""
    return [(rank + i) % ranks for i in range(1, ranks)]


def share(order: torch.Tensor | None, rank: int, room: int) -> slice | torch.Tensor:
    """Which heads a rank has, where each has ``room`` of them."""
    mine = slice(rank * room, (rank + 1) * room)
    return mine if order is None else order[mine]


def words(x: torch.Tensor) -> torch.Tensor:
    """The same memory as words of 8 bytes, if it can be: heads are copied word by word."""
    each = 8 // x.element_size()
    strides = x.stride()
    uneven = any(n % each for n in (x.shape[-1], x.storage_offset(), *strides[:-1]))
    return x if strides[-1] != 1 or uneven else x.view(torch.int64)
