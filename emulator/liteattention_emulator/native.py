"""The emulator's shared library by ctypes: where it lies, its functions, their errors."""

import ctypes
import json
import os
import sysconfig
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = "libliteattention_emulator.so"
ABI_VERSION = 1
PREFIX = "LITEATTENTION_EMULATOR_"
#: What the options of launches take, by name; of variables in the environment, too.
OPTIONS = {
    "check": "on or off",
    "count": "on or off",
    "threads": "a number up to 1024 (0: one per core)",
    "order": "round-robin[:QUANTUM] with a QUANTUM above 0, random:SEED, first-ahead or last-ahead",
    "variant": "avx512, avx2 or portable, and one that this processor has",
    "steps": "a number above 0",
}
#: What :func:`set_option` has set.
_set: dict[str, str] = {}


class EmulatorError(RuntimeError):
    """The emulator refused a call; the text says why."""


class LaunchFailed(EmulatorError):
    """A launch did not run, or the checkers found something in it.

    ``findings`` has the checkers' entries (empty when the launch did not run).
    """

    def __init__(self, text: str, findings: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.findings = findings


def library() -> Path:
    """Path of the shared library: what LITEATTENTION_HIP_LIBRARY must name to run on the emulator.

    LITEATTENTION_EMULATOR_LIBRARY names another build of it. Raises EmulatorError naming every
    place that was looked at when there is none.
    """
    return _find(os.environ.get("LITEATTENTION_EMULATOR_LIBRARY"))


@lru_cache(maxsize=4)  # every launch of a kernel asks
def _find(override: str | None) -> Path:
    if override:
        places = [Path(override)]
    else:
        # In an editable install the library lies beside the installed package, not in the sources.
        package = __name__.partition(".")[0]
        parents = [Path(__file__).parent, Path(sysconfig.get_paths()["platlib"]) / package]
        places = [parent / FILE for parent in parents]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = ", ".join(str(place) for place in places)
    raise EmulatorError(f"{FILE} is not built; looked at {looked}; install the package to build it")


_DIM = [c_uint] * 3
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "lae_abi_version": (c_int, []),
    "lae_last_report": (c_char_p, []),
    "lae_last_error": (c_char_p, []),
    "lae_free": (None, [c_void_p]),
    "lae_set_option": (c_int, [c_char_p, c_char_p]),
    "lae_kernels": (c_void_p, [c_char_p, c_size_t]),
    "lae_disassemble": (c_void_p, [c_char_p, c_size_t]),
    "lae_decode": (c_void_p, [c_char_p, c_size_t]),
    "lae_last_launch": (c_void_p, []),
    "lae_stored": (c_int, [c_void_p, c_size_t, c_void_p]),
    "lae_record": (None, [c_int64, c_char_p]),
    "lae_recording": (c_void_p, []),
    "lae_timing_constants": (c_void_p, []),
    "lae_replay": (
        c_void_p,
        [c_char_p, c_size_t, c_uint32, c_uint32, *[c_void_p] * 7, c_size_t, c_void_p],
    ),
    "lae_run_snippet": (
        c_void_p,
        [c_char_p, c_size_t, c_uint32, *[c_void_p] * 5, c_size_t, c_uint32],
    ),
    "lae_run_chip": (c_void_p, [c_char_p, c_void_p, c_size_t, c_size_t, c_int]),
    "lae_trace_cache": (c_int, [c_uint64, c_uint32, c_void_p, c_size_t, c_void_p]),
    "lae_current_stream": (c_void_p, []),
    "lae_set_current_stream": (c_int, [c_void_p]),
    "lae_node_name": (c_char_p, [c_void_p]),
    "hipModuleLoadData": (c_int, [POINTER(c_void_p), c_char_p]),
    "hipModuleUnload": (c_int, [c_void_p]),
    "hipModuleGetFunction": (c_int, [POINTER(c_void_p), c_void_p, c_char_p]),
    "hipModuleLaunchKernel": (
        c_int,
        [c_void_p, *_DIM, *_DIM, c_uint, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    ),
    "hipHostRegister": (c_int, [c_void_p, c_size_t, c_uint]),
    "hipHostUnregister": (c_int, [c_void_p]),
    "hipMalloc": (c_int, [POINTER(c_void_p), c_size_t]),
    "hipFree": (c_int, [c_void_p]),
    "hipMemcpy": (c_int, [c_void_p, c_void_p, c_size_t, c_int]),
    "hipMemset": (c_int, [c_void_p, c_int, c_size_t]),
    "hipStreamCreateWithFlags": (c_int, [POINTER(c_void_p), c_uint]),
    "hipStreamDestroy": (c_int, [c_void_p]),
    "hipStreamBeginCapture": (c_int, [c_void_p, c_int]),
    "hipStreamEndCapture": (c_int, [c_void_p, POINTER(c_void_p)]),
    "hipLaunchHostFunc": (c_int, [c_void_p, c_void_p, c_void_p]),
    "hipGraphGetNodes": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "hipGraphInstantiate": (
        c_int,
        [POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_char_p, c_size_t],
    ),
    "hipGraphLaunch": (c_int, [c_void_p, c_void_p]),
    "hipGraphExecDestroy": (c_int, [c_void_p]),
    "hipGraphDestroy": (c_int, [c_void_p]),
    "hipGetErrorName": (c_char_p, [c_int]),
}


@lru_cache(maxsize=4)
def _open(path: Path) -> ctypes.CDLL:
    handle = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(handle, name)
        function.restype = result
        function.argtypes = arguments
    version = handle.lae_abi_version()
    if version != ABI_VERSION:
        raise EmulatorError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}")
    return handle


def functions() -> ctypes.CDLL:
    """The opened library with all signatures set. Raises EmulatorError like ``library``."""
    return _open(library())


def json_of(address: int | None) -> Any:
    """The JSON document that an ``lae_`` function returned; raises EmulatorError for its error."""
    native = functions()
    if not address:
        raise EmulatorError(native.lae_last_error().decode(errors="replace"))
    try:
        return json.loads(ctypes.string_at(address).decode("utf-8", "replace"))
    finally:
        native.lae_free(address)


def check(error: int, call: str) -> None:
    """Raise EmulatorError unless a HIP function returned hipSuccess."""
    if error:
        native = functions()
        name = native.hipGetErrorName(error).decode(errors="replace")
        report = native.lae_last_report().decode(errors="replace").strip()
        raise EmulatorError(f"{call}: {name}" + (f": {report}" if report else ""))


def set_option(name: str, value: str) -> None:
    """Set an option of all later launches of this process; "" returns to the environment's value.

    check: on, off. count: on, off (counters). threads: host threads, 0 for one per core. order:
    round-robin[:QUANTUM], random:SEED, first-ahead, last-ahead. variant: avx512, avx2, portable.
    steps: instructions a workgroup may execute before it counts as hanging. The environment's are
    LITEATTENTION_EMULATOR_CHECK and so on. Raises EmulatorError for another name or value.
    """
    native = functions()
    if native.lae_set_option(name.encode(), value.encode()):
        raise EmulatorError(native.lae_last_error().decode(errors="replace"))
    _set[name] = value


def library_problem() -> str:
    """Why the library cannot be opened; "" if it can be."""
    path = os.environ.get(PREFIX + "LIBRARY")
    try:
        functions()
    except (EmulatorError, OSError, AttributeError) as error:
        asked = f"{PREFIX}LIBRARY must name a build of {FILE}, got {path!r}: " if path else ""
        return f"{asked}{error}"
    return ""


def environment_problems() -> list[str]:
    """What is wrong with the LITEATTENTION_EMULATOR_ variables: a line each; none: nothing is.

    Every launch refuses the first of them, as a HIP error: ask before the first one.
    """
    problem = library_problem()
    if problem:
        return [problem]
    native, problems = functions(), []
    for name, allowed in OPTIONS.items():
        value = os.environ.get(PREFIX + name.upper())
        if not value:
            continue
        if native.lae_set_option(name.encode(), os.fsencode(value)):
            problems.append(f"{PREFIX}{name.upper()} must be {allowed}, got {value!r}")
        else:
            native.lae_set_option(name.encode(), _set.get(name, "").encode())
    return problems
