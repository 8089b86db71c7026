"""Stream capture and graphs: what a graph holds, what its launches read, what a capture forbids.

Error codes are those of HIP's documentation and of its run-time for AMD GPUs.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import liteattention_emulator as emulator

from .hip_calls import (
    CAPTURED_EVENT,
    DEFAULT,
    ILLEGAL_STATE,
    IMPLICIT,
    INVALID_CONFIGURATION,
    INVALID_HANDLE,
    INVALID_VALUE,
    INVALIDATED,
    LAUNCH_FAILURE,
    ON_DEVICE,
    SUCCESS,
    TO_DEVICE,
    UNSUPPORTED,
    WRONG_THREAD,
    allocate,
    function,
    launch,
    read,
)
from .toolchain import compile_hip

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, INVALID = range(3)
KERNEL, MEMCPY, MEMSET, HOST, GRAPH = range(5)


@pytest.fixture(scope="module")
def image() -> bytes:
    return compile_hip(Path(__file__).with_name("machine_kernels.hip"))


class Capturing:
    """A stream, and what a capture of it made. Graphs and streams are freed at the end."""

    def __init__(self, hip: Any, flags: int = 0) -> None:
        self.hip, self.stream = hip, c_void_p()
        self.graph, self.executable = c_void_p(), c_void_p()
        assert hip.hipStreamCreateWithFlags(byref(self.stream), flags) == SUCCESS

    def begin(self, mode: int = GLOBAL) -> None:
        assert self.hip.hipStreamBeginCapture(self.stream, mode) == SUCCESS

    def end(self) -> int:
        return int(self.hip.hipStreamEndCapture(self.stream, byref(self.graph)))

    def finish(self) -> None:
        """End the capture and instantiate what it recorded; the graph itself is not needed."""
        assert self.end() == SUCCESS
        made = self.hip.hipGraphInstantiate(byref(self.executable), self.graph, None, None, 0)
        assert made == SUCCESS and self.hip.hipGraphDestroy(self.graph) == SUCCESS

    def run(self) -> int:
        return int(self.hip.hipGraphLaunch(self.executable, self.stream))

    @property
    def status(self) -> int:
        status = c_int(-1)
        assert self.hip.hipStreamIsCapturing(self.stream, byref(status)) == SUCCESS
        return status.value

    def nodes(self) -> list[tuple[int, bytes]]:
        """Types and names, before ``finish``."""
        count, kind = c_size_t(), c_int()
        assert self.hip.hipGraphGetNodes(self.graph, None, byref(count)) == SUCCESS
        nodes = (c_void_p * count.value)()
        assert self.hip.hipGraphGetNodes(self.graph, nodes, byref(count)) == SUCCESS
        found = []
        for node in nodes:
            assert self.hip.hipGraphNodeGetType(node, byref(kind)) == SUCCESS
            found.append((kind.value, self.hip.lae_node_name(node)))
        return found


@pytest.fixture
def captured(hip: Any) -> Iterator[Capturing]:
    made = Capturing(hip)
    yield made
    hip.hipStreamDestroy(made.stream)


def elsewhere(work: Callable[[], int]) -> int:
    """What a call returns in another thread."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def put(hip: Any, pointer: c_void_p, values: Any) -> None:
    assert hip.hipMemcpy(pointer, values.ctypes.data, values.nbytes, TO_DEVICE) == SUCCESS


def test_nodes_run_in_order_on_what_memory_holds_then(
    hip: Any, image: bytes, captured: Capturing
) -> None:
    kernel = function(hip, image, "halve")
    source, data, host = allocate(hip, 256), allocate(hip, 256), np.zeros(64, np.float32)
    put(hip, source, np.full(64, 8, np.float32))
    put(hip, data, np.full(64, 5, np.float32))
    seen: list[float] = []
    note = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: seen.append(float(host[0])))
    captured.begin()
    on = captured.stream
    assert hip.hipMemcpyAsync(data, source, 256, ON_DEVICE, on) == SUCCESS
    assert launch(hip, kernel, 64, data, stream=on) == SUCCESS
    assert hip.hipMemcpyAsync(host.ctypes.data, data, 256, DEFAULT, on) == SUCCESS
    assert hip.hipLaunchHostFunc(on, note, None) == SUCCESS
    assert hip.hipMemsetAsync(source, 0, 128, on) == SUCCESS
    assert host[0] == 0 and not seen  # nothing has run
    assert captured.end() == SUCCESS
    assert read(hip, data, "f4", 64).tolist() == [5.0] * 64
    assert captured.nodes() == [
        (MEMCPY, b"hipMemcpyAsync"),
        (KERNEL, b"halve"),
        (MEMCPY, b"hipMemcpyAsync"),
        (HOST, b"hipLaunchHostFunc"),
        (MEMSET, b"hipMemsetAsync"),
    ]
    executable = captured.executable
    assert hip.hipGraphInstantiateWithFlags(byref(executable), captured.graph, c_ulonglong(0)) == 0
    assert hip.hipGraphDestroy(captured.graph) == SUCCESS
    assert captured.run() == SUCCESS
    assert host.tolist() == [4.0] * 64 and seen == [4.0]
    assert read(hip, source, "f4", 64).tolist() == [0.0] * 32 + [8.0] * 32
    assert captured.run() == SUCCESS
    assert host.tolist() == [0.0] * 32 + [4.0] * 32 and seen == [4.0, 0.0]
    put(hip, source, np.full(64, 3, np.float32))
    assert captured.run() == SUCCESS and host.tolist() == [1.5] * 64
    assert hip.hipGraphExecDestroy(executable) == SUCCESS


@pytest.mark.parametrize("packed", [False, True])
def test_arguments_are_frozen(hip: Any, image: bytes, captured: Capturing, packed: bool) -> None:
    """Neither the argument's memory nor the buffer of arguments is read again."""
    kernel, first, other = function(hip, image, "halve"), allocate(hip, 256), allocate(hip, 256)
    for pointer in (first, other):
        put(hip, pointer, np.full(64, 8, np.float32))
    argument = c_void_p(first.value)
    captured.begin()
    if packed:
        size = c_size_t(8)
        extra = (c_void_p * 5)(1, ctypes.addressof(argument), 2, ctypes.addressof(size), 3)
        sizes = (1, 1, 1, 64, 1, 1)
        on = captured.stream
        assert hip.hipModuleLaunchKernel(kernel, *sizes, 0, on, None, extra) == SUCCESS
        size.value = 0
    else:
        assert launch(hip, kernel, 64, argument, stream=captured.stream) == SUCCESS
    argument.value = other.value
    captured.finish()
    for expected in (4.0, 2.0):
        assert captured.run() == SUCCESS
        assert read(hip, first, "f4", 64).tolist() == [expected] * 64
    assert read(hip, other, "f4", 64).tolist() == [8.0] * 64


def test_a_bad_launch_is_refused_when_it_is_captured(
    hip: Any, image: bytes, captured: Capturing
) -> None:
    kernel, data = function(hip, image, "reverse"), allocate(hip, 512)
    captured.begin()
    on = captured.stream
    assert launch(hip, kernel, 1024, data, c_uint(1), stream=on) == INVALID_CONFIGURATION
    assert launch(hip, kernel, 64, data, stream=on) == INVALID_VALUE
    assert hip.hipMemsetAsync(data, 0, 513, on) == INVALID_VALUE
    assert hip.hipMemcpyAsync(data, data, 513, ON_DEVICE, on) == INVALID_VALUE
    assert captured.end() == SUCCESS and captured.nodes() == []
    assert hip.hipGraphDestroy(captured.graph) == SUCCESS


def test_a_finding_fails_the_launch_of_the_graph(
    hip: Any, image: bytes, captured: Capturing
) -> None:
    kernel, good, short = function(hip, image, "halve"), allocate(hip, 256), allocate(hip, 252)
    put(hip, good, np.full(64, 8, np.float32))
    put(hip, short, np.full(63, 8, np.float32))
    captured.begin()
    for pointer in (good, short, good):
        assert launch(hip, kernel, 64, pointer, stream=captured.stream) == SUCCESS
    captured.finish()
    assert captured.run() == LAUNCH_FAILURE
    report = hip.lae_last_report().decode()
    assert report.startswith("node 1 of the graph, halve, failed\n") and "out of bounds" in report
    assert read(hip, good, "f4", 64).tolist() == [4.0] * 64  # the third did not run
    # memory that was freed since the capture
    assert hip.hipFree(short) == SUCCESS and hip.hipFree(good) == SUCCESS
    assert captured.run() == LAUNCH_FAILURE and b"node 0" in hip.lae_last_report()


def test_a_graph_in_a_graph(hip: Any, image: bytes, captured: Capturing) -> None:
    kernel, data = function(hip, image, "halve"), allocate(hip, 256)
    put(hip, data, np.full(64, 8, np.float32))
    inner = Capturing(hip)
    inner.begin()
    assert launch(hip, kernel, 64, data, stream=inner.stream) == SUCCESS
    inner.finish()
    captured.begin()
    for _ in range(2):
        assert hip.hipGraphLaunch(inner.executable, captured.stream) == SUCCESS
    assert captured.end() == SUCCESS and captured.nodes() == [(GRAPH, b"hipGraphLaunch")] * 2
    made = hip.hipGraphInstantiate(byref(captured.executable), captured.graph, None, None, 0)
    assert made == SUCCESS and hip.hipGraphExecDestroy(inner.executable) == SUCCESS
    assert captured.run() == SUCCESS
    assert read(hip, data, "f4", 64).tolist() == [2.0] * 64
    assert hip.hipStreamDestroy(inner.stream) == SUCCESS


def test_states_of_a_capture(hip: Any, captured: Capturing) -> None:
    stream, graph, status, number = captured.stream, c_void_p(), c_int(), c_ulonglong()
    assert hip.hipStreamBeginCapture(None, GLOBAL) == UNSUPPORTED
    assert hip.hipStreamBeginCapture(stream, 3) == INVALID_VALUE
    assert hip.hipStreamEndCapture(stream, byref(graph)) == ILLEGAL_STATE
    assert hip.hipStreamEndCapture(stream, None) == INVALID_VALUE
    assert captured.status == NONE
    captured.begin()
    assert captured.status == ACTIVE
    assert hip.hipStreamBeginCapture(stream, GLOBAL) == ILLEGAL_STATE
    assert hip.hipStreamGetCaptureInfo(stream, byref(status), byref(number)) == SUCCESS
    assert status.value == ACTIVE
    first, count, last = number.value, c_size_t(7), c_void_p()
    asked = [byref(x) for x in (status, number, graph, last, count)]
    assert hip.hipStreamGetCaptureInfo_v2(stream, *asked) == SUCCESS
    assert count.value == 0 and number.value == first
    assert hip.hipMemsetAsync(allocated := c_void_p(1), 0, 0, stream) == SUCCESS, allocated
    assert hip.hipStreamGetCaptureInfo_v2(stream, *asked) == SUCCESS and count.value == 1
    assert hip.hipStreamIsCapturing(None, byref(status)) == IMPLICIT  # and invalidates nothing
    assert captured.end() == SUCCESS and captured.status == NONE
    assert graph.value == captured.graph.value
    captured.begin()
    assert hip.hipStreamGetCaptureInfo(stream, byref(status), byref(number)) == SUCCESS
    assert number.value != first
    # a stream that is destroyed ends its capture
    assert hip.hipStreamDestroy(stream) == SUCCESS
    assert hip.hipStreamEndCapture(stream, byref(graph)) == INVALID_HANDLE
    assert hip.hipDeviceSynchronize() == SUCCESS
    assert hip.hipGraphDestroy(captured.graph) == SUCCESS
    assert hip.hipGraphDestroy(captured.graph) == ILLEGAL_STATE
    assert hip.hipGraphLaunch(captured.graph, None) == INVALID_VALUE
    made = hip.hipGraphInstantiate(byref(captured.executable), captured.graph, None, None, 0)
    assert made == INVALID_VALUE and hip.hipGraphExecDestroy(None) == INVALID_VALUE


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_thread_that_ends_a_capture(hip: Any, captured: Capturing, mode: int) -> None:
    captured.begin(mode)
    assert elsewhere(captured.end) == (SUCCESS if mode == RELAXED else WRONG_THREAD)
    assert captured.end() == (ILLEGAL_STATE if mode == RELAXED else SUCCESS)


Calls = dict[str, Callable[[], int]]


def unsafe_calls(hip: Any, image: bytes) -> Calls:
    """Calls that a capture forbids in the threads that its mode names."""
    module, data, host = c_void_p(), allocate(hip, 64), np.zeros(16, np.float32)
    assert hip.hipModuleLoadData(byref(module), image) == SUCCESS
    known = np.zeros(16, np.float32)
    assert hip.hipHostRegister(known.ctypes.data, 64, 0) == SUCCESS
    other, event = Capturing(hip), c_void_p()
    assert hip.hipEventCreate(byref(event)) == SUCCESS
    assert hip.hipEventRecord(event, None) == SUCCESS
    return {
        "hipMalloc": lambda: hip.hipMalloc(byref(c_void_p()), c_size_t(64)),
        "hipFree": lambda: hip.hipFree(data),
        "hipHostRegister": lambda: hip.hipHostRegister(host.ctypes.data, 64, 0),
        "hipHostUnregister": lambda: hip.hipHostUnregister(known.ctypes.data),
        "hipModuleLoadData": lambda: hip.hipModuleLoadData(byref(c_void_p()), image),
        "hipModuleUnload": lambda: hip.hipModuleUnload(module),
        "hipStreamSynchronize": lambda: hip.hipStreamSynchronize(other.stream),
        "hipStreamQuery": lambda: hip.hipStreamQuery(other.stream),
        "hipEventSynchronize": lambda: hip.hipEventSynchronize(event),
        "hipEventQuery": lambda: hip.hipEventQuery(event),
    }


def expect_invalid(captured: Capturing, because: str) -> None:
    """The capture is invalid, takes nothing more, and makes no graph; then all is as before."""
    hip = captured.hip
    assert captured.status == INVALID
    assert hip.hipMemsetAsync(None, 0, 0, captured.stream) == INVALIDATED
    assert because.encode() in hip.lae_last_report()
    assert captured.end() == INVALIDATED and not captured.graph.value
    assert because.encode() in hip.lae_last_report()
    assert captured.status == NONE
    captured.begin()
    assert captured.end() == SUCCESS


def test_unsafe_calls(hip: Any, image: bytes, captured: Capturing) -> None:
    calls = unsafe_calls(hip, image)
    for name, call in calls.items():
        for mode in (GLOBAL, THREAD_LOCAL):
            captured.begin(mode)
            assert call() == UNSUPPORTED, name
            expect_invalid(captured, name)
        captured.begin(GLOBAL)
        assert elsewhere(call) == UNSUPPORTED, name
        expect_invalid(captured, name)
    # Permitted is what the capture's mode does not name. Each call can be made once.
    turn = iter(calls.items())
    for _ in range(len(calls) // 2):
        name, call = next(turn)
        captured.begin(RELAXED)
        assert call() == SUCCESS, name
        assert captured.end() == SUCCESS, name
    for name, call in turn:
        captured.begin(THREAD_LOCAL)
        assert elsewhere(call) == SUCCESS, name
        assert captured.end() == SUCCESS, name


def test_a_relaxed_thread_may_call_what_is_unsafe(hip: Any, captured: Capturing) -> None:
    def allocated_as(mode: int) -> int:
        wanted = c_int(mode)
        assert hip.hipThreadExchangeStreamCaptureMode(byref(wanted)) == SUCCESS
        assert wanted.value == GLOBAL  # that of a new thread
        found = int(hip.hipMalloc(byref(c_void_p()), c_size_t(64)))
        assert hip.hipThreadExchangeStreamCaptureMode(byref(wanted)) == SUCCESS
        assert wanted.value == mode
        return found

    captured.begin()
    assert allocated_as(RELAXED) == SUCCESS
    assert elsewhere(lambda: allocated_as(THREAD_LOCAL)) == SUCCESS
    assert captured.end() == SUCCESS
    captured.begin()
    assert allocated_as(THREAD_LOCAL) == UNSUPPORTED
    expect_invalid(captured, "hipMalloc")
    assert hip.hipThreadExchangeStreamCaptureMode(byref(c_int(3))) == INVALID_VALUE


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_waits_and_synchronous_copies(hip: Any, captured: Capturing, mode: int) -> None:
    """They concern every capture, whatever its mode."""
    data, event = allocate(hip, 64), c_void_p()
    assert hip.hipEventCreate(byref(event)) == SUCCESS
    stream = captured.stream
    calls: dict[str, tuple[int, Callable[[], int]]] = {
        "hipMemcpy": (IMPLICIT, lambda: hip.hipMemcpy(data, data, 64, ON_DEVICE)),
        "hipMemset": (IMPLICIT, lambda: hip.hipMemset(data, 0, 64)),
        "hipDeviceSynchronize": (UNSUPPORTED, lambda: hip.hipDeviceSynchronize()),
        "hipStreamSynchronize": (UNSUPPORTED, lambda: hip.hipStreamSynchronize(stream)),
        "hipStreamQuery": (UNSUPPORTED, lambda: hip.hipStreamQuery(stream)),
        "hipEventSynchronize": (CAPTURED_EVENT, lambda: hip.hipEventSynchronize(event)),
        "hipEventQuery": (CAPTURED_EVENT, lambda: hip.hipEventQuery(event)),
    }
    for name, (error, call) in calls.items():
        for run in (lambda work: work(), elsewhere):
            captured.begin(mode)
            assert hip.hipEventRecord(event, stream) == SUCCESS
            assert run(call) == error, name
            expect_invalid(captured, name)
    # An event of a capture says nothing of time, even when that has ended.
    assert hip.hipEventSynchronize(event) == CAPTURED_EVENT
    assert hip.hipEventElapsedTime(byref(ctypes.c_float()), event, event) == CAPTURED_EVENT
    assert hip.hipEventRecord(event, stream) == SUCCESS
    assert hip.hipEventSynchronize(event) == SUCCESS and hip.hipEventQuery(event) == SUCCESS
    assert read(hip, data, "u1", 0).tolist() == []


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("handle", [None, c_void_p(1)])
def test_the_legacy_stream(
    hip: Any, image: bytes, captured: Capturing, mode: int, handle: c_void_p | None
) -> None:
    """It waits for blocking streams, so nothing may be put on it while one is captured."""
    kernel, data, event = function(hip, image, "all_emulated"), allocate(hip, 256), c_void_p()
    assert hip.hipEventCreate(byref(event)) == SUCCESS
    captured.begin()
    captured.finish()
    calls: Calls = {
        "hipMemsetAsync": lambda: hip.hipMemsetAsync(data, 0, 256, handle),
        "hipModuleLaunchKernel": lambda: launch(hip, kernel, 64, data, stream=handle),
        "hipMemcpyAsync": lambda: hip.hipMemcpyAsync(data, data, 256, ON_DEVICE, handle),
        "hipEventRecord": lambda: hip.hipEventRecord(event, handle),
        "hipGraphLaunch": lambda: hip.hipGraphLaunch(captured.executable, handle),
    }
    for name, call in calls.items():
        captured.begin(mode)
        assert call() == IMPLICIT, name
        expect_invalid(captured, name)
    apart = Capturing(hip, flags=1)  # hipStreamNonBlocking
    apart.begin(mode)
    for name, call in calls.items():
        assert call() == SUCCESS, name
    assert read_later(apart, data) == [1] * 64
    assert hip.hipStreamDestroy(apart.stream) == SUCCESS


def read_later(captured: Capturing, data: c_void_p) -> Any:
    """End a capture, which forbids reading, then read 64 words."""
    assert captured.end() == SUCCESS and captured.nodes() == []
    return read(captured.hip, data, "u4", 64).tolist()


def test_other_streams_run_meanwhile(hip: Any, image: bytes, captured: Capturing) -> None:
    kernel, data, other = function(hip, image, "all_emulated"), allocate(hip, 256), Capturing(hip)
    captured.begin()
    assert launch(hip, kernel, 64, data, stream=other.stream) == SUCCESS
    other.begin()  # a capture of its own
    assert launch(hip, kernel, 64, data, stream=other.stream) == SUCCESS
    assert other.end() == SUCCESS and other.nodes() == [(KERNEL, b"all_emulated")]
    assert read_later(captured, data) == [1] * 64
    assert hip.hipStreamDestroy(other.stream) == SUCCESS


# ------------------------------------------------------------------------------ from Python


class Halved:
    """An array of its own memory that a kernel of the graph halves."""

    def __init__(self, hip: Any, image: bytes) -> None:
        self.kernel, self.values = function(hip, image, "halve"), np.full(64, 8, np.float32)
        self.at = c_void_p(self.values.ctypes.data)


def test_host_memory_and_memory_of_a_graph(hip: Any, image: bytes) -> None:
    """Host memory is registered during launches, the graph's own begins undefined in each."""
    halved, own = Halved(hip, image), c_void_p()
    stream = emulator.Stream()
    on = c_void_p(stream.handle)
    with emulator.capture(stream) as graph:
        assert hip.lae_graph_touches(on, halved.at, c_size_t(256)) == SUCCESS
        assert hip.lae_graph_memory(on, c_size_t(256), None, byref(own)) == SUCCESS
        assert (own.value or 0) % 256 == 0
        assert launch(hip, halved.kernel, 64, halved.at, stream=on) == SUCCESS
        assert hip.hipMemcpyAsync(own, halved.at, 256, DEFAULT, on) == SUCCESS
        assert launch(hip, halved.kernel, 64, own, stream=on) == SUCCESS
        assert hip.hipMemcpyAsync(halved.at, own, 128, DEFAULT, on) == SUCCESS
    assert graph.nodes == ("halve", "hipMemcpyAsync") * 2
    graph.launch()
    assert halved.values.tolist() == [2.0] * 32 + [4.0] * 32
    assert launch(hip, halved.kernel, 64, halved.at) == LAUNCH_FAILURE  # only during launches
    graph.launch(stream)
    assert halved.values.tolist() == [0.5] * 32 + [2.0] * 32
    graph.close()
    assert launch(hip, halved.kernel, 64, own) == LAUNCH_FAILURE  # freed with the graph
    with emulator.capture(stream) as graph:
        assert hip.lae_graph_memory(on, c_size_t(256), None, byref(own)) == SUCCESS
        assert launch(hip, halved.kernel, 64, own, stream=on) == SUCCESS
    put(hip, own, np.ones(64, np.float32))  # which no launch sees
    undefined = r"node 0 of the graph, halve.*\n.*undefined"
    with graph, pytest.raises(emulator.EmulatorError, match=undefined):
        graph.launch()
    # Constants are the graph's as they were, and kernels must not store to them.
    first = halved.values[0]
    with emulator.capture(stream) as graph:
        assert hip.lae_graph_memory(on, c_size_t(256), halved.at, byref(own)) == SUCCESS
        assert hip.lae_graph_touches(on, halved.at, c_size_t(256)) == SUCCESS
        assert hip.hipMemcpyAsync(halved.at, own, 256, DEFAULT, on) == SUCCESS
        assert launch(hip, halved.kernel, 64, own, stream=on) == SUCCESS
    halved.values[:] = -1
    with (
        graph,
        pytest.raises(emulator.EmulatorError, match=r"node 1 of the graph, halve.*\n.*const"),
    ):
        graph.launch()
    assert halved.values[0] == first
    assert hip.lae_graph_memory(on, c_size_t(64), None, byref(own)) == ILLEGAL_STATE
    assert hip.lae_graph_touches(on, halved.at, c_size_t(64)) == ILLEGAL_STATE
    stream.close()


def test_the_current_stream(hip: Any) -> None:
    hip.lae_current_stream.restype = c_void_p
    assert hip.lae_current_stream() is None
    with emulator.Stream() as stream, emulator.on_stream(stream):
        assert hip.lae_current_stream() == stream.handle
        assert elsewhere(lambda: hip.lae_current_stream() or 0) == 0  # of the thread
        with emulator.on_stream(None):
            assert hip.lae_current_stream() is None
        assert hip.lae_current_stream() == stream.handle
    assert hip.lae_current_stream() is None
    assert hip.lae_set_current_stream(c_void_p(64)) == INVALID_HANDLE


def test_errors_of_captures_from_python(hip: Any) -> None:
    with emulator.Stream() as stream:
        with (
            pytest.raises(emulator.EmulatorError, match="StreamCaptureInvalidated: hipMalloc: not"),
            emulator.capture(stream),
        ):
            hip.hipMalloc(byref(c_void_p()), c_size_t(64))
        with pytest.raises(KeyError), emulator.capture(stream) as graph:
            raise KeyError
        for call in (graph.launch, lambda: graph.call(list)):
            with pytest.raises(emulator.EmulatorError, match=r"capture|captured"):
                call()
        calls: list[int] = []
        with emulator.capture(stream, "relaxed") as graph:
            with pytest.raises(emulator.EmulatorError, match="IllegalState"):
                emulator.capture(stream).__enter__()
            graph.call(lambda: calls.append(len(calls)))
            graph.call(lambda: [].pop())
            graph.call(lambda: calls.append(-1))
        with graph:
            for _ in range(2):
                with pytest.raises(IndexError):
                    graph.launch()
        assert calls == [0, 1]
