"""Random calls of every public function.

Valid ones are held against float64; those with one or two arguments of the wrong kind must be
refused with ``ValueError`` or ``TypeError``, or be right, and never disturb the next good call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liteattention_rocm import (
    PagedBatch,
    TileGeometry,
    attention,
    attention_paged,
    attention_varlen,
    lite_attention,
    merge_states,
    write_kv,
)
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.lite import bitmap
from tests.oracle.attention import Exact, bound, exact, exact_rows, expect_lse, expect_out
from tests.oracle.tensors import ints

from .serving import cases

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ENGINES = [None, "cpu", "reference"]


def settled(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ------------------------------------------------------------------------- valid calls


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers in storage of any order, with gaps, at any offset."""
    seed = draw(st.integers(0, 2**31))
    order = draw(st.permutations(range(len(shape) - 1)))
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    offset = draw(st.integers(0, 9))
    steps, size = [0] * len(shape), shape[-1] + 4 * gaps[-1]
    steps[-1] = 1
    for dim in order:
        steps[dim] = size
        size *= shape[dim] + gaps[dim]
    memory = torch.full((offset + size,), math.nan, dtype=dtype)
    view = memory.as_strided(shape, steps, offset)
    view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return view


@st.composite
def options(draw: st.DrawFn, dtype: torch.dtype) -> dict[str, Any]:
    """What all ways of attending share, numbers of every type included."""
    found: dict[str, Any] = {"engine": draw(st.sampled_from(ENGINES))}
    number = draw(st.floats(0.0625, 0.5, width=16))
    kinds: list[Any] = [float, np.float32, np.float64, np.float16, Fraction]
    found["scale"] = draw(
        st.sampled_from([None, 1, np.int64(1), *(kind(number) for kind in kinds)])
    )
    if dtype == torch.bfloat16:
        found["rounding"] = draw(st.sampled_from(["rtne", "rtna", "rtz"]))
    return found


def within(out: torch.Tensor, expected: Exact, rounding: str = "rtne") -> None:
    # fp32 scores are off by their own size's rounding, and so are the weights.
    large = 1e-6 * expected.lse.masked_fill(expected.lse.isinf(), 0).abs()[..., None]
    expect_out(out, expected, bound(expected, out.dtype, rounding) + large * expected.weight)


def near(lse: torch.Tensor, expected: torch.Tensor) -> None:
    expect_lse(lse, expected, rtol=2e-6)


@st.composite
def dense_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], str]:
    batch, kv_heads, group = (draw(st.integers(1, most)) for most in (2, 3, 3))
    q_len, kv_len, dim = (
        draw(st.integers(1, 70)),
        draw(st.integers(1, 130)),
        8 * draw(st.integers(1, 8)),
    )
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["bshd", "bhsd"]))
    tensors = {}
    for name, rows, heads in (
        ("q", q_len, group * kv_heads),
        ("k", kv_len, kv_heads),
        ("v", kv_len, kv_heads),
    ):
        middle = (rows, heads) if layout == "bshd" else (heads, rows)
        tensors[name] = draw(strided((batch, *middle, dim), dtype))
    if draw(st.booleans()):
        tensors["out"] = draw(strided(tuple(tensors["q"].shape), dtype)).fill_(math.nan)
    return tensors, layout


def heads_first(tensors: dict[str, torch.Tensor], layout: str) -> list[torch.Tensor]:
    return [tensors[name].transpose(1, 2) if layout == "bshd" else tensors[name] for name in "qkv"]


@settled(120)
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    tensors, layout = data.draw(dense_tensors())
    given_options = data.draw(options(tensors["q"].dtype))
    causal = data.draw(st.booleans())
    scale = given_options["scale"]
    expected = exact(
        *heads_first(tensors, layout), causal=causal, scale=None if scale is None else float(scale)
    )
    for _ in range(2):
        out, lse = attention(
            **tensors, layout=layout, causal=causal, return_lse=True, **given_options
        )
        near(lse, expected.lse)
        out = out.transpose(1, 2) if layout == "bshd" else out
        within(out, expected, given_options.get("rounding", "rtne"))


@settled(80)
@given(st.data())
def test_lite_attention(data: st.DataObject) -> None:
    tensors, layout = data.draw(dense_tensors())
    given_options = data.draw(options(tensors["q"].dtype))
    q, k, v = heads_first(tensors, layout)
    rows = data.draw(st.sampled_from([16, 32, 48]))
    geometry = TileGeometry(rows, 64, data.draw(st.sampled_from([16, rows])))
    q_blocks, k_blocks = geometry.q_blocks(q.shape[2]), geometry.k_blocks(k.shape[2])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tiles = torch.rand(*q.shape[:2], q_blocks, k_blocks, generator=generator) < 0.7
    read = bitmap.pack(tiles)
    masks = {
        name: data.draw(st.sampled_from([None, *range(1 << k_blocks)]))
        for name in ("must_do", "must_skip")
    }
    for name, bits in masks.items():
        if bits is not None:
            mask = torch.tensor([bool(bits >> j & 1) for j in range(k_blocks)])
            tiles = tiles | mask if name == "must_do" else tiles & ~mask
            masks[name] = bitmap.pack(mask)
    threshold = data.draw(
        st.sampled_from([-math.inf, 0, 0.0, -1, np.float32(-2), Fraction(-1, 2), -20.0])
    )
    walk = {"threshold": threshold, "descending": data.draw(st.booleans()), "geometry": geometry}
    keep = tiles.repeat_interleave(rows, 2)[:, :, : q.shape[2]]
    keep = keep.repeat_interleave(64, 3)[..., : k.shape[2]]
    scale = given_options["scale"]
    expected = exact(q, k, v, seen=keep, scale=None if scale is None else float(scale))
    lists = []
    for engine in (given_options.pop("engine"), "reference"):
        write = torch.full_like(read, -1)
        out, lse = lite_attention(
            **tensors, read=read, write=write, layout=layout, return_lse=True,
            engine=engine, **masks, **walk, **given_options,
        )  # fmt: skip
        lists.append(write)
        near(lse, expected.lse)
        out = out.transpose(1, 2) if layout == "bshd" else out
        within(out, expected, given_options.get("rounding", "rtne"))
    # Votes on a maximum that rounds to either side of the threshold may differ, -inf's may not.
    differ = bitmap.unpack(lists[0] ^ lists[1], k_blocks)
    assert differ.sum() <= 0.02 * differ.numel()
    assert not (bitmap.unpack(lists[0], k_blocks) & ~tiles).any()


@st.composite
def ragged_options(draw: st.DrawFn, dtype: torch.dtype, heads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": draw(st.booleans())}
    found["window"] = draw(
        st.sampled_from([None, 1, 7, np.int64(33), 2**31 - 1, 2**31, 2**63, 10**40])
    )
    if not found["causal"]:
        found["lookahead"] = draw(st.sampled_from([None, 0, 3, np.int64(20), 2**31, 10**40]))
    found["soft_cap"] = draw(st.sampled_from([None, 2, np.float32(8.0), 30.0]))
    found["sinks"] = draw(st.sampled_from([None, torch.linspace(-1, 1, heads)]))
    return found | draw(options(dtype))


BOUNDS = st.sampled_from([None, 64, np.int32(80), 2**31, 2**63, 10**40])


@settled(100)
@given(st.data())
def test_attention_paged(data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 3))
    kv_lens = [data.draw(st.integers(0, 60)) for _ in range(requests)]
    q_lens = [data.draw(st.integers(0, min(12, max(1, length)))) for length in kv_lens]
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from(DTYPES))
    given_options = data.draw(ragged_options(dtype, group * kv_heads))
    engine = given_options.pop("engine")
    case = cases.Case(
        q_lens, kv_lens, group * kv_heads, kv_heads, 8 * data.draw(st.integers(1, 8)),
        data.draw(st.sampled_from([1, 4, 16])), dtype=dtype,
        seed=data.draw(st.integers(0, 2**31)), shared_prefix=data.draw(st.booleans()),
        options=plain(given_options),
    )  # fmt: skip
    batch = PagedBatch(
        case.q_start, case.kv_len, case.table,
        max_q_len=data.draw(BOUNDS), max_kv_len=data.draw(BOUNDS),
    )  # fmt: skip
    for _ in range(2):
        out = data.draw(strided(tuple(case.q.shape), dtype)).fill_(5.0)
        given_out, lse = attention_paged(
            case.q, case.k_cache, case.v_cache, batch, out=out, return_lse=True, engine=engine,
            **given_options,
        )  # fmt: skip
        assert given_out is out
        cases.check(case, out, lse, 5.0)


def plain(given_options: dict[str, Any]) -> dict[str, Any]:
    """The options as the oracle takes them."""
    found = dict(given_options)
    for name in ("scale", "soft_cap"):
        found[name] = None if found[name] is None else float(found[name])
    return found


@settled(80)
@given(st.data())
def test_attention_varlen(data: st.DataObject) -> None:
    lengths = [
        (data.draw(st.integers(0, 20)), data.draw(st.integers(0, 80)))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    kv_heads, group, dim = (data.draw(st.integers(1, most)) for most in (2, 3, 8))
    dtype = data.draw(st.sampled_from(DTYPES))
    starts = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).T
    rows, keys = starts[:, -1].tolist()
    q = data.draw(strided((rows, group * kv_heads, 8 * dim), dtype))
    k, v = (data.draw(strided((keys, kv_heads, 8 * dim), dtype)) for _ in range(2))
    given_options = data.draw(ragged_options(dtype, group * kv_heads))
    engine = given_options.pop("engine")
    out, lse = attention_varlen(
        q, k, v, starts[0].contiguous(), starts[1].contiguous(),
        max_seqlen_q=data.draw(BOUNDS), max_seqlen_k=data.draw(BOUNDS.filter(lambda b: b != 64)),
        return_lse=True, engine=engine, **given_options,
    )  # fmt: skip
    cap = float(given_options["soft_cap"] or 0.0)
    known = {name: x for name, x in plain(given_options).items() if name != "rounding"}
    for r in range(len(lengths)):
        rows, keys = (slice(int(x[r]), int(x[r + 1])) for x in starts)
        expected = exact_rows(q[rows], k[keys], v[keys], **known)
        limit = bound(expected, dtype, given_options.get("rounding", "rtne"))
        limit = limit + 2 * 4e-7 * cap * expected.weight
        expect_out(out[rows], expected, limit)
        expect_lse(lse[:, rows], expected.lse, atol=1e-5 + 4e-7 * cap, rtol=2e-6)


@settled(80)
@given(st.data())
def test_write_kv(data: st.DataObject) -> None:
    pages, size, heads, dim = (data.draw(st.integers(1, most)) for most in (4, 8, 3, 20))
    dtype = data.draw(st.sampled_from(DTYPES))
    k_cache, v_cache = (data.draw(strided((pages, size, heads, dim), dtype)) for _ in range(2))
    slots = data.draw(st.permutations(range(pages * size)))
    slots = slots[: data.draw(st.integers(0, pages * size))]
    slots = [-1 - slot if data.draw(st.booleans()) else slot for slot in slots]
    k, v = (data.draw(strided((len(slots), heads, dim), dtype)) for _ in range(2))
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for cache, source in zip(expected, (k, v), strict=True):
                cache[slot // size, slot % size] = source[row]
    index = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    for _ in range(2):
        write_kv(
            k, v, k_cache, v_cache, index, engine=data.draw(st.sampled_from(ENGINES)),
            k_scale=data.draw(st.sampled_from([1, 1.0, np.float32(1)])),
        )  # fmt: skip
        assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


@settled(60)
@given(st.data())
def test_merge_states(data: st.DataObject) -> None:
    batch, rows, heads, dim, parts = (data.draw(st.integers(1, most)) for most in (2, 5, 3, 9, 4))
    dtype = data.draw(st.sampled_from([*DTYPES, torch.float64]))
    layout = data.draw(st.sampled_from(["bshd", "bhsd"]))
    shape = (batch, rows, heads, dim) if layout == "bshd" else (batch, heads, rows, dim)
    outs = [data.draw(strided(shape, dtype)) for _ in range(parts)]
    lses = [data.draw(strided((batch, heads, rows), torch.float32)) for _ in range(parts)]
    for lse in lses:
        lse[torch.rand(lse.shape, generator=torch.manual_seed(parts)) < 0.3] = -math.inf
    out, lse = merge_states(outs, lses, layout=layout)
    total = torch.stack(lses).double()
    weights = torch.softmax(total, 0).nan_to_num(0.0)
    weights = weights.transpose(-1, -2) if layout == "bshd" else weights
    expected = (torch.stack(outs).double() * weights[..., None]).sum(0)
    near(lse, torch.logsumexp(total, 0))
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=2.0**-8, atol=1e-6)


# ------------------------------------------------------------------------- invalid calls


class Watched(torch.Tensor):
    """A subclass that brings nothing of its own."""


class Strange:
    """Something that is nothing."""


NUMBERS: list[Any] = [
    0, 1, -1, 3, 0.0, -0.5, 1e308, 1e-320, 2**31, 2**63, -(2**63), 10**400, -(10**400), 10**5000,
    math.nan, math.inf, -math.inf, True, np.float32(2), np.float64(math.nan), np.int64(-3),
    np.bool_(True), Fraction(1, 3), Fraction(10) ** 400, 1j,
]  # fmt: skip
THINGS: list[Any] = [
    None, "", "cpu", "gfx942", "portable", "bhsd", "rtz", "x", b"x", (), [], {}, [1.0], int,
    Strange(), np.zeros(3), np.array(["bshd", "bhsd"]), TileGeometry(16, 32, 16), (16, 64, 16),
    torch.float32, torch.device("cpu"), slice(None),
]  # fmt: skip


def spoiled(tensor: torch.Tensor) -> list[Callable[[], Any]]:
    """Ways to make something else of a good tensor."""
    x = tensor.clone()
    last = x.dim() - 1
    ways: list[Callable[[], Any]] = [
        lambda: x[0],
        lambda: x[None],
        lambda: x[:0],
        lambda: x.flatten()[0],
        lambda: x[:, :1] if last else x[:1],
        lambda: torch.cat([x, x]),
        lambda: x.mT.contiguous().mT if last else x[::2],
        lambda: x[:1].expand(x.shape),
        lambda: x.as_strided(x.shape, [1] * x.dim()),
        lambda: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
        lambda: x.to(torch.float64),
        lambda: x.to(torch.float8_e4m3fn),
        lambda: x.to(torch.complex64),
        lambda: x.to(torch.int64),
        lambda: x.to(torch.bool),
        lambda: x.to(torch.uint8),
        lambda: x.to("meta"),
        lambda: x.to_sparse(),
        lambda: x.flatten()[:4].view(2, 2).to_sparse_csr(),
        lambda: x.float().to_mkldnn(),
        lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        lambda: torch._neg_view(x),
        lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        lambda: x.float().requires_grad_(),
        lambda: torch.nn.Parameter(x.float()),
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch.nn.Buffer(x),
        lambda: x.as_subclass(Watched),
        lambda: x.fill_(-7),
        lambda: x.fill_(2**31 - 1),
        lambda: x.numpy(),
        lambda: x.tolist(),
    ]
    return ways


@st.composite
def junk(draw: st.DrawFn, good: Any) -> Any:
    if isinstance(good, torch.Tensor) and draw(st.booleans()):
        try:
            return draw(st.sampled_from(spoiled(good)))()
        except (RuntimeError, TypeError, NotImplementedError):  # no such thing of this dtype
            return None
    if isinstance(good, list) and draw(st.booleans()):
        return [draw(junk(good[0])), *good[1:]]
    return draw(st.sampled_from(NUMBERS + THINGS))


def dense_call() -> dict[str, Any]:
    tensors = {name: torch.randn(1, 20, 2, 8) for name in "qkv"}
    return tensors | {
        "layout": "bshd", "scale": 0.5, "causal": False, "rounding": "rtne", "return_lse": True,
        "out": torch.zeros(1, 20, 2, 8), "engine": "cpu",
    }  # fmt: skip


def lite_call() -> dict[str, Any]:
    found = dense_call()
    del found["causal"]
    return found | {
        "read": bitmap.full(1, 2, 2, 1), "write": bitmap.full(1, 2, 2, 1), "threshold": -2.0,
        "descending": False, "soft_skip": False, "must_do": ints(1), "must_skip": ints(0),
        "geometry": TileGeometry(16, 64, 16),
    }  # fmt: skip


def ragged_call() -> dict[str, Any]:
    return {
        "q": torch.randn(5, 2, 8), "causal": True, "window": 4, "soft_cap": 30.0,
        "sinks": torch.zeros(2), "scale": 0.5, "rounding": "rtne", "return_lse": False,
        "out": torch.zeros(5, 2, 8), "engine": "cpu",
    }  # fmt: skip


def varlen_call() -> dict[str, Any]:
    return ragged_call() | {
        "k": torch.randn(6, 1, 8), "v": torch.randn(6, 1, 8), "cu_seqlens_q": ints(0, 2, 5),
        "cu_seqlens_k": ints(0, 3, 6), "max_seqlen_q": 3, "max_seqlen_k": 3,
    }  # fmt: skip


def paged_call() -> dict[str, Any]:
    return ragged_call() | {
        "k_cache": torch.randn(3, 4, 1, 8), "v_cache": torch.randn(3, 4, 1, 8), "k_scale": 1.0,
        "v_scale": 1.0, "q_start": ints(0, 2, 5), "kv_len": ints(6, 3),
        "page_table": ints(0, 2, 1, 0).view(2, 2), "max_q_len": 3, "max_kv_len": 6,
    }  # fmt: skip


def run_paged(**call: Any) -> Any:
    batch = PagedBatch(
        *(call.pop(name) for name in ("q_start", "kv_len", "page_table")),
        max_q_len=call.pop("max_q_len"), max_kv_len=call.pop("max_kv_len"),
    )  # fmt: skip
    return attention_paged(batch=batch, **call)


def write_call() -> dict[str, Any]:
    return {
        "k": torch.randn(3, 1, 8), "v": torch.randn(3, 1, 8), "slots": torch.tensor([7, -1, 0]),
        "k_cache": torch.randn(3, 4, 1, 8), "v_cache": torch.randn(3, 4, 1, 8), "k_scale": 1.0,
        "v_scale": 1.0, "engine": "cpu",
    }  # fmt: skip


def merge_call() -> dict[str, Any]:
    return {
        "outs": [torch.randn(1, 3, 2, 4) for _ in range(2)],
        "lses": [torch.randn(1, 2, 3) for _ in range(2)],
        "layout": "bshd",
    }


def geometry_call() -> dict[str, Any]:
    return {"q": torch.randn(1, 3, 2, 8), "engine": "cpu"}


INVALID: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attention": (attention, dense_call),
    "lite_attention": (lite_attention, lite_call),
    "attention_varlen": (attention_varlen, varlen_call),
    "attention_paged": (run_paged, paged_call),
    "write_kv": (write_kv, write_call),
    "merge_states": (merge_states, merge_call),
    "default_geometry": (default_geometry, geometry_call),
}


@pytest.mark.parametrize("name", INVALID)
def test_arguments_of_the_wrong_kind(name: str) -> None:
    function, make = INVALID[name]

    @settled(250)
    @given(st.data())
    def wrong(data: st.DataObject) -> None:
        call = make()
        for _ in range(data.draw(st.integers(1, 2))):
            argument = data.draw(st.sampled_from(sorted(call)))
            call[argument] = data.draw(junk(make()[argument]))
        try:
            function(**call)
        except (ValueError, TypeError) as error:
            assert str(error)
            assert "please file" not in str(error).lower()
        function(**make())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes of nested and sparse tensors
        wrong()
