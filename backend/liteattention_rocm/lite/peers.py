"""What the ranks of Ulysses exchange (:mod:`.exchange`), through memory that all of them reach.

A rank writes its rows of another's heads to where that one's attention reads them, and fetches the
outputs of its rows from where the other's attention wrote them. Nothing is packed, sent or taken
out of messages. All ranks meet twice in a call: once q, k and v lie in their places, and once
attention is through. So a place is free when a rank writes to it: its owner had read it before the
second meeting of the last call.

GPUs of one host reach each other's memory through PyTorch's symmetric memory
(``torch.distributed._symmetric_memory``), and meet in a small kernel. CPU processes of one host
map files into shared memory, which runs the same code without a GPU.

Method: symmetric memory as in DeepEP and PyTorch's own asynchronous tensor parallelism.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .exchange import Role, others, share, words

#: Where a tensor lies in a rank's memory: that many places in.
_PLACES = {"q": 0, "k": 1, "v": 2, "out": 3}
#: Places begin at multiples of this, in bytes, as tensors of PyTorch's own do.
_ALIGNMENT = 512
#: Milliseconds that a GPU waits for others at a meeting, then it stops with an error; as NCCL does.
_PATIENCE = 600_000


class _Sent:
    """A tensor that is being written to the places of other ranks."""

    def __init__(
        self, role: Role, x: torch.Tensor, order: torch.Tensor | None, memory: int
    ) -> None:
        self.role, self.x, self.order = role, x, order
        #: In which of the memories that there have been.
        self.memory = memory


class PeerMemory:
    """Exchange through memory that all ranks of a group reach: :class:`.exchange.Exchange`.

    Key: the group. Owner: a :class:`.parallel.SeqParallel`. Lifetime: that one's. On each rank it
    holds four times the largest of the rank's q, k, v and output so far. Calls come from one stream
    or from several, one after the other.

    Raises, at the first call and on all ranks, ``RuntimeError`` with every reason if the ranks
    cannot reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._place = 0  # bytes of a place
        self._memories = 0
        self._device: torch.device | None = None
        self._all: list[torch.Tensor] = []  # the memory of each rank, bytes
        self._meet: Callable[[int], None] = lambda channel: None
        self._others = others(self._rank, self._ranks)
        self._side: dict[int, torch.cuda.Stream] = {}  # a stream for each of them, on GPUs
        self._done: torch.cuda.Event | None = None
        self._under_way: list[torch.Tensor] = []  # what streams of ours may read or write

    def send(self, role: Role, x: torch.Tensor, order: torch.Tensor | None) -> _Sent:
        """See :class:`.exchange.Exchange`."""
        self._reserve(x.numel() * x.element_size(), x.device)
        sent = _Sent(role, x, order, self._memories)
        self._write(sent)
        return sent

    def rows_for_heads(self, sent: Sequence[_Sent]) -> list[torch.Tensor]:
        """Copy the shares that stay on this rank while the others are written; meet."""
        for x in sent:
            if x.memory != self._memories:  # a larger tensor came after it
                self._write(x)
        for x in sent:
            given = words(x.x)
            place = self._held(x.role, self._rank, given, self._rank)
            _copy(place, given, share(x.order, self._rank, place.shape[2]), into=False)
        self._join()
        self._meet(0)
        return [self._whole(x) for x in sent]

    def drop(self, sent: _Sent) -> None:
        """See :class:`.exchange.Exchange`; what is written to the same place comes after it."""

    def output(self, q: torch.Tensor) -> torch.Tensor:
        """See :class:`.exchange.Exchange`."""
        return self._at("out", self._rank, q.numel() * q.element_size()).view(q.dtype).view(q.shape)

    def heads_for_rows(self, out: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """See :class:`.exchange.Exchange`."""
        assert out.data_ptr() == self.output(out).data_ptr(), "other ranks fetch it from there"
        own = torch.unflatten(words(out), 1, (self._ranks, -1))
        batch, _, rows, room, width = own.shape
        made: torch.Tensor = own.new_empty((batch, rows, self._ranks * room, width))
        self._under_way.append(made)
        size = out.numel() * out.element_size()
        self._meet(1)  # another channel: if a rank has failed, two different meetings do not match
        for peer in self._others:
            with self._beside(peer):
                theirs = self._at("out", peer, size).view(own.dtype).view(own.shape)
                self._carry(made, theirs[:, self._rank], share(order, peer, room), into=True)
        _copy(made, own[:, self._rank], share(order, self._rank, room), into=True)
        self._join()
        if self._side:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(self._device))
        return made.view(out.dtype)

    def free(self) -> None:
        """See :class:`.exchange.Exchange`; other ranks keep what they have mapped of it."""
        if self._all:
            self._wait()
            self._forget()

    def _wait(self) -> None:
        """Wait until nothing of this rank reads or writes anyone's memory."""
        self._join()
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _forget(self) -> None:
        """Let go of the memory of all ranks."""
        self._place, self._all, self._side, self._done = 0, [], {}, None
        self._meet = lambda channel: None  # which holds that memory

    def _write(self, sent: _Sent) -> None:
        """Write a tensor's heads of other ranks to their places."""
        given = words(sent.x)
        self._under_way += [given] if sent.order is None else [given, sent.order]
        if self._done is not None:  # the call before may have come from another stream
            torch.cuda.current_stream(self._device).wait_event(self._done)
        for peer in self._others:
            with self._beside(peer):
                place = self._held(sent.role, peer, given, self._rank)
                self._carry(place, given, share(sent.order, peer, place.shape[2]), into=False)

    def _whole(self, sent: _Sent) -> torch.Tensor:
        """A tensor of this rank's heads, once all ranks wrote their rows."""
        batch, rows, heads, width = sent.x.shape
        shape = (batch, self._ranks * rows, heads // self._ranks, width)
        size = sent.x.numel() * sent.x.element_size()
        return self._at(sent.role, self._rank, size).view(sent.x.dtype).view(shape)

    def _held(self, role: str, owner: int, given: torch.Tensor, rank: int) -> torch.Tensor:
        """Where the rows of ``rank`` lie with ``owner``: [B, S_local, H / ranks, D]."""
        batch, rows, heads, width = given.shape
        shape = (batch, self._ranks, rows, heads // self._ranks, width)
        size = given.numel() * given.element_size()
        return self._at(role, owner, size).view(given.dtype).view(shape)[:, rank]

    def _at(self, role: str, owner: int, size: int) -> torch.Tensor:
        """``size`` bytes of a place of a rank's memory."""
        return self._all[owner].narrow(0, _PLACES[role] * self._place, size)

    def _carry(
        self, target: torch.Tensor, source: torch.Tensor, heads: slice | torch.Tensor, *, into: bool
    ) -> None:
        """As :func:`_copy`, from or to another rank, leaving the GPU to what runs meanwhile."""
        copies = _copies() if target.device.type == "cuda" else None
        if copies is None or not target.stride(-1) == source.stride(-1) == 1:
            _copy(target, source, heads, into=into)
            return
        programs = -(-copies.PROGRAMS // len(self._others))
        copies.copy(target, source, heads, into=into, programs=programs)

    @contextlib.contextmanager
    def _beside(self, peer: int) -> Iterator[None]:
        """Make the stream of another rank the current one, from where that stands.

        So the links to all ranks are used at once.
        """
        stream = self._side.get(peer)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def _join(self) -> None:
        """Let the current stream wait for those of other ranks."""
        for stream in self._side.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._under_way.clear()

    def _reserve(self, size: int, device: torch.device) -> None:
        """Have places of ``size`` bytes at least; all ranks ask for the same."""
        if size <= self._place and device == self._device:
            return
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():
            if self._all:  # nobody may be reading or writing what is freed
                self._wait()
                dist.barrier(self._group)
                self._forget()
            self._check(device)
            place = -(-size // _ALIGNMENT) * _ALIGNMENT
            with torch.inference_mode(False):
                self._map(len(_PLACES) * place, device)
            self._place, self._device = place, device
            self._memories += 1
            if cuda:
                self._side = {
                    peer: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    for peer in self._others
                }

    def _check(self, device: torch.device) -> None:
        """Raise on all ranks alike if they cannot reach each other's memory."""
        where = self._gathered((_host(), device.index))
        reasons = _reasons(device)
        hosts = len({host for host, _ in where})
        if hosts > 1:
            reasons.append(f"the ranks are on {hosts} hosts")
        elif device.type == "cuda":
            reasons += _unreachable(device.index, [index for _, index in where])
        self._agree(reasons)

    def _map(self, size: int, device: torch.device) -> None:
        """Have ``size`` bytes on each rank, and reach those of all."""
        if device.type == "cuda":
            own = self._together(lambda: _allocate(size, device))
            whole = dist.group.WORLD if self._group is None else self._group
            self._all, self._meet = self._together(lambda: _rendezvous(own, whole))
            return
        made: list[tuple[str, bytes]] = []  # also where another rank had no room
        try:
            self._together(lambda: made.append(_create(size)))
            files = self._gathered(made[0])
            self._all = self._together(lambda: [_opened(*file, size=size) for file in files])
        finally:
            for name, _ in made:
                os.unlink(name)
        self._meet = self._meet_on_cpu

    def _meet_on_cpu(self, channel: int) -> None:
        if len(set(self._gathered(channel))) > 1:
            raise RuntimeError(
                "the ranks are at different places of a call, as one of them failed in the call "
                "before: go on with a new generation on all ranks"
            )

    def _together(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, unless it fails on any rank."""
        result, reasons = None, []
        try:
            result = work()
        except (RuntimeError, OSError) as error:
            reasons = [" ".join(str(error).split())[:300] or type(error).__name__]
        self._agree(reasons)
        return result

    def _agree(self, reasons: list[str]) -> None:
        """Raise on all ranks if any has a reason."""
        reasons = list(dict.fromkeys(why for each in self._gathered(reasons) for why in each))
        if reasons:
            raise RuntimeError(
                "the ranks cannot reach each other's memory, leave peer_memory off: "
                + "; ".join(reasons)
            )

    def _gathered(self, fact: Any) -> list[Any]:
        """What all ranks say."""
        facts: list[Any] = [None] * self._ranks
        dist.all_gather_object(facts, fact, self._group)
        return facts


def _copy(
    target: torch.Tensor, source: torch.Tensor, heads: slice | torch.Tensor, *, into: bool
) -> None:
    """Copy ``source[:, :, heads]`` to ``target`` or, ``into``, all of it to those heads there."""
    if into:
        target[:, :, heads] = source
    elif isinstance(heads, slice):
        target.copy_(source[:, :, heads])
    else:
        torch.index_select(source, 2, heads, out=target)


@functools.cache
def _copies() -> Any | None:
    """Our kernel of such copies; None where the portable kernels are not what attends."""
    if torch.version.hip is not None:  # nobody has run it there
        return None
    try:
        from ..engines.triton import copies
    except ImportError:
        return None
    return copies


def _host() -> str:
    """What tells hosts, and containers that share nothing, apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"


def _reasons(device: torch.device) -> list[str]:
    """What is against memory for all ranks on this device."""
    if device.type == "cpu":
        return []
    if device.type != "cuda":
        return [f"there is none on {device.type} devices"]
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError:
        return [f"torch {torch.__version__} has no symmetric memory"]
    if not (hasattr(symmetric, "empty") and hasattr(symmetric, "rendezvous")):
        return [f"torch {torch.__version__} has no symmetric memory that can be allocated"]
    return []


def _unreachable(own: int, indices: Sequence[int]) -> list[str]:
    """GPUs of ``indices`` that this one cannot reach, as far as this process sees them."""
    if len(set(indices)) < len(indices):
        return []  # each process has its own numbers
    return [
        f"cuda:{own} cannot reach cuda:{index}"
        for index in indices
        if index not in (own, None)
        and index < torch.cuda.device_count()
        and not torch.cuda.can_device_access_peer(own, index)
    ]


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    """Memory of a GPU that others can map."""
    from torch.distributed import _symmetric_memory as symmetric

    own: torch.Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
    return own


def _rendezvous(own: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], Callable[[int], None]]:
    """The memory of each rank, and how they meet."""
    from torch.distributed import _symmetric_memory as symmetric

    handle = symmetric.rendezvous(own, group)
    parts = [
        own if rank == handle.rank else handle.get_buffer(rank, own.shape, torch.uint8)
        for rank in range(handle.world_size)
    ]
    return parts, lambda channel: handle.barrier(channel, _PATIENCE)


def _create(size: int) -> tuple[str, bytes]:
    """A file in shared memory with room for ``size`` bytes, and what stands behind them."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    token = os.urandom(16)
    file, name = tempfile.mkstemp(prefix="liteattention-", dir=shared)
    try:
        # Now, and not when a page is written to, which would end the process.
        os.posix_fallocate(file, 0, size + len(token))
        os.pwrite(file, token, size)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(file)
    return name, token


def _opened(name: str, token: bytes, *, size: int) -> torch.Tensor:
    """The memory of a rank, if its file is the one that is found here."""
    with open(name, "rb") as file:  # in another container there may be none, or another
        file.seek(size)
        if file.read() != token:
            raise OSError(f"{name} is another file than that of another rank")
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
