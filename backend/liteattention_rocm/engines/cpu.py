"""The CPU engine: ``csrc/cpu`` behind the engine contract.

One binary holds every instruction-set path; the best one the processor has is taken at run time,
``LITEATTENTION_CPU_ISA`` forces another. Threads follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import math
import os

import torch

from .. import _core
from .base import (
    AttentionSpec,
    BoundRagged,
    BoundWrite,
    Engine,
    LiteSpec,
    RaggedBatch,
    RaggedSpec,
    TileGeometry,
    address,
    number_reasons,
    strides,
)

ISA_VARIABLE = "LITEATTENTION_CPU_ISA"

_DTYPES = {
    torch.bfloat16: _core.DType.bf16,
    torch.float16: _core.DType.fp16,
    torch.float32: _core.DType.fp32,
}
_KV_TYPES = {
    torch.float8_e4m3fn: _core.CpuKvType.fp8_e4m3,
    torch.float8_e5m2: _core.CpuKvType.fp8_e5m2,
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
        reasons = self.unavailable(spec.device) + _number_reasons(spec)
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

    def ragged_reasons(self, spec: RaggedSpec) -> list[str]:
        """Return every reason against a ragged call; see :meth:`Engine.ragged_reasons`."""
        reasons = self.unavailable(spec.device) + _number_reasons(spec)
        return reasons + _cache_reasons(spec.dtype, spec.kv_dtype)

    def plan_ragged(self, spec: RaggedSpec, batch: RaggedBatch) -> _core.CpuRaggedPlan:
        """Cut and order the step's work; see :meth:`Engine.plan_ragged`."""
        # By position: naming thirteen arguments costs as much as planning a decode step.
        shape = _core.CpuRaggedShape(
            spec.requests,
            spec.q_heads,
            spec.kv_heads,
            spec.head_dim,
            spec.page_size,
            _DTYPES[spec.dtype],
            _KV_TYPES.get(spec.kv_dtype, _core.CpuKvType.same),
            _ROUNDINGS[spec.rounding],
            spec.scale * spec.k_scale,
            spec.v_scale,
            spec.soft_cap,
            spec.causal,
            spec.window,
        )
        keys = batch.kv_start if batch.kv_start is not None else batch.kv_len
        table = batch.page_table
        return _core.CpuRaggedPlan(
            shape,
            batch.q_start.data_ptr(),
            address(keys),
            address(table),
            0 if table is None else table.stride(0),
            chosen_isa(),
        )

    def attention_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: _core.CpuRaggedPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Run a ragged call; see :meth:`Engine.attention_ragged`."""
        self.bind_ragged(spec, batch, plan, q, k, v, out)(q, k, v, out, lse, sinks)

    def bind_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: _core.CpuRaggedPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> BoundRagged:
        """Return what runs the plan on tensors like these; see :meth:`Engine.bind_ragged`."""
        steps = (_row_strides(q), _row_strides(k), _row_strides(v), _row_strides(out))
        run = _core.CpuRaggedRun(plan, *steps, spec.rows).run

        def bound(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            sinks: torch.Tensor | None,
        ) -> None:
            run(
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                torch.get_num_threads(),
            )

        return bound

    def write_reasons(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Return every reason against a cache write; see :meth:`Engine.write_reasons`."""
        reasons = self.unavailable(device)
        if dtype not in _DTYPES:
            reasons.append(f"dtype must be bf16, fp16 or fp32, got {dtype}")
        return reasons + _cache_reasons(dtype, cache_dtype)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write rows to slots of a cache; see :meth:`Engine.write_kv`."""
        bound = self.bind_write(k, v, k_cache, v_cache, slots, k_scale, v_scale)
        bound(k, v, k_cache, v_cache, slots)

    def bind_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> BoundWrite:
        """Return what writes tensors like these; see :meth:`Engine.bind_write`."""
        rows, kv_heads, head_dim = k.shape
        pages, page_size = k_cache.shape[:2]
        run = _core.CpuKvWrite(
            (rows, kv_heads, head_dim),
            _row_strides(k),
            _row_strides(v),
            pages,
            page_size,
            _row_strides(k_cache),
            _row_strides(v_cache),
            slots.dtype == torch.int64,
            _DTYPES[k.dtype],
            _KV_TYPES.get(k_cache.dtype, _core.CpuKvType.same),
            k_scale,
            v_scale,
        ).run

        def bound(
            k: torch.Tensor,
            v: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            beyond = run(
                k.data_ptr(),
                v.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                slots.data_ptr(),
                torch.get_num_threads(),
            )
            if beyond >= 0:
                raise ValueError(
                    f"slot {beyond} lies beyond a cache of {pages} pages of {page_size} tokens"
                )

        return bound


def _row_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Element strides of (page, token or row, head); no page in a tensor of 3 dimensions."""
    steps = tensor.stride()
    return (steps[0], steps[1], steps[2]) if len(steps) == 4 else (0, steps[0], steps[1])


def _number_reasons(spec: AttentionSpec | RaggedSpec) -> list[str]:
    reasons = number_reasons(spec)
    if spec.dtype not in _DTYPES:
        reasons.append(f"dtype must be bf16, fp16 or fp32, got {spec.dtype}")
    if spec.dtype != torch.bfloat16 and spec.rounding != "rtne":
        reasons.append(f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}")
    if spec.head_dim % 8 or not 8 <= spec.head_dim <= _core.CPU_MAX_HEAD_DIM:
        reasons.append(
            f"head dim must be a multiple of 8 from 8 to {_core.CPU_MAX_HEAD_DIM}, "
            f"got {spec.head_dim}"
        )
    return reasons


def _cache_reasons(dtype: torch.dtype, cache_dtype: torch.dtype) -> list[str]:
    if cache_dtype == dtype or cache_dtype in _KV_TYPES:
        return []
    return [
        f"the cache must be {dtype}, torch.float8_e4m3fn or torch.float8_e5m2, got {cache_dtype}"
    ]


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
