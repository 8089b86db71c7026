"""Streams and graphs of the emulated device, from Python.

What ``torch.cuda.Stream`` and ``torch.cuda.graph`` are to tensors on a GPU, these are to CPU
tensors: launches of a thread go to its current stream, and a stream that is captured records them.

    with Stream() as stream, capture(stream) as graph:
        attention_paged(..., out=out)  # recorded, not run
    kv_len.fill_(17)
    graph.launch()  # reads kv_len as it is now

Arguments of kernels, addresses among them, are frozen when they are recorded; what lies behind the
addresses is read at each launch. Keep the tensors for as long as the graph is launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_void_p
from typing import Any

from liteattention_emulator import native

#: hipStreamCaptureMode: whose unsafe calls (allocations, module loads, waits) a capture forbids.
CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


class Stream:
    """A stream. Owner: the caller, who closes it (a context manager); any thread may use it."""

    def __init__(self, *, blocking: bool = True) -> None:
        """Make a stream; one that is not ``blocking`` does not wait for the legacy stream."""
        handle = c_void_p()
        error = native.functions().hipStreamCreateWithFlags(byref(handle), 0 if blocking else 1)
        native.check(error, "hipStreamCreateWithFlags")
        self.handle: int | None = handle.value

    def close(self) -> None:
        """Destroy it; closing it again does nothing."""
        handle, self.handle = self.handle, None
        if handle is not None:
            native.check(native.functions().hipStreamDestroy(handle), "hipStreamDestroy")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Let the launches of this thread go to ``stream``; None is the legacy stream."""
    functions = native.functions()
    before = functions.lae_current_stream()
    handle = None if stream is None else stream.handle
    native.check(functions.lae_set_current_stream(handle), "lae_set_current_stream")
    try:
        yield
    finally:
        functions.lae_set_current_stream(before)


class Graph:
    """What a capture recorded. Owner: the caller, who closes it (a context manager).

    ``nodes`` names its operations in their order: kernels by their own names, others by the HIP
    function that put them there.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream: Stream | None = stream
        self._kept: list[Any] = []
        self._errors: list[BaseException] = []
        self._executable: int | None = None
        self.nodes: tuple[str, ...] = ()

    def call(self, function: Callable[[], None]) -> None:
        """Record that ``function`` runs on the host, in the order of the nodes.

        A launch raises what it raised first, and runs no later function of the graph. It must make
        no launches of its own.

        Raises:
            EmulatorError: the capture has ended, or has been invalidated.
        """
        if self._stream is None:
            raise native.EmulatorError("host functions are recorded while the graph is captured")

        def guarded(_: Any) -> None:
            if self._errors:
                return
            try:
                function()
            except BaseException as error:  # it must not leave a function that C calls
                self._errors.append(error)

        callback = _HOST_FUNCTION(guarded)
        error = native.functions().hipLaunchHostFunc(self._stream.handle, callback, None)
        native.check(error, "hipLaunchHostFunc")
        self._kept.append(callback)

    def launch(self, stream: Stream | None = None) -> None:
        """Run all nodes with the memory as it is now, and return when they are done.

        Raises:
            EmulatorError: a node failed, the checkers found something, or there is no graph (yet).
        """
        if self._executable is None:
            raise native.EmulatorError("there is nothing to launch: capture the graph to its end")
        self._errors.clear()
        handle = None if stream is None else stream.handle
        error = native.functions().hipGraphLaunch(self._executable, handle)
        if self._errors:
            raise self._errors[0]
        native.check(error, "hipGraphLaunch")

    def close(self) -> None:
        """Free it; closing it again does nothing."""
        executable, self._executable = self._executable, None
        if executable is not None:
            error = native.functions().hipGraphExecDestroy(executable)
            native.check(error, "hipGraphExecDestroy")
            self._kept.clear()

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, keep: bool) -> None:
        """End the capture; where ``keep``, make the graph ready."""
        assert self._stream is not None
        functions, stream, graph = native.functions(), self._stream, c_void_p()
        self._stream = None
        error = functions.hipStreamEndCapture(stream.handle, byref(graph))
        if not keep:
            if not error:
                functions.hipGraphDestroy(graph)
            return
        native.check(error, "hipStreamEndCapture")
        count, made = c_size_t(), c_void_p()
        functions.hipGraphGetNodes(graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        functions.hipGraphGetNodes(graph, nodes, byref(count))
        self.nodes = tuple(functions.lae_node_name(node).decode() for node in nodes)
        error = functions.hipGraphInstantiate(byref(made), graph, None, None, 0)
        functions.hipGraphDestroy(graph)
        native.check(error, "hipGraphInstantiate")
        self._executable = made.value


@contextmanager
def capture(stream: Stream, mode: str = "global") -> Iterator[Graph]:
    """Record what this thread launches, instead of running it.

    The launches of the block go to ``stream``. Its graph can be launched when the block has ended.

    Args:
        stream: where to record; not the legacy stream.
        mode: of :data:`CAPTURE_MODES`.

    Raises:
        EmulatorError: at the end, if something in the block was not permitted in a capture (says
            what); at its beginning, if the stream is being captured already.
    """
    functions = native.functions()
    error = functions.hipStreamBeginCapture(stream.handle, CAPTURE_MODES[mode])
    native.check(error, "hipStreamBeginCapture")
    graph = Graph(stream)
    try:
        with on_stream(stream):
            yield graph
    except BaseException:
        graph._end(keep=False)
        raise
    graph._end(keep=True)
