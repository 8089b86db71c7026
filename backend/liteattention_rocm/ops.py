"""The attention calls, their validation and the ``torch.library`` operators behind them.

Every call is checked before anything runs, and everything wrong with it is reported in one
exception. What was checked once is not checked again: calls are remembered by all that the checks
and the engine's choices depend on (:class:`_Bound`), and a repeated one goes straight to its
engine. The operators (``torch.ops.liteattention_rocm.*``) write into tensors they are given,
so that ``torch.compile`` sees opaque calls with known outputs; the functions here allocate those
outputs and are what users call.

Softmax is computed online, block by block, as in FlashAttention (Dao et al., arXiv 2205.14135);
tiles are skipped as in LiteAttention (arXiv 2511.11062).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

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
    is_real,
    raise_if,
    real_reasons,
    shown,
    stride_reasons,
    tensor_reasons,
)
from .engines import (
    LAYOUTS,
    ROUNDINGS,
    AttentionSpec,
    Engine,
    Layout,
    LiteSpec,
    Rounding,
    TileGeometry,
)
from .engines.base import scale_reasons
from .memory import extent_bytes, mark_written, overlap_reasons, target_reasons

__all__ = ["attention", "default_geometry", "lite_attention", "merge_states"]

_LIBRARY = torch.library.Library("liteattention_rocm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, str layout, "
    "float scale, bool causal, str rounding, str engine) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "lite_attention(Tensor q, Tensor k, Tensor v, Tensor read, Tensor(a!) write, Tensor(b!) out, "
    "Tensor(c!)? lse, Tensor? must_do, Tensor? must_skip, str layout, float scale, "
    "float threshold, bool descending, bool soft_skip, int q_block, int k_block, int vote_rows, "
    "str rounding, str engine) -> ()"
)

_raise_if = functools.partial(raise_if, "attention call")

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Calls that are remembered; past it, all are forgotten and found anew.
_MOST_BOUND = 1024
_ALIGNMENT = 16  # bytes: what kernels are compiled for

# Each of these takes 60 ns; together they say whether anything but the engine must see a call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled

# What os.environ reads from. Its own ``get`` translates names anew, a tenth of a short call.
_environment: Any = getattr(os.environ, "_data", os.environ)
_ENGINE: Any = (
    engines.ENGINE_VARIABLE
    if _environment is os.environ
    else os.environ.encodekey(engines.ENGINE_VARIABLE)
)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A call that was checked, ready to be repeated with other tensors of the same kind.

    ``run`` takes the tensors as :meth:`Engine.attention` or :meth:`Engine.lite_attention` do.
    ``spans``: bytes from the first to past the last element of q, k, v and out; ``list_bytes`` and
    ``mask_bytes``: those of a skip list and of a mask over K blocks.

    Key: everything that :func:`_argument_reasons`, :func:`_lite_reasons` and the engine look at
    but addresses, see :func:`_kind_of_call`; of those, alignment and overlap are looked at in
    every call. Owner: ``_calls``. Lifetime: until there are ``_MOST_BOUND``. It holds no tensor.
    """

    run: Callable[..., None]
    spans: tuple[int, int, int, int]
    list_bytes: int = 0
    mask_bytes: int = 0

    def apart(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether ``out`` is aligned and surely shares no memory with an input."""
        begin = out.data_ptr()
        q_span, k_span, v_span, span = self.spans
        end = begin + span
        for tensor, size in ((q, q_span), (k, k_span), (v, v_span)):
            other = tensor.data_ptr()
            if begin < other + size and other < end:
                return False
        return begin != 0 and begin % _ALIGNMENT == 0

    def lists_apart(
        self,
        out: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> bool:
        """Whether ``write`` and ``out`` surely share no memory with each other or an input."""
        q_span, k_span, v_span, span = self.spans
        size = self.list_bytes
        written = [(write.data_ptr(), size)]
        if out is not None:
            if not self.apart(out, q, k, v):
                return False
            written.append((out.data_ptr(), span))
            if not _ranges_apart(written[0], written[1:]):
                return False
        inputs = [(read.data_ptr(), size)]
        if must_do is not None:
            inputs.append((must_do.data_ptr(), self.mask_bytes))
        if must_skip is not None:
            inputs.append((must_skip.data_ptr(), self.mask_bytes))
        if out is not None and not _ranges_apart(written[1], inputs):
            return False
        inputs += ((q.data_ptr(), q_span), (k.data_ptr(), k_span), (v.data_ptr(), v_span))
        return _ranges_apart(written[0], inputs)


def _ranges_apart(target: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    begin, size = target
    end = begin + size
    for other, other_size in others:  # noqa: SIM110 - all() takes twice as long
        if begin < other + other_size and other < end:
            return False
    return True


_calls: dict[Hashable, _Bound] = {}


def _kind_of_call(
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    scale: Any,
    causal: Any,
    rounding: Any,
    return_lse: Any,
    out: Any,
    engine: Any,
) -> tuple[Any, ...] | None:
    """Name everything about a call but the addresses of its tensors, or None to look at it closely.

    Types are looked at here, because True equals 1 and 1.0 as a key.
    """
    try:
        if (
            type(q) is not torch.Tensor
            or type(k) is not torch.Tensor
            or type(v) is not torch.Tensor
            or type(causal) is not bool
            or type(return_lse) is not bool
            or type(layout) is not str
            or type(rounding) is not str
            or (scale is not None and type(scale) is not float)
            or (engine is not None and type(engine) is not str)
            or _dispatch_modes()
            or _function_modes()
            or _transforms() is not None
            or forward_ad._current_level >= 0
            or _tracing() is not None
            or _profiling()
            or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _ALIGNMENT
            # Numbers that are not in memory as they are: the dispatcher writes them out first.
            or not (q.data_ptr() and k.data_ptr() and v.data_ptr())
            or (q.is_neg() or k.is_neg() or v.is_neg())
            or (_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        ):
            return None
        kind = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype,
            v.dtype, q.device, k.device, v.device, layout, scale, causal, rounding, return_lse,
            engine, _environment.get(_ENGINE),
        )  # fmt: skip
        if out is None:
            return kind
        if type(out) is not torch.Tensor or out.is_neg() or (_grad_enabled() and out.requires_grad):
            return None
        return (*kind, out.shape, out.stride(), out.dtype, out.device)
    except RuntimeError:  # sparse, nested and the like have no address or no strides
        return None


def _kind_of_lists(
    kind: tuple[Any, ...] | None,
    read: Any,
    write: Any,
    must_do: Any,
    must_skip: Any,
    threshold: Any,
    descending: Any,
    soft_skip: Any,
    geometry: Any,
) -> tuple[Any, ...] | None:
    """Go on with what LiteAttention adds to a kind of call."""
    if (
        kind is None
        or type(threshold) is not float
        or type(descending) is not bool
        or type(soft_skip) is not bool
    ):
        return None
    size: tuple[int, ...] = ()
    if geometry is not None:
        if type(geometry) is not TileGeometry:
            return None
        size = geometry.q_block, geometry.k_block, geometry.vote_rows
    found = [threshold, descending, soft_skip, size]
    try:
        for bitmap in (read, write, must_do, must_skip):
            if bitmap is None:
                found.append(None)
            elif (
                type(bitmap) is not torch.Tensor
                or bitmap.data_ptr() == 0
                or bitmap.data_ptr() % _ALIGNMENT
                or bitmap.is_neg()
            ):
                return None
            else:
                found += (bitmap.shape, bitmap.stride(), bitmap.dtype, bitmap.device)
    except RuntimeError:  # as above
        return None
    return (*kind, *found)


def _remember(kind: tuple[Any, ...], out: torch.Tensor, bound: _Bound) -> None:
    if out.data_ptr() % _ALIGNMENT:
        return
    if len(_calls) >= _MOST_BOUND:
        _calls.clear()
    _calls[kind] = bound


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
        v: values, shaped like ``k``.
        layout: where the sequence axis is. Strides are free except that the last dimension must
            be contiguous; nothing is copied to fit.
        scale: factor on q.k, natural units, 0 or from 2^-60 to 2^60 in size; 1/sqrt(D) by default.
        causal: query i sees the keys j <= i + Skv - Sq (bottom-right aligned). A query that sees
            no key gives zeros and an LSE of -inf.
        rounding: how fp32 results become bf16: "rtne" (nearest, ties to even), "rtna" (nearest,
            ties away from zero) or "rtz" (towards zero). Other dtypes take "rtne" only.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: tensor of q's shape and dtype to write to; it must not overlap an input.
        engine: name of the engine; by default chosen by the device.

    Returns:
        ``out`` of q's shape and dtype, or ``(out, lse)`` with ``lse`` in natural log, fp32,
        [B, Hq, Sq].

    Raises:
        TypeError: an argument has the wrong type or dtype; lists every reason.
        ValueError: a shape, value or overlap is wrong, or the engine cannot run the request;
            lists every reason and says what to do instead.
    """
    kind = None
    if not torch.compiler.is_compiling():
        kind = _kind_of_call(q, k, v, layout, scale, causal, rounding, return_lse, out, engine)
        bound = _calls.get(kind)
        if bound is not None and (out is None or bound.apart(out, q, k, v)):
            if out is None:
                out = torch.empty_like(q)
            else:
                mark_written(out)
            lse = _empty_lse(q, layout) if return_lse else None
            bound.run(q, k, v, out, lse)
            return out if lse is None else (out, lse)
        _raise_if(
            *_argument_reasons(q, k, v, layout, scale, causal, rounding, out, return_lse, engine)
        )
    scale = _default_scale(q) if scale is None else float(scale)
    if out is None:
        out = torch.empty_like(q)
    lse = _empty_lse(q, layout) if return_lse else None
    if kind is None:
        torch.ops.liteattention_rocm.attention(
            q, k, v, out, lse, layout, scale, causal, rounding, engine or ""
        )
    else:
        chosen, spec = _prepare(q, k, v, layout, scale, causal, rounding, lse, engine or "", None)
        run = chosen.bind_attention(spec, q, k, v, out, lse)
        if run is None:
            run = functools.partial(_run_checked, chosen, spec)
        mark_written(out)
        run(q, k, v, out, lse)
        _remember(kind, out, _Bound(run, _spans(q, k, v, out)))
    return out if lse is None else (out, lse)


@overload
def lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    threshold: float,
    descending: bool = ...,
    soft_skip: bool = ...,
    must_do: torch.Tensor | None = ...,
    must_skip: torch.Tensor | None = ...,
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
    threshold: float,
    descending: bool = ...,
    soft_skip: bool = ...,
    must_do: torch.Tensor | None = ...,
    must_skip: torch.Tensor | None = ...,
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
    threshold: float,
    descending: bool = False,
    soft_skip: bool = False,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
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

    Args:
        q, k, v, layout, scale, rounding, return_lse, out, engine: as in :func:`attention`.
        read: skip bitmap, int32 holding uint32 bit patterns, contiguous [B, Hq, q_blocks, words];
            K block j is bit j % 32 of word j // 32, set = compute. Bits at and past the last K
            block are ignored, here and in the masks, so ``torch.full(shape, -1)`` is a full list.
        write: bitmap of the same shape, overwritten, with no bit at or past the last K block; must
            not overlap ``read``.
        threshold: log2 units, <= 0; ``-inf`` keeps every tile and equals dense attention bit for
            bit (on gfx942, whose dense calls may be computed in parts, with ``kv_splits=1``;
            :class:`liteattention_rocm.LiteAttention` does without the exception).
        descending: walk the kept K blocks from the last to the first.
        soft_skip: let each group of ``geometry.vote_rows`` rows drop a negligible tile from the
            result of this very step.
        must_do, must_skip: packed K-block masks, int32 [words], or None.
        geometry: tile sizes; by default what the engine prefers for this head dimension.

    Returns:
        ``out``, or ``(out, lse)``, as :func:`attention` does.

    Raises:
        TypeError, ValueError: as :func:`attention`, and for bitmaps that do not fit.

    Source of the method: LiteAttention, arXiv 2511.11062.
    """
    kind = None
    if not torch.compiler.is_compiling():
        kind = _kind_of_call(q, k, v, layout, scale, False, rounding, return_lse, out, engine)
        kind = _kind_of_lists(
            kind, read, write, must_do, must_skip, threshold, descending, soft_skip, geometry
        )
        bound = _calls.get(kind)
        if bound is not None and bound.lists_apart(out, q, k, v, read, write, must_do, must_skip):
            mark_written(write)
            if out is None:
                out = torch.empty_like(q)
            else:
                mark_written(out)
            lse = _empty_lse(q, layout) if return_lse else None
            bound.run(q, k, v, out, lse, read, write, must_do, must_skip)
            return out if lse is None else (out, lse)
    if torch.compiler.is_compiling():
        geometry = default_geometry(q, engine) if geometry is None else geometry
    else:
        kinds, values = _argument_reasons(
            q, k, v, layout, scale, False, rounding, out, return_lse, engine
        )
        if geometry is None and not kinds and not values:
            geometry = default_geometry(q, engine)
        lists = {"read": read, "write": write, "must_do": must_do, "must_skip": must_skip}
        more = _lite_reasons(
            q, k, v, out, layout, lists, threshold, descending, soft_skip, geometry
        )
        _raise_if(kinds + more[0], values + more[1])
        assert geometry is not None
    scale = _default_scale(q) if scale is None else float(scale)
    if out is None:
        out = torch.empty_like(q)
    lse = _empty_lse(q, layout) if return_lse else None
    if kind is None:
        torch.ops.liteattention_rocm.lite_attention(
            q, k, v, read, write, out, lse, must_do, must_skip, layout, scale, float(threshold),
            descending, soft_skip, geometry.q_block, geometry.k_block, geometry.vote_rows, rounding,
            engine or "",
        )  # fmt: skip
    else:
        lite = LiteSpec(geometry, float(threshold), descending, soft_skip)
        chosen, spec = _prepare(q, k, v, layout, scale, False, rounding, lse, engine or "", lite)
        step = chosen.bind_lite(spec, lite, q, k, v, out, lse, read, write, must_do, must_skip)
        if step is None:
            step = functools.partial(_run_lite_checked, chosen, spec, lite)
        mark_written(out, write)
        step(q, k, v, out, lse, read, write, must_do, must_skip)
        list_bytes, mask_bytes = extent_bytes(read), 4 * read.shape[-1]
        _remember(kind, out, _Bound(step, _spans(q, k, v, out), list_bytes, mask_bytes))
    return out if lse is None else (out, lse)


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    layout: Layout = "bshd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union, exactly.

    Args:
        outs: partial results, each [B, Sq, Hq, D] ("bshd") or [B, Hq, Sq, D] ("bhsd"); bf16, fp16,
            fp32 or fp64, the same shape, dtype and device throughout.
        lses: their log-sum-exps, natural log, fp32, each [B, Hq, Sq]; -inf marks a part that saw
            no key and then contributes nothing.
        layout: where the sequence axis of ``outs`` is.

    Returns:
        ``(out, lse)``: merged in fp32 (fp64 for fp64 parts) and rounded once to the parts' dtype;
        a row whose parts are all empty gives zeros and -inf. Unlike attention itself, merging has
        derivatives, in both modes.

    Raises:
        TypeError, ValueError: lists every reason.

    Source of the method: the log-sum-exp merge of split softmax (Milakov and Gimelshein, arXiv
    1805.02867).
    """
    _raise_if(*_merge_reasons(outs, lses, layout))
    accumulate = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([lse.to(accumulate) for lse in lses])
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


def _merge_reasons(outs: Any, lses: Any, layout: Any) -> Reasons:
    """Everything wrong with parts to merge: (of type, of value)."""
    kinds: list[str] = []
    values = choice_reasons("layout", layout, LAYOUTS)
    parts: dict[str, list[Any]] = {}
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, Sequence | torch.Tensor) or isinstance(given, str):
            kinds.append(f"{name} must be a sequence of tensors, got {type(given).__name__}")
        elif isinstance(given, torch.Tensor) and (
            any(tensor_reasons(name, given)) or not given.dim()
        ):
            kinds.append(f"{name} must be a sequence of tensors")
        else:
            parts[name] = list(given)
    if len(parts) < 2:
        return kinds, values
    counts = [len(listed) for listed in parts.values()]
    if not counts[0] or counts[0] != counts[1]:
        values.append(
            f"outs and lses must be equally many and at least one, got {counts[0]} and {counts[1]}"
        )
    named = {
        f"{name}[{i}]": part for name, listed in parts.items() for i, part in enumerate(listed)
    }
    more = _usable(named)
    kinds, values = kinds + more[0], values + more[1]
    if kinds or values:
        return kinds, values
    first = parts["outs"][0]
    if first.dim() != 4:
        return kinds, [*values, f"outs must have 4 dimensions, got {list(first.shape)}"]
    if first.dtype not in _FLOATS:
        kinds.append(f"outs must be bf16, fp16, fp32 or fp64, got {first.dtype}")
    batch, rows, heads = _sizes(first, layout)[:3]
    for i, (part, lse) in enumerate(zip(parts["outs"], parts["lses"], strict=True)):
        if part.shape != first.shape or part.dtype != first.dtype:
            values.append(f"outs[{i}] is {_describe(part)}, outs[0] is {_describe(first)}")
        if tuple(lse.shape) != (batch, heads, rows):
            values.append(
                f"lses[{i}] must be {[batch, heads, rows]} (B, H, S), got {list(lse.shape)}"
            )
        if lse.dtype != torch.float32:
            kinds.append(f"lses[{i}] must be torch.float32, got {lse.dtype}")
        for name, tensor in ((f"outs[{i}]", part), (f"lses[{i}]", lse)):
            if tensor.device != first.device:
                values.append(f"{name} is on {tensor.device}, outs[0] on {first.device}")
    return kinds, values


def default_geometry(q: torch.Tensor, engine: str | None = None) -> TileGeometry:
    """Tile geometry that the engine for ``q``'s device prefers for its head dimension."""
    kinds, values, usable = _usable({"q": q})
    if usable and q.dim() != 4:
        kinds.append(f"q must be a tensor of 4 dimensions, got {list(q.shape)}")
    more = engine_reasons(engine)
    _raise_if(kinds + more[0], values + more[1])
    geometry: TileGeometry = _preferred_geometry(q.device, int(q.shape[-1]), engine)
    return geometry


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _preferred_geometry(device: torch.device, head_dim: int, engine: str | None) -> TileGeometry:
    """Found once per compilation: nothing in the choice of an engine is traced."""
    return engines.choose(device, engine).geometry(head_dim)


def _run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: Layout,
    scale: float,
    causal: bool,
    rounding: Rounding,
    engine: str,
) -> None:
    chosen, spec = _prepare(q, k, v, layout, scale, causal, rounding, lse, engine, None)
    # A compiler's graph brings its own addresses: what it was traced with had none.
    _raise_if([], _written_reasons({"out": out, "lse": lse}, {"q": q, "k": k, "v": v}))
    mark_written(*(t for t in (out, lse) if t is not None))
    chosen.attention(spec, q, k, v, out, lse)


def _run_lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
    layout: Layout,
    scale: float,
    threshold: float,
    descending: bool,
    soft_skip: bool,
    q_block: int,
    k_block: int,
    vote_rows: int,
    rounding: Rounding,
    engine: str,
) -> None:
    lite = LiteSpec(TileGeometry(q_block, k_block, vote_rows), threshold, descending, soft_skip)
    chosen, spec = _prepare(q, k, v, layout, scale, False, rounding, lse, engine, lite)
    inputs = {"q": q, "k": k, "v": v, "read": read, "must_do": must_do, "must_skip": must_skip}
    _raise_if([], _written_reasons({"out": out, "lse": lse, "write": write}, inputs))
    mark_written(*(t for t in (out, lse, write) if t is not None))
    chosen.lite_attention(spec, lite, q, k, v, out, lse, read, write, must_do, must_skip)


def _run_checked(engine: Engine, spec: AttentionSpec, *tensors: Any) -> None:
    """Run a request on an engine that may have become unable to: it may read the environment."""
    reasons = engine.supports(spec)
    if reasons:
        raise engines.refuse(engine, reasons, spec, None)
    engine.attention(spec, *tensors)


def _run_lite_checked(engine: Engine, spec: AttentionSpec, lite: LiteSpec, *tensors: Any) -> None:
    reasons = engine.supports(spec, lite)
    if reasons:
        raise engines.refuse(engine, reasons, spec, lite)
    engine.lite_attention(spec, lite, *tensors)


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: Layout,
    scale: float,
    causal: bool,
    rounding: Rounding,
    engine: str,
) -> None:
    _raise_if(
        *_argument_reasons(q, k, v, layout, scale, causal, rounding, out, lse is not None, engine)
    )
    _prepare(q, k, v, layout, scale, causal, rounding, lse, engine, None)


def _fake_lite_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    must_do: torch.Tensor | None,
    must_skip: torch.Tensor | None,
    layout: Layout,
    scale: float,
    threshold: float,
    descending: bool,
    soft_skip: bool,
    q_block: int,
    k_block: int,
    vote_rows: int,
    rounding: Rounding,
    engine: str,
) -> None:
    geometry = TileGeometry(q_block, k_block, vote_rows)
    kinds, values = _argument_reasons(
        q, k, v, layout, scale, False, rounding, out, lse is not None, engine
    )
    lists = {"read": read, "write": write, "must_do": must_do, "must_skip": must_skip}
    more = _lite_reasons(q, k, v, out, layout, lists, threshold, descending, soft_skip, geometry)
    _raise_if(kinds + more[0], values + more[1])
    lite = LiteSpec(geometry, threshold, descending, soft_skip)
    _prepare(q, k, v, layout, scale, False, rounding, lse, engine, lite)


for _name, _run in (("attention", _run_attention), ("lite_attention", _run_lite_attention)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("liteattention_rocm::attention", _fake_attention, lib=_LIBRARY)
torch.library.register_fake(
    "liteattention_rocm::lite_attention", _fake_lite_attention, lib=_LIBRARY
)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float,
    causal: bool,
    rounding: Rounding,
    lse: torch.Tensor | None,
    engine: str,
    lite: LiteSpec | None,
) -> tuple[Engine, AttentionSpec]:
    batch, q_len, q_heads, head_dim = _sizes(q, layout)
    _, kv_len, kv_heads, _ = _sizes(k, layout)
    spec = AttentionSpec(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device,
        layout=layout,
        scale=scale,
        causal=causal,
        rounding=rounding,
        return_lse=lse is not None,
    )
    chosen = engines.choose(q.device, engine or None)
    reasons = chosen.supports(spec, lite)
    if reasons:
        raise engines.refuse(chosen, reasons, spec, lite)
    return chosen, spec


def _sizes(tensor: torch.Tensor, layout: Layout) -> tuple[int, int, int, int]:
    """Return (batch, sequence, heads, head_dim)."""
    if layout == "bshd":
        batch, rows, heads, dim = tensor.shape
    else:
        batch, heads, rows, dim = tensor.shape
    return batch, rows, heads, dim


def _default_scale(q: torch.Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _empty_lse(q: torch.Tensor, layout: Layout) -> torch.Tensor:
    batch, rows, heads, _ = _sizes(q, layout)
    return torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)


def _argument_reasons(
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    scale: Any,
    causal: Any,
    rounding: Any,
    out: Any,
    return_lse: Any,
    engine: Any,
) -> Reasons:
    """Everything wrong with a dense call: (reasons of type, reasons of value)."""
    given = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    kinds, values, tensors = _usable(given)
    kinds += flag_reasons(causal=causal, return_lse=return_lse)
    values += choice_reasons("layout", layout, LAYOUTS)
    values += choice_reasons("rounding", rounding, ROUNDINGS)
    for more in ([], []) if scale is None else _scale_reasons(scale), engine_reasons(engine):
        kinds += more[0]
        values += more[1]

    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            kinds.append(f"{name} must be bf16, fp16 or fp32, got {tensor.dtype}")
        if tensor.dim() != 4:
            values.append(
                f"{name} must have 4 dimensions "
                f"({'B,H,S,D' if str(layout) == 'bhsd' else 'B,S,H,D'}), got {list(tensor.shape)}"
            )
        else:
            values += stride_reasons(name, tensor)
        values += derivative_reasons(name, tensor)
    for what in ("dtype", "device"):
        seen = {name: getattr(tensor, what) for name, tensor in tensors.items()}
        if len(set(seen.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in seen.items())
            (kinds if what == "dtype" else values).append(
                f"all tensors must have one {what}, got {listed}"
            )
    if len({"q", "k", "v"} & tensors.keys()) == 3 and all(
        tensors[name].dim() == 4 for name in "qkv"
    ):
        values += _shape_reasons(tensors, "bhsd" if str(layout) == "bhsd" else "bshd")
        if "out" in tensors and tensors["out"].shape == q.shape:
            values += _written_reasons({"out": out}, {"q": q, "k": k, "v": v})
    return kinds, values


def _usable(given: dict[str, Any]) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    """Sort arguments: reasons of type and of value, and the tensors that can be looked at."""
    kinds: list[str] = []
    values: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        more = tensor_reasons(name, tensor)
        if more[0] or more[1]:
            kinds += more[0]
            values += more[1]
        else:
            tensors[name] = tensor
    return kinds, values, tensors


def _scale_reasons(scale: Any) -> Reasons:
    wrong = real_reasons("scale", scale)
    return wrong if any(wrong) else ([], scale_reasons(as_float(scale)))


def _shape_reasons(tensors: dict[str, torch.Tensor], layout: Layout) -> list[str]:
    reasons: list[str] = []
    batch, _, q_heads, head_dim = _sizes(tensors["q"], layout)
    k_batch, _, kv_heads, k_dim = _sizes(tensors["k"], layout)
    if tensors["k"].shape != tensors["v"].shape:
        reasons.append(
            f"k and v must have one shape, got {list(tensors['k'].shape)} and "
            f"{list(tensors['v'].shape)}"
        )
    for name, tensor in tensors.items():
        if 0 in tensor.shape:
            reasons.append(f"{name} must not be empty, got {list(tensor.shape)}")
    if batch != k_batch:
        reasons.append(f"q and k must have one batch size, got {batch} and {k_batch}")
    if head_dim != k_dim:
        reasons.append(f"q and k must have one head dim, got {head_dim} and {k_dim}")
    if kv_heads and q_heads % kv_heads:
        reasons.append(f"query heads must be a multiple of key heads, got {q_heads} and {kv_heads}")
    if "out" in tensors and tensors["out"].shape != tensors["q"].shape:
        reasons.append(
            f"out must have q's shape {list(tensors['q'].shape)}, got {list(tensors['out'].shape)}"
        )
    return reasons


def _lite_reasons(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    layout: Any,
    lists: dict[str, Any],
    threshold: Any,
    descending: Any,
    soft_skip: Any,
    geometry: Any,
) -> Reasons:
    """Everything wrong with what LiteAttention adds to a call: (of type, of value).

    ``lists``: read, write, must_do and must_skip, by name. ``geometry`` is None if the rest of the
    call is too wrong for an engine to be asked for it.
    """
    kinds, values, bitmaps = _usable(
        {name: bits for name, bits in lists.items() if bits is not None or "must" not in name}
    )
    if not is_real(threshold):
        kinds.append(f"threshold must be a number, got {type(threshold).__name__}")
    elif not as_float(threshold) <= 0:
        values.append(f"threshold is in log2 units and must be <= 0, got {shown(threshold)}")
    kinds += flag_reasons(descending=descending, soft_skip=soft_skip)
    if geometry is not None and not isinstance(geometry, TileGeometry):
        kinds.append(f"geometry must be a TileGeometry, got {type(geometry).__name__}")
    for name, bitmap in bitmaps.items():
        if bitmap.dtype != torch.int32:
            kinds.append(f"{name} must be torch.int32 (uint32 bit patterns), got {bitmap.dtype}")
        elif not bitmap.is_contiguous():
            values.append(f"{name} must be contiguous, got strides {list(bitmap.stride())}")
    tensors = _usable({"q": q, "k": k, "v": v, "out": out})[2]
    read_only = {name: bits for name, bits in bitmaps.items() if name != "write"}
    if "write" in bitmaps:
        values += target_reasons("write", bitmaps["write"])
        values += overlap_reasons("write", bitmaps["write"], tensors | read_only)
    if "out" in tensors:
        values += overlap_reasons("out", out, read_only)
    if kinds or geometry is None or not {"q", "k"} <= tensors.keys():
        return kinds, values
    if q.dim() != 4 or k.dim() != 4 or layout not in LAYOUTS:
        return kinds, values
    batch, q_len, heads, _ = _sizes(q, layout)
    words = geometry.words(_sizes(k, layout)[1])
    expected = (batch, heads, geometry.q_blocks(q_len), words)
    for name, bitmap in bitmaps.items():
        shape = expected if name in ("read", "write") else (words,)
        if tuple(bitmap.shape) != shape:
            values.append(f"{name} must be {list(shape)}, got {list(bitmap.shape)}")
        if bitmap.device != q.device:
            values.append(f"{name} must be on {q.device}, got {bitmap.device}")
    return kinds, values


def _written_reasons(
    written: dict[str, torch.Tensor | None], inputs: dict[str, torch.Tensor | None]
) -> list[str]:
    """Say where tensors that a call writes overlap themselves, each other or an input."""
    reasons: list[str] = []
    others = dict(inputs)
    for name, target in written.items():
        if target is not None:
            reasons += target_reasons(name, target)
            reasons += overlap_reasons(name, target, others)
            others[name] = target
    return reasons


def _spans(*tensors: torch.Tensor) -> Any:
    return tuple(map(extent_bytes, tensors))


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
