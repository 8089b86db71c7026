"""Makes ``expected.json``: SHA-256 of what the MI300X kernels compute in ``doctor``'s cases."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from liteattention_emulator import library, set_option
from liteattention_rocm.cli import files
from liteattention_rocm.doctor import judge
from liteattention_rocm.doctor.cases import CASES
from liteattention_rocm.doctor.report import native_engine


def write(path: Path = judge.EXPECTED) -> Path:
    """Run every case on the emulator, checkers on, and write the file.

    Raises:
        ValueError: results are wrong; lists every reason.
        RuntimeError: the emulator is not built, or a checker found something.
    """
    set_option("check", "on")
    engine, wrong, bits = native_engine(str(library())), [], {}
    for case in CASES:
        verdict = judge.judge(case, engine, torch.device("cpu"), None)
        wrong += [f"{case.name}: {reason}" for reason in verdict.wrong]
        bits[case.name] = verdict.bits
    if wrong:
        raise ValueError("the results are wrong, nothing is written: " + "; ".join(wrong))
    text = json.dumps({"format": judge.FORMAT, "cases": bits}, indent=1)
    files.write_text(path, text + "\n")
    return path
