"""What a ragged call and a cache write launch, byte for byte, and what they refuse."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from liteattention_rocm import _core, engines
from liteattention_rocm.engines import gfx942

from .conftest import FakeHip
from .test_launch import LAUNCHING, expect_launches

LOG2E = math.log2(math.e)
NUMBERS = {
    (torch.bfloat16, "rtne"): "bf16{}_rtne",
    (torch.bfloat16, "rtna"): "bf16{}_rtna",
    (torch.bfloat16, "rtz"): "bf16{}_rtz",
    (torch.float16, "rtne"): "fp16{}",
}


def spec_of(q: torch.Tensor, k: torch.Tensor, **changes: Any) -> engines.RaggedSpec:
    fields = {
        "requests": 3,
        "rows": q.shape[0],
        "q_heads": q.shape[1],
        "kv_heads": k.shape[-2],
        "head_dim": q.shape[2],
        "dtype": q.dtype,
        "kv_dtype": k.dtype,
        "device": q.device,
        "page_size": k.shape[1] if k.dim() == 4 else 0,
        "max_q_len": 20,
        "max_kv_len": 300,
        "scale": -0.37,
        "causal": True,
        "window": 0,
        "soft_cap": 0.0,
        "sinks": False,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "rounding": "rtne",
        "return_lse": False,
    }
    return engines.RaggedSpec(**(fields | changes))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: "-".join(map(str, number)))
@pytest.mark.parametrize(
    ("dim", "page_size", "divider", "splits", "window", "soft_cap", "max_q_len"),
    [
        (64, 16, (2**31, 4), 3, 77, 12.5, 20),  # both kernels and the merge
        (128, 3, (-(-(2**33) // 3), 2), 1, 0, 0.0, 5),  # decode alone: 5 rows of 3 heads
        (256, 1, (2**31, 0), 1, 300, 0.0, 20),  # a window as long as the keys is none
    ],
)
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
    batch = engines.RaggedBatch(index[0], index[1], table)
    spec = spec_of(
        q, k, rounding=rounding, window=window, soft_cap=soft_cap, sinks=True, return_lse=True,
        max_q_len=max_q_len,
    )  # fmt: skip
    engine._kv_splits = splits
    assert engine.ragged_reasons(spec) == []
    plan = engine.plan_ragged(spec, batch)
    assert not cpu_hip.of("hipModuleLaunchKernel")
    before = len(cpu_hip.calls)
    engine.attention_ragged(spec, batch, plan, q, k, v, out, lse, sinks)
    assert {call.split()[0] for call in cpu_hip.calls[before:]} <= LAUNCHING | {"hipGetDevice"}

    base = plan.workspace.data_ptr() if splits > 1 else 0
    out_bytes = 3 * 2 * splits * 16 * dim * 4
    pointers = [x.data_ptr() for x in (q, k, v, out, lse, sinks, *index)]
    params = struct.pack(
        "<12Q12q5i2I3i3fi2I",
        *pointers, 0, table.data_ptr(), base, base and base + out_bytes,
        *(7 * dim, dim, 7 * dim, dim),
        *(4 * page_size * dim, 2 * dim, 2 * page_size * dim) * 2,
        *(40, 30),
        *(3, 30, 6, 2, page_size, *divider, True, window if window < 300 else 0, splits),
        -0.37 * LOG2E, soft_cap * LOG2E, 2 * -0.37 * LOG2E / soft_cap if soft_cap else 0.0,
        dim, -(-(2**33) // 3), 2,
    )  # fmt: skip
    assert len(params) == 256
    name = NUMBERS[number]
    expected = []
    if max_q_len * 3 > 16:
        slots = 30 * 3 // (128 if dim == 256 else 256) + 3
        expected.append((f"attention_prefill_{name.format(f'_d{dim}')}", slots * 2, 512, params))
    expected.append((f"attention_decode_{name.format(f'_d{dim}')}", 6 * splits, 256, params))
    if splits > 1:
        expected.append((f"merge_decode_{name.format('')}", -(-6 * 16 * dim // 2048), 256, params))
    expect_launches(cpu_hip, expected)


def test_exactly_the_tensors_bytes_are_shown_to_the_emulator(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    q, k, v = (torch.empty(n, 2, 64).bfloat16() for n in (30, 90, 91))
    out = torch.empty_like(q)
    starts = [torch.empty(4, dtype=torch.int32) for _ in range(2)]
    batch = engines.RaggedBatch(starts[0], kv_start=starts[1])
    spec = spec_of(q, k)
    plan = engine.plan_ragged(spec, batch)
    engine.attention_ragged(spec, batch, plan, q, k, v[:90], out, None, None)
    seen = {tuple(int(x, 0) for x in call.split()[:2]) for call in cpu_hip.of("hipHostRegister")}
    expected = {(x.data_ptr(), x.numel() * 2) for x in (q, out, k)}
    expected |= {(v.data_ptr(), 90 * 2 * 64 * 2)} | {(x.data_ptr(), 16) for x in starts}
    assert seen == expected


def test_batches_without_work_launch_nothing(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    x = torch.empty(0, 2, 64).bfloat16()
    batch = engines.RaggedBatch(torch.zeros(4).int(), kv_start=torch.zeros(4).int())
    for spec in (spec_of(x, x), spec_of(x, x, requests=0), spec_of(x, x, max_q_len=0)):
        engine.attention_ragged(
            spec, batch, engine.plan_ragged(spec, batch), x, x, x, x, None, None
        )
    engine.write_kv(x, x, x[None], x[None], torch.empty(0, dtype=torch.int64))
    assert not cpu_hip.of("hipModuleLaunchKernel")


@pytest.mark.parametrize("wide", [True, False])
def test_cache_writes_get_exactly_these_bytes(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip, wide: bool
) -> None:
    k, v = torch.empty(2, 21, 5, 72).bfloat16()[:, :, 1:4]
    cache = torch.empty(11, 3, 5, 144).bfloat16()
    k_cache, v_cache = cache[..., :72].transpose(1, 2), cache[..., 72:].transpose(1, 2)
    slots = torch.zeros(21, dtype=torch.int64 if wide else torch.int32)
    engine.write_kv(k, v, k_cache, v_cache, slots)
    params = struct.pack(
        "<5Q10q4i2I2i",
        *(x.data_ptr() for x in (k, v, k_cache, v_cache, slots)),
        *(360, 72) * 2, *(2160, 144, 720) * 2,
        *(21, 3, 72, 5), -(-(2**34) // 5), 3, wide, 0,
    )  # fmt: skip
    expect_launches(cpu_hip, [("write_kv", -(-21 * 3 * 9 // 256), 256, params)])


def test_every_bad_tensor_is_named(engine: gfx942.Gfx942Engine, cpu_hip: FakeHip) -> None:
    odd = torch.empty(30, 2, 65).bfloat16()[..., :64]
    # 4 GiB that nothing touches
    far = torch.empty(2**31 + 256, dtype=torch.bfloat16).as_strided(
        (2, 1, 2, 64), (2**31, 64, 64, 1)
    )
    batch = engines.RaggedBatch(*(torch.zeros(n).int() for n in (4, 3)), torch.zeros(3, 9).int())
    spec = spec_of(odd, far)
    plan = engine.plan_ragged(spec, batch)
    with pytest.raises(ValueError) as caught:
        engine.attention_ragged(spec, batch, plan, odd, far, far, odd, None, None)
    text = str(caught.value)
    for name in ("q", "out"):
        assert f"every row of {name} must start on a multiple of 4 bytes" in text
    for name in ("k", "v"):
        assert f"pages and rows of {name} must be at most 2147483520 elements apart" in text
    with pytest.raises(ValueError, match="every row of k must start"):
        engine.write_kv(odd, odd, far, far, torch.zeros(30).int())
    # Rows of a page, and packed rows, must not lie as far apart either.
    even = torch.zeros(30, 2, 64).bfloat16()
    packed = engines.RaggedBatch(torch.zeros(4).int(), kv_start=torch.zeros(4).int())
    for rows, requests in ((far.transpose(0, 1), batch), (far[:, 0], packed)):
        spec = spec_of(even, rows)
        plan = engine.plan_ragged(spec, requests)
        with pytest.raises(ValueError, match="pages and rows of k must be at most 2147483520"):
            engine.attention_ragged(spec, requests, plan, even, rows, rows, even, None, None)
    assert not cpu_hip.of("hipModuleLaunchKernel")


def test_refusals_list_every_reason(engine: gfx942.Gfx942Engine) -> None:
    x = torch.empty(1, 3, 96)
    spec = spec_of(x, x[:, :2], soft_cap=-1.0, scale=3e38, kv_dtype=torch.float8_e5m2)
    assert engine.ragged_reasons(spec) == [
        "dtype must be bf16 or fp16, got torch.float32",
        "it reads caches of the queries' dtype, got torch.float8_e5m2 for torch.float32",
        "head dim must be 64, 128 or 256, got 96",
        "scale must be from 2^-60 to 2^60 (8.7e-19 to 1.2e18) in size, got 3e+38",
        "soft_cap must be positive, got -1.0: None is no cap",
    ]
    half = torch.empty(1, 3, 64).half()
    spec = spec_of(half, half, rounding="rtz", k_scale=2.0, soft_cap=1e-30, scale=1e9)
    assert engine.ragged_reasons(spec) == [
        "rounding 'rtz' is for bf16 outputs, got torch.float16",
        "k_scale and v_scale are for fp8 caches, got 2.0 and 1.0",
        "soft_cap must be from 2^-60 to 2^60 (8.7e-19 to 1.2e18) in size, got 1e-30: "
        "None is no cap",
    ]
    assert engine.write_reasons(torch.float32, torch.float32, x.device) == [
        "it writes rows of 16-bit numbers, got torch.float32"
    ]
    assert engine.write_reasons(half.dtype, torch.float8_e4m3fn, x.device) == [
        "it writes no torch.float8_e4m3fn cache from torch.float16 rows"
    ]
    assert engine.write_reasons(half.dtype, half.dtype, x.device) == []
    assert _core.DECODE_ROWS == 16
