"""``AITER_HSA=... python -m tests.emulator.aiter``: tables of docs/emulator.md, docs/model.md."""

import sys

from liteattention_emulator.timing import replay, work
from liteattention_emulator.timing.report import WORK_HEAD, work_row

from . import bounds, clocks, public_kernel, triton_forward, whole, whole_tables
from .cases import run, table_cases
from .launch import VARIABLE, folder
from .published import ROUNDINGS

UNITS = ("mfma", "valu", "trans", "ds", "vmem", "salu")


def main() -> None:
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
    spent = []
    for kernel in clocks.MODELLED:
        result = clocks.modelled(root, kernel)
        found = work(result)
        assert found is not None
        spent.append(f"| {kernel} | {' | '.join(work_row(found))} |")
        measured = f"{clocks.MEASURED[kernel][0]:.2f}" if kernel in clocks.MEASURED else ""
        print(f"| {kernel} | {measured} | {result.per_matrix:.2f} | {result.use:.0%} |")
    if (folder_of_triton := triton_forward.source(root)) is not None:
        result = replay(triton_forward.record(folder_of_triton, 1536)[0])
        print(f"| Triton | {clocks.TRITON[0]} | {result.per_matrix:.2f} | {result.use:.0%} |")
    source = public_kernel.folder()
    for rounding in ROUNDINGS if source else ():
        assert source is not None
        found = work(whole.public(source, rounding).longest)
        assert found is not None
        spent.append(f"| moonmath-ai {rounding} | {' | '.join(work_row(found))} |")
    print(f"\n| kernel | {' | '.join(WORK_HEAD)} |\n|---|{'---:|' * len(WORK_HEAD)}")
    print("\n".join(spent))
    print("\n" + "\n".join(bounds.lines(root)))
    print("\n" + "\n".join(whole_tables.counted(root)))
    print("\n" + "\n".join(whole_tables.own(root)))
    if source is None:
        print(f"\n{public_kernel.VARIABLE} names no checkout of moonmath-ai/amd-kernels")
    else:
        print("\n" + "\n".join(whole_tables.ratios(root, source)))


if __name__ == "__main__":
    main()
