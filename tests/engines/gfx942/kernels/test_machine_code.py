"""Each kernel's machine code by itself on the software MI300X, its checkers on.

The folders above run whole requests through the engine; here are the parts: the packed layout bit
for bit, parts and whole tiles in one launch, merging of extreme states, scores of -inf.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from liteattention_rocm.engines.gfx942 import manifest
from liteattention_rocm.engines.rounding import round_to_bf16
from tests.oracle.attention import exact_rows, expect_close
from tests.oracle.tensors import normal

from . import machine

pytestmark = pytest.mark.usefixtures("emulator")


def random_bits(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    return bits.view(torch.bfloat16)


def test_structures_have_the_kernels_sizes() -> None:
    for entry in manifest.read().objects:
        struct = machine.STRUCTS[entry.file.removesuffix(".co")]
        assert {k.kernarg_bytes for k in entry.kernels} == {ctypes.sizeof(struct)}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_values_are_packed_bit_for_bit(rows: int, dim: int) -> None:
    # any bit pattern, NaN included, as every third row and the middle heads of a larger buffer
    buffer = random_bits(2, 3 * rows, 4, dim + 2)
    v = buffer[:, ::3, 1:3, :dim]
    blocks = -(-rows // 64)
    size = 2 * 2 * blocks * 64 * dim
    guarded = torch.full((size + 128,), 7.0).bfloat16()
    v_t = guarded[64 : 64 + size]
    machine.transpose_v(v, v_t)
    assert (guarded[:64] == 7.0).all() and (guarded[-64:] == 7.0).all()

    # [tile][pair][group][column][half][e]: key 16 pair + 8 half + 4 group + e, head dim
    # 32 tile + 16 (column / 16) + 8 (column / 4 % 2) + 4 (column / 8 % 2) + column % 4.
    got = v_t.view(torch.int16).view(2, 2, blocks, dim // 32, 4, 2, 2, 2, 2, 4, 2, 4)
    padded = torch.zeros(2, blocks * 64, 2, dim, dtype=torch.int16)
    padded[:, :rows] = v.view(torch.int16)
    keys = padded.permute(0, 2, 1, 3).view(2, 2, blocks, 4, 2, 2, 4, dim // 32, 2, 2, 2, 4)
    # ...[pair][half][group][e][tile][column / 16][column / 4 % 2][column / 8 % 2][column % 4]
    expected = keys.permute(0, 1, 2, 7, 3, 5, 8, 10, 9, 11, 4, 6)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("whole_tiles", "splits", "kv_len"),
    [(4, 1, 200), (0, 2, 200), (1, 3, 200), (3, 4, 256), (2, 1, 65)],
)
def test_whole_tiles_and_parts_in_one_launch(
    whole_tiles: int, splits: int, kv_len: int, dim: int
) -> None:
    # 4 tiles: 2 heads x 2 q blocks, the second with 6 rows; the output lies among canaries
    q, k, v = normal(1, 390, 2, dim), normal(1, kv_len, 1, dim), normal(1, kv_len, 1, dim, seed=1)
    guarded = torch.full((1, 400, 4, dim), 7.0).bfloat16()
    out = guarded[:, 5:395, 1:3]
    lse = torch.full((1, 2, 390), math.nan)
    machine.dense(q, k, v, out, lse, whole_tiles=whole_tiles, splits=splits)
    expect_close(out, lse, exact_rows(q, k, v))
    if whole_tiles:  # a whole tile does not depend on what the others do
        alone = torch.empty(1, 390, 2, dim).bfloat16()
        machine.dense(q, k, v, alone, None)
        assert torch.equal(alone[:, :256, 0], out[:, :256, 0])
    out.fill_(7.0)
    assert (guarded == 7.0).all()


@pytest.mark.parametrize("mapping", [1, 2, 3])
def test_every_mapping_gives_the_same_bits(mapping: int) -> None:
    # 18 tiles of 2 batches x 3 heads x 3 q blocks, 11 of them whole
    q, k = normal(2, 800, 3, 64), normal(2, 130, 1, 64)
    results = []
    for kind in (0, mapping):
        out, lse = torch.empty_like(q), torch.empty(2, 3, 800)
        machine.dense(q, k, k, out, lse, mapping=kind)
        parts, parts_lse = torch.empty_like(q), torch.empty(2, 3, 800)
        machine.dense(q, k, k, parts, parts_lse, mapping=kind, whole_tiles=11, splits=2)
        assert (parts.double() - out.double()).abs().max() <= 2.0**-7
        assert (parts_lse - lse).abs().max() <= 1e-5
        results.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("splits", [1, 2])
def test_fp16(splits: int, dim: int) -> None:
    q, k, v = (normal(1, n, h, dim, seed=n).half() for n, h in ((390, 2), (333, 1), (334, 1)))
    v = v[:, :333] * 100
    out, lse = torch.empty_like(q), torch.empty(1, 2, 390)
    options = {} if splits == 1 else {"whole_tiles": 1, "splits": splits}
    machine.dense(q, k, v, out, lse, **options)  # type: ignore[arg-type]
    expect_close(out, lse, exact_rows(q, k, v), p_as_output=True)
    # what fp16 cannot hold becomes infinite, and does not spoil its neighbours
    v[..., 0] = 65504.0
    v[0, :, 0, 1] = torch.inf
    machine.dense(q, k, v, out, lse)
    assert torch.isinf(out[..., 1]).all() and torch.isfinite(out[..., 2:]).all()


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7, 1e-3])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = normal(1, 20, 1, 64), normal(1, 150, 1, 64), normal(1, 150, 1, 64, seed=1)
    q, k = q * 0.5, k * 0.25
    out, lse = torch.empty_like(q), torch.empty(1, 1, 20)
    machine.dense(q, k, v, out, lse, scale=scale)
    expect_close(out, lse, exact_rows(q, k, v, scale=scale))


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_of_minus_infinity_weigh_nothing(splits: int) -> None:
    # the whole first K block scores -inf, so the running maximum stays -inf for a block
    q, k, v = normal(1, 16, 1, 64), normal(1, 128, 1, 64), normal(1, 128, 1, 64, seed=1)
    q[..., 0] = 1.0
    k[:, :64, :, 0] = -math.inf
    k[:, 64:, :, 0] = 0.0
    out, lse = torch.empty_like(q), torch.empty(1, 1, 16)
    options = {} if splits == 1 else {"whole_tiles": 0, "splits": splits}
    machine.dense(q, k, v, out, lse, **options)  # type: ignore[arg-type]
    expect_close(out, lse, exact_rows(q, k[:, 64:], v[:, 64:]))
    # no key at all: 0 and -inf
    k[..., 0] = -math.inf
    machine.dense(q, k, v, out, lse, **options)  # type: ignore[arg-type]
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_no_bank_conflict_on_the_way_to_the_matrix_core() -> None:
    for dim in (64, 128):
        q, k = normal(1, 256, 1, dim), normal(1, 256, 1, dim)
        report = machine.dense(q, k, k, torch.empty_like(q), None)
        reads = [e for e in report.executed if e.name == "ds_read_b128"]
        # 8 waves x 4 blocks of K and of V, 64 keys each, 64 lanes x 16 bytes a read
        assert sum(e.times for e in reads) == 2 * 8 * 4 * 64 * dim * 2 // 1024
        assert sum(e.bank_conflicts for e in reads) == 0
        assert report.counters["lds_dma_bytes"] == (2 * 256 + 64) * dim * 2  # one finds nothing


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_merge_of_one_part_is_the_rounding_model(rounding: str, dim: int) -> None:
    # every exponent, subnormals and NaN included, with mantissas around the ties
    tails = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x7F8000])
    bits = (torch.arange(512)[:, None] << 23) + tails[None]
    x = (bits.flatten() - ((bits.flatten() >> 31) << 32)).int().view(torch.float32)
    x = x[x.view(torch.int32) != -(2**31)]  # -0 + 0 is 0
    rows = -(-x.numel() // dim)
    part = torch.zeros(1, machine.Q_BLOCK, dim)
    part.view(-1)[: x.numel()] = x
    stats = torch.zeros(1, 2, machine.Q_BLOCK)
    stats[:, 1] = 1.0
    out = torch.empty(1, rows, 1, dim).bfloat16()
    machine.merge(part, stats, out, None, 0, 1, rounding)
    expected = round_to_bf16(part[0, :rows], rounding)  # type: ignore[arg-type]
    got = out[0, :, 0]
    assert torch.equal(got.isnan(), expected.isnan())
    same = got.view(torch.int16) == expected.view(torch.int16)
    assert (same | expected.isnan()).all()


def test_merge_of_extreme_parts() -> None:
    torch.manual_seed(0)
    dim, splits, rows = 64, 3, 256
    part = torch.randn(splits, rows, dim)
    maxima = torch.randn(splits, rows) * 50
    sums = torch.rand(splits, rows) * 100 + 1
    maxima[0, ::5], sums[0, ::5], part[0, ::5] = -math.inf, 0.0, 0.0  # a part without a key
    maxima[1, ::15], sums[1, ::15], part[1, ::15] = -math.inf, 0.0, 0.0
    maxima[:, 7], sums[:, 7], part[:, 7] = -math.inf, 0.0, 0.0  # a row without any
    sums[2, 9], part[2, 9] = math.nan, math.nan
    out, lse = torch.empty(1, rows, 1, dim).bfloat16(), torch.empty(1, 1, rows)
    machine.merge(part, torch.stack([maxima, sums], 1).contiguous(), out, lse, 0, splits, "rtne")
    top = maxima.double().amax(0)
    weight = torch.exp2(maxima.double() - torch.where(top.isinf(), 0, top))
    total = (weight * sums).sum(0)
    expected = (weight[..., None] * part).sum(0) / total[:, None]
    usual = torch.ones(rows, dtype=torch.bool)
    usual[[7, 9]] = False
    error = (out[0, :, 0].double() - expected).abs()[usual]
    assert (error <= expected.abs()[usual] * 2.0**-8 + 1e-5).all()
    exact_lse = (top + total.log2()) * math.log(2)
    assert (lse[0, 0].double() - exact_lse).abs()[usual].max() <= 2e-5
    assert (out[0, 7] == 0).all() and torch.isneginf(lse[0, 0, 7])
    assert out[0, 9].isnan().all() and lse[0, 0, 9].isnan()
