"""What a ragged call and a cache write launch, byte for byte, and what they refuse."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from liteattention_rocm import _core
from liteattention_rocm.contract import RaggedRequest, RaggedTensors, WriteRequest, WriteTensors
from liteattention_rocm.engines import gfx942

from .calls import LAUNCHING, NUMBERS, expect_launches, launches, run
from .conftest import FakeHip

LOG2E = math.log2(math.e)


def request_of(q: torch.Tensor, k: torch.Tensor, **changes: Any) -> RaggedRequest:
    fields = {
        "requests": 3, "rows": q.shape[0], "q_heads": q.shape[1], "kv_heads": k.shape[-2],
        "head_dim": q.shape[2], "dtype": q.dtype, "kv_dtype": k.dtype, "device": q.device,
        "page_size": k.shape[1] if k.dim() == 4 else 0, "max_q_len": 20, "max_kv_len": 300,
        "scale": -0.37, "lookahead": 7, "window": 0, "soft_cap": 0.0, "sinks": False,
        "k_scale": 1.0, "v_scale": 1.0, "rounding": "rtne", "return_lse": False,
    }  # fmt: skip
    return RaggedRequest(**(fields | changes))


def write_request_of(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scale_tensors: bool = False,
) -> WriteRequest:
    sizes = (*k.shape, k.dtype, k_cache.dtype, k.device, *k_cache.shape[:2])
    return WriteRequest(*sizes, k_scale, v_scale, scale_tensors)


#: Head dim, page size, divider of pages, splits, window, soft cap and longest request.
PAGED = [
    (64, 16, (2**31, 4), 3, 77, 12.5, 20),  # both kernels and their merges
    (128, 3, (-(-(2**33) // 3), 2), 1, 0, 0.0, 5),  # decode alone: 5 rows of 3 heads
    (256, 1, (2**31, 0), 1, 300, 0.0, 20),  # a window as long as the keys is none
    (80, 16, (2**31, 4), 3, 0, 0.0, 20),
    (192, 16, (2**31, 4), 1, 0, 0.0, 20),
]


@pytest.mark.parametrize(
    (
        "number", "dim", "page_size", "divider", "splits", "window", "soft_cap", "max_q_len",
    ),
    [
        (number, *case)
        for number in NUMBERS
        for case in PAGED
        if case[0] in (64, 128, 256) or number[1] == "rtne"  # other roundings are refused
    ],
)  # fmt: skip
def test_paged_kernels_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine,
    cpu_hip: FakeHip,
    number: tuple[torch.dtype, str],
    dim: int,
    page_size: int,
    divider: tuple[int, int],
    splits: int,
    window: int,
    soft_cap: float,
    max_q_len: int,
) -> None:
    dtype, rounding = number
    q, out = torch.empty(2, 30, 7, dim).to(dtype)[:, :, 1:]
    pages = torch.empty(9, 2, page_size, 2 * dim).to(dtype)
    k, v = pages[..., :dim].transpose(1, 2), pages[..., dim:].transpose(1, 2)
    lse, sinks = torch.empty(6, 30), torch.empty(6)
    index = [torch.empty(n, dtype=torch.int32) for n in (4, 3)]
    table = torch.empty(3, 40, dtype=torch.int32)[:, :25]
    tensors = RaggedTensors(q, k, v, out, lse, sinks, *index, table)
    request = request_of(
        q, k, rounding=rounding, window=window, soft_cap=soft_cap, sinks=True, return_lse=True,
        max_q_len=max_q_len,
    )  # fmt: skip
    engine._kv_splits = splits
    assert engine.reasons(request) == []
    bound = engine.bind(request, tensors)
    assert not cpu_hip.of("hipModuleLaunchKernel")
    before = len(cpu_hip.calls)
    bound(tensors)
    assert {call.split()[0] for call in cpu_hip.calls[before:]} <= LAUNCHING | {"hipGetDevice"}

    # three numbers of tiles for each key head, and room for their parts
    base = next(iter(engine._workspaces.held.values())).data_ptr() if splits > 1 else 0
    room = 3 * splits if splits > 1 else 0
    stats_at = 2 * room * 256 * dim * 4
    decode_at = stats_at + 2 * room * 2 * 256 * 4
    out_bytes = 3 * 2 * splits * 16 * dim * 4
    parts = (base + decode_at, base + decode_at + out_bytes) if splits > 1 else (0, 0)
    tile_parts_at = (base, base + stats_at) if room else (0, 0)
    pointers = [x.data_ptr() for x in (q, k, v, out, lse, sinks, *index)]
    params = struct.pack(
        "<16Q12q2d5i2I3i3fi2If3i",
        *pointers, 0, table.data_ptr(), *parts, *tile_parts_at, 0, 0,
        *(7 * dim, dim, 7 * dim, dim),
        *(4 * page_size * dim, 2 * dim, 2 * page_size * dim) * 2,
        *(40, 30),
        *(-0.37 * LOG2E, 2 / soft_cap if soft_cap else 0.0),
        *(3, 30, 6, 2, page_size, *divider, 7, window if window < 300 else 0, splits),
        -0.37 * LOG2E, soft_cap * LOG2E, 2 * -0.37 * LOG2E / soft_cap if soft_cap else 0.0,
        dim, -(-(2**33) // 3), 2, 1.0, splits, room, 0,  # forced parts have any number of blocks
    )  # fmt: skip
    assert len(params) == 320
    name, end = NUMBERS[number], NUMBERS[number].format("")
    expected = []
    if max_q_len * 3 > 16:
        items = max(3, room) * 2
        expected.append((f"attention_prefill_{name.format(f'_d{dim}')}", items, 512, params))
    expected.append((f"attention_decode_{name.format(f'_d{dim}')}", 6 * splits, 256, params))
    if room:
        pieces = 256 * dim // 2048
        expected.append((f"merge_prefill_{end}", min(3, room // 2) * 2 * pieces, 256, params))
    if splits > 1:
        expected.append((f"merge_decode_{end}", -(-6 * 16 * dim // 2048), 256, params))
    expect_launches(cpu_hip, expected)


def test_exactly_the_tensors_bytes_are_shown_to_the_emulator(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    q, k, v = (torch.empty(n, 2, 64).bfloat16() for n in (30, 90, 91))
    out = torch.empty_like(q)
    starts = [torch.empty(4, dtype=torch.int32) for _ in range(2)]
    tensors = RaggedTensors(q, k, v[:90], out, None, None, *starts, None)
    engine._kv_splits = 1  # no workspace
    run(engine, request_of(q, k), tensors)
    seen = {tuple(int(x, 0) for x in call.split()[:2]) for call in cpu_hip.of("hipHostRegister")}
    expected = {(x.data_ptr(), x.numel() * 2) for x in (q, out, k)}
    expected |= {(v.data_ptr(), 90 * 2 * 64 * 2)} | {(x.data_ptr(), 16) for x in starts}
    assert seen == expected


def test_batches_without_work_launch_nothing(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    x = torch.empty(0, 2, 64).bfloat16()
    starts = [torch.zeros(4).int() for _ in range(2)]
    tensors = RaggedTensors(x, x, x, x, None, None, *starts, None)
    for request in (request_of(x, x), request_of(x, x, requests=0), request_of(x, x, max_q_len=0)):
        run(engine, request, tensors)
    cache, none = torch.empty(1, 5, 2, 64).bfloat16(), torch.empty(0, dtype=torch.int64)
    run(engine, write_request_of(x, cache), WriteTensors(x, x, cache, cache, none))
    assert not cpu_hip.of("hipModuleLaunchKernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_caches_have_kernels_of_their_own(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip, dtype: torch.dtype
) -> None:
    fp8, name = torch.float8_e4m3fnuz, "bf16" if dtype == torch.bfloat16 else "fp16"
    rounding = "_rtne" if name == "bf16" else ""
    q, rows = torch.empty(30, 6, 64).to(dtype), torch.empty(30, 2, 64).to(dtype)
    cache = torch.empty(2, 9, 16, 2, 64).to(fp8)
    index = [torch.empty(n, dtype=torch.int32) for n in (4, 3)]
    tensors = RaggedTensors(
        q, *cache, torch.empty_like(q), None, None, *index, torch.empty(3, 40, dtype=torch.int32)
    )
    engine._kv_splits = 2
    run(engine, request_of(q, cache[0], soft_cap=3.0, k_scale=0.5, v_scale=0.7), tensors)
    slots = torch.zeros(30, dtype=torch.int32)
    write = write_request_of(rows, cache[0], k_scale=0.5, v_scale=0.7)
    run(engine, write, WriteTensors(rows, rows, *cache, slots))
    launched = [(made["name"], data) for made, data in launches(cpu_hip)]
    assert [kernel for kernel, _ in launched] == [
        f"attention_prefill_{name}_fp8_d64{rounding}",
        f"attention_decode_{name}_fp8_d64{rounding}",
        f"merge_prefill_{name}{rounding}",
        f"merge_decode_{name}{rounding}",
        f"write_kv_{name}_fp8",
    ]
    for _, params in launched[:4]:
        scales = struct.unpack_from("<3f", params, 280)
        assert scales == pytest.approx((-0.185 * LOG2E, 3.0 * LOG2E, 2 * -0.185 * LOG2E / 3.0))
        assert struct.unpack_from("<fi", params, 304) == (pytest.approx(0.7), 2)
        assert struct.unpack_from("<2Q", params, 112) == (0, 0)
    assert struct.unpack_from("<2fi", launched[4][1], 164) == pytest.approx((0.5, 0.7, 0))
    assert struct.unpack_from("<2Q", launched[4][1], 40) == (0, 0)
    # a cache of bytes, each head's row among them
    held = {tuple(int(x, 0) for x in call.split()[:2]) for call in cpu_hip.of("hipHostRegister")}
    assert {(x.data_ptr(), x.numel()) for x in cache} <= held


def test_scales_in_tensors_are_handed_over_as_addresses(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    q, rows = torch.empty(30, 6, 64).bfloat16(), torch.empty(30, 2, 64).bfloat16()
    cache = torch.empty(2, 9, 16, 2, 64).to(torch.float8_e4m3fnuz)
    index = [torch.empty(n, dtype=torch.int32) for n in (4, 3)]
    scales = torch.tensor(math.nan), torch.tensor([math.nan])  # nothing looks at them here
    tensors = RaggedTensors(
        q, *cache, torch.empty_like(q), None, None, *index, torch.empty(3, 40, dtype=torch.int32),
        *scales,
    )  # fmt: skip
    request = request_of(q, cache[0], soft_cap=3.0, scale_tensors=True)
    assert engine.reasons(request) == []
    engine._kv_splits = 2
    run(engine, request, tensors)
    write = write_request_of(rows, cache[0], scale_tensors=True)
    assert engine.reasons(write) == []
    slots = torch.zeros(30, dtype=torch.int32)
    run(engine, write, WriteTensors(rows, rows, *cache, slots, *scales))
    *ragged, (_, written) = launches(cpu_hip)
    at = tuple(x.data_ptr() for x in scales)
    assert len(ragged) == 4 and struct.unpack_from("<2Q", written, 40) == at
    for _, params in ragged:
        assert struct.unpack_from("<2Q", params, 112) == at
        assert struct.unpack_from("<2d", params, 224) == (-0.37 * LOG2E, 2 / 3.0)
    held = [tuple(int(x, 0) for x in call.split()[:2]) for call in cpu_hip.of("hipHostRegister")]
    assert [held.count((address, 4)) for address in at] == [2, 2]


def test_every_bad_scale_is_named(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    q, rows = torch.empty(30, 6, 64).bfloat16(), torch.empty(30, 2, 64).bfloat16()
    index = [torch.empty(n, dtype=torch.int32) for n in (4, 3)]
    table, slots = torch.empty(3, 40, dtype=torch.int32), torch.zeros(30, dtype=torch.int32)
    odd = torch.frombuffer(bytearray(8), dtype=torch.float32, count=1, offset=2)
    for dtype, reasons in (
        (torch.float8_e4m3fnuz, ()),
        (torch.bfloat16, ("k_scale and v_scale are for fp8 caches",)),
    ):
        cache = torch.empty(2, 9, 16, 2, 64).to(dtype)
        scales = (odd, None)
        tensors = RaggedTensors(q, *cache, q.clone(), None, None, *index, table, *scales)
        written = WriteTensors(rows, rows, *cache, slots, *scales)
        expected = "; ".join((
            *reasons, "k_scale must start on a multiple of 4 bytes: call .clone() on it",
            "v_scale has no memory",
        ))  # fmt: skip
        for request, given in (
            (request_of(q, cache[0], scale_tensors=True), tensors),
            (write_request_of(rows, cache[0], scale_tensors=True), written),
        ):
            with pytest.raises(ValueError) as caught:
                run(engine, request, given)
            assert str(caught.value).endswith(f": {expected}")
    assert not cpu_hip.of("hipModuleLaunchKernel")


@pytest.mark.parametrize("wide", [True, False])
def test_cache_writes_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip, wide: bool
) -> None:
    k, v = torch.empty(2, 21, 5, 72).bfloat16()[:, :, 1:4]
    cache = torch.empty(11, 3, 5, 144).bfloat16()
    k_cache, v_cache = cache[..., :72].transpose(1, 2), cache[..., 72:].transpose(1, 2)
    slots = torch.zeros(21, dtype=torch.int64 if wide else torch.int32)
    run(engine, write_request_of(k, k_cache), WriteTensors(k, v, k_cache, v_cache, slots))
    params = struct.pack(
        "<7Q10q4i2Ii2fi",
        *(x.data_ptr() for x in (k, v, k_cache, v_cache, slots)), 0, 0,
        *(360, 72) * 2, *(2160, 144, 720) * 2,
        *(21, 3, 72, 5), -(-(2**34) // 5), 3, wide, 1.0, 1.0, 0,
    )  # fmt: skip
    expect_launches(cpu_hip, [("write_kv", -(-21 * 3 * 9 // 256), 256, params)])


def test_every_bad_tensor_is_named(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    odd = torch.empty(30, 2, 65).bfloat16()[..., :64]
    # 4 GiB that nothing touches
    far = torch.empty(2**31 + 256, dtype=torch.bfloat16).as_strided(
        (2, 1, 2, 64), (2**31, 64, 64, 1)
    )
    paged = (*(torch.zeros(n).int() for n in (4, 3)), torch.zeros(3, 9).int())
    tensors = RaggedTensors(odd, far, far, odd, None, None, *paged)
    with pytest.raises(ValueError) as caught:
        run(engine, request_of(odd, far), tensors)
    text = str(caught.value)
    for name in ("q", "out"):
        assert f"every row of {name} must start on a multiple of 4 bytes" in text
    for name in ("k", "v"):
        assert f"pages and rows of {name} must be at most 2147483520 elements apart" in text
    with pytest.raises(ValueError, match="every row of k must start"):
        slots = torch.zeros(30).int()
        run(engine, write_request_of(odd, far), WriteTensors(odd, odd, far, far, slots))
    # Rows of a page, and packed rows, must not lie as far apart either.
    even = torch.zeros(30, 2, 64).bfloat16()
    packed = (torch.zeros(4).int(), torch.zeros(4).int(), None)
    for rows, batch in ((far.transpose(0, 1), paged), (far[:, 0], packed)):
        tensors = RaggedTensors(even, rows, rows, even, None, None, *batch)
        with pytest.raises(ValueError, match="pages and rows of k must be at most 2147483520"):
            run(engine, request_of(even, rows), tensors)
    assert not cpu_hip.of("hipModuleLaunchKernel")


def test_refusals_list_every_reason(engine: gfx942.Gfx942Engine) -> None:
    x = torch.empty(1, 3, 72)
    request = request_of(x, x, kv_dtype=torch.float8_e5m2, rounding="rtz")
    assert engine.reasons(request) == [
        "dtype must be bf16 or fp16, got torch.float32",
        "the cache must be torch.float32 or torch.float8_e4m3fnuz, got torch.float8_e5m2",
        "rounding 'rtz' is for bf16 outputs: use 'rtne'",
        "the fp8 of an MI300X is torch.float8_e4m3fnuz, in which the same bits are other numbers: "
        "allocate the cache as torch.float8_e4m3fnuz and fill it with write_kv",
        "head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got 72",
    ]
    half = torch.empty(1, 3, 64).half()
    assert engine.reasons(write_request_of(x, x[None].to(torch.float8_e4m3fn))) == [
        "dtype must be bf16 or fp16, got torch.float32",
        "the cache must be torch.float32 or torch.float8_e4m3fnuz, got torch.float8_e4m3fn",
        "the fp8 of an MI300X is torch.float8_e4m3fnuz, in which the same bits are half the "
        "number, and those of -0 are NaN: allocate the cache as torch.float8_e4m3fnuz and fill it "
        "with write_kv",
    ]
    assert engine.reasons(write_request_of(half, half[None])) == []
    assert _core.DECODE_ROWS == 16
