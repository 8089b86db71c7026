"""Attention kernels side by side: one process, the same tensors, in random turns.

A *cell* is a shape, a *contender* one implementation of it. Every round runs each contender of a
cell once, in a new random order, because a GPU at its power limit is slower right after a hungry
contender; times are of device events around the call alone, after the L2 cache was overwritten
(which also hides the launch: what is timed is the device). Each row carries the error of the timed
contender's own output against float64 on sampled query rows.

Contenders that are not installed or cannot run a cell are reported with the reason.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from liteattention_rocm import PagedBatch, attention, attention_paged, lite_attention, skiplist
from liteattention_rocm.collect_env import source_commit
from liteattention_rocm.dense import default_geometry

from . import peers
from .peers import Call, Maker, Unavailable

#: Low enough that no tile of random data is voted away, while voting does run.
NOTHING_SKIPPED = -64.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLED_ROWS = 64
#: Half a millisecond of writing on the fastest GPUs, time for any contender's launch.
_FLUSH_BYTES = 2 << 30
#: Fewer than a GPU's queue takes (1,024), so that the host never waits.
_HOST_CALLS = 200


class _Cell(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Dense(_Cell):
    """Self-attention without lists."""

    batch: PositiveInt
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    kv_heads: PositiveInt | None = None
    causal: bool = False
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        shape = f"{self.batch},{self.heads},{self.length},{self.head_dim}"
        kv = f" kv{self.kv_heads}" if self.kv_heads else ""
        return shape + kv + (" causal" if self.causal else "")

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done."""
        return self.flops

    @property
    def traffic(self) -> float:
        """Bytes of q, k, v and the output, each moved once."""
        heads = self.heads + (self.kv_heads or self.heads)
        return 4.0 * self.batch * heads * self.length * self.head_dim


class Lite(_Cell):
    """LiteAttention with part of the tiles skipped, beside dense attention."""

    batch: PositiveInt
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    sparsity: float = Field(ge=0, lt=1)
    pattern: Literal["uniform", "clustered"] = "uniform"
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        shape = f"{self.batch},{self.heads},{self.length},{self.head_dim}"
        return f"{shape} {self.sparsity:.0%} {self.pattern}"

    @property
    def flops(self) -> float:
        """Multiplications and additions of the dense call."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.head_dim

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done: those of the tiles that stay."""
        return (1 - self.sparsity) * self.flops

    @property
    def traffic(self) -> float:
        """Bytes of q, k, v and the output, each moved once."""
        return 8.0 * self.batch * self.heads * self.length * self.head_dim


class Decode(_Cell):
    """One new row per request against a paged cache."""

    requests: PositiveInt
    context: PositiveInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    page_size: PositiveInt = 16
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        return (
            f"decode {self.requests} x {self.context}, {self.q_heads}/{self.kv_heads} x "
            f"{self.head_dim}"
        )

    @property
    def bytes(self) -> float:
        """Bytes of keys and values, which a step has to read."""
        return 4.0 * self.requests * self.context * self.kv_heads * self.head_dim

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done."""
        return 4.0 * self.requests * self.context * self.q_heads * self.head_dim

    @property
    def traffic(self) -> float:
        """Bytes of the cache, the queries and the output, each moved once."""
        return self.bytes + 4.0 * self.requests * self.q_heads * self.head_dim


class Host(_Cell):
    """A call so short that the host limits it: what the path through Python costs."""

    batch: PositiveInt = 1
    heads: PositiveInt = 8
    length: PositiveInt = 128
    head_dim: PositiveInt = 128
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        return f"host {self.batch},{self.heads},{self.length},{self.head_dim}"


Cell = Dense | Lite | Decode | Host


class Config(BaseModel):
    """What to measure: a YAML file."""

    model_config = ConfigDict(extra="forbid")

    rounds: int = Field(default=15, ge=3)
    warmup: int = Field(default=3, ge=1)
    cold_l2: bool = True
    dense: tuple[Dense, ...] = ()
    lite: tuple[Lite, ...] = ()
    decode: tuple[Decode, ...] = ()
    host: tuple[Host, ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they are measured."""
        return (*self.host, *self.dense, *self.lite, *self.decode)


def load(path: Path) -> Config:
    """Read a configuration; a number of ``sparsity`` may be a list, and so may a ``pattern``.

    Raises:
        ValueError: (``pydantic.ValidationError``) lists every mistake of the file.
        yaml.YAMLError: the file is no YAML.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if isinstance(raw, dict) and isinstance(raw.get("lite"), list):
        raw["lite"] = [cell for entry in raw["lite"] for cell in _spread(entry)]
    return Config.model_validate(raw)


def _spread(entry: Any) -> Iterator[Any]:
    if not isinstance(entry, dict):
        yield entry
        return
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        yield entry | dict(zip(lists, values, strict=True))


@dataclass(frozen=True)
class Row:
    """One contender in one cell. ``figure``: TFLOP/s, or TB/s of a decode cell, or None.

    Times in milliseconds. ``error``: norm of the difference to float64 over the norm, on sampled
    rows. ``absent``: why there is no time. ``matrix_percent``: share of the time in which the
    matrix units worked, from :mod:`.counters`, None if nobody counted.
    """

    kind: str
    cell: str
    contender: str
    median_ms: float | None
    p25_ms: float | None
    p75_ms: float | None
    figure: float | None
    error: float | None
    absent: str
    matrix_percent: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return asdict(self)


@dataclass
class Job:
    """Tensors of a cell, its contenders' calls and what they must give."""

    calls: dict[str, Callable[[], torch.Tensor]]
    absent: dict[str, str]
    error: Callable[[str, torch.Tensor], float]


def run(
    config: Config,
    device: torch.device,
    fa3_library: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    more: Mapping[str, Maker] | None = None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure every cell and return a row per contender.

    ``fa3_library``: the FlashAttention-3 library of a vLLM wheel, where the package
    ``flash_attn_interface`` is not installed. ``more``: further peers, see :func:`peers.given`.
    ``keep`` is called with the rows so far after each cell.
    """
    rows: list[Row] = []
    import torch._dynamo  # FlexAttention compiles anew for every shape, and there may be many

    with torch._dynamo.config.patch(recompile_limit=1 << 10):
        for cell in config.cells:
            progress(str(cell))
            job = make(cell, device, fa3_library, more or {})
            rows += _measure(cell, job, config, device)
            keep(rows)
            del job
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def make(
    cell: Cell, device: torch.device, fa3_library: Path | None, more: Mapping[str, Maker]
) -> Job:
    """Make the tensors of a cell and the calls of its contenders."""
    if isinstance(cell, Decode):
        return _decode(cell, device, fa3_library)
    if isinstance(cell, Host):
        return _host(cell, device)
    return _self_attention(cell, device, fa3_library, more)


def kind_of(cell: Cell) -> str:
    """Name the kind of a cell, as rows do."""
    return type(cell).__name__.lower()


def _measure(cell: Cell, job: Job, config: Config, device: torch.device) -> list[Row]:
    """Time the calls of a cell in random turns."""
    kind = kind_of(cell)
    absent = dict(job.absent)
    errors: dict[str, float] = {}
    for name, call in list(job.calls.items()):
        try:
            for _ in range(config.warmup):
                out = call()
            errors[name] = job.error(name, out)
        except (Unavailable, RuntimeError, ValueError, NotImplementedError) as error:
            absent[name] = " ".join(str(error).split())[:200]
            del job.calls[name]
    host = isinstance(cell, Host)
    flush = flush_buffer(device) if config.cold_l2 and not host else None
    times: dict[str, list[float]] = {name: [] for name in job.calls}
    turns = random.Random(0)
    for _ in range(config.rounds):
        order = list(job.calls)
        turns.shuffle(order)
        for name in order:
            if host:
                times[name].append(host_milliseconds(job.calls[name], device))
            else:
                times[name].append(milliseconds(job.calls[name], device, flush))
    rows = []
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        figure = None
        if not isinstance(cell, Host):
            work = cell.bytes if isinstance(cell, Decode) else cell.flops
            figure = work / middle / 1e9
        rows.append(Row(kind, str(cell), name, middle, low, high, figure, errors[name], ""))
    rows.sort(key=lambda row: row.median_ms or 0.0)
    return rows + [
        Row(kind, str(cell), name, None, None, None, None, None, why)
        for name, why in absent.items()
    ]


def flush_buffer(device: torch.device) -> torch.Tensor | None:
    """Memory whose overwriting empties the L2 cache of a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)


def host_milliseconds(call: Call, device: torch.device) -> float:
    """Time that one of many calls in a row keeps the host; the device is idle at first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    taken = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken * 1e3 / _HOST_CALLS


def milliseconds(call: Call, device: torch.device, flush: torch.Tensor | None) -> float:
    """Time one call, after overwriting ``flush``."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    if flush is not None:
        flush.zero_()
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


# --------------------------------------------------------------------------- self-attention


def _self_attention(
    cell: Dense | Lite, device: torch.device, fa3: Path | None, more: Mapping[str, Maker]
) -> Job:
    generator = torch.Generator(device=device).manual_seed(cell.length + cell.head_dim)
    kv_heads = (cell.kv_heads if isinstance(cell, Dense) else None) or cell.heads

    def normal(heads: int) -> torch.Tensor:
        shape = (cell.batch, cell.length, heads, cell.head_dim)
        numbers = torch.randn(shape, generator=generator, device=device)
        # [B, H, S, D] as a model has it after its projections: rows of all heads side by side
        return numbers.to(_DTYPES[cell.dtype]).transpose(1, 2)

    q, k, v = normal(cell.heads), normal(kv_heads), normal(kv_heads)
    causal = isinstance(cell, Dense) and cell.causal
    makers = {"ours": _ours} | peers.self_attention_peers(device, fa3, more, isinstance(cell, Lite))
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            calls[name] = maker(q, k, v, causal)
        except Unavailable as error:
            absent[name] = str(error)
    tiles = None
    if isinstance(cell, Lite):
        geometry = default_geometry(q)
        size = geometry.q_block, geometry.k_block
        tiles = tiles_to_keep(cell, *size, device)
        calls["ours, lite"] = _ours_lite(q, k, v, tiles)
        for name, tile_maker in peers.TILE_PEERS.items() if device.type == "cuda" else ():
            try:
                calls[name] = tile_maker(q, k, v, tiles, size)
            except Unavailable as error:
                absent[name] = str(error)

    def difference(name: str, out: torch.Tensor) -> float:
        kept = tiles if name == "ours, lite" or name in peers.TILE_PEERS else None
        blocks = (1, 1) if tiles is None else size
        return _error(q, k, v, out, causal, kept, blocks)

    return Job(calls, absent, difference)


def tiles_to_keep(
    cell: Lite, q_block: int, k_block: int, device: torch.device | None = None, seed: int = 1
) -> torch.Tensor:
    """Tiles to keep, bool [B, H, q_blocks, K_blocks], ``sparsity`` of them not.

    uniform: each by itself. clustered: those nearest to the diagonal or to one of four columns of
    the head, between 0.5 and 1.5 times as many in some q blocks as in others.
    """
    q_blocks, k_blocks = -(-cell.length // q_block), -(-cell.length // k_block)
    shape = (cell.batch, cell.heads, q_blocks, k_blocks)
    # Drawn on the CPU: every device gets the same tiles.
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(shape, generator=generator).to(device)
    keep = round((1 - cell.sparsity) * k_blocks)
    counts = torch.full(shape[:3], keep, device=device)
    if cell.pattern == "clustered":
        row = torch.linspace(0, 1, q_blocks, device=device)[:, None, None]
        column = torch.linspace(0, 1, k_blocks, device=device)[None, :, None]
        centres = (
            torch.rand(*shape[:2], 1, 1, 4, generator=generator)
            .to(device)
            .expand(-1, -1, q_blocks, 1, 4)
        )
        diagonal = row.expand(*shape[:2], q_blocks, 1, 1)
        distance = (column - torch.cat([centres, diagonal], -1)).abs().amin(-1)
        score = distance + 1e-6 * score
        swing = (
            0.5
            * _room(keep, k_blocks)
            * torch.sin(torch.linspace(0, 12.0, q_blocks, device=device))
        )
        counts = keep * (1 + swing)
        counts = counts.round().long().clamp(1, k_blocks).expand(shape[:3])
    rank = score.argsort(-1).argsort(-1)
    return rank < counts[..., None]


def _room(keep: int, k_blocks: int) -> float:
    """Share of a swing by half that fits below all K blocks."""
    return min(1.0, (k_blocks - keep) / max(1.0, 0.5 * keep))


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    def call() -> torch.Tensor:
        out = attention(q, k, v, layout="bhsd", causal=causal)
        assert isinstance(out, torch.Tensor)
        return out

    return call


def _ours_lite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor) -> Call:
    read = skiplist.pack(tiles)
    write = torch.empty_like(read)

    def call() -> torch.Tensor:
        out = lite_attention(q, k, v, read, write, threshold=NOTHING_SKIPPED, layout="bhsd")
        assert isinstance(out, torch.Tensor)
        return out

    return call


def _error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    tiles: torch.Tensor | None,
    size: tuple[int, int],
) -> float:
    """Norm of the difference to float64 over the norm, on rows spread over the sequence."""
    length = q.shape[2]
    rows = torch.linspace(0, length - 1, min(_SAMPLED_ROWS, length), device=q.device).long()
    group = q.shape[1] // k.shape[1]
    difference = norm = 0.0
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        scores = q[b, h, rows].double() @ k[b, h // group].double().mT / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.arange(length, device=q.device)[None] > rows[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        if tiles is not None:
            kept = tiles[b, h, rows // size[0]].repeat_interleave(size[1], dim=-1)[:, :length]
            scores = scores.masked_fill(~kept, -math.inf)
        expected = torch.softmax(scores, dim=-1) @ v[b, h // group].double()
        difference += float((out[b, h, rows].double() - expected).square().sum())
        norm += float(expected.square().sum())
    return math.sqrt(difference / norm)


# ------------------------------------------------------------------------------------- host


def _host(cell: Host, device: torch.device) -> Job:
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device)
        .to(_DTYPES[cell.dtype])
        .transpose(1, 2)
        for _ in range(3)
    )
    tile = default_geometry(q)
    blocks = tile.q_blocks(cell.length), tile.k_blocks(cell.length)
    tiles = torch.ones(cell.batch, cell.heads, *blocks, dtype=torch.bool, device=device)
    calls = {
        "ours": _ours(q, k, v, False),
        "ours, lite": _ours_lite(q, k, v, tiles),
        "SDPA": peers.sdpa(None)(q, k, v, False),
    }
    return Job(calls, {}, lambda name, out: _error(q, k, v, out, False, None, (1, 1)))


# --------------------------------------------------------------------------------- decoding


def _decode(cell: Decode, device: torch.device, library: Path | None) -> Job:
    generator = torch.Generator(device=device).manual_seed(cell.context)
    pages = -(-cell.context // cell.page_size)
    dtype = _DTYPES[cell.dtype]
    shape = (cell.requests * pages, 2, cell.page_size, cell.kv_heads, cell.head_dim)
    cache = torch.empty(shape, dtype=dtype, device=device)
    for begin in range(0, len(cache), 4096):
        part = cache[begin : begin + 4096]
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    table = torch.randperm(len(cache), generator=generator, device=device).int()
    table = table.view(cell.requests, pages)
    q = torch.randn(
        cell.requests, cell.q_heads, cell.head_dim, generator=generator, device=device
    ).to(dtype)
    starts = torch.arange(cell.requests + 1, device=device, dtype=torch.int32)
    lengths = torch.full((cell.requests,), cell.context, device=device, dtype=torch.int32)
    batch = PagedBatch(starts, lengths, table, max_q_len=1, max_kv_len=cell.context)

    def ours() -> torch.Tensor:
        out = attention_paged(q, k_cache, v_cache, batch)
        assert isinstance(out, torch.Tensor)
        return out

    calls: dict[str, Call] = {"ours": ours}
    absent: dict[str, str] = {}
    if device.type == "cuda":
        if library is None:
            absent["FA3"] = "no library was given (--fa3-library)"
        else:
            try:
                forward = peers.fa3_forward(library)
                calls["FA3"] = lambda: forward(
                    q, k_cache, v_cache, starts, None, 1, cell.context, lengths, table, True
                )
            except Unavailable as error:
                absent["FA3"] = str(error)
        half = cache.numel() // 2
        source, target = cache.view(-1)[:half], torch.empty(half, dtype=dtype, device=device)
        # reads and writes half of the cache: as many bytes as a step reads
        calls["device copy"] = lambda: target.copy_(source)

    def difference(name: str, out: torch.Tensor) -> float:
        if name == "device copy":
            return float((out != source).sum())
        squares = norm = 0.0
        group = cell.q_heads // cell.kv_heads
        for r in {0, cell.requests - 1}:
            keys, values = (
                x[table[r].long()].flatten(0, 1)[: cell.context].double().transpose(0, 1)
                for x in (k_cache, v_cache)
            )
            grouped = q[r].double().view(cell.kv_heads, group, cell.head_dim)
            scores = grouped @ keys.mT / math.sqrt(cell.head_dim)
            expected = (torch.softmax(scores, dim=-1) @ values).flatten(0, 1)
            squares += float((out[r].double() - expected).square().sum())
            norm += float(expected.square().sum())
        return math.sqrt(squares / norm)

    return Job(calls, absent, difference)


# ------------------------------------------------------------------------------ environment


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches in a large matrix product (TFLOP/s) and a large copy (TB/s).

    The product is in bf16, the copy counts bytes read and written.
    """

    tflops: float
    tbps: float


def ceilings(device: torch.device, rounds: int = 9) -> Ceilings:
    """Measure the two roofs of a roofline, medians, on random data."""
    size, numbers = (8192, 1 << 31) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    source = torch.empty(numbers, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def median(call: Callable[[], torch.Tensor]) -> float:
        call()
        return statistics.median(milliseconds(call, device, None) for _ in range(rounds))

    multiplied = median(lambda: torch.matmul(a, b, out=product))
    copied = median(lambda: target.copy_(source))
    return Ceilings(2.0 * size**3 / multiplied / 1e9, 2.0 * numbers / copied / 1e9)


def environment(device: torch.device) -> dict[str, str]:
    """Commit, versions, device and clocks that a table is stamped with."""
    found = {"commit": source_commit() or "unknown", "torch": str(torch.__version__)}
    for package in ("triton", "flash-attn", "flash-attn-4", "aiter", "spas-sage-attn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found |= _nvidia()
    return found


def _nvidia() -> dict[str, str]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = answer.stdout.splitlines()[0].split(",")
    return {name: value.strip() for name, value in zip(fields, values, strict=True)}
