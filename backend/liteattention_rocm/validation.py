"""What can be wrong with a call, whatever the engine: one function for each kind of call.

Each returns :class:`Reasons` with everything that it found. What only some engines cannot run is
for :meth:`liteattention_rocm.contract.Engine.reasons`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .arguments import FLOATS, Reasons, is_integer, is_real, readable, shown, shown_list
from .contract import FP8, LAYOUTS, ROUNDINGS, Layout, Rounding, TileGeometry
from .memory import has_address


class RaggedOptions(NamedTuple):
    """What a ragged call asks for beside its tensors, as the caller gave it."""

    causal: bool
    window: int | None
    lookahead: int | None
    soft_cap: float | None
    scale: float | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    rounding: Rounding
    return_lse: bool
    engine: str | None


# ------------------------------------------------------------------------------ dense calls


def sizes(tensor: torch.Tensor, layout: Layout) -> tuple[int, int, int, int]:
    """Return (batch, sequence, heads, head_dim) of a tensor of 4 dimensions."""
    if layout == "bshd":
        batch, rows, heads, dim = tensor.shape
    else:
        batch, heads, rows, dim = tensor.shape
    return batch, rows, heads, dim


def dense(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: Any,
    scale: Any,
    causal: Any,
    rounding: Any,
    return_lse: Any,
    engine: Any,
    *,
    skips: bool = False,
) -> Reasons:
    """Everything wrong with a dense call; ``out`` and ``lse`` may be None.

    ``skips``: with one of LiteAttention, which needs a tile and values of the keys' head dim.
    """
    found = Reasons()
    given = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    tensors = found.usable(given)
    dense_options(found, layout, scale, causal, rounding, return_lse, engine)
    axes = "B,H,S,D" if str(layout) == "bhsd" else "B,S,H,D"
    found.floating(tensors)
    found.shaped(tensors, 4, axes)
    found.no_derivative(tensors)
    found.one("dtype", tensors)
    found.one("device", tensors)
    _dense_shapes(found, _of_dims(tensors, 4), "bhsd" if str(layout) == "bhsd" else "bshd", skips)
    if "out" in tensors:
        inputs = {name: tensor for name, tensor in tensors.items() if name != "out"}
        found.memory({"out": out, "lse": lse}, inputs)
    return found


def dense_options(
    found: Reasons,
    layout: Any,
    scale: Any,
    causal: Any,
    rounding: Any,
    return_lse: Any,
    engine: Any,
) -> None:
    """Add everything wrong with the options of a dense call."""
    found.flags(causal=causal, return_lse=return_lse)
    found.choice("layout", layout, LAYOUTS)
    found.choice("rounding", rounding, ROUNDINGS)
    found.scale(scale)
    if engine is not None:
        found.engine(engine)


def _dense_shapes(
    found: Reasons, shaped: dict[str, torch.Tensor], layout: Layout, skips: bool
) -> None:
    """Add what is wrong with the sizes of those tensors that have 4 dimensions."""
    if shaped.keys() >= {"k", "v"}:
        _values_beside_keys(found, "k", "v", shaped, skips)
    for name, tensor in shaped.items():
        if skips and 0 in tensor.shape:
            found.values.append(
                f"{name} must not be empty, got {list(tensor.shape)}: LiteAttention keeps a list "
                "of tiles, and there is none; attention() takes empty tensors"
            )
        elif not tensor.shape[-1]:
            found.values.append(
                f"{name} must have a head dim of at least 1, got {list(tensor.shape)}"
            )
    if shaped.keys() >= {"q", "k"}:
        batch, _, q_heads, head_dim = sizes(shaped["q"], layout)
        k_batch, _, kv_heads, k_dim = sizes(shaped["k"], layout)
        if batch != k_batch:
            found.values.append(f"q and k must have one batch size, got {batch} and {k_batch}")
        if head_dim != k_dim:
            found.values.append(f"q and k must have one head dim, got {head_dim} and {k_dim}")
        found.heads(q_heads, kv_heads, none=not skips)
    if "q" in shaped:
        found.output(shaped)


def _values_beside_keys(
    found: Reasons, k: str, v: str, tensors: dict[str, torch.Tensor], alike: bool
) -> None:
    """A value for every key; ``alike``: of the keys' head dim."""
    if alike or tensors[k].shape[:-1] != tensors[v].shape[:-1]:
        found.same_shape(k, v, tensors)


def lite(
    found: Reasons,
    given: tuple[Any, Any, Any, Any],
    layout: Any,
    bitmaps: dict[str, Any],
    mass: Any,
    limits: Any,
    threshold: Any,
    budget: Any,
    descending: Any,
    soft_skip: Any,
    geometry: Any,
    *,
    zeros: bool = False,
) -> None:
    """Add everything wrong with what LiteAttention adds to a dense call.

    ``given``: q, k, v and out. ``bitmaps``: read, write, must_do and must_skip, by name. ``limits``
    are budgets by head, whose numbers are not looked at: they lie on the device. Nothing
    is voted on at threshold -inf, nor weighed with a budget of 0. ``zeros`` says that a budget of 0
    was given, beside which limits may stand, as none can be larger. ``geometry`` is None if too
    much is wrong for an engine to be asked for it.
    """
    q, k, v, out = given
    lite_options(found, threshold, budget, descending, soft_skip, geometry)
    weighs = is_real(budget) and budget > 0
    usable = found.usable(
        {name: bits for name, bits in bitmaps.items() if bits is not None or "must" not in name}
    )
    weights = {} if mass is None else found.usable({"mass": mass})
    if mass is not None and not weighs:
        found.values.append("mass is written in a step with a budget above 0: leave it out")
    by_head = {} if limits is None else found.usable({"limits": limits})
    if limits is not None and not weighs and not zeros:
        found.values.append(
            "limits are budgets by head, of which the largest is to be given as budget"
        )
    found.no_derivative(weights)
    for name, bits in (weights | by_head).items():
        kind = torch.float32 if name == "mass" else torch.int32
        if bits.dtype != kind:
            found.types.append(f"{name} must be {kind}, got {bits.dtype}")
        elif not bits.is_contiguous():
            found.values.append(f"{name} must be contiguous, got strides {list(bits.stride())}")
    for name, bits in usable.items():
        if bits.dtype != torch.int32:
            found.types.append(
                f"{name} must be torch.int32 (uint32 bit patterns), got {bits.dtype}"
            )
        elif not bits.is_contiguous():
            found.values.append(f"{name} must be contiguous, got strides {list(bits.stride())}")
    tensors = Reasons().usable({"q": q, "k": k, "v": v, "out": out})
    read_only = {name: bits for name, bits in usable.items() if name != "write"} | by_head
    if "write" in usable:
        found.memory({"write": usable["write"]}, tensors | read_only)
    found.memory(weights, tensors | usable | by_head)
    if "out" in tensors:
        # Whether it overlaps itself was said with the dense call.
        found.overlaps("out", out, read_only)
    if not isinstance(geometry, TileGeometry) or not {"q", "k"} <= tensors.keys():
        return
    if q.dim() != 4 or k.dim() != 4 or layout not in LAYOUTS:
        return
    batch, q_len, heads, _ = sizes(q, layout)
    words = geometry.words(sizes(k, layout)[1])
    expected = (batch, heads, geometry.q_blocks(q_len), words)
    k_blocks = geometry.k_blocks(sizes(k, layout)[1])
    shapes: dict[str, tuple[int, ...]] = {
        "read": expected, "write": expected, "mass": (*expected[:3], k_blocks), "limits": (heads,)
    }  # fmt: skip
    for name, bits in (usable | weights | by_head).items():
        shape = shapes.get(name, (words,))
        if tuple(bits.shape) != shape:
            found.values.append(f"{name} must be {list(shape)}, got {list(bits.shape)}")
        if bits.device != q.device:
            found.values.append(f"{name} must be on {q.device}, got {bits.device}")


def lite_options(
    found: Reasons, threshold: Any, budget: Any, descending: Any, soft_skip: Any, geometry: Any
) -> None:
    """Add everything wrong with the options that LiteAttention adds to those of a dense call."""
    found.threshold(threshold)
    found.budget(budget)
    weighs = is_real(budget) and budget > 0
    if weighs and is_real(threshold) and threshold > -math.inf:
        found.values.append("give a threshold or a budget, not both")
    if weighs and soft_skip is True:
        found.values.append(
            "soft_skip needs a threshold: a tile's mass is known only after the step, so a budget "
            "cannot drop it in the same one"
        )
    found.flags(descending=descending, soft_skip=soft_skip)
    if geometry is not None and not isinstance(geometry, TileGeometry):
        found.types.append(f"geometry must be a TileGeometry, got {type(geometry).__name__}")


def merge(outs: Any, lses: Any, layout: Any) -> Reasons:
    """Everything wrong with partial results that are to be merged."""
    found = Reasons()
    found.choice("layout", layout, LAYOUTS)
    laid_out = not found
    parts: dict[str, list[Any]] = {}
    for name, given in (("outs", outs), ("lses", lses)):
        if isinstance(given, torch.Tensor):
            if "x" in Reasons().usable({"x": given}) and given.dim():
                parts[name] = list(given)
        elif isinstance(given, Sequence) and not isinstance(given, str):
            parts[name] = list(given)
        if name not in parts:
            found.types.append(f"{name} must be a sequence of tensors, got {type(given).__name__}")
    counts = [len(listed) for listed in parts.values()]
    if len(counts) == 2 and (not counts[0] or counts[0] != counts[1]):
        found.values.append(
            f"outs and lses must be equally many and at least one, got {counts[0]} and {counts[1]}"
        )
    tensors = found.usable(
        {f"{name}[{i}]": part for name, listed in parts.items() for i, part in enumerate(listed)}
    )
    for name, tensor in tensors.items():
        if name.startswith("lses") and tensor.dtype != torch.float32:
            found.types.append(f"{name} must be torch.float32, got {tensor.dtype}")
    # What others are held against: the first that is a tensor.
    first_name = next((name for name in tensors if name.startswith("outs")), None)
    if first_name is None:
        return found
    first = tensors[first_name]
    if first.dtype not in FLOATS:
        found.types.append(f"outs must be bf16, fp16, fp32 or fp64, got {first.dtype}")
    expected = None
    if first.dim() != 4:
        found.values.append(f"outs must have 4 dimensions, got {list(first.shape)}")
    elif laid_out:
        batch, rows, heads, _ = sizes(first, layout)
        expected = [batch, heads, rows]
    for name, tensor in tensors.items():
        if name.startswith("outs"):
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                found.values.append(
                    f"{name} is {_described(tensor)}, {first_name} is {_described(first)}"
                )
        elif expected is not None and list(tensor.shape) != expected:
            found.values.append(f"{name} must be {expected} (B, H, S), got {list(tensor.shape)}")
        if tensor.device != first.device:
            found.values.append(f"{name} is on {tensor.device}, {first_name} on {first.device}")
    return found


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ------------------------------------------------------------------------------ ragged calls


def ragged(
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str],
    sinks: Any,
    out: Any,
    lse: Any,
    indices: dict[str, torch.Tensor],
    options: RaggedOptions,
) -> Reasons:
    """Everything wrong with a ragged call's tensors and options.

    ``names``: how the caller knows ``k`` and ``v``; ``indices``: the tensors of its batch.
    """
    found = Reasons()
    ragged_options(found, options)
    kv_dims, kv_axes = (4, "pages,page_size,H,D") if names[0] == "k_cache" else (3, "T,H,D")
    given = {"q": q, names[0]: k, names[1]: v}
    given |= {name: t for name, t in (("out", out), ("sinks", sinks)) if t is not None}
    tensors = found.usable(given)
    keys = {name: tensor for name, tensor in tensors.items() if name in names}
    rows = {name: x for name, x in tensors.items() if name in ("q", "out")}
    found.shaped(rows, 3, "T,H,D")
    found.shaped(keys, kv_dims, kv_axes)
    shaped = _of_dims(rows, 3) | _of_dims(keys, kv_dims)
    if "sinks" in tensors:
        found.shaped({"sinks": sinks}, 1, "Hq")
    tensors |= scale_tensors(found, options.k_scale, options.v_scale)
    found.no_derivative(tensors)
    found.floating({"q": q} if "q" in rows else {})
    _cache_dtypes(found, "q", rows, keys, names, options.k_scale, options.v_scale)
    if len(rows) == 2 and out.dtype != q.dtype:
        found.types.append(f"out must have q's dtype {q.dtype}, got {out.dtype}")
    if "sinks" in tensors:
        if sinks.dtype != torch.float32:
            found.types.append(
                f"sinks must be torch.float32, got {sinks.dtype}: call .float() on it"
            )
        if "q" in shaped and sinks.dim() == 1 and sinks.shape[0] != q.shape[1]:
            found.values.append(f"sinks must be [{q.shape[1]}] (Hq), got {list(sinks.shape)}")
    found.one("device", tensors)
    if shaped.keys() >= {*names}:
        _values_beside_keys(found, *names, shaped, kv_dims == 4)
    if names[1] in shaped and not v.shape[-1]:
        found.values.append(f"{names[1]} must have a head dim of at least 1, got {list(v.shape)}")
    if shaped.keys() >= {"q", names[0]}:
        if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
            found.values.append(
                f"q and {names[0]} must have one head dim, got {q.shape[-1]} and {k.shape[-1]}"
            )
        found.heads(q.shape[1], k.shape[-2])
    if "k_cache" in shaped and not k.shape[1]:
        found.values.append(f"k_cache must have pages of at least one token, got {list(k.shape)}")
    if "q" in shaped:
        found.output(shaped, names[1])
    inputs = {name: tensor for name, tensor in tensors.items() if name != "out"}
    found.memory({"out": rows.get("out"), "lse": lse}, inputs | Reasons().usable(indices))
    return found


def _of_dims(tensors: dict[str, torch.Tensor], dims: int) -> dict[str, torch.Tensor]:
    """Those of ``dims`` dimensions, whose sizes have a meaning."""
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == dims}


def ragged_options(found: Reasons, options: RaggedOptions) -> None:
    """Add everything wrong with the options of a ragged call."""
    found.flags(causal=options.causal, return_lse=options.return_lse)
    bounds = (("window", options.window, 1, "window"), ("lookahead", options.lookahead, 0, "bound"))
    for name, value, least, what in bounds:
        if value is None:
            continue
        if not is_integer(value):
            found.types.append(f"{name} must be an int or None, got {type(value).__name__}")
        elif value < least:
            found.values.append(
                f"{name} must be at least {least}, got {shown(value)}: None is no {what}"
            )
    if options.lookahead is not None and options.causal is True:
        found.values.append("lookahead needs causal=False: a causal row sees no key after it")
    if any_tensor(options.k_scale, options.v_scale):
        found.scale(options.scale)  # the others are looked at with the tensors
    else:
        found.scale(options.scale, options.k_scale)
        found.scales(v_scale=options.v_scale)
    if options.soft_cap is not None:
        found.scales(soft_cap=options.soft_cap)
    found.choice("rounding", options.rounding, ROUNDINGS)
    found.engine(options.engine)


def any_tensor(k_scale: Any, v_scale: Any) -> bool:
    """Whether the scales of an fp8 cache are given as tensors."""
    return isinstance(k_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor)


def scale_tensors(found: Reasons, k_scale: Any, v_scale: Any) -> dict[str, torch.Tensor]:
    """Add everything wrong with scales that are tensors; return those that can be looked at."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    given = {name: x for name, x in scales.items() if isinstance(x, torch.Tensor)}
    if len(given) == 1:
        found.types.append(
            "k_scale and v_scale must both be numbers or both be tensors, got "
            f"{type(k_scale).__name__} and {type(v_scale).__name__}"
        )
        return {}
    usable = found.usable(given)
    for name, tensor in usable.items():
        if tensor.dtype != torch.float32:
            found.types.append(f"{name} must be torch.float32, got {tensor.dtype}")
        if tensor.numel() != 1:
            found.values.append(f"{name} must have one element, got {list(tensor.shape)}")
    return usable


def operator_scales(
    k_scale: Any,
    v_scale: Any,
    k_factor: torch.Tensor | None,
    v_factor: torch.Tensor | None,
    what: str,
) -> tuple[Any, Any]:
    """Scales of an operator's call: its tensors, or its numbers.

    Of one tensor alone the checks say that it needs the other.

    Raises:
        ValueError: both tensors are there, and numbers beside them that are not 1.
    """
    if k_factor is not None and v_factor is not None:
        numbers = [x for x in (k_scale, v_scale) if not isinstance(x, torch.Tensor)]
        if any(x != 1 for x in numbers):
            raise ValueError(
                f"{what}: scales are given twice, as tensors (k_scales, v_scales) and as numbers "
                f"(k_scale {k_scale}, v_scale {v_scale}): leave the numbers at 1"
            )
    return k_scale if k_factor is None else k_factor, v_scale if v_factor is None else v_factor


def _cache_dtypes(
    found: Reasons,
    of: str,
    rows: dict[str, torch.Tensor],
    caches: dict[str, torch.Tensor],
    names: tuple[str, str],
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Add what is wrong with the dtypes of keys and values beside those of row tensor ``of``.

    Of what is not among ``rows`` and ``caches`` nothing is known.
    """
    if len(caches) == 2 and caches[names[0]].dtype != caches[names[1]].dtype:
        listed = " and ".join(str(caches[name].dtype) for name in names)
        found.types.append(f"{names[0]} and {names[1]} must have one dtype, got {listed}")
    paged = names[0] == "k_cache"
    for name, tensor in caches.items():
        if tensor.dtype == torch.uint8 and paged:
            found.types.append(
                f"{name} is torch.uint8, which does not say which fp8 it holds: "
                f"pass {name}.view(torch.float8_e4m3fn) or another float8 type"
            )
        elif of in rows and tensor.dtype != rows[of].dtype and not (paged and tensor.dtype in FP8):
            found.types.append(
                f"{name} must have {of}'s dtype {rows[of].dtype}{' or be fp8' if paged else ''}, "
                f"got {tensor.dtype}"
            )
    tensors = any_tensor(k_scale, v_scale)
    scaled = tensors or any(is_real(scale) and scale != 1 for scale in (k_scale, v_scale))
    keys = caches.get(names[0])
    if keys is not None and keys.dtype not in FP8 and scaled:
        got = "tensors" if tensors else f"{shown(k_scale)} and {shown(v_scale)}"
        found.types.append(f"k_scale and v_scale are for fp8 caches, got {got} with {keys.dtype}")


# ------------------------------------------------------------------------------ batches


#: What index tensors may have been meant to be.
_INTEGERS = (torch.int32, torch.int64, torch.int16)


def longest(starts: torch.Tensor) -> int:
    """Largest length between starts; waits for a GPU."""
    if starts.numel() < 2:
        return 0
    if readable(starts):
        return int(max(b - a for a, b in itertools.pairwise(starts.tolist())))
    return int(torch.diff(starts).max())


def paged_batch(
    q_start: Any, kv_len: Any, page_table: Any, max_q_len: Any, max_kv_len: Any
) -> Reasons:
    """Everything wrong with the index tensors and bounds of a paged batch."""
    found = Reasons()
    given = {"q_start": (q_start, 1), "kv_len": (kv_len, 1), "page_table": (page_table, 2)}
    looked = _indices(found, given)
    found.bound("max_q_len", max_q_len)
    found.bound("max_kv_len", max_kv_len)
    if looked.keys() >= {"q_start", "kv_len"} and q_start.shape[0] != kv_len.shape[0] + 1:
        found.values.append(
            f"q_start must be [{kv_len.shape[0] + 1}] like kv_len, got {list(q_start.shape)}"
        )
    if looked.keys() >= {"kv_len", "page_table"} and page_table.shape[0] != kv_len.shape[0]:
        found.values.append(
            f"page_table must have {kv_len.shape[0]} rows, got {list(page_table.shape)}"
        )
    found.one("device", looked)
    if "q_start" in looked and _starts(found, "q_start", q_start):
        _covers(found, "max_q_len", max_q_len, longest(q_start))
    if "kv_len" in looked and readable(kv_len) and kv_len.shape[0]:
        lengths = kv_len.tolist()
        if min(lengths) < 0:
            found.values.append(f"kv_len must not be negative, got {shown_list(lengths)}")
        _covers(found, "max_kv_len", max_kv_len, max(lengths))
    return found


def packed_batch(
    found: Reasons, q_start: Any, kv_start: Any, bounds: tuple[Any, Any], q: Any, k: Any
) -> None:
    """Add everything wrong with the index tensors and bounds of packed sequences."""
    looked = _indices(found, {"cu_seqlens_q": (q_start, 1), "cu_seqlens_k": (kv_start, 1)})
    found.bound("max_seqlen_q", bounds[0])
    found.bound("max_seqlen_k", bounds[1])
    if len(looked) == 2 and q_start.shape != kv_start.shape:
        found.values.append(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {q_start.shape[0]} and "
            f"{kv_start.shape[0]}"
        )
    tensors = Reasons().usable({"q": q, "k": k})
    for name, bound in (("q", bounds[0]), ("k", bounds[1])):
        starts = looked.get(f"cu_seqlens_{name}")
        if starts is None:
            continue
        if _starts(found, f"cu_seqlens_{name}", starts):
            _covers(found, f"max_seqlen_{name}", bound, longest(starts))
            if name in tensors and tensors[name].dim():
                rows_named(found, f"cu_seqlens_{name}", starts, name, tensors[name].shape[0])
        if "q" in tensors and starts.device != q.device:
            found.values.append(f"cu_seqlens_{name} is on {starts.device}, q on {q.device}")


def rows_named(found: Reasons, name: str, starts: torch.Tensor, of: str, rows: int) -> None:
    """Add that a batch ends past its tensor, if it does (CPU values only)."""
    if readable(starts) and int(starts[-1]) > rows:
        found.values.append(f"{name} ends at row {int(starts[-1])}, {of} has {rows} rows")


def _indices(found: Reasons, given: dict[str, tuple[Any, int]]) -> dict[str, torch.Tensor]:
    """Type, dtype and shape of index tensors; returns integers of as many dimensions."""
    looked = {}
    usable = found.usable({name: tensor for name, (tensor, _) in given.items()})
    for name, tensor in usable.items():
        if tensor.dtype != torch.int32:
            found.types.append(f"{name} must be torch.int32, got {tensor.dtype}: call .int() on it")
        negated = has_address(tensor) and tensor.is_neg()
        if negated:
            found.values.append(f"{name} must not be a negated view: call .resolve_neg() on it")
        dims = given[name][1]
        found.shaped({name: tensor}, dims, "R" if dims == 1 else "R,pages")
        if tensor.dim() == dims and tensor.dtype in _INTEGERS and not negated:
            looked[name] = tensor
    return looked


def _starts(found: Reasons, name: str, starts: torch.Tensor) -> bool:
    """Starts that go forwards (CPU values only). Returns whether they can be read, and do."""
    if not starts.numel():
        found.values.append(f"{name} must have one entry more than there are requests, got none")
    elif readable(starts):
        numbers = starts.tolist()
        if numbers[0] >= 0 and all(a <= b for a, b in itertools.pairwise(numbers)):
            return True
        found.values.append(
            f"{name} must start at 0 or later and never decrease, got {shown_list(numbers)}"
        )
    return False


def _covers(found: Reasons, name: str, bound: Any, largest: int) -> None:
    if is_integer(bound) and 0 <= bound < largest:
        found.values.append(f"{name} {bound} is less than a length, {largest}")


# ------------------------------------------------------------------------------ cache writes


def write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any, engine: Any
) -> Reasons:
    """Everything wrong with a cache write."""
    found = Reasons()
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    tensors = found.usable(given)
    caches = {name: tensor for name, tensor in tensors.items() if name.endswith("cache")}
    rows = {name: tensor for name, tensor in tensors.items() if name not in caches}
    found.shaped(rows, 3, "T,H,D")
    found.shaped(caches, 4, "pages,page_size,H,D")
    shaped = _of_dims(rows, 3) | _of_dims(caches, 4)
    found.no_derivative(tensors)
    indices = found.usable({"slots": slots})
    if indices:
        if slots.dtype not in (torch.int64, torch.int32):
            found.types.append(f"slots must be int64 or int32, got {slots.dtype}")
        if slots.dim() != 1 or not slots.is_contiguous():
            found.values.append(
                f"slots must be contiguous with one dimension, got {list(slots.shape)} with "
                f"strides {list(slots.stride())}"
            )
    scales = write_options(found, k_scale, v_scale, engine)
    found.no_derivative(scales)
    found.one("device", tensors | indices | scales)
    found.floating({"k": k} if "k" in rows else {})
    if len(rows) == 2 and v.dtype != k.dtype:
        found.types.append(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    _cache_dtypes(found, "k", rows, caches, ("k_cache", "v_cache"), k_scale, v_scale)
    for one, other in (("k", "v"), ("k_cache", "v_cache")):
        if shaped.keys() >= {one, other}:
            found.same_shape(one, other, shaped)
    if shaped.keys() >= {"k", "k_cache"} and k.shape[1:] != k_cache.shape[2:]:
        found.values.append(
            f"k and k_cache must have the same heads and head dim, got {list(k.shape[1:])} and "
            f"{list(k_cache.shape[2:])}"
        )
    if "k" in shaped and 0 in k.shape[1:]:
        found.values.append(
            f"k must have at least one head and a head dim of at least 1, got {list(k.shape)}"
        )
    if "k_cache" in shaped and not k_cache.shape[1]:
        found.values.append(
            f"k_cache must have pages of at least one token, got {list(k_cache.shape)}"
        )
    if "k" in shaped and indices and slots.dim() == 1 and slots.shape[0] != k.shape[0]:
        found.values.append(
            f"slots must have a slot per row, got {slots.shape[0]} for {k.shape[0]} rows"
        )
    found.memory(caches, rows | indices | scales, WRITE_REMEDY)
    return found


def write_options(
    found: Reasons, k_scale: Any, v_scale: Any, engine: Any
) -> dict[str, torch.Tensor]:
    """Add everything wrong with the options of a cache write; return scales that are tensors."""
    scales = scale_tensors(found, k_scale, v_scale)
    if not any_tensor(k_scale, v_scale):
        found.scales(k_scale=k_scale, v_scale=v_scale)
    found.engine(engine)
    return scales


#: What to do about a cache write over its own sources.
WRITE_REMEDY = "call .clone() on that first"
