"""What attention in bf16 gives, bit by bit, as far as its arithmetic says: the rounding model.

Two yardsticks for outputs of the MI300X kernels, both independent of their code:

- ``rounded(exact)``: the exact result, correctly rounded. A kernel that multiplies P and V on bf16
  matrix cores cannot meet it: P is rounded to bf16 first, which moves an output by up to 2^-8 of
  softmax(S) |V|, and where positive and negative values cancel that is many ulps of what is left.
- ``Model``: attention whose P is rounded to bf16 as named and whose scores are fp32. What decides
  which way a probability is rounded is exact here: the sum of a score's products, one fp32 rounding
  each, in the order in which the matrix instructions take head dims (8 an instruction; lanes hold 8
  neighbours of a row, 4 for one instruction and 4 for the next), the multiple of it by log2(e)
  scale less that of the shift, in one rounding, a correctly rounded exp2. The shift is the running
  maximum as it was when it last rose by 8 in log2 units. The rest is float64: sums of P and P V. An
  fp32 sum differs from it by less than 1e-5 of what is summed, which decides the rounding of an
  output once in a thousand times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liteattention_rocm.contract import Rounding
from liteattention_rocm.engines.rounding import round_to_bf16

K_BLOCK = 64
CHUNK = 8 * K_BLOCK  # keys whose scores are made at once: few large operations
SLACK = 8.0  # log2 units
SMALLEST = 2.0**-126  # exp2 of the chip gives 0 below


@dataclass(frozen=True)
class Part:
    """Attention over some keys, not normalised. ``out`` [H, Sq, D] and ``total`` [H, Sq] float64.

    ``top`` [H, Sq]: the raw score that P is relative to, fp32.
    """

    out: torch.Tensor
    total: torch.Tensor
    top: torch.Tensor


class Model:
    """The rounding model of one call. Owner: a test.

    Args:
        q: [H, Sq, D] bf16.
        k, v: [Hkv, Skv, D] bf16.
        scale: positive; by default 1 / sqrt(D).

    Scores times log2(e) scale must stay below 4096: beyond, the kernels subtract first.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
    ) -> None:
        group = q.shape[0] // k.shape[0]
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.c = torch.tensor(scale * math.log2(math.e), dtype=torch.float32)
        self.q = q.float().transpose(1, 2).contiguous()  # [H, D, Sq]
        self.k = k.float().transpose(1, 2).repeat_interleave(group, 0)
        self.v = v.double().repeat_interleave(group, 0)

    def result(self, rounding: Rounding, parts: int = 1) -> torch.Tensor:
        """Output [H, Sq, D] in float64, before it is rounded; over K blocks in ``parts`` parts.

        Parts have equal numbers of K blocks, the first ones one more; each has a running maximum
        of its own, and so rounds other probabilities.
        """
        blocks = -(-self.k.shape[2] // K_BLOCK)
        sizes = [blocks // parts + (n < blocks % parts) for n in range(parts)]
        done, found = 0, []
        for size in sizes:
            found.append(self.part(done * K_BLOCK, (done + size) * K_BLOCK, rounding))
            done += size
        top = torch.stack([part.top for part in found]).amax(0)
        weights = [torch.exp2((part.top - top).double() * self.c.double()) for part in found]
        out, total = torch.zeros_like(found[0].out), torch.zeros_like(found[0].total)
        for part, weight in zip(found, weights, strict=True):
            out += weight[..., None] * part.out
            total += weight * part.total
        return out / total[..., None]

    def part(self, begin: int, end: int, rounding: Rounding) -> Part:
        """Attention over keys ``begin`` to ``end``, from one K block to the next."""
        heads, dim, rows = self.q.shape
        top = highest = torch.full((heads, rows), -math.inf)
        total = torch.zeros(heads, rows, dtype=torch.float64)
        out = torch.zeros(heads, rows, dim, dtype=torch.float64)
        end = min(end, self.k.shape[2])
        for first in range(begin, end, K_BLOCK):
            at = (first - begin) % CHUNK
            if at == 0:
                chunk = self._scores(self.k[:, :, first : min(first + CHUNK, end)])
            keys = slice(first, min(first + K_BLOCK, end))
            scores = chunk[..., at : at + K_BLOCK]
            highest = torch.maximum(highest, scores.amax(-1))
            higher = torch.where((highest - top) * self.c > SLACK, highest, top)
            base, before = higher * self.c, top * self.c
            shrink = self._exp2(before.double() - base.double()).double()
            p = self._exp2(scores.double() * self.c.double() - base[..., None].double())
            total = total * shrink + p.sum(-1, dtype=torch.float64)
            near = round_to_bf16(p, rounding).double()
            out = out * shrink[..., None] + near @ self.v[:, keys]
            top = higher
        return Part(out, total, top)

    def _scores(self, keys: torch.Tensor) -> torch.Tensor:
        """fp32 [H, Sq, keys]: a product of two bf16 is exact, each sum is rounded."""
        heads, dim, rows = self.q.shape
        scores = torch.zeros(heads, rows, keys.shape[2])
        for step in range(0, dim, 16):
            for half in (0, 4):
                for group in range(2):
                    for d in range(step + 8 * group + half, step + 8 * group + half + 4):
                        scores.addcmul_(self.q[:, d, :, None], keys[:, d, None, :])
        return scores

    def _exp2(self, power: torch.Tensor) -> torch.Tensor:
        power = torch.exp2(power.float().double()).float()
        return power.masked_fill_(power < SMALLEST, 0.0)


def rounded(exact: torch.Tensor, mode: Rounding) -> torch.Tensor:
    """Float64 correctly rounded to bf16."""
    near = exact.float()
    bits = near.view(torch.int32)
    bits = torch.where(near.double().abs() > exact.abs(), bits - 1, bits)  # fp32 towards zero
    # ... and odd where it is not exact: then fp32 to bf16 rounds as the exact value would
    inexact = bits.view(torch.float32).double() != exact
    return round_to_bf16(torch.where(inexact, bits | 1, bits).view(torch.float32), mode)


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of finite bf16 numbers, counted in bf16 numbers."""

    def ordinal(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordinal(a) - ordinal(b)).abs()
