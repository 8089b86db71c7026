"""Which rank attends with which heads, so that none waits long for the others.

Heads skip unequal numbers of tiles, and all ranks wait for the slowest at the end of each layer.
Heads are dealt by the tiles that they kept: the one with most first, to the rank that has least
(longest processing time first, Graham 1969), equally many heads to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import bitmap


def in_order(heads: int) -> tuple[int, ...]:
    """The heads as they are numbered: rank r has the r-th part of them."""
    return tuple(range(heads))


def is_due(steps: int) -> bool:
    """Whether heads are dealt before a step that follows upon ``steps`` others: 1, 2, 4, 8 ..."""
    return steps & (steps - 1) == 0


def by_tiles(tiles: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Deal heads to ``ranks`` by the ``tiles`` of each; the number of heads must divide by it.

    Returns all heads: those of rank 0, of rank 1 and so on, ascending for each rank.
    """
    room = len(tiles) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for head in sorted(range(len(tiles)), key=lambda head: (-tiles[head], head)):
        open_ranks = (rank for rank in range(ranks) if len(hands[rank]) < room)
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        hands[rank].append(head)
        loads[rank] += tiles[head]
    return tuple(head for hand in hands for head in sorted(hand))


def most(tiles: Sequence[int], heads: Sequence[int], ranks: int) -> int:
    """Tiles of the rank that has most of them if ``heads`` are dealt in this order."""
    room = len(heads) // ranks
    return max(sum(tiles[h] for h in heads[r * room : (r + 1) * room]) for r in range(ranks))


@dataclass(frozen=True)
class Deal:
    """Heads of all ranks in a row, and the same as indices on the device of the tensors.

    ``keys`` are heads of k and v, ``queries`` those of q that belong to them.
    """

    keys: tuple[int, ...]
    queries: tuple[int, ...]
    key_index: torch.Tensor
    query_index: torch.Tensor

    @classmethod
    def of(cls, keys: tuple[int, ...], group: int, device: torch.device) -> Deal:
        """Make it for heads of k, to each of which ``group`` of q belong."""
        queries = tuple(head * group + i for head in keys for i in range(group))
        with torch.inference_mode(False):
            return cls(
                keys,
                queries,
                torch.tensor(keys, device=device),
                torch.tensor(queries, device=device),
            )


def tiles_by_head(lists: torch.Tensor, group: int) -> list[int]:
    """Kept tiles of each head of k: lists int32 [B, Hq, q_blocks, words]. Waits for the device."""
    counts: list[int] = bitmap.count_by_head(lists).view(-1, group).sum(-1).tolist()
    return counts
