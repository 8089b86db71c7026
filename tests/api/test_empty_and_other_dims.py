"""Calls without rows or keys, and values of another head dim than keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from liteattention_emulator import library
from liteattention_rocm import (
    LiteAttention,
    PagedBatch,
    SkipPolicy,
    attention,
    attention_paged,
    attention_varlen,
    merge_states,
)
from liteattention_rocm.engines import LIBRARY_VARIABLE
from tests.oracle.attention import exact_rows, expect_close
from tests.oracle.tensors import ints, normal


@pytest.fixture
def emulator(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library()))


def compiled_whole(function: Any) -> Any:
    """Compile what calls the function, without a graph break."""
    torch._dynamo.reset()
    return torch.compile(
        lambda *args, **options: function(*args, **options), fullgraph=True, backend="aot_eager"
    )


#: (B, Sq, Hq), (Skv, Hkv)
EMPTY = [
    ((1, 0, 2), (9, 2)),
    ((2, 5, 2), (0, 1)),
    ((0, 5, 2), (9, 2)),
    ((1, 5, 0), (9, 0)),
    ((1, 0, 2), (0, 2)),
]


@pytest.mark.parametrize("engine", ["cpu", "reference", "gfx942"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_rows_or_no_keys(engine: str, causal: bool, emulator: None) -> None:
    """As SDPA has it, with an LSE: without keys rows are zeros and saw nothing."""
    for (batch, rows, heads), (keys, kv_heads) in EMPTY:
        q = normal(batch, rows, heads, 64)
        k = normal(batch, keys, kv_heads, 64)
        for layout in ("bshd", "bhsd"):
            given = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, k)]
            options: dict[str, Any] = {"causal": causal, "layout": layout, "engine": engine}
            out, lse = attention(*given, return_lse=True, **options)
            assert out.shape == given[0].shape and out.dtype == q.dtype and not out.any()
            assert lse.shape == (batch, heads, rows) and lse.isneginf().all()
            target = torch.full_like(given[0], math.nan)
            assert attention(*given, out=target, **options) is target and not target.any()


def test_no_keys_for_a_compiler_and_in_inference_mode() -> None:
    q, k = normal(2, 5, 2, 16), normal(2, 0, 2, 16)
    compiled = compiled_whole(attention)
    for out, lse in (
        compiled(q, k, k, return_lse=True),
        torch.inference_mode()(attention)(q, k, k, return_lse=True),
    ):
        assert not out.any() and lse.isneginf().all()
    assert compiled(q[:, :0], k, k).shape == (2, 0, 2, 16)


def test_a_list_of_no_tiles_is_refused() -> None:
    q, k = normal(1, 5, 2, 16), normal(1, 0, 2, 16)
    lite = LiteAttention(SkipPolicy(threshold=-4.0))
    with pytest.raises(
        ValueError, match=r"k must not be empty.* attention\(\) takes empty tensors"
    ):
        lite(q, k, k, step=0, layer="a")


def test_what_stays_refused() -> None:
    with pytest.raises(ValueError, match="q must have a head dim of at least 1"):
        attention(*[torch.zeros(1, 2, 2, 0)] * 3)
    with pytest.raises(ValueError, match="query heads must be a multiple of key heads, got 2 and"):
        attention(torch.zeros(1, 2, 2, 8), *[torch.zeros(1, 2, 0, 8)] * 2)


def test_parts_without_a_key_as_flash_attention_2_marks_them() -> None:
    """Its LSE of such a row is +inf; the merge was NaN."""
    q, k, v = (normal(1, 6, 2, 16, seed=seed, dtype=torch.float32) for seed in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    nothing, marked = torch.full_like(out, math.nan), torch.full_like(lse, math.inf)
    for outs, lses in (((out, nothing), (lse, marked)), ((nothing, out), (marked, lse))):
        merged, merged_lse = merge_states(outs, lses)
        assert torch.equal(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge_states([nothing] * 2, [marked, -marked])
    assert not merged.any() and merged_lse.isneginf().all()
    lses = [lse.requires_grad_(), marked]
    (grad,) = torch.autograd.grad(merge_states([out, nothing], lses)[1].sum(), lses[:1])
    torch.testing.assert_close(grad, torch.ones_like(grad))


# ------------------------------------------------------------------ values of another head dim

DIMS = [(192, 128), (64, 256), (32, 8), (40, 136)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_dense_values_of_another_head_dim(engine: str, dtype: torch.dtype) -> None:
    check_dense(engine, dtype)


def test_dense_values_of_another_head_dim_on_every_path(isa: str) -> None:
    check_dense("cpu", torch.bfloat16)


def check_dense(engine: str, dtype: torch.dtype) -> None:
    for seed, (dim, value_dim) in enumerate(DIMS):
        q = normal(2, 70, 4, dim, seed=seed, dtype=dtype)
        k = normal(2, 150, 2, dim, seed=seed + 10, dtype=dtype)
        v = normal(2, 150, 2, value_dim, seed=seed + 20, dtype=dtype)
        expected = exact_rows(q, k, v, causal=True)
        options: dict[str, Any] = {"causal": True, "engine": engine}
        out, lse = attention(q, k, v, return_lse=True, **options)
        expect_close(out, lse, expected, what=(dim, value_dim))
        given = torch.empty(2, 70, 4, value_dim, dtype=dtype)
        for _ in range(2):  # bound, then remembered
            assert torch.equal(attention(q, k, v, **options), out)
            assert torch.equal(attention(q, k, v, out=given.zero_(), **options), out)
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(attention(*turned, layout="bhsd", **options).transpose(1, 2), out)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_packed_values_of_another_head_dim(engine: str) -> None:
    """MLA's prefill: keys of 192, values of 128; rows that would be decoded are among them."""
    starts, key_starts = ints(0, 70, 71, 74), ints(0, 70, 370, 400)
    q, k = normal(74, 4, 192), normal(400, 2, 192, seed=1)
    v = normal(400, 2, 128, seed=2)
    out, lse = attention_varlen(
        q, k, v, starts, key_starts, causal=True, return_lse=True, engine=engine
    )
    assert out.shape == (74, 4, 128)
    for i in range(3):
        rows, keys = slice(*starts[i : i + 2].tolist()), slice(*key_starts[i : i + 2].tolist())
        expected = exact_rows(q[rows], k[keys], v[keys], causal=True)
        expect_close(out[rows], lse[:, rows], expected, what=i)


def test_a_compiler_sees_the_head_dim_of_values() -> None:
    q, k, v = normal(1, 20, 2, 24), normal(1, 30, 2, 24), normal(1, 30, 2, 16)
    compiled = compiled_whole(attention)
    assert torch.equal(compiled(q, k, v), attention(q, k, v))
    starts = ints(0, 20), ints(0, 30)
    packed = compiled_whole(attention_varlen)
    given = (q[0], k[0], v[0], *starts)
    assert torch.equal(packed(*given), attention_varlen(*given))


def test_values_of_another_head_dim_elsewhere(emulator: None) -> None:
    q, k, v = normal(1, 20, 2, 64), normal(1, 30, 2, 64), normal(1, 30, 2, 32)
    with pytest.raises(
        ValueError,
        match="keys' head dim 64, got 32: pad v with zeros to 64 and take the output's first 32 "
        r"columns \(use engine='cpu'\)",
    ):
        attention(q, k, v, engine="gfx942")
    with pytest.raises(ValueError, match="32, got 64: pad q and k with zeros to 64 and pass"):
        attention(q[..., :32], k[..., :32], k, engine="gfx942")
    with pytest.raises(ValueError, match=r"v's head dim must be a multiple of 8 .*, got 12"):
        attention(q, k, v[..., :12])
    with pytest.raises(ValueError, match=r"out must have q's shape with v's head dim .*32"):
        attention(q, k, v, out=torch.empty_like(q))
    lite = LiteAttention(SkipPolicy(threshold=-4.0))
    with pytest.raises(ValueError, match="k and v must have one shape"):
        lite(q, k, v, step=0, layer="a")
    batch = PagedBatch(ints(0, 20), ints(30), ints(0)[None])
    with pytest.raises(ValueError, match="k_cache and v_cache must have one shape"):
        attention_paged(q[0], k, v, batch)
