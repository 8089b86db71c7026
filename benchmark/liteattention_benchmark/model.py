"""One workgroup of a shipped kernel, recorded on the software MI300X for its timing model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from liteattention_emulator import Recording, library, recorded, set_option
from liteattention_emulator.recording import recording
from liteattention_rocm.contract import (
    DenseRequest,
    DenseTensors,
    LiteRequest,
    LiteTensors,
    Rounding,
)
from liteattention_rocm.engines.gfx942 import Gfx942Engine

PAGE = 4096
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """What to record: one q block of one head of a call of [B,S,H,D] tensors, bf16.

    shape: B,H,S,D, where D is 64 or 128. kernel: dense, or lite, which is a LiteAttention step
    whose threshold no tile falls below, so that it votes on every tile and keeps all of them.
    """

    shape: tuple[int, int, int, int]
    kernel: Literal["dense", "lite"]
    rounding: Rounding


def record(case: Case) -> tuple[Recording, float]:
    """Run the case's first workgroup and record it.

    Returns the recording and the matrix instructions of a wave per K block. Only the workgroup's
    own rows of the first head are computed, at the places that they have in tensors of the shape.
    """
    _, heads, length, dim = case.shape
    engine = Gfx942Engine(kv_splits=1, library=str(library()))
    tile = engine.geometry(dim)
    rows = min(length, tile.q_block)
    generator = torch.Generator().manual_seed(0)

    def tensor(count: int) -> torch.Tensor:
        # On a page: where lines fall in the sets of L1 does not change from run to run.
        raw = torch.empty(length * heads * dim + PAGE // 2, dtype=torch.bfloat16)
        whole = raw[-raw.data_ptr() % PAGE // 2 :][: length * heads * dim]
        one = whole.view(1, length, heads, dim)[:, :count, :1]
        return one.copy_(torch.randn(one.shape, generator=generator))

    q, k, v, out = tensor(rows), tensor(length), tensor(length), tensor(rows)
    dense = DenseRequest(
        1, 1, 1, rows, length, dim, q.dtype, q.device, "bshd", 1 / math.sqrt(dim), False,
        case.rounding, False,
    )  # fmt: skip
    request: DenseRequest = dense
    tensors: DenseTensors | LiteTensors = DenseTensors(q, k, v, out, None)
    if case.kernel == "lite":
        every = torch.full((1, 1, 1, tile.words(length)), -1, dtype=torch.int32)
        tensors = LiteTensors(q, k, v, out, None, every, torch.zeros_like(every), None, None)
        same: dict[str, Any] = {field.name: getattr(dense, field.name) for field in fields(dense)}
        request = LiteRequest(
            **same, geometry=tile, threshold=-1e30, descending=True, soft_skip=False
        )
    run = engine.bind(request, tensors)
    set_option("check", "off")
    try:
        with recording():
            run(tensors)
            found = recorded()
    finally:
        set_option("check", "")
    matrix = {i.index for i in found.instructions if i.unit == "mfma"}
    executed = sum(int(index) in matrix for index in found.waves[0].steps["index"])
    return found, executed / tile.k_blocks(length)
