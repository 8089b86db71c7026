"""The shapes of video models on the dense kernel's machine code, sampled by workgroup.

Wan's self-attention, (B, H, Sq, Skv, D) = (1, 12, 32760, 32760, 128), has 12 x 128 tiles of
256 query rows. A tile depends on no other, so some are run, each against all keys: queries are
sliced out of the call's own tensors, with its strides. On an MI300X 1520 tiles of this call are
whole and the last 16 are in 19 parts along the keys. Whole tiles and 5 parts are run here, and the
parts that the slice alone gets from ``attention``. Checkers are on.

Outputs are held against float64 inside the derived bound, and against the rounding model, whose
docstring says what it is: at least 99.9 % within one bf16 ulp. ``pytest -s`` prints the shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import _core
from liteattention_rocm.contract import DenseRequest, DenseTensors, Rounding
from liteattention_rocm.engines import gfx942
from tests.oracle.attention import exact, expect_close
from tests.oracle.rounding_model import Model, rounded, ulps

BAR = 0.999
ROUNDINGS: tuple[Rounding, ...] = ("rtne", "rtna", "rtz")
Q_BLOCK = 256
MODEL_ROWS = 6  # of so many rows one is held against the rounding model


pytestmark = pytest.mark.usefixtures("emulator")


@dataclass
class Inputs:
    """A call's q [1, Sq, Hq, D], k and v [1, Skv, Hkv, D], bf16.

    Scores of the first head are diffuse, those of the last are 4 times as far apart: their rows
    attend to a few keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def some(self, first_row: int, head_step: int) -> tuple[torch.Tensor, ...]:
        """Views [1, H, S, D]: one q block of every ``head_step``-th head, all keys."""
        q = self.q[:, first_row : first_row + Q_BLOCK, ::head_step]
        k, v = self.k[:, :, ::head_step], self.v[:, :, ::head_step]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def make(q_len: int, kv_len: int, q_heads: int, kv_heads: int, dim: int) -> Inputs:
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(1, rows, heads, dim, generator=generator)

    far = torch.linspace(1.0, 4.0, q_heads)[:, None]
    q, k, v = normal(q_len, q_heads) * far, normal(kv_len, kv_heads), normal(kv_len, kv_heads)
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16())


@dataclass
class Tally:
    """How outputs compare with the two yardsticks."""

    elements: int = 0
    near_exact: int = 0
    near_model: int = 0
    equal_model: int = 0
    model_near_exact: int = 0

    def add(
        self, out: torch.Tensor, expected: torch.Tensor, model: torch.Tensor, rounding: Rounding
    ) -> None:
        """bf16 outputs; their exact results and those of the rounding model, float64."""
        ideal, ours = rounded(expected, rounding), rounded(model, rounding)
        distance = ulps(out, ours)
        self.elements += out.numel()
        self.near_exact += int((ulps(out, ideal) <= 1).sum())
        self.near_model += int((distance <= 1).sum())
        self.equal_model += int((distance == 0).sum())
        self.model_near_exact += int((ulps(ours, ideal) <= 1).sum())

    def expect(self, what: str) -> None:
        """Print and hold to the bar."""
        near, equal = self.near_model / self.elements, self.equal_model / self.elements
        rough, inherent = self.near_exact / self.elements, self.model_near_exact / self.elements
        print(
            f"\n{what}: of {self.elements:,} outputs {near:.3%} are within 1 ulp of the rounding "
            f"model ({equal:.3%} equal); {rough:.2%} of the exact result, correctly rounded, as "
            f"are {inherent:.2%} of the model's: P is in bf16"
        )
        assert near >= BAR
        # What is missing to the exact result is missing to the model, too, not the kernel's fault.
        assert abs(rough - inherent) < 1e-3


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: Rounding, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, S, D] and LSE, along the keys in so many parts; 0: through ``attention``."""
    if parts == 0:
        return liteattention_rocm.attention(
            q, k, v, layout="bhsd", rounding=rounding, return_lse=True, engine="gfx942"
        )
    batch, heads, rows, dim = q.shape
    out, lse = torch.empty_like(q), torch.empty(batch, heads, rows)
    request = DenseRequest(
        batch, heads, k.shape[1], rows, k.shape[2], dim, q.dtype, q.device, "bhsd", dim**-0.5,
        False, rounding, True,
    )  # fmt: skip
    tensors = DenseTensors(q, k, v, out, lse)
    gfx942.Gfx942Engine(kv_splits=parts).bind(request, tensors)(tensors)
    return out, lse


def planned(q: torch.Tensor, k: torch.Tensor) -> int:
    """Into how many parts ``attention`` divides the keys of this call, all of whose tiles fit."""
    batch, heads, rows, dim = q.shape
    shape = _core.DenseShape(batch, heads, k.shape[1], rows, k.shape[2], dim)
    plan = _core.plan_dense(shape, 304, 0)
    assert plan.whole_tiles == 0 or plan.splits == 1
    return plan.splits


def sample(inputs: Inputs, first_rows: list[int], head_step: int, parts: list[int]) -> None:
    """Run q blocks in every rounding in ``parts[0]`` parts along the keys, and once in the others.

    The rounding model is held against the former.
    """
    tallies = {rounding: Tally() for rounding in ROUNDINGS}
    for n, first in enumerate(first_rows):
        q, k, v = inputs.some(first, head_step)
        expected = exact(q, k, v)
        rows = slice(None, None, MODEL_ROWS)
        rounding_model = Model(q[0, :, rows], k[0], v[0])
        planned_parts = parts[0] or planned(q, k)
        models = {r: rounding_model.result(r, planned_parts)[None] for r in ROUNDINGS}
        runs = [(rounding, parts[0]) for rounding in ROUNDINGS]
        runs += [(ROUNDINGS[(n + i) % 3], number) for i, number in enumerate(parts[1:])]
        for i, (rounding, number) in enumerate(runs):
            out, lse = run(q, k, v, rounding, number)
            expect_close(out, lse, expected, rounding, what=f"{number} parts:", p_as_output=True)
            if i < len(ROUNDINGS):
                tallies[rounding].add(
                    out[:, :, rows], expected.out[:, :, rows], models[rounding], rounding
                )
    for rounding, tally in tallies.items():
        tally.expect(f"Skv {inputs.k.shape[1]}, D {inputs.k.shape[3]}, {rounding}")


@pytest.mark.parametrize("parts", [1, 3, 0])
@pytest.mark.parametrize("dim", [64, 128])
def test_short(dim: int, parts: int) -> None:
    sample(make(130, 500, 2, 1, dim), [0], 1, [parts])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_grouped_heads(dim: int) -> None:
    # the first, a middle and the last q block; 4 q heads to a key head
    sample(make(4096, 4096, 8, 2, dim), [0, 7 * Q_BLOCK, 15 * Q_BLOCK], 1, [1, 3, 0])


@pytest.mark.slow
@pytest.mark.parametrize("kv_len", [32760, 512])
def test_wan(kv_len: int) -> None:
    # the first, a middle and the last q block, of 248 rows, of 3 heads; 512: cross-attention
    shape = _core.DenseShape(1, 12, 12, 32760, kv_len, 128)
    plan = _core.plan_dense(shape, 304, 0)
    assert plan.splits == (19 if kv_len == 32760 else 4) and plan.whole_tiles == 1520
    inputs = make(32760, kv_len, 12, 12, 128)
    sample(inputs, [0, 63 * Q_BLOCK, 127 * Q_BLOCK], 5, [1, 5, 0] if kv_len > 512 else [1, 0])
