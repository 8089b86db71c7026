"""What the main loop executes per wave and K block, counted on the emulated machine code.

The limits are those that the kernels are held to; the numbers are printed beside them (pytest -s).
Counts are differences between a long and a short run of the same workgroup, so that prologue and
epilogue drop out, and means over the eight waves: the two groups of a workgroup differ (one copies
K, the other V).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from liteattention_rocm.engines.gfx942 import manifest
from liteattention_rocm.lite import bitmap

from . import machine
from .conftest import SOURCES

WAVES, SHORT, LONG = 8, 8, 32


@dataclass(frozen=True)
class Limit:
    """Of one wave and K block: MFMAs exactly, instructions at most."""

    mfma: int
    instructions: float


# AMD's own kernels execute 495 (rounding towards zero) and 639 (to nearest even) at D = 128 for as
# many rows and keys, 64 of them MFMAs (docs/emulator.md).
LIMITS = {
    "attention_dense_bf16_d128_rtne": Limit(64, 430),
    "attention_dense_bf16_d128_rtz": Limit(64, 380),
    "attention_dense_fp16_d128": Limit(64, 400),
    "attention_dense_bf16_d64_rtne": Limit(32, 325),
    "attention_dense_fp16_d64": Limit(32, 325),
    "attention_lite_bf16_d128_rtne": Limit(64, 515),
    "attention_lite_fp16_d128": Limit(64, 485),
    "attention_lite_bf16_d64_rtne": Limit(32, 395),
    "attention_lite_fp16_d64": Limit(32, 365),
    "attention_weigh_bf16_d128_rtne": Limit(64, 515),
    "attention_weigh_fp16_d128": Limit(64, 485),
    "attention_weigh_bf16_d64_rtne": Limit(32, 400),
    "attention_weigh_fp16_d64": Limit(32, 370),
}


@dataclass(frozen=True)
class Count:
    """Means of one wave and K block, and bytes of one workgroup and K block."""

    units: dict[str, float]
    lds_dma_bytes: float
    global_load_bytes: float
    distinct_load_bytes: float
    bank_conflicts: float
    barriers: float

    @property
    def instructions(self) -> float:
        return sum(self.units.values())


def count(name: str) -> Count:
    reports = {}
    for blocks in (SHORT, LONG):
        _, kernel = manifest.read().find(name)
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float16 if "fp16" in name else torch.bfloat16
        q, k, v = (
            torch.randn(1, n, 1, int(kernel.variant["head_dim"]), generator=generator).to(dtype)
            for n in (256, blocks * 64, blocks * 64)
        )
        out = torch.empty_like(q)
        if "lite" in name:
            read = bitmap.pack(torch.ones(1, 1, 1, blocks, dtype=torch.bool))
            write = torch.empty_like(read)
            reports[blocks] = machine.lite(q, k, v, out, None, read, write, threshold=-6.0)
            assert torch.equal(read, write)  # random scores lose no tile
        elif "weigh" in name:
            read = bitmap.pack(torch.ones(1, 1, 1, blocks, dtype=torch.bool))
            weights = torch.empty(1, 1, 1, blocks, dtype=torch.int32)
            reports[blocks] = machine.weigh(q, k, v, out, None, read, weights)
            assert weights.all()
        else:
            rounding = kernel.variant.get("rounding", "rtne")
            reports[blocks] = machine.dense(q, k, v, out, None, rounding=str(rounding))
    short, long = reports[SHORT], reports[LONG]
    more = LONG - SHORT
    before, after = short.by_unit(), long.by_unit()
    units = {u: (n - before.get(u, 0)) / (WAVES * more) for u, n in after.items()}

    def difference(counter: str) -> float:
        return float(long.counters[counter] - short.counters[counter]) / more

    conflicts = sum(e.bank_conflicts for e in long.executed)
    return Count(
        units, difference("lds_dma_bytes"), difference("global_load_bytes"),
        difference("distinct_load_bytes"), conflicts, difference("barriers") / WAVES,
    )  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.usefixtures("emulator")
def test_one_wave_and_k_block(name: str) -> None:
    counted, limit = count(name), LIMITS[name]
    _, kernel = manifest.read().find(name)
    block_bytes = 64 * int(kernel.variant["head_dim"]) * 2
    units = ", ".join(f"{u} {n:.1f}" for u, n in sorted(counted.units.items()) if n)
    print(
        f"\n{name}, emulated, per wave and K block: {counted.instructions:.1f} instructions "
        f"(limit {limit.instructions}), {counted.units['mfma']:g} MFMA (exactly {limit.mfma})\n"
        f"  {units}\n"
        f"  registers {kernel.vgprs} (limit 256), spills {kernel.vgpr_spills}, "
        f"LDS {kernel.lds_bytes} (limit 65536), bank conflicts {counted.bank_conflicts:g}, "
        f"bytes of K and V copied {counted.lds_dma_bytes:g} (limit {2 * block_bytes}), distinct "
        f"ones {counted.distinct_load_bytes:g}, asked of L1 {counted.global_load_bytes:g}"
    )
    assert counted.units["mfma"] == limit.mfma
    assert counted.instructions <= limit.instructions
    assert counted.barriers == 2
    assert counted.bank_conflicts == 0
    # K and V once per workgroup, both straight to LDS; a wave adds a word to the tile's weight
    added = 4 if "weigh" in name else 0
    assert counted.lds_dma_bytes == 2 * block_bytes
    assert counted.global_load_bytes == 2 * block_bytes + WAVES * added
    assert 2 * block_bytes <= counted.distinct_load_bytes <= 2 * block_bytes + added
    assert kernel.vgprs + kernel.agprs <= 256
    assert kernel.vgpr_spills == kernel.sgpr_spills == kernel.scratch_bytes == 0
    assert kernel.lds_bytes <= 64 * 1024


BUDGET = re.compile(r"Budget: VGPR (\d+), LDS (\d+)(?: \((\d+) (?:at|up to) D = 64\))?\.")


def test_budgets_in_the_sources_are_those_of_the_objects() -> None:
    for entry in manifest.read().objects:
        source = entry.file.removesuffix(".co") + ".hip"
        text = " ".join((SOURCES / source).read_text(encoding="utf-8").split("\n// "))
        found = BUDGET.search(text)
        assert found, f"{source} does not state its budget"
        registers, lds = int(found[1]), int(found[2])
        for kernel in entry.kernels:
            assert kernel.vgprs <= registers, kernel.name
            narrow = found[3] and kernel.variant.get("head_dim", 0) <= 64
            assert kernel.lds_bytes == (int(found[3]) if narrow else lds), kernel.name
        # no laxer than its widest kernel needs, in steps in which registers are given out
        assert registers - 8 < max(k.vgprs for k in entry.kernels) <= registers, source
