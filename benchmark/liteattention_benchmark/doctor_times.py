"""What ``doctor`` times on a GPU: our calls beside torch's attention and AITER's, medians.

Few shapes and rounds: it says whether a GPU is used as it should be, not who wins.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from liteattention_rocm import PagedBatch, attention, attention_paged, lite_attention
from liteattention_rocm.dense import default_geometry

from .peers import Call, Maker, Unavailable, package, sdpa
from .timing import flush_buffer, milliseconds

_PEERS: dict[str, Maker] = {"SDPA": sdpa(None), "AITER": package("aiter", "flash_attn_func")}
_ROUNDS, _WARMUP = 9, 3
_PAGE = 16
#: Every other K block of each q block.
_HALF = 0x55555555


class Sizes(NamedTuple):
    """Heads and tokens of a video model's call, and heads, requests and tokens of a server's."""

    heads: int = 24
    tokens: int = 16384
    q_heads: int = 32
    kv_heads: int = 8
    prompts: int = 4
    prompt: int = 2048
    decoding: int = 64
    cached: int = 4096


def measure(
    device: torch.device, say: Callable[[str], None], sizes: Sizes | None = None
) -> list[dict[str, Any]]:
    """Return rows of what, contender and median_ms, or reason where a contender cannot run."""
    flush = flush_buffer(device)
    rows = []
    for what, contender, make in _contenders(device, sizes or Sizes()):
        say(f"timing {what}: {contender}")
        row: dict[str, Any] = {"what": what, "contender": contender}
        try:
            call = make()
            for _ in range(_WARMUP):
                call()
            taken = [milliseconds(call, device, flush) for _ in range(_ROUNDS)]
            row["median_ms"] = round(statistics.median(taken), 4)
        except (Unavailable, RuntimeError, ValueError, TypeError, ImportError) as error:
            row["reason"] = " ".join(str(error).split())[:300]
        rows.append(row)
    return rows


def _contenders(
    device: torch.device, sizes: Sizes
) -> Iterator[tuple[str, str, Callable[[], Call]]]:
    """Yield what is computed, who computes it, and what makes the call."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def beside(
        what: str, causal: bool, *x: torch.Tensor
    ) -> Iterator[tuple[str, str, Callable[[], Call]]]:
        for name, peer in _PEERS.items():
            yield what, name, functools.partial(peer, x[0], x[1], x[2], causal)

    q, k, v = (normal(1, sizes.heads, sizes.tokens, 128) for _ in range(3))
    what = f"dense, 1 x {sizes.heads} heads x {sizes.tokens}"
    yield what, "ours", functools.partial(_dense, q, k, v)
    yield from beside(what, False, q, k, v)
    yield what, "LiteAttention, half of the tiles", functools.partial(_lite, q, k, v)
    for what, requests, rows, keys in (
        (f"prefill, {sizes.prompts} x {sizes.prompt}", sizes.prompts, sizes.prompt, sizes.prompt),
        (f"decode, {sizes.decoding} x {sizes.cached} keys", sizes.decoding, 1, sizes.cached),
    ):
        q = normal(requests, sizes.q_heads, rows, 128)
        k, v = (normal(requests, sizes.kv_heads, keys, 128) for _ in range(2))
        yield what, "ours", functools.partial(_paged, q, k, v)
        yield from beside(what, rows > 1, q, k, v)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    return lambda: attention(q, k, v, layout="bhsd")


def _lite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    tile = default_geometry(q)
    shape = (*q.shape[:2], tile.q_blocks(q.shape[2]), tile.words(k.shape[2]))
    read = torch.full(shape, _HALF, dtype=torch.int32, device=q.device)
    write = torch.empty_like(read)
    return lambda: lite_attention(
        q, k, v, read, write, threshold=-6.0, layout="bhsd", geometry=tile
    )


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Ours over pages in order, of the rows and keys of [R, H, S, D] tensors."""
    requests, _, rows, _ = q.shape
    heads, keys = k.shape[1:3]
    pages = keys // _PAGE
    flat = q.transpose(1, 2).reshape(-1, *q.shape[1::2])
    k_cache, v_cache = (x.transpose(1, 2).reshape(-1, _PAGE, heads, x.shape[3]) for x in (k, v))

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).to(q.device)

    batch = PagedBatch(
        ints(torch.arange(requests + 1) * rows),
        ints(torch.full((requests,), keys)),
        ints(torch.arange(requests * pages).view(requests, pages)),
        max_q_len=rows,
        max_kv_len=keys,
    )
    return lambda: attention_paged(flat, k_cache, v_cache, batch)
