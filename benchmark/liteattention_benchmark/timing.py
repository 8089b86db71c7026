"""Time of single calls on a device, what the device reaches at best, and what it is."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from liteattention_rocm.collect_env import source_commit

from .peers import Call

#: Half a millisecond of writing on the fastest GPUs, time for any contender's launch.
_FLUSH_BYTES = 2 << 30
#: Fewer than a GPU's queue takes (1,024), so that the host never waits.
_HOST_CALLS = 200


def flush_buffer(device: torch.device) -> torch.Tensor | None:
    """Memory whose overwriting empties the L2 cache of a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)


def host_milliseconds(call: Call, device: torch.device) -> float:
    """Time that one of many calls in a row keeps the host; the device is idle at first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    taken = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken * 1e3 / _HOST_CALLS


def milliseconds(
    call: Callable[[], object], device: torch.device, flush: torch.Tensor | None
) -> float:
    """Time one call, after overwriting ``flush``."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    if flush is not None:
        flush.zero_()
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches in a large matrix product (TFLOP/s) and a large copy (TB/s).

    The product is in bf16, the copy counts bytes read and written.
    """

    tflops: float
    tbps: float


def ceilings(device: torch.device, rounds: int = 9) -> Ceilings:
    """Measure the two roofs of a roofline, medians, on random data."""
    size, numbers = (8192, 1 << 31) if device.type == "cuda" else (512, 1 << 22)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    source = torch.empty(numbers, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def median(call: Callable[[], torch.Tensor]) -> float:
        call()
        return statistics.median(milliseconds(call, device, None) for _ in range(rounds))

    multiplied = median(lambda: torch.matmul(a, b, out=product))
    copied = median(lambda: target.copy_(source))
    return Ceilings(2.0 * size**3 / multiplied / 1e9, 2.0 * numbers / copied / 1e9)


def environment(device: torch.device) -> dict[str, str]:
    """Commit, versions, device and clocks that a table is stamped with."""
    found = {"commit": source_commit() or "unknown", "torch": str(torch.__version__)}
    for package in ("triton", "flash-attn", "flash-attn-4", "aiter", "spas-sage-attn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found |= _nvidia()
    return found


def _nvidia() -> dict[str, str]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = answer.stdout.splitlines()[0].split(",")
    return {name: value.strip() for name, value in zip(fields, values, strict=True)}
