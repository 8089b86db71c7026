"""The portable engine: Triton kernels for every GPU that is not an MI300X.

On Hopper GPUs (sm_90) dense attention and LiteAttention run a kernel written in Gluon, Triton's
lower layer, for the bulk copy engine and the asynchronous matrix units of that chip; everywhere
else, and for tensors that the copy engine cannot address, the same request runs a plain Triton
kernel. Triton is imported on first use. With ``TRITON_INTERPRET=1`` set before that, the plain
kernels run in Triton's interpreter and the engine takes CPU tensors: slow, for tests.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135), warpgroups in
alternation (FlashAttention-3, arXiv 2407.08608), tiles skipped from step to step (LiteAttention,
arXiv 2511.11062), q blocks scheduled longest first (Graham 1969).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from .base import (
    AttentionSpec,
    BoundAttention,
    BoundLite,
    Engine,
    LiteSpec,
    RaggedBatch,
    RaggedSpec,
    TileGeometry,
    number_reasons,
)

HEAD_DIMS = (64, 128)
#: Oldest NVIDIA compute capability with bf16 matrix products.
_OLDEST = 80
#: K blocks that an int16 entry of a walk can name.
_MAX_K_BLOCKS = 32767


class PortableEngine(Engine):
    """Dense attention and LiteAttention in Triton, on any GPU that Triton compiles for."""

    name = "portable"

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device``; see :meth:`Engine.unavailable`."""
        from . import architecture

        if importlib.util.find_spec("triton") is None:
            return ["it needs Triton, which comes with PyTorch for GPUs: pip install triton"]
        if device.type == "cpu":
            if _interpreted():
                return []
            return ["it runs on GPU tensors (on CPU tensors with TRITON_INTERPRET=1, for tests)"]
        if device.type != "cuda":
            return [f"it runs on GPU tensors, got {device}"]
        found = architecture(device)
        if not found:
            return ["PyTorch sees no GPU"]
        if found.startswith("sm_") and int(found.removeprefix("sm_")) < _OLDEST:
            return [f"it needs compute capability {_OLDEST / 10:.1f} or newer, got {found}"]
        return []

    def supports(self, spec: AttentionSpec, lite: LiteSpec | None = None) -> list[str]:
        """Return every reason against a request; see :meth:`Engine.supports`."""
        reasons = self.unavailable(spec.device) + _number_reasons(spec)
        if lite is not None:
            reasons += _lite_reasons(spec, lite)
        return reasons

    def geometry(self, head_dim: int) -> TileGeometry:
        """Return the tile that dense calls on the current GPU have: 128 x 128, or 128 x 64.

        The Hopper kernel takes wide K blocks; the plain kernel is faster with narrow ones.
        """
        hopper = torch.cuda.is_available() and self._hopper(torch.device("cuda"))
        return TileGeometry(q_block=128, k_block=128 if hopper else 64, vote_rows=64)

    def attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run dense attention; see :meth:`Engine.attention`."""
        self.bind_attention(spec, q, k, v, out, lse)(q, k, v, out, lse)

    def bind_attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> BoundAttention:
        """Choose kernel and tile once; see :meth:`Engine.bind_attention`."""
        launch, tiles = _modules()
        with _on(spec.device):
            fits = self._hopper(spec.device) and not launch.hopper_reasons(q, k, v, out)
            tile = tiles.hopper(spec) if fits else tiles.plain(spec)
            bound: BoundAttention = launch.Attention(spec, tile, q, k, v, out, lse)
        return bound

    def lite_attention(
        self,
        spec: AttentionSpec,
        lite: LiteSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> None:
        """Run one LiteAttention step; see :meth:`Engine.lite_attention`.

        With threshold -inf, a full list and the engine's own geometry it equals dense attention
        bit for bit.
        """
        tensors = (q, k, v, out, lse, read, write, must_do, must_skip)
        self.bind_lite(spec, lite, *tensors)(*tensors)

    def bind_lite(
        self,
        spec: AttentionSpec,
        lite: LiteSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        read: torch.Tensor,
        write: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
    ) -> BoundLite:
        """Choose kernel and tile once; see :meth:`Engine.bind_lite`."""
        launch, tiles = _modules()
        if lite.threshold == -math.inf:
            lite = replace(lite, soft_skip=False)  # nothing is negligible
        with _on(spec.device):
            tile = None
            if self._hopper(spec.device) and not launch.hopper_reasons(q, k, v, out):
                tile = tiles.hopper_lite(spec, lite)
            # Nothing is voted on at -inf; walking in the dense order makes it dense bit for bit.
            descending = lite.descending if lite.threshold > -math.inf else tile is not None
            bound: BoundLite = launch.LiteStep(
                spec, lite, tile or tiles.plain_lite(spec, lite), descending,
                q, k, v, out, lse, read, write, must_do, must_skip,
            )  # fmt: skip
        return bound

    def ragged_reasons(self, spec: RaggedSpec) -> list[str]:
        """Return every reason against a ragged call; see :meth:`Engine.ragged_reasons`."""
        reasons = self.unavailable(spec.device) + _number_reasons(spec)
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"the cache must be {spec.dtype} like the queries, got {spec.kv_dtype}")
        return reasons

    def plan_ragged(self, spec: RaggedSpec, batch: RaggedBatch) -> Any:
        """Choose tile and parts, allocate the workspace; see :meth:`Engine.plan_ragged`."""
        return _ragged().plan(spec)

    def attention_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Run a ragged call; see :meth:`Engine.attention_ragged`."""
        with _on(spec.device):
            _ragged().attention(spec, batch, plan, q, k, v, out, lse, sinks)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Copy rows into a paged cache; see :meth:`Engine.write_kv`.

        Raises:
            ValueError: the cache has another dtype than the rows.
        """
        reasons = self.unavailable(k.device)
        if k_cache.dtype != k.dtype or v_cache.dtype != v.dtype:
            reasons.append(f"the cache must be {k.dtype} like the rows, got {k_cache.dtype}")
        if k.device.type == "cpu" and not reasons:
            tokens = k_cache.shape[0] * k_cache.shape[1]
            if slots.numel() and int(slots.max()) >= tokens:
                reasons.append(f"slot {int(slots.max())} is beyond the cache's {tokens} tokens")
        if reasons:
            raise ValueError(f"engine {self.name!r} cannot write: {'; '.join(reasons)}")
        if slots.numel():
            with _on(k.device):
                _ragged().write_kv(k, v, k_cache, v_cache, slots)

    @staticmethod
    def _hopper(device: torch.device) -> bool:
        from . import architecture

        return architecture(device) == "sm_90" and not _interpreted()


def _number_reasons(spec: AttentionSpec | RaggedSpec) -> list[str]:
    reasons = []
    if spec.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype must be bf16 or fp16, got {spec.dtype}")
    elif spec.dtype != torch.bfloat16 and spec.rounding != "rtne":
        reasons.append(f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"head dim must be 64 or 128, got {spec.head_dim}")
    if spec.kv_heads < 1 or spec.q_heads % spec.kv_heads:
        reasons.append(
            f"query heads must be a multiple of key heads, got {spec.q_heads} and {spec.kv_heads}"
        )
    return reasons + number_reasons(spec)


def _lite_reasons(spec: AttentionSpec, lite: LiteSpec) -> list[str]:
    tile = lite.geometry
    reasons = [
        f"{name} must be a power of two from {low} to {high}, got {value}"
        for name, value, low, high in (
            ("q_block", tile.q_block, 16, 128),
            ("k_block", tile.k_block, 16, 128),
            ("vote_rows", tile.vote_rows, 1, 128),
        )
        if value & (value - 1) or not low <= value <= high
    ]
    if not lite.threshold <= 0:
        reasons.append(f"threshold is in log2 units and must be <= 0 or -inf, got {lite.threshold}")
    if spec.causal:
        reasons.append("LiteAttention is for non-causal self-attention")
    if isinstance(spec.kv_len, int) and tile.k_blocks(spec.kv_len) > _MAX_K_BLOCKS:
        reasons.append(
            f"at most {_MAX_K_BLOCKS} K blocks, got {tile.k_blocks(spec.kv_len)}: use a larger "
            "k_block"
        )
    return reasons


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Import what needs Triton: (launch, tiles)."""
    from ..portable import launch, tiles

    return launch, tiles


@functools.cache
def _ragged() -> ModuleType:
    from ..portable import ragged_launch

    return ragged_launch


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current, which is where Triton launches."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
