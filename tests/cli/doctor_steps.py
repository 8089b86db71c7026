"""Steps of ``doctor`` that go wrong, for processes that import this module."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from liteattention_benchmark import doctor_times
from liteattention_rocm.doctor import isolated, report

FAULT = "Memory access fault by GPU node-1. Reason: Unknown."


def step(name: str) -> str:
    if name == "fault":
        fault()
    if name == "hang":
        time.sleep(600)
    if name == "raise":
        raise ValueError("no such luck")
    if name == "in error":
        isolated._gpu_in_error = lambda: True
    if name.startswith("child "):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(name.removeprefix("child ")).write_text(str(child.pid))
        time.sleep(600)
    print("printed by", name, flush=True)
    return f"{name} {os.getpid()}"


def fault() -> None:
    print(f"\n{FAULT}\n", file=sys.stderr, flush=True)
    os.abort()


def run_task(task: report.Task) -> report.Check:
    """All but one case run."""
    if task.case == "dense":
        fault()
    return report.run_task(task)


def measured(contender: doctor_times.Contender) -> dict[str, object]:
    if contender.name == "SDPA":
        fault()
    return {"median_ms": 1.0}
