"""What is installed, which GPUs there are, and what each engine would serve.

Versions and names of devices alone: no path, no host, no user.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from .. import collect_env, engines
from ..contract import DenseRequest, Engine, LiteRequest, RaggedRequest, Request
from ..engines import ENGINE_VARIABLE, ISA_VARIABLE

#: Entry points by which frameworks find this package.
_PLUGINS = ("sglang.srt.plugins", "sglang.multimodal_gen.plugins", "vllm.general_plugins")
#: Variables whose values are names of this project, not paths.
_VARIABLES = (ENGINE_VARIABLE, ISA_VARIABLE)


def installation() -> dict[str, str]:
    """Return name -> version, "not installed" or "none"."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": _processor(),
    }
    for package in collect_env.PACKAGES:
        found[package] = collect_env.installed_version(package)
    found["commit"] = collect_env.commit()
    found["torch for"] = _torch_for()
    found["ROCm"] = rocm()
    found["HIP run-time"] = _hip()
    for group in _PLUGINS:
        ours = [e.name for e in entry_points(group=group) if e.value.startswith("liteattention_")]
        found[f"plug-in {group}"] = ", ".join(ours) or "not registered"
    for name in _VARIABLES:
        if os.environ.get(name):
            found[name] = os.environ[name]
    return found


def rocm() -> str:
    """Version of the ROCm tree of this machine, "none" if there is none where it usually lies."""
    root = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    try:
        return (root / ".info" / "version").read_text(encoding="utf-8").strip()
    except OSError:
        return "none"


def gpus() -> list[dict[str, Any]]:
    """Return name, architecture, compute units and GiB of each GPU that PyTorch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": torch.cuda.get_device_name(index),
                "architecture": engines.architecture(torch.device("cuda", index)),
                "compute units": int(properties.multi_processor_count),
                "GiB": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def without_paths(text: str) -> str:
    """Return a message without the places that name a user or a machine's folders."""
    package = str(Path(__file__).resolve().parents[1])
    places = {package: "liteattention_rocm", sys.prefix: "<prefix>", os.getcwd(): "."}
    places[str(Path.home())] = "~"
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    return text


# ----------------------------------------------------------------------- what serves what


def requests(device: torch.device, engine: Engine) -> dict[str, Request]:
    """Return typical requests in bf16, head dim 128, by name: a video model's and a server's."""
    scale, tile = 128**-0.5, engine.geometry(128, 24 * 4096)
    dense = DenseRequest(
        1, 24, 24, 4096, 4096, 128, torch.bfloat16, device, "bshd", scale, False, "rtne", False
    )
    lite = LiteRequest(
        1, 24, 24, 4096, 4096, 128, torch.bfloat16, device, "bshd", scale, False, "rtne", False,
        tile, -6.0, False, False,
    )  # fmt: skip
    prefill = RaggedRequest(
        8, 4096, 32, 8, 128, torch.bfloat16, torch.bfloat16, device, 16, 512, 4096, scale,
        0, 0, 0.0, False, 1.0, 1.0, "rtne", False,
    )  # fmt: skip
    decode = replace(prefill, requests=64, rows=64, max_q_len=1)
    return {
        "dense, d 128": dense,
        "LiteAttention, threshold": lite,
        "LiteAttention, budget": replace(lite, threshold=-math.inf, budget=0.05),
        "paged prefill": prefill,
        "paged decode": decode,
    }


def device_of(name: str) -> torch.device:
    """Return where an engine would run here: on the GPU, or on CPU tensors."""
    on_gpu = torch.cuda.is_available() and name in ("gfx942", "portable")
    return torch.device("cuda" if on_gpu and not engines.get(name).emulated else "cpu")


def default_engines() -> dict[str, str]:
    """Return device -> the engine that calls there get, as settings and devices say, or why none.

    With the software MI300X for the HIP run-time, GPUs are not asked about.
    """
    on_gpu = torch.cuda.is_available() and not engines.get("gfx942").emulated
    devices = ["cpu", *(["cuda"] if on_gpu else [])]
    return {device: _chosen(device) for device in devices}


def _chosen(device: str) -> str:
    try:
        return engines.choose(device).name
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"


def services() -> list[dict[str, Any]]:
    """Return engine, device, request, whether it serves it, and all reasons why not."""
    found = []
    for name in engines.available():
        engine, device = engines.get(name), device_of(name)
        for what, request in requests(device, engine).items():
            reasons = [without_paths(reason) for reason in _reasons(engine, request)]
            found.append(
                {
                    "engine": name,
                    "device": device.type,
                    "request": what,
                    "serves": not reasons,
                    "reasons": reasons,
                }
            )
    return found


def _reasons(engine: Engine, request: Request) -> list[str]:
    try:
        return engine.reasons(request)
    except Exception as error:  # whatever a broken installation throws is a reason
        return [f"{type(error).__name__}: {error}"]


def _processor() -> str:
    try:
        return collect_env.processor()
    except OSError:
        return platform.machine()


def _torch_for() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _hip() -> str:
    engine: Any = engines.get("gfx942")
    try:
        library = engine.library()
    except RuntimeError:
        return "none"
    kind = "software MI300X" if library.emulated else "HIP"
    return f"{kind} {library.version()} ({Path(library.path).name})"
