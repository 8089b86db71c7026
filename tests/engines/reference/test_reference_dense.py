"""The float64 engine against the oracle and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from liteattention_rocm import attention
from liteattention_rocm.contract import LiteRequest, TileGeometry
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.engines import get
from liteattention_rocm.engines import reference as reference_module
from liteattention_rocm.engines.rounding import round_to_bf16
from tests.oracle.attention import exact

SHAPES = [
    # batch, q heads, kv heads, Sq, Skv, D
    (1, 1, 1, 1, 1, 8),
    (2, 4, 4, 15, 15, 64),
    (1, 4, 1, 63, 65, 16),
    (1, 6, 2, 65, 63, 24),
    (2, 2, 2, 64, 131, 128),
]


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def tensors(
    batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        random((batch, q_heads, q_len, dim), 1, dtype),
        random((batch, kv_heads, kv_len, dim), 2, dtype),
        random((batch, kv_heads, kv_len, dim), 3, dtype),
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_float64_equals_torch(
    shape: tuple[int, int, int, int, int, int], causal: bool, layout: str
) -> None:
    q, k, v = tensors(*shape, torch.float64)
    scale = 0.3
    want = exact(q, k, v, scale=scale, causal=causal)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = attention(
        q, k, v, layout=layout, scale=scale, causal=causal, return_lse=True, engine="reference"
    )
    assert out.dtype == torch.float64 and out.shape == q.shape
    if layout == "bshd":
        out = out.transpose(1, 2)
    torch.testing.assert_close(out, want.out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want.lse.float(), rtol=1e-6, atol=1e-6)


def test_plain_loops_with_causal_rows_that_see_nothing() -> None:
    q_len, kv_len, dim, scale = 7, 4, 8, -0.7
    q, k, v = tensors(1, 2, 1, q_len, kv_len, dim, torch.float64)
    out, lse = attention(
        q, k, v, layout="bhsd", scale=scale, causal=True, return_lse=True, engine="reference"
    )
    for h in range(2):
        for i in range(q_len):
            seen = [j for j in range(kv_len) if j <= i + kv_len - q_len]
            weights = [
                math.exp(
                    scale * math.fsum(float(q[0, h, i, d] * k[0, 0, j, d]) for d in range(dim))
                )
                for j in seen
            ]
            total = math.fsum(weights)
            if not seen:
                assert out[0, h, i].tolist() == [0.0] * dim
                assert lse[0, h, i] == -math.inf
                continue
            assert abs(float(lse[0, h, i]) - math.log(total)) < 1e-6
            for d in range(dim):
                want = math.fsum(
                    w * float(v[0, 0, j, d]) for w, j in zip(weights, seen, strict=True)
                )
                assert abs(float(out[0, h, i, d]) - want / total) < 1e-14


@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_bf16_output_is_the_rounded_float64_result(rounding: str) -> None:
    q, k, v = tensors(1, 2, 2, 40, 33, 16, torch.bfloat16)
    exact = attention(q.double(), k.double(), v.double(), layout="bhsd", engine="reference")
    out = attention(q, k, v, layout="bhsd", rounding=rounding, engine="reference")
    assert torch.equal(out.view(torch.int16), round_to_bf16(exact, rounding).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_outputs_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    q, k, v = tensors(1, 2, 2, 40, 33, 16, dtype)
    exact = attention(q.double(), k.double(), v.double(), layout="bhsd", engine="reference")
    out = attention(q, k, v, layout="bhsd", engine="reference")
    assert torch.equal(out, exact.float().to(dtype))


def test_strided_views_and_out_between_canaries() -> None:
    packed = random((2, 9, 3, 3, 16), 5, torch.bfloat16)  # B, S, qkv, H, D
    q, k, v = packed.unbind(2)
    before = packed.clone()
    arena = torch.full((2, 9, 5, 16), 7.0, dtype=torch.bfloat16)
    out = attention(q, k, v, out=arena[:, :, 1:4], engine="reference")
    assert out.data_ptr() == arena[:, :, 1:4].data_ptr()
    want = attention(*(x.contiguous() for x in (q, k, v)), engine="reference")
    assert torch.equal(arena[:, :, 1:4], want)
    assert bool((arena[:, :, 0] == 7).all()) and bool((arena[:, :, 4] == 7).all())
    assert torch.equal(packed, before)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 2, 1, 50, 37, 16, torch.float64)
    whole = attention(q, k, v, layout="bhsd", causal=True, engine="reference")
    monkeypatch.setattr(reference_module, "_CHUNK_SCORES", 2 * 37 * 3)
    parts = attention(q, k, v, layout="bhsd", causal=True, engine="reference")
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_zero_and_negative_scale(scale: float) -> None:
    q, k, v = tensors(1, 1, 1, 5, 6, 8, torch.float64)
    want = exact(q, k, v, scale=scale)
    out, lse = attention(q, k, v, layout="bhsd", scale=scale, return_lse=True, engine="reference")
    torch.testing.assert_close(out, want.out, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, want.lse.float())
    if scale == 0.0:
        q[0, 0, 0, 0] = math.inf  # a zero scale ignores the queries altogether
        assert torch.equal(attention(q, k, v, layout="bhsd", scale=0.0, engine="reference"), out)


def test_values_that_are_not_finite_spoil_only_rows_that_see_them() -> None:
    q, k, v = tensors(1, 1, 1, 4, 4, 8, torch.float64)
    clean = attention(q, k, v, layout="bhsd", causal=True, engine="reference")
    v[0, 0, 2, 1] = math.inf
    v[0, 0, 3, 2] = math.nan
    out = attention(q, k, v, layout="bhsd", causal=True, engine="reference")
    assert torch.equal(out[0, 0, :2], clean[0, 0, :2])
    assert out[0, 0, 2, 1] == math.inf and bool(torch.isfinite(out[0, 0, 2, 2:]).all())
    assert out[0, 0, 3, 1] == math.inf and bool(torch.isnan(out[0, 0, 3, 2]))


def test_an_engine_lists_every_reason() -> None:
    bad = LiteRequest(
        batch=1, q_heads=3, kv_heads=2, q_len=4, kv_len=4, head_dim=8, dtype=torch.float32,
        device=torch.device("meta"), layout="bshd", scale=math.inf, causal=True, rounding="rtz",
        return_lse=False, geometry=TileGeometry(16, 16, 8), threshold=-1.0, descending=False,
        soft_skip=False,
    )  # fmt: skip
    reasons = get("reference").reasons(bad)
    for part in (
        "runs on cpu tensors, got meta",
        "rounding 'rtz' is for bf16 outputs",
        "LiteAttention is for non-causal self-attention",
    ):
        assert any(part in reason for reason in reasons), part
    assert len(reasons) == 3


def test_a_refused_request_says_what_to_use() -> None:
    x = torch.ones(1, 4, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="'rtz' is for bf16 outputs"):
        attention(x, x, x, rounding="rtz", engine="reference")


def test_preferred_tile_needs_no_tensor() -> None:
    q = torch.ones(1, 4, 1, 64)
    assert default_geometry(q, "reference") == TileGeometry(128, 64, 32)
