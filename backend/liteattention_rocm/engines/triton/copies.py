"""Copies of some heads of a tensor to or from the memory of another GPU, by few programs.

A copy between GPUs waits for the link. PyTorch's copies start as many programs as there is room
for, and whatever else is to run on the GPU waits until theirs are through: on two H100s,
element-wise kernels of 683 us and 84 MB for the other GPU (233 us) beside them took 907 us. With
32 programs that keep as many bytes under way it takes 752 us, and the copy alone 248.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Kernel, alignments, kind

#: Rows of one head that a program copies at a time, by 1,024 threads.
_ROWS = 128
_WARPS = 32
#: Programs of all copies that share a link.
PROGRAMS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    target, source, index, first, batch, rows, heads, t_batch, t_rows, t_heads, s_batch, s_rows,
    s_heads, INDEXED: tl.constexpr, INTO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Blocks of ``ROWS`` rows of a head, one after the other, a grid apart."""
    blocks = tl.cdiv(rows, ROWS)
    word = tl.arange(0, PADDED)[None, :]
    for item in range(tl.program_id(0), batch * blocks * heads, tl.num_programs(0)):
        place = item % heads
        row = item // heads % blocks * ROWS + tl.arange(0, ROWS)[:, None]
        lane = (item // heads // blocks).to(tl.int64)
        head = (first + place).to(tl.int64)
        if INDEXED:
            head = tl.load(index + place).to(tl.int64)
        to_head = head if INTO else place.to(tl.int64)
        from_head = place.to(tl.int64) if INTO else head
        inside = (row < rows) & (word < WIDTH)
        at = row.to(tl.int64)
        words = tl.load(
            source + lane * s_batch + from_head * s_heads + at * s_rows + word, mask=inside
        )
        tl.store(
            target + lane * t_batch + to_head * t_heads + at * t_rows + word, words, mask=inside
        )


_COPY = Kernel(_copy)


def copy(
    target: torch.Tensor,
    source: torch.Tensor,
    heads: slice | torch.Tensor,
    *,
    into: bool,
    programs: int,
) -> None:
    """Copy ``source[:, :, heads]`` to ``target`` or, ``into``, all of it to those heads of it.

    Both [B, S, H, D] of one dtype, D contiguous; ``heads`` a run of them or an integer tensor on
    their device, which names none twice. Launched on the current stream.
    """
    assert target.stride(-1) == source.stride(-1) == 1, "the kernel counts on it"
    batch, rows, room, width = (source if into else target).shape
    # Without an index any pointer stands in for it.
    index, first = (heads, 0) if isinstance(heads, torch.Tensor) else (target, heads.start)
    sizes = [first, batch, rows, room, *target.stride()[:3], *source.stride()[:3]]
    _COPY(
        (programs,),
        [target, source, index, *sizes],
        (index is heads, into, _ROWS, width, triton.next_power_of_2(width)),
        (("num_warps", _WARPS),),
        (
            target.dtype, index.dtype, alignments(target, source, index), tuple(map(kind, sizes)),
        ),
    )  # fmt: skip
