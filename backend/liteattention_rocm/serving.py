"""Attention for language models: packed sequences, paged KV caches, and writing to those.

A *ragged batch* is requests of different lengths in one call. Query rows of all requests lie one
after the other in [T, Hq, D]; keys and values lie likewise (:func:`attention_varlen`) or in the
pages of a cache (:func:`attention_paged`). Prefill, chunked prefill and decode are the same call
with other lengths, and may share one.

Row i of a request with q_len rows and kv_len keys stands at position kv_len - q_len + i: its last
row is its last key (bottom-right alignment). Layouts of serving frameworks are views, not copies:

* vLLM, one layer's cache [blocks, Hkv, block, 2 D] with keys beside values:
  ``k = kv[..., :D].transpose(1, 2)`` and ``v = kv[..., D:].transpose(1, 2)``.
* SGLang, a pool of token slots [slots, Hkv, D]: ``pool.unsqueeze(1)`` is a cache of page size 1,
  whose page table is the request's token slots; ``pool.view(-1, page, Hkv, D)`` one of pages.

Everything that the layers of a step share, plans included, lives in one :class:`PagedBatch`: the
first layer's call is validated and planned, the others' are recognised by their shapes.

Softmax is computed online as in FlashAttention (Dao et al., arXiv 2205.14135), caches are paged
as in PagedAttention (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
import torch
from torch.autograd import forward_ad

from . import engines
from .arguments import (
    Reasons,
    as_float,
    choice_reasons,
    derivative_reasons,
    engine_reasons,
    flag_reasons,
    is_integer,
    plain_length,
    raise_if,
    readable,
    real_reasons,
    shown,
    stride_reasons,
    tensor_reasons,
)
from .engines import ROUNDINGS, Engine, RaggedBatch, RaggedSpec, Rounding
from .engines.base import BoundRagged, BoundWrite, factor_reasons, scale_reasons, soft_cap_reasons
from .memory import (
    extent_bytes,
    has_address,
    mark_written,
    overlap_reasons,
    target_reasons,
)
from .ops import _FLOATS, _LIBRARY, _dispatch_modes, _transforms, _usable

__all__ = ["PagedBatch", "attention_paged", "attention_varlen", "write_kv"]

#: A parameter is a tensor in everything but its type.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

#: Calls and plans that a batch remembers, writes and checks that the process does; the least
#: recently used go first. A step of a model asks for one to three, a plan on a GPU may own a
#: workspace.
_REMEMBERED_CALLS = 32
_REMEMBERED_WRITES = 64
_REMEMBERED_CHECKS = 64

_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor kv_len, "
    "Tensor page_table, Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, SymInt max_q_len, "
    "SymInt max_kv_len, float scale, bool causal, int window, float soft_cap, float k_scale, "
    "float v_scale, str rounding, str engine) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float scale, bool causal, int window, float soft_cap, str rounding, str engine) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "float k_scale, float v_scale, str engine) -> ()"
)


@dataclass(frozen=True, slots=True)
class _Options:
    """What a call asks for beside its tensors, as the caller gave it."""

    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float | None
    k_scale: float
    v_scale: float
    rounding: Rounding
    return_lse: bool
    engine: str | None


@dataclass(frozen=True, slots=True)
class _Call:
    """A validated and planned call: what the next layer with the same shapes reuses."""

    engine: Engine
    spec: RaggedSpec
    ragged: RaggedBatch
    plan: Any
    run: BoundRagged | None  # None: without an ``out`` to say what it will be like
    q_bytes: int
    k_bytes: int
    v_bytes: int
    out_bytes: int
    indices: dict[str, torch.Tensor]  # lengths and pages by the caller's names for them
    ranges: list[tuple[int, int]]  # the bytes that those lie in


@dataclass(frozen=True, slots=True)
class _Write:
    """A validated write: what the next layer with the same shapes reuses.

    ``*_bytes``: from first to past the last element of each tensor; k and v, and the caches, have
    one shape each, but not one stride. Caches whose ranges meet may still share nothing;
    ``interleaved`` are such distances (v_cache - k_cache).
    """

    run: BoundWrite
    k_cache_bytes: int
    v_cache_bytes: int
    k_bytes: int
    v_bytes: int
    slots_bytes: int
    interleaved: set[int]


_Value = TypeVar("_Value")


class _Recent(Generic[_Value]):
    """A mapping that forgets what was not looked up for longest when it has more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Any, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> list[_Value]:
        return list(self._kept.values())

    def get(self, key: Any) -> _Value | None:
        found = self._kept.get(key)
        if found is not None:
            try:  # noqa: SIM105 - suppress() costs as much as the look-up
                self._kept.move_to_end(key)
            except KeyError:  # another thread has just made it go
                pass
        return found

    def put(self, key: Any, value: _Value) -> None:
        self._kept[key] = value
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


class PagedBatch:
    """The requests of one step against a paged cache; made once per step, used by every layer.

    Args:
        q_start: int32 [R + 1]; rows q_start[r] to q_start[r + 1] of q are request r's. Rows before
            the first and past the last are padding: neither read nor written.
        kv_len: int32 [R]; keys of each request, those of this step's rows included.
        page_table: int32 [R, width], any row stride; the pages of each request in order, so that
            key j is token j % page_size of page page_table[r, j // page_size]. Entries past the
            last key, and rows of requests without query rows, may hold anything.
        max_q_len, max_kv_len: bounds of the lengths; None reads them from the tensors, which waits
            for a GPU to finish what it is doing.

    On the CPU the values are checked here, once. Changing them through PyTorch is noticed, except
    in inference mode, and makes the next call check and plan anew; other changes must not be made.
    On a GPU nothing is read when both bounds are given, and the tensors may be refilled within the
    bounds and the width of the table.

    A batch holds the plans of the last 32 kinds of calls (shapes and options), which on a GPU own a
    workspace: one call at a time. Whoever captures calls in a graph keeps the batch for as long as
    the graph is replayed, and makes no more than 32 kinds of calls with it.

    Copies and pickles hold the tensors and bounds and plan again. A shallow copy shares tensors.

    Raises:
        TypeError, ValueError: lists every reason.
    """

    def __init__(
        self,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        page_table: torch.Tensor,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        self.q_start = q_start
        self.kv_len = kv_len
        self.page_table = page_table
        self._bounds = (max_q_len, max_kv_len)
        self._calls: _Recent[_Call] = _Recent(_REMEMBERED_CALLS)
        self._plans: _Recent[Any] = _Recent(_REMEMBERED_CALLS)
        self._read()

    def __getstate__(self) -> dict[str, Any]:
        max_q_len, max_kv_len = self._bounds
        return {
            "q_start": self.q_start,
            "kv_len": self.kv_len,
            "page_table": self.page_table,
            "max_q_len": max_q_len,
            "max_kv_len": max_kv_len,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        PagedBatch.__init__(self, **state)

    def _read(self) -> None:
        """Check the tensors, find the bounds, and forget what rested on earlier values."""
        max_q_len, max_kv_len = self._bounds
        kinds, values = _batch_reasons(
            self.q_start, self.kv_len, self.page_table, max_q_len, max_kv_len
        )
        raise_if("batch", kinds, values)
        tensors = (self.q_start, self.kv_len, self.page_table)
        self._ranges: list[tuple[int, int]] | None = None
        self._ragged = RaggedBatch(
            q_start=self.q_start, kv_len=self.kv_len, page_table=self.page_table
        )
        self._places = tuple(t.data_ptr() for t in tensors if has_address(t))
        # None: changes cannot be seen (inference mode), or need not be (a GPU plans from bounds).
        self._versions: tuple[int, int, int] | None = None
        if all(readable(t) and not t.is_inference() for t in tensors):
            self._versions = (
                self.q_start._version,
                self.kv_len._version,
                self.page_table._version,
            )
        if max_q_len is None:
            max_q_len = _longest(self.q_start)
        if max_kv_len is None:
            max_kv_len = int(self.kv_len.max()) if self.kv_len.numel() else 0
        self.max_q_len: int = plain_length(max_q_len)
        self.max_kv_len: int = plain_length(max_kv_len)
        self._calls.clear()
        self._plans.clear()

    def _changed(self) -> bool:
        """Whether a tensor was written to or replaced since it was checked."""
        tensors = self.q_start, self.kv_len, self.page_table
        if self._places and self._places != tuple([t.data_ptr() for t in tensors]):
            return True
        return self._versions is not None and self._versions != (
            self.q_start._version,
            self.kv_len._version,
            self.page_table._version,
        )

    def _index_ranges(self) -> list[tuple[int, int]]:
        """Where the tensors lie; found once per reading."""
        if self._ranges is None:
            self._ranges = _ranges(self.q_start, self.kv_len, self.page_table)
        return self._ranges

    def __repr__(self) -> str:
        """Name the sizes; the values may be on a GPU."""
        return (
            f"PagedBatch(requests={self.requests}, max_q_len={self.max_q_len}, "
            f"max_kv_len={self.max_kv_len}, device={self.q_start.device})"
        )

    @property
    def requests(self) -> int:
        """Number of requests R, those without rows included."""
        return int(self.kv_len.shape[0])

    def _longest_named(self, page_size: int) -> int:
        """Return a bound of the lengths that the table, too, can name pages for."""
        return min(self.max_kv_len, int(self.page_table.shape[1]) * page_size)

    def _cache_reasons(self, rows: int, pages: int, page_size: int) -> list[str]:
        """Say what is missing: query rows, table entries or pages (CPU values only)."""
        table = self.page_table
        if not readable(table):
            return []
        if _native().pages_hold(
            self.q_start.data_ptr(),
            self.kv_len.data_ptr(),
            table.data_ptr(),
            self.requests,
            table.shape[1],
            table.stride(0),
            rows,
            pages,
            page_size,
        ):
            return []
        reasons = _row_reasons("q_start", self.q_start, "q", rows)
        named, starts = table.numpy(), self.q_start.numpy()
        used = np.where(starts[1:] > starts[:-1], -(-self.kv_len.numpy() // page_size), 0)
        for row, count in enumerate(used):
            if count > named.shape[1]:
                return [
                    *reasons,
                    f"page_table is {named.shape[1]} pages of {page_size} tokens wide, too few for "
                    f"kv_len[{row}] = {int(self.kv_len[row])}",
                ]
        for row, count in enumerate(used):
            for column, page in enumerate(named[row, :count].tolist()):
                if page < 0:
                    return [*reasons, f"page_table[{row}, {column}] is {page}, not a page"]
                if page >= pages:
                    return [*reasons, f"page_table names page {page} of a cache of {pages} pages"]
        return reasons


@overload
def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    causal: bool = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    k_scale: float = ...,
    v_scale: float = ...,
    rounding: Rounding = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> torch.Tensor: ...


@overload
def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    causal: bool = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    k_scale: float = ...,
    v_scale: float = ...,
    rounding: Rounding = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rounding: Rounding = "rtne",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged query rows over a paged KV cache: prefill, decode or both.

    Args:
        q: queries of all requests, [T, Hq, D]; bf16, fp16 or fp32.
        k_cache: keys, [pages, page_size, Hkv, D], any strides with a contiguous last dimension;
            Hq % Hkv == 0, and query head h reads key head h // (Hq // Hkv). q's dtype, or fp8
            (torch.float8_*) where the engine reads it.
        v_cache: values, shaped like ``k_cache``.
        batch: lengths and pages of the requests.
        causal: a row sees the keys up to its own position.
        window: a row sees only keys j > position - window: ``window`` keys with its own. A window
            without ``causal`` bounds the past alone. None is no window.
        soft_cap: c > 0 makes a score c * tanh(score / c), after the scale; natural units, from
            2^-60 to 2^60.
        sinks: fp32 [Hq], natural units; one more logit per head in the denominator that brings no
            value.
        scale: factor on q.k, natural units; 1/sqrt(D) by default.
        k_scale, v_scale: what an fp8 cache's numbers are multiplied by; 1 for other caches.
            ``scale * k_scale`` (if not 0) and ``v_scale`` lie between 2^-60 and 2^60 in size.
        rounding: how fp32 results become bf16: "rtne", "rtna" or "rtz". Other dtypes take "rtne".
        return_lse: also return the log-sum-exp of the scores (soft-capped, sink included).
        out: tensor of q's shape and dtype to write to; it must not overlap an input.
        engine: name of the engine; by default chosen by the device.

    Returns:
        ``out``, or ``(out, lse)`` with ``lse`` in natural log, fp32, [Hq, T]. A row that sees no
        key gives zeros and -inf (with sinks: the sink). Padding rows are not written, so they are
        undefined unless ``out`` was given.

    Raises:
        TypeError, ValueError: lists every reason and says what to do instead.
    """
    options = (causal, window, soft_cap, scale, k_scale, v_scale, rounding, return_lse, engine)
    if _traced(q, k_cache, v_cache, sinks, out):
        return _paged_operator(q, k_cache, v_cache, batch, sinks, out, _Options(*options))
    try:
        # The types as well: 1 and True are one key, and only one of them is a flag.
        key = (
            _signature(q, k_cache, v_cache, sinks, out),
            options,
            causal.__class__,
            window.__class__,
            soft_cap.__class__,
            scale.__class__,
            k_scale.__class__,
            v_scale.__class__,
            return_lse.__class__,
        )
        hash(key)
        call = None if batch._changed() else batch._calls.get(key)
    except (AttributeError, TypeError, RuntimeError):
        call = key = None  # not tensors or sparse ones, not a batch, an option of a strange type
    if call is None:
        call = _plan_paged(q, k_cache, v_cache, batch, sinks, out, _Options(*options), key)
        if key is not None:
            batch._calls.put(key, call)
    return _run(call, q, k_cache, v_cache, sinks, out)


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    causal: bool = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    rounding: Rounding = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> torch.Tensor: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    causal: bool = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    rounding: Rounding = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    rounding: Rounding = "rtne",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences of different lengths, each over its own keys.

    Args:
        q: queries of all sequences, [T, Hq, D]; bf16, fp16 or fp32.
        k, v: keys and values of all sequences, [Tk, Hkv, D] of q's dtype; Hq % Hkv == 0.
        cu_seqlens_q: int32 [R + 1]; rows cu_seqlens_q[r] to cu_seqlens_q[r + 1] are sequence r's.
        cu_seqlens_k: the same for keys. A sequence with more keys than rows has a prefix before
            its first row.
        max_seqlen_q, max_seqlen_k: bounds of the lengths; None reads them from the tensors, which
            waits for a GPU.
        causal, window, soft_cap, sinks, scale, rounding, return_lse, out, engine: as in
            :func:`attention_paged`; not causal by default.

    Returns:
        ``out``, or ``(out, lse)``, as :func:`attention_paged` does.

    Raises:
        TypeError, ValueError: lists every reason and says what to do instead.
    """
    options = _Options(causal, window, soft_cap, scale, 1.0, 1.0, rounding, return_lse, engine)
    bounds = (max_seqlen_q, max_seqlen_k)
    if _traced(q, k, v, sinks, out):
        return _varlen_operator(q, k, v, cu_seqlens_q, cu_seqlens_k, bounds, sinks, out, options)
    call = _plan_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, bounds, sinks, out, options)
    return _run(call, q, k, v, sinks, out)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
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
            and clamped to its finite range; from 2^-60 to 2^60, 1 for other caches.
        engine: name of the engine; by default chosen by the device.

    Raises:
        TypeError, ValueError: lists every reason. A slot beyond the cache is found on the CPU
            only, before anything is written.
    """
    if _traced(k, v, k_cache, v_cache, slots):
        if not torch.compiler.is_compiling():
            reasons = _write_reasons(k, v, k_cache, v_cache, slots, k_scale, v_scale, engine)
            raise_if("cache write", *reasons)
        torch.ops.liteattention_rocm.write_kv(
            k, v, k_cache, v_cache, slots, float(k_scale), float(v_scale), engine or ""
        )
        return
    _run_write(k, v, k_cache, v_cache, slots, k_scale, v_scale, engine)


# ------------------------------------------------------------------------- running a call


def _traced(*tensors: Any) -> bool:
    """Whether a call is for PyTorch's dispatcher, which then gets one opaque operator.

    So it is when a compiler, a tracer or a transform watches, where there may be tangents, and for
    negated views, which it writes out first.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() > 0:
        return True
    if _transforms() is not None or forward_ad._current_level >= 0:
        return True
    for tensor in tensors:
        if type(tensor) in _PLAIN_TENSORS:
            if tensor.is_neg():
                return True
        elif isinstance(tensor, torch.Tensor):
            return True
    return False


def _signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Everything about a call's tensors that its validation looks at but their addresses."""
    return (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
        None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        # Zeros without memory have no address; tensors that are not strided raise.
        q.data_ptr() == 0
        or k.data_ptr() == 0
        or v.data_ptr() == 0
        or (out is not None and out.data_ptr() == 0)
        or (sinks is not None and sinks.data_ptr() == 0),
        torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (out is not None and out.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ),
    )


def _run(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    spec = call.spec
    if out is None:
        out = torch.empty_like(q)
    else:
        _check_overlap(call, q, k, v, sinks, out)
        mark_written(out)
    lse = None
    if spec.return_lse:
        lse = torch.empty((spec.q_heads, spec.rows), dtype=torch.float32, device=q.device)
    if call.run is not None:
        call.run(q, k, v, out, lse, sinks)
    else:
        call.engine.attention_ragged(spec, call.ragged, call.plan, q, k, v, out, lse, sinks)
    return out if lse is None else (out, lse)


def _check_overlap(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Refuse an ``out`` over an input; only ranges that meet are looked at closely."""
    begin = out.data_ptr()
    end = begin + call.out_bytes
    near = False
    for tensor, size in ((q, call.q_bytes), (k, call.k_bytes), (v, call.v_bytes)):
        other = tensor.data_ptr()
        near = near or (begin < other + size and other < end)
    for other, other_end in call.ranges:
        near = near or (begin < other_end and other < end)
    if sinks is not None:
        other = sinks.data_ptr()
        near = near or (begin < other + 4 * call.spec.q_heads and other < end)
    if near:
        names = ("k_cache", "v_cache") if call.spec.page_size else ("k", "v")
        inputs = {"q": q, names[0]: k, names[1]: v, "sinks": sinks, **call.indices}
        raise_if("attention call", [], overlap_reasons("out", out, inputs))


def _ranges(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    """Where tensors begin and end, in bytes, for those that have a place."""
    return [
        (tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor))
        for tensor in tensors
        if has_address(tensor)
    ]


def _extents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
) -> tuple[int, int, int, int]:
    last = 0 if out is None else extent_bytes(out)
    return extent_bytes(q), extent_bytes(k), extent_bytes(v), last


def _plan_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: _Options,
    key: Any = None,
) -> _Call:
    kinds: list[str] = []
    values: list[str] = []
    extents = None if key is None else _checked.get(key)
    if extents is None:
        kinds, values = _call_reasons(q, k, v, ("k_cache", "v_cache"), sinks, out, options)
    if not isinstance(batch, PagedBatch):
        kinds.append(f"batch must be a PagedBatch, got {type(batch).__name__}")
    else:
        if batch._changed():
            batch._read()
        if isinstance(q, torch.Tensor) and q.device != batch.q_start.device:
            values.append(f"batch is on {batch.q_start.device}, q on {q.device}")
    if not kinds and not values:
        values += batch._cache_reasons(q.shape[0], k.shape[0], k.shape[1])
    raise_if("attention call", kinds, values)
    if extents is None:
        extents = _extents(q, k, v, out)
        if key is not None:
            _checked.put(key, extents)
    page_size = k.shape[1]
    longest = batch._longest_named(page_size)
    chosen, spec = _prepare(
        q, k, options, sinks, batch.requests, page_size, min(batch.max_q_len, q.shape[0]), longest
    )
    plan = batch._plans.get((chosen.name, spec))
    if plan is None:
        plan = chosen.plan_ragged(spec, batch._ragged)
        batch._plans.put((chosen.name, spec), plan)
    run = None if out is None else chosen.bind_ragged(spec, batch._ragged, plan, q, k, v, out)
    indices = {"q_start": batch.q_start, "kv_len": batch.kv_len, "page_table": batch.page_table}
    ranges = [] if out is None else batch._index_ranges()
    return _Call(chosen, spec, batch._ragged, plan, run, *extents, indices, ranges)


#: What calls of batches before this one have shown to hold: bytes of q, k, v and out by everything
#: that the check of tensors and options looks at. Owner: this module, one per process. Lifetime:
#: the process, bounded. It holds no tensor and no address.
_checked: _Recent[tuple[int, int, int, int]] = _Recent(_REMEMBERED_CHECKS)


def _plan_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_start: torch.Tensor,
    kv_start: torch.Tensor,
    bounds: tuple[int | None, int | None],
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: _Options,
) -> _Call:
    kinds, values = _call_reasons(q, k, v, ("k", "v"), sinks, out, options)
    more = _packed_reasons(q_start, kv_start, bounds)
    kinds, values = kinds + more[0], values + more[1]
    if not kinds and not values:
        for name, starts, of, tensor in (
            ("cu_seqlens_q", q_start, "q", q),
            ("cu_seqlens_k", kv_start, "k", k),
        ):
            values += _row_reasons(name, starts, of, tensor.shape[0])
            if starts.device != q.device:
                values.append(f"{name} is on {starts.device}, q on {q.device}")
    raise_if("attention call", kinds, values)
    max_q, max_k = bounds
    # No sequence has more rows than there are, whatever its bound.
    max_q = _longest(q_start) if max_q is None else min(plain_length(max_q), q.shape[0])
    max_k = _longest(kv_start) if max_k is None else min(plain_length(max_k), k.shape[0])
    chosen, spec = _prepare(q, k, options, sinks, q_start.shape[0] - 1, 0, max_q, max_k)
    ragged = RaggedBatch(q_start=q_start, kv_start=kv_start)
    plan = chosen.plan_ragged(spec, ragged)
    indices = {"cu_seqlens_q": q_start, "cu_seqlens_k": kv_start}
    extents = _extents(q, k, v, out)
    ranges = [] if out is None else _ranges(q_start, kv_start)
    return _Call(chosen, spec, ragged, plan, None, *extents, indices, ranges)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    options: _Options,
    sinks: torch.Tensor | None,
    requests: int,
    page_size: int,
    max_q_len: int,
    max_kv_len: int,
) -> tuple[Engine, RaggedSpec]:
    """Choose the engine and ask whether it takes the call."""
    rows, q_heads, head_dim = q.shape
    spec = RaggedSpec(
        requests=requests,
        rows=rows,
        q_heads=q_heads,
        kv_heads=k.shape[-2],
        head_dim=head_dim,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        device=q.device,
        page_size=page_size,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        scale=_scale(q, options),
        causal=options.causal,
        window=plain_length(options.window or 0),
        soft_cap=float(options.soft_cap or 0.0),
        sinks=sinks is not None,
        k_scale=float(options.k_scale),
        v_scale=float(options.v_scale),
        rounding=options.rounding,
        return_lse=options.return_lse,
    )
    chosen = engines.choose(q.device, options.engine or None)
    reasons = chosen.ragged_reasons(spec)
    if reasons:
        raise engines.refuse_ragged(chosen, reasons, spec)
    return chosen, spec


def _scale(q: torch.Tensor, options: _Options) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if options.scale is None else float(options.scale)


def _run_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    engine: str | None,
) -> None:
    try:
        key = (
            *(k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.stride(), v.dtype, v.device),
            *(k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device),
            *(v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device),
            *(slots.shape, slots.stride(), slots.dtype, slots.device),
            *(k_scale, k_scale.__class__, v_scale, v_scale.__class__),
            engine or os.environ.get(engines.ENGINE_VARIABLE),
        )
        write = _writes.get(key)
        if (
            k.requires_grad or v.requires_grad or k_cache.requires_grad or v_cache.requires_grad
        ) and torch.is_grad_enabled():
            write = None
    except (AttributeError, TypeError, RuntimeError):
        write = key = None  # not tensors or sparse ones, or a scale of a strange type
    if write is None:
        kinds, values = _write_reasons(k, v, k_cache, v_cache, slots, k_scale, v_scale, engine)
        raise_if("cache write", kinds, values)
        writer = _writer(k, k_cache, engine)
        run = writer.bind_write(k, v, k_cache, v_cache, slots, float(k_scale), float(v_scale))
        write = _Write(
            run,
            k_cache_bytes=extent_bytes(k_cache),
            v_cache_bytes=extent_bytes(v_cache),
            k_bytes=extent_bytes(k),
            v_bytes=extent_bytes(v),
            slots_bytes=extent_bytes(slots),
            interleaved=set(),
        )
        if key is not None:
            _writes.put(key, write)
    _check_write_overlap(write, k, v, k_cache, v_cache, slots)
    mark_written(k_cache, v_cache)
    write.run(k, v, k_cache, v_cache, slots)


def _check_write_overlap(
    write: _Write,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Refuse caches over each other or over what is read; only ranges that meet are compared."""
    first, second = k_cache.data_ptr(), v_cache.data_ptr()
    first_end, second_end = first + write.k_cache_bytes, second + write.v_cache_bytes
    reasons: list[str] = []
    distance = second - first
    if first < second_end and second < first_end and distance not in write.interleaved:
        reasons += overlap_reasons("v_cache", v_cache, {"k_cache": k_cache})
        if not reasons and len(write.interleaved) < _REMEMBERED_WRITES:
            write.interleaved.add(distance)
    # Nearly always the sources lie beside everything that the two caches span.
    low = first if first < second else second
    high = first_end if first_end > second_end else second_end
    begin, other, last = k.data_ptr(), v.data_ptr(), slots.data_ptr()
    if not (first and second and begin and other and last):  # empty, or zeros without memory
        tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        raise_if("cache write", *_usable(tensors)[:2])
    if (
        (begin < high and low < begin + write.k_bytes)
        or (other < high and low < other + write.v_bytes)
        or (last < high and low < last + write.slots_bytes)
    ):
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            sources = {"k": k, "v": v, "slots": slots}
            reasons += overlap_reasons(name, cache, sources, "call .clone() on that first")
    raise_if("cache write", [], reasons)


#: Key: everything that validation and the choice of the engine look at. Owner: this module, one per
#: process. Lifetime: the process, bounded. It holds no tensor and no address.
_writes: _Recent[_Write] = _Recent(_REMEMBERED_WRITES)


def _writer(k: torch.Tensor, k_cache: torch.Tensor, engine: str | None) -> Engine:
    chosen = engines.choose(k.device, engine or None)
    reasons = chosen.write_reasons(k.dtype, k_cache.dtype, k.device)
    if reasons:
        raise ValueError(f"engine {chosen.name!r} cannot write this cache: {'; '.join(reasons)}")
    return chosen


# ------------------------------------------------------------------------- what is wrong


@functools.cache
def _native() -> Any:
    """Return the compiled module, which only CPU tensors need: a GPU's engine may do without."""
    from . import _core

    return _core


def _longest(starts: torch.Tensor) -> int:
    if starts.numel() < 2:
        return 0
    if readable(starts):
        numbers = starts.tolist()
        return int(max(b - a for a, b in itertools.pairwise(numbers)))
    return int(torch.diff(starts).max())


def _index_reasons(name: str, tensor: Any, dims: int) -> Reasons:
    """Type, dtype and shape of one of a batch's index tensors."""
    kinds, values = tensor_reasons(name, tensor)
    if kinds or values:
        return kinds, values
    if tensor.dtype != torch.int32:
        kinds.append(f"{name} must be torch.int32, got {tensor.dtype}: call .int() on it")
    if tensor.is_neg():
        values.append(f"{name} must not be a negated view: call .resolve_neg() on it")
    if tensor.dim() != dims:
        values.append(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    elif tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        values.append(
            f"{name} must be contiguous in its last dimension, got strides "
            f"{list(tensor.stride())}: call .contiguous() on it"
        )
    return kinds, values


def _starts_reasons(name: str, starts: torch.Tensor) -> list[str]:
    """Say whether starts go backwards (CPU values only)."""
    if not starts.numel():
        return [f"{name} must have one entry more than there are requests, got none"]
    if not readable(starts):
        return []
    numbers = starts.tolist()
    if numbers[0] < 0 or any(b < a for a, b in itertools.pairwise(numbers)):
        return [f"{name} must start at 0 or later and never decrease, got {_shown(numbers)}"]
    return []


def _shown(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 12 else f"{str(numbers[:12])[:-1]}, ...]"


def _bound_reasons(name: str, bound: Any) -> Reasons:
    if bound is None:
        return [], []
    if not is_integer(bound):
        return [f"{name} must be an int or None, got {type(bound).__name__}"], []
    return [], [f"{name} must not be negative, got {shown(bound)}"] if bound < 0 else []


def _plainly_right(
    q_start: Any, kv_len: Any, page_table: Any, max_q_len: Any, max_kv_len: Any
) -> bool:
    """Whether there is nothing to say of a batch, for batches of the usual kind on the CPU.

    False is no verdict. A step of a small model is a millisecond or two, and looking for reasons
    one by one takes a hundredth of it.
    """
    try:
        return (
            type(q_start) is type(kv_len) is type(page_table) is torch.Tensor
            and q_start.dtype is kv_len.dtype is page_table.dtype is torch.int32
            and q_start.is_contiguous()
            and kv_len.is_contiguous()
            and q_start.dim() == kv_len.dim() == 1
            and page_table.dim() == 2
            and not any([t._is_zerotensor() or t.is_neg() for t in (q_start, kv_len, page_table)])
            and (page_table.stride(1) == 1 or page_table.shape[1] < 2)
            and q_start.shape[0] - 1 == kv_len.shape[0] == page_table.shape[0]
            and (max_q_len is None or (type(max_q_len) is int and max_q_len >= 0))
            and (max_kv_len is None or (type(max_kv_len) is int and max_kv_len >= 0))
            and page_table.device == kv_len.device == q_start.device
            and readable(q_start)
            and _native().lengths_hold(
                q_start.data_ptr(),
                kv_len.data_ptr(),
                kv_len.shape[0],
                -1 if max_q_len is None else max_q_len,
                -1 if max_kv_len is None else max_kv_len,
            )
        )
    except (AttributeError, TypeError, RuntimeError):
        return False


def _batch_reasons(
    q_start: Any, kv_len: Any, page_table: Any, max_q_len: Any, max_kv_len: Any
) -> Reasons:
    if _plainly_right(q_start, kv_len, page_table, max_q_len, max_kv_len):
        return [], []
    kinds: list[str] = []
    values: list[str] = []
    for more in (
        _index_reasons("q_start", q_start, 1),
        _index_reasons("kv_len", kv_len, 1),
        _index_reasons("page_table", page_table, 2),
        _bound_reasons("max_q_len", max_q_len),
        _bound_reasons("max_kv_len", max_kv_len),
    ):
        kinds += more[0]
        values += more[1]
    if kinds or values:
        return kinds, values
    requests = kv_len.shape[0]
    if q_start.shape[0] != requests + 1:
        values.append(f"q_start must be [{requests + 1}] like kv_len, got {list(q_start.shape)}")
    if page_table.shape[0] != requests:
        values.append(f"page_table must have {requests} rows, got {list(page_table.shape)}")
    if not q_start.device == kv_len.device == page_table.device:
        values.append(
            f"q_start, kv_len and page_table must be on one device, got {q_start.device}, "
            f"{kv_len.device} and {page_table.device}"
        )
    values += _starts_reasons("q_start", q_start)
    if not values and readable(q_start) and requests:
        lengths = kv_len.tolist()
        if min(lengths) < 0:
            values.append(f"kv_len must not be negative, got {_shown(lengths)}")
        if max_q_len is not None and _longest(q_start) > max_q_len:
            values.append(f"max_q_len {max_q_len} is less than a length, {_longest(q_start)}")
        if max_kv_len is not None and max(lengths) > max_kv_len:
            values.append(f"max_kv_len {max_kv_len} is less than a length, {max(lengths)}")
    return kinds, values


def _packed_reasons(q_start: Any, kv_start: Any, bounds: tuple[Any, Any]) -> Reasons:
    kinds: list[str] = []
    values: list[str] = []
    for more in (
        _index_reasons("cu_seqlens_q", q_start, 1),
        _index_reasons("cu_seqlens_k", kv_start, 1),
        _bound_reasons("max_seqlen_q", bounds[0]),
        _bound_reasons("max_seqlen_k", bounds[1]),
    ):
        kinds += more[0]
        values += more[1]
    if kinds or values:
        return kinds, values
    if q_start.shape != kv_start.shape:
        values.append(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {q_start.shape[0]} and "
            f"{kv_start.shape[0]}"
        )
    for name, starts, bound in (("q", q_start, bounds[0]), ("k", kv_start, bounds[1])):
        wrong = _starts_reasons(f"cu_seqlens_{name}", starts)
        values += wrong
        if not wrong and bound is not None and readable(starts) and _longest(starts) > bound:
            values.append(f"max_seqlen_{name} {bound} is less than a length, {_longest(starts)}")
    return kinds, values


def _row_reasons(name: str, starts: torch.Tensor, of: str, rows: int) -> list[str]:
    """Say whether a batch ends past its tensor (CPU values only)."""
    if not readable(starts) or int(starts[-1]) <= rows:
        return []
    return [f"{name} ends at row {int(starts[-1])}, {of} has {rows} rows"]


def _call_reasons(
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str],
    sinks: Any,
    out: Any,
    options: _Options,
) -> Reasons:
    """Everything wrong with a call's tensors and options: (of type, of value)."""
    kinds, values = _option_reasons(options)
    kv_dims = 4 if names[0] == "k_cache" else 3
    layout = {1: "Hq", 3: "T,H,D", 4: "pages,page_size,H,D"}
    dims = {"q": 3, names[0]: kv_dims, names[1]: kv_dims, "out": 3, "sinks": 1}
    given = {"q": q, names[0]: k, names[1]: v}
    given |= {n: t for n, t in (("out", out), ("sinks", sinks)) if t is not None}
    more_kinds, more_values, tensors = _usable(given)
    kinds, values = kinds + more_kinds, values + more_values
    for name, tensor in tensors.items():
        if tensor.dim() != dims[name]:
            values.append(
                f"{name} must have {dims[name]} dimensions ({layout[dims[name]]}), "
                f"got {list(tensor.shape)}"
            )
        values += stride_reasons(name, tensor)
        values += derivative_reasons(name, tensor)
    if kinds or len(tensors) < len(given):
        return kinds, values
    if q.dtype not in _FLOATS:
        kinds.append(f"q must be bf16, fp16 or fp32, got {q.dtype}")
    kinds += _cache_dtype_reasons(q.dtype, k, v, names, options)
    if out is not None and out.dtype != q.dtype:
        kinds.append(f"out must have q's dtype {q.dtype}, got {out.dtype}")
    if sinks is not None:
        more = _sink_reasons(sinks, q)
        kinds, values = kinds + more[0], values + more[1]
    if len({tensor.device for tensor in tensors.values()}) > 1:
        listed = ", ".join(f"{name} {tensor.device}" for name, tensor in tensors.items())
        values.append(f"all tensors must have one device, got {listed}")
    if all(tensors[name].dim() == dims[name] for name in tensors if name != "sinks"):
        values += _shape_reasons(q, k, v, names, out)
    return kinds, values


def _option_reasons(options: _Options) -> Reasons:
    kinds: list[str] = []
    values: list[str] = []
    kinds += flag_reasons(causal=options.causal, return_lse=options.return_lse)
    if options.window is not None:
        if not is_integer(options.window):
            kinds.append(f"window must be an int or None, got {type(options.window).__name__}")
        elif options.window < 1:
            values.append(
                f"window must be at least 1, got {shown(options.window)}: None is no window"
            )
    usable = {"scale": 1.0} if options.scale is None else {}
    for name in ("scale", "soft_cap", "k_scale", "v_scale"):
        number = getattr(options, name)
        if number is None and name in ("scale", "soft_cap"):
            continue
        wrong = real_reasons(name, number)
        kinds, values = kinds + wrong[0], values + wrong[1]
        if not any(wrong) and name != "scale" and number <= 0:
            remedy = ": None is no cap" if name == "soft_cap" else ""
            values.append(f"{name} must be positive, got {number}{remedy}")
        elif not any(wrong):
            usable[name] = as_float(number)
    values += _factor_reasons(usable)
    values += choice_reasons("rounding", options.rounding, ROUNDINGS)
    named = engine_reasons(options.engine)
    return kinds + named[0], values + named[1]


def _factor_reasons(numbers: dict[str, float]) -> list[str]:
    """Say which factors, finite numbers of the right sign each, leave the range of fp32."""
    reasons = []
    if "scale" in numbers and "k_scale" in numbers:
        reasons += scale_reasons(numbers["scale"], numbers["k_scale"])
    if "v_scale" in numbers:
        reasons += factor_reasons("v_scale", numbers["v_scale"])
    return reasons + soft_cap_reasons(numbers.get("soft_cap", 0.0))


def _cache_dtype_reasons(
    dtype: torch.dtype,
    k: torch.Tensor,
    v: torch.Tensor,
    names: tuple[str, str],
    options: _Options,
) -> list[str]:
    reasons = []
    if k.dtype != v.dtype:
        reasons.append(
            f"{names[0]} and {names[1]} must have one dtype, got {k.dtype} and {v.dtype}"
        )
    paged = names[0] == "k_cache"
    for name, tensor in zip(names, (k, v), strict=True):
        if tensor.dtype == torch.uint8 and paged:
            reasons.append(
                f"{name} is torch.uint8, which does not say which fp8 it holds: "
                f"pass {name}.view(torch.float8_e4m3fn) or another float8 type"
            )
        elif tensor.dtype != dtype and not (paged and tensor.dtype in _FP8):
            reasons.append(
                f"{name} must have q's dtype {dtype}{' or be fp8' if paged else ''}, "
                f"got {tensor.dtype}"
            )
    if k.dtype not in _FP8 and (options.k_scale, options.v_scale) != (1, 1):
        reasons.append(
            f"k_scale and v_scale are for fp8 caches, got {shown(options.k_scale)} and "
            f"{shown(options.v_scale)} with {k.dtype}"
        )
    return reasons


def _sink_reasons(sinks: torch.Tensor, q: torch.Tensor) -> Reasons:
    kinds, values = [], []
    if sinks.dtype != torch.float32:
        kinds.append(f"sinks must be torch.float32, got {sinks.dtype}: call .float() on it")
    if q.dim() == 3 and sinks.dim() == 1 and sinks.shape[0] != q.shape[1]:
        values.append(f"sinks must be [{q.shape[1]}] (Hq), got {list(sinks.shape)}")
    return kinds, values


def _shape_reasons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    names: tuple[str, str],
    out: torch.Tensor | None,
) -> list[str]:
    reasons = []
    if k.shape != v.shape:
        reasons.append(
            f"{names[0]} and {names[1]} must have one shape, got {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        reasons.append(
            f"q and {names[0]} must have one head dim, got {q.shape[-1]} and {k.shape[-1]}"
        )
    heads, kv_heads = q.shape[1], k.shape[-2]
    if not heads or not kv_heads or heads % kv_heads:
        reasons.append(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if names[0] == "k_cache" and not k.shape[1]:
        reasons.append(f"k_cache must have pages of at least one token, got {list(k.shape)}")
    if out is not None:
        if out.shape != q.shape:
            reasons.append(f"out must have q's shape {list(q.shape)}, got {list(out.shape)}")
        else:
            reasons += target_reasons("out", out)
    return reasons


def _write_reasons(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    k_scale: Any,
    v_scale: Any,
    engine: Any,
) -> Reasons:
    """Everything wrong with a cache write but overlaps: (of type, of value)."""
    dims = {"k": 3, "v": 3, "k_cache": 4, "v_cache": 4}
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    kinds, values, tensors = _usable(given)
    for name, tensor in tensors.items():
        if name == "slots":
            continue
        if tensor.dim() != dims[name]:
            values.append(f"{name} must have {dims[name]} dimensions, got {list(tensor.shape)}")
        values += stride_reasons(name, tensor)
        values += derivative_reasons(name, tensor)
        if "cache" in name:
            values += target_reasons(name, tensor)
    if "slots" in tensors:
        if slots.dtype not in (torch.int64, torch.int32):
            kinds.append(f"slots must be int64 or int32, got {slots.dtype}")
        if slots.dim() != 1 or not slots.is_contiguous():
            values.append(
                f"slots must be contiguous with one dimension, got {list(slots.shape)} with "
                f"strides {list(slots.stride())}"
            )
    for name, number in (("k_scale", k_scale), ("v_scale", v_scale)):
        wrong = real_reasons(name, number)
        kinds, values = kinds + wrong[0], values + wrong[1]
        if not any(wrong) and number <= 0:
            values.append(f"{name} must be positive, got {number}")
        elif not any(wrong):
            values += factor_reasons(name, as_float(number))
    named = engine_reasons(engine)
    kinds, values = kinds + named[0], values + named[1]
    if kinds or values:
        return kinds, values
    if k.dtype not in _FLOATS:
        kinds.append(f"k must be bf16, fp16 or fp32, got {k.dtype}")
    if v.dtype != k.dtype:
        kinds.append(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    kinds += _cache_dtype_reasons(
        k.dtype,
        k_cache,
        v_cache,
        ("k_cache", "v_cache"),
        _Options(False, None, None, None, k_scale, v_scale, "rtne", False, None),
    )
    if k.shape != v.shape:
        values.append(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if k_cache.shape != v_cache.shape:
        values.append(
            f"k_cache and v_cache must have one shape, got {list(k_cache.shape)} and "
            f"{list(v_cache.shape)}"
        )
    if k.shape[1:] != k_cache.shape[2:]:
        values.append(
            f"k and k_cache must have the same heads and head dim, got {list(k.shape[1:])} and "
            f"{list(k_cache.shape[2:])}"
        )
    if slots.shape[0] != k.shape[0]:
        values.append(f"slots must have a slot per row, got {slots.shape[0]} for {k.shape[0]} rows")
    devices = [t.device for t in (k, v, k_cache, v_cache, slots)]
    if len(set(devices)) > 1:
        values.append(f"all tensors must have one device, got {', '.join(map(str, devices))}")
    return kinds, values


# ------------------------------------------------------------------------- operators


def _paged_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: _Options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call the operator, which plans anew: a graph carries tensors, not plans."""
    # Its schema knows no None and takes True for 1: what eager calls refuse, these do, too.
    names = ("k_cache", "v_cache")
    kinds, values = _traced_reasons(q, k, v, names, sinks, out, options)
    if not isinstance(batch, PagedBatch):
        kinds.append(f"batch must be a PagedBatch, got {type(batch).__name__}")
    raise_if("attention call", kinds, values)
    out = torch.empty_like(q) if out is None else out
    lse = _empty_lse(q) if options.return_lse else None
    torch.ops.liteattention_rocm.attention_paged(
        q,
        k,
        v,
        batch.q_start,
        batch.kv_len,
        batch.page_table,
        out,
        lse,
        sinks,
        batch.max_q_len,
        batch.max_kv_len,
        _scale(q, options),
        options.causal,
        plain_length(options.window or 0),
        float(options.soft_cap or 0.0),
        float(options.k_scale),
        float(options.v_scale),
        options.rounding,
        options.engine or "",
    )
    return out if lse is None else (out, lse)


def _varlen_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    bounds: tuple[int | None, int | None],
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: _Options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    kinds, values = _traced_reasons(q, k, v, ("k", "v"), sinks, out, options)
    more = _packed_reasons(cu_seqlens_q, cu_seqlens_k, bounds)
    raise_if("attention call", kinds + more[0], values + more[1])
    longest_q, longest_k = (None if b is None else plain_length(b) for b in bounds)
    out = torch.empty_like(q) if out is None else out
    lse = _empty_lse(q) if options.return_lse else None
    torch.ops.liteattention_rocm.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        lse,
        sinks,
        longest_q,
        longest_k,
        _scale(q, options),
        options.causal,
        plain_length(options.window or 0),
        float(options.soft_cap or 0.0),
        options.rounding,
        options.engine or "",
    )
    return out if lse is None else (out, lse)


def _traced_reasons(
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str],
    sinks: Any,
    out: Any,
    options: _Options,
) -> Reasons:
    """Everything that the dispatcher would refuse with errors of its own.

    A compiler asks the operator's fake about the tensors.
    """
    if torch.compiler.is_compiling():
        return _option_reasons(options)
    return _call_reasons(q, k, v, names, sinks, out, options)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _operator_options(
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    k_scale: float,
    v_scale: float,
    rounding: Rounding,
    engine: str,
    lse: torch.Tensor | None,
) -> _Options:
    return _Options(
        causal=causal,
        window=window or None,
        soft_cap=soft_cap or None,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        rounding=rounding,
        return_lse=lse is not None,
        engine=engine or None,
    )


def _attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    k_scale: float,
    v_scale: float,
    rounding: Rounding,
    engine: str,
) -> None:
    options = _operator_options(
        scale, causal, window, soft_cap, k_scale, v_scale, rounding, engine, lse
    )
    batch = PagedBatch(q_start, kv_len, page_table, max_q_len=max_q_len, max_kv_len=max_kv_len)
    call = _plan_paged(q, k_cache, v_cache, batch, sinks, out, options)
    raise_if("attention call", [], target_reasons("out", out))
    _check_overlap(call, q, k_cache, v_cache, sinks, out)
    mark_written(*(t for t in (out, lse) if t is not None))
    call.engine.attention_ragged(
        call.spec, call.ragged, call.plan, q, k_cache, v_cache, out, lse, sinks
    )


def _fake_attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    k_scale: float,
    v_scale: float,
    rounding: Rounding,
    engine: str,
) -> None:
    options = _operator_options(
        scale, causal, window, soft_cap, k_scale, v_scale, rounding, engine, lse
    )
    kinds, values = _batch_reasons(q_start, kv_len, page_table, max_q_len, max_kv_len)
    more = _call_reasons(q, k_cache, v_cache, ("k_cache", "v_cache"), sinks, out, options)
    raise_if("attention call", kinds + more[0], values + more[1])
    requests, page_size = kv_len.shape[0], k_cache.shape[1]
    _prepare(q, k_cache, options, sinks, requests, page_size, max_q_len, max_kv_len)


def _attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    rounding: Rounding,
    engine: str,
) -> None:
    options = _operator_options(scale, causal, window, soft_cap, 1.0, 1.0, rounding, engine, lse)
    bounds = (max_seqlen_q, max_seqlen_k)
    call = _plan_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, bounds, sinks, out, options)
    raise_if("attention call", [], target_reasons("out", out))
    _check_overlap(call, q, k, v, sinks, out)
    mark_written(*(t for t in (out, lse) if t is not None))
    call.engine.attention_ragged(call.spec, call.ragged, call.plan, q, k, v, out, lse, sinks)


def _fake_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    rounding: Rounding,
    engine: str,
) -> None:
    options = _operator_options(scale, causal, window, soft_cap, 1.0, 1.0, rounding, engine, lse)
    kinds, values = _packed_reasons(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    more = _call_reasons(q, k, v, ("k", "v"), sinks, out, options)
    raise_if("attention call", kinds + more[0], values + more[1])
    # Bounds that only the values know are at most the rows there are.
    max_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    max_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    _prepare(q, k, options, sinks, cu_seqlens_q.shape[0] - 1, 0, max_q, max_k)


def _fake_write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    engine: str,
) -> None:
    reasons = _write_reasons(k, v, k_cache, v_cache, slots, k_scale, v_scale, engine)
    raise_if("cache write", *reasons)
    _writer(k, k_cache, engine)


for _name, _function, _fake in (
    ("attention_paged", _attention_paged, _fake_attention_paged),
    ("attention_varlen", _attention_varlen, _fake_attention_varlen),
    ("write_kv", _run_write, _fake_write_kv),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"liteattention_rocm::{_name}", _fake, lib=_LIBRARY)
