"""How the HIP run-time is found, and what is said when it is not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import liteattention_diffusers
import liteattention_rocm
from liteattention_e2e import tiny
from liteattention_rocm import (
    MI300X_GEOMETRY,
    SkipPolicy,
    TileGeometry,
    _core,
    collect_env,
    engines,
)
from liteattention_rocm.engines import LIBRARY_VARIABLE, gfx942
from liteattention_rocm.engines.gfx942 import manifest

from .calls import bf16, request_of
from .conftest import FakeHip


def has_run_time() -> bool:
    try:
        _core.HipLibrary("")
    except _core.HipUnavailable:
        return False
    return True


no_run_time = pytest.mark.skipif(has_run_time(), reason="this machine has a HIP run-time")


def test_a_run_time_is_known_by_its_file(gpu_hip: FakeHip, cpu_hip: FakeHip) -> None:
    gpu, cpu = gpu_hip.library(), cpu_hip.library()
    assert (gpu.path, gpu.emulated) == (gpu_hip.path, False)
    assert (cpu.path, cpu.emulated) == (cpu_hip.path, True)
    assert gpu.version() == "7.2.53211" and gpu.device_count() == 1
    gpu_hip.fail("hipInit", 719)
    with pytest.raises(_core.HipError, match=r"hipInit of .* failed: hipErrorLaunchFailure"):
        gpu.device_count()


def test_missing_functions_are_all_listed(build_fake: Callable[..., str]) -> None:
    path = build_fake("libfake_old.so", "-DFAKE_OMIT_LAUNCH")
    with pytest.raises(_core.HipUnavailable) as caught:
        _core.HipLibrary(path)
    text = str(caught.value)
    assert f"{path} lacks hipModuleGetFunction, hipModuleLaunchKernel:" in text
    assert "install PyTorch for ROCm" in text and "emulate --library" in text


@no_run_time
def test_no_run_time_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(_core.HipUnavailable) as caught:
        _core.HipLibrary("")
    text = str(caught.value)
    tried = ["none is loaded in this process", "libamdhip64.so.7: ", "libamdhip64.so.6: "]
    tried += ["libamdhip64.so: ", "LITEATTENTION_HIP_LIBRARY is not set"]
    for part in [*tried, "install PyTorch for ROCm", "`liteattention-rocm emulate --library`"]:
        assert part in text


def test_a_wrong_override_is_not_papered_over() -> None:
    with pytest.raises(_core.HipUnavailable) as caught:
        _core.HipLibrary("/nowhere/libhip.so")
    text = str(caught.value)
    assert text.startswith("cannot open the HIP run-time of LITEATTENTION_HIP_LIBRARY: /nowhere")
    assert "none is loaded" not in text


@no_run_time
def test_the_run_time_that_the_process_loaded_is_taken(
    build_fake: Callable[..., str], tmp_path: Path
) -> None:
    loaded = tmp_path / "libamdhip64-0a1b2c.so.6"  # wheels give their libraries such names
    loaded.write_bytes(Path(build_fake("libfake_hip.so")).read_bytes())
    script = (
        "import ctypes, sys; from liteattention_rocm import _core\n"
        "native = ctypes.CDLL(sys.argv[1]); print(_core.HipLibrary('').path)"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(loaded)], capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == str(loaded)


@no_run_time
@pytest.mark.parametrize("torch_library", ["libc10_hip.so", "libtorch_hip.so"])
def test_of_two_run_times_that_of_pytorch_is_taken(
    torch_library: str, build_fake: Callable[..., str], tmp_path: Path
) -> None:
    """Whatever was loaded first: streams and memory of one mean nothing to the other."""
    systems, torchs = tmp_path / "libamdhip64.so.7", tmp_path / "libamdhip64.so.6"
    for path in (systems, torchs):
        path.write_bytes(Path(build_fake("libfake_hip.so")).read_bytes())
    user = tmp_path / torch_library
    subprocess.run(
        ["cc", "-shared", "-o", user, f"-Wl,-soname,{torch_library}", "-Wl,--no-as-needed", torchs],
        check=True,
    )
    script = (
        "import ctypes, sys; from liteattention_rocm import _core\n"
        "native = [ctypes.CDLL(path) for path in sys.argv[1:]]; print(_core.HipLibrary('').path)"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(systems), str(user)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert made.stdout.strip() == str(torchs)


@no_run_time
def test_asking_for_the_engine_without_a_gpu_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    x = bf16(1, 4, 1, 64)
    with pytest.raises(ValueError) as caught:
        liteattention_rocm.attention(x, x, x, engine="gfx942")
    text = str(caught.value)
    assert text.startswith("engine 'gfx942' cannot run this: no HIP run-time (libamdhip64)")
    assert text.endswith("(use engine='cpu')")
    assert text.count("libamdhip64.so.7") == 1


def test_the_run_time_is_opened_on_first_use_only() -> None:
    script = (
        "import os; os.environ['LITEATTENTION_HIP_LIBRARY'] = '/nowhere'\n"
        "import torch, liteattention_rocm as la; x = torch.zeros(1, 1, 1, 64)\n"
        "la.attention(x, x, x)\n"
        "assert not any('amdhip' in line for line in open('/proc/self/maps'))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_refusals_list_every_reason(
    engine: gfx942.Gfx942Engine, gpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, 4, 1, 72)
    assert engine.reasons(request_of(x, x, causal=True, geometry=TileGeometry(128, 64, 16))) == [
        "dtype must be bf16 or fp16, got torch.float32",
        "LiteAttention is for non-causal self-attention",
        "head dim must be 64 or 128, got 72",
        "its tile is q_block 256, k_block 64, vote_rows 32, got 128, 64, 16",
    ]
    half = bf16(1, 4, 1, 64).half()
    assert engine.reasons(request_of(half, half, rounding="rtz", geometry=MI300X_GEOMETRY)) == [
        "rounding 'rtz' is for bf16 outputs: use 'rtne'"
    ]
    assert engine.reasons(request_of(half, half, kv_len=2**22 + 1)) == []
    good = bf16(1, 1, 1, 64)
    assert engine.reasons(request_of(good, good, causal=True)) == []  # one query sees every key
    for rows in (1, 2):
        causal = request_of(bf16(1, rows, 1, 256), good, causal=True)
        assert engine.reasons(causal) == []  # of the ragged kernels, which have D = 256
        assert engine.reasons(dataclasses.replace(causal, head_dim=72)) == [
            "head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got 72"
        ]
    on_gpu = request_of(good, good, device=torch.device("cuda:0"))
    assert "software MI300X, which takes cpu tensors" in engine.reasons(on_gpu)[0]

    monkeypatch.setenv(LIBRARY_VARIABLE, gpu_hip.path)
    engines.settings.cache_clear()
    (reason,) = engine.reasons(request_of(good, good))
    assert "it runs on an MI300X (gfx942), got tensors on cpu" in reason
    with pytest.raises(ValueError, match="CPU tensors need LITEATTENTION_HIP_LIBRARY"):
        engine.device(good.device)
    monkeypatch.setattr(gfx942.engine, "architecture", lambda device: "gfx1100")
    assert "cuda:0 of architecture gfx1100" in engine.reasons(on_gpu)[0]
    monkeypatch.setattr(gfx942.engine, "architecture", lambda device: "gfx942")
    assert engine.reasons(on_gpu) == []


def test_a_wrong_number_of_parts_is_refused_before_any_call() -> None:
    for wrong in (True, 2.0, "2", None):
        with pytest.raises(
            TypeError, match=f"kv_splits must be an int, got {type(wrong).__name__}"
        ):
            gfx942.Gfx942Engine(kv_splits=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="or more, got -1"):
        gfx942.Gfx942Engine(kv_splits=-1)


def test_geometry_is_the_kernels(engine: gfx942.Gfx942Engine) -> None:
    assert engine.geometry(128) == MI300X_GEOMETRY


def test_the_environment_report_names_the_run_time(
    cpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, cpu_hip.path)
    assert collect_env.collect()["hip run-time"] == f"software MI300X 7.2.53211, {cpu_hip.path}"
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libhip.so")
    engines.settings.cache_clear()
    assert collect_env.collect()["hip run-time"].startswith("none (cannot open the HIP run-time")
    built = manifest.read().compiler
    assert collect_env.collect()["gfx942 kernels"].endswith(
        f"{len(manifest.read().objects)} code objects, built by {built}"
    )


@no_run_time
def test_the_environment_report_says_in_a_line_that_there_is_no_run_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    engines.settings.cache_clear()
    assert collect_env.collect()["hip run-time"] == (
        "none (LITEATTENTION_HIP_LIBRARY is not set; none is loaded in this process; not found: "
        "libamdhip64.so.7, libamdhip64.so.6, libamdhip64.so)"
    )


def test_enable_takes_the_kernels_tile_and_no_other(engine: gfx942.Gfx942Engine) -> None:
    model = tiny.wan_transformer(head_dim=64).bfloat16()
    with liteattention_diffusers.enable(
        model, SkipPolicy(threshold=-6.0, warmup_steps=0), engine="gfx942"
    ):
        pass
    with pytest.raises(ValueError, match=r"blocks.0.attn1: engine 'gfx942': its tile is q_block 2"):
        geometry = TileGeometry(128, 64, 16)
        liteattention_diffusers.enable(
            model, SkipPolicy(threshold=-6.0, warmup_steps=0), geometry=geometry, engine="gfx942"
        )
    dense = SkipPolicy(enabled=False)
    with liteattention_diffusers.enable(model, dense, engine="gfx942", cross_attention=True):
        pass
    with pytest.raises(ValueError, match=r"layer blocks.1.attn2: .*dtype must be bf16"):
        liteattention_diffusers.enable(model.float(), dense, engine="gfx942", cross_attention=True)
