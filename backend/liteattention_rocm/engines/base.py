"""What an attention engine is: the request it is asked for, and the two calls it answers.

An engine computes attention on one kind of device. It first says whether it can take a request
(:meth:`Engine.supports` returns every reason against, none means yes) and then runs it. Engines
never fall back to another engine; :mod:`liteattention_rocm.engines` picks one and says which.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Layout = Literal["bshd", "bhsd"]
Rounding = Literal["rtne", "rtna", "rtz"]

LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd")
ROUNDINGS: tuple[Rounding, ...] = ("rtne", "rtna", "rtz")


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


#: The tile of the MI300X kernel: 8 waves of 48 rows each, K blocks of 64 keys.
MI300X_GEOMETRY = TileGeometry(q_block=384, k_block=64, vote_rows=48)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One dense attention request, without its tensors.

    Sizes: ``batch`` B, ``q_heads`` Hq, ``kv_heads`` Hkv (Hq % Hkv == 0), ``q_len`` Sq,
    ``kv_len`` Skv, ``head_dim`` D. ``causal`` is bottom-right aligned: query i sees the keys
    j <= i + Skv - Sq. ``scale`` multiplies q.k (natural units; :func:`scale_reasons`).
    ``rounding`` says how fp32 results become bf16 outputs.
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


@dataclass(frozen=True, slots=True)
class LiteSpec:
    """What LiteAttention adds to a dense request.

    ``threshold`` is in log2 units, <= 0; ``-inf`` keeps every tile. ``descending`` walks the kept
    K blocks from the last to the first. ``soft_skip`` drops a negligible tile's contribution in
    the very step that finds it.
    """

    geometry: TileGeometry
    threshold: float
    descending: bool
    soft_skip: bool


@dataclass(frozen=True, slots=True)
class RaggedSpec:
    """One call over a *ragged* batch, requests of different lengths, without its tensors.

    ``requests`` R, ``rows`` T (query rows of all requests together), ``q_heads`` Hq, ``kv_heads``
    Hkv, ``head_dim`` D. ``page_size`` is the number of tokens in a page of the KV cache, 0 when
    keys and values are packed like the queries. ``max_q_len`` and ``max_kv_len`` bound the lengths
    of every request (the host must not wait for the device to learn them).

    Row i of a request with q_len rows and kv_len keys stands at position kv_len - q_len + i.
    ``causal``: it sees the keys j <= position. ``window`` w > 0: only those with
    j > position - w; 0 is no window (a window without ``causal`` bounds the past alone).
    ``scale`` and ``soft_cap`` c are in natural units: score = scale * q.k, then
    c * tanh(score / c) if c > 0. With ``sinks``, head h has one more logit sinks[h] (natural units)
    in the denominator, which brings no value. ``k_scale`` and ``v_scale`` multiply what is read
    from an fp8 cache (``kv_dtype``); otherwise they are 1. :func:`number_reasons` bounds all of
    them. ``rounding`` is for bf16 outputs.
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
    causal: bool
    window: int
    soft_cap: float
    sinks: bool
    k_scale: float
    v_scale: float
    rounding: Rounding
    return_lse: bool


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where the rows and keys of a ragged batch lie; int32 tensors on the device, shared by layers.

    ``q_start`` [R + 1]: rows q_start[r] to q_start[r + 1] are request r's. Paged: ``kv_len`` [R]
    counts the keys of each request, its new tokens included, and ``page_table`` [R, width] (any
    row stride) names their pages in order. Packed: ``kv_start`` [R + 1], like ``q_start``. A
    request may have no rows, and then it costs nothing.
    """

    q_start: torch.Tensor
    kv_len: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    kv_start: torch.Tensor | None = None


#: :meth:`Engine.attention` after its spec: (q, k, v, out, lse).
BoundAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
]
#: :meth:`Engine.attention_ragged` after its plan: (q, k, v, out, lse, sinks).
BoundRagged = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
    ],
    None,
]
#: :meth:`Engine.write_kv` before its scales: (k, v, k_cache, v_cache, slots).
BoundWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
#: :meth:`Engine.lite_attention` after its specs: (q, k, v, out, lse, read, write, must_do,
#: must_skip).
BoundLite = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
    ],
    None,
]


#: Factors in use lie within these powers of two. Products and quotients of two of them, and log2(e)
#: on top, are normal fp32 numbers then, and scores of up to 2^67 do not overflow when scaled.
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-60, 2.0**60


def factor_reasons(name: str, value: float) -> list[str]:
    """Say whether a factor (a scale or soft cap) is too small or too large for fp32 arithmetic."""
    if _LEAST_FACTOR <= abs(value) <= _MOST_FACTOR:
        return []
    return [f"{name} must be from 2^-60 to 2^60 (8.7e-19 to 1.2e18) in size, got {value}"]


def scale_reasons(scale: float, k_scale: float = 1.0) -> list[str]:
    """Say what is wrong with the factor of q.k, ``scale * k_scale``, which may also be 0."""
    if scale == 0 and math.isfinite(k_scale):
        return []
    name = "scale" if k_scale == 1 else "scale * k_scale"
    return factor_reasons(name, scale * k_scale)


def soft_cap_reasons(soft_cap: float) -> list[str]:
    """Say what is wrong with a soft cap; 0 is none."""
    if soft_cap == 0:
        return []
    if soft_cap < 0:
        return [f"soft_cap must be positive, got {soft_cap}: None is no cap"]
    return [reason + ": None is no cap" for reason in factor_reasons("soft_cap", soft_cap)]


def number_reasons(spec: AttentionSpec | RaggedSpec) -> list[str]:
    """Say which numbers of a request no engine can compute with."""
    if isinstance(spec, AttentionSpec):
        return scale_reasons(spec.scale)
    return [
        *scale_reasons(spec.scale, spec.k_scale),
        *factor_reasons("v_scale", spec.v_scale),
        *soft_cap_reasons(spec.soft_cap),
    ]


class Engine(ABC):
    """One way to compute attention. Stateless: everything a call needs is in its arguments."""

    #: Name used by ``engine=`` and ``LITEATTENTION_ENGINE``.
    name: str

    @property
    def emulated(self) -> bool:
        """Whether it runs a GPU's machine code in software: its seconds are no GPU's then."""
        return False

    def unavailable(self, device: torch.device) -> list[str]:
        """Return every reason why it cannot run on ``device`` at all, whatever the request.

        They are among those of :meth:`supports`. This default is for engines of CPU tensors.
        """
        if device.type == "cpu":
            return []
        return [f"it runs on cpu tensors, got {device}: call .cpu() first"]

    @abstractmethod
    def supports(self, spec: AttentionSpec, lite: LiteSpec | None = None) -> list[str]:
        """Return every reason why this engine cannot run the request; none means it can."""

    @abstractmethod
    def geometry(self, head_dim: int) -> TileGeometry:
        """Return the tile geometry this engine prefers for a head dimension."""

    @abstractmethod
    def attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write attention into ``out`` (q's shape) and, if given, ``lse`` (fp32 [B,Hq,Sq])."""

    @abstractmethod
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
        """Compute the tiles set in ``read`` and write the next step's bitmap into ``write``.

        Bitmaps are int32 tensors holding uint32 bit patterns, [B, Hq, q_blocks, words]; the masks
        are int32 [words] over K blocks or None. ``(read | must_do) & ~must_skip`` is computed. Bits
        at and past the last K block are ignored in all of them and 0 in ``write``.
        """

    def bind_attention(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> BoundAttention | None:
        """Return what runs a supported request again and again, at less cost for the host.

        It holds for tensors with the sizes, strides, dtype and device of those given here and, like
        them, aligned to 16 bytes or not; it keeps none of them. None, the default, where what the
        engine supports may change while the process runs, or a call costs the host next to nothing.
        """
        return None

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
    ) -> BoundLite | None:
        """Return what runs a LiteAttention step, as :meth:`bind_attention` does a dense request."""
        return None

    def ragged_reasons(self, spec: RaggedSpec) -> list[str]:
        """Return every reason why this engine cannot run a ragged call; none means it can."""
        return [*self.unavailable(spec.device), "it has no kernels for ragged batches"]

    def plan_ragged(self, spec: RaggedSpec, batch: RaggedBatch) -> Any:
        """Decide once what all layers of a step share: splits, order of work, workspace.

        A plan holds for calls of this spec and batch, one at a time (it may own a workspace). It
        must not wait for the device: on a GPU it rests on the spec's bounds alone.
        """
        raise NotImplementedError(f"engine {self.name!r} has no kernels for ragged batches")

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
        """Write attention of every row into ``out`` [T, Hq, D] and ``lse`` (fp32 [Hq, T], natural).

        ``q`` is [T, Hq, D]; ``k`` and ``v`` are [pages, page_size, Hkv, D] when paged and
        [keys, Hkv, D] when packed; all strides free but a contiguous last dimension. ``sinks`` is
        fp32 [Hq]. A row that sees no key gives zeros and an LSE of -inf (with sinks: sinks[h]).
        """
        raise NotImplementedError(f"engine {self.name!r} has no kernels for ragged batches")

    def bind_ragged(
        self,
        spec: RaggedSpec,
        batch: RaggedBatch,
        plan: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> BoundRagged:
        """Return what runs the plan for every layer whose tensors are like these.

        Like them in sizes, strides, dtype and device; none of them is kept.
        """
        return functools.partial(self.attention_ragged, spec, batch, plan)

    def write_reasons(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Return every reason why :meth:`write_kv` cannot run; none means it can.

        This default is for engines that copy rows as they are.
        """
        reasons = self.unavailable(device)
        if cache_dtype != dtype:
            reasons.append(f"it writes no {cache_dtype} cache from {dtype} rows")
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
        """Copy rows [T, Hkv, D] into a paged cache at ``slots`` (page * page_size + offset).

        ``slots`` is int64 or int32 [T]; a negative slot is a padding row and is not written. An
        fp8 cache holds row / scale, rounded to nearest even and clamped to the finite range; the
        scales are 1 otherwise. An engine of CPU tensors refuses a slot beyond the cache with a
        ``ValueError`` before it writes anything.
        """
        raise NotImplementedError(f"engine {self.name!r} has no kernels for ragged batches")

    def bind_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> BoundWrite:
        """Return what writes tensors of these sizes, strides, dtypes and device; keeps none."""
        return functools.partial(self.write_kv, k_scale=k_scale, v_scale=v_scale)


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor's data begins, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Return the element strides of (batch, sequence, head) of a tensor of 4 dimensions."""
    batch, second, third, _ = tensor.stride()
    return (batch, second, third) if layout == "bshd" else (batch, third, second)
