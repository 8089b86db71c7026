"""Broken copies of attention_decode's machine code: the checkers and results must notice them."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch

import liteattention_emulator
from liteattention_emulator import mutate
from liteattention_rocm.engines.gfx942 import manifest
from tests.emulator import mutants
from tests.oracle.attention import bound, expect_out

from . import ragged
from .machine import PageStrides, RaggedParams, RowStrides, pointer

KERNEL = "attention_decode_bf16_d128_rtne"
# Mutants tried of each kind, spread over the whole kernel.
SAMPLE = 16


class Case:
    """A decode batch, its results and parts compared bit for bit with the kernel's own."""

    def __init__(self, batch: ragged.Batch, *, window: int = 0, splits: int = 1) -> None:
        self.batch, self.window, self.splits = batch, window, splits

    def run(self, image: bytes, kernel: str) -> None:
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
        given = (b.q, b.k_cache, b.v_cache, out, lse, None, b.q_start, kv_len, kv_start, table)
        scale = ragged.LOG2E / math.sqrt(dim)
        params = RaggedParams(
            *map(pointer, (*given, part_out, part_stats)),
            *(RowStrides(x.stride(0), x.stride(1)) for x in (b.q, out)),
            *(
                PageStrides(x.stride(0) if paged else 0, x.stride(-3), x.stride(-2))
                for x in (b.k_cache, b.v_cache)
            ),
            *(b.page_table.stride(0), lse.stride(0), requests, rows, q_heads, kv_heads),
            *(b.page_size, *ragged.divider(b.page_size), True, self.window, self.splits),
            *(scale, 0.0, 0.0, dim, *ragged.divider(group)),
        )
        tensors = [x for x in (*given, part_out, part_stats) if x is not None]
        with liteattention_emulator.Module(image) as module, ExitStack() as stack:
            stack.enter_context(liteattention_emulator.registered(*tensors))
            module.launch(kernel, [parts], [256], [params])

    def accept(self) -> None:
        """The results are the kernel's own, and those of whole requests within the bound."""
        if self.splits == 1:
            exact = self.batch.exact(window=self.window)
            expect_out(self.written[0], exact, bound(exact, torch.bfloat16))
        self.accepted = self.written

    def right(self) -> bool:
        """Whether the latest run gave the same bits."""
        return all(torch.equal(a, b) for a, b in zip(self.written, self.accepted, strict=True))


@pytest.mark.slow
def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    image = manifest.load("attention_decode.co")
    cases = [
        # a wave with two blocks, one of them short, and three with one; scattered keys
        Case(ragged.make([(1, 290), (2, 9)], (4, 1), 128, 3)),
        # parts: the first and last key of a block and of the window are seen by some rows only
        Case(ragged.make([(4, 650)], (2, 1), 128, 16), window=577, splits=2),
        Case(ragged.make([(3, 321)], (1, 1), 128, 0)),
        # the first key that is not there, in each of the 16 registers of scores
        Case(
            ragged.make(
                [(1, 16 * t + 5 * i + 1) for t in range(4) for i in range(4)], (1, 1), 128, 1
            )
        ),
    ]
    with mutants.Bench(KERNEL, image, cases, "first-ahead", "last-ahead") as bench:
        kernel = bench.kernel
        reached = [kernel.listing.instructions[index] for index in sorted(kernel.graph.next)]
        everything = mutate.mutations(kernel, reached)
        chosen = []
        for kind in sorted({mutation.kind for mutation in everything}):
            of_kind = [mutation for mutation in everything if mutation.kind == kind]
            chosen += of_kind[:: max(1, -(-len(of_kind) // SAMPLE))]
        verdicts = bench.judge(chosen)
    with capsys.disabled():
        print(f"\n{len(everything)} mutants, {len(chosen)} tried")
        print(mutants.summary(KERNEL, verdicts))
    # The rest: masks of keys that no case ends at, second corrections of integer division.
    mutants.expect_noticed(bench.kernel, verdicts, 0.85)
