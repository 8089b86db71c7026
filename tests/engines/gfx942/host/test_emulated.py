"""The shipped machine code through the public API, on the software MI300X with its checkers on."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import liteattention_rocm
from liteattention_emulator import Stream, on_stream
from liteattention_rocm import MI300X_GEOMETRY, LiteAttention, SkipPolicy, _core, engines
from liteattention_rocm.engines import gfx942
from liteattention_rocm.lite import bitmap
from tests.oracle.attention import exact, expect_close
from tests.oracle.tensors import qkv

from .calls import NUMBERS, run_dense

pytestmark = pytest.mark.usefixtures("emulator", "memory_of_nan")


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    out, lse = liteattention_rocm.attention(
        q, k, v, layout="bhsd", return_lse=True, engine="gfx942", **options
    )
    expected = exact(q, k, v, scale=options.pop("scale", None))
    expect_close(out, lse, expected, **options, p_as_output=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (15, 64), (31, 65), (63, 63), (257, 100), (33, 129), (97, 257)]
)
def test_lengths_around_every_edge(q_len: int, kv_len: int, dim: int) -> None:
    check(*qkv(1, 1, 1, q_len, kv_len, dim, seed=q_len))


@pytest.mark.parametrize("dim", [64, 128])
def test_grouped_heads_and_batches(dim: int) -> None:
    check(*qkv(2, 4, 2, 17, 70, dim))


@pytest.mark.parametrize("dim", [64, 128])
def test_half_precision(dim: int) -> None:
    check(*qkv(2, 4, 2, 97, 257, dim, dtype=torch.float16))
    check(*qkv(1, 1, 1, 1, 1, dim, dtype=torch.float16))
    x, y = qkv(1, 1, 1, 20, 70, dim, dtype=torch.float16)[:2]
    with pytest.raises(ValueError, match="rounding 'rtz' is for bf16 outputs"):
        liteattention_rocm.attention(x, y, y, layout="bhsd", rounding="rtz", engine="gfx942")


@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_every_rounding(rounding: str) -> None:
    check(*qkv(1, 2, 1, 20, 80, 64), rounding=rounding)
    check(*qkv(1, 1, 1, 20, 80, 128), rounding=rounding)


@pytest.mark.parametrize("scale", [0.0, -0.11, 0.9])
def test_any_scale(scale: float) -> None:
    check(*qkv(1, 1, 1, 20, 80, 64), scale=scale)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("policy", [None, {"threshold": -60.0}, {"budget": 1e-4}], ids=str)
def test_keys_of_a_head_more_than_4_gib_apart(
    hole: Callable[[int], torch.Tensor], dim: int, policy: dict[str, float] | None
) -> None:
    """Two K blocks, so that the last keys lie further from the first than 32 bits reach."""
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 1, 1, 70, 70, dim))
    apart = 1 << 25
    room = hole(70 * apart)
    far = room.as_strided(k.shape, (room.numel(), apart, dim, 1)).copy_(k)
    made: list[list[torch.Tensor]] = []
    for keys in (k, far):
        if policy is None:
            made.append([liteattention_rocm.attention(q, keys, v, engine="gfx942")])
            continue
        lite = LiteAttention(SkipPolicy(**policy), engine="gfx942")
        made.append([lite(q, keys, v, step=step, layer="x") for step in range(2)])
    assert all(torch.equal(near, away) for near, away in zip(*made, strict=True))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shape_strides_and_parts(data: st.DataObject) -> None:
    draw = data.draw
    dim = draw(st.sampled_from([64, 128]), "head dim")
    kv_heads, group = draw(st.integers(1, 2), "kv heads"), draw(st.integers(1, 3), "group")
    batch, q_len = draw(st.integers(1, 2), "batch"), draw(st.integers(1, 130), "q len")
    kv_len = draw(st.integers(1, 260), "kv len")
    splits = draw(st.integers(0, -(-kv_len // 64)), "parts")
    dtype, rounding = draw(st.sampled_from(list(NUMBERS)), "number")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99), "seed"))

    def within_a_larger_one(heads: int, rows: int) -> torch.Tensor:
        gaps = [draw(st.integers(0, 2)) for _ in range(3)]
        shape = (batch + gaps[0], heads + gaps[1], rows + gaps[2], dim + 2 * gaps[0])
        if draw(st.booleans()):
            large = torch.randn(shape, generator=generator)
        else:  # heads inside of rows
            large = torch.randn([shape[i] for i in (0, 2, 1, 3)], generator=generator)
            large = large.transpose(1, 2)
        return large.to(dtype)[gaps[0] :, gaps[1] :, gaps[2] :, 2 * gaps[0] :]

    q = within_a_larger_one(kv_heads * group, q_len)
    k, v = (within_a_larger_one(kv_heads, kv_len) for _ in range(2))
    out = within_a_larger_one(kv_heads * group, q_len)
    lse = torch.empty(batch, kv_heads * group, q_len)
    options: Any = {"layout": "bhsd", "scale": 1 / math.sqrt(dim), "rounding": rounding}
    engine = gfx942.Gfx942Engine(kv_splits=splits)
    run_dense(engine, q, k, v, out, lse, **options)
    expect_close(out, lse, exact(q, k, v), rounding, p_as_output=True)
    again, lse_again = torch.empty_like(out), torch.empty_like(lse)
    run_dense(engine, q, k, v, again, lse_again, **options)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)


def test_what_the_model_splits_is_right_on_a_gpu_of_three_units() -> None:
    # five tiles: a round of three, and a tail of two in parts
    q, k, v = qkv(1, 5, 1, 30, 1536, 64)
    plan = _core.plan_dense(_core.DenseShape(1, 5, 1, 30, 1536, 64), 3, 0)
    assert plan.split == _core.Split.pays and (plan.whole_tiles, plan.tail_tiles) == (3, 2)
    device = gfx942.Gfx942Engine().device(q.device)
    launch = _core.DenseLaunch()
    out, lse = torch.empty_like(q), torch.empty(1, 5, 30)
    launch.set_strides(*((x.stride(0), x.stride(2), x.stride(1)) for x in (q, k, v, out)))
    launch.scale = 0.125
    memory = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    device.attention(plan, launch, *(x.data_ptr() for x in (q, k, v, out, lse, memory)), 0)
    expect_close(out, lse, exact(q, k, v))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strided_slices_of_one_buffer(layout: Any) -> None:
    # as a fused projection leaves them, with rows of the same buffer before and behind
    fused = torch.randn(2, 80, 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    parts = [x[:, 3:71] for x in fused.split([4, 2, 2], dim=2)]
    parts[0] = parts[0][:, 10:40]
    guard = torch.full((2, 40, 6, 64), 7.0).bfloat16()
    out = guard[:, 5:35, 1:5]
    if layout == "bhsd":
        parts, out = [x.transpose(1, 2) for x in parts], out.transpose(1, 2)
    _, lse = liteattention_rocm.attention(
        *parts, layout=layout, out=out, return_lse=True, engine="gfx942"
    )
    if layout == "bshd":
        parts, out = [x.transpose(1, 2) for x in parts], out.transpose(1, 2)
    expect_close(out, lse, exact(*parts))
    guard[:, 5:35, 1:5] = 7.0
    assert (guard == 7.0).all()  # nothing around the output was touched


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("splits", [2, 3])
def test_parts_along_the_keys_merge_to_the_whole(splits: int, dim: int) -> None:
    q, k, v = qkv(1, 2, 1, 50, 200, dim)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 50)
    engine, scale = gfx942.Gfx942Engine(kv_splits=splits), 1 / math.sqrt(dim)
    run_dense(engine, q, k, v, out, lse, "bhsd", scale=scale)
    expect_close(out, lse, exact(q, k, v))
    # without the log-sum-exp the output is the same
    again = torch.empty_like(q)
    run_dense(engine, q, k, v, again, None, "bhsd", scale=scale)
    assert torch.equal(again, out)


@pytest.mark.parametrize("splits", [2, 200, 2**40])
def test_a_call_has_as_many_parts_as_it_has_k_blocks_at_most(splits: int) -> None:
    """And a ragged one, as causal attention is, at most 128."""
    engine = gfx942.Gfx942Engine(kv_splits=splits)
    for kv_len, causal in ((64, False), (70, False), (200, True)):
        q, k, v = qkv(1, 2, 1, 50, kv_len, 64)
        out, lse = torch.empty_like(q), torch.empty(1, 2, 50)
        run_dense(engine, q, k, v, out, lse, "bhsd", scale=0.125, causal=causal)
        expect_close(out, lse, exact(q, k, v, causal=causal))


def test_calls_from_two_threads_on_two_streams_do_not_mix() -> None:
    inputs = [qkv(1, 1, 1, 40 + 9 * i, 70, 64, seed=i) for i in range(4)]

    def call(i: int) -> torch.Tensor:
        return liteattention_rocm.attention(*inputs[i], layout="bhsd", engine="gfx942")

    alone = [call(i) for i in range(4)]
    streams = [Stream() for _ in range(2)]

    def work(index: int) -> list[torch.Tensor]:
        with on_stream(streams[index]):
            return [call(i) for i in range(4) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            assert all(torch.equal(x, alone[i // 3]) for i, x in enumerate(found))
    # a stream that the run-time does not know is an error, not a launch somewhere else
    streams[1].close()
    with on_stream(streams[0]):
        streams[0].close()
        with pytest.raises(_core.HipError, match="hipErrorInvalidHandle"):
            call(0)


def test_compiled_equals_eager() -> None:
    q, k, v = qkv(1, 2, 1, 30, 70, 128)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return liteattention_rocm.attention(q, k, v, layout="bhsd", engine="gfx942") * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_lists_in_their_order_give_what_each_alone_gives() -> None:
    """More tiles than compute units: workgroups take them in their order, some have none."""
    q, k, v = qkv(2, 77, 1, 257, 300, 64)
    generator = torch.Generator().manual_seed(0)
    tile = MI300X_GEOMETRY
    kept = torch.rand(2, 77, 2, tile.k_blocks(300), generator=generator)
    read = bitmap.pack(kept < torch.rand(2, 77, 2, 1, generator=generator))
    engine = engines.get("gfx942")
    assert isinstance(engine, gfx942.Gfx942Engine)
    order = engine.order_of_tiles(read, k_blocks=tile.k_blocks(300))
    assert order.numel() > 308 and torch.equal(order[order >= 0].sort().values, torch.arange(308))
    assert (order[1:5] < order[:4]).any()

    def step(
        read: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        write = torch.full_like(read, 0x5A5A5A5A)
        out = liteattention_rocm.lite_attention(
            q, k, v, read, write, layout="bhsd", geometry=tile, engine="gfx942", **how
        )
        assert isinstance(out, torch.Tensor)
        return out, write

    for how in ({"threshold": -2.0}, {"budget": 0.1}):
        out, write = step(read, q, k, v, **how)
        for batch in range(2):
            heads = slice(0, 76, 25)
            alone = step(
                read[batch : batch + 1, heads].contiguous(), q[batch : batch + 1, heads],
                k[batch : batch + 1], v[batch : batch + 1], **how,
            )  # fmt: skip
            assert torch.equal(out[batch : batch + 1, heads], alone[0])
            assert torch.equal(write[batch : batch + 1, heads], alone[1])


def test_what_the_checkers_find_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, nothing = b"\x00\x00\x8a\xbf", b"\x00\x00\x80\xbf"  # s_barrier, s_nop 0
    racing = [
        (file, image.replace(barrier, nothing) if file == "transpose_v.co" else image, names)
        for file, image, names in gfx942.code_objects()
    ]
    q, k, v = qkv(1, 1, 1, 10, 64, 64)
    out = torch.empty_like(q)
    with monkeypatch.context() as patch:
        patch.setattr(gfx942.engine, "code_objects", lambda: racing)
        with pytest.raises(_core.HipError) as caught:
            run_dense(gfx942.Gfx942Engine(), q, k, v, out, None, "bhsd")
    text = str(caught.value)
    assert text.startswith("launch of transpose_v_bf16_d64 failed: hipErrorLaunchFailure (719)")
    assert "race" in text and "ds_write" in text
    # and the next call, on whole code, is none the worse for it
    lse = torch.empty(1, 1, 10)
    run_dense(gfx942.Gfx942Engine(), q, k, v, out, lse, "bhsd")
    expect_close(out, lse, exact(q, k, v))
