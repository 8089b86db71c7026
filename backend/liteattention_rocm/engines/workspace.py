"""Scratch memory and counters of bound calls: one buffer for each thread and stream.

Calls of one thread on one stream run one after the other, so they may share memory; a call of
another thread or stream gets its own. The largest that was asked for is kept for as long as the
thread lives: for the main thread, that is the process. A call that is being captured in a graph
takes its memory from the graph's pool, which lives as long as the graph does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

#: In place of a buffer that is not there.
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
#: Handle of the current stream of a GPU by its index; None in builds of PyTorch without GPUs.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


# C functions, as those of GPUs are: a repeated call passes no Python function here.
_no_stream: Any = (0).__mul__
_never: Any = bool


def stream_of(device: torch.device) -> Callable[[int], int]:
    """Return what gives the handle of the current stream by the index of ``device``."""
    found: Callable[[int], int] = _no_stream if device.type == "cpu" else raw_stream
    return found


@functools.cache
def capturing_on(device: torch.device) -> Callable[[], bool]:
    """Return what says whether launches on ``device`` become part of a graph now.

    PyTorch says it of the current device alone, which need not be the one that a call is on.
    """
    if device.type != "cuda":
        never: Callable[[], bool] = _never
        return never
    here: Callable[[], bool] = _capturing
    if torch.cuda.device_count() < 2:
        return here

    def capturing() -> bool:
        if _current_device() == device.index:
            return here()
        with torch.cuda.device(device):
            return here()

    return capturing


class Workspaces(threading.local):
    """Buffers of one engine.

    Key: thread, device and stream. Owner: the engine. Lifetime: until a larger one is asked for,
    or the thread ends. ``held`` has those of this thread, for calls that need no larger one:

        if capturing() or (workspace := held.get((device, stream), NOTHING)).numel() < size:
            workspace = workspaces.take(device, stream, size)

    ``pairs`` has the counters of each device and stream of this thread.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[torch.device, int], torch.Tensor] = {}
        self.pairs: dict[tuple[torch.device, int], list[torch.Tensor]] = {}

    def take(self, device: torch.device, stream: int, size: int) -> torch.Tensor:
        """Return at least ``size`` bytes, aligned to 256, for the launches of one call.

        ``device`` and ``stream`` are those that the call runs on; the stream is 0 for CPU tensors.
        Keep what is returned until everything is launched.
        """
        if capturing_on(device)():
            return torch.empty(size, dtype=torch.uint8, device=device)
        found = self.held.get((device, stream))
        if found is None or found.numel() < size:
            with torch.inference_mode(False):
                found = torch.empty(size, dtype=torch.uint8, device=device)
            self.held[device, stream] = found
        return found

    def counters(self, device: torch.device, stream: int, words: int = 4) -> list[torch.Tensor]:
        """Take two counters, int32 [words] each, for a launch that takes tiles off the first.

        Two words of that one hold 0, and the launch makes those of the second one 0. Once it is
        launched, :meth:`keep` them for the next one. If it fails they are gone, whatever they hold,
        and others are made. Arguments as of :meth:`take`. Launches of a stream may share counters,
        as they run one after the other; a graph clears its own whenever it is replayed.
        """
        if capturing_on(device)():
            return _pair(device, words)
        found = self.pairs.pop((device, stream), None)
        if found is None or found[0].numel() < words:
            with torch.inference_mode(False):
                found = _pair(device, words)
        return found

    def keep(self, device: torch.device, stream: int, counters: list[torch.Tensor]) -> None:
        """Keep counters of a launch for the next one, which takes tiles off the other one."""
        if not capturing_on(device)():
            counters.reverse()
            self.pairs[device, stream] = counters


def _pair(device: torch.device, words: int) -> list[torch.Tensor]:
    """Two counters that hold 0, each at a multiple of 16 bytes."""
    return list(torch.zeros(2, -(-words // 4) * 4, dtype=torch.int32, device=device))
