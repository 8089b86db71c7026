"""The operators under torch.compile and opcheck, merging, and use from several threads."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import PagedBatch, TileGeometry, attention_paged
from liteattention_rocm.engines.cpu import CpuEngine
from liteattention_rocm.lite import bitmap
from tests.oracle.attention import bound, exact


def qkv(
    *shape: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(shape))
    return (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
    )


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def test_opcheck() -> None:
    q, k, v = qkv(1, 70, 2, 16)
    for lse in (None, torch.empty(1, 2, 70)):
        torch.library.opcheck(
            torch.ops.liteattention_rocm.attention.default,
            (q, k, v, torch.empty_like(q), lse, "bshd", 0.25, True, "rtne", ""),
            test_utils=CHECKS,
        )
    read = bitmap.full(1, 2, 5, 2)
    for mass, *limit in ((None, -3.0, 0.0), (torch.empty(1, 2, 5, 2), -math.inf, 0.1)):
        torch.library.opcheck(
            torch.ops.liteattention_rocm.lite_attention.default,
            (
                q, k, v, read, torch.empty_like(read), torch.empty_like(q), torch.empty(1, 2, 70),
                None, None, mass, "bshd", 0.25, *limit, True, False, 16, 64, 16, "rtne", "",
            ),
            test_utils=CHECKS,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_an_operator_refuses_one_scale_of_two(name: str) -> None:
    """Else the other's number would be dropped, or another tensor's memory read in its place."""
    ops = torch.ops.liteattention_rocm
    rows = torch.randn(2, 1, 64).bfloat16()
    caches = [torch.zeros(1, 16, 1, 64).to(torch.float8_e4m3fn) for _ in "kv"]
    starts, keys, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5], [[0]]))
    one = {name: torch.ones(1)}
    with pytest.raises(TypeError, match="must both be numbers or both be tensors"):
        ops.attention_paged(
            rows, *caches, starts, keys, table, torch.empty_like(rows), None, None, 2, 5, 0.125,
            True, 0, None, 0.0, 1.0, 1.0, "rtne", "reference", **one,
        )  # fmt: skip
    with pytest.raises(TypeError, match="must both be numbers or both be tensors"):
        ops.write_kv(rows, rows, *caches, torch.arange(2), 1.0, 1.0, "reference", **one)


@pytest.mark.parametrize("numbers", [(2.0, 1.0), (1.0, 0.5)])
def test_an_operator_refuses_scales_given_twice(numbers: tuple[float, float]) -> None:
    """Else the numbers would be dropped without a word."""
    ops = torch.ops.liteattention_rocm
    rows = torch.randn(2, 1, 64).bfloat16()
    caches = [torch.zeros(1, 16, 1, 64).to(torch.float8_e4m3fn) for _ in "kv"]
    starts, keys, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5], [[0]]))
    tensors = (torch.ones(1), torch.ones(1))

    def attend(*given: float) -> None:
        ops.attention_paged(
            rows, *caches, starts, keys, table, torch.empty_like(rows), None, None, 2, 5, 0.125,
            True, 0, None, 0.0, *given, "rtne", "reference", *tensors,
        )  # fmt: skip

    def write(*given: float) -> None:
        ops.write_kv(rows, rows, *caches, torch.arange(2), *given, "reference", *tensors)

    for call in (attend, write):
        with pytest.raises(ValueError, match="scales are given twice"):
            call(*numbers)
        call(1.0, 1.0)  # say nothing


ONE_OF_TWO = ({"k_scale": torch.ones(1)}, "k_scale and v_scale must both be numbers or both be te")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ONE_OF_TWO,
        ({"k_scale": True}, "k_scale must be a number, got bool"),
        ({"v_scale": "1"}, "v_scale must be a number, got str"),
        ({"engine": 0}, "engine must be a string or None, got int"),
    ],
)
def test_a_compiled_write_refuses_what_an_eager_one_does(
    options: dict[str, Any], reason: str
) -> None:
    rows, cache = torch.randn(2, 1, 64).bfloat16(), torch.zeros(2, 1, 16, 1, 64)

    def write(rows: torch.Tensor) -> None:
        k_cache, v_cache = cache.to(torch.float8_e4m3fn)
        liteattention_rocm.write_kv(rows, rows, k_cache, v_cache, torch.arange(2), **options)

    refused(write, (rows,), reason)


def test_a_compiled_paged_call_refuses_one_scale_of_two() -> None:
    q = torch.randn(2, 1, 64).bfloat16()
    caches = torch.zeros(2, 1, 16, 1, 64).to(torch.float8_e4m3fn)
    index = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5], [[0]]))
    batch = PagedBatch(*index)
    options, reason = ONE_OF_TWO
    refused(lambda q: attention_paged(q, *caches, batch, **options), (q,), reason)


def test_compiled_calls_refuse_to_write_over_an_input() -> None:
    """A compiler would give them a copy to write to."""
    x, cache, read = torch.randn(1, 4, 1, 64), torch.zeros(1, 16, 1, 64), bitmap.full(1, 1, 1, 1)
    starts, keys, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4], [5], [[0]]))
    batch = PagedBatch(starts, keys, table)
    tile = TileGeometry(16, 64, 16)

    def lite(x: torch.Tensor, read: torch.Tensor, **out: torch.Tensor) -> Any:
        write = out.pop("write", torch.empty_like(read))
        lite_attention = liteattention_rocm.lite_attention
        return lite_attention(x, x, x, read, write, threshold=-3.0, geometry=tile, **out)

    calls: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = [
        (lambda x: liteattention_rocm.attention(x, x, x, out=x), (x,), "out must not overlap q"),
        (lambda x, read: lite(x, read, out=x), (x, read), "out must not overlap q"),
        (lambda x, read: lite(x, read, write=read), (x, read), "write must not overlap read"),
        (
            lambda x: attention_paged(x, cache, cache, batch, out=x),
            (x[0],),
            "out must not overlap q",
        ),
        (
            lambda x: liteattention_rocm.attention_varlen(x, x, x, starts, starts, out=x),
            (x[0],),
            "out must not overlap q",
        ),
        (
            lambda x, cache: liteattention_rocm.write_kv(x, x, cache, cache, torch.arange(4)),
            (x[0], cache),
            "v_cache must not overlap k_cache",
        ),
    ]
    for call, inputs, reason in calls:
        refused(call, inputs, reason)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="graphs break without a reason")
def test_a_whole_graph_says_what_to_do_about_a_batch_without_bounds() -> None:
    q, cache = torch.randn(2, 1, 64), torch.randn(1, 16, 1, 64)
    inputs = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5], [[0]])]

    def call(*index: torch.Tensor) -> torch.Tensor:
        return attention_paged(q, cache, cache, PagedBatch(*index))

    with pytest.raises(Exception, match="pass max_q_len and max_kv_len"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager")(*inputs), call(*inputs))


def refused(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...], reason: str) -> None:
    """A call is refused for one reason in eager mode, in a whole graph, and where graphs break."""
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for made, error in ((call, (TypeError, ValueError)), (compiled, Exception)):
        with pytest.raises(error) as caught:
            made(*inputs)
        assert reason in str(caught.value)
    torch.compiler.reset()
    with pytest.raises((TypeError, ValueError)) as caught:
        torch.compile(call, backend="aot_eager")(*inputs)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"causal": 1}, "causal must be a bool, got int"),
        ({"causal": 2}, "causal must be a bool, got int"),
        ({"scale": "1"}, "scale must be a number, got str"),
        ({"scale": True}, "scale must be a number, got bool"),
        ({"return_lse": 1}, "return_lse must be a bool, got int"),
        ({"engine": 0}, "engine must be a string or None, got int"),
        ({"engine": b""}, "engine must be a string or None, got bytes"),
        ({"layout": "sbhd"}, "layout must be one of bshd, bhsd, got 'sbhd'"),
    ],
)
def test_a_compiled_call_refuses_what_an_eager_one_does(
    options: dict[str, Any], reason: str
) -> None:
    def call(q: torch.Tensor) -> Any:
        return liteattention_rocm.attention(q, q, q, **options)

    refused(call, qkv(1, 20, 2, 16)[:1], reason)


NEITHER = "give a threshold (log2 units) or a budget (share of softmax mass), got neither"
BOTH = "give a threshold (log2 units) or a budget (share of softmax mass), got both"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, NEITHER),
        ({"threshold": -math.inf, "budget": 0.1}, BOTH),
        ({"threshold": -1.0, "budget": 0}, BOTH),
        ({"threshold": "-1"}, "threshold must be a number, got str"),
        ({"threshold": False}, "threshold must be a number, got bool"),
        ({"budget": True}, "budget must be a number, got bool"),
        ({"threshold": -1.0, "descending": 1}, "descending must be a bool, got int"),
        ({"threshold": -1.0, "soft_skip": 1}, "soft_skip must be a bool, got int"),
        ({"threshold": -1.0, "geometry": 3}, "geometry must be a TileGeometry, got int"),
        ({"threshold": -1.0, "scale": True}, "scale must be a number, got bool"),
    ],
)
def test_a_compiled_step_refuses_what_an_eager_one_does(
    options: dict[str, Any], reason: str
) -> None:
    read = bitmap.full(1, 2, 1, 1)

    def step(q: torch.Tensor, write: torch.Tensor) -> Any:
        return liteattention_rocm.lite_attention(q, q, q, read, write, **options)

    refused(step, (qkv(1, 20, 2, 16)[0], torch.zeros_like(read)), reason)


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_may_change_between_calls_of_a_graph(dynamic: bool | None) -> None:
    q, k, v = qkv(1, 20, 2, 16)

    def call(scale: float) -> torch.Tensor:
        return liteattention_rocm.attention(q, k, v, scale=scale, engine="cpu")

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for scale in (0.1, -0.5, 0.0, 2):
        assert torch.equal(compiled(scale), call(scale))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_merge_is_part_of_a_graph(dynamic: bool) -> None:
    def halves(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            liteattention_rocm.attention(q, keys, v, return_lse=True, engine="cpu")
            for keys in (k, k.flip(1))
        ]
        outs, lses = zip(*parts, strict=True)
        return liteattention_rocm.merge_states(outs, lses)

    compiled = torch.compile(halves, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (40, 56):
        inputs = qkv(1, length, 2, 16)
        for ours, theirs in zip(compiled(*inputs), halves(*inputs), strict=True):
            assert torch.equal(ours, theirs)
    q = inputs[0]
    refused(
        lambda q: liteattention_rocm.merge_states([q], [q.float()]), (q,),
        "lses[0] must be [1, 2, 56] (B, H, S), got [1, 56, 2, 16]",
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_is_made_in_a_graph(dynamic: bool) -> None:
    caches = torch.randn(2, 4, 8, 2, 16)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)

    def step(q: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        batch = PagedBatch(starts, lengths, table, max_q_len=5, max_kv_len=24)
        return attention_paged(q, *caches, batch, engine="cpu")

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows, keys in ((3, 9), (5, 20)):
        inputs = torch.randn(rows, 2, 16), *(torch.tensor(x).int() for x in ([0, rows], [keys]))
        assert torch.equal(compiled(*inputs), step(*inputs))
    with pytest.raises(ValueError, match="max_q_len 5 is less than a length, 6"):
        compiled(torch.randn(6, 2, 16), torch.tensor([0, 6]).int(), torch.tensor([9]).int())
    refused(
        lambda starts: PagedBatch(starts, starts[1:], table, max_q_len=1, max_kv_len=-1),
        (torch.tensor([0, 1]),),
        "max_kv_len must not be negative, got -1",
    )


def test_a_batch_of_a_graph_is_read_by_the_first_call_outside() -> None:
    q, caches = torch.randn(2, 2, 16), torch.randn(2, 4, 8, 2, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def make(starts: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> PagedBatch:
        return PagedBatch(starts, lengths, table, max_q_len=2, max_kv_len=16)

    inputs = [torch.tensor(x).int() for x in ([0, 2], [9], [[2, 0]])]
    expected = attention_paged(q, *caches, PagedBatch(*inputs))
    assert torch.equal(attention_paged(q, *caches, make(*inputs)), expected)
    inputs[1].fill_(-1)
    with pytest.raises(ValueError, match="kv_len must not be negative"):
        attention_paged(q, *caches, make(*inputs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool) -> None:
    def block(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = liteattention_rocm.attention(
            q * 2, k, v, causal=True, return_lse=True, engine="cpu"
        )
        return out + 1, lse

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for length in (40, 56):
        inputs = qkv(1, length, 2, 16)
        for ours, theirs in zip(compiled(*inputs), block(*inputs), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("limit", [{"threshold": -4.0}, {"budget": 0.3}])
def test_compiled_lite_writes_the_same_lists(limit: dict[str, float]) -> None:
    geometry = TileGeometry(16, 64, 16)
    q, k, v = qkv(1, 256, 2, 16)
    k[:, :64] *= 8  # the first K block outshines the others

    def step(read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        out = liteattention_rocm.lite_attention(
            q.abs() * 8, k.abs(), v, read, write, geometry=geometry, engine="cpu", **limit
        )
        assert isinstance(out, torch.Tensor)
        return out

    read = bitmap.full(1, 2, 16, 4)
    eager, compiled = torch.empty_like(read), torch.empty_like(read)
    assert torch.equal(step(read, eager), torch.compile(step, fullgraph=True)(read, compiled))
    assert torch.equal(eager, compiled)
    assert 0 < bitmap.sparsity(eager, 4) < 1


def test_compiled_lite_has_the_tiles_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for all lengths does not fix what the engine prefers for one of them."""

    def geometry(self: CpuEngine, head_dim: int, rows: int | None = None) -> TileGeometry:
        return TileGeometry(16 if rows is not None and rows <= 256 else 32, 64, 16)

    monkeypatch.setattr(CpuEngine, "geometry", geometry)

    def step(q: torch.Tensor, read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        out = liteattention_rocm.lite_attention(q, q, q, read, write, threshold=-1.0, engine="cpu")
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, q_blocks in ((96, 6), (128, 8), (160, 5), (192, 6)):
        q = qkv(1, length, 2, 16)[0]
        read = bitmap.full(1, 2, q_blocks, -(-length // 64))
        eager, traced = torch.empty_like(read), torch.empty_like(read)
        assert torch.equal(step(q, read, eager), compiled(q, read, traced))
        assert torch.equal(eager, traced)


def test_compile_reports_bad_calls_too() -> None:
    compiled = torch.compile(
        lambda q, k, v: liteattention_rocm.attention(q, k, v, scale=1.0), fullgraph=True
    )
    with pytest.raises(Exception, match="query heads must be a multiple of key heads"):
        compiled(torch.zeros(1, 8, 3, 8), torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_merging_parts_of_the_keys_gives_the_whole(layout: str, engine: str) -> None:
    q, k, v = qkv(2, 3, 50, 64, dtype=torch.float32)
    k, v = (torch.cat([t, t.flip(2) * 1.5], 2) for t in (k, v))
    expected = exact(q, k, v)
    cuts = [0, 1, 37, 64, 100]
    outs, lses = [], []
    for begin, end in itertools.pairwise(cuts):
        parts = [t[:, :, begin:end] if t is not q else t for t in (q, k, v)]
        if layout == "bshd":
            parts = [t.transpose(1, 2) for t in parts]
        out, lse = liteattention_rocm.attention(
            *parts, layout=layout, return_lse=True, engine=engine
        )
        outs.append(out)
        lses.append(lse)
    out, lse = liteattention_rocm.merge_states(outs, lses, layout=layout)
    out = out.transpose(1, 2) if layout == "bshd" else out
    assert (out.double() - expected.out).abs().max() < 2e-6
    assert (lse.double() - expected.lse).abs().max() < 2e-6


def test_empty_parts_contribute_nothing_even_if_nan() -> None:
    out, lse = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 4)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    merged, merged_lse = liteattention_rocm.merge_states([out, empty[0]], [lse, empty[1]])
    assert torch.allclose(merged, out) and torch.allclose(merged_lse, lse)
    merged, merged_lse = liteattention_rocm.merge_states([empty[0]] * 2, [empty[1]] * 2)
    assert (merged == 0).all() and torch.isneginf(merged_lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_engines_agree(dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 4, 150, 64, dtype=dtype)
    k, v = k[:, :2, :90], v[:, :2, :90]
    limit = bound(exact(q, k, v, causal=True), dtype)
    a, b = (
        liteattention_rocm.attention(q, k, v, layout="bhsd", causal=True, engine=name)
        for name in ("cpu", "reference")
    )
    assert ((a.double() - b.double()).abs() <= 2 * limit).all()


def test_calls_from_many_threads_do_not_mix() -> None:
    inputs = [qkv(1, 100 + 40 * i, 2, 64) for i in range(6)]
    expected = [liteattention_rocm.attention(*x, engine="cpu") for x in inputs]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(liteattention_rocm.attention(*inputs[i], engine="cpu"), expected[i]):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _forked(inputs: tuple[torch.Tensor, ...], queue: multiprocessing.Queue[list[float]]) -> None:
    queue.put(liteattention_rocm.attention(*inputs, engine="cpu").flatten().tolist())


def test_works_in_a_forked_child() -> None:
    # Data loaders and servers fork; the pool's threads do not exist in the child.
    inputs = qkv(1, 300, 4, 64)
    expected = liteattention_rocm.attention(*inputs, engine="cpu").flatten().tolist()
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[float]] = context.Queue()
    child = context.Process(target=_forked, args=(inputs, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(timeout=60)
    assert child.exitcode == 0


def test_works_in_a_child_whose_parent_never_called_it() -> None:
    """The parent has used PyTorch's OpenMP, whose threads do not exist in the child."""
    code = """
import os, torch
from liteattention_rocm import _core, attention
torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
q = torch.ones(1, 300, 4, 64).bfloat16()
child = os.fork()
if not child:
    attention(q, q, q, engine="cpu")
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, start_new_session=True)
    assert done.returncode == 7


def test_repeats_are_bit_equal_under_load() -> None:
    inputs = qkv(1, 513, 3, 64)
    first = liteattention_rocm.attention(*inputs, engine="cpu")
    noise = qkv(1, 200, 1, 64)
    for _ in range(200):
        liteattention_rocm.attention(*noise, engine="cpu")
        assert torch.equal(liteattention_rocm.attention(*inputs, engine="cpu"), first)
