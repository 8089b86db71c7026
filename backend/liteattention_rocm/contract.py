"""The contract between the calls that users make and the engines that compute them.

A call becomes a *request*, everything about it but its tensors (:class:`DenseRequest`,
:class:`LiteRequest`, :class:`RaggedRequest`, :class:`WriteRequest`), and a tuple of *tensors* of
the matching kind. An :class:`Engine` says every reason why it cannot take a request and binds
those that it can: :meth:`Engine.bind` plans, and returns what launches. Engines never fall back to
another engine; :mod:`liteattention_rocm.engines` picks one and says which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch

Layout = Literal["bshd", "bhsd"]
Rounding = Literal["rtne", "rtna", "rtz"]

LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd")
ROUNDINGS: tuple[Rounding, ...] = ("rtne", "rtna", "rtz")

#: Kernels compute 2^x: natural units times this are log2 units.
LOG2E = 1.4426950408889634

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """Size of the tiles that skip bitmaps speak of.

    A *tile* is one q block of ``q_block`` rows against one K block of ``k_block`` keys.
    ``vote_rows`` is the number of rows that vote together when ``soft_skip`` drops a tile in the
    step that finds it negligible; it divides ``q_block``.
    """

    q_block: int
    k_block: int
    vote_rows: int

    def __post_init__(self) -> None:
        reasons = [
            f"{name} must be a positive integer, got {value!r}"
            for name, value in (
                ("q_block", self.q_block),
                ("k_block", self.k_block),
                ("vote_rows", self.vote_rows),
            )
            if not isinstance(value, int) or value < 1
        ]
        if not reasons and self.q_block % self.vote_rows:
            reasons.append(f"vote_rows {self.vote_rows} must divide q_block {self.q_block}")
        if reasons:
            raise ValueError("invalid tile geometry: " + "; ".join(reasons))

    def q_blocks(self, q_len: int) -> int:
        """Number of q blocks over ``q_len`` query rows."""
        return -(-q_len // self.q_block)

    def k_blocks(self, kv_len: int) -> int:
        """Number of K blocks over ``kv_len`` keys."""
        return -(-kv_len // self.k_block)

    def words(self, kv_len: int) -> int:
        """Number of 32-bit words in one bitmap row over ``kv_len`` keys."""
        return -(-self.k_blocks(kv_len) // 32)


#: The tile of the MI300X kernel: 8 waves of 32 rows each, K blocks of 64 keys.
MI300X_GEOMETRY = TileGeometry(q_block=256, k_block=64, vote_rows=32)


# ------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class DenseRequest:
    """A dense attention call without its tensors.

    Sizes: ``batch`` B, ``q_heads`` Hq, ``kv_heads`` Hkv (Hq % Hkv == 0), ``q_len`` Sq,
    ``kv_len`` Skv, ``head_dim`` D. ``causal`` is bottom-right aligned: query i sees the keys
    j <= i + Skv - Sq. ``scale`` multiplies q.k (natural units); it is 0 or from 2^-60 to 2^60 in
    size. ``rounding`` says how fp32 results become bf16 outputs. ``value_dim`` is the head dim of
    values and outputs where it is another than D, else None.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    scale: float
    causal: bool
    rounding: Rounding
    return_lse: bool
    value_dim: int | None = field(default=None, kw_only=True)

    @property
    def empty(self) -> bool:
        """Whether there is no row, or no key for one: no engine has to run."""
        return 0 in (self.batch, self.q_heads, self.q_len, self.kv_len)


@dataclass(frozen=True, slots=True)
class LiteRequest(DenseRequest):
    """A LiteAttention step without its tensors: a dense call that is not causal, and skipping.

    ``threshold`` is in log2 units, <= 0; ``-inf`` keeps every tile. ``descending`` walks the kept
    K blocks from the last to the first. ``soft_skip`` drops a negligible tile's contribution in
    the very step that finds it. ``budget`` is a share of softmax mass, 0 <= budget < 1; if it is
    not 0, tiles are weighed instead of voted on (:mod:`liteattention_rocm.lite.budget`), the
    threshold is ``-inf`` and ``soft_skip`` False. Where heads have budgets of their own
    (``LiteTensors.limits``), it is the largest that any head of the model has.
    """

    geometry: TileGeometry
    threshold: float
    descending: bool
    soft_skip: bool
    budget: float = 0.0

    @property
    def drops(self) -> bool:
        """Whether a tile may be dropped at all."""
        return self.threshold > float("-inf") or self.budget > 0

    @property
    def walks_down(self) -> bool:
        """Whether the walk descends. Where no tile may be dropped it walks as dense calls do."""
        return self.descending and self.drops


@dataclass(frozen=True, slots=True)
class RaggedRequest:
    """A call over a *ragged* batch, requests of different lengths, without its tensors.

    ``requests`` R, ``rows`` T (query rows of all requests together), ``q_heads`` Hq, ``kv_heads``
    Hkv, ``head_dim`` D. ``page_size`` is the number of tokens in a page of the KV cache, 0 when
    keys and values are packed like the queries. ``max_q_len`` and ``max_kv_len`` bound the lengths
    of every request (the host must not wait for the device to learn them).

    Row i of a request with q_len rows and kv_len keys stands at position kv_len - q_len + i.
    It sees the keys j <= position + ``lookahead``: 0 is causal attention, None are all keys. (A
    lookahead that hides no key of any request is None, unless it is 0.) ``window`` w > 0: only
    those with j > position - w; 0 is no window.
    ``scale`` and ``soft_cap`` c are in natural units: score = scale * q.k, then
    c * tanh(score / c) if c > 0. With ``sinks``, head h has one more logit sinks[h] (natural units)
    in the denominator, which brings no value. ``k_scale`` and ``v_scale`` multiply what is read
    from an fp8 cache (``kv_dtype``); otherwise they are 1. scale * k_scale, v_scale and soft_cap
    are 0 or from 2^-60 to 2^60 in size. ``rounding`` is for bf16 outputs. With ``scale_tensors``
    the factors of the cache are tensors, read at every launch, and the numbers here are 1.
    ``value_dim``: as in :class:`DenseRequest`, of packed values only.
    """

    requests: int
    rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    page_size: int
    max_q_len: int
    max_kv_len: int
    scale: float
    lookahead: int | None
    window: int
    soft_cap: float
    sinks: bool
    k_scale: float
    v_scale: float
    rounding: Rounding
    return_lse: bool
    scale_tensors: bool = False
    value_dim: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A copy of ``rows`` new keys and values, [rows, Hkv, D], into a paged cache.

    The cache has ``pages`` pages of ``page_size`` tokens. One of fp8 (``kv_dtype``) holds
    row / scale, rounded to nearest even and clamped to the finite range; the scales are 1
    otherwise. ``scale_tensors``: as in :class:`RaggedRequest`.
    """

    rows: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    pages: int
    page_size: int
    k_scale: float
    v_scale: float
    scale_tensors: bool = False


Request = DenseRequest | RaggedRequest | WriteRequest


# -------------------------------------------------------------------------------- tensors


class DenseTensors(NamedTuple):
    """Tensors of a dense call: [B, S, H, D] or [B, H, S, D] by the layout; lse fp32 [B, Hq, Sq].

    ``v`` and ``out`` have the request's ``value_dim``, if it has one. A row that sees no key gives
    zeros and an LSE (natural log) of -inf.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None


class LiteTensors(NamedTuple):
    """Tensors of a LiteAttention step: those of a dense call, and bitmaps.

    ``read`` and ``write`` are int32 tensors that hold uint32 bit patterns, contiguous
    [B, Hq, q_blocks, words]; the masks int32 [words] over K blocks, or None. The tiles
    ``(read | must_do) & ~must_skip`` are computed. Bits past the last K block mean nothing where
    they are read and are 0 where they are written. ``mass`` is fp32, contiguous
    [B, Hq, q_blocks, K_blocks], or None; only a step with a budget writes it. ``tally`` is int64
    [2] or None; an engine that :attr:`Engine.tallies` writes the numbers of tiles computed and of
    tiles in ``write``. ``limits`` is int32, contiguous [Hq], or None: what the weights dropped in a
    q block of each head add up to at most, in place of the request's budget
    (:mod:`liteattention_rocm.lite.budget`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    read: torch.Tensor
    write: torch.Tensor
    must_do: torch.Tensor | None
    must_skip: torch.Tensor | None
    mass: torch.Tensor | None = None
    tally: torch.Tensor | None = None
    limits: torch.Tensor | None = None


class RaggedTensors(NamedTuple):
    """Tensors of a ragged call.

    ``q`` and ``out`` are [T, Hq, D]; ``k`` and ``v`` [pages, page_size, Hkv, D] when paged and
    [keys, Hkv, D] when packed; all strides free but a contiguous last dimension. ``lse`` is fp32
    [Hq, T] (natural log), ``sinks`` fp32 [Hq].

    int32, on the device: ``q_start`` [R + 1], rows q_start[r] to q_start[r + 1] are request r's.
    Paged: ``keys`` [R] counts the keys of each request, this step's included, and ``page_table``
    [R, width] (any row stride) names their pages in order. Packed: ``keys`` is [R + 1], like
    ``q_start``. A request may have no rows, and then it costs nothing. A row that sees no key
    gives zeros and an LSE of -inf (with sinks: sinks[h]).

    ``k_scale`` and ``v_scale``: fp32 of one element each, on the device; None where the request has
    numbers.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    q_start: torch.Tensor
    keys: torch.Tensor
    page_table: torch.Tensor | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class WriteTensors(NamedTuple):
    """Tensors of a cache write.

    ``k`` and ``v`` are rows [T, Hkv, D], the caches [pages, page_size, Hkv, D]; ``slots`` is int64
    or int32 [T] (page * page_size + offset). A negative slot is padding: its row is not written.
    ``k_scale`` and ``v_scale``: as in :class:`RaggedTensors`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


# From a tuple. A NamedTuple's own constructor is a Python function, which a short call feels.
dense_tensors: Callable[[tuple[Any, ...]], DenseTensors] = partial(tuple.__new__, DenseTensors)
lite_tensors: Callable[[tuple[Any, ...]], LiteTensors] = partial(tuple.__new__, LiteTensors)
ragged_tensors: Callable[[tuple[Any, ...]], RaggedTensors] = partial(tuple.__new__, RaggedTensors)
write_tensors: Callable[[tuple[Any, ...]], WriteTensors] = partial(tuple.__new__, WriteTensors)


#: What :meth:`Engine.bind` returns. Takes tensors of the request's kind.
Bound = Callable[[Any], None]


# -------------------------------------------------------------------------------- engines


class Engine(ABC):
    """One way to compute attention. Holds nothing of a request: a bound call does."""

    #: Name used by ``engine=`` and ``LITEATTENTION_ENGINE``.
    name: ClassVar[str]
    #: What queries and outputs may be, in words and as dtypes.
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    #: fp8 types of the caches that it reads and writes.
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    #: Whether a bound ragged call rests on the request alone and reads lengths and tables whenever
    #: it runs. It then serves every batch of these bounds, a graph's replays included.
    plans_from_bounds: ClassVar[bool] = False
    #: Whether it can weigh tiles, as a budget of softmax mass needs.
    weighs: ClassVar[bool] = False
    #: Whether values may have another head dim than keys.
    values_apart: ClassVar[bool] = False
    #: Whether a LiteAttention step counts the tiles that it computes and keeps.
    tallies: ClassVar[bool] = False

    @property
    def emulated(self) -> bool:
        """Whether it runs a GPU's machine code in software: its seconds are no GPU's then."""
        return False

    @property
    def described(self) -> str:
        """Its name as logs give it, with the code path that calls take if it has several."""
        return self.name

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device`` at all, whatever the request.

        They are among those of :meth:`reasons`. This default is for engines of CPU tensors.
        """
        if device.type == "cpu":
            return []
        return [f"it runs on cpu tensors, got {device}: call .cpu() first"]

    def reasons(self, request: Request) -> list[str]:
        """Return every reason why this engine cannot run the request; none means it can.

        What no engine can run is not asked here: see :mod:`liteattention_rocm.validation`.
        """
        reasons = self.unavailable(request.device)
        if request.dtype not in self.dtypes:
            names = [_DTYPE_NAMES[dtype] for dtype in self.dtypes]
            listed = f"{', '.join(names[:-1])} or {names[-1]}"
            reasons.append(f"dtype must be {listed}, got {request.dtype}")
        if isinstance(request, WriteRequest | RaggedRequest):
            if request.kv_dtype not in (request.dtype, *self.cache_dtypes):
                listed = " or ".join(map(str, (request.dtype, *self.cache_dtypes)))
                reasons.append(f"the cache must be {listed}, got {request.kv_dtype}")
        elif isinstance(request, LiteRequest) and request.causal:
            reasons.append("LiteAttention is for non-causal self-attention")
        if isinstance(request, LiteRequest) and request.budget and not self.weighs:
            *others, last = map(repr, WEIGHING)
            reasons.append(
                "it cannot weigh tiles, so it has no budget of softmax mass: use a threshold, or "
                f"engine {', '.join(others)} or {last}"
            )
        if not isinstance(request, WriteRequest) and (
            request.rounding != "rtne" and request.dtype != torch.bfloat16
        ):
            reasons.append(f"rounding {request.rounding!r} is for bf16 outputs: use 'rtne'")
        if (
            not self.values_apart
            and not isinstance(request, WriteRequest)
            and request.value_dim is not None
        ):
            keys, values = request.head_dim, request.value_dim
            remedy = f"pad v with zeros to {keys} and take the output's first {values} columns"
            if values > keys:
                remedy = f"pad q and k with zeros to {values} and pass the scale of {keys}"
            reasons.append(f"values must have the keys' head dim {keys}, got {values}: {remedy}")
        if isinstance(request, DenseRequest) and request.empty:
            return reasons
        return reasons + self.limits(request)

    @abstractmethod
    def limits(self, request: Request) -> list[str]:
        """Return the reasons that are this engine's alone: sizes, tiles, ranges of numbers."""

    @abstractmethod
    def geometry(self, head_dim: int, rows: int | None = None) -> TileGeometry:
        """Return the tile geometry this engine prefers for a head dimension.

        ``rows``: query rows of the call, of all its heads and batch entries together. None: so many
        that more would be all the same.
        """

    @abstractmethod
    def bind(self, request: Request, like: Any) -> Bound:
        """Plan a request that :meth:`reasons` has nothing against; return what launches it.

        ``like`` are tensors of the request's kind. What is returned takes tensors with the sizes,
        strides, dtypes, device and alignment (address modulo 16) of those, keeps none of ``like``
        and may be called from several threads and streams and under graph capture.

        An engine that :attr:`plans_from_bounds` plans a ragged call from the bounds in the request
        alone, never waits, and reads the values in ``q_start``, ``keys`` and ``page_table`` at
        every launch: the call is for every batch of these bounds. Other engines plan from the
        values, for one batch. Every engine reads scales that are tensors at every launch.

        A bound call owns no workspace. Each thread has one per stream (and engine), the largest
        that a call of it has asked for so far, and keeps it for its life: for the main thread, that
        of the process. Calls captured in a graph have theirs in the graph's memory pool.

        A bound write on CPU tensors refuses a slot beyond the cache with a ``ValueError`` before
        it writes anything.
        """


#: Names of the engines that weigh tiles.
WEIGHING = ("cpu", "gfx942", "portable", "reference")

_DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


# ------------------------------------------------------------------------- for engines


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor's data begins, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Return the element strides of (batch, sequence, head) of a tensor of 4 dimensions."""
    batch, second, third, _ = tensor.stride()
    return (batch, second, third) if layout == "bshd" else (batch, third, second)


def page_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Element strides of (page, token or row, head); no page in a tensor of 3 dimensions."""
    steps = tensor.stride()
    return (steps[0], steps[1], steps[2]) if len(steps) == 4 else (0, steps[0], steps[1])


def read_scale(tensor: torch.Tensor | None, number: float) -> float:
    """The value of a scale on CPU: the tensor's where the request has tensors, else its number."""
    return number if tensor is None else float(tensor)


def slot_beyond(tensors: WriteTensors, request: WriteRequest) -> ValueError | None:
    """The error for the largest slot of a CPU tensor if it lies beyond the cache, else None."""
    if not request.rows:
        return None
    largest = int(tensors.slots.max())
    if largest < request.pages * request.page_size:
        return None
    return beyond(largest, request)


def beyond(slot: int, request: WriteRequest) -> ValueError:
    """The error for a slot that is beyond the cache."""
    return ValueError(
        f"slot {slot} lies beyond a cache of {request.pages} pages of {request.page_size} tokens"
    )
