"""Launches attention_prefill by itself on the software MI300X; what its tests compare it with."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from liteattention_rocm.engines.gfx942 import manifest
from tests.oracle import ragged
from tests.oracle.ragged import Case

from .machine import PageStrides, RaggedParams, RowStrides, divider, pointer, variant

if TYPE_CHECKING:
    from liteattention_emulator import Module

LOG2E = math.log2(math.e)
CACHES = ("k_cache", "v_cache", "page_table")


def scales_in_memory(k_scale: float, v_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One float each, and NaN around it."""
    return tuple(torch.tensor([math.nan, x, math.nan])[1:2] for x in (k_scale, v_scale))


def tile_rows(dim: int) -> int:
    return 128 if dim > 128 else 256


def tile_keys(dim: int) -> int:
    return 32 if dim > 128 else 64


@dataclass
class Batch(Case):
    """A batch with caches: scattered pages [pages, page_size, Hkv, D] or, for a page size of 0,
    packed [keys, Hkv, D]. Wherever nothing was written they are NaN.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    #: What a launch may touch of the caches; nothing: all of them.
    spans: list[torch.Tensor] = field(default_factory=list)


def make(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **more: Any,
) -> Batch:
    """``more``: lead, padding and fp8 of :func:`tests.oracle.ragged.make`."""
    case = ragged.make(requests, *heads, dim, dtype, seed + 17 * dim + page_size, **more)
    if page_size:
        caches = ragged.paged(case, page_size, fused=True)
    else:
        end = torch.full((1, heads[1], dim), math.nan).to(dtype)
        table = torch.zeros(1, 1, dtype=torch.int32)
        caches = torch.cat([*case.k, end]), torch.cat([*case.v, end]), table
    return Batch(**vars(case), **dict(zip(CACHES, caches, strict=True)), page_size=page_size)


def seen_ahead(causal: bool, lookahead: int | None = None) -> int:
    """Keys after its own that a row sees, as kernels are told."""
    return 0 if causal else 2**30 - 1 if lookahead is None else lookahead


class Prefill:
    """A launch over ``batch`` and the merge of its parts; out [T, Hq, D], lse [Hq, T] or None.

    ``in_memory``: the scales of an fp8 cache are read there. ``splits``: parts of a tile at
    most, of ``part_blocks`` K blocks or more; 0: as many parts as may be. ``room``: parts of
    a kv head at most; by default all find room. ``parts`` are what they leave, NaN where nobody
    writes: outputs and statistics, none without room.
    """

    def __init__(
        self,
        batch: Batch,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool = True,
        window: int = 0,
        lookahead: int | None = None,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        in_memory: bool = False,
        rounding: str = "rtne",
        splits: int = 1,
        part_blocks: int = 1,
        room: int | None = None,
    ) -> None:
        q, k, v = batch.q, batch.k_cache, batch.v_cache
        rows, q_heads, dim = q.shape
        kv_heads = k.shape[-2]
        requests = len(batch.kv_len)
        paged = batch.page_size > 0
        wide = (1 / math.sqrt(dim) if scale is None else scale) * LOG2E
        at = scales_in_memory(k_scale, v_scale) if in_memory else ()
        scale, v_scale = (math.nan, math.nan) if in_memory else (wide * k_scale, v_scale)
        group = q_heads // kv_heads
        slots = rows * group // tile_rows(dim) + requests
        room = (slots * splits if room is None else room) if splits > 1 else 0
        sizes = (tile_rows(dim), dim), (2, tile_rows(dim))
        self.parts = [torch.full((kv_heads, room, *x), math.nan) for x in sizes] if room else []
        strides = [
            PageStrides(x.stride(0) if paged else 0, x.stride(-3), x.stride(-2)) for x in (k, v)
        ]
        self._params = RaggedParams(
            *map(pointer, (q, k, v, out, lse, sinks, batch.q_start)),
            *map(pointer, (
                batch.kv_len if paged else None,
                None if paged else batch.kv_start,
                batch.page_table if paged else None,
            )),
            None, None, *map(pointer, self.parts or (None, None)),
            *map(pointer, at or (None, None)),
            *(RowStrides(x.stride(0), x.stride(1)) for x in (q, out)),
            *strides, batch.page_table.stride(0), 0 if lse is None else lse.stride(0),
            wide, 2 / soft_cap if soft_cap else 0.0,
            requests, rows, q_heads, kv_heads, batch.page_size, *divider(batch.page_size),
            seen_ahead(causal, lookahead), window, 1,
            scale, soft_cap * LOG2E, 2 * scale / soft_cap if soft_cap else 0.0,
            dim, *divider(group), v_scale, splits, room, part_blocks,
        )  # fmt: skip
        caches = batch.spans or [k, v]
        given = (q, *caches, out, lse, sinks, batch.q_start, batch.kv_len, batch.kv_start)
        self._tensors = [x for x in given if x is not None]
        self._tensors += [batch.page_table, *at, *self.parts]
        self._kernel = f"attention_prefill_{variant(q, rounding, fp8=k.dtype.itemsize == 1)}"
        self._grid = max(slots, room) * kv_heads
        number = "fp16" if q.dtype == torch.float16 else f"bf16_{rounding}"
        self._merge = f"merge_prefill_{number}"
        self._merge_grid = min(slots, room // 2) * kv_heads * (tile_rows(dim) * dim // 2048)

    def launch(self, module: Module | None = None) -> Any:
        """The kernel itself; ``module``: another build. Returns its report."""
        return self._launch("attention_prefill.co", self._kernel, self._grid, 512, module)

    def merge(self, module: Module | None = None) -> Any:
        """What merges the parts, if any tile may have some."""
        if self._merge_grid == 0:
            return None
        return self._launch("merge_prefill.co", self._merge, self._merge_grid, 256, module)

    def _launch(self, file: str, kernel: str, grid: int, threads: int, given: Module | None) -> Any:
        import liteattention_emulator as emulator

        with ExitStack() as stack:
            module = given or stack.enter_context(emulator.Module(manifest.load(file)))
            stack.enter_context(emulator.registered(*self._tensors))
            return module.launch(kernel, [grid], [threads], [self._params])


def prefill(
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    module: Module | None = None,
    **more: Any,
) -> Any:
    """One call; ``module``: another build. Returns the report of attention_prefill."""
    call = Prefill(batch, out, lse, **more)
    report = call.launch(module)
    call.merge()
    return report
