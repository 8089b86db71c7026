"""The kernels that csrc/gfx942/variants.def lists."""

from __future__ import annotations

import ctypes
import re

from .conftest import SOURCES
from .machine import STRUCTS

_ROW = re.compile(r"^LITE_(\w+)\((\w+)[^)]*\)$", re.MULTILINE)


def _read() -> list[tuple[str, int]]:
    rows = _ROW.findall((SOURCES / "variants.def").read_text(encoding="utf-8"))
    families = ((family.lower().removesuffix("_fp8"), name) for family, name in rows)
    return [(name, ctypes.sizeof(STRUCTS[family])) for family, name in families]


#: Name and bytes of the argument of every kernel, in the order of the list.
KERNELS = _read()
