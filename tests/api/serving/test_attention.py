"""Packed and paged attention against float64, on both CPU engines and every instruction set."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import liteattention_rocm
from liteattention_rocm import PagedBatch, serving, validation
from liteattention_rocm.contract import FP8
from tests.oracle.attention import exact_rows

from .cases import Case, check

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNTOUCHED = 7.0


def paged(case: Case, engine: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.q, UNTOUCHED)
    result, lse = liteattention_rocm.attention_paged(
        case.q, case.k_cache, case.v_cache, PagedBatch(case.q_start, case.kv_len, case.table),
        out=out, return_lse=True, engine=engine, **case.options, **more,
    )  # fmt: skip
    assert result is out
    return out, lse


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([1, 3, 16, 64, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 16), (2, 3), (1, 8), (2, 4), (3, 2), (2, 1)]))
    edges = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 511, 513])
    lengths = st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5, 17, 33, 70, 130]), edges)
    batch = draw(st.lists(lengths, min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {
        "causal": draw(st.sampled_from([True, True, False])),
        "window": draw(st.sampled_from([None, None, 1, 40, 300])),
        "soft_cap": draw(st.sampled_from([None, None, 4.0, 30.0])),
    }
    if not options["causal"]:
        options["lookahead"] = draw(st.sampled_from([None, 0, 1, 39, 200]))
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-3, 3, kv_heads * group)
    if dtype == torch.bfloat16:
        options["rounding"] = draw(st.sampled_from(["rtne", "rtna", "rtz"]))
    return Case(
        [q for q, _ in batch],
        [q + before for q, before in batch],
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([64, 128, 256, 8, 72])),
        page_size,
        dtype,
        seed=draw(st.integers(0, 1000)),
        shared_prefix=draw(st.booleans()),
        options=options,
    )


FEW = settings(
    max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(case=cases())
def test_paged_within_the_derived_bound(isa: str, case: Case) -> None:
    check(case, *paged(case, "cpu"), UNTOUCHED)


@FEW
@given(case=cases())
def test_float64_engine_is_the_dense_formula(case: Case) -> None:
    check(case, *paged(case, "reference"), UNTOUCHED)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(engine: str, dtype: torch.dtype, other: torch.dtype) -> None:
    options = {"sinks": torch.linspace(-3, 3, 4), "soft_cap": 30.0, "window": 40}
    case = Case([1, 70], [60, 90], 4, 2, 64, 16, dtype, options=options)
    with torch.autocast("cpu", other):
        out, lse = paged(case, engine)
    assert torch.equal(out, paged(case, engine)[0])
    check(case, out, lse, UNTOUCHED)


#: From one end of what is taken to the other.
CAPS = [2.0**-60, 1e-9, 0.1, 3.0, 50.0, 1e3, 1e5, 1e6, 1e8, 1e13, 2.0**60]


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_a_sink_of_minus_infinity_is_none(engine: str) -> None:
    """Of rows that see keys, and of those that see none."""
    starts, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 10], [0, 3, 40]))
    q, kv = torch.randn(10, 2, 64), torch.randn(40, 2, 64)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "engine": engine}
    out, lse = liteattention_rocm.attention_varlen(q, kv, kv, starts, keys, **options)
    sinks = torch.tensor([-math.inf, 0.5])
    with_sink, lse_with_sink = liteattention_rocm.attention_varlen(
        q, kv, kv, starts, keys, sinks=sinks, **options
    )
    assert (lse[:, :2] == -math.inf).all()
    assert torch.equal(with_sink[:, 0], out[:, 0]) and torch.equal(lse_with_sink[0], lse[0])
    assert (lse_with_sink[1, :2] == 0.5).all() and (with_sink[:2] == 0).all()


@pytest.mark.parametrize("cap", CAPS)
def test_any_soft_cap(isa: str, cap: float) -> None:
    for dtype in DTYPES:
        options: dict[str, Any] = {"soft_cap": cap, "sinks": torch.linspace(-3, 3, 4)}
        check_case = Case([1, 70, 4], [600, 90, 30], 4, 2, 64, 16, dtype, options=options)
        for scale in (None, -0.3, 0.0):
            check_case.options["scale"] = scale
            check(check_case, *paged(check_case, "cpu"), UNTOUCHED)
    check(check_case, *paged(check_case, "reference"), UNTOUCHED)


@pytest.mark.parametrize("cap", [1.0, 50.0, 1e5, 1e8, 2.0**60])
@pytest.mark.parametrize("scale", [2.0**-60, -(2.0**-30), 2.0**30, -(2.0**60)])
def test_any_scale_with_any_soft_cap(isa: str, cap: float, scale: float) -> None:
    """Scores are exact here, so without a cap even a choice between logits of 1e20 is. A capped
    logit is rounded to fp32, which may decide between keys once logits pass 1e6.
    """
    torch.manual_seed(0)
    q = torch.randint(-4, 5, (3, 2, 64)).float()
    k, v = torch.randint(-4, 5, (40, 2, 64)).float(), torch.randn(40, 2, 64)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 40)]
    for soft_cap in (None, cap):
        out, lse = liteattention_rocm.attention_varlen(
            q, k, v, *starts, scale=scale, soft_cap=soft_cap, return_lse=True, engine="cpu"
        )
        right = exact_rows(q, k, v, scale=scale, soft_cap=soft_cap)
        logits = 0.0 if soft_cap is None else min(soft_cap, abs(scale) * 1024)
        if logits < 1e6:
            assert torch.allclose(out.double(), right.out, atol=1e-5 + 2e-6 * logits)
        assert (out.abs() <= v.abs().max()).all()
        assert torch.allclose(lse.double(), right.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize(
    "masks",
    [
        {"causal": True}, {"causal": True, "window": 50}, {"window": 50, "lookahead": 49},
        {"lookahead": 2}, {"lookahead": 148}, {"lookahead": 149},
    ],
    ids=str,
)  # fmt: skip
def test_packed_equals_each_sequence_alone(engine: str, masks: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q_lens, kv_lens = [3, 0, 150, 1], [10, 5, 200, 900]
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, kv_lens)]
    q = torch.randn(sum(q_lens), 8, 64)
    k, v = torch.randn(2, sum(kv_lens), 2, 64)
    out, lse = liteattention_rocm.attention_varlen(
        q, k, v, *starts, **masks, return_lse=True, engine=engine
    )
    for r in range(4):
        rows, keys = (slice(int(s[r]), int(s[r + 1])) for s in starts)
        alone = exact_rows(q[rows], k[keys], v[keys], **masks)
        assert torch.allclose(out[rows].double(), alone.out, atol=2e-6)
        assert torch.allclose(lse[:, rows].double(), alone.lse, atol=1e-5)


def test_packed_calls_whose_values_nobody_reads_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with bounds: checked once, and right for other lengths and tensors."""
    monkeypatch.setattr(serving, "readable", lambda tensor: False)
    checks: list[Any] = []
    ragged = validation.ragged
    monkeypatch.setattr(validation, "ragged", lambda *a: checks.append(a) or ragged(*a))
    outs = [None, torch.empty(40, 4, 16)]
    for seed, lengths in enumerate(((40, 0), (13, 27), (1, 30), (13, 27))):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 40, 4, 16)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        for out in outs:
            found = serving.attention_varlen(
                q, k, v, starts, starts, max_seqlen_q=40, max_seqlen_k=40, causal=True, out=out,
                engine="reference",
            )  # fmt: skip
            for begin, end in itertools.pairwise(starts.tolist()):
                rows = slice(begin, end)
                alone = exact_rows(q[rows], k[rows], v[rows], causal=True)
                assert torch.allclose(found[rows].double(), alone.out, atol=2e-6)
    assert len(checks) == len(outs)
    with pytest.raises(ValueError, match="out must not overlap q"):
        serving.attention_varlen(
            q, k, v, starts, starts, max_seqlen_q=40, max_seqlen_k=40, causal=True, out=q,
            engine="reference",
        )  # fmt: skip


def test_one_packed_sequence_is_the_dense_call(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(200, heads, 64).bfloat16() for heads in (4, 2, 2))
    whole = torch.tensor([0, 200], dtype=torch.int32)
    packed = liteattention_rocm.attention_varlen(q, k, v, whole, whole, causal=True, engine="cpu")
    full = liteattention_rocm.attention(q[None], k[None], v[None], causal=True, engine="cpu")
    assert torch.equal(packed, full[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("dim", [64, 72])
def test_fp8_caches_are_read_with_their_scales(isa: str, dtype: torch.dtype, dim: int) -> None:
    for q_dtype in DTYPES:
        case = Case([1, 70, 4], [600, 90, 30], 8, 2, dim, 16, q_dtype)
        case.k_cache, case.v_cache = case.k_cache.to(dtype), case.v_cache.to(dtype)
        case.options = {"k_scale": 0.5, "v_scale": 3.0}
        check(case, *paged(case, "cpu"), UNTOUCHED)


def test_all_fp8_numbers_are_read_exactly(isa: str) -> None:
    # One key per request: the output is the value itself.
    for dtype in FP8:
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = torch.isfinite(codes.float())
        codes = torch.where(finite, codes.float(), 0.0).to(dtype)
        v = codes.view(4, 1, 1, 64)
        batch = PagedBatch(
            torch.arange(5, dtype=torch.int32),
            torch.ones(4, dtype=torch.int32),
            torch.arange(4, dtype=torch.int32)[:, None],
        )
        q = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
        out = liteattention_rocm.attention_paged(q, v, v, batch, engine="cpu")
        assert torch.equal(out.flatten().float(), codes.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_lengths_matters(isa: str, dtype: torch.dtype) -> None:
    """Stale tokens and unused pages may hold NaN."""
    case = Case([1, 40, 3], [100, 77, 10], 4, 2, 64, 16, dtype)
    clean, clean_lse = paged(case, "cpu")
    used = torch.zeros(case.kv.shape[0], 16, dtype=torch.bool)
    for r, length in enumerate(case.kv_lens):
        for j in range(length):
            used[case.table[r, j // 16], j % 16] = True
    case.kv.transpose(1, 2)[~used] = torch.nan
    case.table[:, -1] = 1 << 30
    out, lse = paged(case, "cpu")
    assert torch.equal(out, clean)
    rows = slice(2, 46)
    assert torch.equal(lse[:, rows], clean_lse[:, rows])


def test_blocks_outside_the_window_are_not_read(isa: str) -> None:
    for q_len in (1, 60):
        case = Case([q_len], [1000], 4, 1, 64, 64, options={"window": 100})
        clean, _ = paged(case, "cpu")
        first = 1000 - q_len - 100 + 1
        for block in range(first // 64):
            case.kv[case.table[0, block]] = torch.nan
        assert torch.equal(paged(case, "cpu")[0], clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16])
def test_pages_before_the_window_may_hold_anything(isa: str, dtype: torch.dtype, page: int) -> None:
    """A framework reuses pages that fell out of the window, in the middle of a K block, too."""
    for q_len, kv_len, window in ((1, 60, 32), (1, 333, 45), (40, 121, 20), (200, 500, 57)):
        case = Case([q_len], [kv_len], 4, 2, 64, page, dtype, options={"window": window})
        clean, _ = paged(case, "cpu")
        first = kv_len - q_len - window + 1
        case.kv[case.table[0, : first // page].long()] = torch.nan
        assert torch.equal(paged(case, "cpu")[0], clean), (q_len, kv_len, window)


def test_bit_equal_whatever_the_threads_and_the_neighbours(isa: str) -> None:
    case = Case([1, 100, 1, 3], [1500, 400, 33, 600], 8, 2, 64, 16)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(paged(case, "cpu"))
    rows = slice(2, 107)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse[:, rows], results[0][1][:, rows])
    for r in range(4):
        begin, end = case.q_start[r : r + 2].tolist()
        alone = liteattention_rocm.attention_paged(
            case.q[begin:end],
            case.k_cache,
            case.v_cache,
            PagedBatch(
                torch.tensor([0, end - begin], dtype=torch.int32),
                case.kv_len[r : r + 1],
                case.table[r : r + 1],
            ),
            engine="cpu",
        )
        assert torch.equal(alone, results[0][0][begin:end])


def test_page_sizes_and_layouts_do_not_change_a_bit(isa: str) -> None:
    """The same tokens as vLLM's blocks, SGLang's token pool and odd pages."""
    torch.manual_seed(3)
    q = torch.randn(4, 8, 64).bfloat16()
    k, v = torch.randn(2, 384, 2, 64).bfloat16()
    q_start = torch.tensor([0, 4], dtype=torch.int32)
    kv_len = torch.tensor([380], dtype=torch.int32)
    results = []
    for page in (1, 3, 16, 64, 128):
        order = torch.randperm(384 // page)
        caches = []
        for x in (k, v):
            cache = torch.empty(384 // page, page, 2, 64, dtype=torch.bfloat16)
            cache[order] = x.view(-1, page, 2, 64)
            caches.append(cache)
        batch = PagedBatch(q_start, kv_len, order.int()[None])
        results.append(liteattention_rocm.attention_paged(q, *caches, batch, engine="cpu"))
    assert all(torch.equal(x, results[0]) for x in results[1:])


def test_layers_share_a_plan_and_equal_fresh_ones() -> None:
    case = Case([1, 90], [700, 300], 4, 2, 64, 16)
    batch = PagedBatch(case.q_start, case.kv_len, case.table)
    for layer in range(3):
        q, k = case.q * (layer + 1), case.k_cache.roll(layer, 0)
        for window in (None, 64):
            shared, fresh = (
                liteattention_rocm.attention_paged(
                    q, k, case.v_cache, b, window=window, engine="cpu", out=torch.zeros_like(q)
                )
                for b in (batch, PagedBatch(case.q_start, case.kv_len, case.table))
            )
            assert torch.equal(shared, fresh)
    assert len(batch.calls) == 2  # one for each window, none per layer


def test_extents_past_4_gib() -> None:
    """Pages 1.2 GB apart: byte offsets pass 2^32. Only touched pages take memory."""
    stride = 600_000_000
    storage = torch.empty(stride * 4 + 16 * 64, dtype=torch.bfloat16)
    cache = storage.as_strided((5, 16, 1, 64), (stride, 64, 64, 1))
    torch.manual_seed(0)
    cache.copy_(torch.randn(5, 16, 1, 64))
    q = torch.randn(2, 4, 64).bfloat16()
    batch = PagedBatch(
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([77], dtype=torch.int32),
        torch.tensor([[4, 3, 2, 1, 0]], dtype=torch.int32),
    )
    far, near = (
        liteattention_rocm.attention_paged(q, x, x, batch, engine="cpu")
        for x in (cache, cache.clone())
    )
    assert torch.equal(far, near)


def test_compiles_without_a_graph_break() -> None:
    case = Case([1, 5], [70, 9], 4, 2, 16, 16)
    batch = PagedBatch(case.q_start, case.kv_len, case.table)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(3)
        liteattention_rocm.write_kv(k[0, :3] * 2, v[0, :3].clone(), k, v, slots, engine="cpu")
        out = liteattention_rocm.attention_paged(q * 2, k, v, batch, engine="cpu")
        return out[2:8] + 1

    caches = [[x.clone() for x in (case.k_cache, case.v_cache)] for _ in range(2)]
    eager = layer(case.q, *caches[0])
    compiled = torch.compile(layer, fullgraph=True)(case.q, *caches[1])
    assert torch.equal(eager, compiled)
    assert torch.equal(caches[0][0], caches[1][0])


def test_a_used_batch_is_copied_and_pickled() -> None:
    case = Case([1, 5], [40, 9], 4, 2, 64, 16, torch.bfloat16, seed=5)
    batch = PagedBatch(case.q_start, case.kv_len, case.table, max_kv_len=60)

    def run(one: PagedBatch) -> torch.Tensor:
        out = torch.zeros_like(case.q)
        return liteattention_rocm.attention_paged(case.q, case.k_cache, case.v_cache, one, out=out)

    want = run(batch)
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    loaded = pickle.loads(pickle.dumps(batch))
    for twin in (shallow, deep, loaded):
        assert (twin.max_q_len, twin.max_kv_len) == (5, 60)
        assert torch.equal(run(twin), want)
    assert shallow.kv_len is batch.kv_len and deep.kv_len is not batch.kv_len
    batch.kv_len[0] = 30  # what is shared is seen, what is not is not
    assert torch.equal(run(shallow), run(batch)) and not torch.equal(run(batch), want)
    assert torch.equal(run(deep), want) and torch.equal(run(loaded), want)
