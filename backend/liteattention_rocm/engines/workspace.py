"""Scratch memory of bound calls: one buffer for each thread and stream, grown as needed.

Calls of one thread on one stream run one after the other, so they may share memory; a call of
another thread or stream gets its own. The largest that was asked for is kept for as long as the
thread lives: for the main thread, that is the process. A call that is being captured in a graph
takes its memory from the graph's pool, which lives as long as the graph does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: Handle of the current stream of a GPU by its index; None in builds of PyTorch without GPUs.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def stream_of(device: torch.device) -> Callable[[int], int]:
    """Return what gives the handle of the current stream by the index of ``device``."""
    found: Callable[[int], int] = _no_stream if device.type == "cpu" else raw_stream
    return found


def _no_stream(index: int) -> int:
    return 0


def capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now becomes part of a graph."""
    return device.type == "cuda" and bool(_capturing())


class Workspaces(threading.local):
    """Buffers of one engine.

    Key: thread, device index and stream. Owner: the engine. Lifetime: until a larger one is asked
    for, or the thread ends.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, device: torch.device, index: int, stream: int, size: int) -> torch.Tensor:
        """Return at least ``size`` bytes, aligned to 256, for the launches of one call.

        ``index`` and ``stream`` are those of the device that the call runs on; 0 for CPU tensors.
        Keep what is returned until everything is launched.
        """
        if capturing(device):
            return torch.empty(size, dtype=torch.uint8, device=device)
        found = self._buffers.get((index, stream))
        if found is None or found.numel() < size:
            with torch.inference_mode(False):
                found = torch.empty(size, dtype=torch.uint8, device=device)
            self._buffers[index, stream] = found
        return found
