"""Broken copies of attention_prefill's machine code: the checkers and results must notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from liteattention_emulator import listing, mutate
from liteattention_rocm.engines.gfx942 import manifest
from tests.emulator import attention_cases
from tests.oracle.attention import bound, expect_out

from . import ragged

KERNEL = "attention_prefill_bf16_d128_rtne"
# No exception for these: synchronisation, wait states and addresses.
ALWAYS = {
    "wait deleted",
    "wait weakened by one",
    "barrier deleted",
    "wait state removed",
    "LDS offset shifted",
}
# Mutants tried of each kind, spread over the hot loop.
SAMPLE = 12

# The comparisons that mask a block, in the loop: 16 keys of a lane's first query, then of its
# second. The loop ends before a wave's last block, so a row can end in one of its blocks only if
# another of the wave's 32 rows ends in the next one, that is behind key 32 of 64 (a row of the
# second query, 16 further on, behind key 48). An earlier key is never a row's first unseen one, and
# whether the comparison includes equality does not matter.
MASKS, NEVER_FIRST = 32, {*range(8), *range(16, 28)}


def chosen_mutations(kernel: mutate.Kernel, sample: int) -> list[mutate.Mutation]:
    """Up to about ``sample`` of each kind, without those that provably change nothing."""
    everything = mutate.mutations(kernel, kernel.loop())
    masks = [m for m in everything if m.before.startswith("v_cmp_gt_u32 s[")]
    assert len(masks) == MASKS
    idle = [m for i, m in enumerate(masks) if i in NEVER_FIRST]
    chosen = []
    for kind in sorted({mutation.kind for mutation in everything}):
        of_kind = [m for m in everything if m.kind == kind and m not in idle]
        chosen += of_kind[:: max(1, len(of_kind) // sample)]
    return chosen


class Case:
    """A ragged batch, its results compared bit for bit with the kernel's own."""

    def __init__(self, folder: Path, batch: ragged.Batch, **options: Any) -> None:
        self.folder, self.batch, self.options = folder, batch, options

    def run(self, image: bytes, kernel: str) -> None:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        assert kernel == KERNEL
        code = self.folder / "mutant.co"
        code.write_bytes(image)
        rows, heads, _ = self.batch.q.shape
        self.out = torch.full_like(self.batch.q, 7.0)
        self.lse = torch.full((heads, rows), 7.0)
        ragged.prefill(self.batch, self.out, self.lse, code=code, **self.options)

    def accept(self) -> None:
        """The results are the kernel's own, and within the bound."""
        exact = ragged.expected(self.batch, **self.options)
        expect_out(self.out, exact, bound(exact, torch.bfloat16))
        self.accepted = self.out, self.lse

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        return torch.equal(self.out, self.accepted[0]) and torch.equal(self.lse, self.accepted[1])


@pytest.mark.slow
def test_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = manifest.load("attention_prefill.co")
    cases = [
        # one row more than a tile; scattered keys; every key seen by all and by some rows
        Case(tmp_path, ragged.make([(65, 333), (70, 70)], (4, 1), 128, 16)),
        Case(tmp_path, ragged.make([(100, 390)], (2, 1), 128, 1), window=130, soft_cap=3.0),
        Case(tmp_path, ragged.make([(9, 120)], (2, 1), 128, 3), causal=False),
        # rows whose last key lies in the last 31 and 15 of a block that is not their wave's last
        Case(tmp_path, ragged.make([(256, 256 + 33)], (1, 1), 128, 0)),
        Case(tmp_path, ragged.make([(256, 256 + 49)], (1, 1), 128, 0)),
    ]
    kernel = mutate.Kernel(listing.load(image), KERNEL)
    assert kernel.hazards == set() and kernel.waits.early == frozenset()
    trial = attention_cases.Trial(image, KERNEL, cases)
    try:
        chosen = chosen_mutations(kernel, SAMPLE)
        verdicts = [mutate.judge(kernel, m, trial, trial.reference) for m in chosen]
    finally:
        trial.close()
    share = mutate.noticed(verdicts)
    with capsys.disabled():
        print(f"\n{KERNEL}: {len(chosen)} mutants of its hot loop tried")
        print(f"{share:.1%} of those not redundant are noticed\n{mutate.table(verdicts)}")
        for verdict in verdicts:
            if verdict.survived:
                m = verdict.mutation
                print(f"survived: {m.kind} at +0x{m.offset:x}: {m.before} -> {m.after}")
    assert share >= 0.9
    for verdict in verdicts:
        assert verdict.mutation.kind not in ALWAYS or not verdict.survived, verdict
