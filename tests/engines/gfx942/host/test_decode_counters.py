"""What a decode step executes and reads, counted on the emulated machine code.

``pytest -s`` prints the counts beside what no kernel could do without.
"""

from __future__ import annotations

import pytest
import torch

import liteattention_emulator
from liteattention_rocm import engines
from tests.oracle.ragged import make

from .ragged_cases import run

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("dim", "group", "keys", "fp8"),
    [
        (64, 4, 1024, None),
        (128, 4, 1024, None),
        (128, 16, 1024, None),
        (128, 1, 1000, None),
        (256, 2, 512, None),
        (128, 4, 1024, torch.float8_e4m3fnuz),
        (256, 2, 512, torch.float8_e4m3fnuz),
    ],
)
def test_a_step_reads_keys_and_values_once(
    dim: int,
    group: int,
    keys: int,
    fp8: torch.dtype | None,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", 1)
    run(make([(1, keys)], group * kv_heads, kv_heads, dim, fp8=fp8), 16)
    report = liteattention_emulator.last_launch()
    held, element = ("_fp8", 1) if fp8 else ("", 2)
    assert report is not None and report.kernel == f"attention_decode_bf16{held}_d{dim}_rtne"
    assert report.workgroups == kv_heads

    step = 16 if dim == 256 else 64
    rounded = -(-keys // step) * step
    # both products of 16 keys x 16 rows x D, 16 x 16 x 16 an MFMA; rows of a tile need not be used
    least_mfma = kv_heads * -(-keys // 16) * 2 * dim // 16
    least_bytes = kv_heads * keys * 2 * dim * element
    units = report.by_unit()
    loaded = report.counters["global_load_bytes"]
    # beside keys: 16 rows of queries for each of 4 waves; 64 table entries a block, one ahead
    blocks = rounded // step
    queries, entries = 4 * 16 * dim * 2, (blocks + 4) * 64 * 4
    print(
        f"\n{report.kernel}, {kv_heads} kv heads of {group} query heads, {keys} keys, emulated:\n"
        f"  MFMA {units['mfma']:,} (at least {least_mfma:,}), loaded {loaded:,} bytes (K and V "
        f"{least_bytes:,}, {loaded / least_bytes:.3f} x)\n"
        f"  per block of {step} keys: {report.instructions / blocks / kv_heads:.0f} instructions: "
        + ", ".join(f"{unit} {n / blocks / kv_heads:.0f}" for unit, n in units.items())
    )
    assert units["mfma"] == kv_heads * rounded // 16 * 2 * dim // 16
    assert units["mfma"] <= least_mfma * (1 if keys % step == 0 else 1.04)
    # K and V exactly once (the last block repeats its last key), for all heads of a group
    assert loaded == kv_heads * (rounded * 2 * dim * element + queries + entries)
    assert loaded <= (1.1 if element == 2 else 1.2) * least_bytes
    assert not report.conflicts()
    assert report.counters["barriers"] == kv_heads * 4 * (3 if dim <= 128 else 6)
    assert report.counters["scratch_bytes"] == 0
    assert report.counters["global_store_bytes"] == kv_heads * group * (dim * 2 + 4)


def test_a_window_is_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", 1)
    loaded = []
    for keys in (300, 3000):
        run(make([(1, keys)], 4, 1, 64), 16, window=256)
        report = liteattention_emulator.last_launch()
        assert report is not None
        loaded.append((report.counters["global_load_bytes"], report.by_unit()["mfma"]))
    assert loaded[0] == loaded[1] and loaded[0][1] == 256 // 16 * 2 * 64 // 16


def test_empty_parts_cost_their_lengths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.get("gfx942"), "_kv_splits", 1)
    one = make([(1, 40)], 4, 1, 64)
    run(one, 16)
    before = liteattention_emulator.last_launch()
    run(make([(1, 40), *[(0, 500)] * 9], 4, 1, 64), 16)
    after = liteattention_emulator.last_launch()
    assert before is not None and after is not None
    assert after.counters["global_load_bytes"] == before.counters["global_load_bytes"]
    assert (after.instructions - before.instructions) / (9 * 4) < 100  # of a wave that ends at once
