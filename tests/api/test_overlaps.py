"""What a call writes shares no memory with what it reads, with itself or with another output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liteattention_rocm import (
    PagedBatch,
    TileGeometry,
    attention,
    attention_paged,
    attention_varlen,
    lite_attention,
    write_kv,
)
from liteattention_rocm.lite import bitmap
from liteattention_rocm.memory import shares_memory, target_reasons
from liteattention_rocm.remembered import calls, kinds
from tests.oracle.tensors import ints

ENGINES = pytest.mark.parametrize("engine", ["cpu", "reference"])
GEOMETRY = TileGeometry(16, 64, 16)


def laid(buffer: torch.Tensor, like: torch.Tensor, at: int = 0) -> torch.Tensor:
    """A tensor like ``like``, contiguous, in a buffer of bytes."""
    place = buffer[at : at + like.numel() * like.element_size()]
    return place.view(like.dtype).view(like.shape).copy_(like)


def places(tensor: torch.Tensor) -> list[int]:
    """Where each element of a tensor lies, one by one."""
    found = [tensor.storage_offset()]
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = [at + i * step for at in found for i in range(size)]
    return found


def test_overlap_is_found_exactly() -> None:
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    memory = torch.zeros(4096)
    found = {True: 0, False: 0}
    for _ in range(3000):
        views = []
        for _ in range(2):
            dims = number(1, 4)
            shape, steps = ([number(low, 5) for _ in range(dims)] for low in (1, 1))
            steps = [step * number(1, 5) for step in steps]
            views.append(memory.as_strided(shape, steps, number(0, 30)))
        first, second = map(places, views)
        assert shares_memory(*views) == bool(set(first) & set(second))
        itself = len(set(first)) < len(first)
        assert bool(target_reasons("x", views[0])) == itself
        found[itself] += 1
    assert min(found.values()) > 500


def test_a_stride_that_nothing_steps_over_may_be_any_number() -> None:
    """That of a dimension of one element."""
    memory, far = torch.zeros(2, 3, 4), 2**62
    even, odd = (memory[:, i : i + 1].as_strided((2, 1, 4), (12, far, 1)) for i in (0, 1))
    assert not shares_memory(even, memory[:, 1:2]) and not shares_memory(even, odd)
    assert shares_memory(even, memory[1:])
    assert not target_reasons("x", even)
    assert target_reasons("x", memory.as_strided((1, 2, 4), (far, 3, 1)))


def qkv() -> dict[str, torch.Tensor]:
    names = ("q", "k", "v")
    return {
        n: torch.randn(1, 16, 2, 8, generator=torch.manual_seed(i)) for i, n in enumerate(names)
    }


@ENGINES
def test_outputs_that_overlap_themselves(engine: str) -> None:
    rows = torch.zeros(4096)
    wrong = rows.as_strided((1, 16, 2, 8), (256, 12, 8, 1))  # rows begin within the last one's end
    with pytest.raises(ValueError, match="out must not overlap itself"):
        attention(**qkv(), out=wrong, engine=engine)
    packed = {name: tensor[0] for name, tensor in qkv().items()}
    with pytest.raises(ValueError, match="out must not overlap itself"):
        attention_varlen(
            **packed, cu_seqlens_q=ints(0, 16), cu_seqlens_k=ints(0, 16), out=wrong[0],
            engine=engine,
        )  # fmt: skip
    batch = PagedBatch(ints(0, 16), ints(16), ints(0, 1)[None])
    cache = torch.zeros(2, 8, 2, 8)
    for out in (wrong[0], torch.zeros(1, 2, 8).expand(16, 2, 8)):
        with pytest.raises(ValueError, match="out must not"):
            attention_paged(packed["q"], cache, cache.clone(), batch, out=out, engine=engine)
    pages = rows.as_strided((4, 4, 2, 8), (60, 16, 8, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match="v_cache must not overlap itself"):
            write_kv(
                packed["k"][:2], packed["v"][:2], torch.zeros(4, 4, 2, 8), pages,
                torch.tensor([3, 4]), engine=engine,
            )  # fmt: skip
    assert not rows.any()


@ENGINES
@pytest.mark.parametrize("other", ["q", "k", "v", "out", "read", "must_do", "must_skip"])
def test_lists_over_something_else(engine: str, other: str) -> None:
    tensors: dict[str, Any] = qkv() | {"out": torch.zeros(1, 16, 2, 8)}
    tensors |= {"read": bitmap.full(1, 2, 1, 1), "write": bitmap.full(1, 2, 1, 1)}
    tensors |= {"must_do": ints(1), "must_skip": ints(0)}
    options: dict[str, Any] = {"threshold": -1.0, "geometry": GEOMETRY, "engine": engine}
    for _ in range(2):
        lite_attention(**tensors, **options)
    assert len(calls) == 1
    buffer = torch.zeros(4096, dtype=torch.uint8)
    size = tensors[other].numel() * 4
    for at in (0, max(0, size - 16) // 16 * 16):
        wrong = tensors | {other: laid(buffer, tensors[other])}
        before = buffer.clone()
        wrong["write"] = buffer[at : at + 8].view(torch.int32).view(1, 2, 1, 1)
        with pytest.raises(ValueError, match=f"write must not overlap {other}"):
            lite_attention(**wrong, **options)
        assert torch.equal(buffer, before)
    if other in ("read", "must_do", "must_skip"):
        wrong = tensors | {"out": laid(buffer, tensors["out"])}
        wrong[other] = buffer[64 : 64 + size].view(torch.int32).view(tensors[other].shape)
        with pytest.raises(ValueError, match=f"out must not overlap {other}"):
            lite_attention(**wrong, **options)
    lite_attention(**tensors, **options)


@ENGINES
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("other", ["q_start", "kv_len", "page_table", "sinks", "k_cache", "q"])
def test_out_over_what_a_paged_call_reads(engine: str, other: str, repeated: bool) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    tensors = {"q_start": ints(0, 3, 4), "kv_len": ints(9, 2), "sinks": torch.zeros(2)}
    tensors |= {"page_table": ints(1, 2, 0, 0).view(2, 2), "q": torch.randn(4, 2, 8)}
    tensors |= {"k_cache": torch.randn(3, 8, 2, 8), "v_cache": torch.randn(3, 8, 2, 8)}
    tensors[other] = laid(buffer, tensors[other], 64)
    batch = PagedBatch(*(tensors.pop(name) for name in ("q_start", "kv_len", "page_table")))
    free = torch.zeros(4, 2, 8)
    if repeated:
        attention_paged(**tensors, batch=batch, out=free, engine=engine)
    before = buffer.clone()
    for at in (0, 64):
        out = buffer[at : at + 256].view(torch.float32).view(4, 2, 8)
        with pytest.raises(ValueError, match=f"out must not overlap {other}"):
            attention_paged(**tensors, batch=batch, out=out, engine=engine)
    assert torch.equal(buffer, before)
    beside = buffer[2048 : 2048 + 256].view(torch.float32).view(4, 2, 8)
    attention_paged(**tensors, batch=batch, out=beside, engine=engine)
    assert torch.equal(beside, attention_paged(**tensors, batch=batch, engine=engine))


def test_out_in_a_gap_of_one_table_may_lie_on_another() -> None:
    memory = torch.zeros(256, dtype=torch.int32)
    out = memory[32:96].view(torch.float32).view(2, 1, 32)
    q, cache = torch.randn(2, 1, 32), torch.randn(1, 1, 1, 32)
    apart, dense = memory.as_strided((2, 4), (128, 1)), memory[:132].view(2, 66)
    starts, lengths = ints(0, 1, 2), ints(1, 1)
    for _ in range(2):
        attention_paged(q, cache, cache, PagedBatch(starts, lengths, apart), out=out)
        memory.zero_()
        with pytest.raises(ValueError, match="out must not overlap page_table"):
            attention_paged(q, cache, cache, PagedBatch(starts, lengths, dense), out=out)


@pytest.mark.parametrize("given", [False, True], ids=["made", "out"])
def test_what_is_remembered_of_page_tables_is_bounded(given: bool) -> None:
    q, cache = torch.zeros(1, 1, 16), torch.zeros(1, 1, 1, 16)
    out = torch.empty_like(q) if given else None
    for width in range(1, 60):
        table = torch.zeros(1, width, dtype=torch.int32)
        attention_paged(q, cache, cache, PagedBatch(ints(0, 1), ints(1), table), out=out)
    (kind,) = kinds.values()
    assert len(kind.passed) == (32 if given else 0)


@ENGINES
@pytest.mark.parametrize("other", ["cu_seqlens_q", "cu_seqlens_k", "sinks", "k", "v", "q"])
def test_out_over_what_a_packed_call_reads(engine: str, other: str) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    tensors = {name: torch.randn(4, 2, 8) for name in ("q", "k", "v")}
    tensors |= {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 1, 4)}
    tensors["sinks"] = torch.zeros(2)
    tensors[other] = laid(buffer, tensors[other])
    out = buffer[:256].view(torch.float32).view(4, 2, 8)
    with pytest.raises(ValueError, match=f"out must not overlap {other}"):
        attention_varlen(**tensors, out=out, engine=engine)


@ENGINES
def test_rows_that_move_within_a_cache_want_a_copy(engine: str) -> None:
    expected = torch.randn(2, 4, 2, 8)
    cache, values = expected.clone(), torch.zeros(2, 4, 2, 8)
    flat = cache.view(8, 2, 8)
    slots = torch.tensor([1, 2, 3, 4])
    fresh = torch.randn(4, 2, 8)
    write_kv(fresh, fresh, torch.zeros(2, 4, 2, 8), values, slots, engine=engine)
    for source in (flat[:4], flat[3:7], flat[4:]):  # the last are not even written over
        for _ in range(2):
            with pytest.raises(ValueError, match=r"k_cache must not overlap k: call \.clone\(\)"):
                write_kv(source, fresh, cache, values, slots, engine=engine)
            with pytest.raises(ValueError, match=r"v_cache must not overlap k: call \.clone\(\)"):
                write_kv(source, fresh, values, cache, slots, engine=engine)
            with pytest.raises(ValueError, match=r"v_cache must not overlap v: call \.clone\(\)"):
                write_kv(fresh, source, values, cache, slots, engine=engine)
    assert torch.equal(cache, expected)
    write_kv(flat[:4].clone(), fresh, cache, values, slots, engine=engine)
    assert torch.equal(flat[1:5], expected.view(8, 2, 8)[:4])


@ENGINES
def test_slots_over_a_cache(engine: str) -> None:
    cache, other = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    slots = cache.view(-1)[16:20].view(torch.int64).copy_(torch.tensor([1, 2]))
    rows = torch.ones(2, 2, 8)
    with pytest.raises(ValueError, match="k_cache must not overlap slots"):
        write_kv(rows, rows, cache, other, slots, engine=engine)
    with pytest.raises(ValueError, match="v_cache must not overlap slots"):
        write_kv(rows, rows, other, cache, slots, engine=engine)
    assert not other.any()


@ENGINES
def test_rows_between_or_beside_the_caches_are_fine(engine: str) -> None:
    # One buffer: keys, rows, values; and a fused cache with rows of its own tail.
    buffer = torch.zeros(3, 2, 4, 2, 8)
    rows = buffer[1].view(8, 2, 8)[:2].copy_(torch.randn(2, 2, 8))
    slots = torch.tensor([6, 1])
    for _ in range(2):
        write_kv(rows, rows, buffer[0], buffer[2], slots, engine=engine)
    assert torch.equal(buffer[0].view(8, 2, 8)[slots], rows)
    fused = torch.zeros(2, 2, 4, 24)  # keys, values, and 8 more
    k_cache, v_cache = (fused[..., x : x + 8].transpose(1, 2) for x in (0, 8))
    tail = fused[..., 16:].transpose(1, 2)[0, :2].copy_(torch.randn(2, 2, 8))
    for _ in range(2):
        write_kv(tail, tail, k_cache, v_cache, slots, engine=engine)
    assert torch.equal(v_cache.reshape(8, 2, 8)[slots], tail)


def test_a_graph_brings_its_own_addresses() -> None:
    tensors = qkv()
    compiled = torch.compile(
        lambda q, k, v, out: attention(q, k, v, out=out, engine="cpu"), backend="eager"
    )
    out = torch.empty_like(tensors["q"])
    compiled(*tensors.values(), out)
    with pytest.raises(ValueError, match="out must not overlap k"):
        compiled(*tensors.values(), tensors["k"])
