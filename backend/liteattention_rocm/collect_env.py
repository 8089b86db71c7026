"""Print what a bug report needs to know: ``python -m liteattention_rocm.collect_env``.

Standard library only, and it never raises: whatever cannot be found out says why.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

COMMIT_VARIABLE = "LITEATTENTION_COMMIT"

PACKAGES = (
    "liteattention-rocm",
    "torch",
    "triton",
    "aiter",
    "diffusers",
    "transformers",
    "sglang",
    "vllm",
    "numpy",
    "pydantic",
)

#: Distributions that bring what builds for CUDA bring under its own name, as ROCm's do. PyPI's
#: `aiter` is something else, so it comes last.
_DISTRIBUTIONS = {
    "aiter": ("amd-aiter", "aiter"),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "amd-triton"),
}
NOT_INSTALLED = "not installed"


def collect() -> dict[str, str]:
    """Return name -> value, every value a string, in the order to print."""
    facts: dict[str, str] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _try(processor),
        "cores": str(os.cpu_count()),
        "memory": _try(_memory),
    }
    for name in PACKAGES:
        facts[name] = _try(lambda name=name: installed_version(name))  # type: ignore[misc]
    facts["commit"] = commit()
    facts["gpu"] = _try(_gpus)
    facts["torch threads"] = _try(lambda: str(_load("torch").get_num_threads()))
    facts["cpu paths"] = _try(_cpu_paths)
    facts["hip run-time"] = _try(_hip)
    facts["gfx942 kernels"] = _try(_kernels)
    facts["default engine"] = _try(_default_engines)
    for name in sorted(os.environ):
        if name.startswith("LITEATTENTION_"):
            facts[name] = os.environ[name]
    return facts


def report() -> str:
    """Return :func:`collect` as aligned lines."""
    facts = collect()
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def commit() -> str:
    """:func:`source_commit`, or in words that nothing says it."""
    return source_commit() or "unknown: built from sources without git"


def source_commit() -> str | None:
    """Commit of the sources that the package runs from or was built from, None if unknown.

    It ends in ``-dirty`` where the sources differed from the commit. A checkout asks git, a wheel
    has it from its build. A copy of a checkout has no history, or one of its own:
    ``LITEATTENTION_COMMIT`` says there what was copied (``git describe --always --dirty
    --abbrev=12`` of the original).
    """
    stated = os.environ.get(COMMIT_VARIABLE)
    if stated:
        return stated
    here, name = os.path.split(os.path.abspath(__file__))
    try:
        # An installed package may lie in a checkout of something else: the user's project.
        _git(here, "ls-files", "--error-unmatch", name)
        return _git(here, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, ValueError, subprocess.SubprocessError):
        return _built_from(here)


def _built_from(package: str) -> str | None:
    """The commit that the build wrote into the installed package."""
    try:
        with open(os.path.join(package, "commit.txt"), encoding="utf-8") as file:
            return file.read().strip() or None
    except OSError:
        return None


def _git(directory: str, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def installed_version(name: str) -> str:
    """Version of an installed package by its usual name, :data:`NOT_INSTALLED` without it.

    ``aiter`` and ``triton`` are looked for under the names of ROCm's builds, too. Where several of
    them are installed over each other, all are named.
    """
    found = {}
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    if len(found) > 1:
        return ", ".join(f"{number} ({distribution})" for distribution, number in found.items())
    return next(iter(found.values()), NOT_INSTALLED)


def _try(find: Callable[[], str]) -> str:
    try:
        return find()
    except Exception as error:  # a report must come out of a broken installation, too
        return f"unknown ({type(error).__name__}: {error})"


def _load(name: str) -> Any:
    return importlib.import_module(name)


def processor() -> str:
    """Name of the processor's model."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    with open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemTotal"):
                return f"{int(line.split()[1]) / 2**20:.1f} GiB"
    return "unknown"


def _gpus() -> str:
    cuda = _load("torch").cuda
    if not cuda.is_available():
        return "none"
    return ", ".join(
        f"{cuda.get_device_name(i)} ({getattr(cuda.get_device_properties(i), 'gcnArchName', '')})"
        for i in range(cuda.device_count())
    ).replace(" ()", "")


def _hip() -> str:
    engine = _load("liteattention_rocm.engines").get("gfx942")
    try:
        library = engine.library()
    except RuntimeError as error:
        return f"none ({_tried(str(error))})"
    kind = "software MI300X" if library.emulated else "HIP"
    return f"{kind} {library.version()}, {library.path}"


def no_rocm(reason: str) -> bool:
    """Whether an engine's reason says that this machine has no ROCm, and nothing more."""
    words = _tried(reason)
    nothing = "LITEATTENTION_HIP_LIBRARY is not set; none is loaded in this process"
    return reason.startswith(_NO_RUN_TIME) and words.partition("; not found: ")[0] == nothing


#: How the reason begins that no HIP run-time was found.
_NO_RUN_TIME = "no HIP run-time (libamdhip64): "


def _tried(reason: str) -> str:
    """Where no HIP run-time was found, in a line: without the remedy, missing names in one list."""
    reason = reason.removeprefix(_NO_RUN_TIME).partition(": install PyTorch")[0]
    nowhere = r"; (libamdhip64[^\s:]*): cannot open shared object file: No such file or directory"
    missing = re.findall(nowhere, reason)
    found = re.sub(nowhere, "", reason)
    return f"{found}; not found: {', '.join(missing)}" if missing else found


def _kernels() -> str:
    found = _load("liteattention_rocm.engines.gfx942.manifest").read()
    count = sum(len(entry.kernels) for entry in found.objects)
    return f"{count} in {len(found.objects)} code objects, built by {found.compiler}"


def _default_engines() -> str:
    """The engine of a GPU's tensors, if there is one, and of the CPU's: the same if one is set."""
    engines, torch = _load("liteattention_rocm.engines"), _load("torch")
    choose, cuda = engines.choose, torch.cuda
    cpu = str(choose("cpu").name)
    if not cuda.is_available():
        return cpu + _unusable(choose("cpu"), torch.device("cpu"))
    names = dict.fromkeys(str(choose(f"cuda:{i}").name) for i in range(cuda.device_count()))
    gpus = ", ".join(names)
    return cpu if gpus == cpu else f"{gpus} on the GPU, {cpu} on the CPU"


def _unusable(engine: Any, device: Any) -> str:
    """That an engine which the environment sets cannot run; "" if it can."""
    if "LITEATTENTION_ENGINE" not in os.environ or not engine.unavailable(device):
        return ""
    return ", by LITEATTENTION_ENGINE; it cannot run here"


def _cpu_paths() -> str:
    engine = _load("liteattention_rocm.engines.cpu")
    return f"{engine.chosen_isa()} of {', '.join(engine.available_isas())}"


if __name__ == "__main__":
    print(report())
