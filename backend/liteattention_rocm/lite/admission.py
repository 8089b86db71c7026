"""What is checked of a LiteAttention call before any state is touched, and what its engine is told.

A call that is refused costs nobody lists or statistics: arguments, schedule, token ranges and the
engine's own limits are all looked at here, first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from .. import engines, validation
from ..arguments import Reasons, is_integer
from ..contract import DenseRequest, LiteRequest, TileGeometry
from .policy import Schedule, SkipPolicy
from .state import Kind, Shape

WHAT = "attention call"
# No named tuples: those make themselves in Python, which takes 1 us.
Given = tuple[Any, Any, Any, Any]  #: q, k, v, out
#: layout, scale, rounding, return_lse, num_steps, engine, ids of geometry and policy, heads: all
#: that a plan depends on but the tensors
Options = tuple[Any, ...]
Where = tuple[Hashable, int, str, str]  #: generation, step, layer, branch


def admit(
    policy: SkipPolicy,
    geometry: TileGeometry | None,
    engine: str | None,
    given: Given,
    options: Options,
    where: Where,
    num_steps: int | None,
) -> tuple[Shape, Schedule]:
    """Return what lists of a call must fit, and its schedule.

    The names in ``where`` are checked already. Raises ``TypeError`` and ``ValueError`` for all
    that arguments, policy and engine have against the call.
    """
    q, k, *_ = given
    layout, scale, *_, heads = options
    _, step, layer, _ = where
    call_reasons(given, options, engine).raise_for(WHAT)
    batch, q_len, q_heads, head_dim = validation.sizes(q, layout)
    _, kv_len, kv_heads, _ = validation.sizes(k, layout)
    tile = geometry
    if tile is None:
        tile = engines.choose(q.device, engine).geometry(head_dim, batch * q_heads * q_len)
    shape = Shape(batch, q_heads, kv_heads, q_len, kv_len, head_dim, q.dtype, q.device, tile)
    schedule = policy.schedule(layer, kv_len, num_steps, step).of_heads(layer, q_heads, heads)
    limit = schedule.limit(step)
    must_skip = None
    if limit is not None and (policy.must_do or policy.must_skip):
        _, must_skip = policy.key_masks(kv_len, tile.k_block)
    if not torch.compiler.is_compiling():
        kind: Kind = None
        if limit is not None and (limit.drops or must_skip is not None):
            kind = (limit, schedule.descending[0])
        # else it is dense, or has a list of the same tiles that an admitted step wrote
        scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
        engines.admit(engine_request(policy, shape, kind, scale, options), engine)
    return shape, schedule


def call_reasons(given: Given, options: Options, engine: Any) -> Reasons:
    """Everything wrong with the tensors and options of a call, whatever its policy."""
    q, k, v, out = given
    layout, scale, rounding, return_lse, *_, heads = options
    found = Reasons()
    if not torch.compiler.is_compiling():
        found = validation.dense(
            q, k, v, out, None, layout, scale, False, rounding, return_lse, engine, skips=True
        )
    if heads is None:
        return found
    if not isinstance(heads, tuple) or not all(map(is_integer, heads)):
        found.types.append(f"heads must be a tuple of integers or None, got {heads!r}")
        return found
    if len(set(heads)) < len(heads) or min(heads, default=0) < 0:
        found.values.append(f"heads must be different heads of the model, from 0, got {heads}")
    if not found.types and q.dim() == 4:
        count = validation.sizes(q, "bhsd" if layout == "bhsd" else "bshd")[2]
        if len(heads) != count:
            found.values.append(
                f"heads must name the {count} query heads that q has, got {len(heads)}: {heads}"
            )
    return found


def engine_request(
    policy: SkipPolicy, shape: Shape, kind: Kind, scale: float, options: Options
) -> DenseRequest:
    """Describe a checked call to its engine."""
    layout, _, rounding, return_lse, *_ = options
    call = (*shape[:8], layout, scale, False, rounding, return_lse)
    if kind is None:
        return DenseRequest(*call)
    limit, descending = kind
    return LiteRequest(
        *call, shape.geometry, limit.threshold, descending, policy.soft_skip, limit.budget
    )
