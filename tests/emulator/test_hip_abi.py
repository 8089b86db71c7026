"""The HIP functions of the emulator's library, as a host program calls them."""

import ctypes
import subprocess
import threading
from ctypes import byref, c_char, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liteattention_emulator as emulator

from .hip_calls import (
    DEFAULT,
    INVALID_CONFIGURATION,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    LAUNCH_FAILURE,
    NO_BINARY,
    NOT_FOUND,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    ON_DEVICE,
    OUT_OF_MEMORY,
    OUT_OF_RESOURCES,
    SUCCESS,
    TO_DEVICE,
    TO_HOST,
    allocate,
    function,
    launch,
    read,
)
from .toolchain import build_hip, compile_hip

SOURCE = Path(__file__).with_name("machine_kernels.hip")

FUNCTIONS = set(
    """
hipInit hipGetDeviceCount hipGetDevice hipSetDevice hipDeviceGetAttribute
hipGetDevicePropertiesR0600 hipRuntimeGetVersion hipDriverGetVersion hipModuleLoadData
hipModuleUnload hipModuleGetFunction hipModuleLaunchKernel hipFuncGetAttribute hipMalloc hipFree
hipMemcpy hipMemcpyAsync hipMemset hipMemsetAsync hipStreamCreate hipStreamDestroy
hipStreamSynchronize hipDeviceSynchronize hipEventCreate hipEventDestroy hipEventRecord
hipEventSynchronize hipEventElapsedTime hipHostRegister hipHostUnregister hipHostGetDevicePointer
hipPointerGetAttributes hipGetErrorName hipGetErrorString hipGetLastError
hipStreamCreateWithFlags hipStreamQuery hipEventQuery hipLaunchHostFunc
hipStreamBeginCapture hipStreamEndCapture hipStreamIsCapturing hipStreamGetCaptureInfo
hipStreamGetCaptureInfo_v2 hipThreadExchangeStreamCaptureMode hipGraphGetNodes hipGraphNodeGetType
hipGraphInstantiate hipGraphInstantiateWithFlags hipGraphLaunch hipGraphExecDestroy hipGraphDestroy
""".split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_hip(SOURCE)


def test_exports_are_the_interface_and_nothing_else() -> None:
    command = ["nm", "-D", "--defined-only", str(emulator.library())]  # of binutils, as g++ needs
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in text.splitlines()}
    assert {name for name in names if not name.startswith("lae_")} == FUNCTIONS
    assert {"lae_abi_version", "lae_last_report"} < names


def test_the_device(hip: Any) -> None:
    number = c_int(-1)
    assert hip.hipInit(0) == SUCCESS and hip.hipInit(1) == INVALID_VALUE
    assert hip.hipGetDeviceCount(byref(number)) == SUCCESS and number.value == 1
    assert hip.hipGetDevice(byref(number)) == SUCCESS and number.value == 0
    assert hip.hipSetDevice(0) == SUCCESS and hip.hipSetDevice(1) == INVALID_DEVICE
    # MultiprocessorCount, WarpSize, MaxThreadsPerBlock, compute capability, LDS.
    for attribute, value in ((63, 304), (87, 64), (56, 1024), (23, 9), (61, 4), (74, 65536)):
        assert hip.hipDeviceGetAttribute(byref(number), attribute, 0) == SUCCESS
        assert number.value == value
    assert hip.hipDeviceGetAttribute(byref(number), 63, 1) == INVALID_DEVICE
    assert hip.hipDeviceGetAttribute(byref(number), 4096, 0) == INVALID_VALUE
    for name in ("hipRuntimeGetVersion", "hipDriverGetVersion"):
        assert getattr(hip, name)(byref(number)) == SUCCESS
        assert number.value // 10_000_000 == 6
    assert hip.lae_abi_version() == 1


def test_properties_lie_where_hip_has_them(hip: Any) -> None:
    raw = (c_char * 1472)()
    guard = (c_char * 1480).from_buffer_copy(b"\xaa" * 1480)
    assert hip.hipGetDevicePropertiesR0600(byref(guard), 0) == SUCCESS
    assert bytes(guard)[1472:] == b"\xaa" * 8
    raw.raw = bytes(guard)[:1472]
    integer = lambda at: int.from_bytes(raw.raw[at : at + 4], "little")  # noqa: E731
    assert raw.raw[1160:].split(b"\0")[0] == b"gfx942:sramecc+:xnack-"
    assert raw.raw.startswith(b"AMD Instinct MI300X")
    assert int.from_bytes(raw.raw[288:296], "little") == 192 << 30
    assert (integer(308), integer(320), integer(388)) == (64, 1024, 304)


def test_errors_have_names_and_are_remembered(hip: Any) -> None:
    assert hip.hipGetErrorName(LAUNCH_FAILURE) == b"hipErrorLaunchFailure"
    assert hip.hipGetErrorString(SUCCESS) == b"no error"
    assert hip.hipGetErrorName(12345) == b"hipErrorUnknown"
    assert hip.hipSetDevice(7) == INVALID_DEVICE
    assert hip.hipSetDevice(0) == SUCCESS
    assert hip.hipGetLastError() == INVALID_DEVICE
    assert hip.hipGetLastError() == SUCCESS
    seen = []
    hip.hipSetDevice(7)
    thread = threading.Thread(target=lambda: seen.append(hip.hipGetLastError()))
    thread.start()
    thread.join()
    assert seen == [SUCCESS]  # of the calling thread


def test_modules(hip: Any, image: bytes) -> None:
    module, kernel = c_void_p(), c_void_p()
    assert hip.hipModuleLoadData(byref(module), bytes(200)) == INVALID_IMAGE
    assert b"neither an ELF" in hip.lae_last_report()
    other = build_hip(SOURCE, "--offload-arch=gfx90a", "--no-gpu-bundle-output", "-O1")
    assert hip.hipModuleLoadData(byref(module), other) == NO_BINARY
    assert hip.hipModuleLoadData(None, image) == INVALID_VALUE
    assert hip.hipModuleLoadData(byref(module), image) == SUCCESS
    assert hip.hipModuleGetFunction(byref(kernel), module, b"nothing") == NOT_FOUND
    assert hip.hipModuleGetFunction(byref(kernel), module, b"reverse") == SUCCESS
    value = c_int()
    for attribute, expected in ((0, 512), (1, 2048), (3, 0), (8, 65536 - 2048)):
        assert hip.hipFuncGetAttribute(byref(value), attribute, kernel) == SUCCESS
        assert value.value == expected
    assert hip.hipModuleUnload(module) == SUCCESS
    assert hip.hipModuleUnload(module) == INVALID_HANDLE
    assert launch(hip, kernel, 64, c_void_p(), c_uint()) == INVALID_HANDLE
    assert hip.hipModuleGetFunction(byref(kernel), module, b"reverse") == INVALID_HANDLE


def test_both_ways_to_pass_arguments(hip: Any, image: bytes) -> None:
    kernel = function(hip, image, "reverse")
    start = np.arange(128, dtype=np.uint32)
    results = []
    for packed in (False, True):
        data = allocate(hip, 512)
        assert hip.hipMemcpy(data, start.ctypes.data, 512, TO_DEVICE) == SUCCESS
        if packed:
            buffer = (c_char * 12).from_buffer_copy(
                int(data.value or 0).to_bytes(8, "little") + (3).to_bytes(4, "little")
            )
            size = c_size_t(12)
            extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 3)
            sizes = (2, 1, 1, 64, 1, 1)
            error = hip.hipModuleLaunchKernel(kernel, *sizes, 256, None, None, extra)
        else:
            error = launch(hip, kernel, 64, data, c_uint(3), grid=2, lds=256)
        assert error == SUCCESS, hip.lae_last_report()
        results.append(read(hip, data, "u4", 128).tolist())
        assert hip.hipFree(data) == SUCCESS
    assert results[0] == results[1] != start.tolist()


def test_an_argument_buffer_that_ends_too_early(hip: Any, image: bytes) -> None:
    """A run-time copies what the metadata declares, whatever lies behind a shorter buffer."""
    kernel, data = function(hip, image, "reverse"), allocate(hip, 512)
    assert hip.hipMemset(data, 0, 512) == SUCCESS
    buffer = (c_char * 64).from_buffer_copy(
        int(data.value or 0).to_bytes(8, "little") + (3).to_bytes(56, "little")
    )
    for passed, error in ((8, INVALID_VALUE), (11, INVALID_VALUE), (12, SUCCESS), (64, SUCCESS)):
        size = c_size_t(passed)
        extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 3)
        sizes = (2, 1, 1, 64, 1, 1)
        assert hip.hipModuleLaunchKernel(kernel, *sizes, 256, None, None, extra) == error
        report = hip.lae_last_report().decode()
        assert bool(report) == bool(error)
        assert not error or (f"has {passed} bytes" in report and "bytes 8 to 12" in report)


def test_refused_launches(hip: Any, image: bytes) -> None:
    kernel, data = function(hip, image, "reverse"), allocate(hip, 4096)
    assert launch(hip, kernel, 64, data, c_uint(1), lds=70000) == OUT_OF_RESOURCES
    assert launch(hip, kernel, 1024, data, c_uint(1)) == INVALID_CONFIGURATION
    assert b"at most 512" in hip.lae_last_report()
    assert launch(hip, kernel, 0, data, c_uint(1)) == INVALID_CONFIGURATION
    assert launch(hip, kernel, 64, data) == INVALID_VALUE  # an argument is missing
    assert hip.hipModuleLaunchKernel(kernel, *[1] * 6, 0, None, None, None) == INVALID_VALUE
    assert hip.hipModuleLaunchKernel(data, *[1] * 6, 0, None, None, None) == INVALID_HANDLE
    missing = function(hip, image, "not_emulated")
    assert launch(hip, missing, 64, data) == NOT_SUPPORTED
    assert b"s_rfe_b64" in hip.lae_last_report()
    assert hip.hipGetLastError() == NOT_SUPPORTED


def test_stray_accesses_fail_the_launch(
    hip: Any, image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, data = function(hip, image, "all_emulated"), allocate(hip, 252)
    assert launch(hip, kernel, 64, data) == LAUNCH_FAILURE
    report = hip.lae_last_report().decode()
    assert "out of bounds" in report and "global_store_dword" in report
    assert read(hip, data, "u4", 63).tolist() == [1] * 63  # those inside are done
    assert launch(hip, kernel, 63, data) == SUCCESS
    assert hip.lae_last_report() == b""
    monkeypatch.setenv("LITEATTENTION_EMULATOR_CHECK", "off")
    assert launch(hip, kernel, 64, data) == SUCCESS
    assert hip.hipFree(data) == SUCCESS


def test_never_written_memory(hip: Any, image: bytes) -> None:
    kernel, data, other = function(hip, image, "halve"), allocate(hip, 256), allocate(hip, 256)
    assert hip.hipMemcpy(other, data, 256, ON_DEVICE) == SUCCESS  # copies the flaw
    for pointer in (data, other):
        assert launch(hip, kernel, 64, pointer) == LAUNCH_FAILURE
        assert b"undefined" in hip.lae_last_report()
    assert hip.hipMemset(data, 0, 128) == SUCCESS
    assert launch(hip, kernel, 32, data) == SUCCESS
    assert launch(hip, kernel, 64, allocate(hip, 256)) == LAUNCH_FAILURE
    ones = np.ones(64, np.float32)
    assert hip.hipMemcpy(data, ones.ctypes.data, 256, TO_DEVICE) == SUCCESS
    assert hip.hipMemcpy(other, data, 256, DEFAULT) == SUCCESS
    assert launch(hip, kernel, 64, other) == SUCCESS
    assert read(hip, other, "f4", 64).tolist() == [0.5] * 64


def test_memory_calls(hip: Any) -> None:
    data, host = allocate(hip, 1000), np.zeros(1000, np.uint8)
    assert (data.value or 0) % 256 == 0
    assert hip.hipMemset(data, 7, 1001) == INVALID_VALUE
    assert hip.hipMemset(data, 7, 1000) == SUCCESS
    assert hip.hipMemcpy(host.ctypes.data, data, 1001, TO_HOST) == INVALID_VALUE
    assert hip.hipMemcpy(data, host.ctypes.data, 8, ON_DEVICE) == INVALID_VALUE
    assert hip.hipMemcpy(host.ctypes.data, data, 1000, TO_HOST) == SUCCESS
    assert (host == 7).all()
    assert hip.hipMemcpy(data, host.ctypes.data, 8, 9) == 21  # InvalidMemcpyDirection
    pointer = c_void_p(1)
    assert hip.hipMalloc(byref(pointer), c_size_t(0)) == SUCCESS and pointer.value is None
    assert hip.hipMalloc(byref(pointer), c_size_t(193 << 30)) == OUT_OF_MEMORY
    assert hip.hipFree(None) == SUCCESS
    assert hip.hipFree(host.ctypes.data) == INVALID_VALUE
    assert hip.hipFree(data) == SUCCESS and hip.hipFree(data) == INVALID_VALUE


class Attributes(ctypes.Structure):
    _fields_ = [("type", c_int), ("device", c_int), ("devicePointer", c_void_p)]
    _fields_ += [("hostPointer", c_void_p), ("isManaged", c_int), ("flags", c_uint)]


def test_registered_memory(hip: Any, image: bytes) -> None:
    kernel, host = function(hip, image, "halve"), np.full(128, 8, np.float32)
    half = c_void_p(host.ctypes.data + 256)
    attributes, device = Attributes(), c_void_p()

    def kind(pointer: Any) -> int:
        assert hip.hipPointerGetAttributes(byref(attributes), pointer) == SUCCESS
        return int(attributes.type)

    assert launch(hip, kernel, 64, half) == LAUNCH_FAILURE
    assert hip.hipHostUnregister(half) == NOT_REGISTERED
    assert kind(half) == 0
    assert hip.hipHostRegister(host.ctypes.data, 512, 0) == SUCCESS
    assert hip.hipHostRegister(half, 256, 0) == SUCCESS  # nested
    assert hip.hipHostRegister(half, 256, 0) == SUCCESS  # twice
    assert kind(half) == 1
    assert hip.hipHostGetDevicePointer(byref(device), half, 0) == SUCCESS
    assert device.value == half.value
    assert launch(hip, kernel, 64, half) == SUCCESS
    assert hip.hipHostUnregister(c_void_p(host.ctypes.data)) == SUCCESS
    assert launch(hip, kernel, 64, half) == SUCCESS
    assert launch(hip, kernel, 64, c_void_p(host.ctypes.data)) == LAUNCH_FAILURE
    assert hip.hipHostUnregister(half) == SUCCESS
    assert launch(hip, kernel, 64, half) == SUCCESS
    assert hip.hipHostUnregister(half) == SUCCESS
    assert launch(hip, kernel, 64, half) == LAUNCH_FAILURE
    assert host[64:].tolist() == [1.0] * 64
    data = allocate(hip, 64)
    assert kind(data) == 2
    assert hip.hipHostRegister(data, 64, 0) == INVALID_VALUE
    assert hip.hipHostRegister(None, 64, 0) == INVALID_VALUE


def test_streams_and_events(hip: Any, image: bytes) -> None:
    stream, first, last = c_void_p(), c_void_p(), c_void_p()
    assert hip.hipStreamCreate(byref(stream)) == SUCCESS
    for event in (first, last):
        assert hip.hipEventCreate(byref(event)) == SUCCESS
    elapsed = c_float(-1)
    assert hip.hipEventElapsedTime(byref(elapsed), first, last) == INVALID_HANDLE
    assert hip.hipEventRecord(first, stream) == SUCCESS
    data = allocate(hip, 64)
    assert hip.hipMemsetAsync(data, 3, c_size_t(64), stream) == SUCCESS
    assert hip.hipMemcpyAsync(data, data, c_size_t(64), ON_DEVICE, stream) == SUCCESS
    assert hip.hipEventRecord(last, stream) == SUCCESS
    assert hip.hipEventSynchronize(last) == SUCCESS
    assert hip.hipStreamSynchronize(stream) == SUCCESS
    assert hip.hipStreamSynchronize(None) == SUCCESS and hip.hipDeviceSynchronize() == SUCCESS
    assert hip.hipEventElapsedTime(byref(elapsed), first, last) == SUCCESS
    assert elapsed.value >= 0
    assert hip.hipStreamDestroy(stream) == SUCCESS
    assert hip.hipStreamSynchronize(stream) == INVALID_HANDLE
    kernel = function(hip, image, "all_emulated")
    assert hip.hipModuleLaunchKernel(kernel, *[1] * 6, 0, stream, None, None) == INVALID_HANDLE
    for event in (first, last):
        assert hip.hipEventDestroy(event) == SUCCESS
        assert hip.hipEventDestroy(event) == INVALID_HANDLE


def test_launches_from_several_threads(hip: Any, image: bytes) -> None:
    """Each thread has its own report; unloading a module does not pull it from under a launch."""
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            module, kernel = c_void_p(), c_void_p()
            hip.hipModuleLoadData(byref(module), image)
            hip.hipModuleGetFunction(byref(kernel), module, b"halve")
            values = np.full(64, number, np.float32)
            size = 256 if number % 2 else 128  # even threads see a finding
            hip.hipHostRegister(values.ctypes.data, size, 0)
            error = launch(hip, kernel, 64, c_void_p(values.ctypes.data))
            report = hip.lae_last_report()
            hip.hipHostUnregister(values.ctypes.data)
            hip.hipModuleUnload(module)
            done = 64 if number % 2 else 32
            expected = [number / 2] * done + [number] * (64 - done)
            good = error == (SUCCESS if number % 2 else LAUNCH_FAILURE)
            if not good or values.tolist() != expected or bool(report) == bool(number % 2):
                failures.append(f"{number}: {error} {report.decode()}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
