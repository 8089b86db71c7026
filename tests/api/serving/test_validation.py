"""Bad batches and calls are refused with every reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import PagedBatch, attention_paged, attention_varlen
from tests.oracle.tensors import ints


def batch(**changes: Any) -> PagedBatch:
    given: dict[str, Any] = {
        "q_start": ints(0, 2, 3),
        "kv_len": ints(2, 9),
        "page_table": torch.tensor([[0, 9], [2, 1]], dtype=torch.int32),
        "max_q_len": None,
        "max_kv_len": None,
    }
    given.update(changes)
    return PagedBatch(**given)


def call(b: Any = None, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "q": torch.zeros(4, 4, 8),
        "k_cache": torch.zeros(3, 8, 2, 8),
        "v_cache": torch.zeros(3, 8, 2, 8),
    }
    given.update(changes)
    return attention_paged(batch=b or batch(), **given)


def test_the_valid_call_is_valid() -> None:
    assert call().shape == (4, 4, 8)
    assert batch().max_q_len == 2 and batch().max_kv_len == 9 and batch().requests == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_start": ints(0, 2, 3).long()}, "q_start must be torch.int32"),
        ({"q_start": [0, 2, 3]}, "q_start must be a tensor, got list"),
        ({"q_start": ints(0, 3)}, r"q_start must be \[3\] like kv_len"),
        ({"q_start": ints(0, 3, 2)}, "never decrease"),
        ({"q_start": ints(-1, 1, 2)}, "start at 0 or later"),
        ({"kv_len": ints(2, -9)}, "kv_len must not be negative"),
        ({"kv_len": ints(2, 9)[:, None]}, "kv_len must have 1 dimensions"),
        ({"page_table": ints(0, 1)}, "page_table must have 2 dimensions"),
        ({"page_table": ints(0, 1)[None]}, "page_table must have 2 rows"),
        ({"max_q_len": 1}, "max_q_len 1 is less than a length, 2"),
        ({"max_kv_len": 8}, "max_kv_len 8 is less than a length, 9"),
        ({"max_kv_len": 8.5}, "max_kv_len must be an int or None"),
    ],
)
def test_batches(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        batch(**changes)


BAD_CALLS = pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.zeros(4, 4, 16)}, "one head dim, got 16 and 8"),
        ({"q": torch.zeros(4, 3, 8)}, "multiple of key heads, got 3 and 2"),
        ({"q": torch.zeros(2, 4, 8)}, "q_start ends at row 3, q has 2 rows"),
        ({"q": torch.zeros(4, 4, 8, requires_grad=True)}, "no backward pass"),
        ({"q": torch.zeros(4, 8, 4).transpose(1, 2)}, "contiguous in its last dimension"),
        ({"q": None}, "q must be a tensor, got NoneType"),
        ({"k_cache": torch.zeros(2, 8, 2, 8), "v_cache": torch.zeros(2, 8, 2, 8)},
         "names page 2 of a cache of 2 pages"),
        ({"k_cache": torch.zeros(9, 4, 2, 8), "v_cache": torch.zeros(9, 4, 2, 8)},
         r"2 pages of 4 tokens wide, too few for kv_len\[1\] = 9"),
        ({"v_cache": torch.zeros(3, 8, 2, 8).half()}, "one dtype, got torch.float32 and torch.fl"),
        ({"k_cache": torch.zeros(3, 8, 2, 8, dtype=torch.uint8)}, "does not say which fp8"),
        ({"window": 0}, "window must be at least 1, got 0: None is no window"),
        ({"window": True}, "window must be an int or None"),
        ({"lookahead": -1, "causal": False}, "lookahead must be at least 0, got -1: None is no"),
        ({"lookahead": 1.0, "causal": False}, "lookahead must be an int or None, got float"),
        ({"lookahead": 3}, "lookahead needs causal=False"),
        ({"soft_cap": -1.0}, "soft_cap must be positive"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"k_scale": 2.0}, "are for fp8 caches"),
        ({"scale": 3e38}, r"scale must be from 2\^-60 to 2\^60 .* in size, got 3e\+38"),
        ({"scale": -1e-45}, r"scale must be from 2\^-60 to 2\^60 .* in size, got -1e-45"),
        ({"soft_cap": 3.5e38}, r"soft_cap must be from 2\^-60 .* got 3.5e\+38: None is no cap"),
        ({"soft_cap": 1e-30}, r"soft_cap must be from 2\^-60 to 2\^60 .* got 1e-30"),
        ({"k_scale": 1e-45}, r"scale \* k_scale must be from 2\^-60 to 2\^60"),
        ({"k_scale": 1e-300, "scale": 0.1}, r"scale \* k_scale must be from .* got 1e-301"),
        ({"k_scale": 1e300}, r"scale \* k_scale must be from 2\^-60 to 2\^60 .* got 1e\+300"),
        ({"v_scale": 1e-45}, r"v_scale must be from 2\^-60 to 2\^60"),
        ({"k_scale": None}, "k_scale must be a number, got NoneType"),
        ({"soft_cap": "a"}, "soft_cap must be a number, got str"),
        ({"out": torch.zeros(4, 4, 8, requires_grad=True)}, "out requires grad"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[4\]"),
        ({"sinks": torch.zeros(4).half()}, "sinks must be torch.float32"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"rounding": "rtz"}, "is for bf16 outputs"),
        ({"out": torch.zeros(3, 4, 8)}, "out must have q's shape"),
        ({"out": torch.zeros(4, 4, 8).half()}, "out must have q's dtype"),
        ({"causal": 1}, "causal must be a bool"),
    ],
)  # fmt: skip
TRACED = [bad for bad in BAD_CALLS.args[1] if isinstance(bad[0].get("q", 0), torch.Tensor | int)]


@BAD_CALLS
def test_calls(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        call(**changes)


@BAD_CALLS
def test_calls_after_a_valid_one(changes: dict[str, Any], reason: str) -> None:
    # With the options that equal the bad ones but for their type: 1 and True are one key.
    valid: dict[str, Any] = {"window": 1} if changes.get("window") is True else {}
    b = batch()
    call(b, **valid)
    call(b, out=torch.zeros(4, 4, 8))
    with pytest.raises((TypeError, ValueError), match=reason):
        call(b, **changes)


@pytest.mark.parametrize(("changes", "reason"), TRACED)
def test_traced_calls(changes: dict[str, Any], reason: str) -> None:
    class Watched(torch.Tensor):
        """A tensor that the operators see, as tracers' are."""

    watched = changes.get("q", torch.zeros(4, 4, 8)).as_subclass(Watched)
    with pytest.raises((TypeError, ValueError), match=reason):
        call(**changes | {"q": watched})


def test_a_traced_call_wants_a_batch() -> None:
    q, cache = torch.zeros(4, 4, 8), torch.zeros(3, 8, 2, 8)
    wrong: Any = None

    class Watched(torch.Tensor):
        """A tensor that the operators see, as tracers' are."""

    with pytest.raises(TypeError, match="batch must be a PagedBatch, got NoneType"):
        attention_paged(q.as_subclass(Watched), cache, cache, wrong)


def test_a_compiled_call_refuses_what_an_eager_one_does() -> None:
    @torch.compile(backend="eager")
    def windowed(q: torch.Tensor, window: Any) -> Any:
        return call(b, q=q, window=window)

    b = batch()
    for window in (0, True):
        with pytest.raises((TypeError, ValueError), match="window must be"):
            windowed(torch.zeros(4, 4, 8), window)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_compiled_packed_call_refuses_a_bound_that_is_no_number(name: str) -> None:
    """True would be a bound of 1, which nobody holds against lengths on a GPU."""

    def bounded(q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor) -> Any:
        limits: dict[str, Any] = {"max_seqlen_q": 1, "max_seqlen_k": 1} | {name: True}
        return attention_varlen(q, k, k, starts, starts, **limits)

    for call in (bounded, torch.compile(bounded, backend="eager")):
        with pytest.raises(TypeError, match=f"{name} must be an int or None, got bool"):
            call(torch.zeros(2, 4, 8), torch.zeros(2, 2, 8), ints(0, 1, 2))


def test_parameters_are_planned_once() -> None:
    b = batch()
    q = torch.nn.Parameter(torch.randn(4, 4, 8), requires_grad=False)
    with torch.no_grad():
        first = call(b, q=q)
        assert len(b.calls) == 1
        assert torch.equal(first[:3], call(b, q=q.data)[:3])
    assert len(b.calls) == 1
    with pytest.raises(ValueError, match="q requires grad"):
        call(b, q=torch.nn.Parameter(torch.randn(4, 4, 8)))


def test_numpy_numbers() -> None:
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    q = torch.randn(4, 4, 8)
    b = batch(max_q_len=np.int32(2), max_kv_len=np.int64(9))
    got = call(b, q=q, window=np.int64(3), scale=np.float32(0.5), soft_cap=np.float64(4), **caches)
    expected = call(batch(), q=q, window=3, scale=0.5, soft_cap=4, **caches)
    assert torch.equal(got[:3], expected[:3])
    assert type(b.max_q_len) is type(b.max_kv_len) is int
    with pytest.raises(TypeError, match="window must be an int or None"):
        call(b, q=q, window=np.bool_(True), **caches)


def test_a_bound_of_the_keys_may_be_more_than_the_table_names() -> None:
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = ints(31, 31)
    caches = {"k_cache": torch.randn(4, 16, 2, 8), "v_cache": torch.randn(4, 16, 2, 8)}
    q = torch.randn(4, 4, 8)
    loose = batch(kv_len=lengths, page_table=table, max_kv_len=39)
    for _ in range(2):
        got = call(loose, q=q, **caches)
    expected = call(batch(kv_len=lengths, page_table=table), q=q, **caches)
    assert torch.equal(got[:3], expected[:3])


def test_only_columns_that_hold_keys_are_looked_at() -> None:
    table = torch.full((2, 5000), -7, dtype=torch.int32)
    table[:, :2] = ints(0, 1)
    assert call(batch(page_table=table)).shape == (4, 4, 8)


def test_values_written_after_a_call_are_seen() -> None:
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    q, b = torch.randn(4, 4, 8), batch()
    call(b, q=q, **caches)
    b.kv_len[1] = 12
    assert torch.equal(
        call(b, q=q, **caches)[:3], call(batch(kv_len=ints(2, 12)), q=q, **caches)[:3]
    )
    b.page_table[1, 0] = 7
    with pytest.raises(ValueError, match="names page 7 of a cache of 3 pages"):
        call(b, q=q, **caches)
    b.kv_len[1] = -1
    with pytest.raises(ValueError, match="kv_len must not be negative"):
        call(b, q=q, **caches)


def test_tensors_put_in_place_of_others_are_seen() -> None:
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    q, table = torch.randn(4, 4, 8), torch.tensor([[1, 9], [0, 2]], dtype=torch.int32)
    expected = call(batch(page_table=table), q=q, **caches)
    b = batch()
    assert not torch.equal(call(b, q=q, **caches)[:3], expected[:3])
    b.page_table = table
    assert torch.equal(call(b, q=q, **caches)[:3], expected[:3])
    b.page_table.data = torch.full((2, 2), 7, dtype=torch.int32)
    with pytest.raises(ValueError, match="names page 7 of a cache of 3 pages"):
        call(b, q=q, **caches)


def test_a_table_of_other_strides_at_the_same_address_is_seen() -> None:
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    q, b = torch.randn(4, 4, 8), batch(kv_len=ints(2, 5))
    call(b, q=q, **caches)
    b.page_table = b.page_table.as_strided((2, 2), (0, 1))
    expected = call(batch(kv_len=ints(2, 5), page_table=b.page_table.clone()), q=q, **caches)
    assert torch.equal(call(b, q=q, **caches)[:3], expected[:3])


def test_an_option_of_a_strange_type_after_a_change() -> None:
    b = batch()
    call(b)
    b.kv_len[1] = 12
    with pytest.raises(TypeError, match="window must be an int or None, got list"):
        call(b, window=[3])


def test_numbers_that_are_not_in_memory_as_they_are() -> None:
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    q, b = torch.randn(4, 4, 8), batch()
    expected = call(b, q=-q, **caches)
    assert torch.equal(call(b, q=torch._neg_view(q), **caches)[:3], expected[:3])
    call(b, q=q, **caches)
    with pytest.raises(ValueError, match="k_cache has no memory"):
        call(b, q=q, **(caches | {"k_cache": torch._efficientzerotensor((3, 8, 2, 8))}))


def test_packed_sinks_that_are_not_in_memory_as_they_are() -> None:
    starts, sinks = torch.tensor([0, 4]).int(), torch.tensor([3.0, -2.0, 0.5, 1.0])
    q = torch.randn(4, 4, 8)
    outs = [
        attention_varlen(q, q, q, starts, starts, sinks=given)
        for given in (sinks, torch._neg_view(-sinks))
    ]
    assert torch.equal(*outs)


def test_a_batch_with_other_pages_grows_as_its_original_does() -> None:
    lengths = torch.tensor([5]).int()
    first = PagedBatch(torch.tensor([0, 1]).int(), lengths, torch.tensor([[0]]).int())
    other = first.with_pages(torch.tensor([[1]]).int())
    q, cache = torch.randn(1, 4, 8), torch.randn(2, 8, 2, 8)
    lengths.fill_(7)
    for number, b in enumerate((first, other)):
        alone = PagedBatch(b.q_start.clone(), lengths.clone(), torch.tensor([[number]]).int())
        expected = attention_paged(q, cache, cache, alone)
        assert torch.equal(attention_paged(q, cache, cache, b), expected)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("how", ["numpy", "inference", "data"])
def test_refilled_values_that_leave_no_trace_are_seen(engine: str, how: str) -> None:
    """A serving loop refills its buffers for every step, in ways that PyTorch does not count."""
    caches = {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    given = {"q": torch.randn(4, 4, 8), "engine": engine, **caches}

    def fill(tensor: torch.Tensor, numbers: list[Any]) -> None:
        values = torch.tensor(numbers, dtype=torch.int32)
        if how == "numpy":
            tensor.numpy()[...] = values.numpy()
        elif how == "data":
            tensor.data.copy_(values)
        else:
            tensor.copy_(values)

    with torch.inference_mode(how == "inference"):
        b = batch()
        call(b, **given)
        steps: tuple[dict[str, list[Any]], ...] = (
            {"kv_len": [3, 10]},
            {"q_start": [0, 1, 4]},
            {"kv_len": [8, 16], "page_table": [[1, 0], [0, 2]]},
            {"page_table": [[2, 0], [1, 0]]},
            {"q_start": [0, 0, 1], "kv_len": [0, 1]},
        )
        for step in steps:
            for name, numbers in step.items():
                fill(getattr(b, name), numbers)
            fresh = PagedBatch(b.q_start.clone(), b.kv_len.clone(), b.page_table.clone())
            for more in ({}, {"causal": False}):  # known to the batch, and new to it
                out = torch.zeros(2, 4, 4, 8)
                call(b, **given, **more, out=out[0])
                call(fresh, **given, **more, out=out[1])
                assert torch.equal(*out), step
        fill(b.kv_len, [0, 40])
        with pytest.raises(ValueError, match=r"too few for kv_len\[1\] = 40"):
            call(b, **given)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_no_page_outside_the_cache_is_read(engine: str) -> None:
    """A wild page id ended the process, or read what lies beside the cache."""
    b = batch(page_table=torch.tensor([[0, 9], [2, 1]], dtype=torch.int32))
    call(b, engine=engine)
    b.page_table.numpy()[0, 0] = 2_000_000_000
    b.page_table.numpy()[1] = 3
    with pytest.raises(
        ValueError, match=r"page 2000000000 of a cache of 3 pages at \[0, 0\] .and 2"
    ):
        call(b, engine=engine)
    b.page_table.numpy()[:, 0] = [-1, 2]
    b.page_table.numpy()[1, 1] = 1
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is -1, not a page$"):
        call(b, engine=engine)
    b.page_table.numpy()[0, 0] = 0
    call(b, engine=engine)


def test_a_refilled_batch_under_a_profiler() -> None:
    """Then calls are operators, whose bounds are those of the batch."""
    q, cache, b = torch.randn(4, 4, 8), torch.randn(3, 8, 2, 8), batch()
    call(b, q=q, k_cache=cache, v_cache=cache)
    b.kv_len.numpy()[:] = [3, 16]
    with torch.autograd.profiler.profile():
        out = call(b, q=q, k_cache=cache, v_cache=cache)
    expected = call(batch(kv_len=ints(3, 16)), q=q, k_cache=cache, v_cache=cache)
    assert torch.equal(out[:3], expected[:3])


def test_a_batch_forgets_old_plans() -> None:
    b = batch()
    for rows in range(3, 203):
        call(b, q=torch.zeros(rows, 4, 8))
    assert len(b.calls) == 32
    used = next(reversed(b.calls))
    for rows in range(300, 340):  # what is used stays
        call(b, q=torch.zeros(202, 4, 8))
        call(b, q=torch.zeros(rows, 4, 8))
    assert len(b.calls) == 32 and used in b.calls


def test_a_negative_page_is_found() -> None:
    table = torch.tensor([[0, -1], [2, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] is -1, not a page"):
        call(batch(page_table=table))


def test_every_reason_at_once() -> None:
    with pytest.raises(TypeError) as error:
        call("no batch", q=torch.zeros(4, 3, 8), window=-2, causal=None, rounding="no")
    for reason in ("batch must be a PagedBatch", "window must be", "causal must be", "rounding"):
        assert reason in str(error.value)


@pytest.mark.parametrize("missing", ["q", "k_cache", "v_cache", "sinks"])
def test_an_argument_that_is_no_tensor_hides_nothing_of_the_others(missing: str) -> None:
    buffer = torch.zeros(4, 6, 8, dtype=torch.int32)
    given: dict[str, Any] = {
        "q": buffer[:, :3],
        "k_cache": torch.zeros(3, 8, 2, 12),
        "v_cache": torch.zeros(3, 4, 2, 12).half(),
        "sinks": torch.zeros(5, dtype=torch.float64),
        "out": buffer[:, :3],
    }
    about = {
        "q must be bf16, fp16 or fp32, got torch.int32": {"q"},
        "k_cache must have q's dtype torch.int32 or be fp8, got torch.float32": {"q", "k_cache"},
        "v_cache must have q's dtype torch.int32 or be fp8, got torch.float16": {"q", "v_cache"},
        "k_cache and v_cache must have one dtype": {"k_cache", "v_cache"},
        "k_cache and v_cache must have one shape": {"k_cache", "v_cache"},
        "k_scale and v_scale are for fp8 caches, got 2.0 and 1.0 with torch.float32": {"k_cache"},
        "q and k_cache must have one head dim, got 8 and 12": {"q", "k_cache"},
        "query heads must be a multiple of key heads, got 3 and 2": {"q", "k_cache"},
        "sinks must be torch.float32, got torch.float64": {"sinks"},
        "sinks must be [3] (Hq), got [5]": {"q", "sinks"},
        "out must not overlap q": {"q"},
    }
    with pytest.raises(TypeError) as error:
        call(**given | {missing: [1.0], "k_scale": 2.0})
    assert f"{missing} must be a tensor, got list" in str(error.value)
    for reason, names in about.items():
        assert (reason in str(error.value)) == (missing not in names), reason


def test_a_tensor_of_other_dimensions_hides_nothing_of_the_others() -> None:
    with pytest.raises(ValueError) as error:
        call(q=torch.zeros(4, 3, 8), out=torch.zeros(4, 24), k_cache=torch.zeros(3, 8, 2, 16))
    for reason in (
        "out must have 3 dimensions",
        "k_cache and v_cache must have one shape",
        "q and k_cache must have one head dim, got 8 and 16",
        "query heads must be a multiple of key heads, got 3 and 2",
    ):
        assert reason in str(error.value)


def test_one_reason_hides_no_other_of_a_page_table() -> None:
    """Each kind is named once, with the first place."""
    table = torch.tensor([[9, -1], [-2, 8]], dtype=torch.int32)
    with pytest.raises(ValueError) as error:
        call(batch(kv_len=ints(9, 25), page_table=table))
    said = str(error.value)
    for reason in (
        "page_table is 2 pages of 8 tokens wide, too few for kv_len[1] = 25",
        "page_table names page 9 of a cache of 3 pages",
        "page_table[0, 1] is -1, not a page",
    ):
        assert reason in said
    assert said.count("not a page") == said.count("of a cache of") == 1


def test_out_must_not_overlap_but_may_neighbour() -> None:
    buffer = torch.zeros(4, 8, 8)
    with pytest.raises(ValueError, match="out must not overlap q"):
        call(q=buffer[:, :4], out=buffer[:, 2:6])
    b = batch()
    for _ in range(2):  # planned, then recognised
        call(b, q=buffer[:, :4], out=buffer[:, 4:])
    with pytest.raises(ValueError, match="out must not overlap q"):
        call(b, q=buffer[:, :4], out=buffer[:, :4])


def test_packed_calls() -> None:
    q, k = torch.zeros(4, 4, 8), torch.zeros(9, 2, 8)
    assert attention_varlen(q, k, k, ints(0, 1, 4), ints(0, 0, 9)).shape == q.shape
    with pytest.raises(ValueError, match="cu_seqlens_k ends at row 10, k has 9 rows"):
        attention_varlen(q, k, k, ints(0, 1, 4), ints(0, 0, 10))
    with pytest.raises(ValueError) as error:
        attention_varlen(q, k, k, ints(0, 4), ints(3, 2, 9), max_seqlen_q=2)
    for reason in ("must have one length", "cu_seqlens_k must start", "max_seqlen_q 2 is less"):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"max_seqlen_q": 1},
            ["max_seqlen_q 1 is less than a length, 5", "cu_seqlens_q ends at row 5, q has 3 rows"],
        ),
        (
            {"max_seqlen_k": -1},
            ["max_seqlen_k must not be negative, got -1", "q ends at row 5, q has 3 rows"],
        ),
        (
            {"cu_seqlens_k": ints(-1, 9)},
            ["cu_seqlens_k must start at 0", "cu_seqlens_q ends at row 5, q has 3 rows"],
        ),
        (
            {"causal": 1, "q": torch.zeros(3, 3, 16)},
            ["causal must be a bool", "got 16 and 8", "got 3 and 2", "ends at row 5, q has 3 rows"],
        ),
        (
            {"q": [1.0]},
            ["q must be a tensor, got list", "cu_seqlens_k ends at row 9, k has 7 rows"],
        ),
    ],
)  # fmt: skip
def test_one_reason_hides_no_other_of_a_packed_call(
    changes: dict[str, Any], reasons: list[str]
) -> None:
    kv = torch.zeros(7, 2, 8)
    given: dict[str, Any] = {"q": torch.zeros(3, 4, 8), "k": kv, "v": kv}
    given |= {"cu_seqlens_q": ints(0, 5), "cu_seqlens_k": ints(0, 9)}
    with pytest.raises((TypeError, ValueError)) as error:
        attention_varlen(**given | changes)
    for reason in reasons:
        assert reason in str(error.value)


def test_one_reason_hides_no_other_of_a_batch() -> None:
    with pytest.raises(TypeError) as error:
        batch(q_start=ints(0, 3, 2), kv_len=ints(2, -9), max_q_len="2", max_kv_len=1)
    for reason in (
        "max_q_len must be an int or None, got str",
        "q_start must start at 0 or later and never decrease, got [0, 3, 2]",
        "kv_len must not be negative, got [2, -9]",
        "max_kv_len 1 is less than a length, 2",
    ):
        assert reason in str(error.value)


def test_a_wrong_type_hides_no_reason_of_a_batch() -> None:
    with pytest.raises(TypeError) as error:
        batch(
            q_start=ints(0, 3, 2, 4).long(), kv_len=ints(2, -9), page_table=[0], max_kv_len=1,
            max_q_len=1,
        )  # fmt: skip
    for reason in (
        "page_table must be a tensor, got list",
        "q_start must be torch.int32, got torch.int64",
        "q_start must be [3] like kv_len, got [4]",
        "q_start must start at 0 or later and never decrease, got [0, 3, 2, 4]",
        "kv_len must not be negative, got [2, -9]",
        "max_kv_len 1 is less than a length, 2",
    ):
        assert reason in str(error.value)
    with pytest.raises(TypeError) as error:
        batch(kv_len=torch.zeros(2), page_table=ints(0, 1), q_start=ints(0, 5), max_q_len=4)
    said = str(error.value)
    assert "max_q_len 4 is less than a length, 5" in said and "page_table must have 2 dim" in said


def test_a_wrong_type_hides_no_reason_of_a_packed_call() -> None:
    q, k = torch.zeros(3, 4, 8), torch.zeros(7, 2, 8)
    with pytest.raises(TypeError) as error:
        attention_varlen(q, k, k, ints(0, 5).long(), ints(2, 1, 9), max_seqlen_q=4)
    for reason in (
        "cu_seqlens_q must be torch.int32, got torch.int64",
        "must have one length, got 2 and 3",
        "max_seqlen_q 4 is less than a length, 5",
        "cu_seqlens_q ends at row 5, q has 3 rows",
        "cu_seqlens_k must start at 0 or later and never decrease, got [2, 1, 9]",
    ):
        assert reason in str(error.value)
    with pytest.raises(TypeError, match="cu_seqlens_k ends at row 9, k has 7 rows"):
        attention_varlen(q, k, k, "starts", ints(0, 9))  # type: ignore[arg-type]


def test_a_refusal_names_an_engine_that_can() -> None:
    with pytest.raises(ValueError, match=r"head dim must be a multiple of 8.*engine='reference'"):
        call(
            q=torch.zeros(4, 4, 12),
            k_cache=torch.zeros(3, 8, 2, 12),
            v_cache=torch.zeros(3, 8, 2, 12),
            engine="cpu",
        )


@pytest.mark.parametrize("engine", ["cpu", "reference", "gfx942", "portable"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": 3e38}, "scale must be"),
        ({"scale": 1.0, "k_scale": 1e-45}, "scale * k_scale must be"),
        ({"scale": 1e-200, "k_scale": 1e-200}, "scale * k_scale must be"),
        ({"v_scale": 1e300}, "v_scale must be"),
        ({"soft_cap": 3.5e38}, "soft_cap must be"),
        ({"soft_cap": -1.0}, "soft_cap must be positive"),
    ],
)
def test_every_engine_refuses_numbers_that_leave_fp32(
    engine: str, changes: dict[str, Any], reason: str
) -> None:
    fp8 = torch.zeros(3, 8, 2, 8).to(torch.float8_e4m3fn)
    caches = {"k_cache": fp8, "v_cache": fp8}
    with pytest.raises(ValueError) as error:
        call(**caches, engine=engine, **changes)
    assert reason in str(error.value)
