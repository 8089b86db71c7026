"""Writing keys and values of new tokens into paged KV caches.

A step of a language model calls this before :func:`.serving.attention_paged`, whose caches these
are, with the same views of a framework's buffers. A write is bound like any other call
(:mod:`.remembered`), with no plan of a batch: where each row goes is in its slot alone.
"""

from __future__ import annotations

from typing import Any

import torch

from . import engines, validation
from .arguments import Reasons
from .contract import Engine, WriteRequest, WriteTensors, write_tensors
from .remembered import Call, bound_call, calls, recall

__all__ = ["write_kv"]

_WHAT = "cache write"


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    engine: str | None = None,
) -> None:
    """Write keys and values of new tokens into a paged cache.

    Args:
        k, v: rows [T, Hkv, D], any strides with a contiguous last dimension; they must not overlap
            the caches (rows that move within a cache need a ``.clone()``).
        k_cache, v_cache: [pages, page_size, Hkv, D], any strides with a contiguous last dimension
            (views of one buffer are fine); k's dtype, or fp8 where the engine writes it.
        slots: int64 or int32 [T], contiguous; row t goes to token slots[t] % page_size of page
            slots[t] // page_size. A negative slot is padding: its row is not written. Slots must
            differ; which row of a doubled slot stays is not defined.
        k_scale, v_scale: an fp8 cache holds k / k_scale and v / v_scale, rounded to nearest even
            and clamped to its finite range; from 2^-60 to 2^60, 1 for other caches. Numbers or
            tensors, as in :func:`.serving.attention_paged`.
        engine: name of the engine; by default chosen by the device.

    Raises:
        TypeError, ValueError: lists every reason. A slot beyond the cache is found on the CPU
            only, before anything is written.
    """
    k_factor = v_factor = None
    if isinstance(k_scale, torch.Tensor) and isinstance(v_scale, torch.Tensor):
        k_factor, v_factor, k_scale, v_scale = k_scale, v_scale, 1.0, 1.0
    tensors = write_tensors((k, v, k_cache, v_cache, slots, k_factor, v_factor))
    key = call = None
    if not torch.compiler.is_dynamo_compiling():
        key, call = recall(calls, tensors, ("write", k_scale, v_scale, engine))
    if call is None:
        if key is None:
            if torch.compiler.is_compiling():
                # Its schema takes True for 1 and one tensor of two for a number: what eager calls
                # refuse, these do, too.
                found = Reasons()
                validation.write_options(found, k_scale, v_scale, engine)
                found.overlaps("v_cache", v_cache, {"k_cache": k_cache}, validation.WRITE_REMEDY)
                found.raise_for(_WHAT)
            else:
                _checked_write(tensors, k_scale, v_scale, engine)
            torch.ops.liteattention_rocm.write_kv(
                *tensors[:5], float(k_scale), float(v_scale), engine or "", k_factor, v_factor
            )
            return
        call = _bind_write(tensors, k_scale, v_scale, engine)
        calls.keep(key, call)
    call.claim(tensors, _WHAT, validation.WRITE_REMEDY)
    call.run(tensors)


# ------------------------------------------------------------------------- behind the call


def run_write(tensors: WriteTensors, k_scale: float, v_scale: float, engine: str) -> None:
    """Run a cache write: what the operator does."""
    key, call = recall(calls, tensors, ("write", k_scale, v_scale, engine))
    if call is None:
        call = _bind_write(tensors, k_scale, v_scale, engine)
        if key is not None:
            calls.keep(key, call)
    call.claim(tensors, _WHAT, validation.WRITE_REMEDY)
    call.run(tensors)


def check_write(
    tensors: WriteTensors, k_scale: float, v_scale: float, engine: str | None
) -> tuple[Engine, WriteRequest]:
    """Raise if anything is wrong with a cache write; else describe it."""
    _checked_write(tensors, k_scale, v_scale, engine)
    rows, kv_heads, head_dim = tensors.k.shape
    pages, page_size = tensors.k_cache.shape[:2]
    request = WriteRequest(
        rows, kv_heads, head_dim, tensors.k.dtype, tensors.k_cache.dtype, tensors.k.device, pages,
        page_size, float(k_scale), float(v_scale), tensors.k_scale is not None,
    )  # fmt: skip
    return engines.admit(request, engine), request


def _checked_write(tensors: WriteTensors, k_scale: Any, v_scale: Any, engine: str | None) -> None:
    k, v, k_cache, v_cache, slots, k_factor, v_factor = tensors
    k_scale, v_scale = validation.operator_scales(k_scale, v_scale, k_factor, v_factor, _WHAT)
    validation.write(k, v, k_cache, v_cache, slots, k_scale, v_scale, engine).raise_for(_WHAT)


def _bind_write(tensors: WriteTensors, k_scale: Any, v_scale: Any, engine: str | None) -> Call:
    chosen, request = check_write(tensors, k_scale, v_scale, engine)
    return bound_call(chosen.bind(request, tensors), tensors, (2, 3))
