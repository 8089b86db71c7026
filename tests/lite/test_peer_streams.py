"""The order of what peer memory starts on streams of a GPU, on streams that only keep count.

Nothing here runs later than it is started, so results say nothing. What is checked is what a GPU
may run before what: each stream knows the copies and meetings that it comes after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode

from liteattention_rocm.lite import peers

RANKS, RANK = 3, 1
BATCH, ROWS, HEADS, WIDTH = 2, 4, 6, 8
ORDERS = [None, torch.tensor([3, 0, 5, 1, 4, 2])]


class Stream:
    """What work on a stream comes after."""

    def __init__(self) -> None:
        self.behind: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.behind |= other.behind

    def wait_event(self, event: Event) -> None:
        self.behind |= event.behind


class Event:
    """A place in a stream."""

    def record(self, stream: Stream) -> None:
        self.behind = set(stream.behind)


class Device(TorchDispatchMode):
    """Numbers copies and meetings, and notes what each comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.copies: dict[int, set[int]] = {}
        self.meetings: list[int] = []

    def start(self) -> int:
        number = len(self.copies) + len(self.meetings)
        self.current.behind.add(number)
        return number

    def meet(self, channel: int) -> None:
        assert set(self.copies) <= self.current.behind, "a copy may still run when all have met"
        self.meetings.append(self.start())

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "index_put_") or (name == "index_select" and "out" in (kwargs or {})):
            before = set(self.current.behind)
            self.copies[self.start()] = before
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: RANKS)
    monkeypatch.setattr(dist, "get_rank", lambda *_: RANK)
    return device


def memory(device: Device) -> Any:
    """The memory of one of three ranks, as it is on a GPU once all have it."""
    way: Any = peers.PeerMemory(None)
    place = BATCH * ROWS * HEADS * WIDTH * 4
    way._place, way._device, way._memories = place, torch.device("cpu"), 1
    way._all = [torch.zeros(4 * place, dtype=torch.uint8) for _ in range(RANKS)]
    way._side = {peer: Stream() for peer in way._others}
    way._meet = device.meet
    return way


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "dealt"])
def test_copies_and_meetings_come_one_after_another(
    device: Device, order: torch.Tensor | None
) -> None:
    way = memory(device)
    done: set[int] = set()
    with device:
        for call in range(3):
            if call == 2:
                device.current = Stream()  # of another call, which knows nothing of the first ones
            device.current.behind.add(-1 - call)  # what made q, k and v
            x = [torch.ones(BATCH, ROWS, HEADS, WIDTH) for _ in range(3)]
            started = set(device.copies)
            given = way.rows_for_heads(
                [way.send(role, t, order) for role, t in zip("qkv", x, strict=True)]
            )
            written = set(device.copies) - started
            assert len(written) == 3 * RANKS
            assert all(-1 - call in device.copies[n] for n in written), "written before it is made"
            assert all(done <= device.copies[n] for n in written), "read by the call before"
            out = way.output(given[0])
            started = set(device.copies)
            way.heads_for_rows(out, order)
            fetched = set(device.copies) - started
            assert len(fetched) == RANKS
            met = device.meetings[-1]
            assert all(met in device.copies[n] for n in fetched), "fetched before all have met"
            assert set(device.copies) <= device.current.behind, "rows may still be on their way"
            done = set(device.copies) | set(device.meetings)
    assert len(device.meetings) == 6


class Alone:
    """The symmetric memory of one of two GPUs, the other of which never comes to a meeting."""

    rank, world_size = 0, 2

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(sizes, rank, dtype=dtype)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms, "0 waits for ever"
        raise RuntimeError(f"channel {channel}: nobody came in {timeout_ms / 60_000:g} minutes")


def test_a_meeting_ends_if_a_rank_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: Alone())
    own = torch.zeros(8, dtype=torch.uint8)
    parts, meet = peers._rendezvous(own, None)
    assert parts[0] is own and parts[1].tolist() == [1] * 8
    with pytest.raises(RuntimeError, match="channel 1: nobody came in 10 minutes"):
        meet(1)
