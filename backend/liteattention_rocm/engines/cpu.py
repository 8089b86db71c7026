"""The CPU engine: ``csrc/cpu`` behind the engine contract.

One binary holds every instruction-set path; the best one the processor has is taken at run time,
``LITEATTENTION_CPU_ISA`` forces another. Threads follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import math
import os

import torch

from .. import _core
from .base import AttentionSpec, Engine, LiteSpec, TileGeometry, address, strides

ISA_VARIABLE = "LITEATTENTION_CPU_ISA"

_DTYPES = {
    torch.bfloat16: _core.DType.bf16,
    torch.float16: _core.DType.fp16,
    torch.float32: _core.DType.fp32,
}
_ROUNDINGS = {
    "rtne": _core.Rounding.rtne,
    "rtna": _core.Rounding.rtna,
    "rtz": _core.Rounding.rtz,
}


def available_isas() -> tuple[str, ...]:
    """Instruction-set paths that this processor can run, best first."""
    return tuple(_core.cpu_available_isas())


def chosen_isa() -> str:
    """Instruction-set path that the next call takes.

    Raises:
        ValueError: ``LITEATTENTION_CPU_ISA`` names a path this processor or build does not have.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    isas = available_isas()
    if not wanted:
        return isas[0]
    if wanted not in isas:
        raise ValueError(
            f"{ISA_VARIABLE}={wanted!r} is not available here: choose one of {', '.join(isas)}"
        )
    return wanted


class CpuEngine(Engine):
    """Attention in C++ on the host processor."""

    name = "cpu"

    def supports(self, spec: AttentionSpec, lite: LiteSpec | None = None) -> list[str]:
        """Return every reason against a request; see :meth:`Engine.supports`."""
        reasons = self.unavailable(spec.device)
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype must be bf16, fp16 or fp32, got {spec.dtype}")
        if spec.dtype != torch.bfloat16 and spec.rounding != "rtne":
            reasons.append(f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}")
        if spec.head_dim % 8 or not 8 <= spec.head_dim <= _core.CPU_MAX_HEAD_DIM:
            reasons.append(
                f"head dim must be a multiple of 8 from 8 to {_core.CPU_MAX_HEAD_DIM}, "
                f"got {spec.head_dim}"
            )
        if lite is not None:
            reasons += _geometry_reasons(lite)
            if spec.causal:
                reasons.append("LiteAttention is for non-causal self-attention")
        return reasons

    def geometry(self, head_dim: int) -> TileGeometry:
        """Return 128 x 64 tiles: fine enough to skip, coarse enough to fill the matrix unit."""
        return TileGeometry(q_block=128, k_block=_core.CPU_K_BLOCK, vote_rows=32)

    def attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run dense attention; see :meth:`Engine.attention`."""
        _core.cpu_attention(_request(spec, q, k, v, out, lse), None, chosen_isa())

    def lite_attention(
        self,
        spec: AttentionSpec,
        lite: LiteSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        """Run one LiteAttention step; see :meth:`Engine.lite_attention`."""
        skip = _core.LiteParams()
        skip.set_bitmaps(read.data_ptr(), write.data_ptr(), address(must_do), address(must_skip))
        skip.q_block = lite.geometry.q_block
        skip.vote_rows = lite.geometry.vote_rows
        skip.threshold = lite.threshold
        # Nothing is voted on at -inf; walking in the dense order makes it dense bit for bit.
        skip.descending = lite.descending and lite.threshold > -math.inf
        skip.soft_skip = lite.soft_skip
        _core.cpu_attention(_request(spec, q, k, v, out, lse), skip, chosen_isa())


def _geometry_reasons(lite: LiteSpec) -> list[str]:
    tile = lite.geometry
    reasons = []
    if tile.k_block != _core.CPU_K_BLOCK:
        reasons.append(f"k_block must be {_core.CPU_K_BLOCK}, got {tile.k_block}")
    if tile.q_block % _core.CPU_ROW_STEP or tile.q_block > _core.CPU_MAX_Q_BLOCK:
        reasons.append(
            f"q_block must be a multiple of {_core.CPU_ROW_STEP} up to "
            f"{_core.CPU_MAX_Q_BLOCK}, got {tile.q_block}"
        )
    if lite.soft_skip and (
        tile.vote_rows % _core.CPU_ROW_STEP or tile.vote_rows > _core.CPU_MAX_VOTE_ROWS
    ):
        reasons.append(
            f"with soft_skip, vote_rows must be a multiple of {_core.CPU_ROW_STEP} up to "
            f"{_core.CPU_MAX_VOTE_ROWS}, got {tile.vote_rows}"
        )
    return reasons


def _request(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> _core.AttentionParams:
    request = _core.AttentionParams()
    request.set_pointers(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), address(lse))
    request.set_shape(
        spec.batch, spec.q_heads, spec.kv_heads, spec.q_len, spec.kv_len, spec.head_dim
    )
    request.set_strides(
        strides(q, spec.layout),
        strides(k, spec.layout),
        strides(v, spec.layout),
        strides(out, spec.layout),
    )
    request.dtype = _DTYPES[spec.dtype]
    request.rounding = _ROUNDINGS[spec.rounding]
    request.scale = spec.scale
    request.causal = spec.causal
    request.threads = torch.get_num_threads()
    return request
