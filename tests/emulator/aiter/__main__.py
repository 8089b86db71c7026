"""``AITER_HSA=... python -m tests.emulator.aiter``: tables of docs/emulator.md, docs/model.md."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from liteattention_emulator.timing import replay, work
from liteattention_emulator.timing.report import WORK_HEAD, work_row

from . import bounds, clocks, public_kernel, triton_forward, whole, whole_tables
from .cases import run, table_cases
from .launch import VARIABLE, folder
from .published import ROUNDINGS

UNITS = ("mfma", "valu", "trans", "ds", "vmem", "salu")


def part(what: str, lines: Callable[[], Iterable[str]], before: str = "\n") -> bool:
    """Print a part of the tables; where it cannot be made, say why, and let the others follow."""
    try:
        print(before + "\n".join(lines()))
    except Exception as error:
        print(f"{before}{what}: not made: {type(error).__name__}: {error}")
        return False
    return True


def of_triton(source: Path) -> list[str]:
    result = replay(triton_forward.record(source, 1536)[0])
    return [f"| Triton | {clocks.TRITON[0]} | {result.per_matrix:.2f} | {result.use:.0%} |"]


def of_public(source: Path) -> list[str]:
    rows = []
    for rounding in ROUNDINGS:
        found = work(whole.public(source, rounding).longest)
        assert found is not None
        rows.append(f"| moonmath-ai {rounding} | {' | '.join(work_row(found))} |")
    return rows


def main() -> None:
    """Print every table that can be made; exits with 1 if one could not be."""
    root = folder()
    if root is None:
        sys.exit(f"set {VARIABLE} to the folder hsa/gfx942 of a checkout of ROCm/aiter")
    head = ("kernel", "q x keys", "error", "of bound", "findings", "instructions", *UNITS, "other")
    print("| " + " | ".join(head) + " |")
    print("|---|---|" + "---:|" * (len(head) - 2))
    for case in table_cases():
        result = run(root, case)
        rest = result.unexplained(case.flaw)
        found = ("none" if not result.findings else case.flaw) if not rest else rest[0]
        units = {unit: n / result.report.waves for unit, n in result.report.by_unit().items()}
        counts = [units.pop(unit, 0.0) for unit in UNITS]
        total = result.report.instructions / result.report.waves
        numbers = " | ".join(f"{x:.0f}" for x in (total, *counts, sum(units.values())))
        name = case.file.removesuffix(".co").removeprefix("fmha_v3_fwd/").removeprefix("pa/")
        [(rows, keys)] = case.shape.requests
        error, of_bound = result.comparison.relative, result.comparison.of_bound
        print(f"| {name} | {rows} x {keys} | {error:.1e} | {of_bound:.2f} | {found} | {numbers} |")
    print("\n| kernel | measured | modelled | matrix cores in use |\n|---|---:|---:|---:|")
    spent: list[str] = []
    made: list[bool] = []
    for kernel in clocks.MODELLED:
        result = clocks.modelled(root, kernel)
        found = work(result)
        assert found is not None
        spent.append(f"| {kernel} | {' | '.join(work_row(found))} |")
        measured = f"{clocks.MEASURED[kernel][0]:.2f}" if kernel in clocks.MEASURED else ""
        print(f"| {kernel} | {measured} | {result.per_matrix:.2f} | {result.use:.0%} |")
    if (folder_of_triton := triton_forward.source(root)) is not None:
        made.append(part("Triton", lambda: of_triton(folder_of_triton), before=""))
    source = public_kernel.folder()
    print(f"\n| kernel | {' | '.join(WORK_HEAD)} |\n|---|{'---:|' * len(WORK_HEAD)}")
    print("\n".join(spent))
    if source is not None:
        made.append(part("moonmath-ai", lambda: of_public(source), before=""))
    made.append(part("bounds", lambda: bounds.lines(root)))
    made.append(part("work of launches", lambda: whole_tables.counted(root)))
    made.append(part("our launches", lambda: whole_tables.own(root)))
    if source is None:
        print(f"\n{public_kernel.VARIABLE} names no checkout of moonmath-ai/amd-kernels")
    else:
        made.append(part("ratios", lambda: whole_tables.ratios(root, source)))
    if not all(made):
        sys.exit(1)


if __name__ == "__main__":
    main()
