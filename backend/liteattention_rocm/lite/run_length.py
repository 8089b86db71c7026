"""The run-length rows in which LiteAttention keeps its skip lists, imported and exported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from .bitmap import pack, unpack

#: Largest number of K blocks that an int16 run-length row can name.
MAX_RUN_LENGTH_BLOCKS = 32767


def to_run_length(
    bitmap: torch.Tensor, k_blocks: int, *, writer_descending: bool = False
) -> torch.Tensor:
    """Export a bitmap [..., words] as LiteAttention rows, int16 [..., k_blocks + 2] (CPU).

    A row is ``[n, start0, end0, start1, end1, ...]`` followed by zeros: ``n`` numbers that name
    runs of kept K blocks in the walking direction of the writer, end exclusive. A descending
    writer names the run of blocks 3, 2, 1 as ``3, 0``. The reader of a row walks in the opposite
    direction, so a list that an ascending kernel is to read is exported with
    ``writer_descending=True``. ``k_blocks + 2`` numbers hold every pattern, alternating ones
    included. Raises ``ValueError`` for more than 32767 K blocks or numbers of runs (int16) and like
    :func:`unpack`.
    """
    if k_blocks > MAX_RUN_LENGTH_BLOCKS:
        raise ValueError(
            f"{k_blocks} K blocks do not fit int16 run-length rows (at most "
            f"{MAX_RUN_LENGTH_BLOCKS}): keep the bitmap or use a larger k_block"
        )
    mask = unpack(bitmap, k_blocks).cpu()
    if writer_descending:
        mask = mask.flip(-1)
    first, step = (k_blocks - 1, -1) if writer_descending else (0, 1)
    rows = []
    for row in mask.reshape(math.prod(mask.shape[:-1]), k_blocks).tolist():
        # where a run begins or ends, counted along the walk
        edges = [i for i, (a, b) in enumerate(pairwise((False, *row, False))) if a != b]
        if len(edges) > MAX_RUN_LENGTH_BLOCKS:
            raise ValueError(
                f"{len(edges) // 2} runs of kept K blocks do not fit an int16 run-length row (at "
                f"most {MAX_RUN_LENGTH_BLOCKS // 2}): keep the bitmap or use a larger k_block"
            )
        padding = [0] * (k_blocks + 1 - len(edges))
        rows.append([len(edges), *(first + step * i for i in edges), *padding])
    return torch.tensor(rows, dtype=torch.int16, device="cpu").reshape(
        *mask.shape[:-1], k_blocks + 2
    )


def from_run_length(
    rows: torch.Tensor, k_blocks: int, *, writer_descending: bool = False
) -> torch.Tensor:
    """Import LiteAttention rows, int16 [..., >= 3], as a bitmap int32 [..., words] (CPU).

    The inverse of :func:`to_run_length`: ``writer_descending`` says in which direction the kernel
    that wrote the rows walked. Numbers after the first ``n`` of a row are ignored. Raises
    ``TypeError`` for another dtype and one ``ValueError`` that lists what is wrong row by row (at
    most eight rows): odd or impossible lengths, runs that walk the other way, lie outside the K
    blocks, overlap, or stand out of order.
    """
    if rows.dtype != torch.int16:
        raise TypeError(f"run-length rows are int16, got {rows.dtype}")
    if k_blocks > MAX_RUN_LENGTH_BLOCKS:
        raise ValueError(
            f"{k_blocks} K blocks do not fit int16 run-length rows (at most "
            f"{MAX_RUN_LENGTH_BLOCKS}): these rows cannot come from such a list"
        )
    if rows.dim() == 0 or rows.shape[-1] < 1:
        raise ValueError("run-length rows are [..., length], got none")
    reasons: list[str] = []
    kept = []
    for index, row in enumerate(rows.reshape(-1, rows.shape[-1]).tolist()):
        mask = [False] * k_blocks
        try:
            for begin, end in _runs(row, k_blocks, writer_descending):
                mask[begin:end] = [True] * (end - begin)
        except ValueError as error:
            reasons.append(f"row {index}: {error}")
        kept.append(mask[::-1] if writer_descending else mask)
    if reasons:
        more = f"; and {len(reasons) - 8} more rows" if len(reasons) > 8 else ""
        raise ValueError("invalid run-length rows: " + "; ".join(reasons[:8]) + more)
    mask_tensor = torch.tensor(kept, dtype=torch.bool, device="cpu").reshape(
        *rows.shape[:-1], k_blocks
    )
    return pack(mask_tensor)


def _runs(row: list[int], k_blocks: int, descending: bool) -> Iterator[tuple[int, int]]:
    """Runs [begin, end) of a row along the writer's walk; raises ``ValueError`` at a bad one."""
    if row[0] < 0 or row[0] % 2 or row[0] + 1 > len(row):
        raise ValueError(
            f"length {row[0]} must be even, >= 0 and leave room in a row of {len(row)} numbers"
        )
    first, step = (k_blocks - 1, -1) if descending else (0, 1)
    reached = 0
    for i in range(1, row[0], 2):
        run = f"run {row[i]}, {row[i + 1]}"
        begin, end = (row[i] - first) * step, (row[i + 1] - first) * step
        if begin >= end:
            way = "down" if descending else "up"
            raise ValueError(
                f"{run} does not walk {way}: is writer_descending={not descending} meant?"
            )
        if begin < 0 or end > k_blocks:
            raise ValueError(f"{run} leaves the {k_blocks} K blocks")
        if begin < reached:
            raise ValueError(f"{run} overlaps or precedes the run before it")
        reached = end
        yield begin, end
