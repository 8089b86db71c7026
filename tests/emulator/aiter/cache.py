"""A paged cache as aiter's ``pa`` kernels take it."""

from __future__ import annotations

import torch

from .launch import FP8

DIM = 128
# In every slot of the cache that no request fills, and finite: the kernels weigh the values behind
# a request's last key with 0, which makes NaN of NaN.
LEFTOVER = 100.0
LARGEST = {FP8: 240.0, torch.int8: 127.0}


class Cache:
    """Keys or values in pages, which lie further apart than they are long.

    pages [pages, Hkv, ...]: pieces of 16 bytes, of keys along the head's dimension and of values
    along the rows. scales, of 8-bit ones, [pages, Hkv, rows of a page] or, ``by_page``,
    [pages, Hkv].
    """

    def __init__(
        self, pages: int, heads: int, rows: int, dtype: torch.dtype, *, values: bool, by_page: bool
    ) -> None:
        self.rows, self.values, self.by_page = rows, values, by_page
        self.wide = 16 // dtype.itemsize
        page = (rows // self.wide, DIM) if values else (DIM // self.wide, rows)
        whole = torch.full((pages, heads + 1, *page, self.wide), LEFTOVER)
        self.pages = whole.to(dtype)[:, :heads]
        self.scales = None
        if dtype in LARGEST:
            self.scales = torch.ones((pages, heads) if by_page else (pages, heads, rows))

    def fill(
        self, pages: torch.Tensor, keys: int, g: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill pages with random rows; gives those [keys, Hkv, D] and their scales [keys, Hkv]."""
        dtype, heads = self.pages.dtype, self.pages.shape[1]
        key = torch.arange(keys)
        page, row = pages[key // self.rows], key % self.rows
        numbers = torch.randn(keys, heads, DIM, generator=g)
        if dtype == torch.int8:
            numbers = (numbers * 30).round().clamp(-127, 127)
        stored = numbers.to(dtype)
        if self.values:
            self.pages[page, :, row // self.wide, :, row % self.wide] = stored
        else:
            self.pages[page, :, :, row] = stored.unflatten(-1, (-1, self.wide))
        if self.scales is None:
            return stored.double(), torch.ones(keys, heads)
        unit = 1 / 30 if dtype == torch.int8 else 1.0
        if self.by_page:
            self.scales[pages] = unit * (torch.rand(len(pages), heads, generator=g) + 0.5)
            scales = self.scales[page]
        else:
            scales = unit * (torch.rand(keys, heads, generator=g) + 0.5)
            self.scales[page, :, row] = scales
        return stored.double() * scales.double()[..., None], scales


def as_multiplied(q: torch.Tensor, cache: torch.dtype) -> torch.Tensor:
    """q [S, Hq, D] as it meets a cache of 8 bits: in 8 bits too, by the largest number of a row.

    In float32 as the kernels do it: what lies near a tie falls to either side. int8 truncates.
    """
    if cache not in LARGEST:
        return q
    factor = 1 / q.float().abs().amax(-1, keepdim=True) * LARGEST[cache]
    scaled = q.float() * factor
    stored = scaled.trunc() if cache == torch.int8 else scaled.to(cache)
    return stored.double() * (1 / factor).double()
