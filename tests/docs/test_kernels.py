"""docs/kernels.md: its tables of registers and LDS, against the code objects that are shipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from liteattention_rocm.engines.gfx942 import manifest
from liteattention_rocm.engines.gfx942.manifest import Kernel
from tests import ROOT

PAGE = ROOT / "docs/kernels.md"
HEADER = "| kernel | VGPR | SGPR | spills | LDS bytes |"


def rows() -> Iterator[tuple[list[str], list[str]]]:
    """Patterns of names and the four cells of each row of all such tables."""
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            yield re.findall(r"`([^`]+)`", names), cells


def covered(kernel: Kernel, patterns: list[str]) -> bool:
    """Whether a row is about a kernel: those that read fp8 have rows of their own."""
    return any(
        fnmatchcase(kernel.name, pattern) and ("_fp8" in kernel.name) == ("_fp8" in pattern)
        for pattern in patterns
    )


def test_registers_and_lds_are_those_of_the_code_objects() -> None:
    kernels = [kernel for entry in manifest.read().objects for kernel in entry.kernels]
    seen: list[str] = []
    for patterns, cells in rows():
        found = [kernel for kernel in kernels if covered(kernel, patterns)]
        assert found, f"no kernel is called {patterns}"
        seen += [kernel.name for kernel in found]
        numbers = [
            {kernel.vgprs for kernel in found},
            {kernel.sgprs for kernel in found},
            {kernel.vgpr_spills + kernel.sgpr_spills for kernel in found},
            {kernel.lds_bytes for kernel in found},
        ]
        for cell, values in zip(cells, numbers, strict=True):
            low, high = f"{min(values):,}", f"{max(values):,}"
            assert cell in ("as above", low if low == high else f"{low} to {high}"), patterns
    assert sorted(seen) == sorted(kernel.name for kernel in kernels)
