"""The dense kernel's machine code over every edge length, head ratio, layout, rounding and order.

All of it runs on the emulator with its checkers on: a finding fails the call. Bounds are those of
the CPU engine. The quick part runs always, the whole with `-m slow`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm.engines.rounding import round_to_bf16
from tests.oracle.attention import exact, expect_close, expect_no_worse_than_twice_sdpa

LENGTHS = [(s, s) for s in (1, 15, 63, 64, 65, 255, 256, 257, 1021)] + [(100, 77)]
GROUPS = [(1, 1), (4, 1), (8, 1), (8, 2)]
ROUNDINGS = ["rtne", "rtna", "rtz"]
# Both groups of waves in step, any wave at any time, and each group as far ahead as barriers allow.
ORDERS = ["round-robin", "round-robin:1", "random:1", "random:2", "first-ahead", "last-ahead"]


pytestmark = pytest.mark.usefixtures("emulator")


def make(
    lengths: tuple[int, int], heads: tuple[int, int], dim: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in `layout`, each a slice of one fused bf16 buffer: batch, rows and heads strided."""
    g = torch.Generator().manual_seed(lengths[0] * 7 + heads[0])
    q_heads, kv_heads = heads

    def cut(rows: int, first: int, count: int) -> torch.Tensor:
        fused = torch.randn(1, rows + 5, q_heads + 2 * kv_heads, dim, generator=g).bfloat16()
        part = fused[:, 2 : 2 + rows, first : first + count]
        return part if layout == "bshd" else part.transpose(1, 2)

    return (
        cut(lengths[0], 0, q_heads),
        cut(lengths[1], q_heads, kv_heads),
        cut(lengths[1], q_heads + kv_heads, kv_heads),
    )


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, rounding: Any = "rtne"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, S, D] and LSE [B, H, S] of the machine code."""
    out, lse = liteattention_rocm.attention(
        q, k, v, layout=layout, rounding=rounding, return_lse=True, engine="gfx942"
    )
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


def check(lengths: tuple[int, int], heads: tuple[int, int], dim: int, layout: str) -> None:
    q, k, v = make(lengths, heads, dim, layout)
    flip = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
    expected = exact(flip(q), flip(k), flip(v))
    for rounding in ROUNDINGS:
        out, lse = run(q, k, v, layout, rounding)
        expect_close(out, lse, expected, rounding, what=rounding, p_as_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_within_the_derived_bound(
    lengths: tuple[int, int], heads: tuple[int, int], dim: int, layout: str
) -> None:
    check(lengths, heads, dim, layout)


def every_order(lengths: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(lengths, (2, 1), dim, "bshd")
    results = []
    for order in ORDERS:
        monkeypatch.setenv("LITEATTENTION_EMULATOR_ORDER", order)
        results.append(run(q, k, v, "bshd"))
    for order, (out, lse) in zip(ORDERS, results, strict=True):
        assert torch.equal(out, results[0][0]), order
        assert torch.equal(lse, results[0][1]), order


@pytest.mark.parametrize("dim", [64, 128])
def test_the_order_of_waves_does_not_matter(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every_order((100, 300), dim, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_order_of_waves_never_matters(
    lengths: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_order(lengths, dim, monkeypatch)


@pytest.mark.parametrize("dim", [64, 128])
def test_no_worse_than_twice_sdpa(dim: int) -> None:
    q, k, v = make((256, 1000), (2, 2), dim, "bhsd")
    expect_no_worse_than_twice_sdpa(run(q, k, v, "bhsd")[0], q, k, v)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dim", [64, 128])
def test_rounding_is_the_bit_exact_model(dim: int, rounding: str) -> None:
    # Two keys of equal score: the fp32 result (a + b) / 2 lies exactly between two bf16 numbers or
    # on one of them, so every tie and carry of the model is met, over all exponents.
    a = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    a = a[a.float().abs().log2().abs() < 100]
    rows = a.numel() // dim
    a = a[: rows * dim].view(1, rows, 1, dim)
    b = torch.nextafter(a, torch.full_like(a, math.inf))
    v = torch.cat([a, b], dim=2)  # [1, heads, 2, dim]
    q = torch.zeros(1, rows, 1, dim, dtype=torch.bfloat16)
    k = torch.zeros(1, rows, 2, dim, dtype=torch.bfloat16)
    out, _ = run(q, k, v, "bhsd", rounding)
    expected = round_to_bf16((a.float() + b.float()) * 0.5, rounding)  # type: ignore[arg-type]
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_not_a_number_and_infinity_stay_in_their_rows() -> None:
    q, k, v = make((70, 100), (1, 1), 64, "bhsd")
    q = q.clone()
    q[0, 0, 3, 5] = math.nan
    out, lse = run(q, k, v, "bhsd")
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    others = torch.arange(70) != 3
    assert out[0, 0, others].isfinite().all() and lse[0, 0, others].isfinite().all()
    v = v.clone()
    v[0, 0, 50, 7] = math.inf
    out, _ = run(*make((70, 100), (1, 1), 64, "bhsd")[:2], v, "bhsd")
    assert (out[0, 0, :, 7] == math.inf).all()
    assert out[0, 0, :, torch.arange(64) != 7].isfinite().all()
