"""Loading the shipped gfx942 code objects one by one, through the HIP run-time itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ..engines.gfx942 import manifest


def damaged() -> dict[str, str]:
    """Return what is wrong with each shipped file, "" where it is the one that was built.

    Raises:
        OSError, ValueError: there is no manifest, or it is of another format.
    """
    found = {}
    for entry in manifest.read().objects:
        try:
            manifest.load(entry.file)
            found[entry.file] = ""
        except (OSError, ValueError) as error:
            found[entry.file] = str(error)
    return found


def refused(library: str, ordinal: int) -> dict[str, str]:
    """Load each file on a device and look up its kernels; return what failed, "" if nothing did.

    Args:
        library: path of the HIP run-time.
        ordinal: number of the device.

    Raises:
        OSError: the library cannot be opened, or lacks a function.
    """
    hip = ctypes.CDLL(library)
    try:
        hip.hipGetErrorName.restype = ctypes.c_char_p
        _check(hip, "hipSetDevice", hip.hipSetDevice(ctypes.c_int(ordinal)))
    except AttributeError as error:
        raise OSError(f"{Path(library).name} is no HIP run-time: {error}") from error
    return {entry.file: _load(hip, entry) for entry in manifest.read().objects}


def _load(hip: ctypes.CDLL, entry: manifest.CodeObject) -> str:
    module = ctypes.c_void_p()
    image = (manifest.DIRECTORY / entry.file).read_bytes()
    try:
        _check(hip, "hipModuleLoadData", hip.hipModuleLoadData(ctypes.byref(module), image))
    except OSError as error:
        return str(error)
    wrong = []
    for kernel in entry.kernels:
        function = ctypes.c_void_p()
        status = hip.hipModuleGetFunction(
            ctypes.byref(function), module, kernel.name.encode("ascii")
        )
        try:
            _check(hip, f"hipModuleGetFunction({kernel.name})", status)
        except OSError as error:
            wrong.append(str(error))
    hip.hipModuleUnload(module)
    return "; ".join(wrong)


def _check(hip: ctypes.CDLL, function: str, status: int) -> None:
    if status:
        raise OSError(f"{function}: {hip.hipGetErrorName(ctypes.c_int(status)).decode()}")
