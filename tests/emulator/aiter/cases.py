"""What is run of aiter's kernels, and which flaws of theirs the checkers are to find in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from liteattention_emulator.device import Report, last_launch
from liteattention_emulator.native import LaunchFailed

from . import decode, prefill
from .decode import Decode
from .launch import Comparison, Launch
from .prefill import Prefill

# Each flaw by what a finding of it says. docs/emulator.md describes them.
FLAWS = {
    "page table": r"in-flight register: .* while buffer_load_dword v\d+, v1, s\[24:27\], 0x0 at ",
    "P": r"in-flight register: .* v_mfma_.* while ds_read_b64 .*\(lgkmcnt\)",
    "counter": r"in-flight register: .* v_mfma_.* while ds_read_b128 v\[4:7\], v250 .*\(lgkmcnt\)",
    "mask": r"undefined value: scc is undefined and used as the branch condition",
}
MODES = ("", "_causal")
ROUNDINGS = ("rtne", "rtna", "rtz")


@dataclass(frozen=True)
class Case:
    """A launch of ``file``, relative to the folder; ``flaw`` is one of `FLAWS` or nothing."""

    file: str
    shape: Prefill | Decode
    flaw: str = ""

    def __str__(self) -> str:
        requests = "+".join(f"{rows}x{keys}" for rows, keys in self.shape.requests)
        parts = f"/{self.shape.parts}" if isinstance(self.shape, Decode) else ""
        return f"{self.file.removesuffix('.co')}-{requests}{parts}"


@dataclass
class Result:
    """What a case has done: ``findings`` as "kind: detail", ``stray`` outputs of no request."""

    report: Report
    comparison: Comparison
    findings: list[str]
    stray: int

    def unexplained(self, flaw: str) -> list[str]:
        """Findings that are not that flaw."""
        return [x for x in self.findings if not flaw or not re.match(FLAWS[flaw], x)]


def prepare(file: Path, shape: Prefill | Decode) -> Launch:
    """A launch of the kernel of an aiter code object; the caller closes it.

    Raises ValueError where the kernel takes no such shape, EmulatorError for a damaged file.
    """
    if isinstance(shape, Prefill):
        return prefill.launch(file, shape)
    return decode.launch(file, shape)


def run(folder: Path, case: Case) -> Result:
    """Launch with the checks on, compare with float64."""
    with prepare(folder / case.file, case.shape) as launch:
        try:
            report = launch.run()
        except LaunchFailed as failure:  # findings do not keep it from being carried out
            if not failure.findings or (last := last_launch()) is None:
                raise
            report = last
        written = int((~launch.out.isnan()).sum())
        stray = written - sum(x.out.numel() for x in launch.requests if x.parts is None)
        findings = [f"{finding.kind}: {finding.detail}" for finding in report.findings]
        return Result(report, launch.compare(), findings, stray)


def prefill_files(part: str) -> list[str]:
    """Of MI300 or MI308."""
    kinds = [f"{dims}_bf16{{}}_{end}" for dims in ("hd128", "hd192x128") for end in ROUNDINGS]
    names = [kind.format(mode) for kind in [*kinds, "hd128_fp8{}"] for mode in MODES]
    groups = (f"{name}{group}" for name in names for group in ("", "_group"))
    return [f"fmha_v3_fwd/{part}/fwd_{name}.co" for name in groups]


def prefill_cases() -> Iterator[Case]:
    """Every file: lengths that no tile divides, grouped heads, both layouts, gaps between rows."""
    for file in (name for part in ("MI300", "MI308") for name in prefill_files(part)):
        if "group" in file:
            yield Case(file, Prefill(((1, 1), (300, 333), (64, 70), (129, 257)), 4, 2))
            yield Case(file, Prefill(((17, 33), (300, 333), (64, 70)), 8, 2, padding=5, seed=1))
        else:
            yield Case(file, Prefill(((300, 333),) * 2, 4, 2))
            yield Case(file, Prefill(((70, 70),) * 2, 8, 4, layout="bhsd", seed=1))


def decode_cases() -> Iterator[Case]:
    """Every file of pa_asm.csv: pages in disorder, lengths of all kinds, short ones behind long."""
    for dtype in ("bf16", "fp16"):
        for group in (8, 16):
            name = f"pa/pa_{dtype}_{{}}_gqa{group}"
            one = Decode(((1, 777), (1, 1), (1, 256), (1, 300), (1, 17)), group)
            yield Case(f"{name.format('noquant')}_1tg_4w.co", one, "page table")
            yield Case(f"{name.format('noquant')}_1tg_4w.co", Decode(((1, 40), (1, 16)), group))
            for cache in ("pertokenFp8", "pertokenInt8"):
                flaw = "P" if group == 16 else ""
                yield Case(f"{name.format(cache)}_2tg_4w.co", one, flaw)
                yield from _several_rows(f"{name.format(cache)}_1tg_4w_mtp", group, one)
        for end in ("hp", "uhp"):
            one = Decode(((1, 777), (1, 1), (1, 256), (1, 300), (1, 17)), 8)
            yield Case(f"pa/pa_{dtype}_pertokenFp8_gqa8_2tg_4w_{end}.co", one)
        for mask in (0, 1):
            some = Decode(((2, 300), (1, 17), (3, 256), (4, 777)), 8)
            file = f"pa/pa_{dtype}_noquant_gqa8_1tg_4w_mtp_msk{mask}.co"
            yield Case(file, some, "page table")
    for rows in (1, 2, 3, 4):
        shape = Decode(((rows, 40), (rows, 299), (rows, 1024), (rows, 1030)), 10)
        yield Case(f"pa/pa_bf16_pertokenFp8_gqa10_1tg_4w_qlen{rows}_msk1.co", shape)
    # With a plan of work: what shares a tile of q, its rows times the heads of a group.
    for tile, rows, group in ((16, 2, 8), (32, 2, 16), (40, 4, 10), (48, 3, 16), (64, 4, 16)):
        lengths = ((rows, 1100), (rows, 17), (rows, 2600), (rows, 300))
        for cache in ("perblockFp8_blk256", "perblockFp8_blk1024", "pertokenFp8_gqa16"):
            file = f"pa/pa_bf16_{cache}_1tg_4w_qlen{tile}_msk1_ps.co"
            for parts in (1, 2):
                shape = Decode(lengths, group, parts=parts, seed=parts)
                yield Case(file, shape, "counter" if tile == 64 else "")


def _several_rows(name: str, group: int, one: Decode) -> Iterator[Case]:
    for mask in (0, 1):
        file = f"{name}_msk{mask}.co"
        yield Case(file, one, "mask" if mask and group == 16 else "")
        if group == 8:
            yield Case(file, Decode(((2, 300), (1, 17), (2, 256), (2, 777)), group))
            yield Case(file, Decode(((3, 300), (2, 17), (4, 256), (3, 777)), group), "P")
        else:
            yield Case(file, Decode(((2, 300), (2, 17), (2, 256), (2, 777)), group), "P")


def table_cases() -> Iterator[Case]:
    """A tile of q, one head of K and V; 1024 keys, in pages 1000. One workgroup, "ps" three."""
    for part in ("MI300", "MI308"):
        for kind in ("hd128_bf16", "hd192x128_bf16", "hd128_fp8"):
            rows = 128 if "192" in kind else 256
            for end in ("",) if "fp8" in kind else (f"_{rounding}" for rounding in ROUNDINGS):
                file = f"fmha_v3_fwd/{part}/fwd_{kind}{end}.co"
                yield Case(file, Prefill(((rows, 1024),), 1, 1))
    for group, name, rows, flaw in (
        (8, "bf16_noquant_gqa8_1tg_4w", 1, "page table"),
        (16, "bf16_noquant_gqa16_1tg_4w", 1, "page table"),
        (8, "fp16_noquant_gqa8_1tg_4w", 1, "page table"),
        (8, "bf16_noquant_gqa8_1tg_4w_mtp_msk1", 2, "page table"),
        (8, "bf16_pertokenFp8_gqa8_2tg_4w", 1, ""),
        (8, "bf16_pertokenFp8_gqa8_2tg_4w_hp", 1, ""),
        (8, "bf16_pertokenFp8_gqa8_2tg_4w_uhp", 1, ""),
        (16, "bf16_pertokenFp8_gqa16_2tg_4w", 1, "P"),
        (8, "bf16_pertokenFp8_gqa8_1tg_4w_mtp_msk1", 2, ""),
        (10, "bf16_pertokenFp8_gqa10_1tg_4w_qlen1_msk1", 1, ""),
        (8, "bf16_pertokenInt8_gqa8_2tg_4w", 1, ""),
        (16, "bf16_pertokenInt8_gqa16_2tg_4w", 1, "P"),
    ):
        yield Case(f"pa/pa_{name}.co", Decode(((rows, 1000),), group, 1), flaw)
    for tile, rows, group, flaw in ((16, 2, 8, ""), (64, 4, 16, "counter")):
        file = f"pa/pa_bf16_perblockFp8_blk256_1tg_4w_qlen{tile}_msk1_ps.co"
        yield Case(file, Decode(((rows, 1000),), group, 1, parts=3), flaw)
