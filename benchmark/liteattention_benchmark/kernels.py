"""Attention kernels side by side: one process, the same tensors, in random turns.

A *cell* is a shape, a *contender* one implementation of it. Every round runs each contender of a
cell once, in a new random order, because a GPU at its power limit is slower right after a hungry
contender; times are of device events around the call alone, after the L2 cache was overwritten
(which also hides the launch: what is timed is the device). Each row carries the error of the timed
contender's own output against float64 on sampled query rows.

Contenders that are not installed or cannot run a cell are reported with the reason.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from liteattention_rocm import PagedBatch, attention, attention_paged, lite_attention, skiplist
from liteattention_rocm.ops import default_geometry

#: Low enough that no tile of random data is voted away, while voting does run.
NOTHING_SKIPPED = -64.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLED_ROWS = 64
#: Half a millisecond of writing on the fastest GPUs, time for any contender's launch.
_FLUSH_BYTES = 2 << 30


class Unavailable(Exception):
    """A contender that is not installed or cannot run a cell; says why."""


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


Cell = Dense | Lite | Decode


class Config(BaseModel):
    """What to measure: a YAML file."""

    model_config = ConfigDict(extra="forbid")

    rounds: int = Field(default=15, ge=3)
    warmup: int = Field(default=3, ge=1)
    cold_l2: bool = True
    dense: tuple[Dense, ...] = ()
    lite: tuple[Lite, ...] = ()
    decode: tuple[Decode, ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they are measured."""
        return (*self.dense, *self.lite, *self.decode)


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
    """One contender in one cell. ``figure``: TFLOP/s, or TB/s of a decode cell, or None if absent.

    Times in milliseconds. ``error``: norm of the difference to float64 over the norm, on sampled
    rows. ``absent``: why there is no time.
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

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-friendly dictionary."""
        return asdict(self)


@dataclass
class _Job:
    """Tensors of a cell, its contenders' calls and what they must give."""

    calls: dict[str, Callable[[], torch.Tensor]]
    absent: dict[str, str]
    error: Callable[[str, torch.Tensor], float]


Call = Callable[[], torch.Tensor]
Maker = Callable[..., Call]


def run(
    config: Config,
    device: torch.device,
    fa3_library: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure every cell and return a row per contender.

    ``fa3_library``: the FlashAttention-3 library of a vLLM wheel, where the package
    ``flash_attn_interface`` is not installed.
    """
    rows: list[Row] = []
    import torch._dynamo  # FlexAttention compiles anew for every shape, and there may be many

    with torch._dynamo.config.patch(recompile_limit=1 << 10):
        for cell in config.cells:
            progress(str(cell))
            if isinstance(cell, Decode):
                job = _decode(cell, device, fa3_library)
            else:
                job = _self_attention(cell, device, fa3_library)
            rows += _measure(cell, job, config, device)
            del job
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def _measure(cell: Cell, job: _Job, config: Config, device: torch.device) -> list[Row]:
    """Time the calls of a cell in random turns."""
    kind = type(cell).__name__.lower()
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
    flush = flush_buffer(device) if config.cold_l2 else None
    times: dict[str, list[float]] = {name: [] for name in job.calls}
    turns = random.Random(0)
    for _ in range(config.rounds):
        order = list(job.calls)
        turns.shuffle(order)
        for name in order:
            times[name].append(milliseconds(job.calls[name], device, flush))
    rows = []
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        work = cell.bytes if isinstance(cell, Decode) else cell.flops
        rows.append(
            Row(kind, str(cell), name, middle, low, high, work / middle / 1e9, errors[name], "")
        )
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


def _self_attention(cell: Dense | Lite, device: torch.device, fa3: Path | None) -> _Job:
    generator = torch.Generator(device=device).manual_seed(cell.length + cell.head_dim)
    kv_heads = (cell.kv_heads if isinstance(cell, Dense) else None) or cell.heads

    def normal(heads: int) -> torch.Tensor:
        shape = (cell.batch, cell.length, heads, cell.head_dim)
        numbers = torch.randn(shape, generator=generator, device=device)
        # [B, H, S, D] as a model has it after its projections: rows of all heads side by side
        return numbers.to(_DTYPES[cell.dtype]).transpose(1, 2)

    q, k, v = normal(cell.heads), normal(kv_heads), normal(kv_heads)
    causal = isinstance(cell, Dense) and cell.causal
    makers: dict[str, Maker] = {
        "ours": _ours,
        "cuDNN (SDPA)": _sdpa("CUDNN_ATTENTION"),
        "FA2 (SDPA)": _sdpa("FLASH_ATTENTION"),
        "efficient (SDPA)": _sdpa("EFFICIENT_ATTENTION"),
        "FlexAttention": _flex,
        "FA3": lambda q, k, v, causal: _fa3(q, k, v, causal, fa3),
        "flash-attn 2": _package("flash_attn", "flash_attn_func"),
        "AITER": _package("aiter", "flash_attn_func"),
    }
    if device.type != "cuda":
        makers = {"ours": _ours, "SDPA": _sdpa(None)}
    elif isinstance(cell, Lite):
        makers = {name: makers[name] for name in ("ours", "cuDNN (SDPA)", "FA3")}
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
        tiles = _tiles(cell, *size).to(device)
        calls["ours, lite"] = _ours_lite(q, k, v, tiles)
        if device.type == "cuda":
            try:
                calls["FlexAttention, BlockMask"] = _flex_blocks(q, k, v, tiles, size)
            except Unavailable as error:
                absent["FlexAttention, BlockMask"] = str(error)

    def difference(name: str, out: torch.Tensor) -> float:
        kept = tiles if name in ("ours, lite", "FlexAttention, BlockMask") else None
        blocks = (1, 1) if tiles is None else size
        return _error(q, k, v, out, causal, kept, blocks)

    return _Job(calls, absent, difference)


def _tiles(cell: Lite, q_block: int, k_block: int) -> torch.Tensor:
    """Tiles to keep, bool [B, H, q_blocks, K_blocks], ``sparsity`` of them not.

    uniform: each by itself. clustered: those nearest to the diagonal or to one of four columns of
    the head, between 0.5 and 1.5 times as many in some q blocks as in others.
    """
    q_blocks, k_blocks = -(-cell.length // q_block), -(-cell.length // k_block)
    shape = (cell.batch, cell.heads, q_blocks, k_blocks)
    generator = torch.Generator().manual_seed(1)
    score = torch.rand(shape, generator=generator)
    keep = round((1 - cell.sparsity) * k_blocks)
    counts = torch.full(shape[:3], keep)
    if cell.pattern == "clustered":
        row = torch.linspace(0, 1, q_blocks)[:, None, None]
        column = torch.linspace(0, 1, k_blocks)[None, :, None]
        centres = torch.rand(*shape[:2], 1, 1, 4, generator=generator).expand(
            -1, -1, q_blocks, 1, 4
        )
        diagonal = row.expand(*shape[:2], q_blocks, 1, 1)
        distance = (column - torch.cat([centres, diagonal], -1)).abs().amin(-1)
        score = distance + 1e-6 * score
        swing = 0.5 * _room(keep, k_blocks) * torch.sin(torch.linspace(0, 12.0, q_blocks))
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


def _sdpa(backend: str | None) -> Maker:
    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        function: Any = torch.nn.functional.scaled_dot_product_attention
        if backend is None:
            return lambda: function(q, k, v, is_causal=causal, **grouped)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)

        def call() -> torch.Tensor:
            with sdpa_kernel(chosen):
                return function(q, k, v, is_causal=causal, **grouped)  # type: ignore[no-any-return]

        return call

    return make


@functools.cache
def _compiled_flex() -> Any:
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return torch.compile(flex_attention, dynamic=False)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    flex = _compiled_flex()
    mask = None
    if causal:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=str(q.device))
    grouped = q.shape[1] != k.shape[1]
    return lambda: flex(q, k, v, block_mask=mask, enable_gqa=grouped)


def _flex_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: torch.Tensor,
    size: tuple[int, int],
) -> Call:
    flex = _compiled_flex()
    from torch.nn.attention.flex_attention import BlockMask

    counts = tiles.sum(-1).int()
    indices = (~tiles).int().argsort(dim=-1, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, BLOCK_SIZE=size,
        seq_lengths=(q.shape[2], k.shape[2]),
    )  # fmt: skip
    return lambda: flex(q, k, v, block_mask=mask)


def _package(module: str, function: str) -> Maker:
    """A function of (q, k, v, causal=) on [B, S, H, D]."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, OSError, AttributeError) as error:
            raise Unavailable(f"package {module} is not installed") from error
        x, y, z = (t.transpose(1, 2) for t in (q, k, v))

        def call() -> torch.Tensor:
            out = found(x, y, z, causal=causal)
            out = out[0] if isinstance(out, tuple) else out
            return out.transpose(1, 2)  # type: ignore[no-any-return]

        return call

    return make


def _fa3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, library: Path | None
) -> Call:
    if library is None:
        return _package("flash_attn_interface", "flash_attn_func")(q, k, v, causal)
    forward = _fa3_forward(library)
    batch, length = q.shape[0], q.shape[2]
    x, y, z = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length

    def call() -> torch.Tensor:
        out = forward(x, y, z, starts, starts, length, length, None, None, causal)
        return out.view(batch, length, *out.shape[1:]).transpose(1, 2)

    return call


def _fa3_forward(library: Path) -> Callable[..., torch.Tensor]:
    """The library's forward operator with what this benchmark uses of it."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        operator = torch.ops._vllm_fa3_C.fwd.default
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{library} has no FlashAttention-3: {error}") from error
    names = [argument.name for argument in operator._schema.arguments]

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_start: torch.Tensor,
        k_start: torch.Tensor | None,
        q_len: int,
        k_len: int,
        used: torch.Tensor | None,
        table: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        given = {
            "q": q, "k": k, "v": v, "cu_seqlens_q": q_start, "cu_seqlens_k": k_start,
            "max_seqlen_q": q_len, "max_seqlen_k": k_len, "seqused_k": used, "page_table": table,
            "softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "window_size_left": -1,
            "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
            "num_splits": 0 if table is not None else 1, "sm_margin": 0, "cp_world_size": 1,
            "cp_rank": 0,
        }  # fmt: skip
        return operator(  # type: ignore[no-any-return]
            **{
                name: given.get(name)
                for name, argument in zip(names, operator._schema.arguments, strict=True)
                if name in given or not argument.has_default_value()
            }
        )[0]

    return forward


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


# --------------------------------------------------------------------------------- decoding


def _decode(cell: Decode, device: torch.device, library: Path | None) -> _Job:
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
                forward = _fa3_forward(library)
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

    return _Job(calls, absent, difference)


# ------------------------------------------------------------------------------ environment


def environment(device: torch.device) -> dict[str, str]:
    """Versions, device and clocks that a table is stamped with."""
    found = {"torch": str(torch.__version__)}
    for package in ("triton", "flash-attn", "aiter"):
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
