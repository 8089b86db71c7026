"""What an attention engine is: the request it is asked for, and the two calls it answers.

An engine computes attention on one kind of device. It first says whether it can take a request
(:meth:`Engine.supports` returns every reason against, none means yes) and then runs it. Engines
never fall back to another engine; :mod:`liteattention_rocm.engines` picks one and says which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

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
    j <= i + Skv - Sq. ``scale`` multiplies q.k (natural units). ``rounding`` says how fp32
    results become bf16 outputs.
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
        are int32 [words] over K blocks or None. ``(read | must_do) & ~must_skip`` is computed.
        """


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor's data begins, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(tensor: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Return the element strides of (batch, sequence, head) of a tensor of 4 dimensions."""
    batch, second, third, _ = tensor.stride()
    return (batch, second, third) if layout == "bshd" else (batch, third, second)
