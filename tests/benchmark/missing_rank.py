"""Processes of `bench video --gpus` one of which never comes to what the others wait for."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from liteattention_benchmark import video_ranks


def _measure(_: Any, rank: int, *__: Any) -> None:
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == video_ranks._PATIENCE
    few = dist.new_group(timeout=timedelta(seconds=2))  # not minutes; all have started by now
    if rank:
        time.sleep(60)
    dist.barrier(few)


def work(*arguments: Any) -> None:
    """Run a process of the command with what it measures replaced."""
    video_ranks._measure = _measure
    video_ranks._work(*arguments)
