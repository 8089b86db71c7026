"""The MI300X engine: prebuilt gfx942 machine code launched through the HIP run-time.

The run-time is opened on first use, never at import: ``LITEATTENTION_HIP_LIBRARY`` if it is set,
else the libamdhip64 that PyTorch has loaded, else the usual sonames. If it is the software MI300X
of :mod:`liteattention_emulator`, the engine takes CPU tensors and the same machine code runs in
software, on the stream that is the emulator's current one; otherwise it takes tensors on a gfx942
GPU. There launches go to PyTorch's current stream, nothing waits, and the workspace comes from
PyTorch's allocator. On both, calls can be captured in a graph and made from several streams and
threads.

Methods: online softmax over K blocks (FlashAttention, Dao et al., arXiv 2205.14135); in dense
calls the last partly filled round of workgroups is split along the keys and merged by log-sum-exp
(Flash-Decoding), in decode every request; keys through a page table (PagedAttention, Kwon et al.,
arXiv 2309.06180); tiles skipped from step to step (LiteAttention, arXiv 2511.11062), q blocks
dealt to the XCDs by work and scheduled longest first on each (Graham 1969).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _core
from ...contract import (
    FP8,
    Bound,
    DenseRequest,
    DenseTensors,
    Engine,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    Request,
    TileGeometry,
    WriteRequest,
    WriteTensors,
    address,
    page_strides,
    slot_beyond,
    strides,
)
from ..environment import LIBRARY_VARIABLE, architecture, settings
from ..workspace import NOTHING, Workspaces, capturing_on, stream_of
from . import manifest

TARGET = "gfx942"

#: The fp8 that gfx942 knows: bias 8, 240 at most, 0x80 is NaN.
NATIVE_FP8 = torch.float8_e4m3fnuz

#: Head dims of ragged calls whose kernels know other roundings than to nearest even.
_EVERY_ROUNDING = (64, 128, 256)

#: Head dims of the dense kernels.
_DENSE_DIMS = (64, 128)

_NUMBERS = {
    (torch.bfloat16, "rtne"): _core.Number.bf16_rtne,
    (torch.bfloat16, "rtna"): _core.Number.bf16_rtna,
    (torch.bfloat16, "rtz"): _core.Number.bf16_rtz,
    (torch.float16, "rtne"): _core.Number.fp16,
}


class _GraphMemory(NamedTuple):
    """Memory that belongs to a graph of the software MI300X."""

    address: int

    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self.address


_CodeObject = tuple[str, bytes, list[tuple[str, int]]]


class Gfx942Engine(Engine):
    """Attention of every kind on an MI300X, or on the software MI300X with CPU tensors.

    Holds what does not belong to a request: the opened HIP run-time by its path and the loaded
    kernels by run-time and device. Owner: :func:`liteattention_rocm.engines.get`, or whoever made
    it. Lifetime: the process's, or its owner's. Safe to use from any thread.

    Args:
        kv_splits: parts along the keys that the last round of workgroups of a dense call, and the
            requests of a ragged or causal one, are computed in (at most: a call has no more than
            its K blocks, and none has more than 128 in a ragged or causal one); 0 lets a cost model
            choose. Results differ in rounding between numbers of parts. The lists of a
            LiteAttention step with a budget are cut where that pays; 1 keeps them whole.
        library: path of the HIP run-time; by default what ``LITEATTENTION_HIP_LIBRARY`` says.

    Raises:
        TypeError, ValueError: ``kv_splits`` is no int, or is negative.
    """

    name = "gfx942"
    dtypes = (torch.bfloat16, torch.float16)
    cache_dtypes = (NATIVE_FP8,)
    plans_from_bounds = True
    weighs = True

    def __init__(self, kv_splits: int = 0, library: str | None = None) -> None:
        if not isinstance(kv_splits, int) or isinstance(kv_splits, bool):
            raise TypeError(f"kv_splits must be an int, got {type(kv_splits).__name__}")
        if kv_splits < 0:
            raise ValueError(
                f"kv_splits must be 0, which lets a cost model choose, or more, got {kv_splits}"
            )
        self._kv_splits = kv_splits
        self._library = library
        self._lock = threading.Lock()
        self._workspaces = Workspaces()
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
        path = settings().hip_library if self._library is None else self._library
        found = self._libraries.get(path)
        if found is None:
            with self._lock:
                found = self._libraries.get(path)
                if found is None:
                    found = self._libraries[path] = _core.HipLibrary(path)
        return found

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device``; see :meth:`Engine.unavailable`."""
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

    def limits(self, request: Request) -> list[str]:
        """Return the sizes and numbers that its kernels do not take; see :meth:`Engine.limits`."""
        if isinstance(request, WriteRequest):
            return _fp8_reasons(request)
        if isinstance(request, RaggedRequest):
            reasons = _fp8_reasons(request) + _core.ragged_reasons(_ragged_shape(request))
            return reasons + _rounding_reasons(request, request.kv_dtype)
        if isinstance(request, LiteRequest):
            reasons = _core.dense_reasons(_shape(request))
            own, asked = self.geometry(request.head_dim), request.geometry
            if asked != own:
                reasons.append(
                    f"its tile is q_block {own.q_block}, k_block {own.k_block}, vote_rows "
                    f"{own.vote_rows}, got {asked.q_block}, {asked.k_block}, {asked.vote_rows}"
                )
        elif _is_triangular(request):
            reasons = _core.ragged_reasons(_triangular_shape(request, _known(request.batch)))
            reasons += _rounding_reasons(request, request.dtype)
        else:
            reasons = _core.dense_reasons(_shape(request))
        return reasons

    def geometry(self, head_dim: int, rows: int | None = None) -> TileGeometry:
        """Return the kernel's tile: 8 waves of 32 query rows, K blocks of 64 keys."""
        return TileGeometry(
            q_block=_core.GFX942_Q_BLOCK,
            k_block=_core.GFX942_K_BLOCK,
            vote_rows=_core.GFX942_WAVE_ROWS,
        )

    def bind(self, request: Request, like: Any) -> Bound:
        """Plan the launches; see :meth:`Engine.bind`.

        With a full list and threshold -inf, or a budget, an ascending walk and ``kv_splits=1``, a
        LiteAttention step equals dense attention with ``kv_splits=1`` bit for bit. With another
        ``kv_splits`` the lists of a step with a budget may be cut. A causal call is a ragged batch
        of equal lengths.

        What is returned raises:
            ValueError: a row of a tensor does not start on a multiple of 4 bytes, or pages lie too
                far apart; lists every reason.
            RuntimeError: (``_core.HipError``) the HIP run-time refused a call; names its error.
        """
        device = self.device(request.device)
        if isinstance(request, WriteRequest):
            return self._bind_write(device, request, like)
        if isinstance(request, RaggedRequest):
            return self._bind_ragged(device, request, like)
        if isinstance(request, LiteRequest):
            return self._bind_lite(device, request, like)
        if _is_triangular(request):
            return self._bind_triangular(device, request, like)
        return self._bind_dense(device, request, like)

    def _scratch(
        self, device: _core.Gfx942Device, request: Request, size: int
    ) -> Callable[[], tuple[int, torch.Tensor | _GraphMemory]]:
        """Return what gives the current stream and ``size`` bytes for the launches of one call."""
        where, index, workspaces = request.device, device.ordinal, self._workspaces
        current, capturing = self._stream(where), self._capturing(where)
        library = self.library()

        def of_graph(stream: int) -> torch.Tensor | _GraphMemory:
            if library.emulated and size:
                return _GraphMemory(library.graph_memory(stream, size))
            return workspaces.take(where, stream, size)

        def scratch() -> tuple[int, torch.Tensor | _GraphMemory]:
            stream = current(index)
            if capturing():
                return stream, of_graph(stream)
            workspace = workspaces.held.get((where, stream), NOTHING)
            if workspace.numel() < size:
                workspace = workspaces.take(where, stream, size)
            return stream, workspace

        return scratch

    def _stream(self, device: torch.device) -> Callable[[int], int]:
        """Return what gives the current stream: PyTorch's, or the software MI300X's."""
        library = self.library()
        return library.current_stream if library.emulated else stream_of(device)

    def _capturing(self, device: torch.device) -> Callable[[], bool]:
        """Return what says whether launches become part of a graph now."""
        library = self.library()
        return library.capturing if library.emulated else capturing_on(device)

    def _bind_dense(
        self, device: _core.Gfx942Device, request: DenseRequest, like: DenseTensors
    ) -> Bound:
        splits = min(self._kv_splits, self.geometry(request.head_dim).k_blocks(request.kv_len))
        plan = _core.plan_dense(_shape(request), device.compute_units, splits)
        launch = _launch(request, like)
        run = device.attention
        scratch = self._scratch(device, request, plan.workspace_bytes)

        def dense(t: DenseTensors) -> None:
            stream, workspace = scratch()
            run(
                plan, launch,
                t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(),
                0 if t.lse is None else t.lse.data_ptr(), workspace.data_ptr(), stream,
            )  # fmt: skip

        return dense

    def _bind_lite(
        self, device: _core.Gfx942Device, request: LiteRequest, like: LiteTensors
    ) -> Bound:
        plan = _core.plan_lite(
            _shape(request), device.compute_units, request.budget > 0, self._kv_splits != 1
        )
        launch, step = _launch(request, like), _core.LiteLaunch()
        step.threshold = request.threshold
        step.budget = request.budget
        step.descending = request.walks_down
        step.soft_skip = request.soft_skip
        run = device.lite
        scratch = self._scratch(device, request, plan.workspace_bytes)

        def lite(t: LiteTensors) -> None:
            stream, workspace = scratch()
            run(
                plan, launch, step,
                t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(),
                0 if t.lse is None else t.lse.data_ptr(), t.read.data_ptr(), t.write.data_ptr(),
                0 if t.must_do is None else t.must_do.data_ptr(),
                0 if t.must_skip is None else t.must_skip.data_ptr(),
                0 if t.mass is None else t.mass.data_ptr(),
                0 if t.limits is None else t.limits.data_ptr(),
                workspace.data_ptr(), stream,
            )  # fmt: skip

        return lite

    def _bind_triangular(
        self, device: _core.Gfx942Device, request: DenseRequest, like: DenseTensors
    ) -> Bound:
        """Bind a causal call as packed sequences of equal lengths, one per entry of the batch.

        Where the entries follow each other in memory one launch has them all; else, and where the
        log-sum-exp is wanted (its heads lie within the entries), each has its own.
        """
        steps = [strides(x, request.layout) for x in like[:4]]
        lengths = (request.q_len, request.kv_len, request.kv_len, request.q_len)
        joined = like.lse is None and all(
            batch == length * row for (batch, row, _), length in zip(steps, lengths, strict=True)
        )
        entries = request.batch if joined else 1
        plan = self._plan_ragged(device, _triangular_shape(request, entries))
        launch = _core.RaggedLaunch()
        (_, *q_step), (_, *k_step), (_, *v_step), (_, *out_step) = steps
        launch.set_strides(
            (q_step[0], q_step[1]),
            (0, k_step[0], k_step[1]),
            (0, v_step[0], v_step[1]),
            (out_step[0], out_step[1]),
        )
        launch.pages, launch.page_rows = 1, entries * request.kv_len
        launch.scale = request.scale
        launch.number = _NUMBERS[request.dtype, request.rounding]
        where, library = request.device, self.library()
        capturing = self._capturing(where)
        # Bytes to each entry of q, k, v, out and the log-sum-exp.
        number = request.dtype.itemsize
        apart = (*[number * step[0] for step in steps], 4 * request.q_heads * request.q_len)
        jumps = [tuple([i * far for far in apart]) for i in range(0, request.batch, entries)]
        # q_start and kv_start by stream, in whose order they are filled, read and freed.
        known: dict[int, list[torch.Tensor]] = {}
        run = device.ragged
        scratch = self._scratch(device, request, plan.workspace_bytes)

        def triangular(t: DenseTensors) -> None:
            stream, workspace = scratch()
            starts: Sequence[torch.Tensor | _GraphMemory] | None = known.get(stream)
            if starts is None or capturing():
                starts = made = [
                    torch.arange(entries + 1, dtype=torch.int32, device=where) * length
                    for length in (request.q_len, request.kv_len)
                ]
                if not capturing():  # memory of a graph is the graph's
                    known[stream] = made
                elif library.emulated:
                    starts = [
                        _GraphMemory(library.graph_memory(stream, x.nbytes, x.data_ptr()))
                        for x in made
                    ]
            q_start, kv_start = starts
            for q, k, v, out, lse in jumps:
                run(
                    plan, launch,
                    t.q.data_ptr() + q, t.k.data_ptr() + k, t.v.data_ptr() + v,
                    t.out.data_ptr() + out, 0 if t.lse is None else t.lse.data_ptr() + lse, 0,
                    q_start.data_ptr(), 0, kv_start.data_ptr(), 0, 0, 0, workspace.data_ptr(),
                    stream,
                )  # fmt: skip

        return triangular

    def _plan_ragged(
        self, device: _core.Gfx942Device, shape: _core.RaggedShape
    ) -> _core.RaggedPlan:
        splits = min(self._kv_splits, _core.DECODE_MOST_SPLITS)
        return _core.plan_ragged(shape, device.compute_units, splits)

    def _bind_ragged(
        self, device: _core.Gfx942Device, request: RaggedRequest, like: RaggedTensors
    ) -> Bound:
        plan = self._plan_ragged(device, _ragged_shape(request))
        launch = _core.RaggedLaunch()
        q_step, out_step = page_strides(like.q), page_strides(like.out)
        launch.set_strides(q_step[1:], page_strides(like.k), page_strides(like.v), out_step[1:])
        paged = like.page_table is not None
        launch.pages, launch.page_rows = like.k.shape[:2] if paged else (1, like.k.shape[0])
        if like.page_table is not None:
            launch.table_width = like.page_table.shape[1]
            launch.table_stride = like.page_table.stride(0)
        launch.scale = request.scale
        launch.k_scale = request.k_scale
        launch.v_scale = request.v_scale
        launch.soft_cap = request.soft_cap
        launch.number = _NUMBERS[request.dtype, request.rounding]
        run = device.ragged
        scratch = self._scratch(device, request, plan.workspace_bytes)

        def ragged(t: RaggedTensors) -> None:
            stream, workspace = scratch()
            keys = t.keys.data_ptr()
            run(
                plan, launch,
                t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(),
                0 if t.lse is None else t.lse.data_ptr(),
                0 if t.sinks is None else t.sinks.data_ptr(), t.q_start.data_ptr(),
                keys if paged else 0, 0 if paged else keys,
                0 if t.page_table is None else t.page_table.data_ptr(),
                0 if t.k_scale is None else t.k_scale.data_ptr(),
                0 if t.v_scale is None else t.v_scale.data_ptr(), workspace.data_ptr(), stream,
            )  # fmt: skip

        return ragged

    def _bind_write(
        self, device: _core.Gfx942Device, request: WriteRequest, like: WriteTensors
    ) -> Bound:
        launch = _core.WriteLaunch()
        launch.wide = like.slots.dtype == torch.int64
        launch.set_strides(
            page_strides(like.k)[1:], page_strides(like.v)[1:],
            page_strides(like.k_cache), page_strides(like.v_cache),
        )  # fmt: skip
        launch.set_shape(
            request.rows, request.kv_heads, request.head_dim, request.pages, request.page_size
        )
        if request.kv_dtype == NATIVE_FP8:
            number = _NUMBERS[request.dtype, "rtne"]
            launch.set_fp8(number, request.k_scale, request.v_scale)
        run, index, current = device.write_kv, device.ordinal, self._stream(request.device)
        on_cpu = request.device.type == "cpu"

        def write(t: WriteTensors) -> None:
            error = slot_beyond(t, request) if on_cpu else None
            if error is not None:
                raise error
            run(
                launch,
                t.k.data_ptr(), t.v.data_ptr(), t.k_cache.data_ptr(), t.v_cache.data_ptr(),
                t.slots.data_ptr(), 0 if t.k_scale is None else t.k_scale.data_ptr(),
                0 if t.v_scale is None else t.v_scale.data_ptr(), current(index),
            )  # fmt: skip

        return write

    def order_of_tiles(
        self,
        lists: torch.Tensor,
        must_do: torch.Tensor | None = None,
        must_skip: torch.Tensor | None = None,
        k_blocks: int | None = None,
    ) -> torch.Tensor:
        """Return the order in which a LiteAttention step takes its tiles (docs/kernels.md).

        Args:
            lists: skip bitmap, int32 [B, Hq, q_blocks, words], contiguous.
            must_do, must_skip: packed K-block masks, int32 [words], or None;
                ``(lists | must_do) & ~must_skip`` counts.
            k_blocks: bits at and past it do not count; by default all bits do.

        Returns:
            int32 [slots, 8]: the tiles of each XCD, one column each, in the order in which it takes
            them. A tile is a number in [B, Hq, q_blocks]; -1: none.

        Raises:
            ValueError: tensors are not as above or the K blocks do not fill the words; lists every
                reason. Or there is no order: tiles are so few that each has a compute unit of its
                own, or so many that a launch has not the workgroups for 3/2 times as many.

        Sources, for each XCD: longest processing time first (Graham 1969); the last of up to 4,096
        tiles are packed into compute units (MULTIFIT: Coffman, Garey and Johnson 1978).
        """
        return self._order(lists, must_do, must_skip, k_blocks, cuts=False)[0]

    def order_of_parts(
        self,
        lists: torch.Tensor,
        must_do: torch.Tensor | None = None,
        must_skip: torch.Tensor | None = None,
        k_blocks: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order of a step with a budget, whose lists may be cut (docs/kernels.md).

        Args, Raises: as :meth:`order_of_tiles`, but few tiles have an order, too.

        Returns:
            As :meth:`order_of_tiles`, and int32 [slots, 8, 4]: which K blocks of the tile's list
            are computed there, in walking order: the first one's number, the last one's plus 1, and
            where the part is stored, -1: the list is whole, whatever the numbers say; then 0.
            Positions without a tile mean nothing. Whole lists alone if the plan cuts none.

        Source: wrap-around rule (R. McNaughton, Management Science 6, 1959).
        """
        return self._order(lists, must_do, must_skip, k_blocks, cuts=True)

    def _order(
        self,
        lists: torch.Tensor,
        must_do: torch.Tensor | None,
        must_skip: torch.Tensor | None,
        k_blocks: int | None,
        *,
        cuts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reasons = [
            f"{name} must be int32 of {dims} dimension{'s' * (dims > 1)}, contiguous, on "
            f"{lists.device}, got {x.dtype} {list(x.shape)} with strides {list(x.stride())} on "
            f"{x.device}"
            for name, x, dims in (("lists", lists, 4), ("must_do", must_do, 1),
                                  ("must_skip", must_skip, 1))
            if x is not None
            and not (
                x.dtype == torch.int32
                and x.dim() == dims
                and x.is_contiguous()
                and x.device == lists.device
            )
        ]  # fmt: skip
        words = lists.shape[-1] if lists.dim() else 0
        reasons += [
            f"{name} must have {words} words, as lists have, got {mask.shape[0]}"
            for name, mask in (("must_do", must_do), ("must_skip", must_skip))
            if mask is not None and mask.dim() == 1 and mask.shape[0] != words
        ]
        blocks = 32 * words if k_blocks is None else k_blocks
        if -(-blocks // 32) != words:
            reasons.append(f"{blocks} K blocks do not fill {words} words")
        if reasons:
            raise ValueError("no order of these tiles: " + "; ".join(reasons))
        batch, heads, q_blocks, _ = lists.shape
        device = self.device(lists.device)
        tile = self.geometry(64)
        # Head dim and key heads have no part in it.
        shape = _core.DenseShape(
            batch, heads, 1, q_blocks * tile.q_block, blocks * tile.k_block, 64
        )
        plan = _core.plan_lite(shape, device.compute_units, cuts, cuts)
        order, counts, of_units = (
            torch.empty(size // 4, dtype=torch.int32, device=lists.device)
            for size in (plan.order_bytes, plan.counts_bytes, plan.cuts_bytes)
        )
        parts = torch.tensor([0, 0, -1, 0], dtype=torch.int32, device=lists.device)
        parts = parts.repeat(plan.slots, len(order) // max(plan.slots, 1), 1)
        device.plan_lpt(
            plan,
            lists.data_ptr(),
            address(must_do),
            address(must_skip),
            order.data_ptr(),
            counts.data_ptr(),
            self._stream(lists.device)(device.ordinal),
            parts.data_ptr(),
            of_units.data_ptr(),
        )
        return order.view(plan.slots, -1), parts

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
        objects = manifest.read().objects
    except (OSError, ValueError) as error:
        raise ValueError(f"this installation has no gfx942 code objects: {error}") from error
    for entry in objects:
        arguments = [
            (kernel.name, sum(part.size for part in kernel.kernarg if part.kind == "by_value"))
            for kernel in entry.kernels
        ]
        try:
            found.append((entry.file, manifest.load(entry.file), arguments))
        except (OSError, ValueError) as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError("the gfx942 code objects are unusable: " + "; ".join(reasons))
    return found


def _shape(request: DenseRequest) -> _core.DenseShape:
    sizes = (request.batch, request.q_heads, request.kv_heads, request.q_len, request.kv_len)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        # torch.compile traces with unknown sizes; they are checked when the operator runs.
        sizes = (1, 1, 1, 1, 1)
    return _core.DenseShape(*sizes, int(request.head_dim))


def _is_triangular(request: DenseRequest) -> bool:
    """Whether a causal call takes the ragged kernels, which have more head dims.

    A single query sees every key, so the dense kernels serve it at their head dims.
    """
    return request.causal and (request.q_len > 1 or int(request.head_dim) not in _DENSE_DIMS)


def _triangular_shape(request: DenseRequest, entries: int) -> _core.RaggedShape:
    """``entries`` entries of a causal batch as packed requests."""
    q_len, kv_len, q_heads, kv_heads = map(
        _known, (request.q_len, request.kv_len, request.q_heads, request.kv_heads)
    )
    return _core.RaggedShape(
        entries, entries * q_len, q_heads, kv_heads, int(request.head_dim), 0, q_len, kv_len, q_len
    )


def _ragged_shape(request: RaggedRequest) -> _core.RaggedShape:
    requests, rows, max_q, max_kv = map(
        _known, (request.requests, request.rows, request.max_q_len, request.max_kv_len)
    )
    # A window as long as the keys hides nothing.
    window = request.window if request.window < max_kv else 0
    heads = (request.q_heads, request.kv_heads, int(request.head_dim))
    return _core.RaggedShape(
        requests, rows, *heads, request.page_size, max_q, max_kv, window=window,
        fp8=request.kv_dtype == NATIVE_FP8, lookahead=request.lookahead,
    )  # fmt: skip


def _fp8_reasons(request: RaggedRequest | WriteRequest) -> list[str]:
    """What is against a request's fp8 cache, beyond that its dtype is not listed."""
    reasons = []
    if request.kv_dtype in FP8 and request.kv_dtype != NATIVE_FP8:
        why = "the same bits are other numbers"
        if request.kv_dtype == torch.float8_e4m3fn:
            why = "the same bits are half the number, and those of -0 are NaN"
        reasons.append(
            f"the fp8 of an MI300X is {NATIVE_FP8}, in which {why}: allocate the cache as "
            f"{NATIVE_FP8} and fill it with write_kv"
        )
    return reasons


def _rounding_reasons(request: RaggedRequest | DenseRequest, kv_dtype: torch.dtype) -> list[str]:
    """What is against the rounding of a ragged call: most kernels round to nearest even only."""
    if request.rounding == "rtne" or request.dtype != torch.bfloat16:
        return []
    needs = ["a cache of bf16"] if kv_dtype == NATIVE_FP8 else []
    if int(request.head_dim) not in _EVERY_ROUNDING:
        needs.append("a head dim of 64, 128 or 256")
    return [f"rounding {request.rounding!r} needs {' and '.join(needs)}: use 'rtne'"] * bool(needs)


def _known(size: int) -> int:
    """A size, or 1: torch.compile traces with unknown ones, checked when the operator runs."""
    return 1 if isinstance(size, torch.SymInt) else size


def _launch(request: DenseRequest, like: DenseTensors | LiteTensors) -> _core.DenseLaunch:
    launch = _core.DenseLaunch()
    launch.set_strides(*(strides(x, request.layout) for x in (like.q, like.k, like.v, like.out)))
    launch.number = _NUMBERS[request.dtype, request.rounding]
    launch.scale = request.scale
    return launch
