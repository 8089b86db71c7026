"""The CPU engine's skip lists, byte for byte, and its outputs, against the float64 oracle.

Queries and keys lie on a grid of eighths within +-4, so that every dot product is a multiple of
1/64 below 2^12: exact in fp32 in whatever order a kernel adds. The lists must then be equal in
every bit, with no tolerance for near ties.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from liteattention_rocm import LiteAttention, SkipPolicy, TileGeometry, attention, lite_attention
from liteattention_rocm.engines import ISA_VARIABLE
from liteattention_rocm.engines.cpu import available_isas
from liteattention_rocm.lite import bitmap
from tests.conftest import forget

from . import stray_bits

CASES = 200
STEPS = 3


@dataclass
class Case:
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    dtype: torch.dtype
    layout: str
    tile: TileGeometry
    threshold: float
    scale: float
    rounding: str
    soft_skip: bool
    descending: bool
    must_do: torch.Tensor | None
    must_skip: torch.Tensor | None


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 1, 2])
    q_block = rng.choice([64, 128, 192, 384])
    tile = TileGeometry(
        q_block, 64, rng.choice([n for n in (16, 32, 48, 64, 96, 128) if q_block % n == 0])
    )
    q_len = rng.choice([1, 15, 63, 64, 65, 127, 200, 257, 384, 385, 431])
    kv_len = rng.choice([1, 63, 64, 65, 191, 256, 300, 449, 640, 2111])
    if kv_len > 2000:  # more than one word of bits
        q_len = min(q_len, 200)
    k_blocks = tile.k_blocks(kv_len)
    blocks = rng.sample(range(k_blocks), k_blocks)
    forced, barred = rng.choice([0, 0, 1, 2]), rng.choice([0, 0, 1, 2])
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    return Case(
        batch=rng.choice([1, 1, 2]),
        heads=kv_heads * rng.choice([1, 1, 2, 3]),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        dim=rng.choice([8, 40, 64, 64, 128, 128, 256]),
        dtype=dtype,
        layout=rng.choice(["bshd", "bhsd"]),
        tile=tile,
        threshold=rng.choice([-0.25, -1.0, -2.0, -4.0, -4.0, -8.0, 0.0, -math.inf]),
        scale=rng.choice([1.0, 0.25, -0.25, 0.1, 0.0]),
        rounding=rng.choice(["rtne", "rtna", "rtz"]) if dtype == torch.bfloat16 else "rtne",
        soft_skip=rng.random() < 0.5,
        descending=rng.random() < 0.5,
        must_do=mask(blocks[:forced], k_blocks),
        must_skip=mask(blocks[forced : forced + barred], k_blocks),
    )


def mask(blocks: list[int], k_blocks: int) -> torch.Tensor | None:
    if not blocks:
        return None
    chosen = torch.zeros(k_blocks, dtype=torch.bool)
    chosen[blocks] = True
    return bitmap.pack(chosen)


def tensors(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a head look the same way and K blocks differ in height: whole tiles are skippable."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def grid(x: torch.Tensor) -> torch.Tensor:
        return ((x * 8).round() / 8).clamp(-4, 4)

    common = randn(1, 1, 1, case.dim)
    height = randn(case.batch, case.kv_heads, case.tile.k_blocks(case.kv_len))
    height = height.repeat_interleave(64, -1)[..., : case.kv_len, None]
    q = grid(common + 0.4 * randn(case.batch, case.heads, case.q_len, case.dim))
    k = grid(
        common * height / math.sqrt(case.dim) * 3
        + 0.25 * randn(case.batch, case.kv_heads, case.kv_len, case.dim)
    )
    v = randn(case.batch, case.kv_heads, case.kv_len, case.dim)
    found = [x.to(case.dtype) for x in (q, k, v)]
    if case.layout == "bshd":  # strided on purpose
        found = [x.transpose(1, 2) for x in found]
    return found[0], found[1], found[2]


def bound(case: Case, exact: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Largest error that rounding allows, per element; ``mass`` is attention over |v|.

    bf16 engines round P (2^-8 of each p, in the numerator and at worst in its sum as well) and
    the output (half a unit: 2^-8; towards zero a whole one: 2^-7). V is given in bf16. fp32 work
    adds 2^-24 for each of the keys summed, twice, and for scores of up to 2^9 in log2 units.
    """
    probability = 2.0**-7 if case.dtype == torch.bfloat16 else 0.0
    work = (2 * case.kv_len + 2**9) * 2.0**-24
    output = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[case.dtype]
    if case.rounding == "rtz":
        output *= 2
    inner = (probability + work) * mass
    return inner + output * (exact.abs() + inner) + 2.0**-25


def check(case: Case, seed: int) -> tuple[int, int, int]:
    """Run a few steps that feed their lists back; return (walked, dropped, soft) tile counts."""
    words = case.tile.words(case.kv_len)
    k_blocks = case.tile.k_blocks(case.kv_len)
    q_blocks = case.tile.q_blocks(case.q_len)
    read = bitmap.full(case.batch, case.heads, q_blocks, k_blocks)
    if seed % 3 == 0:  # a list with holes, empty rows included
        holes = torch.rand(read.shape[:3], generator=torch.Generator().manual_seed(seed)) < 0.3
        random_bits = torch.randint(
            -(2**31), 2**31, read.shape, generator=torch.Generator().manual_seed(seed + 1)
        ).int()
        read = (read & random_bits).masked_fill(holes[..., None], 0)
    walked = dropped = 0
    for step in range(STEPS):
        q, k, v = tensors(case, 1000 * seed + step)
        options = {
            "layout": case.layout, "scale": case.scale, "threshold": case.threshold,
            "descending": case.descending ^ (step % 2 == 1), "soft_skip": case.soft_skip,
            "must_do": case.must_do, "must_skip": case.must_skip, "geometry": case.tile,
            "return_lse": True,
        }  # fmt: skip
        write = torch.full_like(read, 0x3C3C3C3C)
        out, lse = lite_attention(
            q, k, v, read, write, rounding=case.rounding, engine="cpu", **options
        )
        again = torch.full_like(read, -1)
        torch.set_num_threads(2)
        out_again, lse_again = lite_attention(
            q, k, v, read, again, rounding=case.rounding, engine="cpu", **options
        )
        torch.set_num_threads(1)
        assert torch.equal(again, write) and torch.equal(lse_again, lse)
        assert torch.equal(out_again, out), "one thread and two differ"

        oracle = torch.zeros_like(read)
        q64, k64, v64 = q.double(), k.double(), v.double()
        exact, exact_lse = lite_attention(
            q64, k64, v64, read, oracle, engine="reference", **options
        )
        scratch = torch.zeros_like(read)
        mass, _ = lite_attention(q64, k64, v64.abs(), read, scratch, engine="reference", **options)
        assert write.shape == (case.batch, case.heads, q_blocks, words)
        assert torch.equal(write, oracle), f"step {step}: {int((write ^ oracle).ne(0).sum())} words"
        error = (out.double() - exact).abs()
        worst = (error / bound(case, exact, mass)).max()
        assert worst <= 1, f"step {step}: error is {float(worst):.3g} of its bound"
        torch.testing.assert_close(lse, exact_lse, rtol=2.0**-23, atol=1e-5)
        kept = read if case.must_do is None else read | case.must_do
        kept = kept if case.must_skip is None else kept & ~case.must_skip
        walked += int(bitmap.count(kept))
        dropped += int(bitmap.count(kept)) - int(bitmap.count(write))
        read = write
    return walked, dropped, int(case.soft_skip)


@pytest.mark.parametrize("group", range(10))
def test_lists_are_byte_equal_and_outputs_within_their_bound(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    isas = available_isas()
    walked = dropped = soft = 0
    for seed in range(group * CASES // 10, (group + 1) * CASES // 10):
        forget()
        monkeypatch.setenv(ISA_VARIABLE, isas[seed % len(isas)])
        case = draw(seed)
        try:
            counts = check(case, seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}, {isas[seed % len(isas)]}, {case}")
            raise
        walked, dropped, soft = walked + counts[0], dropped + counts[1], soft + counts[2]
    # the cases are worth something only if tiles are dropped and tiles are kept
    assert 0.05 < dropped / walked < 0.95 and soft >= 4


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_threshold_minus_infinity_equals_dense_bit_for_bit(
    seed: int, descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    isas = available_isas()
    monkeypatch.setenv(ISA_VARIABLE, isas[seed % len(isas)])
    case = draw(seed)
    q, k, v = tensors(case, seed)
    read = bitmap.full(
        case.batch, case.heads, case.tile.q_blocks(case.q_len), case.tile.k_blocks(case.kv_len)
    )
    write = torch.zeros_like(read)
    common = {
        "layout": case.layout,
        "scale": case.scale,
        "rounding": case.rounding,
        "return_lse": True,
        "engine": "cpu",
    }
    out, lse = lite_attention(
        q, k, v, read, write, threshold=-math.inf, descending=descending, soft_skip=case.soft_skip,
        must_do=case.must_do, geometry=case.tile, **common,
    )  # fmt: skip
    dense, dense_lse = attention(q, k, v, **common)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    assert torch.equal(write, read)


@pytest.mark.parametrize("direction", ["alternate", "ascending", "descending"])
def test_policy_with_minus_infinity_equals_dense_at_every_step(direction: str) -> None:
    policy = SkipPolicy(threshold=-math.inf, direction=direction, warmup_steps=0)
    lite = LiteAttention(policy, engine="cpu")
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        q, k, v = (torch.randn(1, 700, 2, 64, generator=generator) for _ in range(3))
        assert torch.equal(lite(q, k, v, step=step, layer="a"), attention(q, k, v, engine="cpu"))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("soft_skip", [False, True])
def test_a_nan_score_keeps_its_tile_and_the_row_s_later_ones(
    isa: str, descending: bool, soft_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN must not be voted away: the next step would hide it."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    tile = TileGeometry(64, 64, 16)
    generator = torch.Generator().manual_seed(3)
    shape = (1, 1, 640, 64)
    q, k, v = ((torch.randn(shape, generator=generator) * 8).round() / 8 for _ in range(3))
    # The blocks at both ends outshine the rest, so that all others can be dropped.
    k[:, :, :64], k[:, :, -64:] = q.mean(2, keepdim=True) * 40, q.mean(2, keepdim=True) * 40
    q = (q.mean(2, keepdim=True) * 8).round().expand(shape).contiguous()
    k = (k * 8).round() / 8
    for nan_key in (None, 200, 450):
        keys = k.clone()
        if nan_key is not None:
            keys[0, 0, nan_key, 5] = math.nan
        read = bitmap.full(1, 1, 10, 10)
        written = {}
        for engine in ("cpu", "reference"):
            written[engine] = torch.empty_like(read)
            lite_attention(
                q.bfloat16(), keys.bfloat16(), v.bfloat16(), read, written[engine], threshold=-4.0,
                descending=descending, soft_skip=soft_skip, geometry=tile, layout="bhsd",
                engine=engine,
            )  # fmt: skip
        assert torch.equal(written["cpu"], written["reference"])
        kept = bitmap.unpack(written["cpu"], 10)[0, 0, 0]
        assert kept.sum() < 10
        if nan_key is not None:
            assert kept[nan_key // 64]


@pytest.mark.parametrize("isa", [*available_isas(), "reference"])
@pytest.mark.parametrize("kv_len", [200, 2100])
def test_bits_past_the_last_k_block_are_ignored(
    isa: str, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa == "reference":
        return stray_bits.check("reference", kv_len)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    for dtype in (torch.bfloat16, torch.float32):
        stray_bits.check("cpu", kv_len, dtype)
    return None
