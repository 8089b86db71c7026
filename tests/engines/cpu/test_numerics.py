"""The CPU engine against float64, on every instruction-set path."""

from __future__ import annotations

import math

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import engines
from liteattention_rocm.engines import cpu
from liteattention_rocm.engines.rounding import round_to_bf16
from tests.oracle.attention import bound, exact, expect_close, expect_no_worse_than_twice_sdpa
from tests.oracle.tensors import qkv

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


ISAS = ["amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"]


@pytest.mark.parametrize("name", ISAS)
def test_the_engine_is_tried_on(name: str) -> None:
    assert set(cpu.available_isas()) <= set(ISAS)
    if name not in cpu.available_isas():
        pytest.skip(f"this processor has no {name}: no test of that path is collected")


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, **options: object
) -> None:
    out, lse = liteattention_rocm.attention(
        q, k, v, layout="bhsd", causal=causal, return_lse=True, engine="cpu", **options
    )
    expected = exact(q, k, v, causal=causal, scale=options.get("scale"))
    expect_close(out, lse, expected, str(options.get("rounding", "rtne")))
    assert (out[lse.isneginf()] == 0).all()


SHAPES = [
    # every length around a tile or block edge, and primes
    *[(1, 2, 2, s, s, 64) for s in (1, 15, 63, 64, 65, 127, 128, 129, 383, 384, 385, 521)],
    (1, 2, 2, 1, 1021, 128),
    (2, 3, 3, 100, 77, 128),
    (1, 2, 1, 300, 50, 128),
    # GQA up to 16
    (2, 4, 2, 70, 130, 64),
    (1, 16, 1, 33, 97, 128),
    # head dims: every remainder of a tile row
    *[(1, 2, 1, 67, 201, d) for d in (8, 16, 24, 40, 72, 80, 96, 120, 136, 192, 256)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_within_the_derived_bound(isa: str, dtype: torch.dtype, causal: bool) -> None:
    for i, shape in enumerate(SHAPES):
        check(*qkv(*shape, dtype, seed=i), causal=causal)


def test_every_head_dim(isa: str) -> None:
    for d in range(8, 257, 8):
        check(*qkv(1, 1, 1, 20, 70, d, torch.bfloat16, seed=d))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7, 1e-3, -2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_finite_scale(isa: str, scale: float, dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 2, 1, 40, 150, 32, dtype)
    check(q * 0.5, k * 0.5, v, scale=scale)


def test_peaked_and_large_scores(isa: str) -> None:
    # Scores of several hundred: only differences to the maximum may matter.
    q, k, v = qkv(1, 2, 2, 130, 260, 64, torch.bfloat16)
    out, lse = liteattention_rocm.attention(
        q * 6, k * 6, v, layout="bhsd", return_lse=True, engine="cpu"
    )
    expected = exact(q * 6, k * 6, v)
    # fp32 scores of magnitude 300 carry 2e-5; probabilities inherit it.
    assert ((out.double() - expected.out).abs() <= bound(expected, q.dtype) * 1.02 + 1e-4).all()
    assert ((lse.double() - expected.lse).abs() / expected.lse.abs()).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("dim", [64, 128])
def test_no_worse_than_twice_sdpa(dtype: torch.dtype, dim: int) -> None:
    for seed in range(4):
        q, k, v = qkv(1, 2, 2, 512, 1000, dim, dtype, seed)
        ours = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
        expect_no_worse_than_twice_sdpa(ours, q, k, v)


def test_one_key_returns_its_value_exactly(isa: str) -> None:
    for dtype in DTYPES:
        q, k, v = qkv(1, 4, 2, 9, 1, 64, dtype)
        out = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
        assert torch.equal(out, v.repeat_interleave(2, 1).expand_as(out))


@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_rounding_is_the_model_applied_to_fp32(isa: str, rounding: str) -> None:
    # One key: the fp32 result before rounding is v itself. fp32 values with interesting tails are
    # made by averaging two keys of equal score: (a + b) / 2 is exact in fp32.
    bits = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16)
    a = bits.view(torch.bfloat16)
    a = a[a.float().abs().log2().abs() < 100]
    b = torch.nextafter(a, torch.full_like(a, math.inf))
    n = a.numel() // 64 * 64
    v = torch.stack([a[:n].view(1, -1, 64), b[:n].view(1, -1, 64)], dim=2)
    heads = v.shape[1]
    q = torch.zeros(1, heads, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, heads, 2, 64, dtype=torch.bfloat16)
    out = liteattention_rocm.attention(q, k, v, layout="bhsd", rounding=rounding, engine="cpu")
    middle = (v[:, :, 0].float() + v[:, :, 1].float()) * 0.5
    expected = round_to_bf16(middle, rounding)
    assert torch.equal(out[:, :, 0].view(torch.int16), expected.view(torch.int16))


def test_nan_and_inf_stay_in_their_rows(isa: str) -> None:
    q, k, v = qkv(1, 1, 1, 70, 100, 64, torch.bfloat16)
    clean = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
    q[0, 0, 17, 3] = math.nan
    out = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
    assert out[0, 0, 17].isnan().all()
    others = torch.arange(70) != 17
    assert torch.equal(out[:, :, others], clean[:, :, others])
    v[0, 0, 5, 9] = math.inf
    out = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
    assert out[0, 0, others, 9].isinf().all() and out[0, 0, others, 8].isfinite().all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strides_are_followed_and_neighbours_untouched(isa: str, layout: str) -> None:
    # q, k, v and out are slices of larger buffers whose rest is NaN (inputs) or a canary (out).
    b, h, s, d = 2, 3, 90, 64
    torch.manual_seed(1)
    shape = (b, s, h, d) if layout == "bshd" else (b, h, s, d)
    qkv = torch.full((*shape[:3], 5, d + 8), math.nan, dtype=torch.bfloat16)
    q, k, v = (qkv[..., i, :d] for i in (0, 2, 4))
    for t in (q, k, v):
        t.copy_(torch.randn(shape))
    buffer = torch.full((*shape[:3], 3, d + 8), 7.0, dtype=torch.bfloat16)
    out = buffer[..., 1, :d]
    result = liteattention_rocm.attention(q, k, v, layout=layout, out=out, engine="cpu")
    assert result is out
    plain = liteattention_rocm.attention(
        q.contiguous(), k.contiguous(), v.contiguous(), layout=layout, engine="cpu"
    )
    assert torch.equal(out, plain)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def test_expanded_batch_and_heads(isa: str) -> None:
    q, k, v = qkv(1, 1, 1, 40, 80, 64, torch.bfloat16)
    out = liteattention_rocm.attention(
        q.expand(3, 4, -1, -1),
        k.expand(3, 2, -1, -1),
        v.expand(3, 2, -1, -1),
        layout="bhsd",
        engine="cpu",
    )
    one = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
    assert torch.equal(out, one.expand_as(out))


def test_extents_past_4_gib() -> None:
    # Rows 1.1 GiB apart: byte offsets pass 2^32 from row 4 on. Only touched pages take memory.
    stride = 600_000_000
    storage = torch.empty(stride * 4 + 64, dtype=torch.bfloat16)
    k = storage.as_strided((1, 5, 1, 64), (0, stride, 64, 1))
    torch.manual_seed(0)
    k.copy_(torch.randn(1, 5, 1, 64))
    q = torch.randn(1, 3, 1, 64).bfloat16()
    out = liteattention_rocm.attention(q, k, k, engine="cpu")
    assert torch.equal(out, liteattention_rocm.attention(q, k.clone(), k.clone(), engine="cpu"))


def test_bit_equal_whatever_the_threads(isa: str) -> None:
    q, k, v = qkv(2, 4, 2, 333, 555, 128, torch.bfloat16)
    results = []
    for n in (1, 2, 3, 8, 2):
        torch.set_num_threads(n)
        results.append(
            liteattention_rocm.attention(q, k, v, layout="bhsd", return_lse=True, engine="cpu")
        )
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_passes_over_heads_equal_one_pass() -> None:
    # 24 heads x 16,384 keys x 128 x 2 bytes of values pass the packing budget of 192 MiB several
    # times over in fp32; each head must come out as it does alone.
    q, k, v = qkv(1, 1, 1, 4, 16384, 128, torch.float32)
    many = liteattention_rocm.attention(
        q.expand(1, 24, -1, -1),
        k.expand(1, 24, -1, -1),
        v.expand(1, 24, -1, -1),
        layout="bhsd",
        engine="cpu",
    )
    one = liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
    assert torch.equal(many, one.expand_as(many))


def test_best_path_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engines.ISA_VARIABLE, raising=False)
    assert cpu.chosen_isa() == cpu.available_isas()[0]
    assert cpu.available_isas()[-1] == "portable"
    engines.settings.cache_clear()
    monkeypatch.setenv(engines.ISA_VARIABLE, "mmx")
    q, k, v = qkv(1, 1, 1, 4, 4, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="LITEATTENTION_CPU_ISA='mmx' is not available here"):
        liteattention_rocm.attention(q, k, v, layout="bhsd", engine="cpu")
