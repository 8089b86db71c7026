"""The CPU engine: ``csrc/cpu`` behind the engine contract.

One binary holds every instruction-set path; the best one the processor has is taken at run time,
``LITEATTENTION_CPU_ISA`` forces another. Threads follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .. import _core
from ..contract import (
    Bound,
    DenseRequest,
    DenseTensors,
    Engine,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    Request,
    TileGeometry,
    WriteRequest,
    WriteTensors,
    address,
    beyond,
    page_strides,
    read_scale,
    strides,
)
from .environment import ISA_VARIABLE, settings

_DTYPES = {
    torch.bfloat16: _core.DType.bf16,
    torch.float16: _core.DType.fp16,
    torch.float32: _core.DType.fp32,
}
_KV_TYPES = {
    torch.float8_e4m3fn: _core.CpuKvType.fp8_e4m3,
    torch.float8_e5m2: _core.CpuKvType.fp8_e5m2,
    torch.float8_e4m3fnuz: _core.CpuKvType.fp8_e4m3fnuz,
    torch.float8_e5m2fnuz: _core.CpuKvType.fp8_e5m2fnuz,
}
_TILE = TileGeometry(q_block=128, k_block=_core.CPU_K_BLOCK, vote_rows=32)
_ROUNDINGS = {"rtne": _core.Rounding.rtne, "rtna": _core.Rounding.rtna, "rtz": _core.Rounding.rtz}


def available_isas() -> tuple[str, ...]:
    """Instruction-set paths that this processor can run, best first."""
    return tuple(_core.cpu_available_isas())


def chosen_isa() -> str:
    """Instruction-set path that calls take.

    Raises:
        ValueError: ``LITEATTENTION_CPU_ISA`` names a path this processor or build does not have.
    """
    wanted, isas = settings().cpu_isa, _core.cpu_available_isas()
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
    dtypes = tuple(_DTYPES)
    cache_dtypes = tuple(_KV_TYPES)
    weighs = True
    values_apart = True

    @property
    def described(self) -> str:
        """Its name and the instruction-set path, such as "cpu, amx"."""
        return f"{self.name}, {chosen_isa()}"

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device``; see :meth:`Engine.unavailable`."""
        reasons = super().unavailable(device)
        try:
            chosen_isa()
        except ValueError as error:
            reasons.append(str(error))
        return reasons

    def limits(self, request: Request) -> list[str]:
        """Return the head dims and tiles that it does not have; see :meth:`Engine.limits`."""
        if isinstance(request, WriteRequest):
            return []
        reasons = []
        for name, dim in (("head dim", request.head_dim), ("v's head dim", request.value_dim)):
            if dim is not None and (dim % 8 or not 8 <= dim <= _core.CPU_MAX_HEAD_DIM):
                reasons.append(
                    f"{name} must be a multiple of 8 from 8 to {_core.CPU_MAX_HEAD_DIM}, got {dim}"
                )
        if isinstance(request, LiteRequest):
            reasons += _geometry_reasons(request)
        return reasons

    def geometry(self, head_dim: int, rows: int | None = None) -> TileGeometry:
        """Return 128 x 64 tiles: fine enough to skip, coarse enough to fill the matrix unit."""
        return _TILE

    def bind(self, request: Request, like: Any) -> Bound:
        """Return what computes in C++; see :meth:`Engine.bind`."""
        if isinstance(request, RaggedRequest):
            bind: Any = _bind_ragged
        elif isinstance(request, WriteRequest):
            bind = _bind_write
        else:
            return _bind_dense(request, like)
        return _with_scales(request, bind) if request.scale_tensors else bind(request, like)


def _bind_dense(request: DenseRequest, like: DenseTensors | LiteTensors) -> Bound:
    call = _core.CpuAttention(
        (request.batch, request.q_heads, request.kv_heads),
        (request.q_len, request.kv_len, request.head_dim, request.value_dim or request.head_dim),
        strides(like.q, request.layout),
        strides(like.k, request.layout),
        strides(like.v, request.layout),
        strides(like.out, request.layout),
        _DTYPES[request.dtype],
        _ROUNDINGS[request.rounding],
        request.scale,
        request.causal,
        chosen_isa(),
        torch.get_num_threads,
    )
    if isinstance(request, LiteRequest):
        call.skip(
            request.geometry.q_block,
            request.geometry.vote_rows,
            request.threshold,
            request.walks_down,
            request.soft_skip,
            request.budget,
        )
    return call


def _with_scales(request: RaggedRequest | WriteRequest, bind: Callable[[Any, Any], Bound]) -> Bound:
    """Bind again whenever scales in tensors have other values: a plan holds them as numbers."""
    last: tuple[tuple[float, float], Bound] | None = None

    def run(t: RaggedTensors | WriteTensors) -> None:
        nonlocal last
        scales = read_scale(t.k_scale, 1.0), read_scale(t.v_scale, 1.0)
        found = last
        if found is None or found[0] != scales:
            numbers = replace(request, k_scale=scales[0], v_scale=scales[1], scale_tensors=False)
            last = found = scales, bind(numbers, t)
        found[1](t)

    return run


def _bind_ragged(request: RaggedRequest, like: RaggedTensors) -> Bound:
    # By position: naming thirteen arguments costs as much as planning a decode step.
    shape = _core.CpuRaggedShape(
        request.requests,
        request.q_heads,
        request.kv_heads,
        request.head_dim,
        request.value_dim or request.head_dim,
        request.page_size,
        _DTYPES[request.dtype],
        _KV_TYPES.get(request.kv_dtype, _core.CpuKvType.same),
        _ROUNDINGS[request.rounding],
        request.scale * request.k_scale,
        request.v_scale,
        request.soft_cap,
        request.lookahead,
        request.window,
    )
    table = like.page_table
    plan = _core.CpuRaggedPlan(
        shape,
        like.q_start.data_ptr(),
        like.keys.data_ptr(),
        address(table),
        0 if table is None else table.stride(0),
        chosen_isa(),
    )
    steps = (page_strides(like.q), page_strides(like.k), page_strides(like.v))
    return _core.CpuRaggedRun(
        plan, *steps, page_strides(like.out), request.rows, torch.get_num_threads
    )


def _bind_write(request: WriteRequest, like: WriteTensors) -> Bound:
    run = _core.CpuKvWrite(
        (request.rows, request.kv_heads, request.head_dim),
        page_strides(like.k),
        page_strides(like.v),
        request.pages,
        request.page_size,
        page_strides(like.k_cache),
        page_strides(like.v_cache),
        like.slots.dtype == torch.int64,
        _DTYPES[request.dtype],
        _KV_TYPES.get(request.kv_dtype, _core.CpuKvType.same),
        request.k_scale,
        request.v_scale,
    ).run

    def write(t: WriteTensors) -> None:
        slot = run(
            t.k.data_ptr(),
            t.v.data_ptr(),
            t.k_cache.data_ptr(),
            t.v_cache.data_ptr(),
            t.slots.data_ptr(),
            torch.get_num_threads(),
        )
        if slot >= 0:
            raise beyond(slot, request)

    return write


def _geometry_reasons(request: LiteRequest) -> list[str]:
    tile = request.geometry
    reasons = []
    if tile.k_block != _core.CPU_K_BLOCK:
        reasons.append(f"k_block must be {_core.CPU_K_BLOCK}, got {tile.k_block}")
    if tile.q_block % _core.CPU_ROW_STEP or tile.q_block > _core.CPU_MAX_Q_BLOCK:
        reasons.append(
            f"q_block must be a multiple of {_core.CPU_ROW_STEP} up to "
            f"{_core.CPU_MAX_Q_BLOCK}, got {tile.q_block}"
        )
    if request.soft_skip and (
        tile.vote_rows % _core.CPU_ROW_STEP or tile.vote_rows > _core.CPU_MAX_VOTE_ROWS
    ):
        reasons.append(
            f"with soft_skip, vote_rows must be a multiple of {_core.CPU_ROW_STEP} up to "
            f"{_core.CPU_MAX_VOTE_ROWS}, got {tile.vote_rows}"
        )
    return reasons
