"""Bit-exact model of how an fp32 result becomes a bf16 output.

bf16 is the upper half of an fp32 word, so every rounding mode is an integer operation on the
magnitude (the word without its sign bit): add a bias, drop 16 bits. A carry out of the mantissa
runs into the exponent, which is exactly what rounding up to the next binade, from the largest
subnormal to the smallest normal number, or from the largest finite number to infinity needs.

========  ==========================  =========================  ====================
mode      bias added to a magnitude   a tie (0x8000 dropped)     beyond the largest
========  ==========================  =========================  ====================
``rtne``  0x7FFF + lowest kept bit    to the even mantissa       infinity
``rtna``  0x8000                      away from zero             infinity
``rtz``   0                           towards zero               stays 0x7F7F, finite
========  ==========================  =========================  ====================

Signs survive everywhere (-0 stays -0, a negative number that underflows becomes -0). Infinity
stays infinity in all three modes. A NaN keeps its sign and the upper bits of its payload and is
made quiet (bit 6 of the bf16 word), so a NaN whose payload lies in the dropped half stays a NaN.
Subnormals are rounded like every other number, never flushed.

The model is defined on float32 input because the kernels round a float32 register. A float64
value is first rounded to float32 (to nearest, ties to even: IEEE conversion) and then by the mode
asked for. Rounding twice is not always the nearest bf16: a float64 just beside a bf16 tie may
land on the tie in float32 first. It is what a kernel that accumulated exactly would store, which
is what an oracle for kernels needs.
"""

from __future__ import annotations

import torch

from ..contract import ROUNDINGS, Rounding

_INF = 0x7F800000
_QUIET = 0x0040


def round_to_bf16(x: torch.Tensor, rounding: Rounding = "rtne") -> torch.Tensor:
    """Round a float32 or float64 tensor to bf16, bit for bit as the named mode says.

    Any shape, any device; returns a new bfloat16 tensor of the same shape. float64 goes through
    float32 (to nearest even) first; see the module docstring. Raises ``TypeError`` for another
    dtype and ``ValueError`` for an unknown mode.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"round_to_bf16 takes float32 or float64, got {x.dtype}: convert to float32 first"
        )
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
    bits = x.detach().to(torch.float32).contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    if rounding == "rtne":
        kept = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    elif rounding == "rtna":
        kept = (magnitude + 0x8000) >> 16
    else:
        kept = magnitude >> 16
    # A NaN's bias could carry into the sign bit or clear its payload; it is truncated instead.
    kept = torch.where(magnitude > _INF, (magnitude >> 16) | _QUIET, kept)
    return (kept | sign).to(torch.int16).view(torch.bfloat16)
