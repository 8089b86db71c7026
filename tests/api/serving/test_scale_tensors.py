"""Scales of fp8 caches in tensors: read whenever a call runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liteattention_rocm import PagedBatch, attention_paged, write_kv
from tests.api.serving.cases import Case, check

ENGINES = ("cpu", "reference")
FP8 = torch.float8_e4m3fn
UNTOUCHED = 7.0


def case() -> Case:
    made = Case([1, 7, 4], [60, 9, 30], 4, 2, 64, 16, torch.bfloat16)
    made.k_cache, made.v_cache = made.k_cache.to(FP8), made.v_cache.to(FP8)
    return made


def pair(k: float, v: float) -> dict[str, Any]:
    return {"k_scale": torch.tensor(k), "v_scale": torch.tensor([v])}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_call_reads_them_again(engine: str) -> None:
    given, scales = case(), pair(0.5, 3.0)
    batch = PagedBatch(given.q_start, given.kv_len, given.table)
    out = torch.full_like(given.q, UNTOUCHED)
    for k, v in ((0.5, 3.0), (0.5, 3.0), (0.3, 1.7), (2.0, 0.25)):
        scales["k_scale"].fill_(k)
        scales["v_scale"].fill_(v)
        given.options = {"k_scale": scales["k_scale"].item(), "v_scale": scales["v_scale"].item()}
        _, lse = attention_paged(
            given.q, given.k_cache, given.v_cache, batch, out=out, return_lse=True, engine=engine,
            **scales,
        )  # fmt: skip
        check(given, out, lse, UNTOUCHED)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_divided_by_what_they_hold_now(engine: str) -> None:
    torch.manual_seed(0)
    rows, slots = torch.randn(3, 2, 24), torch.tensor([0, 5, 1])
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 24).to(FP8)
    scales = pair(1.0, 1.0)
    for k, v in ((1.0, 1.0), (0.37, 2.0), (3.0, 0.01)):
        scales["k_scale"].fill_(k)
        scales["v_scale"].fill_(v)
        write_kv(rows, rows, k_cache, v_cache, slots, engine=engine, **scales)
        for cache, scale in ((k_cache, k), (v_cache, v)):
            held = cache.flatten(0, 1)[slots].float()
            assert torch.equal(held, (rows / scale).clamp(-448, 448).to(FP8).float())


def test_compiled_calls_read_them() -> None:
    given, scales = case(), pair(0.5, 3.0)
    batch = PagedBatch(given.q_start, given.kv_len, given.table)
    rows, slots = torch.ones(1, 2, 64).bfloat16(), torch.tensor([5])

    def step(q: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor) -> torch.Tensor:
        factors = {"k_scale": k_scale, "v_scale": v_scale}
        write_kv(rows, rows, given.k_cache, given.v_cache, slots, engine="cpu", **factors)
        return attention_paged(q, given.k_cache, given.v_cache, batch, engine="cpu", **factors)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    rows_of = slice(int(given.q_start[0]), int(given.q_start[-1]))
    for k, v in ((0.5, 3.0), (0.3, 1.7)):
        scales["k_scale"].fill_(k)
        scales["v_scale"].fill_(v)
        found = compiled(given.q, *scales.values())[rows_of]
        assert torch.equal(found, step(given.q, *scales.values())[rows_of])


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ({"k_scale": torch.tensor(1.0)}, TypeError, "must both be numbers or both be tensors"),
        ({"k_scale": 2.0, "v_scale": torch.tensor(1.0)}, TypeError, "got float and Tensor"),
        (
            {"k_scale": torch.ones(1).half(), "v_scale": torch.ones(1)},
            TypeError, "k_scale must be torch.float32, got torch.float16",
        ),
        (
            {"k_scale": torch.ones(1), "v_scale": torch.ones(2)},
            ValueError, r"v_scale must have one element, got \[2\]",
        ),
        (
            {"k_scale": torch.ones(1), "v_scale": torch.ones(1, device="meta")},
            ValueError, "all tensors must have one device",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_them_is_said(
    scales: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = case()
    batch = PagedBatch(given.q_start, given.kv_len, given.table)
    with pytest.raises(error, match=message):
        attention_paged(given.q, given.k_cache, given.v_cache, batch, engine="cpu", **scales)
    rows, slots = torch.ones(1, 2, 64).bfloat16(), torch.tensor([0])
    with pytest.raises(error, match=message):
        write_kv(rows, rows, given.k_cache, given.v_cache, slots, engine="cpu", **scales)


def test_other_caches_have_none() -> None:
    given = Case([1], [4], 2, 2, 64, 16, torch.bfloat16)
    batch = PagedBatch(given.q_start, given.kv_len, given.table)
    with pytest.raises(TypeError, match="are for fp8 caches, got tensors with"):
        attention_paged(given.q, given.k_cache, given.v_cache, batch, **pair(1.0, 1.0))
    with pytest.raises(TypeError, match="are for fp8 caches, got tensors"):
        write_kv(given.q, given.q, given.k_cache, given.v_cache, given.q_start, **pair(1.0, 1.0))
