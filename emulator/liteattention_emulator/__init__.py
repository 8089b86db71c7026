"""A software MI300X: runs gfx942 code objects on the CPU, checks them while they run, and counts.

``library()`` is the path of its shared library, which offers the HIP run-time's C functions: name
it in LITEATTENTION_HIP_LIBRARY and whatever launches through them runs on the emulator. From
Python, ``Module`` loads a code object and launches its kernels on numpy arrays or CPU tensors.
"""

from liteattention_emulator.device import (
    Executed,
    Finding,
    Kernel,
    Module,
    Report,
    disassemble,
    kernels,
    last_launch,
    registered,
)
from liteattention_emulator.graphs import CAPTURE_MODES, Graph, Stream, capture, on_stream
from liteattention_emulator.native import (
    EmulatorError,
    LaunchFailed,
    environment_problems,
    library,
    set_option,
)
from liteattention_emulator.recording import BadRecording, Recording, recorded

__all__ = [
    "CAPTURE_MODES",
    "BadRecording",
    "EmulatorError",
    "Executed",
    "Finding",
    "Graph",
    "Kernel",
    "LaunchFailed",
    "Module",
    "Recording",
    "Report",
    "Stream",
    "capture",
    "disassemble",
    "environment_problems",
    "kernels",
    "last_launch",
    "library",
    "on_stream",
    "recorded",
    "registered",
    "set_option",
]
