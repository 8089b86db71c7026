"""Processes of `bench video --gpus` one of which never comes to what the others wait for."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from liteattention_benchmark import video_ranks


def _measure(_: Any, rank: int, *__: Any) -> None:
    if rank:
        time.sleep(60)
    dist.barrier()


def work(*arguments: Any) -> None:
    """Run a process that waits six seconds for others, not minutes; they start one by one."""
    video_ranks._PATIENCE = timedelta(seconds=6)
    video_ranks._measure = _measure
    video_ranks._work(*arguments)
