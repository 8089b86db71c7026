"""Counts of tiles that no GPU has to be waited for."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..engines.workspace import stream_of
from .bitmap import popcount_into

#: Counters that are made at a time.
_CHUNK = 512


class _Chunk:
    """int64 counters on one device, handed out in pairs and read back together."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.used = 0


class Counter(NamedTuple):
    """A count that is still on a device: :class:`CountReader` reads it."""

    chunk: _Chunk
    place: int


#: Numbers of CPU tensors are known at once.
Count = int | Counter


class Noted(NamedTuple):
    """A call that can be made again without its tensors: its layer, branch, shape and plan."""

    layer: str
    branch: str
    shape: Any
    plan: Any


class Noting:
    """Calls that are being noted, see :meth:`.attention.LiteAttention.noting`.

    ``complete`` is False once there was a call that the dispatcher had to see.
    """

    def __init__(self, block: torch.Tensor | None) -> None:
        self.block = block
        self.calls: list[Noted] = []
        self.complete = True
        self._depends: list[Hashable] = []

    def add(self, call: Noted, depends: Hashable) -> None:
        """Note a call and what its launches depend on."""
        self.complete = self.complete and call.plan.calls is not None
        self.calls.append(call)
        self._depends.append(depends)

    @property
    def signature(self) -> Hashable:
        """What all launches depend on."""
        return tuple(self._depends)


class TileCounters(threading.local):
    """Counts the tiles of bitmaps, or has the engine count them.

    Key: thread, device and stream of counters and work space, which must not be shared. Owner: a
    :class:`~liteattention_rocm.LiteAttention`. Lifetime: its owner's, or the thread's.
    """

    def __init__(self) -> None:
        self._chunks: dict[tuple[torch.device, int], _Chunk] = {}
        self._scratch: dict[tuple[torch.device, int], torch.Tensor] = {}
        #: Who notes the calls of this thread.
        self.noting: Noting | None = None

    def count(self, bitmap: torch.Tensor) -> Count:
        """Count the set bits of a contiguous bitmap without waiting for its device."""
        if bitmap.device.type == "cpu":
            from .._core import count_bits  # a machine with a GPU does without the module

            return count_bits(bitmap.data_ptr(), bitmap.numel())
        return self.count_later(bitmap)

    def count_later(self, bitmap: torch.Tensor) -> Counter:
        """Launch the count of the set bits of a contiguous bitmap.

        Allocates nothing once a thread and stream have counted a bitmap of this size or a larger
        one, but for 512 counters at a time.
        """
        size, device = bitmap.numel(), bitmap.device
        _, counter, _ = self.tally(device)
        key = (device, stream_of(device)(device.index or 0))
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < 2 * size:
            with torch.inference_mode(False):
                scratch = torch.empty(2 * size, dtype=torch.int32, device=device)
            self._scratch[key] = scratch
        out = counter.chunk.values[counter.place]
        popcount_into(bitmap.view(-1), scratch[:size], scratch[size : 2 * size], out)
        return counter

    def tally(self, device: torch.device) -> tuple[torch.Tensor, Counter, Counter]:
        """Hand out two counters: the tensor of both, int64 [2], and each of them.

        For launches on the device's current stream. Allocates 512 counters at a time.
        """
        key = (device, stream_of(device)(device.index or 0))
        chunk = self._chunks.get(key)
        if chunk is None or chunk.used == _CHUNK:
            with torch.inference_mode(False):
                made = torch.zeros(_CHUNK, dtype=torch.int64, device=device)
            chunk = self._chunks[key] = _Chunk(made)
        place = chunk.used
        chunk.used = place + 2
        return chunk.values.narrow(0, place, 2), Counter(chunk, place), Counter(chunk, place + 1)

    def copied(self, block: torch.Tensor) -> list[tuple[Counter, Counter]]:
        """Copy counts, int64 [calls, 2], into counters of their own: two for each call."""
        with torch.inference_mode(False):
            chunk = _Chunk(block.flatten().clone())
        return [(Counter(chunk, 2 * i), Counter(chunk, 2 * i + 1)) for i in range(len(block))]


class CountReader:
    """Reads counters back: one wait and one copy per chunk of 512 counters."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[_Chunk, list[int]]] = {}

    def __call__(self, value: Count) -> int:
        """Return a count as a number; one that came after the first of its chunk may read 0."""
        if isinstance(value, int):
            return value
        key = id(value.chunk)
        if key not in self._chunks:
            if value.chunk.values.is_cuda:
                # counts may have been made on any stream
                torch.cuda.synchronize(value.chunk.values.device)
            self._chunks[key] = value.chunk, value.chunk.values.tolist()
        return self._chunks[key][1][value.place]
