"""Dense attention, LiteAttention steps and exact merges: what users call.

Every call is checked before anything runs, and everything wrong with it is reported in one
exception. A call like one before goes straight to its engine (:mod:`.remembered`). Calls that a
compiler or a transform watches go through ``torch.ops.liteattention_rocm.*``, which are opaque to
them; those operators end in :func:`run_attention` and :func:`run_lite_attention`.

Softmax is computed online, block by block, as in FlashAttention (Dao et al., arXiv 2205.14135);
tiles are skipped as in LiteAttention (arXiv 2511.11062).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from . import engines, validation
from .arguments import Reasons, is_real
from .contract import (
    Bound,
    DenseRequest,
    DenseTensors,
    Engine,
    Layout,
    LiteRequest,
    LiteTensors,
    Rounding,
    TileGeometry,
    dense_tensors,
    lite_tensors,
)
from .remembered import bound_call, calls, recall
from .validation import sizes

__all__ = ["attention", "default_geometry", "lite_attention", "merge_states"]

_WHAT = "attention call"


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout = ...,
    scale: float | None = ...,
    causal: bool = ...,
    rounding: Rounding = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout = ...,
    scale: float | None = ...,
    causal: bool = ...,
    rounding: Rounding = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout = "bshd",
    scale: float | None = None,
    causal: bool = False,
    rounding: Rounding = "rtne",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention, ``softmax(scale * q k^T) v``, forward only.

    Args:
        q: queries, [B, Sq, Hq, D] ("bshd") or [B, Hq, Sq, D] ("bhsd"); bf16, fp16 or fp32.
        k: keys, [B, Skv, Hkv, D] or [B, Hkv, Skv, D]; Hq % Hkv == 0, and query head h reads
            key head h // (Hq // Hkv).
        v: values, shaped like ``k``; on the CPU engines their head dim Dv may be another than D.
        layout: where the sequence axis is. Strides are free except that the last dimension must
            be contiguous; nothing is copied to fit.
        scale: factor on q.k, natural units, 0 or from 2^-60 to 2^60 in size; 1/sqrt(D) by default.
        causal: query i sees the keys j <= i + Skv - Sq (bottom-right aligned). A query that sees
            no key gives zeros and an LSE of -inf; so do all queries if there are no keys. An
            infinite or NaN value may reach queries of its
            sequence that do not see its key: 0 times it is NaN.
        rounding: how fp32 results become bf16: "rtne" (nearest, ties to even), "rtna" (nearest,
            ties away from zero) or "rtz" (towards zero). Other dtypes take "rtne" only.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: tensor of q's shape (with v's head dim) and dtype to write to; it must not overlap an
            input.
        engine: name of the engine; by default chosen by the device.

    Returns:
        ``out`` of q's shape (with v's head dim) and dtype, or ``(out, lse)`` with ``lse`` in
        natural log, fp32, [B, Hq, Sq].

    Raises:
        TypeError: an argument has the wrong type or dtype; lists every reason.
        ValueError: a shape, value or overlap is wrong, or the engine cannot run the request;
            lists every reason and says what to do instead.
    """
    tensors = (q, k, v, out)
    options = ("dense", layout, scale, causal, rounding, return_lse, engine)
    traced = torch.compiler.is_dynamo_compiling()
    key, call = (None, None) if traced else recall(calls, tensors, options)
    if call is None:
        if torch.compiler.is_compiling():
            wrong = _traced_options(layout, scale, causal, rounding, return_lse, engine)
            if out is not None:
                wrong.overlaps("out", out, {"q": q, "k": k, "v": v})
        else:
            wrong = validation.dense(
                q, k, v, out, None, layout, scale, causal, rounding, return_lse, engine
            )
        wrong.raise_for(_WHAT)
        scale = _scale(q, scale)
        value_dim = other_dim(q, v)
    else:
        value_dim = call.value_dim
    given = out
    if out is None:
        out = torch.empty_like(q) if value_dim is None else empty_out(q, value_dim)
    lse = _empty_lse(q, layout) if return_lse else None
    if call is None and key is None:
        torch.ops.liteattention_rocm.attention(
            q, k, v, out, lse, layout, scale, causal, rounding, engine or ""
        )
        return out if lse is None else (out, lse)
    found = dense_tensors((q, k, v, out, lse))
    if call is None:
        assert scale is not None
        request = dense_request(found, layout, scale, causal, rounding)
        run = _bind(engines.admit(request, engine), request, found)
        call = bound_call(run, found, () if given is None else (3,))
        call = call._replace(value_dim=value_dim)
        calls.keep(key, call)
    if given is not None:
        call.claim(found, _WHAT)
    call.run(found)
    return out if lse is None else (out, lse)


@overload
def lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    threshold: float | None = ...,
    budget: float | None = ...,
    descending: bool = ...,
    soft_skip: bool = ...,
    must_do: torch.Tensor | None = ...,
    must_skip: torch.Tensor | None = ...,
    mass: torch.Tensor | None = ...,
    limits: torch.Tensor | None = ...,
    geometry: TileGeometry | None = ...,
    layout: Layout = ...,
    scale: float | None = ...,
    rounding: Rounding = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> torch.Tensor: ...


@overload
def lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    threshold: float | None = ...,
    budget: float | None = ...,
    descending: bool = ...,
    soft_skip: bool = ...,
    must_do: torch.Tensor | None = ...,
    must_skip: torch.Tensor | None = ...,
    mass: torch.Tensor | None = ...,
    limits: torch.Tensor | None = ...,
    geometry: TileGeometry | None = ...,
    layout: Layout = ...,
    scale: float | None = ...,
    rounding: Rounding = ...,
    return_lse: bool,
    out: torch.Tensor | None = ...,
    engine: str | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    threshold: float | None = None,
    budget: float | None = None,
    descending: bool = False,
    soft_skip: bool = False,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    geometry: TileGeometry | None = None,
    layout: Layout = "bshd",
    scale: float | None = None,
    rounding: Rounding = "rtne",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    engine: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One LiteAttention step: attend over the tiles in ``read``, vote the next list into ``write``.

    Stateless; :class:`liteattention_rocm.LiteAttention` owns the bitmaps and swaps them.

    The kept K blocks ``(read | must_do) & ~must_skip`` of a q block are walked in one direction.
    A tile is negligible when, for every valid query row, the maximum of its scores lies at least
    ``|threshold|`` (log2 units of the scaled scores) below the running maximum of the blocks
    walked before it. Negligible tiles are left out of ``write``; the first tile walked and those
    in ``must_do`` always stay in.

    With a ``budget`` instead of a threshold, tiles are weighed: those that hold the least of a q
    block's softmax mass are left out, as many as together hold at most the budget. That mass is a
    mean over the rows; a tile with more than a quarter of any single row stays. The rule is in
    :mod:`liteattention_rocm.lite.budget`.

    Args:
        q, k, v, layout, scale, rounding, return_lse, out, engine: as in :func:`attention`.
        read: skip bitmap, int32 holding uint32 bit patterns, contiguous [B, Hq, q_blocks, words];
            K block j is bit j % 32 of word j // 32, set = compute. Bits at and past the last K
            block are ignored, here and in the masks, so ``torch.full(shape, -1)`` is a full list.
        write: bitmap of the same shape, overwritten, with no bit at or past the last K block; must
            not overlap ``read``.
        threshold: log2 units, <= 0; ``-inf`` keeps every tile and equals dense attention bit for
            bit (on gfx942, whose dense calls may be computed in parts, with ``kv_splits=1``;
            :class:`liteattention_rocm.LiteAttention` does without the exception). Give exactly one
            of threshold and budget.
        budget: share of the softmax mass that is computed in this step, 0 <= budget < 1, which the
            tiles left out of ``write`` may hold; 0 keeps every tile, as a threshold of ``-inf``
            does. Not with ``soft_skip``: a tile's mass is known after the step.
        descending: walk the kept K blocks from the last to the first.
        soft_skip: let each group of ``geometry.vote_rows`` rows drop a negligible tile from the
            result of this very step.
        must_do, must_skip: packed K-block masks, int32 [words], or None.
        mass: fp32, contiguous [B, Hq, q_blocks, K_blocks], or None: what each tile weighs (mean
            over rows of a share of probability, an upper bound; 1 where a row is guarded) is
            written here, 0 for tiles that are not computed. Only with a budget above 0.
        limits: int32, contiguous [Hq], or None: a budget for each query head, as
            :func:`liteattention_rocm.lite.budget.limits` makes them. The largest of them is then
            given as ``budget``; a head with a limit of 0 keeps every tile. With a
            budget of 0 all are taken as 0.
        geometry: tile sizes; by default what the engine prefers for this head
            dimension and number of rows.

    Returns:
        ``out``, or ``(out, lse)``, as :func:`attention` does.

    Raises:
        TypeError, ValueError: as :func:`attention`, and for bitmaps that do not fit.

    Source of the method: LiteAttention, arXiv 2511.11062.
    """
    tensors = (q, k, v, out, read, write, must_do, must_skip, mass, limits)
    options = (
        "lite", layout, scale, rounding, return_lse, engine, threshold, budget, descending,
        soft_skip, geometry,
    )  # fmt: skip
    traced = torch.compiler.is_dynamo_compiling()
    key, call = (None, None) if traced else recall(calls, tensors, options)
    if call is None:
        share = 0.0 if budget is None else budget
        if torch.compiler.is_compiling():
            wrong = _traced_options(layout, scale, False, rounding, return_lse, engine)
            wrong.limit(threshold, budget)
            validation.lite_options(wrong, -math.inf, share, descending, soft_skip, geometry)
            inputs = {
                "q": q, "k": k, "v": v, "read": read, "must_do": must_do, "must_skip": must_skip,
                "limits": limits,
            }  # fmt: skip
            for name, target in (("out", out), ("write", write), ("mass", mass)):
                if target is not None:
                    wrong.overlaps(name, target, inputs)
        else:
            wrong = validation.dense(
                q, k, v, out, None, layout, scale, False, rounding, return_lse, engine, skips=True
            )
            if geometry is None:
                geometry = _preferred_geometry(q, engine)
            bitmaps = {"read": read, "write": write, "must_do": must_do, "must_skip": must_skip}
            wrong.limit(threshold, budget)
            validation.lite(
                wrong, (q, k, v, out), layout, bitmaps, mass, limits, -math.inf, share, descending,
                soft_skip, geometry, zeros=is_real(budget) and budget == 0,
            )  # fmt: skip
        wrong.raise_for(_WHAT)
        scale = _scale(q, scale)
        limit = (
            -math.inf if threshold is None else float(threshold),
            0.0 if budget is None else float(budget),
        )
    if limits is not None and budget == 0:
        limits = None  # none is larger: every head keeps every tile
    given = out
    if out is None:
        out = torch.empty_like(q)
    lse = _empty_lse(q, layout) if return_lse else None
    if call is None and key is None:
        # Zeros: the default. A compiler must not fix what depends on the number of rows.
        tile = (0, 0, 0)
        if geometry is not None:
            tile = (geometry.q_block, geometry.k_block, geometry.vote_rows)
        torch.ops.liteattention_rocm.lite_attention(
            q, k, v, read, write, out, lse, must_do, must_skip, mass, layout, scale, *limit,
            descending, soft_skip, *tile, rounding, engine or "", limits,
        )  # fmt: skip
        return out if lse is None else (out, lse)
    found = lite_tensors((q, k, v, out, lse, read, write, must_do, must_skip, mass, None, limits))
    if call is None:
        assert geometry is not None and scale is not None
        request = lite_request(
            found, layout, scale, rounding, geometry, *limit, descending, soft_skip
        )
        run = engines.admit(request, engine).bind(request, found)
        written = (6,) if given is None else (3, 6)
        call = bound_call(run, found, written if mass is None else (*written, 9))
        calls.keep(key, call)
    call.claim(found, _WHAT)
    call.run(found)
    return out if lse is None else (out, lse)


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, layout: Layout = "bshd"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union, exactly.

    Args:
        outs: partial results, each [B, Sq, Hq, D] ("bshd") or [B, Hq, Sq, D] ("bhsd"), any
            floating dtype, the same shape and dtype throughout.
        lses: their log-sum-exps, natural log, fp32, each [B, Hq, Sq]; -inf marks a part that saw
            no key and then contributes nothing. FlashAttention 2 writes +inf there, which means
            the same.
        layout: where the sequence axis of ``outs`` is.

    Returns:
        ``(out, lse)``: merged in fp32 (fp64 for fp64 parts) and rounded once to the parts' dtype;
        a row whose parts are all empty gives zeros and -inf.

    Merging has derivatives, in both modes, unlike attention itself.

    Raises:
        TypeError, ValueError: lists every reason.

    Source of the method: the log-sum-exp merge of split softmax (Milakov and Gimelshein, arXiv
    1805.02867).
    """
    validation.merge(outs, lses, layout).raise_for(_WHAT)
    accumulate = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([lse.to(accumulate) for lse in lses])
    stacked = stacked.masked_fill(torch.isposinf(stacked), -math.inf)
    # A row that no part saw has an LSE of -inf. Its weights are exp(-inf - something finite), and
    # zero; -inf - -inf would make them, or their derivatives, NaN.
    unseen = torch.isneginf(stacked).all(0)
    normalizer = torch.logsumexp(stacked.masked_fill(unseen, 0.0), dim=0)
    weights = torch.exp(stacked - normalizer)
    merged_lse = normalizer.masked_fill(unseen, -math.inf)
    if layout == "bshd":
        weights = weights.transpose(-1, -2)
    # An empty part may hold anything; 0 * NaN must not leak into the sum.
    terms = (
        torch.where(weight.unsqueeze(-1) > 0, part.to(accumulate), 0.0) * weight.unsqueeze(-1)
        for part, weight in zip(outs, weights, strict=True)
    )
    total = functools.reduce(torch.Tensor.add_, terms)
    return total.to(outs[0].dtype), merged_lse.to(torch.float32)


def default_geometry(q: torch.Tensor, engine: str | None = None) -> TileGeometry:
    """Tile geometry that the engine for ``q``'s device prefers for its rows and head dimension."""
    found = Reasons()
    if "q" in found.usable({"q": q}) and q.dim() != 4:
        found.types.append(f"q must be a tensor of 4 dimensions, got {list(q.shape)}")
    found.engine(engine)
    found.raise_for(_WHAT)
    rows = math.prod(q.shape[:3])
    return engines.choose(q.device, engine).geometry(int(q.shape[-1]), rows)


# ------------------------------------------------------------------------- behind the calls


def run_attention(
    tensors: DenseTensors,
    layout: Layout,
    scale: float,
    causal: bool,
    rounding: Rounding,
    engine: str,
) -> None:
    """Run a dense call whose outputs are there: what the operator does."""
    options = (layout, scale, causal, rounding, engine)
    key, call = recall(calls, tensors, ("dense operator", *options))
    if call is None:
        chosen, request = check_attention(tensors, *options)
        run = _bind(chosen, request, tensors)
        call = bound_call(run, tensors, (3,) if tensors.lse is None else (3, 4))
        if key is not None:
            calls.keep(key, call)
    call.claim(tensors, _WHAT)
    call.run(tensors)


def check_attention(
    tensors: DenseTensors,
    layout: Layout,
    scale: float,
    causal: bool,
    rounding: Rounding,
    engine: str,
) -> tuple[Engine, DenseRequest]:
    """Raise if anything is wrong with a dense call whose outputs are there; else describe it."""
    wanted = tensors.lse is not None
    validation.dense(*tensors, layout, scale, causal, rounding, wanted, engine).raise_for(_WHAT)
    request = dense_request(tensors, layout, scale, causal, rounding)
    return engines.admit(request, engine), request


def run_lite_attention(tensors: LiteTensors, *options: Any) -> None:
    """Run a LiteAttention step whose outputs are there: what the operator does.

    ``options`` are those of :func:`check_lite_attention`.
    """
    key, call = recall(calls, tensors, ("lite operator", *options))
    if call is None:
        chosen, request = check_lite_attention(tensors, *options)
        run = chosen.bind(request, tensors)
        written = (3, 6) if tensors.lse is None else (3, 4, 6)
        call = bound_call(run, tensors, written if tensors.mass is None else (*written, 9))
        if key is not None:
            calls.keep(key, call)
    call.claim(tensors, _WHAT)
    call.run(tensors)


def check_lite_attention(
    tensors: LiteTensors,
    layout: Layout,
    scale: float,
    rounding: Rounding,
    geometry: TileGeometry,
    threshold: float,
    budget: float,
    descending: bool,
    soft_skip: bool,
    engine: str,
) -> tuple[Engine, LiteRequest]:
    """Raise if anything is wrong with a step whose outputs are there; else describe it."""
    q, k, v, out, lse, read, write, must_do, must_skip, mass, _, limits = tensors
    wrong = validation.dense(
        q, k, v, out, lse, layout, scale, False, rounding, lse is not None, engine, skips=True
    )
    bitmaps = {"read": read, "write": write, "must_do": must_do, "must_skip": must_skip}
    validation.lite(
        wrong, (q, k, v, out), layout, bitmaps, mass, limits, threshold, budget, descending,
        soft_skip, geometry,
    )  # fmt: skip
    wrong.raise_for(_WHAT)
    request = lite_request(
        tensors, layout, scale, rounding, geometry, threshold, budget, descending, soft_skip
    )
    return engines.admit(request, engine), request


def dense_request(
    tensors: DenseTensors, layout: Layout, scale: float, causal: bool, rounding: Rounding
) -> DenseRequest:
    """Describe a checked dense call."""
    q = tensors.q
    batch, q_len, q_heads, head_dim = sizes(q, layout)
    _, kv_len, kv_heads, _ = sizes(tensors.k, layout)
    return DenseRequest(
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, q.dtype, q.device, layout, scale,
        causal, rounding, tensors.lse is not None, value_dim=other_dim(q, tensors.v),
    )  # fmt: skip


def lite_request(
    tensors: LiteTensors,
    layout: Layout,
    scale: float,
    rounding: Rounding,
    geometry: TileGeometry,
    threshold: float,
    budget: float,
    descending: bool,
    soft_skip: bool,
) -> LiteRequest:
    """Describe a checked LiteAttention step."""
    q = tensors.q
    batch, q_len, q_heads, head_dim = sizes(q, layout)
    _, kv_len, kv_heads, _ = sizes(tensors.k, layout)
    return LiteRequest(
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, q.dtype, q.device, layout, scale,
        False, rounding, tensors.lse is not None, geometry, threshold, descending, soft_skip,
        budget,
    )  # fmt: skip


def _preferred_geometry(q: Any, engine: Any) -> TileGeometry | None:
    """The geometry that an engine prefers; None where too much is wrong for it to be asked."""
    found = Reasons()
    found.engine(engine)
    usable = found.usable({"q": q})
    if found or usable["q"].dim() != 4 or 0 in q.shape:
        return None
    return default_geometry(q, engine)


def _traced_options(*options: Any) -> Reasons:
    """What is wrong with options that a compiler sees.

    An operator's schema knows no None and takes True for 1: what eager calls refuse, these do, too.
    The tensors are looked at by the operator.
    """
    found = Reasons()
    validation.dense_options(found, *options)
    return found


def _bind(engine: Engine, request: DenseRequest, tensors: DenseTensors) -> Bound:
    """Bind a dense call; one without rows, or without keys, needs no engine to run."""
    return _no_keys if request.empty else engine.bind(request, tensors)


@torch.inference_mode()  # outputs may be inference tensors
def _no_keys(tensors: DenseTensors) -> None:
    """What rows have that see no key."""
    tensors.out.zero_()
    if tensors.lse is not None:
        tensors.lse.fill_(-math.inf)


def other_dim(q: torch.Tensor, v: torch.Tensor) -> int | None:
    """The head dim of values, if it is another than that of queries; None otherwise."""
    return None if v.shape[-1] == q.shape[-1] else v.shape[-1]


def empty_out(q: torch.Tensor, value_dim: int) -> torch.Tensor:
    """An output for queries whose values have another head dim."""
    return q.new_empty((*q.shape[:-1], value_dim))


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _empty_lse(q: torch.Tensor, layout: Layout) -> torch.Tensor:
    batch, rows, heads, _ = sizes(q, layout)
    return torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
