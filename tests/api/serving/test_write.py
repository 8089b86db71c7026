"""Writing keys and values into caches."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import engines, write_kv
from liteattention_rocm.contract import FP8
from liteattention_rocm.engines.cpu import CpuEngine

ENGINES = ["cpu", "reference"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_rows_land_in_their_slots_and_nowhere_else(
    engine: str, dtype: torch.dtype, index: torch.dtype
) -> None:
    torch.manual_seed(0)
    kv = torch.full((6, 3, 16, 2 * 24), 5.0, dtype=dtype)  # blocks with keys beside values
    k_cache, v_cache = kv[..., :24].transpose(1, 2), kv[..., 24:].transpose(1, 2)
    qkv = torch.randn(7, 9, 24).to(dtype)  # views of a fused projection
    k, v = qkv[:, 3:6], qkv[:, 6:]
    slots = torch.tensor([95, 0, -1, 17, 16, -5, 40], dtype=index)
    write_kv(k, v, k_cache, v_cache, slots, engine=engine)
    written = torch.zeros(6, 16, dtype=torch.bool)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        assert torch.equal(k_cache[slot // 16, slot % 16], k[row])
        assert torch.equal(v_cache[slot // 16, slot % 16], v[row])
        written[slot // 16, slot % 16] = True
    assert (k_cache[~written] == 5).all() and (v_cache[~written] == 5).all()


def test_many_rows_on_several_threads() -> None:
    torch.set_num_threads(3)
    k, v = torch.randn(2, 5000, 4, 64)
    pools = torch.zeros(2, 6000, 4, 64)
    slots = torch.randperm(6000)[:5000]
    write_kv(k, v, pools[0].unsqueeze(1), pools[1].unsqueeze(1), slots, engine="cpu")
    assert torch.equal(pools[0, slots], k) and torch.equal(pools[1, slots], v)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_to_nearest_even_and_clamps(dtype: torch.dtype) -> None:
    # Every bf16 number, three scales; torch's own conversion of the quotient is the model.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every.view(1024, 1, 64)
    limit = torch.finfo(dtype).max
    for scale in (1.0, 0.37, 16.0):
        cache = torch.zeros(64, 16, 1, 64, dtype=dtype)
        write_kv(
            every, every, cache, cache.clone(), torch.arange(1024), k_scale=scale, engine="cpu"
        )
        quotient = every.float() / torch.tensor(scale, dtype=torch.float32)
        expected = quotient.clamp(-limit, limit).to(dtype).flatten()
        got = cache.flatten()
        nan = every.flatten().isnan()
        assert got[nan].float().isnan().all()
        assert torch.equal(got[~nan].view(torch.uint8), expected[~nan].view(torch.uint8))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_beyond_the_cache_writes_nothing(engine: str) -> None:
    cache = torch.zeros(2, 4, 1, 8)
    rows = torch.ones(3, 1, 8)
    with pytest.raises(ValueError, match="slot 8 lies beyond a cache of 2 pages of 4 tokens"):
        write_kv(rows, rows, cache, cache.clone(), torch.tensor([0, 8, 1]), engine=engine)
    assert (cache == 0).all()


def test_every_reason_at_once() -> None:
    with pytest.raises(TypeError) as error:
        write_kv(
            torch.zeros(3, 2, 8),
            torch.zeros(3, 2, 8, dtype=torch.float16),
            torch.zeros(2, 4, 3, 8),
            torch.zeros(2, 4, 2, 8),
            torch.zeros(4, dtype=torch.int64),
            k_scale=2.0,
        )
    for reason in (
        "k and v must have one dtype",
        "k_scale and v_scale are for fp8 caches, got 2.0 and 1.0",
        "k_cache and v_cache must have one shape",
        "the same heads and head dim, got [2, 8] and [3, 8]",
        "slots must have a slot per row, got 4 for 3 rows",
    ):
        assert reason in str(error.value)


WRONG_ROWS = (
    "k and v must have one dtype, got torch.float32 and torch.float16",
    "k_cache and v_cache must have one shape, got [2, 4, 3, 8] and [2, 4, 2, 8]",
    "the same heads and head dim, got [2, 8] and [3, 8]",
)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"k_cache": torch.zeros(2, 4, 3, 8).half()},
            ["k_cache must have k's dtype torch.float32 or be fp8, got torch.float16"],
        ),
        ({"slots": torch.zeros(3)}, ["slots must be int64 or int32, got torch.float32"]),
        ({"slots": [0, 1, 2]}, ["slots must be a tensor, got list"]),
        ({"slots": torch.zeros(2, 2).long()}, ["slots must be contiguous with one dimension"]),
        ({"k_scale": -1.0}, ["k_scale must be positive", "are for fp8 caches, got -1.0 and 1.0"]),
        ({"v_scale": [1.0]}, ["v_scale must be a number, got list"]),
        ({"k_scale": torch.ones(1)}, ["must both be numbers or both be tensors"]),
        ({"engine": "magic"}, ["unknown engine 'magic'"]),
    ],
)
def test_one_reason_hides_no_other(changes: dict[str, Any], reasons: list[str]) -> None:
    given: dict[str, Any] = {"k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 8).half()}
    given |= {"k_cache": torch.zeros(2, 4, 3, 8), "v_cache": torch.zeros(2, 4, 2, 8)}
    with pytest.raises(TypeError) as error:
        write_kv(**given | {"slots": torch.zeros(3).long()} | changes)
    for reason in (*WRONG_ROWS, *reasons):
        assert reason in str(error.value)


NO_NUMBERS = """
import torch
from liteattention_rocm import write_kv
for heads, dim, page, reason in (
    (0, 8, 4, "k must have at least one head"),
    (2, 0, 4, "k must have at least one head and a head dim of at least 1, got [3, 2, 0]"),
    (2, 8, 0, "k_cache must have pages of at least one token, got [5, 0, 2, 8]"),
):
    rows, cache = torch.zeros(3, heads, dim), torch.zeros(5, page, heads, dim)
    for engine in ("cpu", "reference"):
        try:
            write_kv(rows, rows, cache, cache.clone(), torch.tensor([-1, -1, -1]), engine=engine)
        except ValueError as error:
            assert reason in str(error), error
        else:
            raise AssertionError(reason)
"""


def test_rows_without_numbers_are_refused() -> None:
    """In a process of its own, which such a write on the CPU would end by a division by zero."""
    made = subprocess.run([sys.executable, "-c", NO_NUMBERS], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.mark.parametrize("missing", ["k", "v", "k_cache", "v_cache"])
def test_an_argument_that_is_no_tensor_hides_nothing_of_the_others(missing: str) -> None:
    buffer = torch.zeros(8, 4, 3, 8, dtype=torch.int32)
    given: dict[str, Any] = {
        "k": torch.zeros(3, 2, 8, dtype=torch.int32),
        "v": torch.zeros(4, 2, 8),
        "k_cache": buffer[:5],
        "v_cache": buffer[4:],
    }
    about = {
        "k must be bf16, fp16 or fp32, got torch.int32": {"k"},
        "k and v must have one dtype, got torch.int32 and torch.float32": {"k", "v"},
        "k and v must have one shape": {"k", "v"},
        "k_scale and v_scale are for fp8 caches, got 2.0 and 1.0 with torch.int32": {"k_cache"},
        "k_cache and v_cache must have one shape": {"k_cache", "v_cache"},
        "the same heads and head dim, got [2, 8] and [3, 8]": {"k", "k_cache"},
        "slots must have a slot per row, got 7 for 3 rows": {"k"},
        "v_cache must not overlap k_cache": {"k_cache", "v_cache"},
    }
    with pytest.raises(TypeError) as error:
        write_kv(**given | {missing: None, "slots": torch.zeros(7).long(), "k_scale": 2.0})
    assert f"{missing} must be a tensor, got NoneType" in str(error.value)
    for reason, names in about.items():
        assert (reason in str(error.value)) == (missing not in names), reason


def test_caches_must_not_meet() -> None:
    rows, slots = torch.ones(3, 2, 8), torch.tensor([0, 5, 1])
    cache = torch.zeros(4, 4, 2, 8)
    buffer = torch.zeros(5, 4, 2, 8)
    for _ in range(2):  # validated, then recognised
        write_kv(rows, rows, cache, torch.zeros(4, 4, 2, 8), slots)
        with pytest.raises(ValueError, match="v_cache must not overlap k_cache"):
            write_kv(rows, rows, cache, cache, slots)
        with pytest.raises(ValueError, match="v_cache must not overlap k_cache"):
            write_kv(rows, rows, buffer[1:], buffer[:-1], slots)
    with pytest.raises(ValueError, match="k_cache must not be an expanded tensor"):
        write_kv(rows, rows, cache[:1].expand(4, 4, 2, 8), cache, slots)


def test_keys_beside_values_do_not_meet() -> None:
    kv = torch.zeros(6, 2, 4, 16)
    rows = torch.ones(3, 2, 8)
    for at in (0, 1, 2):
        k_cache, v_cache = (kv[at:, ..., x : x + 8].transpose(1, 2)[:4] for x in (0, 8))
        write_kv(rows, 2 * rows, k_cache, v_cache, torch.tensor([0, 5, 1]))
        assert (k_cache[1, 1] == 1).all() and (v_cache[1, 1] == 2).all()


def test_a_layer_like_the_last_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, slots = torch.ones(3, 2, 24), torch.tensor([0, 5, 1])
    k_cache, v_cache = torch.zeros(2, 4, 4, 2, 24)
    write_kv(rows, rows, k_cache, v_cache, slots)
    chosen: list[Any] = []
    choose = engines.choose
    monkeypatch.setattr(engines, "choose", lambda *a: chosen.append(a) or choose(*a))
    write_kv(rows, rows, v_cache, k_cache, slots)
    assert not chosen
    with pytest.raises(TypeError, match="k_scale must be a number, got bool"):
        write_kv(rows, rows, k_cache, v_cache, slots, k_scale=True)
    with pytest.raises(ValueError, match="the same heads and head dim"):
        write_kv(rows[..., :16], rows[..., :16], k_cache, v_cache, slots)
    write_kv(rows, rows, k_cache, v_cache, slots, k_scale=np.float32(1))
    monkeypatch.setattr(CpuEngine, "bind", None)  # it must not be called
    write_kv(rows, 3 * rows, k_cache, v_cache, slots, engine="reference")
    assert (v_cache[1, 1] == 3).all()


def test_a_longer_cache_that_begins_first_is_looked_at() -> None:
    memory = torch.zeros(4096)
    k_cache = memory[1000:].as_strided((2, 4, 2, 8), (64, 16, 8, 1))
    v_cache = memory.as_strided((2, 4, 2, 8), (1024, 64, 8, 1))
    k = torch.ones(1, 2, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="v_cache must not overlap k_cache"):
            write_kv(k, k, k_cache, v_cache, torch.tensor([0]))
    assert not memory.any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1e-300, 1e-45, 3e38, 1e300])
def test_scales_that_leave_fp32_are_refused(engine: str, scale: float) -> None:
    rows, cache = torch.zeros(1, 1, 8), torch.ones(2, 4, 1, 8).to(torch.float8_e4m3fn)
    slots = torch.zeros(1, dtype=torch.int64)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=rf"{name} must be from 2\^-60 to 2\^60"):
            write_kv(rows, rows, cache, cache.clone(), slots, engine=engine, **{name: scale})
    assert (cache.float() == 1).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_the_smallest_and_largest_scale(engine: str, scale: float) -> None:
    rows = torch.tensor([0.0, 1.0, -2.0, 3e-18]).repeat(2).view(1, 1, 8)
    cache = torch.ones(2, 4, 1, 8).to(torch.float8_e4m3fn)
    write_kv(rows, rows, cache, cache.clone(), torch.tensor([0]), k_scale=scale, engine=engine)
    expected = (rows.double() / scale).clamp(-448, 448).float().to(cache.dtype)
    assert torch.equal(cache[0, 0].float(), expected[0].float())
