"""LiteAttention in machine code, on the software MI300X with its checkers on.

Queries and keys lie on a grid of eighths within +-4, so that every dot product is a multiple of
1/64 below 2^12 and exact in fp32 in whatever order a kernel adds. Lists must then equal the
oracle's in every bit, with no tolerance for near ties.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from liteattention_emulator import Stream, on_stream
from liteattention_rocm import (
    MI300X_GEOMETRY,
    LiteAttention,
    SkipPolicy,
    _core,
    attention,
    lite_attention,
)
from liteattention_rocm.engines import gfx942
from liteattention_rocm.lite import bitmap
from tests.lite import stray_bits

from .calls import run_dense

pytestmark = pytest.mark.usefixtures("emulator", "memory_of_nan")

STEPS = 8
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Case:
    q_len: int
    kv_len: int
    dim: int = 64
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    dtype: torch.dtype = torch.bfloat16
    rounding: str = "rtne"
    layout: str = "bhsd"
    peaked: bool = True
    scale: float = 0.25
    policy: dict[str, Any] = field(default_factory=lambda: {"threshold": -4.0})

    def tensors(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, H, S, D]. Steps resemble each other, as those of a denoising loop do.

        Peaked: rows look one way and K blocks lie at different heights along it, so whole tiles
        fall below what their rows have seen. Diffuse: all scores are alike.
        """
        fixed = torch.Generator().manual_seed(5)
        fresh = torch.Generator().manual_seed(100 + step)

        def randn(*shape: int) -> torch.Tensor:
            steady = torch.randn(shape, generator=fixed)
            return 0.9 * steady + 0.4 * torch.randn(shape, generator=fresh)

        def grid(x: torch.Tensor) -> torch.Tensor:
            return ((x * 8).round() / 8).clamp(-4, 4)

        heads = self.kv_heads * self.group
        q = randn(self.batch, heads, self.q_len, self.dim)
        k = randn(self.batch, self.kv_heads, self.kv_len, self.dim)
        if self.peaked:
            common = torch.randn(1, 1, 1, self.dim, generator=fixed)
            height = randn(self.batch, self.kv_heads, -(-self.kv_len // 64))
            height = height.repeat_interleave(64, -1)[..., : self.kv_len, None]
            q = common + 0.4 * q
            k = common * height * (6 / math.sqrt(self.dim)) + 0.25 * k
        v = randn(self.batch, self.kv_heads, self.kv_len, self.dim)
        made = [x.to(self.dtype) for x in (grid(q), grid(k), v)]
        if self.layout == "bshd":  # strided on purpose
            made = [x.transpose(1, 2) for x in made]
        return made[0], made[1], made[2]

    def bound(self, exact: torch.Tensor, mass: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Largest error that rounding allows, per element; ``mass`` is attention over |v|.

        Probabilities are rounded to the dtype of v (half a unit of each, in the numerator and at
        worst in its sum as well; in fp16 those below 2^-14 by up to 2^-25), the output once (half
        a unit; towards zero a whole one). fp32 work adds 2^-24 for each of the keys summed, twice,
        and for scores of up to 2^9 in log2 units.
        """
        unit = HALF_ULP[self.dtype]
        work = (2 * self.kv_len + 2**9) * 2.0**-24
        inner = (2 * unit + work) * mass
        if self.dtype == torch.float16:
            inner = inner + self.kv_len * 2.0**-24 * v.abs().amax().double()
        output = unit * (2 if self.rounding == "rtz" else 1)
        return inner + output * (exact.abs() + inner) + 2.0**-24


NOTHING = {"threshold": -1e4}  # far below what any tile falls to
MASKS = {"threshold": -3.0, "must_do": ((100, 130),), "must_skip": ((256, 450), (512, 576))}

CASES = {
    "d64": Case(400, 1000),
    "d128, GQA, bshd": Case(257, 450, 128, kv_heads=2, group=2, layout="bshd"),
    "batches, RTNA": Case(97, 449, batch=2, kv_heads=2, rounding="rtna"),
    "a row, RTZ, d128": Case(1, 640, 128, rounding="rtz"),
    "two words of bits": Case(60, 2111, policy={"threshold": -2.0}),
    "fp16": Case(390, 650, dtype=torch.float16),
    "fp16, d128, soft": Case(
        200, 321, 128, dtype=torch.float16, policy={"threshold": -3.0, "soft_skip": True}
    ),
    "soft": Case(500, 960, policy={"threshold": -3.0, "soft_skip": True}),
    "soft, descending, d128": Case(
        257, 513, 128, policy={"threshold": -3.0, "soft_skip": True, "direction": "descending"}
    ),
    "ascending": Case(130, 767, policy={"threshold": -4.0, "direction": "ascending"}),
    "masks": Case(390, 900, group=2, policy=MASKS),
    "masks, soft": Case(100, 900, 128, policy=MASKS | {"soft_skip": True}),
    "retested": Case(100, 640, policy={"threshold": -4.0, "retest_every": 3}),
    "negative scale": Case(100, 500, scale=-0.25, policy={"threshold": -6.0}),
    "diffuse": Case(257, 512, peaked=False, policy={"threshold": -2.0}),
    "diffuse, soft, d128": Case(
        100, 640, 128, peaked=False, policy={"threshold": -1.0, "soft_skip": True}
    ),
    "nothing to skip": Case(100, 500, policy=NOTHING),
    "one block": Case(50, 33),
}
#: Those in which no tile is dropped, or hardly any; in all others many are, and some stay.
DENSE_LIKE = {"diffuse", "diffuse, soft, d128", "nothing to skip", "one block"}

#: What the others cover one thing at a time.
SLOW = {
    "masks, soft",
    "fp16, d128, soft",
    "retested",
    "ascending",
    "diffuse, soft, d128",
    "soft, descending, d128",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_eight_steps_equal_the_oracle(name: str) -> None:
    case = CASES[name]
    policy = SkipPolicy(**{"warmup_steps": 0, **case.policy})
    machine = LiteAttention(policy, engine="gfx942")
    oracle, masses = (
        LiteAttention(policy, geometry=MI300X_GEOMETRY, engine="reference") for _ in range(2)
    )
    common = {"layer": "a", "layout": case.layout, "scale": case.scale, "return_lse": True}
    for step in range(STEPS):
        q, k, v = case.tensors(step)
        out, lse = machine(q, k, v, step=step, rounding=case.rounding, **common)
        q64, k64, v64 = q.double(), k.double(), v.double()
        exact, exact_lse = oracle(q64, k64, v64, step=step, **common)
        mass, _ = masses(q64, k64, v64.abs(), step=step, **common)
        lists = machine.lists("a"), oracle.lists("a")
        assert torch.equal(*lists), f"step {step}: {int((lists[0] ^ lists[1]).ne(0).sum())} words"
        ratio = (out.double() - exact).abs() / case.bound(exact, mass, v)
        assert ratio.max() <= 1, f"step {step}: worst {ratio.max():.2f} x the bound"
        torch.testing.assert_close(lse, exact_lse.float(), rtol=2.0**-23, atol=1e-5)
    assert machine.statistics.to_records() == oracle.statistics.to_records()
    if name not in DENSE_LIKE:  # the case is worth something only if tiles are dropped and kept
        assert 0.05 < machine.statistics.sparsity < 0.95
    elif case.policy is NOTHING:
        assert machine.statistics.sparsity == 0


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_minus_infinity_equals_the_dense_kernel_bit_for_bit(
    dim: int, dtype: torch.dtype, descending: bool
) -> None:
    case = Case(390, 450, dim, group=2, dtype=dtype)
    q, k, v = case.tensors(0)
    read = bitmap.full(1, 2, 2, 8)
    write = torch.zeros_like(read)
    out, lse = lite_attention(
        q, k, v, read, write, threshold=-math.inf, descending=descending, soft_skip=descending,
        layout="bhsd", return_lse=True, engine="gfx942",
    )  # fmt: skip
    assert torch.equal(write, read)
    dense, dense_lse = torch.empty_like(q), torch.empty(1, 2, 390)
    engine, scale = gfx942.Gfx942Engine(kv_splits=1), 1 / math.sqrt(dim)
    run_dense(engine, q, k, v, dense, dense_lse, "bhsd", scale=scale)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)


@pytest.mark.parametrize("branches", ["separate", "shared"])
def test_a_policy_of_minus_infinity_equals_dense_at_every_step(branches: str) -> None:
    case = Case(50, 1000)
    # dense calls of this shape are computed in parts, lite ones are not
    assert _core.plan_dense(_core.DenseShape(1, 1, 1, 50, 1000, 64), 304, 0).splits > 1
    policy = SkipPolicy(
        threshold=(-math.inf, -math.inf, -4.0, -math.inf), branches=branches, warmup_steps=0
    )
    machine = LiteAttention(policy, engine="gfx942")
    oracle = LiteAttention(policy, geometry=MI300X_GEOMETRY, engine="reference")
    for step in range(4):
        q, k, v = case.tensors(step)
        for branch in ("cond", "uncond"):
            common = {"step": step, "layer": "a", "branch": branch, "layout": "bhsd"}
            out = machine(q, k, v, **common)
            oracle(q, k, v, **common)
            if step < 2:
                assert torch.equal(out, attention(q, k, v, layout="bhsd", engine="gfx942"))
            else:  # what step 2 dropped stays dropped, also at -inf
                lists = machine.lists("a", branch)
                assert torch.equal(lists, oracle.lists("a", branch))
                assert int(bitmap.count(lists)) < 16
    assert machine.statistics.to_records() == oracle.statistics.to_records()


def test_a_q_block_without_tiles_gives_zeros() -> None:
    case = Case(400, 300)
    q, k, v = case.tensors(0)
    read = bitmap.full(1, 1, 2, 5)
    read[:, :, 1] = 0
    write = torch.full_like(read, -1)
    out, lse = lite_attention(
        q, k, v, read, write, threshold=-4.0, layout="bhsd", return_lse=True, engine="gfx942"
    )
    assert (out[:, :, 256:] == 0).all() and (lse[:, :, 256:] == -math.inf).all()
    assert (write[:, :, 1] == 0).all() and int(bitmap.count(write)) > 0
    assert lse[:, :, :256].isfinite().all()


def test_states_of_two_shapes_on_two_streams_do_not_meet() -> None:
    """Interleaved in one thread, and side by side in two, one object or two: as if alone."""
    cases = [Case(257, 700, policy={"threshold": -3.0}), Case(70, 900, 128, kv_heads=2)]
    policy = SkipPolicy(threshold=-3.0, soft_skip=True, warmup_steps=0)

    def step_of(lite: LiteAttention, index: int, step: int) -> list[torch.Tensor]:
        q, k, v = cases[index].tensors(step)
        name = f"layer {index}"
        out = lite(q, k, v, step=step, layer=name, generation=index, layout="bhsd")
        return [out, lite.lists(name, generation=index)]

    def alone(index: int, lite: LiteAttention) -> list[torch.Tensor]:
        return [x for step in range(3) for x in step_of(lite, index, step)]

    expected = [alone(i, LiteAttention(policy, engine="gfx942")) for i in range(2)]
    assert all(int(bitmap.count(found[-1])) < int(bitmap.count(found[1])) for found in expected)

    shared = LiteAttention(policy, engine="gfx942")
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(3):
        for index in range(2):
            found[index] += step_of(shared, index, step)
    for index in range(2):
        assert all(map(torch.equal, found[index], expected[index]))

    streams = [Stream() for _ in range(2)]

    def work(index: int, lite: LiteAttention) -> list[torch.Tensor]:
        with on_stream(streams[index]):
            return alone(index, lite)

    objects = [LiteAttention(policy, engine="gfx942") for _ in range(2)]
    one = LiteAttention(policy, engine="gfx942")
    for owners in (objects, [one, one]):
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, range(2), owners))
        for index in range(2):
            assert all(map(torch.equal, results[index], expected[index]))
    for stream in streams:
        stream.close()


def test_threads_on_views_of_one_tensor() -> None:
    """Spans that begin at one address and differ in length, registered by two threads."""
    q, k, v = Case(40, 640).tensors(0)
    engine = gfx942.Gfx942Engine(kv_splits=1)

    def run(rows: int) -> list[torch.Tensor]:
        results = []
        for _ in range(25):
            short = [x[:, :, :rows] for x in (k, v)]
            out = torch.empty_like(q)
            run_dense(engine, q, *short, out, None, "bhsd")
            results.append(out)
        return results

    expected = [run(rows)[0] for rows in (70, 640)]
    with ThreadPoolExecutor(2) as pool:
        for found, alone in zip(pool.map(run, (70, 640)), expected, strict=True):
            assert all(torch.equal(out, alone) for out in found)


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_one_engine_again_and_again(times: int) -> None:
    case = Case(5, 130)
    q, k, v = case.tensors(0)
    lite = LiteAttention(SkipPolicy(threshold=-2.0, warmup_steps=0), engine="gfx942")
    lite(q, k, v, step=0, layer="a", layout="bhsd")
    first = lite(q, k, v, step=1, layer="a", layout="bhsd")  # the step again: the same lists
    lists = lite.lists("a")
    for _ in range(times):
        assert torch.equal(lite(q, k, v, step=1, layer="a", layout="bhsd"), first)
    assert torch.equal(lite.lists("a"), lists)


def test_bits_past_the_last_k_block_are_ignored() -> None:
    stray_bits.check("gfx942", 200)
