"""Skip bitmaps: making, packing and counting them, and token ranges as K blocks.

A *skip bitmap* is an int32 tensor [B, H, q_blocks, words] that holds uint32 bit patterns,
words = ceil(K_blocks / 32). K block j of a row is bit ``j % 32`` of word ``j // 32``; a set bit
means "compute this tile next time". Bits at and beyond K_blocks are 0 in every bitmap that this
library writes, and ignored where it reads one. The bitmap has no direction, so must-do is OR,
must-skip is AND-NOT and work is a population count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..brief import first_few


def words_for(k_blocks: int) -> int:
    """Number of int32 words in one bitmap row over ``k_blocks`` K blocks."""
    return -(-k_blocks // 32)


def full(
    batch: int, heads: int, q_blocks: int, k_blocks: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return a bitmap [batch, heads, q_blocks, words] int32 that keeps every tile.

    Raises ``ValueError`` naming every negative size.
    """
    if min(batch, heads, q_blocks, k_blocks) < 0:
        sizes = {"batch": batch, "heads": heads, "q_blocks": q_blocks, "k_blocks": k_blocks}
        reasons = [f"{name} must be >= 0, got {n}" for name, n in sizes.items() if n < 0]
        raise ValueError("cannot make a skip bitmap: " + "; ".join(reasons))
    words = words_for(k_blocks)
    bitmap = torch.full((batch, heads, q_blocks, words), -1, dtype=torch.int32, device=device)
    if k_blocks % 32:
        bitmap[..., -1] = (1 << (k_blocks % 32)) - 1
    return bitmap


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool mask [..., K_blocks] into int32 words [..., ceil(K_blocks / 32)].

    Raises ``TypeError`` if the mask is not bool, ``ValueError`` if it has no dimension.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack takes a bool mask over K blocks, got {mask.dtype}: use mask.bool()")
    if mask.dim() == 0:
        raise ValueError("pack takes a mask [..., K_blocks], got a scalar")
    k_blocks = mask.shape[-1]
    words = words_for(k_blocks)
    padded = torch.nn.functional.pad(mask, (0, words * 32 - k_blocks))
    bits = padded.reshape(*mask.shape[:-1], words, 32).to(torch.int64)
    weights = torch.ones(32, dtype=torch.int64, device=mask.device) << torch.arange(
        32, device=mask.device
    )
    # int64 -> int32 keeps the low 32 bits, which turns bit 31 into the sign.
    return (bits * weights).sum(-1).to(torch.int32)


def unpack(bitmap: torch.Tensor, k_blocks: int) -> torch.Tensor:
    """Unpack int32 words [..., words] into a bool mask [..., k_blocks].

    Raises ``TypeError`` if the bitmap is not int32, ``ValueError`` if its last dimension does not
    hold exactly ``ceil(k_blocks / 32)`` words.
    """
    _check_bitmap(bitmap, k_blocks)
    shifts = torch.arange(32, dtype=torch.int32, device=bitmap.device)
    bits = (bitmap.unsqueeze(-1) >> shifts) & 1
    return bits.reshape(*bitmap.shape[:-1], bitmap.shape[-1] * 32)[..., :k_blocks].bool()


def _check_bitmap(bitmap: torch.Tensor, k_blocks: int | None = None) -> None:
    if bitmap.dtype != torch.int32:
        raise TypeError(f"a skip bitmap is an int32 tensor of uint32 words, got {bitmap.dtype}")
    if bitmap.dim() == 0:
        raise ValueError("a skip bitmap is [..., words], got a scalar")
    if k_blocks is not None and bitmap.shape[-1] != words_for(k_blocks):
        raise ValueError(
            f"{k_blocks} K blocks need {words_for(k_blocks)} words in the last dimension of the "
            f"bitmap, got {bitmap.shape[-1]}"
        )


def popcount_into(
    bitmap: torch.Tensor, pairs: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """Add up the set bits of ``bitmap`` into the 0-dim int64 ``out``, allocating nothing.

    ``pairs`` and ``scratch`` are int32 work space of the bitmap's shape.
    """
    _bits_into(bitmap, pairs, scratch)
    torch.sum(pairs.view(-1), dim=0, dtype=torch.int64, out=out)


def _bits_into(bitmap: torch.Tensor, pairs: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write the number of set bits of each word to ``pairs``.

    Adds bits in pairs, nibbles, bytes and words. The shifts of int32 bring in copies of the sign;
    every mask that follows one clears them.
    """
    torch.bitwise_right_shift(bitmap, 1, out=scratch)
    scratch.bitwise_and_(0x55555555)
    torch.sub(bitmap, scratch, out=pairs)
    torch.bitwise_right_shift(pairs, 2, out=scratch)
    scratch.bitwise_and_(0x33333333)
    # pair sums a + 4b become nibble sums a + b by taking 3b away
    pairs.sub_(scratch, alpha=3)
    torch.bitwise_right_shift(pairs, 4, out=scratch)
    pairs.add_(scratch).bitwise_and_(0x0F0F0F0F)
    torch.bitwise_right_shift(pairs, 8, out=scratch)
    pairs.add_(scratch)
    torch.bitwise_right_shift(pairs, 16, out=scratch)
    pairs.add_(scratch).bitwise_and_(0x3F)


def count(bitmap: torch.Tensor, k_blocks: int | None = None) -> torch.Tensor:
    """Return the number of kept tiles as a 0-dim int64 tensor on the bitmap's device (no sync).

    With ``k_blocks`` given, bits at and beyond it do not count. Raises ``TypeError`` if the bitmap
    is not int32, ``ValueError`` if it has not the words of ``k_blocks``.
    """
    _check_bitmap(bitmap, k_blocks)
    if k_blocks is not None:
        bitmap = bitmap & full(1, 1, 1, k_blocks, bitmap.device).view(-1)
    dense = bitmap.contiguous()
    out = torch.empty((), dtype=torch.int64, device=bitmap.device)
    popcount_into(dense, torch.empty_like(dense), torch.empty_like(dense), out)
    return out


def count_by_head(bitmap: torch.Tensor) -> torch.Tensor:
    """Return the kept tiles of each head of a bitmap [B, H, q_blocks, words]: int64 [H], no sync.

    Raises ``TypeError`` if the bitmap is not int32.
    """
    _check_bitmap(bitmap)
    bits = torch.empty_like(bitmap)
    _bits_into(bitmap, bits, torch.empty_like(bitmap))
    return bits.sum((0, 2, 3), dtype=torch.int64)


def sparsity(bitmap: torch.Tensor, k_blocks: int) -> float:
    """Return 1 - kept tiles / all tiles of a bitmap over ``k_blocks`` K blocks (0.0 if empty).

    Reads one number back from the device. Raises like :func:`unpack`.
    """
    _check_bitmap(bitmap, k_blocks)
    total = math.prod(bitmap.shape[:-1]) * k_blocks
    return 1.0 - int(count(bitmap, k_blocks)) / total if total else 0.0


def token_ranges_to_blocks(
    ranges: Sequence[tuple[int, int]], kv_len: int, k_block: int, *, outward: bool
) -> torch.Tensor:
    """Convert ascending token ranges [start, end) over keys into a bool mask [K_blocks] (CPU).

    ``outward=True`` (must-do) sets every block that holds a token of a range; ``outward=False``
    (must-skip) sets only blocks all of whose keys lie in the ranges. A last block shorter than
    ``k_block`` counts as covered when its existing keys are; ranges that touch are taken together.
    Raises ``ValueError`` listing every range that is empty, descending, negative, past the end of
    the keys, or out of order.
    """
    reasons = range_reasons(ranges)
    reasons += [
        f"range {i} [{start}, {end}) ends past the {kv_len} keys: clip it to {kv_len} or drop it"
        for i, (start, end) in enumerate(ranges)
        if end > kv_len
    ]
    if reasons:
        raise ValueError("invalid token ranges: " + first_few(reasons))
    k_blocks = -(-kv_len // k_block)
    # +1 where a range begins, -1 where it ends: the running sum is 1 inside.
    edges = torch.zeros(k_blocks * k_block + 1, dtype=torch.int8, device="cpu")
    if ranges:
        starts, ends = torch.tensor(ranges, device="cpu").unbind(1)
        edges[starts] += 1
        edges[ends] -= 1
    tokens = edges[:-1].cumsum(0, dtype=torch.int8).bool()
    if not outward:
        tokens[kv_len:] = True
    blocks = tokens.view(k_blocks, k_block)
    return blocks.any(-1) if outward else blocks.all(-1)


def range_reasons(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return what is wrong with token ranges whatever the number of keys; empty means nothing."""
    reasons = []
    previous: tuple[int, int] | None = None
    for i, (start, end) in enumerate(ranges):
        if start < 0:
            reasons.append(f"range {i} [{start}, {end}) starts before key 0: token ranges are >= 0")
        if start > end:
            reasons.append(
                f"range {i} [{start}, {end}) is descending: write it as ({end}, {start}); "
                "ranges are ascending token positions, end exclusive"
            )
        elif start == end:
            reasons.append(f"range {i} [{start}, {end}) is empty: remove it (end is exclusive)")
        if previous is not None and start < previous[1]:
            reasons.append(
                f"range {i} [{start}, {end}) starts before the end of range {i - 1} "
                f"[{previous[0]}, {previous[1]}): sort the ranges and merge those that overlap"
            )
        previous = (start, end)
    return reasons
