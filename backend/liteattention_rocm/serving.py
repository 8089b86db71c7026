"""Attention for language models: packed sequences and paged KV caches.

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

Everything that the layers of a step share lives in one :class:`PagedBatch`: the first layer's call
is checked and bound, the others' are recognised by their shapes.

Softmax is computed online as in FlashAttention (Dao et al., arXiv 2205.14135), caches are paged
as in PagedAttention (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch

from . import engines, validation
from .arguments import Reasons, plain_length, readable
from .batch import PagedBatch
from .contract import Engine, RaggedRequest, RaggedTensors, Rounding, ragged_tensors
from .dense import empty_out, other_dim
from .memory import extent_bytes, mark_written
from .remembered import Call, Calls, bound_call, bounded, kinds, packed, recall
from .validation import RaggedOptions

__all__ = ["PagedBatch", "attention_paged", "attention_varlen"]

_WHAT = "attention call"


@overload
def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    causal: bool = ...,
    window: int | None = ...,
    lookahead: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    k_scale: float | torch.Tensor = ...,
    v_scale: float | torch.Tensor = ...,
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
    lookahead: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    scale: float | None = ...,
    k_scale: float | torch.Tensor = ...,
    v_scale: float | torch.Tensor = ...,
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
    lookahead: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
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
        v_cache: values, shaped like ``k_cache``. An infinite or NaN one may reach rows of its
            request that do not see its key: 0 times it is NaN.
        batch: lengths and pages of the requests.
        causal: a row sees the keys up to its own position.
        window: a row sees only keys j > position - window, so ``window`` keys with its own; None is
            no bound. It bounds the past alone.
        lookahead: a row sees only keys j <= position + lookahead; None is no bound. With
            ``causal=False`` alone. FlashAttention's ``window_size=(left, right)`` is
            ``window=left + 1, lookahead=right``.
        soft_cap: c > 0 makes a score c * tanh(score / c), after the scale; natural units, from
            2^-60 to 2^60.
        sinks: fp32 [Hq], natural units; one more logit per head in the denominator that brings no
            value. From -2^30 to 2^30, or -inf for a head without one: rows of a head with another
            sink, NaN among them, are undefined. Values are not checked.
        scale: factor on q.k, natural units; 1/sqrt(D) by default.
        k_scale, v_scale: what an fp8 cache's numbers are multiplied by; 1 for other caches.
            ``scale * k_scale`` (if not 0) and ``v_scale`` lie between 2^-60 and 2^60 in size. Both
            numbers, or both fp32 tensors of one element on q's device: those are read whenever the
            call runs, a graph's replays included, and their values are not checked.
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
    k_factor = v_factor = None
    if isinstance(k_scale, torch.Tensor) and isinstance(v_scale, torch.Tensor):
        k_factor, v_factor, k_scale, v_scale = k_scale, v_scale, 1.0, 1.0
    options = (
        causal, window, lookahead, soft_cap, scale, k_scale, v_scale, rounding, return_lse, engine,
    )  # fmt: skip
    key = call = None
    if not torch.compiler.is_dynamo_compiling() and isinstance(batch, PagedBatch):
        at, values, planned = batch.seen
        table = batch.page_table
        if table is not planned or (
            at and at != (batch.q_start.data_ptr(), batch.kv_len.data_ptr(), table.data_ptr())
        ):
            batch.read()
            at, values, _ = batch.seen
        key, call = recall(
            batch.calls, (q, k_cache, v_cache, out, sinks, k_factor, v_factor), options
        )
        # Values in CPU memory may be others by now; what is bound rests on the lengths.
        if call is None:
            if values is not None and not values.same_lengths(at[0], at[1]):
                batch.read()
        elif call.holds is not None and not call.holds():
            batch.read()
            call = None
    if call is None:
        asked = RaggedOptions(*options)
        if k_factor is not None and v_factor is not None:
            asked = asked._replace(k_scale=k_factor, v_scale=v_factor)
        if key is None:
            return _through_operator(q, k_cache, v_cache, batch, sinks, out, asked)
        call = _bind_paged(q, k_cache, v_cache, batch, sinks, out, asked, key)
    given = out
    if out is None:
        out = torch.empty_like(q)
    lse = None
    if return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    tensors = ragged_tensors(
        (
            q, k_cache, v_cache, out, lse, sinks, batch.q_start, batch.kv_len, batch.page_table,
            k_factor, v_factor,
        )
    )  # fmt: skip
    if given is not None:
        call.claim(tensors, _WHAT)
    call.run(tensors)
    return out if lse is None else (out, lse)


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
    lookahead: int | None = ...,
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
    lookahead: int | None = ...,
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
    lookahead: int | None = None,
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
        k, v: keys and values of all sequences, [Tk, Hkv, D] of q's dtype; Hq % Hkv == 0. On the
            CPU engines the head dim of values may be another than D: that of the output. Infinite
            and NaN values: as in :func:`attention_paged`.
        cu_seqlens_q: int32 [R + 1]; rows cu_seqlens_q[r] to cu_seqlens_q[r + 1] are sequence r's.
        cu_seqlens_k: the same for keys. A sequence with more keys than rows has a prefix before
            its first row.
        max_seqlen_q, max_seqlen_k: bounds of the lengths; None reads them from the tensors, which
            waits for a GPU.
        causal, window, lookahead, soft_cap, sinks, scale, rounding, return_lse, out, engine: as in
            :func:`attention_paged`; not causal by default.

    Returns:
        ``out``, or ``(out, lse)``, as :func:`attention_paged` does.

    Raises:
        TypeError, ValueError: lists every reason and says what to do instead.
    """
    options = RaggedOptions(
        causal, window, lookahead, soft_cap, scale, 1.0, 1.0, rounding, return_lse, engine
    )
    bounds = (max_seqlen_q, max_seqlen_k)
    compiling = torch.compiler.is_compiling()
    key = call = None
    if compiling:
        # The operator's schema takes True for 1: what eager calls refuse, these do, too.
        found = Reasons()
        validation.ragged_options(found, options)
        found.bound("max_seqlen_q", max_seqlen_q)
        found.bound("max_seqlen_k", max_seqlen_k)
        if out is not None:
            found.overlaps("out", out, {"q": q, "k": k, "v": v})
        found.raise_for(_WHAT)
    else:
        key, call = recall(
            packed, (q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k), (*options, *bounds)
        )
    if call is None and not compiling:
        indices = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        found = validation.ragged(q, k, v, ("k", "v"), sinks, out, None, indices, options)
        validation.packed_batch(found, cu_seqlens_q, cu_seqlens_k, bounds, q, k)
        found.raise_for(_WHAT)
    given = out
    if out is None:
        value_dim = other_dim(q, v) if call is None else call.value_dim
        out = torch.empty_like(q) if value_dim is None else empty_out(q, value_dim)
    lse = None
    if return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    if key is None:
        torch.ops.liteattention_rocm.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, sinks,
            *(None if b is None else plain_length(b) for b in (max_seqlen_q, max_seqlen_k)),
            _scale(q, options), causal, plain_length(window or 0), _plain(lookahead),
            float(soft_cap or 0.0), rounding, engine or "",
        )  # fmt: skip
    else:
        tensors = RaggedTensors(q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, None)
        if call is None:
            call = _bind_packed(tensors, bounds, options, key, given is not None)
        if given is not None:
            call.claim(tensors, _WHAT)
        call.run(tensors)
    return out if lse is None else (out, lse)


#: Forms of page tables for which a kind of calls remembers what was harmless.
_MOST_TABLES = 32


# ------------------------------------------------------------------------- behind the calls


class _Kind(NamedTuple):
    """What calls of earlier batches have shown to hold.

    ``spans``: bytes of q, k, v, out, lse and sinks, then of scales that are tensors. ``passed``: as
    in :class:`Call`, by shape and steps of the page table, of calls with ``out``: the sizes and
    strides of all else are the kind's, or follow from them. For the last 32 tables.

    Key: everything that the checks of tensors and options look at, see :func:`recall`. Owner:
    ``kinds``, one per process. It holds no tensor, and of addresses those in ``passed``.
    """

    spans: tuple[int, ...]
    passed: Calls


def _bind_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: RaggedOptions,
    key: Any,
) -> Call:
    """Check a call that its batch has not seen, and bind it for the batch.

    A call of an engine that plans from bounds serves every batch of the same bounds and layout.
    """
    kind: _Kind | None = kinds.get(key)
    if kind is None:
        indices = {"q_start": batch.q_start, "kv_len": batch.kv_len, "page_table": batch.page_table}
        found = validation.ragged(
            q, k, v, ("k_cache", "v_cache"), sinks, out, None, indices, options
        )
        found.raise_for(_WHAT)
        spans = [0 if t is None else extent_bytes(t) for t in (q, k, v, out, None, sinks)]
        spans += [4 * (factor is not None) for factor in _factors(options)]
        kind = _Kind(tuple(spans), Calls(_MOST_TABLES))
        kinds.keep(key, kind)
    if q.device != batch.q_start.device:
        raise ValueError(f"invalid {_WHAT}: batch is on {batch.q_start.device}, q on {q.device}")
    batch.check_cache(q.shape[0], k.shape[0], k.shape[1])
    # Without an ``out`` its strides are those that empty_like would give it.
    like = torch.empty_like(q) if out is None else out
    lse = torch.empty(0, device=q.device) if options.return_lse else None
    tensors = RaggedTensors(
        q, k, v, like, lse, sinks, batch.q_start, batch.kv_len, batch.page_table,
        *_factors(options),
    )  # fmt: skip
    request = paged_request(tensors, batch, options)
    engine = engines.choose(request.device, options.engine)
    shared = (engine, key, request, batch.layout) if engine.plans_from_bounds else None
    call: Call | None = bounded.get(shared)
    if call is None:
        passed: set[tuple[int, ...]] = kind.passed.get(batch.layout[1:], set())
        if out is not None:
            kind.passed.keep(batch.layout[1:], passed)
        call = Call(
            engines.admit(request, options.engine).bind(request, tensors),
            _PAGED_NAMES,
            kind.spans[:6] + batch.spans + kind.spans[6:],
            () if out is None else (3,),
            passed,
        )
        if shared is not None:
            bounded.keep(shared, call)
    at, values, _ = batch.seen
    if values is not None:
        call = call._replace(holds=values.check(*at, q.shape[0], k.shape[0], k.shape[1]))
    batch.calls.keep(key, call)
    return call


#: How callers of :func:`attention_paged` know its tensors.
_PAGED_NAMES = (
    "q", "k_cache", "v_cache", "out", "lse", "sinks", "q_start", "kv_len", "page_table", "k_scale",
    "v_scale",
)  # fmt: skip


def paged_request(
    tensors: RaggedTensors, batch: PagedBatch, options: RaggedOptions
) -> RaggedRequest:
    """Describe a checked call over a paged cache."""
    page_size, width = tensors.k.shape[1], batch.page_table.shape[1]
    # The table, too, bounds what can be named.
    longest = min(batch.max_kv_len, width * page_size)
    rows = min(batch.max_q_len, tensors.q.shape[0])  # a bound may be larger than what there is
    return _request(tensors, batch.requests, page_size, rows, longest, options)


def packed_request(
    tensors: RaggedTensors, max_q_len: int, max_kv_len: int, options: RaggedOptions
) -> RaggedRequest:
    """Describe a checked call over packed sequences."""
    return _request(tensors, tensors.q_start.shape[0] - 1, 0, max_q_len, max_kv_len, options)


def _request(
    t: RaggedTensors,
    requests: int,
    page_size: int,
    max_q_len: int,
    max_kv_len: int,
    options: RaggedOptions,
) -> RaggedRequest:
    causal, window, lookahead, soft_cap, _, k_scale, v_scale, rounding, _, _ = options
    if causal:
        lookahead = 0
    elif lookahead and not isinstance(max_q_len, torch.SymInt):
        # So many that a request's first row sees its last key hide nothing.
        lookahead = None if lookahead >= max_q_len - 1 else plain_length(lookahead)
    if t.k_scale is not None:
        k_scale = v_scale = 1.0
    rows, q_heads, head_dim = t.q.shape
    return RaggedRequest(
        requests, rows, q_heads, t.k.shape[-2], head_dim, t.q.dtype, t.k.dtype, t.q.device,
        page_size, max_q_len, max_kv_len, _scale(t.q, options), lookahead,
        plain_length(window or 0), float(soft_cap or 0.0), t.sinks is not None, float(k_scale),
        float(v_scale), rounding, t.lse is not None, t.k_scale is not None,
        value_dim=other_dim(t.q, t.v),
    )  # fmt: skip


def _factors(options: RaggedOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of an fp8 cache that are tensors; None where they are numbers."""
    if isinstance(options.k_scale, torch.Tensor) and isinstance(options.v_scale, torch.Tensor):
        return options.k_scale, options.v_scale
    return None, None


def run_paged(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> None:
    """Run a call over a paged cache whose outputs are there: what the operator does."""
    request = check_paged(tensors, bounds, options)
    _run_once(engines.choose(request.device, options.engine or None), request, tensors)


def check_paged(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> RaggedRequest:
    """Raise if anything is wrong with a paged call whose outputs are there; else describe it."""
    q, k, v, out, lse, sinks, q_start, kv_len, table, k_factor, v_factor = tensors
    assert table is not None
    k_scale, v_scale = validation.operator_scales(
        options.k_scale, options.v_scale, k_factor, v_factor, _WHAT
    )
    options = options._replace(k_scale=k_scale, v_scale=v_scale)
    names = ("k_cache", "v_cache")
    indices = {"q_start": q_start, "kv_len": kv_len, "page_table": table}
    validation.ragged(q, k, v, names, sinks, out, lse, indices, options).raise_for(_WHAT)
    batch = PagedBatch(q_start, kv_len, table, max_q_len=bounds[0], max_kv_len=bounds[1])
    batch.check_cache(q.shape[0], k.shape[0], k.shape[1])
    request = paged_request(tensors, batch, options)
    engines.admit(request, options.engine)
    return request


def run_packed(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> None:
    """Run a call over packed sequences whose outputs are there: what the operator does."""
    _check_packed(tensors, bounds, options)
    _run_once(*_admit_packed(tensors, bounds, options), tensors)


def check_packed(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> None:
    """Raise if anything is wrong with a packed call whose outputs are there."""
    _check_packed(tensors, bounds, options)
    # Bounds that only the values know are at most the rows there are.
    rows = (tensors.q.shape[0], tensors.k.shape[0])
    longest = [most if bound is None else bound for bound, most in zip(bounds, rows, strict=True)]
    request = packed_request(tensors, longest[0], longest[1], options)
    engines.admit(request, options.engine)


def _check_packed(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> None:
    q, k, v, out, lse, sinks, q_start, kv_start, *_ = tensors
    indices = {"cu_seqlens_q": q_start, "cu_seqlens_k": kv_start}
    found = validation.ragged(q, k, v, ("k", "v"), sinks, out, lse, indices, options)
    validation.packed_batch(found, q_start, kv_start, bounds, q, k)
    found.raise_for(_WHAT)


def _admit_packed(
    tensors: RaggedTensors, bounds: tuple[int | None, int | None], options: RaggedOptions
) -> tuple[Engine, RaggedRequest]:
    """Describe a checked packed call, with bounds read from its values where none are given."""
    max_q, max_k = (
        validation.longest(starts) if bound is None else min(plain_length(bound), rows.shape[0])
        for bound, starts, rows in (
            (bounds[0], tensors.q_start, tensors.q),
            (bounds[1], tensors.keys, tensors.k),
        )
    )
    request = packed_request(tensors, max_q, max_k, options)
    return engines.admit(request, options.engine), request


#: How callers of :func:`attention_varlen` know its tensors.
_PACKED_NAMES = (
    "q", "k", "v", "out", "lse", "sinks", "cu_seqlens_q", "cu_seqlens_k", "", "", "",
)  # fmt: skip


def _bind_packed(
    tensors: RaggedTensors,
    bounds: tuple[int | None, int | None],
    options: RaggedOptions,
    key: Any,
    out_given: bool,
) -> Call:
    """Bind a checked packed call.

    One whose plan rests on given bounds, and whose values nobody looks at, is remembered.
    """
    engine, request = _admit_packed(tensors, bounds, options)
    written = (3,) if out_given else ()
    call = bound_call(engine.bind(request, tensors), tensors, written)
    call = call._replace(names=_PACKED_NAMES, value_dim=request.value_dim)
    if (
        engine.plans_from_bounds
        and None not in bounds
        and not readable(tensors.q_start)
        and not readable(tensors.keys)
    ):
        packed.keep(key, call)
    return call


def _run_once(engine: Engine, request: RaggedRequest, tensors: RaggedTensors) -> None:
    mark_written(*[t for t in (tensors.out, tensors.lse) if t is not None])
    engine.bind(request, tensors)(tensors)


def _through_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    options: RaggedOptions,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call the operator, which binds every time: a graph carries tensors, not plans."""
    if torch.compiler.is_compiling():
        # Its schema knows no None and takes True for 1: what eager calls refuse, these do, too.
        found = Reasons()
        validation.ragged_options(found, options)
        validation.scale_tensors(found, options.k_scale, options.v_scale)
        if out is not None:
            found.overlaps("out", out, {"q": q, "k_cache": k, "v_cache": v})
    else:
        indices = {}
        if isinstance(batch, PagedBatch):
            indices = {
                "q_start": batch.q_start,
                "kv_len": batch.kv_len,
                "page_table": batch.page_table,
            }
        names = ("k_cache", "v_cache")
        found = validation.ragged(q, k, v, names, sinks, out, None, indices, options)
    if not isinstance(batch, PagedBatch):
        found.types.append(f"batch must be a PagedBatch, got {type(batch).__name__}")
    found.raise_for(_WHAT)
    out = torch.empty_like(q) if out is None else out
    lse = None
    if options.return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    k_factor, v_factor = _factors(options)
    numbers = (1.0, 1.0) if k_factor is not None else (options.k_scale, options.v_scale)
    torch.ops.liteattention_rocm.attention_paged(
        q, k, v, batch.q_start, batch.kv_len, batch.page_table, out, lse, sinks, batch.max_q_len,
        batch.max_kv_len, _scale(q, options), options.causal, plain_length(options.window or 0),
        _plain(options.lookahead), float(options.soft_cap or 0.0), *map(float, numbers),
        options.rounding, options.engine or "", k_factor, v_factor,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def _plain(lookahead: int | None) -> int | None:
    return None if lookahead is None else plain_length(lookahead)


def _scale(q: torch.Tensor, options: RaggedOptions) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if options.scale is None else float(options.scale)
