"""The MI300X engine: prebuilt gfx942 machine code launched through the HIP run-time.

The run-time is opened on first use, never at import: ``LITEATTENTION_HIP_LIBRARY`` if it is set,
else the libamdhip64 that PyTorch has loaded, else the usual sonames. If it is the software MI300X
of :mod:`liteattention_emulator`, the engine takes CPU tensors and the same machine code runs in
software; otherwise it takes tensors on a gfx942 GPU. Launches go to PyTorch's current stream,
nothing waits, and the workspace comes from PyTorch's allocator, so calls can be captured in a
graph and made from several streams and threads.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135); in dense
calls the last partly filled round of workgroups is split along the keys and merged by log-sum-exp
(Flash-Decoding), in decode every request; keys through a page table (PagedAttention, Kwon et al.,
arXiv 2309.06180); tiles skipped from step to step (LiteAttention, arXiv 2511.11062), q blocks
scheduled longest first (Graham 1969).
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass

import torch

from .. import _core, kernels
from .base import (
    AttentionSpec,
    Engine,
    LiteSpec,
    RaggedBatch,
    RaggedSpec,
    TileGeometry,
    address,
    number_reasons,
    strides,
)

LIBRARY_VARIABLE = "LITEATTENTION_HIP_LIBRARY"
TARGET = "gfx942"

_NUMBERS = {
    (torch.bfloat16, "rtne"): _core.Number.bf16_rtne,
    (torch.bfloat16, "rtna"): _core.Number.bf16_rtna,
    (torch.bfloat16, "rtz"): _core.Number.bf16_rtz,
    (torch.float16, "rtne"): _core.Number.fp16,
}
_CodeObject = tuple[str, bytes, list[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """What a ragged batch launches, and the memory that its parts meet in.

    ``sizes`` says how many parts, of which kernels; ``workspace`` is uint8 on the batch's device,
    written by every call: one call at a time.
    """

    sizes: _core.RaggedPlan
    workspace: torch.Tensor


class Gfx942Engine(Engine):
    """Attention of every kind on an MI300X, or on the software MI300X with CPU tensors.

    Holds what does not belong to a request: the opened HIP run-time by its path and the loaded
    kernels by run-time and device. Owner: :func:`liteattention_rocm.engines.get`, or whoever made
    it. Lifetime: the process's, or its owner's. Safe to use from any thread.

    Args:
        kv_splits: parts along the keys that the last round of workgroups of a dense call, and the
            decode requests of a ragged one, are computed in (at most); 0 lets a cost model choose.
            Results differ in rounding between numbers of parts; a LiteAttention step has one part.
    """

    name = "gfx942"

    def __init__(self, kv_splits: int = 0) -> None:
        self._kv_splits = kv_splits
        self._lock = threading.Lock()
        self._libraries: dict[str, _core.HipLibrary] = {}
        self._devices: dict[tuple[str, int], _core.Gfx942Device] = {}

    @property
    def emulated(self) -> bool:
        """Whether the HIP run-time is the software MI300X; False if there is none."""
        try:
            return self.library().emulated
        except _core.HipUnavailable:
            return False

    def library(self) -> _core.HipLibrary:
        """Return the HIP run-time, opened on the first call.

        Raises:
            RuntimeError: (``_core.HipUnavailable``) there is none; says what was tried.
        """
        path = os.environ.get(LIBRARY_VARIABLE, "")
        found = self._libraries.get(path)
        if found is None:
            with self._lock:
                found = self._libraries.get(path)
                if found is None:
                    found = self._libraries[path] = _core.HipLibrary(path)
        return found

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device``; see :meth:`Engine.unavailable`."""
        from . import architecture

        try:
            library = self.library()
        except _core.HipUnavailable as error:
            return [str(error)]
        if library.emulated:
            if device.type == "cpu":
                return []
            return [f"the HIP run-time is the software MI300X, which takes cpu tensors: {device}"]
        found = architecture(device)
        if found == TARGET:
            return []
        what = f"{device} of architecture {found}" if found else str(device)
        return [
            f"it runs on an MI300X (gfx942), got tensors on {what} (CPU tensors need "
            f"{LIBRARY_VARIABLE} to be the software MI300X, see `liteattention-rocm emulate`)"
        ]

    def supports(self, spec: AttentionSpec, lite: LiteSpec | None = None) -> list[str]:
        """Return every reason against a request; see :meth:`Engine.supports`."""
        reasons = self.unavailable(spec.device)
        if spec.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"dtype must be bf16 or fp16, got {spec.dtype}")
        elif (spec.dtype, spec.rounding) not in _NUMBERS:
            reasons.append(f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}")
        shape = _shape(spec)
        if lite is not None:
            reasons += _core.lite_reasons(shape)
        elif _is_triangular(spec):
            reasons += _core.ragged_reasons(_triangular_shape(spec, _known(spec.batch)))
        else:
            reasons += _core.dense_reasons(shape)
        reasons += number_reasons(spec)
        if lite is not None:
            own, asked = self.geometry(spec.head_dim), lite.geometry
            if asked != own:
                reasons.append(
                    f"its tile is q_block {own.q_block}, k_block {own.k_block}, vote_rows "
                    f"{own.vote_rows}, got {asked.q_block}, {asked.k_block}, {asked.vote_rows}"
                )
            if not lite.threshold <= 0:
                reasons.append(
                    f"threshold is in log2 units and must be <= 0 or -inf, got {lite.threshold}"
                )
            if spec.causal:
                reasons.append("LiteAttention is for non-causal self-attention")
        return reasons

    def geometry(self, head_dim: int) -> TileGeometry:
        """Return the kernel's tile: 8 waves of 48 query rows, K blocks of 64 keys."""
        return TileGeometry(
            q_block=_core.GFX942_Q_BLOCK,
            k_block=_core.GFX942_K_BLOCK,
            vote_rows=_core.GFX942_WAVE_ROWS,
        )

    def attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run dense or causal attention; see :meth:`Engine.attention`.

        A causal call is a ragged batch of equal lengths.

        Raises:
            ValueError: a row of a tensor does not start on a multiple of 4 bytes.
            RuntimeError: (``_core.HipError``) the HIP run-time refused a call; names its error.
        """
        if _is_triangular(spec):
            self._triangular(spec, q, k, v, out, lse)
            return
        device = self.device(spec.device)
        plan = _core.plan_dense(_shape(spec), device.compute_units, self._kv_splits)
        request = _request(spec, q, k, v, out, lse)
        workspace = _workspace(plan, spec)
        device.attention(plan, request, workspace.data_ptr(), _stream(spec.device))

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

        With threshold -inf and a full list it equals dense attention with ``kv_splits=1`` bit for
        bit.

        Raises:
            ValueError: a row of a tensor does not start on a multiple of 4 bytes.
            RuntimeError: (``_core.HipError``) the HIP run-time refused a call; names its error.
        """
        device = self.device(spec.device)
        plan = _core.plan_lite(_shape(spec))
        step = _core.LiteStep()
        step.set_bitmaps(read.data_ptr(), write.data_ptr(), address(must_do), address(must_skip))
        step.threshold = lite.threshold
        # Nothing is voted on at -inf; walking in the dense order makes it dense bit for bit.
        step.descending = lite.descending and lite.threshold > -math.inf
        step.soft_skip = lite.soft_skip
        request = _request(spec, q, k, v, out, lse)
        workspace = _workspace(plan, spec)
        device.lite(plan, request, step, workspace.data_ptr(), _stream(spec.device))

    def _triangular(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run a causal call as packed sequences of equal lengths, one per entry of the batch.

        Where the entries follow each other in memory one launch has them all; else, and where the
        log-sum-exp is wanted (its heads lie within the entries), each has its own.
        """
        steps = [strides(x, spec.layout) for x in (q, k, v, out)]
        lengths = (spec.q_len, spec.kv_len, spec.kv_len, spec.q_len)
        joined = lse is None and all(
            batch == length * row for (batch, row, _), length in zip(steps, lengths, strict=True)
        )
        entries = spec.batch if joined else 1
        device = self.device(spec.device)
        plan = _core.plan_ragged(
            _triangular_shape(spec, entries), device.compute_units, self._kv_splits
        )
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=spec.device)
        starts = torch.arange(entries + 1, dtype=torch.int32, device=spec.device)
        q_start, kv_start = starts * spec.q_len, starts * spec.kv_len
        request = _core.RaggedRequest()
        request.set_batch(q_start.data_ptr(), 0, kv_start.data_ptr(), 0, 0, 0)
        (_, *q_step), (_, *k_step), (_, *v_step), (_, *out_step) = steps
        request.set_strides(
            (q_step[0], q_step[1]),
            (0, k_step[0], k_step[1]),
            (0, v_step[0], v_step[1]),
            (out_step[0], out_step[1]),
        )
        request.pages, request.page_rows = 1, entries * spec.kv_len
        request.causal = True
        request.scale = spec.scale
        request.number = _NUMBERS[spec.dtype, spec.rounding]
        for entry in range(0, spec.batch, entries):
            request.set_pointers(
                q[entry].data_ptr(),
                k[entry].data_ptr(),
                v[entry].data_ptr(),
                out[entry].data_ptr(),
                0 if lse is None else lse[entry].data_ptr(),
                0,
            )
            device.ragged(plan, request, workspace.data_ptr(), _stream(spec.device))

    def ragged_reasons(self, spec: RaggedSpec) -> list[str]:
        """Return every reason against a ragged call; see :meth:`Engine.ragged_reasons`."""
        reasons = self.unavailable(spec.device)
        if spec.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"dtype must be bf16 or fp16, got {spec.dtype}")
        elif (spec.dtype, spec.rounding) not in _NUMBERS:
            reasons.append(f"rounding {spec.rounding!r} is for bf16 outputs, got {spec.dtype}")
        if spec.kv_dtype != spec.dtype:
            reasons.append(
                f"it reads caches of the queries' dtype, got {spec.kv_dtype} for {spec.dtype}"
            )
        elif (spec.k_scale, spec.v_scale) != (1.0, 1.0):
            reasons.append(
                f"k_scale and v_scale are for fp8 caches, got {spec.k_scale} and {spec.v_scale}"
            )
        return reasons + _core.ragged_reasons(_ragged_shape(spec)) + number_reasons(spec)

    def plan_ragged(self, spec: RaggedSpec, batch: RaggedBatch) -> RaggedPlan:
        """Choose parts and make the workspace from bounds alone; see :meth:`Engine.plan_ragged`.

        Raises:
            ValueError: the kernels cannot take the shape; lists every reason.
        """
        units = self.device(spec.device).compute_units
        sizes = _core.plan_ragged(_ragged_shape(spec), units, self._kv_splits)
        workspace = torch.empty(sizes.workspace_bytes, dtype=torch.uint8, device=spec.device)
        return RaggedPlan(sizes, workspace)

    def attention_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: RaggedPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Launch prefill, decode and merge, those the plan has; see Engine.attention_ragged.

        Nothing is allocated and nothing waits.

        Raises:
            ValueError: a row of a tensor does not start on a multiple of 4 bytes, or pages lie too
                far apart; lists every reason.
            RuntimeError: (``_core.HipError``) the HIP run-time refused a call; names its error.
        """
        request = _core.RaggedRequest()
        request.set_pointers(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            address(lse),
            address(sinks),
        )
        table = batch.page_table
        request.set_batch(
            batch.q_start.data_ptr(),
            address(batch.kv_len),
            address(batch.kv_start),
            address(table),
            0 if table is None else table.shape[1],
            0 if table is None else table.stride(0),
        )
        request.set_strides(_two(q), _three(k), _three(v), _two(out))
        request.pages, request.page_rows = k.shape[:2] if k.dim() == 4 else (1, k.shape[0])
        request.causal = spec.causal
        request.scale = spec.scale
        request.soft_cap = spec.soft_cap
        request.number = _NUMBERS[spec.dtype, spec.rounding]
        self.device(spec.device).ragged(
            plan.sizes, request, plan.workspace.data_ptr(), _stream(spec.device)
        )

    def write_reasons(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Return every reason against a write; see :meth:`Engine.write_reasons`."""
        reasons = super().write_reasons(dtype, cache_dtype, device)
        if dtype.itemsize != 2:
            reasons.append(f"it writes rows of 16-bit numbers, got {dtype}")
        return reasons

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
        """Copy rows into a paged cache in one launch; see :meth:`Engine.write_kv`.

        Raises:
            ValueError: a row does not start on a multiple of 4 bytes, the head dim is no multiple
                of 8, or (CPU tensors only) a slot is beyond the cache; lists every reason.
            RuntimeError: (``_core.HipError``) the HIP run-time refused a call; names its error.
        """
        pages, page_size = k_cache.shape[:2]
        if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= pages * page_size:
            raise ValueError(
                f"slot {int(slots.max())} is beyond a cache of {pages} pages of {page_size} tokens"
            )
        request = _core.WriteKvRequest()
        request.set_pointers(
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slots.data_ptr(),
            slots.dtype == torch.int64,
        )
        request.set_strides(_two(k), _two(v), _three(k_cache), _three(v_cache))
        rows, heads, dim = k.shape
        request.set_shape(rows, heads, dim, pages, page_size)
        self.device(k.device).write_kv(request, _stream(k.device))

    def order_longest_first(
        self,
        skip: torch.Tensor,
        must_do: torch.Tensor | None = None,
        must_skip: torch.Tensor | None = None,
        k_blocks: int | None = None,
    ) -> torch.Tensor:
        """Order the q blocks of every head by the K blocks they keep, most first (LPT).

        Args:
            skip: skip bitmap, int32 [B, Hq, q_blocks, words], contiguous.
            must_do, must_skip: packed K-block masks, int32 [words], or None;
                ``(skip | must_do) & ~must_skip`` counts.
            k_blocks: bits at and past it do not count; by default all bits do.

        Returns:
            int32 [B, Hq, q_blocks]: q block numbers, ties by ascending number.

        Source: longest processing time first (Graham 1969).
        """
        batch, heads, q_blocks, words = skip.shape
        order = torch.empty((batch, heads, q_blocks), dtype=torch.int32, device=skip.device)
        self.device(skip.device).plan_lpt(
            skip.data_ptr(),
            address(must_do),
            address(must_skip),
            order.data_ptr(),
            batch * heads,
            q_blocks,
            words,
            _stream(skip.device),
            k_blocks or 0,
        )
        return order

    def device(self, device: torch.device) -> _core.Gfx942Device:
        """Return the kernels of a device, loaded on the first call.

        Raises:
            RuntimeError: no HIP run-time (``_core.HipUnavailable``), or a call of it failed
                (``_core.HipError``).
            ValueError: the run-time is not for this device, or the code objects are damaged or of
                another build; lists every reason.
        """
        library = self.library()
        if library.emulated != (device.type == "cpu"):
            # Also after a call was planned: the run-time follows LITEATTENTION_HIP_LIBRARY.
            raise ValueError(f"engine {self.name!r}: {'; '.join(self.unavailable(device))}")
        if device.type == "cpu":
            ordinal = 0
        else:
            ordinal = torch.cuda.current_device() if device.index is None else device.index
        key = (library.path, ordinal)
        found = self._devices.get(key)
        if found is None:
            with self._lock:
                found = self._devices.get(key)
                if found is None:
                    found = _core.Gfx942Device(library, ordinal, code_objects())
                    self._devices[key] = found
        return found


def code_objects() -> list[_CodeObject]:
    """Code objects of this installation, checked against the manifest's SHA-256.

    Returns:
        (file, image, [(kernel, bytes of its argument)]) of each.

    Raises:
        ValueError: a file is missing or is not the one that was built; lists every reason.
    """
    found: list[_CodeObject] = []
    reasons: list[str] = []
    try:
        objects = kernels.manifest().objects
    except (OSError, ValueError) as error:
        raise ValueError(f"this installation has no gfx942 code objects: {error}") from error
    for entry in objects:
        arguments = [
            (kernel.name, sum(part.size for part in kernel.kernarg if part.kind == "by_value"))
            for kernel in entry.kernels
        ]
        try:
            found.append((entry.file, kernels.load(entry.file), arguments))
        except (OSError, ValueError) as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("the gfx942 code objects are unusable: " + "; ".join(reasons))
    return found


def _shape(spec: AttentionSpec) -> _core.DenseShape:
    sizes = (spec.batch, spec.q_heads, spec.kv_heads, spec.q_len, spec.kv_len)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        # torch.compile traces with unknown sizes; they are checked when the operator runs.
        sizes = (1, 1, 1, 1, 1)
    return _core.DenseShape(*sizes, int(spec.head_dim))


def _is_triangular(spec: AttentionSpec) -> bool:
    """Whether causality hides anything: a single query sees every key."""
    return spec.causal and spec.q_len > 1


def _triangular_shape(spec: AttentionSpec, entries: int) -> _core.RaggedShape:
    """``entries`` entries of a causal batch as packed requests."""
    q_len, kv_len, q_heads, kv_heads = map(
        _known, (spec.q_len, spec.kv_len, spec.q_heads, spec.kv_heads)
    )
    return _core.RaggedShape(
        entries, entries * q_len, q_heads, kv_heads, int(spec.head_dim), 0, q_len, kv_len, q_len
    )


def _ragged_shape(spec: RaggedSpec) -> _core.RaggedShape:
    requests, rows, max_q, max_kv = map(
        _known, (spec.requests, spec.rows, spec.max_q_len, spec.max_kv_len)
    )
    # A window as long as the keys hides nothing.
    window = spec.window if spec.window < max_kv else 0
    heads = (spec.q_heads, spec.kv_heads, int(spec.head_dim))
    return _core.RaggedShape(requests, rows, *heads, spec.page_size, max_q, max_kv, window=window)


def _known(size: int) -> int:
    """A size, or 1: torch.compile traces with unknown ones, checked when the operator runs."""
    return 1 if isinstance(size, torch.SymInt) else size


def _two(tensor: torch.Tensor) -> tuple[int, int]:
    """Strides of row and head of [T, H, D]."""
    return tensor.stride(0), tensor.stride(1)


def _three(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of page, row and head of [pages, rows, H, D], or of packed [T, H, D]."""
    if tensor.dim() == 3:
        return 0, tensor.stride(0), tensor.stride(1)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _request(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> _core.DenseRequest:
    request = _core.DenseRequest()
    request.set_pointers(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), address(lse))
    request.set_strides(
        strides(q, spec.layout),
        strides(k, spec.layout),
        strides(v, spec.layout),
        strides(out, spec.layout),
    )
    request.number = _NUMBERS[spec.dtype, spec.rounding]
    request.scale = spec.scale
    return request


def _workspace(plan: _core.DensePlan | _core.LitePlan, spec: AttentionSpec) -> torch.Tensor:
    # PyTorch's allocator orders the reuse of this memory by the stream the launches go to.
    return torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=spec.device)


def _stream(device: torch.device) -> int:
    """Handle of PyTorch's current stream; the software MI300X has only the null stream."""
    if device.type == "cpu":
        return 0
    return torch.cuda.current_stream(device).cuda_stream
