"""Calls of the emulator's HIP functions as a host program makes them, for tests."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

import liteattention_emulator as emulator

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION = 0, 1, 2, 9
INVALID_DEVICE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE, NOT_FOUND = 101, 200, 209, 400, 500
ILLEGAL_STATE, UNSUPPORTED, INVALIDATED, IMPLICIT = 401, 900, 901, 906
CAPTURED_EVENT, WRONG_THREAD = 907, 908
OUT_OF_RESOURCES, NOT_REGISTERED, LAUNCH_FAILURE, NOT_SUPPORTED = 701, 713, 719, 801
TO_DEVICE, TO_HOST, ON_DEVICE, DEFAULT = 1, 2, 3, 4


def opened() -> Any:
    """The library without any signatures but those of C."""
    library = ctypes.CDLL(str(emulator.library()))
    for name in ("hipGetErrorName", "hipGetErrorString", "lae_last_report"):
        getattr(library, name).restype = c_char_p
    pointers = "hipFree hipModuleUnload hipHostUnregister hipStreamDestroy hipEventDestroy"
    for name in (*pointers.split(), "hipStreamSynchronize", "hipEventSynchronize"):
        getattr(library, name).argtypes = [c_void_p]
    library.lae_node_name.restype, library.lae_node_name.argtypes = c_char_p, [c_void_p]
    library.hipGraphNodeGetType.argtypes = [c_void_p, POINTER(c_int)]
    library.hipMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
    library.hipMemsetAsync.argtypes = [c_void_p, c_int, c_size_t, c_void_p]
    library.hipMemcpy.argtypes = [c_void_p, c_void_p, c_size_t, c_int]
    library.hipMemset.argtypes = [c_void_p, c_int, c_size_t]
    library.hipHostRegister.argtypes = [c_void_p, c_size_t, c_uint]
    library.hipModuleGetFunction.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    library.hipFuncGetAttribute.argtypes = [POINTER(c_int), c_int, c_void_p]
    launch = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    library.hipModuleLaunchKernel.argtypes = launch
    library.hipGetLastError()
    return library


def function(hip: Any, image: bytes, name: str) -> c_void_p:
    module, kernel = c_void_p(), c_void_p()
    assert hip.hipModuleLoadData(byref(module), image) == SUCCESS
    assert hip.hipModuleGetFunction(byref(kernel), module, name.encode()) == SUCCESS
    return kernel


def allocate(hip: Any, size: int) -> c_void_p:
    pointer = c_void_p()
    assert hip.hipMalloc(byref(pointer), c_size_t(size)) == SUCCESS
    return pointer


def launch(
    hip: Any,
    kernel: c_void_p,
    block: int,
    *args: Any,
    grid: int = 1,
    lds: int = 0,
    stream: c_void_p | None = None,
) -> int:
    params = (c_void_p * (len(args) + 1))(*[ctypes.addressof(a) for a in args], None)
    sizes = (grid, 1, 1, block, 1, 1)
    return int(hip.hipModuleLaunchKernel(kernel, *sizes, lds, stream, params, None))


def read(hip: Any, pointer: c_void_p, kind: str, count: int) -> Any:
    out = np.zeros(count, kind)
    assert hip.hipMemcpy(out.ctypes.data, pointer, out.nbytes, TO_HOST) == SUCCESS
    return out
