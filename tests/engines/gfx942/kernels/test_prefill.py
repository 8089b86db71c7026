"""attention_prefill's machine code on the software MI300X, checkers on: a finding fails a launch.

Keys and values lie in scattered pages whose unwritten rows are NaN; table entries behind a
request's last page are -1. What a tile does not see must therefore not be read.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from liteattention_emulator import set_option
from liteattention_rocm.engines.rounding import round_to_bf16
from tests.oracle.attention import Exact, expect_close

from . import ragged
from .conftest import host_program
from .ragged import Batch

pytestmark = pytest.mark.usefixtures("emulator")

DIMS = [64, 128, 256]
FILL_NO_TILE = [32, 80, 96, 112, 192]
FP8 = torch.float8_e4m3fnuz
CANARY = 7.0
# A whole prompt, chunks behind a prefix, a length around each edge of a tile, one row too many for
# attention_decode; a request of its rows and one without rows in between.
MIXED = [(100, 100), (3, 50), (0, 10), (65, 333), (5, 5), (64, 129), (9, 64)]


def run(batch: Batch, rounding: str = "rtne", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, D] among canaries and lse [Hq, T], both canaries beforehand."""
    rows, heads, dim = batch.q.shape
    guarded = torch.full((rows + 2, heads + 2, dim + 8), CANARY).to(batch.q.dtype)
    out = guarded[1:-1, 1:-1, :dim]
    lse = torch.full((heads + 2, rows + 3), CANARY)
    ragged.prefill(batch, out, lse[1:-1, :rows], rounding=rounding, **options)
    result, result_lse = out.clone(), lse[1:-1, :rows].clone()
    out.fill_(CANARY)
    lse[1:-1, :rows] = CANARY
    assert (guarded == CANARY).all() and (lse == CANARY).all()
    return result, result_lse


def check(batch: Batch, rounding: str = "rtne", **options: Any) -> None:
    """Rows of prefill requests are within the bound, all others untouched."""
    out, lse = run(batch, rounding, **options)
    options = {
        name: x for name, x in options.items() if name not in ("splits", "part_blocks", "room")
    }
    lead = int(batch.q_start[0])
    assert (out[:lead] == CANARY).all() and (lse[:, :lead] == CANARY).all()
    out, lse = out[lead:], lse[:, lead:]
    exact = batch.exact(**options)
    group = batch.q.shape[1] // batch.k[0].shape[1]
    mine = torch.cat([torch.full((n,), n * group > 16) for n, _ in batch.requests])
    total = len(mine)
    assert (out[total:] == CANARY).all() and (lse[:, total:] == CANARY).all()
    assert (out[:total][~mine] == CANARY).all() and (lse[:, :total][:, ~mine] == CANARY).all()
    exact = Exact(exact.out[mine], exact.lse[:, mine], exact.weight[mine], exact.reach)
    out, lse = out[:total][mine], lse[:, :total][:, mine]
    expect_close(out, lse, exact, rounding, p_as_output=True)


def test_numbers_and_layouts_on_the_host(tmp_path: Path) -> None:
    subprocess.run([host_program("ragged_replay", tmp_path)], check=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64, 128])
def test_ragged_batches_within_the_bound(page_size: int, dim: int) -> None:
    check(ragged.make(MIXED, (4, 2), dim, page_size, padding=3))


@pytest.mark.parametrize("dim", FILL_NO_TILE)
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_head_dims_that_fill_no_tile(page_size: int, dim: int) -> None:
    # beside each head lies the next one, NaN where no key is; beside each row's outputs a canary
    check(ragged.make(MIXED, (4, 2), dim, page_size, padding=3), sinks=torch.arange(4.0))


@pytest.mark.parametrize("dim", [*DIMS, *FILL_NO_TILE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches(dtype: torch.dtype, dim: int) -> None:
    batch = ragged.make(MIXED, (4, 2), dim, 16 if dtype == torch.float16 else 3, dtype, fp8=FP8)
    k_scale = torch.tensor(0.3).item()  # fp32, as in memory
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": 7.0, "window": 70, "soft_cap": 20.0}
    check(batch, **options)
    numbers, memory = run(batch, **options), run(batch, in_memory=True, **options)
    assert all(map(torch.equal, numbers, memory))


#: Parts at most, and K blocks of one at least: more parts than blocks, parts of unequal lengths.
PARTS = [(2, 1), (3, 2), (64, 1), (3, 0)]


@pytest.mark.parametrize(("splits", "part_blocks"), PARTS)
@pytest.mark.parametrize("dim", [*DIMS, *FILL_NO_TILE])
def test_tiles_in_parts_are_within_the_bound(dim: int, splits: int, part_blocks: int) -> None:
    parts = {"splits": splits, "part_blocks": part_blocks}
    # without a prefix, behind one, over several tiles, without a key; tiles of one part among them
    requests = [*MIXED, (90, 30), (40, 1000), (20, 0)]
    both = {"causal": False, "window": 150, "lookahead": 40}
    for page_size, more in ((0, {}), (16, {"sinks": torch.arange(4.0), **both})):
        batch = ragged.make(requests, (4, 2), dim, page_size, padding=3, lead=page_size)
        check(batch, **parts, **more)


@pytest.mark.parametrize("dim", [*DIMS, 112])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": False, "window": 70},
        {"causal": False, "window": 70, "lookahead": 69},
        {"window": 1},
        {"soft_cap": 2.0, "window": 300},
        {"scale": -0.7, "soft_cap": 3.0},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_masks_and_scores_in_parts(options: dict[str, Any], dim: int) -> None:
    batch = ragged.make([(150, 333), (33, 300), (70, 70)], (2, 1), dim, 3)
    check(batch, splits=4, part_blocks=2, **options)


@pytest.mark.parametrize("dim", [*DIMS, *FILL_NO_TILE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches_in_parts(dtype: torch.dtype, dim: int) -> None:
    batch = ragged.make(MIXED, (4, 2), dim, 16, dtype, fp8=FP8)
    options: dict[str, Any] = {"k_scale": 0.5, "v_scale": 7.0, "splits": 3, "part_blocks": 1}
    check(batch, **options)
    numbers, memory = run(batch, **options), run(batch, in_memory=True, **options)
    assert all(map(torch.equal, numbers, memory))


@pytest.mark.parametrize("rounding", ["rtna", "rtz"])
def test_roundings_in_parts(rounding: str) -> None:
    check(ragged.make([(30, 90), (90, 290)], (4, 2), 64, 16), rounding, splits=3)


@pytest.mark.parametrize("dim", DIMS)
def test_a_tile_of_few_keys_is_whole_among_others_in_parts(dim: int) -> None:
    # Bit for bit what it would be: parts are for tiles of more blocks than a part has.
    batch = ragged.make([(60, 60), (40, 500)], (4, 1), dim, 16)
    out, lse = run(batch)
    found, found_lse = run(batch, splits=8, part_blocks=2)
    assert torch.equal(found[:60], out[:60]) and torch.equal(found_lse[:, :60], lse[:, :60])
    assert not torch.equal(found[60:], out[60:])


@pytest.mark.parametrize("dim", DIMS)
def test_parts_load_each_key_once_and_compute_no_more(dim: int) -> None:
    blocks, rows = 24, ragged.tile_rows(dim)
    batch = ragged.make([(rows // 8, blocks * ragged.tile_keys(dim))], (8, 1), dim, 16)
    out = torch.empty_like(batch.q)
    whole, *parts = (
        ragged.prefill(batch, out, None, causal=False, splits=n, part_blocks=blocks // n)
        for n in (1, 4, 8)
    )
    block_bytes = 2 * 2 * dim * ragged.tile_keys(dim)
    for n, report in zip((4, 8), parts, strict=True):
        assert report.by_unit()["mfma"] == whole.by_unit()["mfma"]
        more = report.counters["global_load_bytes"] - whole.counters["global_load_bytes"]
        # Once more for each further part: queries, q_start, table entries of three blocks, and the
        # last key in place of those of a block of V and two of K behind it.
        entries = 3 * 512 * 4 * 4
        assert 0 < more < (n - 1) * (rows * dim * 2 + 1.5 * block_bytes + entries)


@pytest.mark.parametrize("dim", [64, 256])
def test_as_many_parts_as_find_room(dim: int) -> None:
    # More tiles than the host thought: each has fewer parts, or none. What is written lies in the
    # room, beside which nothing may be touched.
    batch = ragged.make([(64, 64), (1, 90), (200, 700), (70, 400)], (4, 2), dim, 16)
    tiles = sum(-(-2 * n // ragged.tile_rows(dim)) for n, _ in batch.requests if n > 8)
    whole = run(batch)
    for room in (1, tiles - 1, tiles, 2 * tiles - 1, 2 * tiles, 3 * tiles + 1, 64 * tiles):
        check(batch, splits=64, room=room)
        found = run(batch, splits=64, room=room)
        assert torch.equal(found[0], whole[0]) == (room < 2 * tiles)


@pytest.mark.parametrize("count", [63, 64, 65, 130])
def test_tiles_of_many_requests_in_parts(count: int) -> None:
    # Among requests of few rows, 64 of which are looked at at a time.
    g = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 40, (count,), generator=g).tolist()
    lengths = [n if r % 3 == 0 or r > 60 else n % 17 for r, n in enumerate(lengths)]
    batch = ragged.make([(n, n + 3 * r) for r, n in enumerate(lengths)], (1, 1), 64, 16)
    check(batch, splits=3)


@pytest.mark.parametrize("part_blocks", [0, 1])
def test_parts_of_short_requests_beside_a_long_one(part_blocks: int) -> None:
    # Parts are as long as those of the longest tile, or as many in each: then alone as well.
    requests = [(20, 1900), (30, 290)]
    batch, alone = (ragged.make(x, (4, 1), 64, 16) for x in (requests, requests[1:]))
    for name in ("k", "v"):
        cache, other = getattr(alone, f"{name}_cache"), getattr(batch, f"{name}_cache")
        for page in range(-(-290 // 16)):
            cache[alone.page_table[0, page]] = other[batch.page_table[1, page]]
    alone.q.copy_(batch.q[20:])
    parts = {"splits": 5, "part_blocks": part_blocks}
    check(batch, **parts)
    found, same = run(batch, **parts)[0][20:], run(alone, **parts)[0]
    assert torch.equal(found, same) == (part_blocks == 0)
    assert torch.equal(found, run(alone)[0]) == (part_blocks == 1)


@pytest.mark.parametrize("large", [1e4, 1e11])
def test_scores_whose_last_place_is_large_or_that_overflow(large: float) -> None:
    # In log2 units they are beyond 2^17, or beyond fp32; parts are weighed by differences.
    batch = ragged.make([(40, 1000)], (1, 1), 64, 16)
    scale = 1e18 if large > 1e9 else 2.0**-5
    batch.q.mul_(large)
    batch.k_cache.mul_(large)
    whole, parts = (run(batch, scale=scale, splits=n)[0] for n in (1, 4))
    assert whole.isfinite().all() and (whole - parts).abs().max() <= 2.0**-7 * whole.abs().max()


def test_not_a_number_stays_in_its_row_of_a_part() -> None:
    batch = ragged.make([(40, 400)], (4, 1), 64, 16)
    parts = {"splits": 4, "part_blocks": 1}
    out, lse = run(batch, **parts)
    batch.q[3, 2, 5] = math.nan
    spoilt, spoilt_lse = run(batch, **parts)
    assert spoilt[3, 2].isnan().all() and spoilt_lse[2, 3].isnan()
    same = torch.ones(40, 4, dtype=torch.bool)
    same[3, 2] = False
    assert torch.equal(spoilt[same], out[same])
    assert torch.equal(spoilt_lse.T[same], lse.T[same])


@pytest.mark.parametrize("requests", [[(70, 90)], [(9, 90), (0, 3), (100, 200)]], ids=str)
def test_rows_before_the_first_request(requests: list[tuple[int, int]]) -> None:
    check(ragged.make(requests, (4, 2), 64, 16, padding=200, lead=300))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (6, 2), (8, 1), (16, 1), (32, 2)], ids=str)
def test_query_heads_that_share_keys(heads: tuple[int, int], dim: int) -> None:
    check(ragged.make([(40, 90), (17, 17), (2, 200)], heads, dim, 16))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 1},
        {"window": 40},
        {"window": 300},
        {"causal": False, "window": 70},
        {"causal": False, "window": 70, "lookahead": 69},
        {"soft_cap": 2.0},
        {"soft_cap": 50.0, "window": 70},
        {"causal": False, "lookahead": 7},
        {"causal": False, "lookahead": 200},
        {"scale": -0.3},
        {"scale": 0.0},
        {"scale": 1.5, "soft_cap": 30.0},
        {"scale": -0.7, "soft_cap": 3.0, "causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_masks_and_scores(page_size: int, options: dict[str, Any], dim: int) -> None:
    check(ragged.make([(150, 333), (33, 300), (70, 70)], (2, 1), dim, page_size), **options)


@pytest.mark.parametrize("dim", DIMS)
def test_sinks(dim: int) -> None:
    sinks = torch.tensor([-3.0, 0.0, 2.5, 8.0, -math.inf, 60.0, 1.0, -40.0])
    batch = ragged.make([(20, 100), (40, 30)], (8, 2), dim, 16)
    check(batch, sinks=sinks)
    check(batch, sinks=sinks, soft_cap=4.0, window=11)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_rows_that_see_no_key(sinks: torch.Tensor | None, dim: int) -> None:
    # more rows than keys: the first ones stand before every key; the second request has no key
    batch = ragged.make([(300, 40), (30, 0), (50, 60)], (2, 1), dim, 16)
    check(batch, sinks=sinks)
    out, lse = run(batch, sinks=sinks)
    blind = [*range(260), *range(300, 330)]
    assert (out[blind] == 0).all()
    empty = torch.full((2,), -math.inf) if sinks is None else sinks
    assert (lse[:, blind].double() - empty.double()[:, None]).nan_to_num().abs().max() <= 1e-6


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rounding", ["rtna", "rtz"])
def test_roundings(rounding: str, dim: int) -> None:
    check(ragged.make([(30, 90), (90, 90)], (4, 2), dim, 16), rounding)


@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
@pytest.mark.parametrize("dim", DIMS)
def test_rounding_is_the_bit_exact_model(dim: int, rounding: str) -> None:
    # Two keys of equal score: the fp32 result (a + b) / 2 lies exactly between two bf16 numbers or
    # on one of them, so every tie and carry of the model is met, over all exponents.
    a = torch.arange(0, 1 << 16, 29, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    a = a[a.float().abs().log2().abs() < 100]
    heads = a.numel() // dim
    a = a[: heads * dim].view(heads, dim)
    b = torch.nextafter(a, torch.full_like(a, math.inf))
    batch = ragged.make([(17, 2)], (heads, heads), dim, 0)
    batch.q.zero_()
    batch.v_cache[0], batch.v_cache[1] = a, b
    out, lse = run(batch, rounding, causal=False)
    expected = round_to_bf16((a.float() + b.float()) * 0.5, rounding)  # type: ignore[arg-type]
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16).expand(17, -1, -1))
    assert (lse - math.log(2)).abs().max() <= 1e-6


@pytest.mark.parametrize("dim", DIMS)
def test_fp16(dim: int) -> None:
    batch = ragged.make(MIXED, (4, 2), dim, 16, torch.float16)
    check(batch)
    check(batch, soft_cap=3.0, window=100)


@pytest.mark.parametrize("dim", DIMS)
def test_where_keys_lie_does_not_matter(dim: int) -> None:
    # Bit for bit: packed or in pages of any size, alone or in a batch.
    results = []
    for page_size in (0, 1, 3, 16, 20, 64, 128):
        batch = ragged.make([(70, 200)], (4, 2), dim, page_size, seed=page_size)
        plain = ragged.make([(70, 200)], (4, 2), dim, 0)
        for to, values in ((batch.k_cache, plain.k[0]), (batch.v_cache, plain.v[0])):
            if page_size == 0:
                to[:200] = values
                continue
            for n, page in enumerate(batch.page_table[0, : -(-200 // page_size)].tolist()):
                part = values[n * page_size : (n + 1) * page_size]
                to[page, : len(part)] = part
        batch.q.copy_(plain.q)
        results.append(run(batch))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_order_of_waves_does_not_matter(page_size: int, dim: int) -> None:
    orders = ["round-robin", "round-robin:1", "random:1", "random:2", "first-ahead", "last-ahead"]
    batch = ragged.make([(100, 333), (70, 70)], (4, 1), dim, page_size)
    results = []
    try:
        for order in orders:
            set_option("order", order)
            whole, parts = (run(batch, window=150, splits=n) for n in (1, 2))
            results.append((torch.cat([whole[0], parts[0]]), torch.cat([whole[1], parts[1]], 1)))
    finally:
        set_option("order", "")
    for order, (out, lse) in zip(orders, results, strict=True):
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), order


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_before_the_window_are_gone(page_size: int, dim: int) -> None:
    # Frameworks free them: their table entries are garbage, their memory somebody else's.
    requests, window = [(70, 500), (40, 300)], 90
    batch = ragged.make(requests, (2, 1), dim, page_size)
    exact = run(batch, window=window)
    for r, (q_len, kv_len) in enumerate(requests):
        first = kv_len - q_len - window + 1  # of the first row
        batch.page_table[r, : first // page_size] = -1
        page = int(batch.page_table[r, first // page_size])
        batch.k_cache[page, : first % page_size] = math.nan
        batch.v_cache[page, : first % page_size] = math.nan
    got = run(batch, window=window)
    assert torch.equal(got[0], exact[0]) and torch.equal(got[1], exact[1])
    check(batch, window=window, splits=2)


def test_many_requests() -> None:
    # The search goes over 64 requests at a time: one, two and three rounds of it.
    for count in (64, 65, 130):
        g = torch.Generator().manual_seed(count)
        lengths = torch.randint(0, 40, (count,), generator=g).tolist()
        check(ragged.make([(n, n + 3) for n in lengths], (1, 1), 64, 16))


def test_not_a_number_stays_in_its_row() -> None:
    batch = ragged.make([(40, 100)], (4, 1), 64, 16)
    out, lse = run(batch)
    batch.q[3, 2, 5] = math.nan
    spoilt, spoilt_lse = run(batch)
    assert spoilt[3, 2].isnan().all() and spoilt_lse[2, 3].isnan()
    same = torch.ones(40, 4, dtype=torch.bool)
    same[3, 2] = False
    assert torch.equal(spoilt[same], out[same])
    assert torch.equal(spoilt_lse.T[same], lse.T[same])


def test_without_lse() -> None:
    batch = ragged.make([(40, 100)], (4, 1), 64, 16)
    out = torch.empty_like(batch.q)
    ragged.prefill(batch, out, None)
    assert torch.equal(out, run(batch)[0])


WAVES, SHORT, LONG = 8, 8, 32
# Of one wave and K block (32 rows x 64 keys; at D = 256 16 rows x 32 keys): MFMAs exactly,
# instructions at most.
LIMITS = {64: (32, 350), 128: (64, 465), 256: (64, 300)}


def full_tile(dim: int, blocks: int, page_size: int) -> Any:
    """The report of one tile that sees `blocks` whole K blocks."""
    keys = blocks * (32 if dim > 128 else 64)
    batch = ragged.make([(ragged.tile_rows(dim) // 8, keys)], (8, 1), dim, page_size)
    return ragged.prefill(batch, torch.empty_like(batch.q), None, causal=False)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", [16, 1])
def test_one_wave_and_k_block(page_size: int, dim: int) -> None:
    short, long = (full_tile(dim, n, page_size) for n in (SHORT, LONG))
    more = LONG - SHORT
    before, after = short.by_unit(), long.by_unit()
    units = {u: (n - before.get(u, 0)) / (WAVES * more) for u, n in after.items()}
    instructions = sum(units.values())

    def difference(counter: str) -> float:
        return float(long.counters[counter] - short.counters[counter]) / more

    mfma, limit = LIMITS[dim]
    text = ", ".join(f"{u} {n:.1f}" for u, n in sorted(units.items()) if n)
    print(
        f"\nattention_prefill_bf16_d{dim}_rtne, pages of {page_size}, emulated, per wave and K "
        f"block: {instructions:.1f} instructions (limit {limit}), {units['mfma']:g} MFMA "
        f"(exactly {mfma})\n  {text}\n  loaded {difference('global_load_bytes'):g} bytes"
    )
    assert units["mfma"] == mfma
    assert instructions <= limit
    assert difference("barriers") == 2 * WAVES
    assert sum(e.bank_conflicts for e in long.executed) == 0
    # K and V once per workgroup, and the table entries of each lane's 4 keys
    block_bytes = 2 * dim * (32 if dim > 128 else 64)
    assert difference("global_load_bytes") == 2 * block_bytes + 512 * 4 * 4


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("request_", "heads", "window", "most"),
    [
        ((512, 512), (8, 1), 0, 1.13),
        ((512, 512), (1, 1), 0, 1.13),
        ((256, 1024), (4, 1), 0, 1.04),
        ((512, 1024), (1, 1), 256, 1.26),
        ((100, 100), (4, 1), 0, 1.83),
    ],
    ids=str,
)
def test_executed_products_beside_the_minimum(
    request_: tuple[int, int], heads: tuple[int, int], window: int, most: float, dim: int
) -> None:
    # The minimum: each (row, key) that is seen, two products, in MFMAs.
    batch = ragged.make([request_], heads, dim, 16)
    report = ragged.prefill(batch, torch.empty_like(batch.q), None, window=window)
    q_len, kv_len = request_
    ends = torch.arange(kv_len - q_len, kv_len) + 1
    seen = int((ends - (ends - window).clamp(min=0)).sum() if window else ends.sum())
    minimum = heads[0] * seen * dim * 2 / (16**3 if dim > 128 else 2 * 16**3)
    executed = report.by_unit()["mfma"]
    print(
        f"\n{q_len} rows of {kv_len} keys, heads {heads}, window {window}, D = {dim}: "
        f"{executed} MFMA, minimum {minimum:.0f}, {executed / minimum:.3f}"
    )
    assert minimum <= executed <= most * minimum


@pytest.mark.parametrize("page_size", [0, 1, 4])
def test_caches_beyond_4_gib(page_size: int, hole: Callable[[int], torch.Tensor]) -> None:
    # Rows and pages 1 and almost 2 GiB apart: what is not a key's or a value's is not accessible.
    gib, dim, keys = 1 << 29, 64, 12
    memory = hole((keys + 1) * 2 * gib)
    batch = ragged.make([(18, keys)], (1, 1), dim, page_size)
    plain = run(batch)
    shape: tuple[int, ...] = (keys, 1, dim)
    strides: tuple[int, ...] = (gib, dim, 1)
    if page_size:
        shape, strides = (keys // page_size, page_size, 1, dim), (2 * gib - 64, gib - 64, dim, 1)
    for name, first in (("k_cache", 0), ("v_cache", 2 * dim)):
        old, new = getattr(batch, name), memory[first:].as_strided(shape, strides)
        if page_size == 0:
            new.copy_(old[:keys])
        if page_size:
            new.copy_(old[batch.page_table[0, : shape[0]].long()])
        setattr(batch, name, new)
        pages = new.unsqueeze(0) if page_size == 0 else new
        batch.spans += [row for page in pages for row in page.unbind()]
    if page_size:
        batch.page_table[0, : shape[0]] = torch.arange(shape[0])
    far = run(batch)
    assert torch.equal(far[0], plain[0]) and torch.equal(far[1], plain[1])
