"""Time of single calls on a device, what the device reaches at best, and what it is."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from liteattention_rocm.collect_env import NOT_INSTALLED, installed_version, source_commit

from .peers import Call

_Name = TypeVar("_Name")

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
        number = installed_version(package)
        if number != NOT_INSTALLED:
            found[package] = number
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        convolutions = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        hip = torch.version.hip
        if hip is None:
            found |= {"cuDNN": convolutions, **_nvidia(device)}
        else:
            found |= {"HIP": hip, "MIOpen": convolutions, **_amd(device)}
    return found


def _nvidia(device: torch.device) -> dict[str, str]:
    """Driver, clocks and limit of ``device`` as nvidia-smi says them; none if it cannot."""
    # Its numbers are those of the host, PyTorch's those of CUDA_VISIBLE_DEVICES.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    query = "--query-gpu=" + ",".join(fields)
    try:
        line = _said("nvidia-smi", "-i", name, query, "--format=csv,noheader").splitlines()[0]
        values = line.split(",")
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return {name: value.strip() for name, value in zip(fields, values, strict=True)}


def _amd(device: torch.device) -> dict[str, str]:
    """Clocks of ``device`` as the first of AMD's tools says them that knows it; none if none does.

    It is told by its PCI address: the tools' numbers are those of the host, PyTorch's those of
    HIP_VISIBLE_DEVICES.
    """
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    except AttributeError:
        return {}  # older PyTorch
    for ask in (_amd_smi, _rocm_smi):
        try:
            return ask(address)
        except (
            OSError,
            subprocess.SubprocessError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ):
            continue  # their JSON changes with the release
    return {}


def _amd_smi(address: str) -> dict[str, str]:
    def of_gpus(*command: str) -> dict[int, Any]:
        answer = json.loads(_said("amd-smi", *command, "--json"))
        gpus = answer["gpu_data"] if isinstance(answer, dict) else answer
        return {gpu["gpu"]: gpu for gpu in gpus}

    number = _at(address, {number: gpu["bdf"] for number, gpu in of_gpus("list").items()})
    clocks = of_gpus("metric", "--clock")[number]["clock"]
    fields = {"gfx": ("gfx_0", "clk"), "mem": ("mem_0", "clk"), "max.gfx": ("gfx_0", "max_clk")}
    found = {f"clocks.{name}": clocks[part][field] for name, (part, field) in fields.items()}
    return {name: f"{clock['value']} {clock['unit']}" for name, clock in found.items()}


def _rocm_smi(address: str) -> dict[str, str]:
    options = ("--showbus", "--showdriverversion", "--showclocks", "--showmaxpower", "--json")
    answer = json.loads(_said("rocm-smi", *options))
    cards = {name: card for name, card in answer.items() if name.startswith("card")}
    card = cards[_at(address, {name: card["PCI Bus"] for name, card in cards.items()})]
    found = {
        "driver_version": answer.get("system", {}).get("Driver version"),
        "clocks.gfx": card["sclk clock speed:"].strip("()"),
        "clocks.mem": card["mclk clock speed:"].strip("()"),
        "power.limit": card.get("Max Graphics Package Power (W)"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _at(address: str, gpus: dict[_Name, str]) -> _Name:
    """Which of ``gpus``, by their domain:bus:device.function, is at ``address``.

    Raises:
        ValueError: not just one is: PyTorch does not say the function, by which the partitions of
            a GPU differ.
    """
    (name,) = (name for name, at in gpus.items() if at.lower().rpartition(".")[0] == address)
    return name


def _said(*command: str) -> str:
    """What a program prints.

    Raises:
        OSError: it is not there.
        subprocess.SubprocessError: it fails, or takes more than 20 seconds.
    """
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
