"""One step of an SGLang model runner: the batches that its layers attend with.

The slots of a request are a row of ``req_to_token``, and a page is ``page_size`` consecutive slots,
so the page table is every ``page_size``-th slot of a row. It is gathered once per step. Models that
mix full and sliding-window layers have a second pool, with slots of its own, and so a second table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from liteattention_rocm import PagedBatch

from . import BACKEND_NAME


@dataclass(frozen=True)
class Step:
    """What the layers of a step share.

    ``rows``: query rows of the requests; more than these are padding. ``window_batch``: the batch
    of layers with a window and ``window_slots`` (int64 [rows]) where they write, both in the pool
    of those layers; None where they have none of their own.
    """

    rows: int
    batch: PagedBatch
    window_batch: PagedBatch | None = None
    window_slots: torch.Tensor | None = None


def plan(forward_batch: Any, req_to_token: torch.Tensor, pool: Any, page_size: int) -> Step | None:
    """Plan a step of prompts, decoded rows or both; None if there is nothing to attend.

    Raises:
        ValueError: the step verifies speculated tokens.
    """
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return None
    requests = forward_batch.batch_size
    kv_len = forward_batch.seq_lens.to(torch.int32)
    device = kv_len.device
    lens = forward_batch.seq_lens_cpu
    max_kv_len = int((forward_batch.seq_lens if lens is None else lens).max())
    if mode.is_decode():
        rows, max_q_len = requests, 1
        q_start = torch.arange(requests + 1, dtype=torch.int32, device=device)
    elif mode.is_extend_without_speculative():
        new = forward_batch.extend_seq_lens_cpu
        rows, max_q_len = sum(new), max(new)
        q_start = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        torch.cumsum(forward_batch.extend_seq_lens, 0, out=q_start[1:])
    else:
        raise ValueError(
            f"attention backend {BACKEND_NAME!r} has no {mode.name} steps "
            "(speculative decoding): leave the speculative options out"
        )
    slots = req_to_token[forward_batch.req_pool_indices, :max_kv_len:page_size]

    def batch(slots: torch.Tensor) -> PagedBatch:
        table = slots if page_size == 1 else slots // page_size
        return PagedBatch(
            q_start, kv_len, table.to(torch.int32), max_q_len=max_q_len, max_kv_len=max_kv_len
        )

    if not isinstance(pool, SWAKVPool):
        return Step(rows, batch(slots))
    # Slots past a request's end may be left over from another: any number in the pool.
    return Step(
        rows,
        batch(slots),
        batch(pool.translate_loc_from_full_to_swa(slots.long())),
        pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc),
    )
