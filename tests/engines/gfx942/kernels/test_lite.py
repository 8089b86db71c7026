"""The LiteAttention kernel on the software MI300X against the byte-exact oracle, checkers on.

Inputs are small integers: every dot product is then exact in fp32 in any order of summation, and
the next step's bitmaps must equal the oracle's bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from liteattention_rocm.contract import MI300X_GEOMETRY, LiteRequest
from liteattention_rocm.engines.reference import vote
from liteattention_rocm.lite import bitmap
from tests.oracle.attention import bound, exact_rows, expect_lse, expect_out

from . import machine

pytestmark = pytest.mark.usefixtures("emulator")

TILE = MI300X_GEOMETRY


def integers(*shape: int, seed: int, top: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).bfloat16()


def peaked(
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dim: int,
    seed: int,
    reach: float = 1.0,
) -> list[torch.Tensor]:
    """q, k, v [B, S, H, D]: queries score high where keys have the same place, noise elsewhere.

    8 dims hold the place, from 0 to 1 over the sequence; queries go from 0 to ``reach`` only.
    """
    q = integers(batch, q_len, q_heads, dim, seed=seed, top=1)
    k = integers(batch, kv_len, kv_heads, dim, seed=seed + 1, top=1)
    for x, length, last in ((q, q_len, reach), (k, kv_len, 1.0)):
        place = torch.arange(length) / length * 8 * last
        for i in range(8):
            near = torch.clamp(6 - 5 * (place - i - 0.5).abs(), min=0).round()
            x[..., i] = near[None, :, None].bfloat16()
    return [q, k, integers(batch, kv_len, kv_heads, dim, seed=seed + 2)]


def request_of(q: torch.Tensor, k: torch.Tensor, scale: float, *step: Any) -> LiteRequest:
    """``step``: threshold, descending, soft_skip."""
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    return LiteRequest(
        batch, q_heads, kv_heads, q_len, kv_len, dim, q.dtype, q.device, "bshd", scale, False,
        "rtne", True, TILE, *step,
    )  # fmt: skip


def full(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    blocks = TILE.k_blocks(k.shape[1])
    shape = (q.shape[0], q.shape[2], TILE.q_blocks(q.shape[1]), blocks)
    return bitmap.pack(torch.ones(shape, dtype=torch.bool))


def mask(blocks: set[int], count: int) -> torch.Tensor:
    return bitmap.pack(torch.tensor([j in blocks for j in range(count)]))


def check_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    rounding: str = "rtne",
) -> None:
    """``rows`` bool [B, Hq, Sq, K blocks]: what each row attends to."""
    seen = rows.repeat_interleave(64, -1)[..., : k.shape[1]]
    expected = exact_rows(q, k, v, scale=scale, seen=seen)
    allowed = bound(expected, q.dtype, rounding, p_as_output=True)
    expect_out(out, expected, allowed)
    expect_lse(lse, expected.lse, rtol=1e-6)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    *,
    threshold: float = -6.0,
    scale: float | None = None,
    check: bool = True,
    must_do: torch.Tensor | None = None,
    must_skip: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """One step on the machine code, compared with the oracle: write, out, lse, report."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kind = (threshold, options.get("descending", False), options.get("soft_skip", False))
    expected, rows = vote(request_of(q, k, scale, *kind), q, k, read, must_do, must_skip)
    guarded = torch.full((read.numel() + 64,), 0x5A5A5A5A, dtype=torch.int32)
    write = guarded[32:-32].view_as(read)
    out = torch.full_like(q, 7.0)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    report = machine.lite(
        q, k, v, out, lse, read, write,
        threshold=threshold, scale=scale, must_do=must_do, must_skip=must_skip, **options,
    )  # fmt: skip
    assert (guarded[:32] == 0x5A5A5A5A).all() and (guarded[-32:] == 0x5A5A5A5A).all()
    assert torch.equal(write, bitmap.pack(expected))
    if check:
        check_output(q, k, v, rows, scale, out, lse, options.get("rounding", "rtne"))
    return write, out, lse, report


def run_steps(
    tensors: list[torch.Tensor], steps: int, *, first_descending: bool = False, **options: Any
) -> list[float]:
    """Alternating directions; the sparsity that each step leaves to the next."""
    q, k, v = tensors
    read = full(q, k)
    found = []
    for n in range(steps):
        descending = bool(n % 2) ^ first_descending
        read = step(q, k, v, read, descending=descending, **options)[0]
        found.append(bitmap.sparsity(read, TILE.k_blocks(k.shape[1])))
        assert found[-1] >= ([0.0, *found])[-2]
        k = k.roll(1, 1)  # scores move a little from step to step
    return found


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_eight_steps_equal_the_oracle(dim: int, soft_skip: bool) -> None:
    # 2 q blocks, the second with 100 rows: waves with all, some and none of their rows; ragged K
    found = run_steps(
        peaked(1, 2, 1, 484, 715, dim, seed=dim), 8, threshold=-3.0, scale=0.25,
        soft_skip=soft_skip, first_descending=soft_skip,
    )  # fmt: skip
    assert 0.05 < found[0] < found[-1] < 1.0


def test_diffuse_scores_skip_nothing_that_the_oracle_keeps() -> None:
    q, k, v = (integers(1, n, 1, 64, seed=n) for n in (256, 640, 641))
    v = v[:, :640]
    write, *_ = step(q, k, v, full(q, k), threshold=-6.0)
    assert bitmap.sparsity(write, 10) == 0.0
    # nearly equal maxima: a threshold of 0 drops tiles whose maxima are no larger in every row
    step(q, k * 0 + 1, v, full(q, k), threshold=0.0, descending=True)


@pytest.mark.parametrize("descending", [False, True])
def test_must_do_and_must_skip_at_both_ends(descending: bool) -> None:
    q, k, v = peaked(1, 1, 1, 256, 700, 64, seed=3, reach=0.2)
    if descending:  # far tiles must come after near ones to be dropped
        q[..., :8] = q[..., :8].flip(-1)
    empty_list = torch.zeros_like(full(q, k))
    do, skip = mask({0, 10}, 11), mask({1, 9, 10}, 11)
    for soft in (False, True):
        kinds: dict[str, Any] = {"scale": 0.25, "threshold": -0.5, "soft_skip": soft}
        write, *_ = step(q, k, v, full(q, k), must_do=do, descending=descending, **kinds)
        bits = bitmap.unpack(write, 11)[0, 0, 0]
        assert bits[0] and bits[10] and not bits.all()
        step(q, k, v, full(q, k), must_skip=skip, descending=descending, **kinds)
        # both: must-skip wins
        write, *_ = step(
            q, k, v, empty_list, must_do=do, must_skip=skip, descending=descending, **kinds
        )
        assert bitmap.unpack(write, 11)[0, 0, 0].nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("dim", [64, 128])
def test_an_empty_list_gives_zero_and_minus_infinity(dim: int) -> None:
    q, k, v = peaked(1, 2, 1, 400, 200, dim, seed=5)
    read = full(q, k)
    read[:, 0, 1] = 0
    write, out, lse, report = step(q, k, v, read)
    assert (write[0, 0, 1] == 0).all()
    assert (out[0, 256:, 0] == 0).all() and torch.isneginf(lse[0, 0, 256:]).all()
    assert torch.isfinite(lse[0, 1]).all()
    # 3 tiles of 4 K blocks, 64 MFMAs by each of 8 waves, and nothing for the empty one
    assert report.by_unit()["mfma"] == 3 * 4 * 64 * 8 * dim // 128
    # all of it empty, in an output among others: nothing else is written
    guarded = torch.full((1, 410, 4, dim), 7.0).bfloat16()
    inside = guarded[:, 5:405, 1:3]
    machine.lite(
        q, k, v, inside, lse, torch.zeros_like(read), write, threshold=-1.0, descending=True
    )
    assert (inside == 0).all() and torch.isneginf(lse).all() and (write == 0).all()
    inside.fill_(7.0)
    assert (guarded == 7.0).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_skipped_costs_nothing(dim: int) -> None:
    q, k, v = peaked(1, 2, 1, 500, 70 * 64 - 5, dim, seed=7)
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(1, 2, 2, 70, generator=generator) < 0.08
    kept[0, 0, 0, 40:] = False  # a word without any
    *_, report = step(q, k, v, bitmap.pack(kept), threshold=-math.inf)
    tiles = int(kept.sum())
    assert report.by_unit()["mfma"] == tiles * 8 * 64 * dim // 128
    # K and V of each tile, and in 4 q blocks one more copy of K that has nothing to fetch
    assert report.counters["lds_dma_bytes"] == (2 * tiles + 4) * 64 * dim * 2
    reads = [e for e in report.executed if e.name == "ds_read_b128"]
    assert sum(e.times for e in reads) == tiles * 8 * 2 * 64 * dim * 2 // 1024
    assert sum(e.bank_conflicts for e in reads) == 0


def test_a_dropped_contribution_saves_the_second_product() -> None:
    q, k, v = peaked(1, 1, 1, 256, 704, 128, seed=9, reach=0.3)
    request = request_of(q, k, 0.25, -3.0, False, True)
    _, rows = vote(request, q, k, full(q, k), None, None)
    waves = rows[0, 0, ::32]  # [8, K blocks]: groups that contribute
    assert int((~waves).sum()) > 0
    *_, report = step(q, k, v, full(q, k), threshold=-3.0, scale=0.25, soft_skip=True)
    assert report.by_unit()["mfma"] == (waves.numel() + int(waves.sum())) * 32


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kv_len", [1, 64, 130, 300])
def test_without_a_threshold_it_is_dense_bit_for_bit(kv_len: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(kv_len)
    q, k, v = (
        torch.randn(1, n, h, dim, generator=generator).bfloat16()
        for n, h in ((390, 2), (kv_len, 1), (kv_len, 1))
    )
    dense, dense_lse = torch.empty_like(q), torch.empty(1, 2, 390)
    machine.dense(q, k, v, dense, dense_lse)
    out, lse, read = torch.empty_like(q), torch.empty(1, 2, 390), full(q, k)
    write = torch.zeros_like(read)
    machine.lite(q, k, v, out, lse, read, write, threshold=-math.inf, soft_skip=True)
    assert torch.equal(write, read)
    assert torch.equal(out.view(torch.int16), dense.view(torch.int16))
    assert torch.equal(lse, dense_lse)


def test_order_and_batch_and_groups() -> None:
    q, k, v = peaked(2, 4, 2, 600, 300, 64, seed=11)
    generator = torch.Generator().manual_seed(1)
    read = bitmap.pack(torch.rand(2, 4, 3, 5, generator=generator) < 0.5)
    plain = step(q, k, v, read, threshold=-2.0)
    order = machine.plan(read)
    taken = order[order >= 0]
    assert len(taken) == 24 < order.numel() and not torch.equal(taken, torch.arange(24).int())
    others = [step(q, k, v, read, threshold=-2.0, mapping=mapping) for mapping in range(1, 4)]
    for other in (*others, step(q, k, v, read, threshold=-2.0, order=order)):
        for a, b in zip(plain[:3], other[:3], strict=True):
            assert torch.equal(a, b)


def test_stray_bits_behind_the_last_block_are_dropped() -> None:
    q, k, v = peaked(1, 1, 1, 64, 200, 64, seed=13)
    read, write = full(q, k), full(q, k)
    out = torch.empty_like(q)
    for descending in (False, True):
        stray = torch.full_like(read, -1)
        machine.lite(q, k, v, out, None, stray, write, threshold=-math.inf, descending=descending)
        assert torch.equal(write, read)


@pytest.mark.parametrize("soft_skip", [False, True])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_rows_that_met_a_special_score(special: float, soft_skip: bool) -> None:
    q, k, v = peaked(1, 1, 1, 96, 640, 64, seed=15, reach=0.3)
    q[0, 50:, :, 63] = 0.0
    q[0, :50, :, 63] = 0.0
    q[0, 20, :, 63] = 1.0  # one row of the first wave sees the special key; 0 * inf is NaN
    base = step(q, k, v, full(q, k), threshold=-1.0, scale=0.25)[0]
    for key in (3, 170, 639):
        special_k = k.clone()
        special_k[0, :, :, 63] = 0.0
        special_k[0, key, :, 63] = special
        write, *_ = step(
            q, special_k, v, full(q, k), threshold=-1.0, scale=0.25, check=False,
            soft_skip=soft_skip,
        )  # fmt: skip
        if key == 3:  # other rows see 0 * special = NaN: nothing may be dropped any more
            assert bitmap.sparsity(write, 10) == 0.0
    assert bitmap.sparsity(base, 10) > 0.0


@pytest.mark.parametrize("soft_skip", [False, True])
def test_infinite_maxima_without_and_with_nan(soft_skip: bool) -> None:
    # all entries of one dim positive: inf * positive has no NaN, so only maxima become infinite
    q, k, v = peaked(1, 1, 1, 96, 640, 64, seed=17, reach=0.3)
    q[..., 62:] = 1.0
    k[..., 62:] = 0.0
    infinite = k.clone()
    infinite[0, 100, :, 62] = math.inf
    write, *_ = step(
        q, infinite, v, full(q, k), threshold=-1.0, scale=0.25, check=False, soft_skip=soft_skip
    )
    assert bitmap.unpack(write, 10)[0, 0, 0].nonzero().flatten().tolist() == [0, 1]
    for nan_key in (10, 101, 300):  # before, in and after the tile with the infinity
        both = infinite.clone()
        both[0, nan_key, :, 63] = math.nan
        write, *_ = step(
            q, both, v, full(q, k), threshold=-1.0, scale=0.25, check=False, soft_skip=soft_skip
        )
        bits = bitmap.unpack(write, 10)[0, 0, 0]
        assert bits[nan_key // 64 :].all()


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = peaked(1, 1, 1, 50, 400, 64, seed=19)
    step(q, k, v, full(q, k), threshold=-1.0, scale=scale)


@pytest.mark.parametrize("dim", [64, 128])
def test_roundings_and_fp16(dim: int) -> None:
    q, k, v = peaked(1, 1, 1, 100, 400, dim, seed=21, reach=0.3)
    for rounding in ("rtna", "rtz"):
        step(q, k, v, full(q, k), threshold=-2.0, scale=0.2, rounding=rounding)
    q, k, v = q.half(), k.half(), v.half()
    write, *_ = step(q, k, v, full(q, k), threshold=-2.0, scale=0.2)
    assert bitmap.sparsity(write, 7) > 0


@pytest.mark.parametrize("soft_skip", [False, True])
def test_all_interleavings_of_waves_agree(soft_skip: bool) -> None:
    import liteattention_emulator as emulator

    q, k, v = peaked(1, 1, 1, 256, 330, 64, seed=23, reach=0.3)
    results = []
    for order in ("round-robin", "first-ahead", "last-ahead", "random:1", "random:2"):
        emulator.set_option("order", order)
        try:
            kinds: dict[str, Any] = {"threshold": -2.0, "scale": 0.25, "soft_skip": soft_skip}
            results.append(step(q, k, v, full(q, k), descending=soft_skip, **kinds)[:3])
        finally:
            emulator.set_option("order", "")
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(40))
def test_random_generations(case: int) -> None:
    """Eight steps of random shapes, masks, thresholds, orders of waves and of q blocks."""
    import liteattention_emulator as emulator

    generator = torch.Generator().manual_seed(1000 + case)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    dim, group, kv_heads = pick(64, 128), pick(1, 2, 3), pick(1, 2)
    q_len = pick(1, 31, 32, 33, 255, 256, 257, 700, 1000)
    kv_len = pick(1, 64, 65, 500, 777, 2048, 2049, 2200)
    tensors = peaked(
        pick(1, 2), kv_heads * group, kv_heads, q_len, kv_len, dim, case, reach=pick(0.1, 0.4, 1.0)
    )
    q, k, v = tensors
    if pick(True, False):
        q, k, v = q.half(), k.half(), v.half()
    count = TILE.k_blocks(kv_len)
    fixed = {
        "must_do": pick(None, mask({0, count - 1}, count), mask(set(range(0, count, 3)), count)),
        "must_skip": pick(None, mask({0}, count), mask({count - 1, count // 2}, count)),
        "threshold": pick(-0.25, -1.0, -3.0, -6.0, 0.0),
        "scale": pick(0.1, 0.25, -0.25, 1.0),
        "soft_skip": pick(False, True),
        "mapping": pick(0, 1, 2, 3),
    }
    waves = pick("round-robin", "round-robin:1", "random:3", "first-ahead", "last-ahead")
    planned, down = pick(False, True), pick(False, True)
    read = full(q, k)
    emulator.set_option("order", waves)
    try:
        for n in range(8):
            order = machine.plan(read) if planned else None
            read = step(q, k, v, read, descending=bool(n % 2) ^ down, order=order, **fixed)[0]
            k = k.roll(1, 1)
    finally:
        emulator.set_option("order", "")


@pytest.mark.slow
@pytest.mark.parametrize("descending", [False, True])
def test_more_than_two_words_and_long_gaps(descending: bool) -> None:
    # 20,000 keys: 313 K blocks, 10 words; empty words at both ends and in the middle
    q, k, v = peaked(1, 1, 1, 130, 20000, 64, seed=25)
    generator = torch.Generator().manual_seed(2)
    kept = torch.rand(1, 1, 1, 313, generator=generator) < 0.3
    kept[..., :40] = kept[..., 100:200] = kept[..., 280:] = False
    *_, report = step(q, k, v, bitmap.pack(kept), threshold=-2.0, descending=descending)
    assert report.by_unit()["mfma"] == int(kept.sum()) * 8 * 32
    one = torch.zeros_like(kept)
    one[..., 150] = True
    step(q, k, v, bitmap.pack(one), threshold=-2.0, descending=descending)
