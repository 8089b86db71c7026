"""Broken copies of attention_prefill's machine code: the checkers and results must notice them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from liteattention_emulator import Module, Report, mutate
from liteattention_rocm.engines.gfx942 import manifest
from tests.emulator import mutants
from tests.oracle.attention import bound, expect_out

from . import ragged

KERNEL = "attention_prefill_bf16_d128_rtne"
# Mutants tried of each kind, spread over the hot loop.
SAMPLE = 12

# Each group of waves has a loop of its own.
GROUPS = 2
# The comparisons that mask a block, in a loop: a lane's 32 keys, ascending. The loop ends before
# a wave's last block, so a row can end in one of its blocks only if another of the wave's 32 rows
# ends in the next one, that is behind key 32 of 64. An earlier key is never a row's first unseen
# one, and whether the comparison includes equality does not matter.
MASKS, NEVER_FIRST = 32, range(16)


def chosen_mutations(kernel: mutate.Kernel, sample: int) -> list[mutate.Mutation]:
    """Up to about ``sample`` of each kind, without those that provably change nothing."""
    everything = mutate.mutations(kernel, kernel.loop())
    masks = [m for m in everything if m.before.startswith("v_cmp_lt_u32 vcc, v1")]
    assert len(masks) == GROUPS * MASKS
    idle = [m for i, m in enumerate(masks) if i % MASKS in NEVER_FIRST]
    # Which row one that does not exist repeats: nobody stores it.
    repeated = [m for m in everything if m.before.startswith("v_cmp_gt_i32 vcc, s")]
    assert len(repeated) == GROUPS
    # Whether a block needs a mask: it says so of one more, all of which the rows see.
    full = [m for m in everything if m.before.startswith("s_cmp_le_")]
    assert len(full) == GROUPS
    idle += [*repeated, *full]
    chosen = []
    for kind in sorted({mutation.kind for mutation in everything}):
        of_kind = [m for m in everything if m.kind == kind and m not in idle]
        chosen += of_kind[:: max(1, len(of_kind) // sample)]
    return chosen


class Case:
    """A ragged batch, its results compared bit for bit with the kernel's own."""

    def __init__(self, batch: ragged.Batch, **options: Any) -> None:
        self.batch, self.options = batch, options

    def run(self, module: Module, kernel: str) -> Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        rows, heads, _ = self.batch.q.shape
        self.out = torch.full_like(self.batch.q, 7.0)
        self.lse = torch.full((heads, rows), 7.0)
        return ragged.prefill(self.batch, self.out, self.lse, module, **self.options)

    def accept(self) -> None:
        """The results are the kernel's own, and within the bound."""
        exact = self.batch.exact(**self.options)
        expect_out(self.out, exact, bound(exact, self.out.dtype, p_as_output=True))
        self.accepted = self.out, self.lse

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        return torch.equal(self.out, self.accepted[0]) and torch.equal(self.lse, self.accepted[1])


@pytest.mark.slow
def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    image = manifest.load("attention_prefill.co")
    cases = [
        # one row more than a tile; scattered keys; every key seen by all and by some rows
        Case(ragged.make([(65, 333), (70, 70)], (4, 1), 128, 16)),
        Case(ragged.make([(100, 390)], (2, 1), 128, 1), window=130, soft_cap=3.0),
        Case(ragged.make([(9, 120)], (2, 1), 128, 3), causal=False),
        Case(ragged.make([(100, 390)], (2, 1), 128, 16), causal=False, lookahead=40),
        # rows whose last key lies in the last 31 and 15 of a block that is not their wave's last
        Case(ragged.make([(256, 256 + 33)], (1, 1), 128, 0)),
        Case(ragged.make([(256, 256 + 49)], (1, 1), 128, 0)),
    ]
    # scores beyond what one rounding of the shift bears, and rows that see nothing yet beside them:
    # in waves 0 and 1 rows of the second and of the first half alone (a wave has 16 queries)
    large = ragged.make([(100, 390)], (2, 1), 128, 1)
    large.q[8:16:4] *= 3000
    large.q[16:24:4] *= 3000
    large.q[32:48] *= 3000  # all rows of wave 2
    large.q[48::4] *= 3000
    cases.append(Case(large, window=130))
    with mutants.Bench(KERNEL, image, cases) as bench:
        verdicts = bench.judge(chosen_mutations(bench.kernel, SAMPLE))
    with capsys.disabled():
        print(f"\n{len(verdicts)} mutants of the hot loop tried")
        print(mutants.summary(KERNEL, verdicts))
    mutants.expect_noticed(bench.kernel, verdicts, 0.96, between_halves=2)


@pytest.mark.slow
def test_mutants_of_an_fp8_cache_and_a_head_dim_that_fills_no_tile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the hot loop, but for bounds, which the D = 128 kernel has as well."""
    kernel, fp8 = "attention_prefill_bf16_fp8_d112_rtne", torch.float8_e4m3fnuz
    cases = [
        Case(
            ragged.make([(65, 333), (70, 70)], (4, 1), 112, 16, fp8=fp8), k_scale=0.7,
            v_scale=1.3,
        )
    ]  # fmt: skip
    with mutants.Bench(kernel, manifest.load("attention_prefill.co"), cases) as bench:
        everything = mutate.mutations(bench.kernel, bench.kernel.loop())
        chosen = []
        for kind in sorted({m.kind for m in everything if not m.kind.startswith("bound ")}):
            of_kind = [m for m in everything if m.kind == kind]
            chosen += of_kind[:: max(1, -(-len(of_kind) // 8))]
        verdicts = bench.judge(chosen)
    with capsys.disabled():
        print(f"\n{len(verdicts)} mutants of the hot loop tried")
        print(mutants.summary(kernel, verdicts))
    # Of some thirty, two are the wait at one barrier between halves.
    mutants.expect_noticed(bench.kernel, verdicts, 0.92, between_halves=2)


class Parts:
    """A batch whose tiles are computed in parts: what is written of parts, results and LSE.

    ``merges``: of merge_prefill, over the parts that the kernel has left.
    """

    def __init__(self, batch: ragged.Batch, *, merges: bool = False, **options: Any) -> None:
        rows, heads, _ = batch.q.shape
        self.batch, self.merges, self.options = batch, merges, options
        self.written = [torch.full_like(batch.q, 7.0), torch.full((heads, rows), 7.0)]
        self.call = ragged.Prefill(batch, *self.written, **options)
        if merges:
            self.call.launch()
        self.before = [x.clone() for x in self.written]
        self.written += self.call.parts

    def run(self, module: Module, kernel: str) -> Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        for written, before in zip(self.written, self.before, strict=False):
            written.copy_(before)
        if not self.merges:
            for part in self.call.parts:
                part.fill_(7.0)
        return (self.call.merge if self.merges else self.call.launch)(module)

    def accept(self) -> None:
        """What was written is the kernel's own; merged, it is within the bound."""
        self.accepted = [x.clone() for x in self.written]
        if not self.merges:
            self.call.merge()
        options = {n: x for n, x in self.options.items() if n in ("window", "sinks")}
        exact = self.batch.exact(**options)
        allowed = bound(exact, self.written[0].dtype, p_as_output=True)
        group = self.batch.q.shape[1] // self.batch.k_cache.shape[-2]
        decoded = torch.cat([torch.full((n,), n * group <= 16) for n, _ in self.batch.requests])
        allowed[decoded] = math.inf  # not this kernel's
        expect_out(self.written[0], exact, allowed)
        for written, accepted in zip(self.written, self.accepted, strict=True):
            written.copy_(accepted)

    def right(self) -> bool:
        """Whether the latest run wrote the same bits."""
        return all(
            torch.equal(x.view(torch.int16), y.view(torch.int16))
            for x, y in zip(self.written, self.accepted, strict=True)
        )


def parts_cases(dim: int, *, merges: bool = False) -> list[Parts]:
    """Tiles of whole batches, a tile of one part and one behind 64 others among them."""
    rows = {1: 17, 40: 16, 65: 17}
    lengths = [(rows.get(r, 0), 17 + 60 * (r > 39)) for r in range(66)]
    cases: list[tuple[int, list[tuple[int, int]], tuple[int, int], int, dict[str, Any]]] = [
        (dim, [(70, 333), (20, 20)], (4, 1), 4, {"window": 150, "part_blocks": 2}),
        (dim, [(30, 300), (140, 200)], (4, 2), 64, {"room": 17, "sinks": torch.ones(4)}),
        (dim, lengths, (1, 1), 2, {}),
        # waves that begin or end blocks after or before others, and waves without rows
        (dim, [(256, 600), (40, 600)], (1, 1), 2, {"window": 300}),
    ]
    if merges:  # one kernel for all head dims
        cases += [(wide, [(160, 200)], (2, 1), 3, {}) for wide in (128, 192)]
    return [
        Parts(ragged.make(requests, heads, dim, 16), merges=merges, splits=splits, **more)
        for dim, requests, heads, splits, more in cases
    ]


def expect_noticed(
    bench: mutants.Bench, verdicts: list[mutate.Verdict], between_halves: int = 0
) -> None:
    """Everything but bounds, of which many clamp or choose between equals, or unroll a loop."""
    bounds = [v for v in verdicts if v.mutation.kind.startswith("bound ")]
    rest = [v for v in verdicts if v not in bounds]
    mutants.expect_noticed(bench.kernel, rest, 0.95, between_halves)
    mutants.expect_noticed(bench.kernel, bounds, 0.5)


@pytest.mark.slow
def test_mutants_of_the_merge(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the kernel."""
    kernel, cases = "merge_prefill_bf16_rtne", parts_cases(64, merges=True)
    with mutants.Bench(kernel, manifest.load("merge_prefill.co"), cases) as bench:
        reached = [bench.kernel.listing.instructions[index] for index in bench.kernel.graph.next]
        verdicts = bench.judge(mutate.mutations(bench.kernel, reached))
    with capsys.disabled():
        print("\n" + mutants.summary(kernel, verdicts))
    expect_noticed(bench, verdicts)


@pytest.mark.slow
def test_mutants_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """A sample of what stands outside the hot loop: which part a workgroup has, and its end."""
    kernel, cases = "attention_prefill_bf16_d64_rtne", parts_cases(64)
    with mutants.Bench(kernel, manifest.load("attention_prefill.co"), cases) as bench:
        hot = {inst.index for inst in bench.kernel.loop()}
        rest = [
            bench.kernel.listing.instructions[i] for i in bench.kernel.graph.next if i not in hot
        ]
        everything = mutate.mutations(bench.kernel, rest)
        verdicts = bench.judge(everything[:: max(1, len(everything) // 110)])
    with capsys.disabled():
        print(f"\n{len(verdicts)} of {len(everything)} mutants outside the hot loop tried")
        print(mutants.summary(kernel, verdicts))
    # The third: what group A has stored before its first barrier is waited for again behind it, and
    # read behind the next one.
    expect_noticed(bench, verdicts, between_halves=3)
