"""Bits at and past the last K block must not matter, whatever the engine."""

from __future__ import annotations

import math
from typing import Any

import torch

from liteattention_rocm import lite_attention
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap


def check(engine: str, kv_len: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Lists and masks with all such bits set give what clean ones give, bit for bit."""
    generator = torch.Generator().manual_seed(kv_len)
    q = torch.randn(1, 2, 200, 64, generator=generator).to(dtype)
    k, v = (torch.randn(1, 1, kv_len, 64, generator=generator).to(dtype) for _ in "kv")
    tile = default_geometry(q, engine)
    k_blocks = tile.k_blocks(kv_len)
    full = bitmap.full(1, 2, tile.q_blocks(200), k_blocks)
    ends = ~bitmap.full(1, 1, 1, k_blocks).view(-1)  # the bits that mean nothing
    assert ends.any()
    some = full & torch.randint(-(2**31), 2**31, full.shape, generator=generator).int()
    mask = bitmap.pack(torch.arange(k_blocks) % 5 == 3)
    for read, must_do, must_skip in (
        (full, None, None),
        (some, None, None),
        (some, mask, None),
        (some, None, mask),
        (torch.zeros_like(full), None, None),
        (torch.zeros_like(full), torch.zeros_like(mask), None),
    ):
        for threshold, soft_skip, descending in (
            (-math.inf, False, False),
            (-1.0, True, False),
            (-1.0, False, True),
        ):
            results = []
            for stray in (torch.zeros_like(ends), ends):
                given: dict[str, Any] = {
                    name: None if x is None else x | stray
                    for name, x in (("must_do", must_do), ("must_skip", must_skip))
                }
                write = torch.full_like(full, 0x3C3C3C3C)
                out, lse = lite_attention(
                    q, k, v, read | stray, write, threshold=threshold, soft_skip=soft_skip,
                    descending=descending, layout="bhsd", return_lse=True, engine=engine, **given,
                )  # fmt: skip
                results.append((out, lse, write))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            assert not (results[0][2] & ends).any()
