"""A bench for single instructions: assemble a snippet, run it on waves with given registers."""

import struct
import subprocess
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from liteattention_emulator import llvm, native

LANES = 64
EXEC, VCC, M0 = 126, 106, 124
DEFAULT_MODE = 0xF0 | 1 << 8 | 1 << 9
"""MODE of a compute wave: round to nearest even, denormals kept, DX10_CLAMP and IEEE on."""


def assemble(source: str) -> bytes:
    """Machine code of gfx942 assembly, by LLVM's llvm-mc, release 19 or newer.

    Raises EmulatorError with the assembler's message, or when there is no such assembler.
    """
    try:
        tool = llvm.find("llvm-mc", newer=True)
    except llvm.ToolMissing as error:
        raise native.EmulatorError(str(error)) from None
    command = [tool, "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-filetype=obj", "-o", "-"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    if done.returncode:
        raise native.EmulatorError(done.stderr.decode())
    return text_section(done.stdout)


def text_section(image: bytes) -> bytes:
    """Contents of .text of an ELF file. Raises EmulatorError when there is none."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + size * i) for i in range(count)]
    at = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if image[at + name :].startswith(b".text\0"):
            return image[offset : offset + length]
    raise native.EmulatorError("the object file has no .text section")


def _vector(waves: int) -> npt.NDArray[np.uint32]:
    return np.zeros((waves, 512, LANES), np.uint32)


def _scalar(waves: int) -> npt.NDArray[np.uint32]:
    registers = np.zeros((waves, 128), np.uint32)
    registers[:, EXEC : EXEC + 2] = 0xFFFFFFFF
    return registers


@dataclass
class State:
    """Registers and LDS of one workgroup. Owner: the caller; ``run`` changes it in place.

    vector: uint32 [waves, 512, 64], AGPRs from 256. scalar: uint32 [waves, 128] by operand
    encoding (VCC 106, M0 124, EXEC 126; EXEC starts with all lanes). scc, mode: uint32 [waves].
    lds: uint8 [bytes].
    """

    waves: int = 1
    lds_bytes: int = 65536
    scratch_bytes: int = 0
    vector: npt.NDArray[np.uint32] = field(default_factory=lambda: _vector(1))
    scalar: npt.NDArray[np.uint32] = field(default_factory=lambda: _scalar(1))
    scc: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    mode: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    lds: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __post_init__(self) -> None:
        self.vector, self.scalar = _vector(self.waves), _scalar(self.waves)
        self.scc = np.zeros(self.waves, np.uint32)
        self.mode = np.full(self.waves, DEFAULT_MODE, np.uint32)
        self.lds = np.zeros(self.lds_bytes, np.uint8)

    def v(self, register: int, wave: int = 0) -> npt.NDArray[np.uint32]:
        """The 64 lanes of v0..v255 (0..255) or a0..a255 (256..511), a writable view."""
        lanes: npt.NDArray[np.uint32] = self.vector[wave, register]
        return lanes

    def s64(self, register: int, wave: int = 0) -> int:
        """A scalar register pair as one number."""
        low, high = self.scalar[wave, register : register + 2]
        return int(low) | int(high) << 32

    def set_s64(self, register: int, value: int, wave: int = 0) -> None:
        """Set a scalar register pair."""
        self.scalar[wave, register] = value & 0xFFFFFFFF
        self.scalar[wave, register + 1] = value >> 32 & 0xFFFFFFFF


def run(code: str | bytes, state: State) -> dict[str, Any]:
    """Run assembly or machine code on every wave of ``state`` until s_endpgm (added to assembly).

    All registers and LDS count as written before. Global memory is what ``Device`` registered.
    Returns the launch report: instructions, findings, counters. Raises EmulatorError.
    """
    text = assemble(code + "\ns_endpgm\n") if isinstance(code, str) else code
    return dict(
        native.json_of(
            native.functions().lae_run_snippet(
                text,
                len(text),
                state.waves,
                state.vector.ctypes.data,
                state.scalar.ctypes.data,
                state.scc.ctypes.data,
                state.mode.ctypes.data,
                state.lds.ctypes.data,
                state.lds.nbytes,
                state.scratch_bytes,
            )
        )
    )
