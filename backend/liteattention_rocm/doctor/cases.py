"""One small call of every family of kernels, the same on every machine and every engine.

Inputs come from the raw output of numpy's PCG64, whose stream is guaranteed for all versions.
They are made so that sums are exact in fp32, whatever their order:

- q rows are rows of a Hadamard matrix, k rows are sums of those times small integers / head dim.
  A score is one of these integers, and every dimension takes part in it.
- The scale is ln 2. Scores in log2 units are these integers again, and probabilities powers of two.
- v holds small integers. Probabilities times values span fewer than 24 bits.

What rounds is the division by the sum, the merge of parts, and the output. Kernels that compute
the same in another order therefore keep almost all bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..contract import (
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
)
from ..lite import bitmap

HEAD_DIM = 128
PAGE_SIZE = 16
#: Rows of the Hadamard matrix that queries are made of.
_CODES = (3, 20, 77, 126)
_SCALE = math.log(2.0)
#: Scores are integers: no tie is possible.
_THRESHOLD = -5.5
#: Share of mass, far from every sum of tiles: it drops K blocks at -9 and at -5, 3 % together.
_BUDGET = 0.04
#: Below the mass of one of 60 equal K blocks.
_SMALL_BUDGET = 2.0**-8
#: Largest scores of the K blocks in LiteAttention steps by head, log2 units. A threshold drops -9.
_LEVELS = ((0, 0, -9, -9, -2, -2, -5, -5), (-2, -2, -9, -9, 0, 0, -1, -1))
_NOT_THERE = 2**30


class Refused(Exception):
    """An engine does not take a call; says every reason."""


@dataclass(frozen=True)
class Run:
    """Who computes a case, on which device, in which dtype and with which tile.

    ``absolute``: with |v| for v, so that outputs are the weights that errors are bounded by.
    """

    engine: Engine
    device: torch.device
    dtype: torch.dtype
    geometry: TileGeometry
    absolute: bool = False

    def tensor(self, values: npt.NDArray[np.float64]) -> torch.Tensor:
        """Return exact values in the run's dtype, on its device."""
        return torch.from_numpy(values).to(self.dtype).to(self.device)

    def values(self, seed: int, rows: int, heads: int) -> torch.Tensor:
        """Return v [rows, heads, D]: integers from -4 to 4."""
        made = integers(seed, (rows, heads, HEAD_DIM), -4, 4)
        return self.tensor(np.abs(made) if self.absolute else made)

    def index(self, *numbers: int) -> torch.Tensor:
        """Return int32 numbers on the device."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def like(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an output and an LSE [.., H, S] to fill, of NaN."""
        rows, heads = q.shape[-3:-1]
        lse = torch.full((*q.shape[:-3], heads, rows), math.nan, device=self.device)
        return torch.full_like(q, math.nan), lse

    def call(self, request: Request, tensors: tuple[object, ...]) -> None:
        """Run one request.

        Raises:
            Refused: the engine does not take it.
        """
        reasons = self.engine.reasons(request)
        if reasons:
            raise Refused("; ".join(reasons))
        self.engine.bind(request, tensors)(tensors)


#: Results on the CPU: "out" and "lse" may have a number behind them, others must be exact.
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call, and the families of gfx942 kernels that it needs."""

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Run], Results]


def integers(seed: int, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.float64]:
    """Return integers from ``low`` to ``high`` as float64, the same in every version of numpy."""
    raw = np.random.PCG64(seed).random_raw(math.prod(shape)) >> np.uint64(33)
    span = np.uint64(high - low + 1)
    numbers: npt.NDArray[np.float64] = (raw % span).astype(np.float64) + low
    return numbers.reshape(shape)


def _codes() -> npt.NDArray[np.float64]:
    """Return the chosen rows of the Hadamard matrix, [codes, D] of +1 and -1."""
    both = np.array(_CODES)[:, None] & np.arange(HEAD_DIM)[None, :]
    ones = np.array([[number.bit_count() for number in row] for row in both.tolist()])
    return 1.0 - 2.0 * (ones % 2)


def _queries(seed: int, rows: int, heads: int, signed: bool = True) -> npt.NDArray[np.float64]:
    chosen = integers(seed, (rows, heads), 0, len(_CODES) - 1).astype(np.int64)
    signs = 2.0 * integers(seed + 1, (rows, heads, 1), 0, 1) - 1.0
    return _codes()[chosen] * (signs if signed else 1.0)


def _keys(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return k [rows, heads, D] with these scores [rows, heads, codes]."""
    return scores @ _codes() / HEAD_DIM


def _scores(seed: int, rows: int, heads: int) -> npt.NDArray[np.float64]:
    return integers(seed, (rows, heads, len(_CODES)), -4, 4)


# ---------------------------------------------------------------------------------- cases


def dense(run: Run) -> Results:
    """300 rows of two heads over 330 keys of one, in two parts where the engine splits."""
    q = run.tensor(_queries(10, 300, 2))[None]
    k = run.tensor(_keys(_scores(12, 330, 1)))[None]
    v = run.values(13, 330, 1)[None]
    out, lse = run.like(q)
    request = DenseRequest(
        1, 2, 1, 300, 330, HEAD_DIM, run.dtype, run.device, "bshd", _SCALE, False, "rtne", True
    )
    run.call(request, DenseTensors(q, k, v, out, lse))
    return {"out": out.cpu(), "lse": lse.cpu()}


def _lite(run: Run, threshold: float, budget: float) -> Results:
    """Two steps, up from the full list and down the list that the first one wrote."""
    rows, heads, keys = 448, len(_LEVELS), 64 * len(_LEVELS[0])
    q = run.tensor(_queries(20, rows, heads, signed=False))[None]
    levels = np.repeat(np.array(_LEVELS, dtype=np.float64).T, 64, axis=0)[..., None]
    k = run.tensor(_keys(levels - integers(22, (keys, heads, len(_CODES)), 0, 1)))[None]
    v = run.values(23, keys, heads)[None]
    tile = run.geometry
    results: Results = {}
    shape = (1, heads, tile.q_blocks(rows), tile.words(keys))
    read = torch.full(shape, -1, dtype=torch.int32, device=run.device)
    for step, descending in ((1, False), (2, True)):
        write = torch.full_like(read, 0x5A5A5A5A)
        out, lse = run.like(q)
        request = LiteRequest(
            1, heads, heads, rows, keys, HEAD_DIM, run.dtype, run.device, "bshd", _SCALE, False,
            "rtne", True, tile, threshold, descending, False, budget,
        )  # fmt: skip
        run.call(request, LiteTensors(q, k, v, out, lse, read, write, None, None))
        results |= {f"out {step}": out.cpu(), f"lse {step}": lse.cpu(), f"list {step}": write.cpu()}
        read = write
    return results


def vote(run: Run) -> Results:
    """LiteAttention with a threshold."""
    return _lite(run, _THRESHOLD, 0.0)


def weigh(run: Run) -> Results:
    """LiteAttention with a budget of softmax mass."""
    return _lite(run, -math.inf, _BUDGET)


def order(run: Run) -> Results:
    """Lists of different lengths, of more tiles than any gfx942 GPU has compute units."""
    return _lists(run, 320, 256)


def order_of_many(run: Run) -> Results:
    """Of so many tiles that gfx942 orders them by another kernel."""
    return _lists(run, 4200, 128)


def _lists(run: Run, heads: int, keys: int) -> Results:
    rows = 8
    q = run.tensor(_queries(70, rows, heads))[None]
    k = run.tensor(_keys(_scores(72, keys, 1)))[None]
    v = run.values(73, keys, 1)[None]
    out, lse = run.like(q)
    tile = run.geometry
    kept = integers(74, (1, heads, tile.q_blocks(rows), tile.k_blocks(keys)), 0, 2) > 0
    kept[..., 0] = True
    read = bitmap.pack(torch.from_numpy(kept)).to(run.device)
    write = torch.full_like(read, 0x5A5A5A5A)
    request = LiteRequest(
        1, heads, 1, rows, keys, HEAD_DIM, run.dtype, run.device, "bshd", _SCALE, False, "rtne",
        True, tile, -math.inf, False, False, 0.0,
    )  # fmt: skip
    run.call(request, LiteTensors(q, k, v, out, lse, read, write, None, None))
    return {"out": out.cpu(), "lse": lse.cpu(), "list": write.cpu()}


def cut(run: Run) -> Results:
    """Two lists so long that gfx942 cuts them; of their K blocks, the budget drops those at -9.

    None of these begins a part, where it would weigh more.
    """
    rows, heads, keys = 8, 2, 64 * 64
    levels = np.zeros((keys, 1, 1))
    for block in (6, 26, 44, 60):
        levels[64 * block : 64 * (block + 2)] = -9.0
    q = run.tensor(_queries(80, rows, heads, signed=False))[None]
    k = run.tensor(_keys(levels - integers(82, (keys, 1, len(_CODES)), 0, 1)))[None]
    v = run.values(83, keys, 1)[None]
    out, lse = run.like(q)
    tile = run.geometry
    shape = (1, heads, tile.q_blocks(rows), tile.words(keys))
    read = torch.full(shape, -1, dtype=torch.int32, device=run.device)
    write = torch.full_like(read, 0x5A5A5A5A)
    request = LiteRequest(
        1, heads, 1, rows, keys, HEAD_DIM, run.dtype, run.device, "bshd", _SCALE, False, "rtne",
        True, tile, -math.inf, False, False, _SMALL_BUDGET,
    )  # fmt: skip
    run.call(request, LiteTensors(q, k, v, out, lse, read, write, None, None))
    return {"out": out.cpu(), "lse": lse.cpu(), "list": write.cpu()}


def _ragged(
    run: Run, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int], paged: bool, seed: int
) -> Results:
    """Causal requests of (rows, keys)."""
    rows, keys = (sum(column) for column in zip(*lengths, strict=True))
    q_heads, kv_heads = heads
    q = run.tensor(_queries(seed, rows, q_heads))
    k, v = (
        run.tensor(_keys(_scores(seed + 2, keys, kv_heads))),
        run.values(seed + 3, keys, kv_heads),
    )
    starts, counts, table = [0], [0], None
    for n, m in lengths:
        starts.append(starts[-1] + n)
        counts.append(counts[-1] + m)
    if paged:
        k, v, table = _paged(run, k, v, counts)
        ends = [m for _, m in lengths]
    else:
        ends = counts
    out, lse = run.like(q)
    request = RaggedRequest(
        len(lengths), rows, q_heads, kv_heads, HEAD_DIM, run.dtype, run.dtype, run.device,
        PAGE_SIZE if paged else 0, max(n for n, _ in lengths), max(m for _, m in lengths),
        _SCALE, 0, 0, 0.0, False, 1.0, 1.0, "rtne", True,
    )  # fmt: skip
    starting, ending = run.index(*starts), run.index(*ends)
    run.call(request, RaggedTensors(q, k, v, out, lse, None, starting, ending, table))
    return {"out": out.cpu(), "lse": lse.cpu()}


def _paged(
    run: Run, k: torch.Tensor, v: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return caches and the page table: pages in descending order, NaN where no key is."""
    used = [-(-(end - begin) // PAGE_SIZE) for begin, end in itertools.pairwise(counts)]
    pages = sum(used) + 1
    caches = [
        torch.full((pages, PAGE_SIZE, *x.shape[1:]), math.nan, device="cpu").to(k) for x in (k, v)
    ]
    table = torch.full((len(used), max(used)), _NOT_THERE, dtype=torch.int32, device="cpu")
    page = pages
    for request, count in enumerate(used):
        for column in range(count):
            page -= 1
            table[request, column] = page
            begin = counts[request] + column * PAGE_SIZE
            end = min(begin + PAGE_SIZE, counts[request + 1])
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[page, : end - begin] = rows[begin:end]
    return caches[0], caches[1], table.to(run.device)


def prefill(run: Run) -> Results:
    """Packed sequences of 130 and 37 rows, the second one after 64 earlier keys.

    Tiles of more than one K block are in two parts where the engine splits.
    """
    return _ragged(run, ((130, 130), (37, 101)), (2, 1), False, 40)


def decode(run: Run) -> Results:
    """Three rows over pages, in two parts where the engine splits."""
    return _ragged(run, ((1, 300), (1, 65), (1, 17)), (8, 2), True, 50)


def fp8(run: Run) -> Results:
    """A decoded and a prefilled request over an fp8 cache that is written first.

    The first form of fp8 that the engine takes. Every form holds these keys and values exactly.
    """
    lengths, q_heads, kv_heads, pages = ((1, 300), (37, 101), (1, 17)), 8, 2, 30
    rows, keys = (sum(column) for column in zip(*lengths, strict=True))
    q = run.tensor(_queries(70, rows, q_heads))
    scores = _scores(72, keys, kv_heads)
    chosen = integers(73, (keys, kv_heads, 1), 0, len(_CODES) - 1)
    k = run.tensor(_keys(np.where(np.arange(len(_CODES)) == chosen, scores, 0.0)))
    v = run.values(74, keys, kv_heads)
    table = torch.full((len(lengths), 19), _NOT_THERE, dtype=torch.int32, device="cpu")
    slots: list[int] = []
    for row, (_, length) in enumerate(lengths):
        used = -(-length // PAGE_SIZE)
        table[row, :used] = torch.arange(pages, pages - used, -1, device="cpu") - 1
        slots += [(pages - 1 - j // PAGE_SIZE) * PAGE_SIZE + j % PAGE_SIZE for j in range(length)]
        pages -= used
    sizes = (30, PAGE_SIZE, kv_heads, HEAD_DIM)
    starting = run.index(0, *itertools.accumulate(n for n, _ in lengths))
    ending = run.index(*(m for _, m in lengths))
    out, lse = run.like(q)
    scales = (2.0**-6, 0.5)
    refused = ["it takes no fp8 cache"]
    for kind in run.engine.cache_dtypes:
        request = RaggedRequest(
            len(lengths), rows, q_heads, kv_heads, HEAD_DIM, run.dtype, kind, run.device, PAGE_SIZE,
            max(n for n, _ in lengths), max(m for _, m in lengths), _SCALE, 0, 0, 0.0, False,
            *scales, "rtne", True,
        )  # fmt: skip
        refused = run.engine.reasons(request)
        if not refused:
            break
    else:
        raise Refused("; ".join(refused))
    caches = [torch.full(sizes, math.nan, device=run.device).to(kind) for _ in "kv"]
    at = torch.tensor(slots, dtype=torch.int64, device=run.device)
    writing = WriteRequest(
        keys, kv_heads, HEAD_DIM, run.dtype, kind, run.device, *sizes[:2], *scales
    )  # fmt: skip
    run.call(writing, WriteTensors(k, v, caches[0], caches[1], at))
    tensors = RaggedTensors(
        q, caches[0], caches[1], out, lse, None, starting, ending, table.to(run.device)
    )
    run.call(request, tensors)
    return {"out": out.cpu(), "lse": lse.cpu()}


def write(run: Run) -> Results:
    """Twenty rows into pages, one of them padding."""
    k, v = run.values(60, 20, 2), run.values(61, 20, 2)
    k_cache, v_cache = (
        torch.zeros((4, PAGE_SIZE, 2, HEAD_DIM), device="cpu").to(k) for _ in range(2)
    )
    slots = torch.tensor([*range(60, 49, -1), -1, *range(8)], dtype=torch.int64, device=run.device)
    request = WriteRequest(
        20, 2, HEAD_DIM, run.dtype, run.dtype, run.device, 4, PAGE_SIZE, 1.0, 1.0
    )
    run.call(request, WriteTensors(k, v, k_cache, v_cache, slots))
    return {"keys": k_cache.cpu(), "values": v_cache.cpu()}


CASES = (
    Case("dense", ("transpose_v", "attention_dense", "merge_parts"), dense),
    Case("LiteAttention, threshold", ("attention_lite",), vote),
    Case("LiteAttention, budget", ("attention_weigh", "select_tiles"), weigh),
    Case("LiteAttention, order", ("count_tiles", "pack_lists", "attention_lite"), order),
    Case("LiteAttention, many tiles", ("count_tiles", "plan_lpt", "attention_lite"), order_of_many),
    Case("LiteAttention, cut lists", ("pack_lists", "attention_weigh", "merge_lists"), cut),
    Case("packed prefill", ("attention_prefill", "merge_prefill"), prefill),
    Case("paged decode", ("attention_decode", "merge_decode"), decode),
    Case("fp8 cache", ("attention_prefill", "attention_decode", "write_kv"), fp8),
    Case("write_kv", ("write_kv",), write),
)
