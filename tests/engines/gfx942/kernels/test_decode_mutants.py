"""Broken copies of attention_decode's machine code: the checkers and results must notice them."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from liteattention_emulator import Module, Report, mutate, registered
from liteattention_rocm.engines.gfx942 import manifest
from tests.emulator import mutants
from tests.oracle.attention import bound, expect_lse, expect_out

from . import ragged
from .machine import PageStrides, RaggedParams, RowStrides, divider, pointer

KERNEL = "attention_decode_bf16_d128_rtne"
# Mutants tried of each kind, spread over the whole kernel, or all of them if the environment says
# ``MUTANTS=all``.
SAMPLE = 10_000 if os.environ.get("MUTANTS") == "all" else 16

# Why a comparison may include equality or not. A request has at most 16 rows. Blocks have 64 keys,
# the first one begins with the first key that the first row sees, and a wave takes every fourth.
FIRST = "a row's first key is among the 16 from the first row's on, and this is none of those"
LAST = "the key behind a row's last is among the request's last 15, if any: not in a loop's block"
NEEDS_MASK = "at equality, a block is masked of which all rows see all keys"
SAME = "at equality, both ways give 0"

# How it is decided whether the block at key s45 needs a mask.
DECISION = [
    "s_cmp_gt_i32", "s_cselect_b64", "s_add_i32", "s_cmp_gt_i32", "s_cselect_b64", "s_or_b64",
    "s_andn2_b64", "s_cbranch_vccnz", "v_add_u32",
]  # fmt: skip


def harmless(kernel: mutate.Kernel) -> dict[int, str]:
    """Offsets of comparisons whose equality decides nothing, with the argument for each."""
    code = kernel.listing.instructions
    looped = {inst.index for inst in kernel.loop()}
    found, masks = {}, 0
    for at, inst in enumerate(code):
        before, text = code[at - 1], inst.text
        if [following.name for following in code[at : at + len(DECISION)]] == DECISION:
            found[inst.offset] = found[code[at + 3].offset] = NEEDS_MASK
        # max(x, 0): s6 is x - 1, s22 is x. (n + 63) / 64, and 0 for n = 0: s6 is that.
        elif text == "s_cmp_gt_i32 s6, 0xffffffff":
            assert "s_add_i32 s22, s6, 0x1" in [other.text for other in code[at - 3 : at]]
            assert code[at + 4].text == "s_cselect_b32 s7, s22, 0x0"
            found[inst.offset] = SAME
        elif before.text == "s_ashr_i32 s6, s6, 0x6":
            assert inst.name == "s_cmp_gt_i32"
            assert code[at + 1].text == "s_cselect_b32 s36, s6, 0x0"
            found[inst.offset] = SAME
        # Key s45 + 4 (lane / 16) + 16 t + i of a lane: 16 t + i is the constant.
        elif mask := re.match(r"v_cmp_(ge|lt)_i32 .*(v\d+), v22[34]$", text):
            masks += 1
            made = (code[i].text for i in range(at, at - 6, -1) if code[i].name == "v_add_u32")
            constants = (re.match(rf"v_add_u32 {mask[2]}, (0x\w+|s45), ", add) for add in made)
            key = next(constant[1] for constant in constants if constant)
            if mask[1] == "lt" and inst.index in looped:
                found[inst.offset] = LAST
            elif mask[1] == "ge" and key != "s45" and int(key, 16) >= 16:
                found[inst.offset] = FIRST
    counts = {argument: list(found.values()).count(argument) for argument in found.values()}
    assert (masks, counts) == (64, {SAME: 2, NEEDS_MASK: 4, LAST: 16, FIRST: 24})
    return found


class Case:
    """A decode batch, its results and parts compared bit for bit with the kernel's own."""

    def __init__(
        self,
        batch: ragged.Batch,
        *,
        window: int = 0,
        lookahead: int = 0,
        splits: int = 1,
        sinks: bool = False,
        soft_cap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        in_memory: bool = False,
    ) -> None:
        self.batch, self.window, self.splits = batch, window, splits
        self.lookahead = lookahead
        self.sinks, self.soft_cap = batch.sinks if sinks else None, soft_cap
        self.k_scale, self.v_scale, self.in_memory = k_scale, v_scale, in_memory

    def run(self, module: Module, kernel: str) -> Report:
        """Launch; ``right`` then looks at what was written, also where this raises."""
        b = self.batch
        rows, q_heads, dim = b.q.shape
        kv_heads, requests = b.k_cache.shape[-2], len(b.kv_len)
        paged, group = b.page_size > 0, q_heads // kv_heads
        parts = requests * kv_heads * self.splits
        self.written = [
            torch.full_like(b.q, 7.0),
            torch.full((q_heads, rows), 7.0),
            torch.full((parts, 16, dim), 7.0),
            torch.full((parts, 2, 16), 7.0),
        ]
        out, lse, part_out, part_stats = self.written
        table = b.page_table if paged else None
        kv_len, kv_start = (b.kv_len, None) if paged else (None, b.kv_start)
        keys = (b.q_start, kv_len, kv_start, table)
        given = (b.q, b.k_cache, b.v_cache, out, lse, self.sinks, *keys)
        wide, cap = ragged.LOG2E / math.sqrt(dim), self.soft_cap
        scale, v_scale = wide * self.k_scale, self.v_scale
        at: tuple[torch.Tensor | None, ...] = None, None
        if self.in_memory:
            at = ragged.scales_in_memory(self.k_scale, v_scale)
            scale = v_scale = math.nan
        params = RaggedParams(
            *map(pointer, (*given, part_out, part_stats, None, None, *at)),
            *(RowStrides(x.stride(0), x.stride(1)) for x in (b.q, out)),
            *(
                PageStrides(x.stride(0) if paged else 0, x.stride(-3), x.stride(-2))
                for x in (b.k_cache, b.v_cache)
            ),
            *(b.page_table.stride(0), lse.stride(0), wide, 2 / cap if cap else 0.0),
            *(requests, rows, q_heads, kv_heads),
            *(b.page_size, *divider(b.page_size), self.lookahead, self.window, self.splits),
            *(scale, cap * ragged.LOG2E, 2 * scale / cap if cap else 0.0),
            *(dim, *divider(group), v_scale),
        )
        tensors = [x for x in (*given, part_out, part_stats, *at) if x is not None]
        with registered(*tensors):
            self.report = module.launch(kernel, [parts], [256], [params])
        return self.report

    def accept(self) -> None:
        """The results are the kernel's own, and those of whole requests within the bound."""
        if self.splits == 1:
            exact = self.batch.exact(
                causal=False, lookahead=self.lookahead, window=self.window, sinks=self.sinks,
                soft_cap=self.soft_cap, k_scale=self.k_scale, v_scale=self.v_scale,
            )  # fmt: skip
            infinite = exact.out.isinf()
            assert torch.equal(self.written[0][infinite].double(), exact.out[infinite])
            out = self.written[0].masked_fill(infinite, 0.0)
            exact.out = exact.out.masked_fill(infinite, 0.0)
            expect_out(out, exact, bound(exact, out.dtype, p_as_output=True))
            expect_lse(self.written[1], exact.lse)
        self.accepted = self.written
        entry = min(row.offset for row in self.report.executed)
        self.executed = {row.offset - entry for row in self.report.executed}

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        return all(torch.equal(a, b) for a, b in zip(self.written, self.accepted, strict=True))


def make_cases() -> list[Case]:
    """Few launches, each of which takes its 20 ms whatever it does."""
    # A wave with three blocks, of which the second raises no maximum (hence the seed), and waves
    # with two. Rows of four queries each, whose last keys are in each of the 16 registers of
    # scores, but for a query that sees none. Infinite outputs: by the first of 24 keys, which all
    # rows see. (The last key's infinity would meet the zeros of those past the end.)
    requests = [(1, 514), (4, 3), (4, 24), (4, 40), (4, 56)]
    short = ragged.make(requests, (4, 1), 128, 3, seed=8)
    infinities = torch.tensor([math.inf, -math.inf]).repeat(64)
    short.v[2][0] = short.v_cache[short.page_table[2, 0], 0] = infinities
    return [
        Case(short, sinks=True),
        # windows that begin at each of four keys of a block, which is a wave's last one or not
        Case(
            ragged.make([(4, 300), (5, 300)], (1, 1), 128, 0), window=253, lookahead=1, soft_cap=3.0
        ),
        # parts, and a request that is too short for two
        Case(ragged.make([(4, 400), (1, 9)], (2, 1), 128, 16), window=300, splits=2),
    ]


@pytest.mark.slow
def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    image, cases = manifest.load("attention_decode.co"), make_cases()
    with mutants.Bench(KERNEL, image, cases, "first-ahead", "last-ahead") as bench:
        kernel = bench.kernel
        reached = [kernel.listing.instructions[index] for index in sorted(kernel.graph.next)]
        assert {inst.offset for inst in reached} == set().union(*(case.executed for case in cases))
        everything, idle = mutate.mutations(kernel, reached), harmless(kernel)
        chosen = []
        for kind in sorted({mutation.kind for mutation in everything}):
            of_kind = [m for m in everything if m.kind == kind and m.offset not in idle]
            chosen += of_kind[:: max(1, -(-len(of_kind) // SAMPLE))]
        verdicts = bench.judge(chosen)
        # If one of these is noticed, its argument is wrong.
        of_idle = [m for m in everything if m.offset in idle]
        for verdict in bench.judge(of_idle[:: 1 if len(of_idle) < SAMPLE else 15]):
            assert verdict.survived, verdict
            verdicts.append(replace(verdict, redundant=idle[verdict.mutation.offset]))
    with capsys.disabled():
        print(f"\n{len(everything)} mutants, {len(verdicts)} tried")
        print(mutants.summary(KERNEL, verdicts))
    # All of them: one that survives needs a case that shows it, or an argument.
    mutants.expect_noticed(bench.kernel, verdicts, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dim", "dtype", "fp8"),
    [
        ("attention_decode_bf16_fp8_d80_rtne", 80, torch.bfloat16, torch.float8_e4m3fnuz),
        ("attention_decode_fp16_d192", 192, torch.float16, None),
    ],
)
def test_mutants_of_other_caches_and_head_dims(
    kernel: str,
    dim: int,
    dtype: torch.dtype,
    fp8: torch.dtype | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the hot loop, but for bounds, which the D = 128 kernel has as well."""
    scales: dict[str, Any] = {"k_scale": 0.7, "v_scale": 1.3, "in_memory": True} if fp8 else {}
    requests = [(1, 700), (4, 24), (4, 300)]
    batch = ragged.make(requests, (4, 1), dim, 3, dtype, seed=8, fp8=fp8)
    cases = [Case(batch, sinks=True, **scales)]
    with mutants.Bench(kernel, manifest.load("attention_decode.co"), cases) as bench:
        everything = mutate.mutations(bench.kernel, bench.kernel.loop())
        chosen = []
        for kind in sorted({m.kind for m in everything if not m.kind.startswith("bound ")}):
            of_kind = [m for m in everything if m.kind == kind]
            chosen += of_kind[:: max(1, -(-len(of_kind) // 12))]
        verdicts = bench.judge(chosen)
    with capsys.disabled():
        print(f"\n{len(everything)} mutants, {len(verdicts)} tried")
        print(mutants.summary(kernel, verdicts))
    mutants.expect_noticed(bench.kernel, verdicts, 1.0)
