"""What ``doctor`` times on a GPU: our calls beside torch's attention and AITER's, medians.

Few shapes and rounds: it says whether a GPU is used as it should be, not who wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from liteattention_rocm import PagedBatch, attention, attention_paged, lite_attention
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.doctor import isolated
from liteattention_rocm.doctor.facts import without_paths

from .peers import Call, Maker, package, sdpa
from .timing import flush_buffer, milliseconds

_PEERS: dict[str, Maker] = {"SDPA": sdpa(None), "AITER": package("aiter", "flash_attn_func")}
_ROUNDS, _WARMUP = 9, 3
_PAGE = 16
#: Every other K block of each q block.
_HALF = 0x55555555
#: Seconds that a contender may take. AITER compiles on first use what its wheel lacks, for minutes;
#: ending it there would leave its lock behind.
_LIMIT, _COMPILING_LIMIT = 300.0, 3600.0


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


class Contender(NamedTuple):
    """What is computed, by whom, with which of ``_MAKERS``, and on tensors of which sizes."""

    what: str
    name: str
    maker: str
    device: str
    requests: int
    q_heads: int
    kv_heads: int
    rows: int
    keys: int
    causal: bool = False


def measure(
    device: torch.device, say: Callable[[str], None], sizes: Sizes | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows of what, contender and median_ms, or reason where a contender cannot run."""
    contenders = list(_contenders(device, sizes or Sizes()))

    def begin(contender: Contender) -> None:
        compiles = ", which may compile for minutes" if contender.name == "AITER" else ""
        say(f"timing {contender.what}: {contender.name}{compiles}")

    apart = device.type == "cuda"
    for contender, answer in isolated.each_begun(time, contenders, _limit, begin, apart):
        found = {"reason": answer.why} if isinstance(answer, isolated.Lost) else answer
        if "reason" in found:
            found["reason"] = without_paths(" ".join(found["reason"].split()))[:300]
        yield {"what": contender.what, "contender": contender.name, **found}


def _limit(contender: Contender) -> float:
    return _COMPILING_LIMIT if contender.name == "AITER" else _LIMIT


def time(contender: Contender) -> dict[str, Any]:
    """Return median_ms of a contender, or the reason why it cannot run."""
    device = torch.device(contender.device)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        flush = flush_buffer(device)
        call = _made(contender)
        for _ in range(_WARMUP):
            call()
        taken = [milliseconds(call, device, flush) for _ in range(_ROUNDS)]
    except Exception as error:  # a peer's calls may raise anything
        return {"reason": str(error) or type(error).__name__}
    return {"median_ms": round(statistics.median(taken), 4)}


def _contenders(device: torch.device, sizes: Sizes) -> Iterator[Contender]:
    on = str(device)
    what = f"dense, 1 x {sizes.heads} heads x {sizes.tokens}"
    peers = [(name, name) for name in _PEERS]
    for who in (("ours", "dense"), *peers, ("LiteAttention, half of the tiles", "lite")):
        yield Contender(what, *who, on, 1, sizes.heads, sizes.heads, sizes.tokens, sizes.tokens)
    for what, requests, rows, keys in (
        (f"prefill, {sizes.prompts} x {sizes.prompt}", sizes.prompts, sizes.prompt, sizes.prompt),
        (f"decode, {sizes.decoding} x {sizes.cached} keys", sizes.decoding, 1, sizes.cached),
    ):
        for who in (("ours", "paged"), *peers):
            heads = (sizes.q_heads, sizes.kv_heads)
            yield Contender(what, *who, on, requests, *heads, rows, keys, rows > 1)


def _made(contender: Contender) -> Call:
    def normal(heads: int, rows: int) -> torch.Tensor:
        shape = (contender.requests, heads, rows, 128)
        return torch.randn(shape, device=contender.device, dtype=torch.bfloat16)

    q = normal(contender.q_heads, contender.rows)
    k, v = (normal(contender.kv_heads, contender.keys) for _ in range(2))
    return _MAKERS[contender.maker](q, k, v, contender.causal)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    return lambda: attention(q, k, v, layout="bhsd")


def _lite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    tile = default_geometry(q)
    shape = (*q.shape[:2], tile.q_blocks(q.shape[2]), tile.words(k.shape[2]))
    read = torch.full(shape, _HALF, dtype=torch.int32, device=q.device)
    write = torch.empty_like(read)
    return lambda: lite_attention(
        q, k, v, read, write, threshold=-6.0, layout="bhsd", geometry=tile
    )


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """Ours over pages in order, of the rows and keys of [R, H, S, D] tensors."""
    requests, rows = q.shape[0], q.shape[2]
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


_MAKERS: dict[str, Maker] = {"dense": _dense, "lite": _lite, "paged": _paged, **_PEERS}
