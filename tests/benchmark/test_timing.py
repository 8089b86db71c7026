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


def amd_smi(gpu: int, gfx: int) -> dict[str, Any]:
    return {
        "clock": {
            "gfx_0": {"clk": clock(gfx), "min_clk": clock(500), "max_clk": clock(2100)},
            "gfx_1": {"clk": clock(140), "min_clk": clock(500), "max_clk": clock(2100)},
            "mem_0": {"clk": clock(900), "min_clk": clock(900), "max_clk": clock(1300)},
        },
        "gpu": gpu,
    }


#: What the tools of AMD and NVIDIA print, cut down. AMD's name the GPU in use as the second.
AMD_LIST = [{"gpu": 0, "bdf": "0000:05:00.0"}, {"gpu": 1, "bdf": "0000:0c:00.0"}]
AMD_SMI = [amd_smi(0, 2100), amd_smi(1, 132)]
BY_AMD_SMI = {"clocks.gfx": "132 MHz", "clocks.mem": "900 MHz", "clocks.max.gfx": "2100 MHz"}
ROCM_SMI = {
    "card0": {
        "sclk clock speed:": "(2100Mhz)",
        "mclk clock speed:": "(1300Mhz)",
        "PCI Bus": "0000:05:00.0",
    },
    "card1": {
        "sclk clock speed:": "(133Mhz)",
        "sclk clock level:": "1",
        "mclk clock speed:": "(901Mhz)",
        "Max Graphics Package Power (W)": "750.0",
        "PCI Bus": "0000:0C:00.0",
    },
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


def properties(number: int, bus: int = 0x0C) -> SimpleNamespace:
    address = {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
    return SimpleNamespace(uuid=uuid.UUID(int=number), **address)


def by_amd_smi(gpus: Any, clocks: Any) -> dict[str, str]:
    return {"amd-smi list": json.dumps(gpus), "amd-smi metric": json.dumps(clocks)}


def prints(printed: dict[str, str]) -> Any:
    """A ``subprocess.run`` of commands that begin with these words."""

    def run(command: Any, **options: Any) -> Any:
        for words, text in printed.items():
            if " ".join(command).startswith(words):
                return SimpleNamespace(stdout=text)
        raise FileNotFoundError(command[0])

    return run


@pytest.mark.parametrize(
    ("hip", "printed", "clocks"),
    [
        ("7.2.4", by_amd_smi(AMD_LIST, {"gpu_data": AMD_SMI}), BY_AMD_SMI),
        ("7.2.4", by_amd_smi(AMD_LIST, AMD_SMI), BY_AMD_SMI),  # older
        ("7.2.4", {"rocm-smi": json.dumps(ROCM_SMI)}, BY_ROCM_SMI),
        ("7.2.4", {"amd-smi": "no JSON", "rocm-smi": json.dumps(ROCM_SMI)}, BY_ROCM_SMI),
        ("7.2.4", by_amd_smi(AMD_LIST, [{"gpu": 1, "clock": {"gfx_0": {"clk": "N/A"}}}]), {}),
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
    monkeypatch.setattr(subprocess, "run", prints(printed))
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


@pytest.mark.parametrize("tool", ["amd-smi", "rocm-smi"])
def test_clocks_are_those_of_the_amd_gpu_that_is_measured(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process sees the host's GPUs 1 and 0 as 0 and 1, and others that are not told apart."""
    partitions = [{"gpu": 2 + i, "bdf": f"0000:26:00.{i}"} for i in range(2)]
    clocks = [*AMD_SMI, amd_smi(2, 500), amd_smi(3, 500)]
    card = {"sclk clock speed:": "(500Mhz)", "mclk clock speed:": "(900Mhz)"}
    cards = {f"card{gpu['gpu']}": {**card, "PCI Bus": gpu["bdf"]} for gpu in partitions}
    answers = {
        "amd-smi": by_amd_smi([*AMD_LIST, *partitions], {"gpu_data": clocks}),
        "rocm-smi": {"rocm-smi": json.dumps({**ROCM_SMI, **cards})},
    }
    monkeypatch.setattr(subprocess, "run", prints(answers[tool]))
    buses = (0x0C, 0x05, 0x26, 0x45)  # of two partitions of one GPU, and of one in no answer
    seen = [properties(0, bus) for bus in buses] + [SimpleNamespace(uuid=uuid.UUID(int=0))]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: seen[d.index])
    found = [timing._amd(torch.device("cuda", i)).get("clocks.gfx") for i in range(len(seen))]
    here = {"amd-smi": ["132 MHz", "2100 MHz"], "rocm-smi": ["133Mhz", "2100Mhz"]}
    assert found == [*here[tool], None, None, None]
