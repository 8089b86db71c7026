"""aiter's ``pa`` kernels: decoding over a paged cache, in bf16, fp16, fp8 and int8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from liteattention_emulator.device import Module
from tests.oracle.ragged import NOWHERE, starts

from .cache import DIM, Cache, as_multiplied
from .launch import FP8, Arithmetic, Launch, Request, packed

CACHES = {"pertokenFp8": FP8, "perblockFp8": FP8, "pertokenInt8": torch.int8}
WORKGROUPS = 3  # of a kernel with a plan of work; on the GPU as many as there are CUs


@dataclass(frozen=True)
class Decode:
    """Requests of (rows of q, keys), with ``group`` heads of q for each of ``kv_heads``.

    ``parts``: the works among which kernels with a plan divide the pages of a request, where it has
    so many.
    """

    requests: Sequence[tuple[int, int]]
    group: int
    kv_heads: int = 2
    scale: float = 0.11
    seed: int = 0
    parts: int = 1


def launch(file: Path, shape: Decode) -> Launch:
    """A launch of the file's kernel on seeded tensors, with the arguments that aiter passes.

    The caller closes it. Raises ValueError where the kernel does not take these numbers of rows.
    """
    words = file.stem.split("_")
    q_lens = [n for n, _ in shape.requests]
    if not _rows(words, shape.group).issuperset(q_lens):
        allowed = sorted(_rows(words, shape.group))
        raise ValueError(f"{file.name} takes {allowed} rows of q per request, not {q_lens}")
    if "ps" in words and len(set(q_lens)) > 1:
        raise ValueError(f"{file.name} takes as many rows of q of every request, not {q_lens}")
    g = torch.Generator().manual_seed(shape.seed)
    dtype = torch.float16 if "fp16" in words else torch.bfloat16
    kind = CACHES.get(words[2], dtype)
    planned, by_page = "ps" in words, "perblockFp8" in words
    rows = 256 if "blk256" in words else 1024 if planned or "gqa10" in words else 16
    heads, begins = shape.group * shape.kv_heads, starts(q_lens)
    counts = [-(-n // rows) for _, n in shape.requests]
    order = torch.randperm(sum(counts) + 2, generator=g)
    k, v = (
        Cache(len(order), shape.kv_heads, rows, kind, values=values, by_page=by_page)
        for values in (False, True)
    )
    q = torch.full((int(begins[-1]), heads + 1, DIM), math.nan).to(dtype)[:, :heads]
    q.copy_(torch.randn(q.shape, generator=g))
    out = torch.full((int(begins[-1]), heads, DIM), math.nan, dtype=dtype)
    pages, requests = order[: sum(counts)].split(counts), []
    for r, (_, keys) in enumerate(shape.requests):
        (k_exact, _), (v_exact, scales) = k.fill(pages[r], keys, g), v.fill(pages[r], keys, g)
        these, uneven = slice(int(begins[r]), int(begins[r + 1])), scales.amax(0) / scales
        q_seen = as_multiplied(q[these], kind)
        requests.append(Request(q_seen, k_exact, v_exact, out[these], uneven=uneven))

    lengths = torch.tensor([n for _, n in shape.requests], dtype=torch.int32)
    q_step, page_step, head_step = (
        q.stride(0) * 2,
        *(x * kind.itemsize for x in k.pages.stride()[:2]),
    )
    scale = shape.scale * math.log2(math.e)
    tensors = [out, q, k.pages, v.pages]
    if planned:
        plan = _plan(shape, begins, counts, requests)
        assert k.scales is not None
        tensors += [order.int(), lengths, k.scales, v.scales]
        last = [begins, starts(counts), *plan]
        arguments = packed(
            *tensors, scale, shape.kv_heads, q_step, page_step, head_step, max(q_lens) - 1,
            shape.group, *last, k.scales.stride(1) * 4, k.scales.stride(0) * 4,
        )  # fmt: skip
    else:
        table = torch.full((len(counts), max(counts) + 3), NOWHERE, dtype=torch.int32)
        for r, mine in enumerate(pages):
            table[r, : len(mine)] = mine
        tensors += [table, lengths, k.scales, v.scales]
        last = [begins]
        arguments = packed(
            *tensors, scale, table.stride(0), shape.kv_heads, q_step, page_step, head_step,
            max(q_lens) - 1, shape.group, *last,
        )  # fmt: skip
    module = Module(file)
    return Launch(
        module,
        next(iter(module.kernels)),
        (WORKGROUPS, 1, 1) if planned else (shape.kv_heads, len(counts), 1),
        (256, 1, 1),
        arguments,
        tuple(x for x in (*tensors, *last) if x is not None),
        out,
        requests,
        "msk0" not in words,
        shape.scale,
        _arithmetic(words, dtype),
    )


def _rows(words: Sequence[str], group: int) -> set[int]:
    """Of q that a request may have.

    "mtp": up to 4, which with the heads are 32 at most; "qlen": so many, but with a plan all that
    with the heads are no more.
    """
    stated = [int(word[4:]) for word in words if word.startswith("qlen")]
    if "ps" in words:
        return {n for n in range(1, 65) if n * group <= stated[0]}
    if "mtp" in words:
        return {n for n in (1, 2, 3, 4) if n * group <= 32}
    return set(stated) or {1}


def _plan(
    shape: Decode, begins: torch.Tensor, counts: Sequence[int], requests: Sequence[Request]
) -> list[torch.Tensor]:
    """The works of each workgroup, and where works store that have a part of a request's pages.

    Works begin [workgroups + 1]; works [n, 8]: request, row among the parts or -1, first and last
    row of q, first and last page, 0, heads of q; the parts' outputs [rows, Hq, D] and log-sum-exps
    [rows, Hq]. It gives requests their parts.
    """
    parts = [min(shape.parts, count) for count in counts]
    total = sum(n * rows for n, (rows, _) in zip(parts, shape.requests, strict=True) if n > 1)
    heads = shape.group * shape.kv_heads
    outs, lses = (
        torch.full((total + 1, heads, DIM), math.nan),
        torch.full((total + 1, heads), math.nan),
    )
    works, pages = [], starts(counts).tolist()
    for head in range(shape.kv_heads):
        row = 0
        of_q = (head + 1) * shape.group << 16 | head * shape.group
        for r, n in enumerate(parts):
            first, last = begins[r : r + 2].tolist()
            rows = last - first
            edges = [pages[r] + counts[r] * i // n for i in range(n + 1)]
            for i in range(n):
                at = row + i * rows if n > 1 else -1
                works.append([r, at, first, last, edges[i], edges[i + 1], 0, of_q])
            if n > 1:
                whole = slice(row, row + n * rows)
                shapes = (n, rows, heads)
                requests[r].parts = outs[whole].view(*shapes, DIM), lses[whole].view(shapes)
                row += n * rows
    first_works = [len(works) * i // WORKGROUPS for i in range(WORKGROUPS + 1)]
    tables = (torch.tensor(table, dtype=torch.int32) for table in (first_works, works))
    return [*tables, outs, lses]


def _arithmetic(words: Sequence[str], dtype: torch.dtype) -> Arithmetic:
    """P is as wide as the cache, in 8 bits as a part of the largest P times scale of 256 keys.

    int8 and fp16 truncate; fp8 has 4 significant bits, and below 2^-7 / 240 steps of 2^-10 / 240.
    With "uhp" P is in bf16 whatever the cache, truncated.
    """
    out = 2.0**-10 if dtype == torch.float16 else 2.0**-8
    if "uhp" in words:
        return Arithmetic(p=2.0**-7, out=out)
    if "pertokenInt8" in words:
        return Arithmetic(p=0.0, p_floor=1 / 127, out=out)
    if {"pertokenFp8", "perblockFp8"}.intersection(words):
        return Arithmetic(p=2.0**-4, p_floor=2.0**-11 / 240, out=out)
    return Arithmetic(p=out, p_floor=2.0**-24 if dtype == torch.float16 else 0.0, out=out)
