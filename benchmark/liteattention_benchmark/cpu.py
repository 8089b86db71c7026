"""The CPU engine against ``torch.nn.functional.scaled_dot_product_attention``.

Same tensors, same threads, interleaved: each round runs every contender once, and ratios are
taken round by round, so that a drifting machine speed touches all alike. Each row carries the
error of its output against float64 on sampled query rows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from liteattention_rocm import (
    LiteAttention,
    PagedBatch,
    SkipPolicy,
    admission,
    attention,
    attention_paged,
    lite_attention,
)
from liteattention_rocm.cli import dimensions
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap

from .contenders import NOTHING_SKIPPED
from .expected import attention_rows

#: Below the unit of masses: no tile is dropped that has any, while all are weighed.
NOTHING_DROPPED = 2.0**-40

DEFAULT_SHAPES = ((1, 8, 4096, 128), (1, 8, 4096, 64), (1, 2, 8192, 128))

#: Requests, query rows of each, keys of each, query heads, key heads, head dim.
Serving = tuple[int, int, int, int, int, int]
DEFAULT_SERVING: tuple[Serving, ...] = (
    (1, 1, 1024, 32, 8, 128),
    (1, 1, 4096, 32, 8, 128),
    (8, 1, 1024, 32, 8, 128),
    (8, 1, 4096, 32, 8, 128),
    (1, 4096, 4096, 32, 8, 128),
)
PAGE_SIZE = 128


@dataclass(frozen=True)
class Row:
    """One contender at one shape; times in milliseconds, errors absolute against float64."""

    shape: tuple[int, int, int, int]
    contender: str
    median_ms: float
    p25_ms: float
    p75_ms: float
    tflops: float
    against: str
    ratio: float
    max_error: float

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return asdict(self)


def problems(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[str]:
    """Say why a shape (B, H, S, D) cannot be measured; none means it can."""
    _, heads, _, dim = shape
    found = admission.video_reasons(
        torch.device("cpu"), heads=heads, kv_heads=heads, head_dim=dim, dtype=dtype, engine="cpu"
    )
    # q, k, v and an output, and the fp32 numbers of which the last of them is made.
    size = math.prod(shape) * (4 * dtype.itemsize + 4)
    return found + dimensions.memory_reasons(size, "it")


def run(
    shapes: tuple[tuple[int, int, int, int], ...] = DEFAULT_SHAPES,
    rounds: int = 15,
    warmup: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda _: None,
    serving: tuple[Serving, ...] | None = None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure every shape (B, H, S, D), "bhsd", and return a row per contender.

    ``serving`` adds decode and prefill over a paged cache against SDPA over contiguous keys, causal
    and with grouped heads; None adds the usual ones to the default shapes. Their ``shape`` is
    (requests, query heads, keys, head dim), and one contender reads the cache in vLLM's layout.

    Contenders: torch's SDPA, our dense kernel, and LiteAttention with 0, 50 and 75 % of the tiles
    skipped evenly. ``ratio`` is the median over rounds of time / time of ``against`` (SDPA for the
    dense kernel, the dense kernel for LiteAttention). ``keep`` is called with the rows so far
    whenever there are more.
    """
    rows: list[Row] = []
    for shape in shapes:
        progress(f"{shape} {str(dtype).removeprefix('torch.')}")
        rows += _shape(shape, rounds, warmup, dtype)
        keep(rows)
    if serving is None:
        serving = DEFAULT_SERVING if shapes == DEFAULT_SHAPES else ()
    for request in serving:
        progress(f"paged {request} {str(dtype).removeprefix('torch.')}")
        rows += _serving(request, rounds, warmup, dtype)
        keep(rows)
    return rows


def _serving(serving: Serving, rounds: int, warmup: int, dtype: torch.dtype) -> list[Row]:
    """One layer's attention of ``requests`` equal requests, paged against contiguous."""
    requests, q_len, kv_len, heads, kv_heads, dim = serving
    generator = torch.Generator().manual_seed(kv_len + dim)
    pages = -(-kv_len // PAGE_SIZE)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages).int()
    shape = (requests * pages, kv_heads, PAGE_SIZE, 2 * dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    q = torch.randn((requests * q_len, heads, dim), generator=generator).to(dtype)
    k_cache, v_cache = cache[..., :dim].transpose(1, 2), cache[..., dim:].transpose(1, 2)
    starts = torch.arange(requests + 1, dtype=torch.int32) * q_len
    batch = PagedBatch(starts, torch.full((requests,), kv_len, dtype=torch.int32), table)
    dense_q = q.view(requests, q_len, heads, dim).transpose(1, 2)
    k, v = (
        x[table.long()].flatten(1, 2)[:, :kv_len].transpose(1, 2).contiguous()
        for x in (k_cache, v_cache)
    )
    out = torch.empty_like(q)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            dense_q, k, v, is_causal=q_len > 1, enable_gqa=True
        )

    def paged() -> torch.Tensor:
        return attention_paged(q, k_cache, v_cache, batch, out=out, engine="cpu")

    kind = "decode" if q_len == 1 else "prefill"
    base = f"sdpa {kind}"
    calls = {base: sdpa, f"paged {kind}": paged}
    times, outputs = _interleaved(calls, rounds, warmup)
    # 16 rows of every request suffice to see an error.
    rows = torch.linspace(0, q_len - 1, min(q_len, 16)).long()
    expected = attention_rows(dense_q, k, v, rows, causal=True)
    outputs[f"paged {kind}"] = out.view(requests, q_len, heads, dim).transpose(1, 2)
    seen = sum(kv_len - q_len + i + 1 for i in range(q_len))
    return [
        _row(
            (requests, heads, kv_len, dim),
            name,
            base,
            times,
            4 * requests * heads * seen * dim,
            outputs[name][:, :, rows] - expected,
        )
        for name in calls
    ]


def _shape(
    shape: tuple[int, int, int, int], rounds: int, warmup: int, dtype: torch.dtype
) -> list[Row]:
    batch, heads, length, dim = shape
    generator = torch.Generator().manual_seed(length + dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    geometry = default_geometry(q, "cpu")
    q_blocks, k_blocks = geometry.q_blocks(length), geometry.k_blocks(length)

    def with_state(policy: SkipPolicy) -> Callable[[], torch.Tensor]:
        lite, step = LiteAttention(policy, engine="cpu"), iter(range(1 << 30))

        def call() -> torch.Tensor:
            out = lite(q, k, v, step=next(step), layer="bench", layout="bhsd")
            assert isinstance(out, torch.Tensor)
            return out

        return call

    def kept(every: int) -> torch.Tensor:
        """Keep one K block in ``every``, shifted from q block to q block."""
        tiles = (torch.arange(q_blocks)[:, None] + torch.arange(k_blocks)[None]) % every == 0
        return bitmap.pack(tiles.expand(batch, heads, q_blocks, k_blocks).contiguous())

    def sparse(read: torch.Tensor) -> Callable[[], torch.Tensor]:
        write = torch.empty_like(read)

        def call() -> torch.Tensor:
            out = lite_attention(
                q, k, v, read, write, threshold=NOTHING_SKIPPED, layout="bhsd", engine="cpu"
            )
            assert isinstance(out, torch.Tensor)
            return out

        return call

    half, quarter = kept(2), kept(4)
    calls: dict[str, tuple[Callable[[], torch.Tensor], str, torch.Tensor | None]] = {
        "sdpa": (lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), "sdpa", None),
        "dense": (lambda: attention(q, k, v, layout="bhsd", engine="cpu"), "sdpa", None),
        "lite 0 %": (
            with_state(SkipPolicy(threshold=NOTHING_SKIPPED, warmup_steps=0)),
            "dense",
            None,
        ),
        "budget 0 %": (
            with_state(SkipPolicy(budget=NOTHING_DROPPED, warmup_steps=0)),
            "dense",
            None,
        ),
        "lite 50 %": (sparse(half), "dense", half),
        "lite 75 %": (sparse(quarter), "dense", quarter),
    }
    times, outputs = _interleaved(
        {name: call for name, (call, _, _) in calls.items()}, rounds, warmup
    )
    rows = torch.linspace(0, length - 1, 64).long()
    result = []
    for name, (_, against, read) in calls.items():
        tiles = None if read is None else bitmap.unpack(read, k_blocks)
        kept_share = 1.0 if read is None else 1.0 - bitmap.sparsity(read, k_blocks)
        size = geometry.q_block, geometry.k_block
        expected = attention_rows(q, k, v, rows, tiles=tiles, size=size)
        flops = 4 * batch * heads * length * length * dim * kept_share
        difference = outputs[name][:, :, rows] - expected
        result.append(_row(shape, name, against, times, flops, difference))
    return result


def _interleaved(
    calls: Mapping[str, Callable[[], torch.Tensor]], rounds: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Milliseconds of each call in each counted round, and its last output."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    outputs: dict[str, torch.Tensor] = {}
    for i in range(warmup + rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            outputs[name] = call()
            if i >= warmup:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times, outputs


def _row(
    shape: tuple[int, int, int, int],
    name: str,
    against: str,
    times: Mapping[str, list[float]],
    flops: float,
    difference: torch.Tensor,
) -> Row:
    low, middle, high = statistics.quantiles(times[name], n=4)
    return Row(
        shape=shape,
        contender=name,
        median_ms=middle,
        p25_ms=low,
        p75_ms=high,
        tflops=flops / middle / 1e9,
        against=against,
        ratio=statistics.median(a / b for a, b in zip(times[name], times[against], strict=True)),
        max_error=float(difference.abs().max()),
    )
