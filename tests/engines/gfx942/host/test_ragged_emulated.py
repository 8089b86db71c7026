"""Paged and packed requests through the public API on the machine code, checkers on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import liteattention_emulator
import liteattention_rocm
from liteattention_rocm import _core, engines, remembered, serving, write_kv
from tests.oracle.attention import bound, exact, expect_lse, expect_out
from tests.oracle.ragged import Case, make, paged, starts

from .ragged_cases import check, expect_close, run

pytestmark = pytest.mark.usefixtures("emulator", "memory_of_nan")

#: Lengths around every edge of blocks of 64 keys (16 at D = 256) and rounds of 4 waves.
DECODE = [(1, 1), (1, 63), (1, 64), (0, 9), (1, 65), (2, 257), (1, 300)]
PAGE_SIZES = (1, 3, 16, 64, 128)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many parts the engine computes requests in."""

    def choose(count: int) -> None:
        monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", count)
        remembered.forget()  # plans rest on it

    return choose


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 8), (80, 4), (96, 1), (112, 2), (128, 4), (192, 2), (256, 2)]
)
def test_decode_through_pages_of_any_size(dim: int, group: int, page_size: int) -> None:
    check(make(DECODE, 2 * group, 2, dim), page_size)


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(("group", "rows"), [(1, 16), (2, 8), (4, 3), (8, 2), (16, 1)])
def test_rows_and_heads_of_a_group_fill_the_tile(group: int, rows: int, dim: int) -> None:
    requests = [(n, n + 61 * n % 200) for n in range(1, rows + 1)]
    assert all(_core.is_decode(n, group) for n, _ in requests)
    assert not _core.is_decode(rows + 1, group) or group == 4
    check(make(requests, group, 1, dim, seed=group), 16)


@pytest.mark.parametrize("dim", [64, 112, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 37, "sinks": True},
        {"window": 100, "causal": False},
        {"window": 40, "causal": False, "lookahead": 2, "sinks": True},
        {"soft_cap": 2.5, "sinks": True},
        {"causal": False},
        {"scale": -0.2, "soft_cap": 30.0},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], dim: int, splits: Any) -> None:
    case = make([(1, 300), (3, 130), (2, 1), (4, 64), (1, 0)], 8, 2, dim, seed=dim)
    for parts in (1, 3):
        splits(parts)
        check(case, 16, **options)
    check(case, 0, **options)


@pytest.mark.parametrize("cap", [2.0**-60, 3.0, 50.0, 1e5, 1e6, 1e8, 2.0**60])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_any_soft_cap(cap: float, dim: int, dtype: torch.dtype) -> None:
    """Decoded and prefilled requests; logits from far below the cap to far above it."""
    case = make([(1, 100), (20, 70)], 2, 1, dim, dtype)
    for scale in (None, -0.3, 2.0**-40, 0.0):
        check(case, 16, soft_cap=cap, scale=scale, sinks=True)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [
        (torch.bfloat16, "rtne"),
        (torch.bfloat16, "rtna"),
        (torch.bfloat16, "rtz"),
        (torch.float16, "rtne"),
    ],
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_number(dtype: torch.dtype, rounding: str, dim: int, splits: Any) -> None:
    case = make([(1, 200), (2, 77)], 4, 1, dim, dtype=dtype, seed=3)
    for parts in (1, 4):
        splits(parts)
        check(case, 64, rounding=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 80, 96, 112, 192])
def test_head_dims_that_fill_no_tile(dim: int, dtype: torch.dtype, splits: Any) -> None:
    """Heads beside each other and beside other memory, all of it NaN: nothing of it is read."""
    for heads, parts in (((4, 2), 1), ((2, 1), 3)):
        splits(parts)
        case = make([(1, 200), (50, 77), (2, 300), (1, 9)], *heads, dim, dtype, seed=dim, padding=2)
        for page_size in (0, 16):
            check(case, page_size, sinks=True)


@pytest.mark.parametrize("dim", [80, 112])
def test_an_infinite_key_is_like_any_other(dim: int) -> None:
    # Products run over more columns than the head has: 0 times what is there must be 0.
    case = make([(1, 100), (40, 100)], 2, 1, dim)
    case.q[..., 3] = case.q[..., 3].abs() + 1.0
    for k in case.k:
        k[7, 0, 3] = -math.inf
    check(case, 16)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_parts_merge_to_the_whole_and_repeat_bit_for_bit(dim: int, splits: Any) -> None:
    # 18 blocks of 64 keys, 5 parts at most; 25 of 16 at D = 256, 7 parts. The others have fewer.
    keys, counts = (400, (1, 2, 7, 60)) if dim == 256 else (1100, (1, 3, 5, 60))
    case = make([(1, keys), (1, 0), (0, 50), (2, 260), (1, 30)], 2, 1, dim)
    results = []
    for parts in counts:
        splits(parts)
        out, lse = check(case, 16, sinks=True)
        results.append(out)
    again, lse_again = run(case, 16, sinks=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert torch.equal(results[-1], results[-2])  # no more parts than rounds of blocks
    assert not torch.equal(results[0], results[1])
    used = [_core.decode_work(1, keys, 0, parts, dim)[2] for parts in counts]
    assert used == [*counts[:-1], counts[-2]]


@pytest.mark.parametrize("order", ["random:7", "first-ahead", "last-ahead", "round-robin:1"])
def test_results_do_not_depend_on_the_order_of_waves(order: str, splits: Any) -> None:
    splits(2)
    for dim in (64, 80, 128, 192, 256):
        case = make([(1, 700), (3, 90)], 4, 1, dim)
        expected = run(case, 16)
        liteattention_emulator.set_option("order", order)
        try:
            got = run(case, 16)
        finally:
            liteattention_emulator.set_option("order", "round-robin")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize(
    ("dim", "heads"), [(64, (4, 1)), (96, (2, 1)), (128, (2, 2)), (192, (4, 2)), (256, (8, 4))]
)
def test_prefill_and_decode_share_a_batch(
    dim: int, heads: tuple[int, int], page_size: int, splits: Any
) -> None:
    requests = [(1, 150), (70, 70), (0, 5), (30, 100), (2, 40), (17, 17), (1, 1)]
    case = make(requests, *heads, dim, padding=3)
    splits(2)
    check(case, page_size, window=50, sinks=True)
    # a request's result does not depend on its company
    alone = make(requests, *heads, dim)
    out, lse = check(alone, page_size)
    for r, (q_len, _) in enumerate(requests):
        if q_len:
            rows = slice(int(alone.q_start[r]), int(alone.q_start[r + 1]))
            one = Case(
                alone.q[rows], [alone.k[r]], [alone.v[r]], [requests[r]], starts([q_len]),
                alone.kv_len[r : r + 1], starts([requests[r][1]]), alone.sinks,
            )  # fmt: skip
            single, single_lse = run(one, page_size)
            assert torch.equal(single, out[rows]) and torch.equal(single_lse, lse[:, rows])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    dim = draw(st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256]), "head dim")
    kv_heads, group = draw(st.integers(1, 3), "kv heads"), draw(st.integers(1, 16), "group")
    one = st.tuples(st.integers(0, 20), st.integers(0, 200))
    requests = draw(st.lists(one, min_size=1, max_size=4), "requests")
    if not any(q for q, _ in requests) or not any(n for _, n in requests):
        requests.append((1, 40))
    options: dict[str, Any] = {
        "lookahead": draw(st.sampled_from([None, 0, 3, 19, 150, 5000]), "lookahead"),
        "causal": False,
        "window": draw(st.sampled_from([None, 1, 20, 150, 5000]), "window") or 0,
        "soft_cap": draw(st.sampled_from([0.0, 5.0]), "soft cap"),
        "sinks": draw(st.booleans(), "sinks"),
    }
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]), "dtype")
    page_size = draw(st.sampled_from([0, 1, 5, 16, 64]), "page size")
    case = make(requests, kv_heads * group, kv_heads, dim, dtype, draw(st.integers(0, 99), "seed"))
    given = {k: v or None if k in ("window", "soft_cap") else v for k, v in options.items()}
    out, lse = run(case, page_size, **given)
    expect_close(case, out, lse, **options)


def test_views_of_serving_caches(splits: Any) -> None:
    """Keys beside values in one buffer, as vLLM has them; token slots, as SGLang has them."""
    case = make([(1, 75), (2, 40)], 4, 2, 64)
    splits(2)
    expected = run(case, 16)
    pages = torch.full((9, 2, 16, 128), math.nan).bfloat16()
    table = torch.tensor([[7, 2, 5, 0, 1], [3, 8, 6, 0, 0]], dtype=torch.int32)
    k, v = pages[..., :64].transpose(1, 2), pages[..., 64:].transpose(1, 2)
    slots, rows = [], [torch.cat(x) for x in (case.k, case.v)]
    for r, (_, n) in enumerate(case.requests):
        slots += [int(table[r, j // 16]) * 16 + j % 16 for j in range(n)]
    write_kv(*rows, k, v, torch.tensor(slots), engine="gfx942")
    batch = serving.PagedBatch(case.q_start, case.kv_len, table)
    got = serving.attention_paged(case.q, k, v, batch, return_lse=True, engine="gfx942")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    pool_k, pool_v = (torch.full((200, 2, 64), math.nan).bfloat16() for _ in range(2))
    slot = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:115].int()
    write_kv(*rows, pool_k[:, None], pool_v[:, None], slot, engine="gfx942")
    table = torch.zeros(2, 80, dtype=torch.int32)
    table[0, :75], table[1, :40] = slot[:75], slot[75:]
    batch = serving.PagedBatch(case.q_start, case.kv_len, table)
    got = serving.attention_paged(
        case.q, pool_k[:, None], pool_v[:, None], batch, return_lse=True, engine="gfx942"
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("page_size", "dim", "wide"), [(1, 64, True), (3, 72, False), (16, 128, True)]
)
def test_cache_writes(page_size: int, dim: int, wide: bool, dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (2, 40, 6, dim), dtype=torch.int16).view(dtype)
    k, v = bits[0, ::2, 1:4], bits[1, 1::2, 2:5]  # any bit pattern, every other row, some heads
    pages = 50 // page_size
    cache = torch.zeros(2, pages, 3, page_size, dim + 2, dtype=torch.int16).view(dtype)
    k_cache, v_cache = (x[..., :dim].transpose(1, 2) for x in cache)
    slots = torch.randperm(pages * page_size)[:20].to(torch.int64 if wide else torch.int32)
    slots[[3, 11]] = -1
    write_kv(k, v, k_cache, v_cache, slots, engine="gfx942")
    expected = torch.zeros_like(cache)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // page_size, :, slot % page_size, :dim] = k[row]
            expected[1, slot // page_size, :, slot % page_size, :dim] = v[row]
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


def test_cache_writes_that_cannot_be() -> None:
    k = torch.zeros(2, 1, 64).bfloat16()
    cache = torch.zeros(3, 4, 1, 64).bfloat16()
    with pytest.raises(ValueError, match="slot 12 "):
        slots = torch.tensor([0, 12])
        write_kv(k, k, cache, cache.clone(), slots, engine="gfx942")
    with pytest.raises(ValueError, match="dtype must be bf16 or fp16"):
        x = cache.float()
        write_kv(k.float(), k.float(), x, x.clone(), torch.tensor([0, 1]), engine="gfx942")
    odd = torch.zeros(3, 4, 1, 68).bfloat16()
    with pytest.raises(ValueError, match="head dim must be a multiple of 8, got 68"):
        row = torch.zeros(1, 1, 68).bfloat16()
        write_kv(row, row, odd, odd.clone(), torch.tensor([0]), engine="gfx942")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "dim"),
    [
        (2, 300, (4, 2), 128),
        (33, 33, (2, 2), 64),
        (70, 100, (4, 1), 80),
        (20, 5, (2, 1), 256),
        (40, 60, (2, 1), 192),
        (1, 70, (4, 2), 96),  # one row: decoding, but for the dense head dims
        (1, 1, (2, 1), 32),
        (1, 130, (2, 1), 128),
    ],
)
def test_causal_attention(
    q_len: int, kv_len: int, heads: tuple[int, int], dim: int, layout: Any
) -> None:
    g = torch.Generator().manual_seed(q_len)
    q = torch.randn(2, q_len, heads[0], dim, generator=g).bfloat16()
    k, v = (torch.randn(2, kv_len, heads[1], dim, generator=g).bfloat16() for _ in range(2))
    expected = exact(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    given = (q, k, v) if layout == "bshd" else tuple(x.transpose(1, 2) for x in (q, k, v))
    for want_lse in (False, True):  # one launch for both entries, and one for each
        for _ in range(2):  # again with other tensors of the same kind
            given = tuple(x.clone() for x in given)
            found = liteattention_rocm.attention(
                *given, layout=layout, causal=True, return_lse=want_lse, engine="gfx942"
            )
        out = found[0] if isinstance(found, tuple) else found
        out = out.transpose(1, 2) if layout == "bshd" else out
        expect_out(out, expected, bound(expected, q.dtype))
        if isinstance(found, tuple):
            expect_lse(found[1], expected.lse)


@pytest.mark.parametrize(
    ("requests", "heads", "options"),
    [
        ([(24, 1500)], (8, 1), {}),  # a chunk behind a prefix
        ([(1, 300), (60, 900), (0, 4), (1, 1)], (8, 2), {"sinks": True}),  # beside decoding
        ([(150, 1300)], (2, 1), {"window": 900, "soft_cap": 30.0}),
        ([(100, 700)], (4, 2), {"causal": False}),
        ([(700, 700)], (2, 1), {"causal": False, "window": 200, "lookahead": 199}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_prefill_in_as_many_parts_as_the_model_says(
    requests: list[tuple[int, int]], heads: tuple[int, int], options: dict[str, Any], dim: int
) -> None:
    case = make(requests, *heads, dim, seed=dim)
    out, lse = check(case, 16, **options)
    report = liteattention_emulator.last_launch()
    assert report is not None and report.kernel.startswith("merge_")
    found, found_lse = run(case, 16, **options)  # and the same bits again
    assert torch.equal(found, out) and torch.equal(found_lse, lse)


def test_causal_attention_of_few_tiles_is_split() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 700, 1, 64, generator=g).bfloat16() for _ in range(3))
    expected = exact(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    out = liteattention_rocm.attention(q, k, v, causal=True, engine="gfx942")
    report = liteattention_emulator.last_launch()
    assert report is not None and report.kernel == "merge_prefill_bf16_rtne"
    expect_out(out.transpose(1, 2), expected, bound(expected, q.dtype))


def test_a_plan_serves_every_layer_without_allocating(
    monkeypatch: pytest.MonkeyPatch, splits: Any
) -> None:
    splits(3)
    case = make([(1, 600), (1, 500)], 4, 1, 64)
    k, v, table = paged(case, 16)
    batch = serving.PagedBatch(case.q_start, case.kv_len, table.clamp(max=k.shape[0] - 1))
    out = torch.empty_like(case.q)
    first = serving.attention_paged(case.q, k, v, batch, out=out, engine="gfx942").clone()

    def refuse(*arguments: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("a layer allocated")

    for name in ("empty", "empty_like", "zeros", "full", "arange", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    serving.attention_paged(case.q, k, v, batch, out=out, engine="gfx942")
    assert torch.equal(first, out)
    report = liteattention_emulator.last_launch()
    assert report is not None and report.kernel == "merge_decode_bf16_rtne"
    assert len(batch.calls) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype must be bf16 or fp16, got torch.float32"),
        ({"dim": 72}, "head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got 72"),
    ],
)
def test_refusals_name_the_reason(changes: dict[str, Any], reason: str) -> None:
    dtype, dim = changes.get("dtype", torch.bfloat16), changes.get("dim", 64)
    q = torch.zeros(1, 2, dim, dtype=dtype)
    k = torch.zeros(1, 16, 1, dim, dtype=dtype)
    one = torch.ones(1, dtype=torch.int32)
    batch = serving.PagedBatch(starts([1]), one, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="cannot run this") as caught:
        serving.attention_paged(q, k, k, batch, engine="gfx942")
    assert reason in str(caught.value)


@pytest.mark.parametrize("rows", [3, 60])
def test_a_page_table_without_entries(rows: int) -> None:
    """PyTorch gives it no address. A sink is all that a row sees then."""
    q, k = torch.ones(rows, 2, 64).bfloat16(), torch.ones(2, 16, 1, 64).bfloat16()
    batch = serving.PagedBatch(
        starts([rows]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32)
    )
    sinks = torch.tensor([0.5, -math.inf])
    out, lse = serving.attention_paged(
        q, k, k, batch, sinks=sinks, return_lse=True, engine="gfx942"
    )
    assert not out.any()
    assert torch.equal(lse[1], torch.full((rows,), -math.inf))
    assert torch.allclose(lse[0], torch.tensor(0.5), atol=1e-6)


def test_roundings_that_few_kernels_have() -> None:
    q, k = torch.zeros(2, 2, 96).bfloat16(), torch.zeros(1, 16, 1, 96).to(torch.float8_e4m3fnuz)
    one = torch.full((1,), 2, dtype=torch.int32)
    batch = serving.PagedBatch(starts([2]), one, torch.zeros(1, 1, dtype=torch.int32))
    for cache, needs in (
        (k, "a cache of bf16 and a head dim of 64, 128 or 256"),
        (k.bfloat16(), "a head dim of 64, 128 or 256"),
    ):
        with pytest.raises(ValueError, match=f"rounding 'rtz' needs {needs}: use 'rtne'"):
            serving.attention_paged(q, cache, cache, batch, rounding="rtz", engine="gfx942")
    x = torch.zeros(1, 5, 2, 96).bfloat16()
    with pytest.raises(ValueError, match="rounding 'rtna' needs a head dim of 64, 128 or 256"):
        liteattention_rocm.attention(x, x, x, causal=True, rounding="rtna", engine="gfx942")
