"""aiter's ``fmha_v3_fwd`` kernels: dense batches and packed requests, bf16 and fp8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from liteattention_emulator.device import Module
from tests.oracle.ragged import starts

from .launch import FP8, Arithmetic, Launch, Request, packed

# Of P and of the output: half a unit in the last place of bf16, or all of it. P in fp8 has 4
# significant bits, and below 2^-7 steps of 2^-10.
ARITHMETIC = {
    "rtne": Arithmetic(p=2.0**-8, out=2.0**-8),
    "rtna": Arithmetic(p=2.0**-8, out=2.0**-8),
    "rtz": Arithmetic(p=2.0**-7, out=2.0**-7),
    "fp8": Arithmetic(p=2.0**-4, p_floor=2.0**-11, out=2.0**-8),
}


@dataclass(frozen=True)
class Prefill:
    """Requests of (rows of q, keys).

    Kernels without "group" in their names take a dense batch of requests that are alike, in the
    ``layout`` "bshd" or "bhsd". The others take packed rows, with ``padding`` rows after each
    request.

    The fp8 kernels multiply by scales of Q, K and V. Causal ones apply those of Q and K twice to
    every second tile of q, so that they get some whose product is 1, unless ``twice``.
    """

    requests: Sequence[tuple[int, int]]
    q_heads: int
    kv_heads: int
    layout: str = "bshd"
    padding: int = 0
    scale: float = 0.11
    seed: int = 0
    twice: bool = False


class _Rows:
    """One tensor: ``whole`` [B, S, H, D], packed [T, H, D], and ``of`` each request [S, H, D].

    What belongs to no request is NaN. Rows and heads lie further apart than they are long, so that
    no stride follows from another. ``steps``: bytes from row to row, from head to head and from
    batch to batch. ``begins`` [requests + 1]: the rows at which packed requests begin.
    """

    def __init__(
        self,
        shape: Prefill,
        group: bool,
        lengths: Sequence[int],
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.begins = starts(n + shape.padding for n in lengths)
        if group:
            size: tuple[int, ...] = (int(self.begins[-1]), heads + 1, dim + 16)
        elif shape.layout == "bhsd":
            size = len(lengths), heads + 1, lengths[0], dim + 16
        else:
            size = len(lengths), lengths[0], heads + 1, dim + 16
        whole = torch.full(size, math.nan).to(dtype)
        if not group and shape.layout == "bhsd":
            whole = whole.transpose(1, 2)
        self.whole = whole[..., :heads, :dim]
        if group:
            pairs = zip(self.begins.tolist(), lengths, strict=False)
            self.of = [self.whole[begin : begin + n] for begin, n in pairs]
        else:
            self.of = list(self.whole)
        strides = [step * whole.element_size() for step in whole.stride()]
        self.steps = (*strides[-3:-1], 0 if group else strides[0])

    def fill(self, g: torch.Generator) -> None:
        for part in self.of:
            part.copy_(torch.randn(part.shape, generator=g).to(part.dtype))


def launch(file: Path, shape: Prefill) -> Launch:
    """A launch of the file's kernel on seeded tensors, with the arguments that aiter passes.

    The caller closes it. Raises ValueError where the kernel takes no such shape.
    """
    words = file.stem.split("_")
    group, causal, fp8 = (word in words for word in ("group", "causal", "fp8"))
    if not group and (len(set(shape.requests)) > 1 or shape.padding):
        raise ValueError(f"{file.name} takes requests that are alike, without padding")
    text, _, v_text = words[1].removeprefix("hd").partition("x")
    dim, v_dim = int(text), int(v_text or text)
    q_lens, kv_lens = zip(*shape.requests, strict=True)
    dtype = FP8 if fp8 else torch.bfloat16
    q = _Rows(shape, group, q_lens, shape.q_heads, dim, dtype)
    k = _Rows(shape, group, kv_lens, shape.kv_heads, dim, dtype)
    v = _Rows(shape, group, kv_lens, shape.kv_heads, v_dim, dtype)
    out = _Rows(shape, group, q_lens, shape.q_heads, v_dim)
    g = torch.Generator().manual_seed(shape.seed)
    for rows in (q, k, v):
        rows.fill(g)
    lse = torch.full((*out.whole.shape[:-3], shape.q_heads, out.whole.shape[-3]), math.nan)
    lses = list(lse)
    if group:
        lses = [lse[:, i : i + n] for i, n in zip(q.begins.tolist(), q_lens, strict=False)]

    wide = dim == 192  # four waves of 512 registers
    tile = 128 if wide else 256
    rows_q, rows_k = q.whole.shape[-3], k.whole.shape[-3]
    # How causal tiles are spread; aiter also lowers it above 16384 rows.
    option = 0 if wide else 3 if causal and shape.q_heads % 8 else 5
    cumulative = [starts(n) if group else None for n in (q_lens, kv_lens)]
    physical = [rows.begins if group else None for rows in (q, k)]
    # Per request and head of K and V.
    scales = [torch.rand(len(q_lens), shape.kv_heads, generator=g) + 0.5 for _ in "qkv" if fp8]
    if causal and scales and not shape.twice:
        scales[:2] = [torch.exp2(scales[0].mul(8).round() - 8) ** sign for sign in (1, -1)]
    group_size = shape.q_heads // shape.kv_heads
    arguments = packed(
        out.whole, q.whole, k.whole, v.whole, lse, shape.scale, rows_q,
        q.steps[0], tile * q.steps[0], *q.steps[1:], group_size, *k.steps,
        option, 1, rows_k, dim, v_dim, shape.q_heads, *v.steps, *out.steps,
        *cumulative, lse.stride(-2) * 4, *physical,
        *(scales or [None] * 3), *([step * 4 for x in scales for step in x.stride()] or [0] * 6),
    )  # fmt: skip
    requests = []
    for r, (q_of, k_of, v_of) in enumerate(zip(q.of, k.of, v.of, strict=True)):
        if fp8:
            q_scale, k_scale, v_scale = (x[r, :, None].double() for x in scales)
            q_of = q_of.double() * q_scale.repeat_interleave(group_size, 0)
            k_of, v_of = k_of.double() * k_scale, v_of.double() * v_scale
        requests.append(Request(q_of, k_of, v_of, out.of[r], lses[r]))
    module = Module(file)
    tensors = [out.whole, q.whole, k.whole, v.whole, lse, *cumulative, *physical, *scales]
    return Launch(
        module,
        next(iter(module.kernels)),
        _grid(shape, -(-rows_q // tile), group, causal, wide),
        (256 if wide else 512, 1, 1),
        arguments,
        tuple(x for x in tensors if x is not None),
        out.whole,
        requests,
        causal,
        shape.scale,
        ARITHMETIC["fp8" if fp8 else next(word for word in words if word in ARITHMETIC)],
    )


def _grid(
    shape: Prefill, tiles: int, group: bool, causal: bool, wide: bool
) -> tuple[int, int, int]:
    """A causal workgroup takes a tile of either end of a request, but for D = 192."""
    if causal and not wide:
        tiles = -(-tiles // 2)
    batch = len(shape.requests)
    if group:
        return shape.q_heads, batch, tiles
    return (shape.q_heads, tiles, batch) if wide else (tiles, shape.q_heads, batch)
