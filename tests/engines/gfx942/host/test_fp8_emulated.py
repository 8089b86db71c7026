"""Caches of e4m3fnuz through the public API on the machine code, checkers on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import liteattention_emulator
from liteattention_rocm import engines, remembered, serving, write_kv
from tests.oracle.ragged import make, starts

from .ragged_cases import check, expect_close, run

pytestmark = pytest.mark.usefixtures("emulator", "memory_of_nan")

FP8 = torch.float8_e4m3fnuz
SCALES = {"k_scale": 0.07, "v_scale": 1.3}
NUMBERS = [torch.bfloat16, torch.float16]
#: Decoded and prefilled requests, lengths around the edges of blocks, one without rows.
MIXED = [(1, 300), (40, 130), (2, 64), (0, 5), (70, 70), (1, 1), (1, 65)]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many parts the engine computes requests in."""

    def choose(count: int) -> None:
        monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", count)
        remembered.forget()  # plans rest on it

    return choose


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("dim", "heads", "dtype"),
    [
        (32, (2, 1), torch.bfloat16),
        (64, (4, 2), torch.float16),
        (80, (2, 1), torch.bfloat16),
        (96, (4, 2), torch.float16),
        (112, (2, 1), torch.float16),
        (128, (2, 1), torch.bfloat16),
        (192, (2, 1), torch.bfloat16),
        (256, (4, 1), torch.bfloat16),
    ],
)
def test_any_batch(
    dim: int, heads: tuple[int, int], dtype: torch.dtype, page_size: int, parts: Any
) -> None:
    for count in (1, 3):
        parts(count)
        check(make(MIXED, *heads, dim, dtype, padding=3, fp8=FP8), page_size, **SCALES)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 37, "sinks": True},
        {"soft_cap": 2.5, "causal": False},
        {"scale": -0.2, "soft_cap": 30.0, "k_scale": 2.0},
        {"scale": 3.0, "k_scale": 2.0**-10, "v_scale": 2.0**-60},
        {"v_scale": 2.0**60},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], parts: Any) -> None:
    parts(2)
    for dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)):
        if options.get("v_scale", 1.0) == 2.0**60 and dtype == torch.float16:
            continue  # infinite
        check(make(MIXED, 4, 2, dim, dtype, seed=dim, fp8=FP8), 16, **(SCALES | options))


def in_tensors(k: float, v: float) -> dict[str, torch.Tensor]:
    """Scales in memory, NaN around each: one as a view without dimensions, one with one."""
    both = torch.tensor([math.nan, k, math.nan, v, math.nan])
    return {"k_scale": both[1], "v_scale": both[3:4]}


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.5, "sinks": True}], ids=["", "cap-sinks"])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (32, torch.float16),
        (64, torch.bfloat16),
        (80, torch.float16),
        (96, torch.bfloat16),
        (112, torch.bfloat16),
        (128, torch.float16),
        (192, torch.float16),
        (256, torch.bfloat16),
    ],
)
def test_scales_in_tensors_give_the_bits_of_numbers(
    dim: int, dtype: torch.dtype, options: dict[str, Any], parts: Any
) -> None:
    case, scale = make(MIXED, 4, 2, dim, dtype, padding=3, seed=dim, fp8=FP8), dim**-0.5
    for k, v, count in ((0.07, 1.3, 1), (-0.3, -(2.0**-60), 3), (3.7e-5, 0.0, 1), (0.0, 0.6, 2)):
        parts(count)
        k, v = torch.tensor([k, v]).tolist()
        out, lse = run(case, 16, scale=scale, **options, **in_tensors(k, v))
        expect_close(case, out, lse, scale=scale, k_scale=k, v_scale=v, **options)
        # Numbers must be positive; the score scale need not.
        numbers = {"scale": scale * ((k > 0) - (k < 0)), "k_scale": abs(k) or 1.0}
        expected, expected_lse = run(case, 16, **options, **numbers, v_scale=abs(v) or 1.0)
        assert torch.equal(lse[:, case.rows], expected_lse[:, case.rows])
        assert torch.equal(out[case.rows], expected[case.rows] * ((v > 0) - (v < 0)))


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_number_is_read_exactly(dtype: torch.dtype, rows: int) -> None:
    # One key per request: the output is the value itself. As a key a number is the log-sum-exp.
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = codes.float()
    assert numbers[0x7F] == 240.0 and torch.equal(numbers.isnan().nonzero(), torch.tensor([[0x80]]))
    table = torch.arange(4, dtype=torch.int32)[:, None]
    batch = serving.PagedBatch(starts([rows] * 4), torch.ones(4, dtype=torch.int32), table)
    q = torch.zeros(4 * rows, 1, 64, dtype=dtype)
    v = codes.view(4, 1, 1, 64)
    options: dict[str, Any] = {"causal": False, "engine": "gfx942", "return_lse": True}
    out, _ = serving.attention_paged(q, torch.zeros_like(v), v, batch, **options)
    for row in out.view(4, rows, 64).unbind(1):
        assert torch.equal(row.float().nan_to_num(7.0), numbers.view(4, 64).nan_to_num(7.0))
    k = torch.zeros(256, 1, 1, 64).to(FP8)
    at = torch.arange(256)
    k.view(torch.uint8)[at, 0, 0, at % 64] = codes.view(torch.uint8)  # each of 64 places
    table = torch.arange(256, dtype=torch.int32)[:, None]
    batch = serving.PagedBatch(starts([rows] * 256), torch.ones(256, dtype=torch.int32), table)
    q = torch.ones(256 * rows, 1, 64, dtype=dtype)
    _, lse = serving.attention_paged(q, k, torch.zeros_like(k), batch, scale=1.0, **options)
    for head in lse[0].view(256, rows).unbind(1):
        torch.testing.assert_close(head, numbers, rtol=2e-6, atol=1e-9, equal_nan=True)


def test_results_do_not_depend_on_the_order_of_waves(parts: Any) -> None:
    parts(2)
    for dim in (64, 112, 128, 192, 256):
        case = make([(1, 700), (30, 90)], 4, 1, dim, fp8=FP8)
        expected = run(case, 16, **SCALES)
        for order in ("random:7", "first-ahead", "last-ahead"):
            liteattention_emulator.set_option("order", order)
            try:
                got = run(case, 16, **SCALES)
            finally:
                liteattention_emulator.set_option("order", "round-robin")
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 16.0, 3.0e-5, 2.0**60])
def test_writes_round_as_the_reference_does(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    k, v = every.view(1024, 1, 64), every.flip(0).view(1024, 1, 64)
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(0)).int()
    slots[5] = -1
    caches = {}
    for engine in ("gfx942", "reference"):
        both = torch.full((2, 70, 1, 16, 68), 7.0).to(FP8)[..., 4:]
        k_cache, v_cache = (x.transpose(1, 2) for x in both)
        write_kv(k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=0.37, engine=engine)
        caches[engine] = both.clone().view(torch.uint8)
    assert torch.equal(caches["gfx942"], caches["reference"])
    assert (caches["gfx942"] == 0x80).any() and (caches["gfx942"] == 0x7F).any()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_writes_are_divided_by_what_tensors_hold(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    k, v = every.view(1024, 1, 64), every.flip(0).view(1024, 1, 64)
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(0))

    def written(**options: Any) -> torch.Tensor:
        both = torch.full((2, 64, 16, 1, 64), 7.0).to(FP8)
        write_kv(k, v, *both, slots, **options)
        return both.view(torch.uint8)

    for scales in ((0.37, 3.0e-5), (-0.37, 2.0**60), (0.0, -0.0), (math.inf, math.nan)):
        found = written(engine="gfx942", **in_tensors(*scales))
        assert torch.equal(found, written(engine="reference", **in_tensors(*scales)))
        if min(scales) > 0 and math.isfinite(sum(scales)):
            numbers = dict(zip(SCALES, torch.tensor(scales).tolist(), strict=True))
            assert torch.equal(found, written(engine="gfx942", **numbers))


def test_a_step_writes_and_reads_what_it_wrote() -> None:
    """A cache laid out as vLLM lays it out: keys beside values, heads before tokens."""
    case = make([(1, 75), (20, 40)], 4, 2, 128)
    pages = torch.full((9, 2, 16, 256), math.nan).to(FP8)
    k, v = pages[..., :128].transpose(1, 2), pages[..., 128:].transpose(1, 2)
    table = torch.tensor([[7, 2, 5, 0, 1], [3, 8, 6, 0, 0]], dtype=torch.int32)
    slots = [
        int(table[r, j // 16]) * 16 + j % 16 for r, (_, n) in enumerate(case.requests)
        for j in range(n)
    ]  # fmt: skip
    rows = [torch.cat(x) for x in (case.k, case.v)]
    scales = {"k_scale": 0.02, "v_scale": 0.03}
    write_kv(*rows, k, v, torch.tensor(slots), engine="gfx942", **scales)
    batch = serving.PagedBatch(case.q_start, case.kv_len, table)
    out = serving.attention_paged(case.q, k, v, batch, engine="gfx942", **scales)
    expected = case.exact().out
    # Four significant bits of each value, and of each key in the scores.
    assert (out.double() - expected).abs().max() <= 2.0**-4 * 3 * case.v[0].abs().max()
    exact = serving.attention_paged(case.q, k, v, batch, engine="reference", **scales)
    assert (out.double() - exact.double()).abs().max() <= 2.0**-6


@pytest.mark.parametrize(
    ("fp8", "why"),
    [
        (torch.float8_e4m3fn, "the same bits are half the number, and those of -0 are NaN"),
        (torch.float8_e5m2, "the same bits are other numbers"),
        (torch.float8_e5m2fnuz, "the same bits are other numbers"),
    ],
)
def test_other_fp8_is_refused(fp8: torch.dtype, why: str) -> None:
    q, k = torch.zeros(1, 1, 64).bfloat16(), torch.zeros(1, 16, 1, 64).to(fp8)
    one = torch.ones(1, dtype=torch.int32)
    batch = serving.PagedBatch(starts([1]), one, torch.zeros(1, 1, dtype=torch.int32))
    reason = (
        f"the cache must be torch.bfloat16 or {FP8}, got {fp8}; the fp8 of an MI300X is {FP8}, in "
        f"which {why}: allocate the cache as {FP8} and fill it with write_kv"
    )
    with pytest.raises(ValueError) as caught:
        serving.attention_paged(q, k, k, batch, engine="gfx942")
    assert reason in str(caught.value)
    with pytest.raises(ValueError) as caught:
        write_kv(q, q, k, k.clone(), torch.zeros(1).long(), engine="gfx942")
    assert reason in str(caught.value)


def test_what_only_16_bits_can_is_refused() -> None:
    q, k = torch.zeros(1, 1, 64).bfloat16(), torch.zeros(2, 16, 1, 66).to(FP8)[..., 1:65]
    one = torch.ones(1, dtype=torch.int32)
    batch = serving.PagedBatch(starts([1]), one, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rounding 'rtz' needs a cache of bf16: use 'rtne'"):
        serving.attention_paged(q, k, k, batch, rounding="rtz", engine="gfx942")
    with pytest.raises(ValueError, match=r"4 bytes .an element offset and strides that 4 divides"):
        serving.attention_paged(q, k, k, batch, engine="gfx942")
