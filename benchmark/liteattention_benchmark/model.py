"""Workgroups of shipped kernels, recorded on the software MI300X for its timing model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

import torch

from liteattention_emulator import Recording, library, recorded, set_option
from liteattention_emulator.recording import recording
from liteattention_rocm import _core
from liteattention_rocm.cli import dimensions
from liteattention_rocm.contract import (
    DenseRequest,
    DenseTensors,
    LiteRequest,
    LiteTensors,
    RaggedRequest,
    RaggedTensors,
    Rounding,
)
from liteattention_rocm.engines.gfx942 import Gfx942Engine

PAGE = 4096
"""Bytes."""
DIMS: dict[str, tuple[int, ...]] = {name: (64, 128) for name in ("dense", "lite", "weigh")}
DIMS |= {name: (32, 64, 80, 96, 112, 128, 192, 256) for name in ("prefill", "decode")}
EVERY_ROUNDING = (64, 128, 256)
"""Head dims whose kernels know other roundings than rtne."""
BLOCK = 64
"""Keys that figures per block are given for."""


@dataclass(frozen=True, slots=True)
class Case:
    """What to record of a call of [B,S,H,D] tensors, bf16, or of a ragged one.

    shape: B,H,S,D. kernel: dense, one q block of one head; lite, the same in a LiteAttention step
    whose threshold no tile falls below, so that it votes on every tile and keeps all of them;
    weigh, the same in a step with a budget, which weighs every tile; prefill, the last tile of a
    causal request of S keys; decode, one request's S keys and one key head. The last two read keys
    through a table of pages of ``page_size`` tokens in disorder, and have H / kv_heads query heads
    to a key head. q_len: query rows of a decode request.
    """

    shape: tuple[int, int, int, int]
    kernel: Literal["dense", "lite", "weigh", "prefill", "decode"]
    rounding: Rounding
    kv_heads: int = 0
    page_size: int = 16
    q_len: int = 1

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.shape[1] // (self.kv_heads or self.shape[1])

    @property
    def resident(self) -> int:
        """Workgroups of it that a CU holds, by their registers and LDS."""
        narrow = self.kernel in ("dense", "prefill") and self.shape[3] == 64
        paired = self.kernel == "decode" or narrow
        return 2 if paired else 1

    def reasons(self) -> list[str]:
        """Why it cannot be recorded; none: it can."""
        return self._limits() + self._memory()

    def _memory(self) -> list[str]:
        """Whether the largest of its tensors can be had; only a part of it is ever touched."""
        _, heads, length, dim = self.shape
        if self.kernel in ("prefill", "decode"):
            heads = self.kv_heads or heads
            length = -(-length // self.page_size) * self.page_size
        length *= 2 if self.kernel == "decode" else 1  # a workgroup each of two requests
        heads = max(heads, self.resident) if self.kernel == "dense" else heads  # and of two heads
        return dimensions.memory_reasons(2 * heads * length * dim, "one tensor of --shape")

    def _limits(self) -> list[str]:
        _, heads, length, dim = self.shape
        found = []
        if dim not in DIMS[self.kernel]:
            *most, last = map(str, DIMS[self.kernel])
            found.append(
                f"D of --shape must be {', '.join(most)} or {last} with --kernel {self.kernel}, "
                f"got {dim}"
            )
        elif self.rounding != "rtne" and dim not in EVERY_ROUNDING:
            found.append(f"--rounding must be rtne with D = {dim}, got {self.rounding}")
        if self.kernel in ("dense", "lite", "weigh"):
            given = [name for name, there in self._of_requests() if there]
            if given:
                found.append(f"{', '.join(given)}: only with --kernel prefill or decode")
            return found
        if heads % (self.kv_heads or heads):
            found.append(
                f"H of --shape must be a multiple of --kv-heads, got {heads} and {self.kv_heads}"
            )
            return found
        if self.kernel == "decode":
            if not _core.is_decode(self.q_len, self.group):
                found.append(
                    f"decode takes at most {_core.DECODE_ROWS} query rows times heads of a key "
                    f"head, got {self.q_len} times {self.group}"
                )
            if self.q_len > length:
                found.append(f"--q-len must be at most S = {length}, got {self.q_len}")
            return found
        if self.q_len != 1:
            found.append("--q-len is for --kernel decode")
        if _core.is_decode(min(self.tile_rows, length), self.group):
            found.append(f"S = {length} rows times {self.group} heads of a key head are decode's")
        return found

    def _of_requests(self) -> list[tuple[str, bool]]:
        return [
            ("--kv-heads", self.kv_heads != 0),
            ("--page-size", self.page_size != 16),
            ("--q-len", self.q_len != 1),
        ]

    @property
    def tile(self) -> int:
        """Rows of a prefill tile, the heads of a key head each (geometry.h: PrefillRows)."""
        return 256 if self.shape[3] <= 128 else 128

    @property
    def tile_rows(self) -> int:
        """Query rows of which a prefill tile is full, or nearly."""
        return max(self.tile // self.group, 1)


def record(case: Case, together: int | None = None) -> tuple[Recording, float | None]:
    """Run ``together`` workgroups of the case on one CU, by default all it holds, and record them.

    Returns the recording and the matrix instructions of a wave per 64 keys (of decode, whose waves
    share the keys, None). Only the workgroups' own rows are computed, at the places that they have
    in tensors of the shape. Several of dense attention have a head each, if need be one more than
    the shape has; those of prefill and decode have a request each.
    """
    count = case.resident if together is None else together
    if case.kernel == "decode":
        return _together(_ragged(case, count), "attention_decode", count), None
    if case.kernel == "prefill":
        found = _together(_ragged(case, count), f"attention_{case.kernel}", count)
    else:
        found = _together(_dense(case, count), f"attention_{case.kernel}", count)
    return found, _executed(found) / -(-case.shape[2] // BLOCK)


def _together(run: Callable[[], None], kernel: str, count: int) -> Recording:
    """The first workgroups of a launch, on one CU."""
    every: Iterator[Recording] = (_recorded(run, kernel, number) for number in itertools.count())
    if kernel == "attention_prefill":  # where a number may be nobody's tile
        every = filter(_executed, every)
    first, *others = itertools.islice(every, count)
    return first.beside(*others) if others else first


def _executed(found: Recording) -> int:
    """Matrix instructions of the first wave."""
    matrix = {i.index for i in found.instructions if i.unit == "mfma"}
    return sum(int(index) in matrix for index in found.waves[0].steps["index"])


def _recorded(run: Callable[[], None], kernel: str, workgroup: int) -> Recording:
    set_option("check", "off")
    try:
        with recording(workgroup, kernel):
            run()
            return recorded()
    finally:
        set_option("check", "")


@cache
def _engine() -> Gfx942Engine:
    """Of the software MI300X; a call has one part."""
    return Gfx942Engine(kv_splits=1, library=str(library()))


def _aligned(*shape: int) -> torch.Tensor:
    """Zeros on a page: where lines fall in the sets of L1 does not change from run to run."""
    count = math.prod(shape)
    raw = torch.zeros(count + PAGE // 2, dtype=torch.bfloat16)
    return raw[-raw.data_ptr() % PAGE // 2 :][:count].view(shape)


def _dense(case: Case, count: int) -> Callable[[], None]:
    """A call of ``count`` heads, with the first q block of each."""
    _, heads, length, dim = case.shape
    heads = max(heads, count)
    engine = _engine()
    tile = engine.geometry(dim, heads * length)
    rows = min(length, tile.q_block)
    generator = torch.Generator().manual_seed(0)

    def tensor(rows: int) -> torch.Tensor:
        one = _aligned(1, length, heads, dim)[:, :rows, :count]
        return one.copy_(torch.randn(one.shape, generator=generator))

    q, k, v, out = tensor(rows), tensor(length), tensor(length), tensor(rows)
    dense = DenseRequest(
        1, count, count, rows, length, dim, q.dtype, q.device, "bshd", 1 / math.sqrt(dim), False,
        case.rounding, False,
    )  # fmt: skip
    request: DenseRequest = dense
    tensors: DenseTensors | LiteTensors = DenseTensors(q, k, v, out, None)
    if case.kernel != "dense":
        every = torch.full((1, count, 1, tile.words(length)), -1, dtype=torch.int32)
        tensors = LiteTensors(q, k, v, out, None, every, torch.zeros_like(every), None, None)
        same: dict[str, Any] = {field.name: getattr(dense, field.name) for field in fields(dense)}
        budget = 0.01 if case.kernel == "weigh" else 0.0
        request = LiteRequest(
            **same, geometry=tile, threshold=-math.inf if budget else -1e30, descending=True,
            soft_skip=False, budget=budget,
        )  # fmt: skip
    run = engine.bind(request, tensors)
    return lambda: run(tensors)


def _ragged(case: Case, requests: int) -> Callable[[], None]:
    """A call of requests alike, all of one key head, which is the first of the cache's."""
    _, heads, length, dim = case.shape
    engine = _engine()
    rows = min(case.tile_rows, length) if case.kernel == "prefill" else case.q_len
    width = -(-length // case.page_size)
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return _aligned(*shape).copy_(torch.randn(shape, generator=generator))

    q, out = (tensor(requests * rows, heads, dim)[:, : case.group] for _ in range(2))
    cache = requests * width, case.page_size, case.kv_heads or heads, dim
    k, v = (tensor(*cache)[:, :, :1] for _ in range(2))
    table = torch.randperm(requests * width, generator=generator).int().view(requests, width)
    tensors = RaggedTensors(
        q, k, v, out, None, None, torch.arange(requests + 1, dtype=torch.int32) * rows,
        torch.full((requests,), length, dtype=torch.int32), table,
    )  # fmt: skip
    request = RaggedRequest(
        requests, requests * rows, case.group, 1, dim, q.dtype, k.dtype, q.device, case.page_size,
        rows, length, 1 / math.sqrt(dim), 0, 0, 0.0, False, 1.0, 1.0, case.rounding, False,
    )  # fmt: skip
    run = engine.bind(request, tensors)
    return lambda: run(tensors)
