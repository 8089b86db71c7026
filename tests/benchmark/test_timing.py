"""What a table of times is stamped with."""

from __future__ import annotations

import json
import subprocess
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liteattention_benchmark import timing


def clock(value: int) -> dict[str, Any]:
    return {"value": value, "unit": "MHz"}


#: What the tools of AMD and NVIDIA print, cut down.
AMD_SMI = {
    "clock": {
        "gfx_0": {"clk": clock(132), "min_clk": clock(500), "max_clk": clock(2100)},
        "gfx_1": {"clk": clock(140), "min_clk": clock(500), "max_clk": clock(2100)},
        "mem_0": {"clk": clock(900), "min_clk": clock(900), "max_clk": clock(1300)},
    },
    "gpu": 0,
}
BY_AMD_SMI = {"clocks.gfx": "132 MHz", "clocks.mem": "900 MHz", "clocks.max.gfx": "2100 MHz"}
ROCM_SMI = {
    "card0": {
        "sclk clock speed:": "(133Mhz)",
        "sclk clock level:": "1",
        "mclk clock speed:": "(901Mhz)",
        "Max Graphics Package Power (W)": "750.0",
    },
    "card1": {"sclk clock speed:": "(2100Mhz)", "mclk clock speed:": "(1300Mhz)"},
    "system": {"Driver version": "6.14.14"},
}
BY_ROCM_SMI = {
    "driver_version": "6.14.14",
    "clocks.gfx": "133Mhz",
    "clocks.mem": "901Mhz",
    "power.limit": "750.0",
}
NVIDIA_SMI = "580.159.04, 345 MHz, 2619 MHz, 1980 MHz, 700.00 W\n"
BY_NVIDIA_SMI = {
    "driver_version": "580.159.04",
    "clocks.sm": "345 MHz",
    "clocks.mem": "2619 MHz",
    "clocks.max.sm": "1980 MHz",
    "power.limit": "700.00 W",
}


def properties(number: int) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid.UUID(int=number))


@pytest.mark.parametrize(
    ("hip", "printed", "clocks"),
    [
        ("7.2.4", {"amd-smi": json.dumps({"gpu_data": [AMD_SMI]})}, BY_AMD_SMI),
        ("7.2.4", {"amd-smi": json.dumps([AMD_SMI])}, BY_AMD_SMI),  # older
        ("7.2.4", {"rocm-smi": json.dumps(ROCM_SMI)}, BY_ROCM_SMI),
        ("7.2.4", {"amd-smi": "no JSON", "rocm-smi": json.dumps(ROCM_SMI)}, BY_ROCM_SMI),
        ("7.2.4", {"amd-smi": '[{"clock": {"gfx_0": {"clk": "N/A"}}}]'}, {}),
        ("7.2.4", {}, {}),
        (None, {"nvidia-smi": NVIDIA_SMI, "rocm-smi": json.dumps(ROCM_SMI)}, BY_NVIDIA_SMI),
    ],
)
def test_a_gpus_stamp_is_in_its_makers_words(
    hip: str | None,
    printed: dict[str, str],
    clocks: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: Any, **options: Any) -> Any:
        if command[0] not in printed:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=printed[command[0]])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(timing, "source_commit", lambda: "0123")
    monkeypatch.setattr(
        timing, "installed_version", lambda name: "0.1" if name == "aiter" else "not installed"
    )
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3050000)
    found = timing.environment(torch.device("cuda"))
    always = {"commit": "0123", "torch": torch.__version__, "aiter": "0.1", "device": "a GPU"}
    library = {"cuDNN": "3050000"} if hip is None else {"HIP": hip, "MIOpen": "3050000"}
    assert found == {**always, **library, **clocks}


def test_clocks_are_those_of_the_gpu_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sees the host's GPUs 2 and 3 as 0 and 1."""
    clocks = [f"580.1, {1000 + i} MHz, 2619 MHz, 1980 MHz, 700.00 W" for i in range(4)]

    def run(command: Any, **options: Any) -> Any:
        lines = clocks
        if "-i" in command:
            name = command[command.index("-i") + 1]
            lines = [clocks[i] for i in range(4) if name == f"GPU-{properties(i).uuid}"]
        if not lines:
            raise subprocess.CalledProcessError(6, command)
        return SimpleNamespace(stdout="\n".join(lines) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties(2 + d.index))
    found = [timing._nvidia(torch.device("cuda", i)) for i in range(3)]
    assert [each.get("clocks.sm") for each in found] == ["1002 MHz", "1003 MHz", None]
