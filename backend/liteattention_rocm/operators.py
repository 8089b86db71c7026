"""The ``torch.library`` operators: schemas, implementations, and what compilers trace instead.

An operator writes into tensors that it is given, so that ``torch.compile`` sees opaque calls with
known outputs. Users call the functions of :mod:`.dense`, :mod:`.serving` and :mod:`.cache_writes`,
which reach these by name; only the package itself imports this module.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import cache_writes, dense, serving
from .contract import DenseTensors, LiteTensors, RaggedTensors, Rounding, TileGeometry, WriteTensors
from .validation import RaggedOptions

_LIBRARY = torch.library.Library("liteattention_rocm", "DEF")  # type: ignore[no-untyped-call]


# Each takes the operator's arguments in the order of its schema; ``run`` is False where a compiler
# traces and only the checks are wanted.


def _attention(run: bool, *given: Any) -> None:
    tensors, options = DenseTensors(*given[:5]), given[5:]
    (dense.run_attention if run else dense.check_attention)(tensors, *options)


def _lite_attention(run: bool, *given: Any) -> None:
    q, k, v, read, write, out, lse, must_do, must_skip, mass, *options = given
    options, more = options[:11], options[11:]  # a trailing one that is None is left out
    layout, scale, threshold, budget, descending, soft_skip, *tile, rounding, engine = options
    tensors = LiteTensors(q, k, v, out, lse, read, write, must_do, must_skip, mass, None, *more)
    geometry = TileGeometry(*tile) if any(tile) else dense.default_geometry(q, engine or None)
    (dense.run_lite_attention if run else dense.check_lite_attention)(
        tensors, layout, scale, rounding, geometry, threshold, budget, descending, soft_skip, engine
    )  # fmt: skip


def _attention_paged(run: bool, *given: Any) -> None:
    # Trailing arguments that have their default values are left out.
    given, factors = given[:20], given[20:]
    q, k, v, q_start, kv_len, table, out, lse, sinks, max_q_len, max_kv_len, *options = given
    tensors = RaggedTensors(q, k, v, out, lse, sinks, q_start, kv_len, table, *factors)
    (serving.run_paged if run else serving.check_paged)(
        tensors, (max_q_len, max_kv_len), _options(lse, *options)
    )


def _attention_varlen(run: bool, *given: Any) -> None:
    q, k, v, q_start, kv_start, out, lse, sinks, max_q, max_k, *options, rounding, engine = given
    tensors = RaggedTensors(q, k, v, out, lse, sinks, q_start, kv_start, None)
    (serving.run_packed if run else serving.check_packed)(
        tensors,
        (max_q, max_k),
        _options(lse, *options, 1.0, 1.0, rounding, engine),  # type: ignore[call-arg]
    )


def _options(
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    lookahead: int | None,
    soft_cap: float,
    k_scale: float,
    v_scale: float,
    rounding: Rounding,
    engine: str,
) -> RaggedOptions:
    """Options of a ragged call; schemas have 0 where calls have None."""
    return RaggedOptions(
        causal, window or None, lookahead, soft_cap or None, scale, k_scale, v_scale, rounding,
        lse is not None, engine,
    )  # fmt: skip


def _write_kv(run: bool, *given: Any) -> None:
    tensors, options = WriteTensors(*given[:5], *given[8:]), given[5:8]
    (cache_writes.run_write if run else cache_writes.check_write)(tensors, *options)


_OPERATORS = (
    (
        "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, str layout, "
        "float scale, bool causal, str rounding, str engine) -> ()",
        _attention,
    ),
    (
        "lite_attention(Tensor q, Tensor k, Tensor v, Tensor read, Tensor(a!) write, "
        "Tensor(b!) out, Tensor(c!)? lse, Tensor? must_do, Tensor? must_skip, Tensor(d!)? mass, "
        "str layout, float scale, float threshold, float budget, bool descending, bool soft_skip, "
        "int q_block, int k_block, int vote_rows, str rounding, str engine, "
        "Tensor? limits=None) -> ()",
        _lite_attention,
    ),
    (
        "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q_start, Tensor kv_len, "
        "Tensor page_table, Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, SymInt max_q_len, "
        "SymInt max_kv_len, float scale, bool causal, int window, int? lookahead, float soft_cap, "
        "float k_scale, float v_scale, str rounding, str engine, Tensor? k_scales=None, "
        "Tensor? v_scales=None) -> ()",
        _attention_paged,
    ),
    (
        "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks, SymInt? max_seqlen_q, "
        "SymInt? max_seqlen_k, float scale, bool causal, int window, int? lookahead, "
        "float soft_cap, str rounding, str engine) -> ()",
        _attention_varlen,
    ),
    (
        "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
        "float k_scale, float v_scale, str engine, Tensor? k_scales=None, Tensor? v_scales=None) "
        "-> ()",
        _write_kv,
    ),
)
for _schema, _operator in _OPERATORS:
    _name = _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _run = functools.partial(_operator, True)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _check = functools.partial(_operator, False)
    torch.library.register_fake(f"liteattention_rocm::{_name}", _check, lib=_LIBRARY)
