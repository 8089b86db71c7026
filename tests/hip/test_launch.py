"""What reaches the HIP run-time, byte for byte, and what must not."""

from __future__ import annotations

import math
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import liteattention_rocm
from liteattention_rocm import _core, engines, kernels
from liteattention_rocm.engines import AttentionSpec, gfx942

from .conftest import KERNELS, OBJECTS, FakeHip

LAUNCHING = {"hipModuleLaunchKernel", "hipHostRegister", "hipHostUnregister"}


def spec_of(q: torch.Tensor, k: torch.Tensor, layout: Any = "bshd", **changes: Any) -> Any:
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    fields = {
        "batch": q.shape[0],
        "q_heads": q.shape[heads],
        "kv_heads": k.shape[heads],
        "q_len": q.shape[rows],
        "kv_len": k.shape[rows],
        "head_dim": q.shape[-1],
        "dtype": q.dtype,
        "device": q.device,
        "layout": layout,
        "scale": 0.125,
        "causal": False,
        "rounding": "rtne",
        "return_lse": False,
    }
    return AttentionSpec(**(fields | changes))


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def launches(hip: FakeHip) -> list[tuple[dict[str, str], bytes]]:
    found = []
    for call in hip.of("hipModuleLaunchKernel"):
        name, *fields = call.split()
        data = fields.pop() if "=" not in fields[-1] else ""
        found.append((dict(f.split("=") for f in fields) | {"name": name}, bytes.fromhex(data)))
    return found


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("splits", [0, 3])
def test_kernels_get_exactly_these_bytes(
    cpu_hip: FakeHip,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    with_lse: bool,
    dim: int,
    splits: int,
) -> None:
    monkeypatch.setenv(gfx942.LIBRARY_VARIABLE, cpu_hip.path)
    monkeypatch.setattr(gfx942, "code_objects", lambda: OBJECTS)
    workspaces = []

    class Recorded(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = function(*args, **(kwargs or {}))
            if function is torch.empty:
                workspaces.append(made)
            return made

    # q and k are slices of one buffer with heads interleaved, as fused projections make them; v
    # has strides of its own
    batch, q_len, kv_len, q_heads, kv_heads = 2, 385, 200, 6, 2
    fused = bf16(batch, max(q_len, kv_len), q_heads + kv_heads, dim)
    q, k = fused.split([q_heads, kv_heads], dim=2)
    q, k = q[:, :q_len], k[:, :kv_len]
    v = bf16(batch, kv_len + 2, kv_heads + 1, dim)[:, 1:-1, :-1]
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.empty_like(q)
    lse = torch.empty(batch, q_heads, q_len) if with_lse else None
    spec = spec_of(q, k, layout, rounding="rtz", scale=-0.37)
    with Recorded():
        gfx942.Gfx942Engine(kv_splits=splits).attention(spec, q, k, v, out, lse)

    (workspace,) = workspaces
    base = workspace.data_ptr()
    v_t_bytes = batch * kv_heads * 4 * 64 * dim * 2
    tiles = batch * q_heads * 2
    tail, parts = (tiles, 3) if splits else (0, 1)
    part_out = base + v_t_bytes if splits else 0
    part_stats = part_out + tail * parts * 384 * dim * 4 if splits else 0
    assert workspace.numel() == v_t_bytes + tail * parts * (384 * dim * 4 + 2 * 384 * 4)

    def strides(x: torch.Tensor) -> tuple[int, int, int]:
        b, one, two, _ = x.stride()
        return (b, one, two) if layout == "bshd" else (b, two, one)

    lse_address = lse.data_ptr() if lse is not None else 0
    expected = [
        (
            f"transpose_v_bf16_d{dim}",
            batch * kv_heads * 4,
            256,
            struct.pack("<2Q3q4i", v.data_ptr(), base, *strides(v), batch, kv_heads, kv_len, 0),
        ),
        (
            f"attention_dense_bf16_d{dim}_rtz",
            tiles - tail + tail * parts,
            512,
            struct.pack(
                "<7Q9q5ifii",
                *(x.data_ptr() for x in (q, k)),
                base,
                out.data_ptr(),
                lse_address,
                part_out,
                part_stats,
                *strides(q),
                *strides(k),
                *strides(out),
                batch,
                q_heads,
                kv_heads,
                q_len,
                kv_len,
                -0.37 * math.log2(math.e),
                tiles - tail,
                parts,
            ),
        ),
    ]
    if splits:
        expected.append(
            (
                "merge_parts_bf16_rtz",
                tail * 384 // (256 * 8 // dim),
                256,
                struct.pack(
                    "<4Q3q6i",
                    part_out,
                    part_stats,
                    out.data_ptr(),
                    lse_address,
                    *strides(out),
                    batch,
                    q_heads,
                    q_len,
                    dim,
                    tiles - tail,
                    parts,
                ),
            )
        )
    seen = [(made["name"], made["grid"], made["block"], data) for made, data in launches(cpu_hip)]
    assert seen == [
        (name, f"{grid}x1x1", f"{block}x1x1", data) for name, grid, block, data in expected
    ]


def test_the_emulator_is_told_exactly_the_bytes_of_the_tensors(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    buffer = bf16(2, 10, 5, 128)
    q, k, v, out = buffer[:, 1:9, 2:4], bf16(2, 70, 1, 128), bf16(2, 70, 1, 128), bf16(2, 8, 2, 128)
    lse = torch.empty(2, 2, 8)
    engine.attention(spec_of(q, k), q, k, v, out, lse)
    spans = [tuple(map(int, call.split()[:2])) for call in cpu_hip.of("hipHostRegister")]
    whole = 2 * 70 * 128 * 2
    last_element = (1 * 10 * 5 + 7 * 5 + 1) * 128 + 128
    assert spans[:5] == [
        (q.data_ptr(), last_element * 2),
        (k.data_ptr(), whole),
        (v.data_ptr(), whole),
        (out.data_ptr(), 2 * 8 * 2 * 128 * 2),
        (lse.data_ptr(), 2 * 2 * 8 * 4),
    ]
    assert len(spans) == 6 and spans[5][1] == 2 * 128 * 128 * 2  # V_t: two blocks per head
    undone = [int(call) for call in cpu_hip.of("hipHostUnregister")]
    assert undone == [address for address, _ in reversed(spans)]
    order = [call.split()[0] for call in cpu_hip.calls if call.split()[0] in LAUNCHING]
    assert (
        order == ["hipHostRegister"] * 6 + ["hipModuleLaunchKernel"] * 2 + ["hipHostUnregister"] * 6
    )


def run_on_stream(device: _core.Gfx942Device, stream: int, splits: int = 1) -> None:
    """Launch with addresses that nothing reads: the run-time is a fake."""
    shape = _core.DenseShape(1, 1, 1, 100, 200, 128)
    plan = _core.plan_dense(shape, device.compute_units, splits)
    request = _core.DenseRequest()
    request.set_pointers(0x1000, 0x2000, 0x3000, 0x4000, 0)
    request.set_strides(*([(12800, 128, 128)] * 4))
    device.attention(plan, request, 0x10000, stream)


def test_every_launch_goes_to_the_callers_stream_and_nothing_waits(gpu_hip: FakeHip) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    before = len(gpu_hip.calls)
    run_on_stream(device, 0xABCD0, splits=2)
    run_on_stream(device, 0)
    device.plan_lpt(0x1000, 0, 0, 0x2000, 3, 5, 1, 77)
    streams = [made["stream"] for made, _ in launches(gpu_hip)]
    assert streams == [str(0xABCD0)] * 3 + ["0"] * 2 + ["77"]
    # and that is all: no allocation, copy, wait, module load or look-up
    assert {call.split()[0] for call in gpu_hip.calls[before:]} == {"hipModuleLaunchKernel"}


def test_the_engine_passes_pytorchs_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 0x5EED

    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: asked.append(d) or Stream())
    assert gfx942._stream(torch.device("cuda:1")) == 0x5EED
    assert asked == [torch.device("cuda:1")]
    assert gfx942._stream(torch.device("cpu")) == 0


def test_modules_are_loaded_once_per_device(
    gpu_hip: FakeHip, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_hip.devices(2)
    monkeypatch.setenv(gfx942.LIBRARY_VARIABLE, gpu_hip.path)
    monkeypatch.setattr(gfx942, "code_objects", lambda: OBJECTS)
    owner = [gfx942.Gfx942Engine()]
    barrier = threading.Barrier(8)

    def ask(index: int) -> None:
        barrier.wait()
        for _ in range(5):
            run_on_stream(owner[0].device(torch.device("cuda", index % 2)), 0)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads = sorted(gpu_hip.of("hipModuleLoadData"))
    assert loads == [f"device={i} magic=7fELF" for i in (0, 0, 1, 1)]
    assert len(gpu_hip.of("hipModuleGetFunction")) == 2 * len(KERNELS)
    made = [launch for launch, _ in launches(gpu_hip)]
    assert sorted(launch["device"] for launch in made) == ["0"] * 40 + ["1"] * 40
    owner.clear()
    assert len(gpu_hip.of("hipModuleUnload")) == 4


def test_the_threads_own_device_is_put_back(gpu_hip: FakeHip) -> None:
    gpu_hip.devices(2)
    device = _core.Gfx942Device(gpu_hip.library(), 1, OBJECTS)
    run_on_stream(device, 0)
    assert gpu_hip.of("hipSetDevice") == ["1", "0", "1", "0"]
    assert all(made["device"] == "1" for made, _ in launches(gpu_hip))


def test_a_failed_launch_names_the_error_and_the_kernel(
    gpu_hip: FakeHip, cpu_hip: FakeHip, engine: gfx942.Gfx942Engine
) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    gpu_hip.fail("hipModuleLaunchKernel", 719)
    with pytest.raises(_core.HipError) as caught:
        run_on_stream(device, 0)
    assert str(caught.value) == (
        "launch of transpose_v_bf16_d128 failed: hipErrorLaunchFailure (719): "
        "unspecified launch failure"
    )
    assert gpu_hip.calls[-1] == "hipGetLastError"  # PyTorch must not find it and blame itself

    cpu_hip.fail("hipModuleLaunchKernel", 719)
    x = bf16(1, 8, 1, 64)
    with pytest.raises(_core.HipError, match="LDS race: wave 3 reads dword 17"):
        engine.attention(spec_of(x, x), x, x, x, torch.empty_like(x), None)
    assert len(cpu_hip.of("hipHostRegister")) == len(cpu_hip.of("hipHostUnregister")) == 5


def test_a_code_object_for_another_gpu_is_refused_by_name(gpu_hip: FakeHip) -> None:
    gpu_hip.fail("hipModuleLoadData", 209)
    with pytest.raises(_core.HipError) as caught:
        _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    assert "hipModuleLoadData of attention.co failed: hipErrorNoBinaryForGpu (209)" in str(
        caught.value
    )
    gpu_hip.native.fake_reset()
    gpu_hip.fail("hipModuleGetFunction", 209)
    with pytest.raises(_core.HipError, match=r"of transpose_v_bf16_d64 in attention\.co"):
        _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    assert len(gpu_hip.of("hipModuleUnload")) == 1


def test_code_objects_of_another_build_are_refused_with_every_reason(gpu_hip: FakeHip) -> None:
    kernels = [(name, size + 8 if "rtz" in name else size) for name, size in KERNELS[:-1]]
    with pytest.raises(ValueError) as caught:
        _core.Gfx942Device(gpu_hip.library(), 0, [("all.co", b"x", kernels)])
    text = str(caught.value)
    assert "attention_dense_bf16_d64_rtz takes 168 bytes, this build passes 160" in text
    assert "merge_parts_bf16_rtz takes 88 bytes" in text and "no kernel plan_lpt" in text
    assert not gpu_hip.of("hipModuleLoadData")
    with pytest.raises(ValueError, match=r"no device 3: .* sees 1"):
        _core.Gfx942Device(gpu_hip.library(), 3, OBJECTS)


def test_rows_off_the_dword_grid_are_refused_with_every_reason(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    good = bf16(1, 8, 2, 64)
    odd = torch.empty(1 * 8 * 131 + 1, dtype=torch.bfloat16)
    shifted = odd[1:].as_strided(good.shape, (1048, 131, 64, 1))
    stepped = odd.as_strided(good.shape, (1048, 130, 65, 1))
    with pytest.raises(ValueError) as caught:
        engine.attention(spec_of(good, good), shifted, stepped, good, good.clone(), None)
    text = str(caught.value)
    assert "every row of q must" in text and "every row of k must" in text
    assert "every row of v" not in text and "every row of out" not in text
    assert not launches(cpu_hip)
    # a stride that is never stepped over does not matter
    one = odd.as_strided((1, 8, 1, 64), (1048, 130, 65, 1))
    engine.attention(spec_of(one, one), one, one, one, good[:, :, :1].clone(), None)
    assert len(launches(cpu_hip)) == 2


def test_keys_too_far_apart_for_32_bits_are_refused(gpu_hip: FakeHip) -> None:
    device = _core.Gfx942Device(gpu_hip.library(), 0, OBJECTS)
    far = 2**31 - 128
    for kv_len, apart in ((2, far), (2, far + 2), (1, far + 2)):
        plan = _core.plan_dense(_core.DenseShape(1, 1, 1, 4, kv_len, 64), 304, 1)
        request = _core.DenseRequest()
        request.set_pointers(0x1000, 0x2000, 0x3000, 0x4000, 0)
        request.set_strides((0, 64, 64), (0, apart, 64), (0, far + 2, 64), (0, far + 2, 64))
        if kv_len > 1 and apart > far:
            with pytest.raises(ValueError, match=f"k must be at most {far} elements apart, got"):
                device.attention(plan, request, 0x10000, 0)
        else:
            device.attention(plan, request, 0x10000, 0)
    assert len(launches(gpu_hip)) == 4


def test_damaged_code_objects_are_refused_with_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "DIRECTORY", tmp_path)
    monkeypatch.setattr(kernels, "manifest", kernels.manifest.__wrapped__)
    with pytest.raises(ValueError, match="this installation has no gfx942 code objects"):
        gfx942.code_objects()
    for file in Path(kernels.__file__).parent.glob("*.co"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = Path(kernels.__file__).with_name("manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(stored)
    whole = gfx942.code_objects()
    assert dict(kernel for _, _, names in whole for kernel in names) == dict(KERNELS)
    (tmp_path / "attention_dense.co").write_bytes(whole[0][1][:-1] + b"?")
    (tmp_path / "plan_lpt.co").unlink()
    with pytest.raises(ValueError) as caught:
        gfx942.code_objects()
    text = str(caught.value)
    assert "attention_dense.co has SHA-256" in text and "plan_lpt.co" in text
    assert "merge_parts.co" not in text
    (tmp_path / "manifest.json").write_text(stored.replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match=r"no gfx942 code objects: .*format 7"):
        gfx942.code_objects()


def test_the_lpt_kernel_gets_exactly_these_bytes(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    skip = torch.zeros(2, 3, 700, 2, dtype=torch.int32)
    must_skip = torch.zeros(2, dtype=torch.int32)
    order = engine.order_longest_first(skip, must_skip=must_skip)
    assert order.shape == (2, 3, 700) and order.dtype == torch.int32
    ((made, data),) = launches(cpu_hip)
    assert (made["name"], made["grid"], made["block"]) == ("plan_lpt", "18x1x1", "256x1x1")
    assert data == struct.pack(
        "<4Q4i", skip.data_ptr(), 0, must_skip.data_ptr(), order.data_ptr(), 6, 700, 2, 0
    )
    assert cpu_hip.of("hipHostRegister") == [
        f"{skip.data_ptr()} {6 * 700 * 8} 0",
        f"{must_skip.data_ptr()} 8 0",
        f"{order.data_ptr()} {6 * 700 * 4} 0",
    ]


def test_gpu_tensors_on_a_gfx942_take_this_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engines.ENGINE_VARIABLE, raising=False)
    found = {0: "gfx942", 1: "gfx90a"}
    monkeypatch.setattr(engines, "architecture", lambda device: found[device.index])
    assert engines.choose("cuda:0").name == "gfx942"
    with pytest.raises(ValueError, match="device type 'cuda' with architecture gfx90a"):
        engines.choose("cuda:1")
    assert engines.choose("cpu").name == "cpu"


def test_architecture_is_the_compilers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"
        major, minor = 9, 4

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    for hip, expected in (("6.4", "gfx942"), (None, "sm_94")):
        engines._architecture.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        assert engines.architecture(torch.device("cuda:0")) == expected
    engines._architecture.cache_clear()
    assert engines.architecture(torch.device("cpu")) == ""


def test_compiled_calls_are_one_opaque_operator(
    engine: gfx942.Gfx942Engine, cpu_hip: FakeHip
) -> None:
    def two_layers(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first = liteattention_rocm.attention(q, k, k, engine="gfx942")
        return liteattention_rocm.attention(first, k, k, scale=2.0, engine="gfx942")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(two_layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for q_len, kv_len in ((5, 70), (9, 130), (400, 3)):
        compiled(bf16(1, q_len, 4, 64), bf16(1, kv_len, 2, 64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    denses = [data for made, data in launches(cpu_hip) if made["name"].startswith("attention")]
    assert [struct.unpack_from("<ii", data, 140) for data in denses] == [
        lengths for lengths in ((5, 70), (9, 130), (400, 3)) for _ in range(2)
    ]
    with pytest.raises(Exception, match="dtype must be bf16"):
        compiled(torch.zeros(1, 5, 4, 64), torch.zeros(1, 5, 2, 64))


def test_operator_passes_opcheck(engine: gfx942.Gfx942Engine) -> None:
    q, out = bf16(1, 5, 4, 64), torch.zeros(1, 5, 4, 64, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.liteattention_rocm.attention.default,
        (q, q, q, out, torch.zeros(1, 4, 5), "bshd", 0.125, False, "rtne", "gfx942"),
        test_utils=("test_schema", "test_faketensor"),
    )
