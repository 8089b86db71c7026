"""Load code objects and launch their kernels on host buffers, from Python."""

import ctypes
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from liteattention_emulator import native, recording
from liteattention_emulator.recording import Recording

LAUNCH_FAILURE = 719
_PENDING_BUFFER, _PENDING_SIZE, _PENDING_END = 1, 2, 3


class Tensor(Protocol):
    """What a PyTorch CPU tensor offers that a launch needs."""

    shape: Sequence[int]

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...

    def stride(self) -> Sequence[int]:
        """Elements from one index to the next, per dimension."""
        ...


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel: metadata ``kind``, byte offset and size in the kernarg segment."""

    name: str
    kind: str
    offset: int
    size: int

    @property
    def hidden(self) -> bool:
        """Filled in by the run-time, not by the caller."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a code object: what its descriptor and metadata say. Sizes in bytes."""

    name: str
    arguments: tuple[Argument, ...]
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    max_workgroup: int
    sgprs: int
    vgprs: int
    agprs: int
    allocated_vgprs: int
    """Registers of a lane that its descriptor reserves: at least VGPRs and AGPRs together."""
    sgpr_spills: int
    vgpr_spills: int
    unimplemented: tuple[str, ...]
    """Mnemonics in its reachable code that the emulator does not execute."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checkers found at one instruction, with the number of occurrences."""

    kind: str
    detail: str
    place: str
    """kernel+offset, source line where known, and the instruction."""
    offset: int
    wave: int
    workgroup: int
    count: int


@dataclass(frozen=True, slots=True)
class Executed:
    """How often one instruction was executed by waves, and what its LDS accesses cost.

    lds_phases: cycles of the LDS without conflicts; bank_conflicts: further cycles.
    """

    offset: int
    unit: str
    name: str
    times: int
    lds_phases: int
    bank_conflicts: int


@dataclass(frozen=True)
class Report:
    """What a launch did. ``seconds`` is host time: how long the emulation took."""

    kernel: str
    workgroups: int
    waves: int
    instructions: int
    threads: int
    seconds: float
    findings: tuple[Finding, ...]
    counters: dict[str, int]
    """lds_bytes, global_load_bytes, global_store_bytes, smem_bytes, lds_dma_bytes, scratch_bytes,
    vmem_lines (128-byte lines asked of L1), distinct_load_bytes (of the 64-byte pieces that vector
    loads touch, each once per workgroup), barriers (per wave), flops (of MFMA)."""
    executed: tuple[Executed, ...]
    """One entry per executed instruction, in address order; empty with counters off."""
    lds_extents: dict[int, tuple[int, int]]
    """Of each instruction that touched the LDS, copies from memory included, by its offset: the
    first byte and the one behind the last, of all its executions together."""
    recording: Recording | None = None
    """Of the workgroup that ``Module.launch(..., record=)`` named."""

    @property
    def rate(self) -> float:
        """Wave instructions emulated per second of host time."""
        return self.instructions / self.seconds if self.seconds else 0.0

    def by_unit(self) -> dict[str, int]:
        """Executed wave instructions by unit (salu, valu, trans, mfma, ds, vmem, ...)."""
        return self._sum("unit")

    def by_name(self) -> dict[str, int]:
        """Executed wave instructions by mnemonic, most frequent first."""
        return self._sum("name")

    def _sum(self, key: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for row in self.executed:
            total[getattr(row, key)] += row.times
        return dict(total.most_common())

    def hot(self, count: int = 20) -> list[Executed]:
        """The most often executed instructions."""
        return sorted(self.executed, key=lambda row: (-row.times, row.offset))[:count]

    def conflicts(self) -> list[Executed]:
        """Instructions with LDS bank conflicts, worst first."""
        rows = [row for row in self.executed if row.bank_conflicts]
        return sorted(rows, key=lambda row: (-row.bank_conflicts, row.offset))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values, with sums by unit and by mnemonic."""
        waves = max(self.waves, 1)
        return {
            "kernel": self.kernel,
            "workgroups": self.workgroups,
            "waves": self.waves,
            "instructions": self.instructions,
            "emulated_by_threads": self.threads,
            "emulation_seconds": self.seconds,
            "emulated_instructions_per_second": self.rate,
            "by_unit": self.by_unit(),
            "by_unit_per_wave": {unit: n / waves for unit, n in self.by_unit().items()},
            "by_name": self.by_name(),
            "counters": self.counters,
            "bank_conflicts": [
                {"offset": row.offset, "name": row.name, "times": row.times}
                | {"lds_phases": row.lds_phases, "extra_cycles": row.bank_conflicts}
                for row in self.conflicts()
            ],
            "findings": [
                {name: getattr(finding, name) for name in finding.__slots__}
                for finding in self.findings
            ],
        }


def last_launch() -> Report | None:
    """The calling thread's latest launch, through whichever API; None when it did not run."""
    data = native.json_of(native.functions().lae_last_launch())
    if not data:
        return None
    findings = tuple(
        Finding(
            row["kind"],
            row["detail"],
            row["place"],
            row["offset"],
            row["wave"],
            row["workgroup"],
            row["count"],
        )
        for row in data["findings"]
    )
    return Report(
        data["kernel"],
        data["workgroups"],
        data["waves"],
        data["instructions"],
        data["threads"],
        data["seconds"],
        findings,
        data["counters"],
        tuple(Executed(*row) for row in data["executed"]),
        {offset: (low, high) for offset, low, high in data["lds_extents"]},
    )


def kernels(code_object: bytes) -> dict[str, Kernel]:
    """The kernels of a code object or offload bundle, by name.

    Raises EmulatorError when it is damaged or not for gfx942.
    """
    data = native.json_of(native.functions().lae_kernels(code_object, len(code_object)))
    out = {}
    for row in data["kernels"]:
        fields = {name: row[name] for name in Kernel.__slots__ if name in row}
        fields["arguments"] = tuple(Argument(**argument) for argument in row["arguments"])
        fields["unimplemented"] = tuple(row["unimplemented"])
        out[row["name"]] = Kernel(**fields)
    return out


def named(there: Mapping[str, Kernel], name: str) -> Kernel:
    """The kernel of that name. Raises KeyError naming those there are."""
    if name not in there:
        raise KeyError(f"no kernel {name}; there are {', '.join(sorted(there))}")
    return there[name]


def _span(array: npt.NDArray[Any] | Tensor) -> tuple[int, int, int]:
    """(pointer to pass, first byte, bytes) of an array or CPU tensor, any strides."""
    if isinstance(array, np.ndarray):
        pointer, size, steps = int(array.ctypes.data), array.itemsize, array.strides
    else:
        pointer, size = array.data_ptr(), array.element_size()
        steps = tuple(step * size for step in array.stride())
    if 0 in tuple(array.shape):
        return pointer, pointer, 0
    reach = [(n - 1) * step for n, step in zip(array.shape, steps, strict=True)]
    before = sum(distance for distance in reach if distance < 0)
    after = sum(distance for distance in reach if distance > 0)
    return pointer, pointer + before, after - before + size


def _missing(array: npt.NDArray[Any] | Tensor, number: int) -> str:
    """Say which elements the calling thread's latest launch did not store to; "" when none."""
    pointer, first, length = _span(array)
    if not length:
        return ""
    stored = np.zeros(length, np.uint8)
    if native.functions().lae_stored(first, length, stored.ctypes.data):
        raise native.EmulatorError("fills needs the checks: they note what was stored to")
    if isinstance(array, np.ndarray):
        size, steps = array.itemsize, array.strides
    else:
        size = array.element_size()
        steps = tuple(step * size for step in array.stride())
    per_byte = np.lib.stride_tricks.as_strided(
        stored[pointer - first :], (*array.shape, size), (*steps, 1)
    )
    left = np.argwhere(~per_byte.all(-1))
    if not len(left):
        return ""
    index = tuple(int(i) for i in left[0])
    shape = tuple(array.shape)
    return f"{len(left)} elements of array {number} of shape {shape}, the first at {index}"


_BY_VALUE = ": give them as an array of uint8 (of a .npy file)"


def _is_struct(argument: Argument) -> bool:
    """Whether it holds bytes, and no pointer or number."""
    return argument.kind == "by_value" and argument.size > 8


def _pack(value: Any, argument: Argument, where: str) -> bytes:
    if isinstance(value, bool | int):
        if argument.size not in (1, 2, 4, 8):
            raise TypeError(f"{where} takes {argument.size} bytes, not an integer{_BY_VALUE}")
        bits = 8 * argument.size
        if not -(1 << bits - 1) <= value < 1 << bits:
            raise TypeError(f"{where} takes {argument.size} bytes, which {value} does not fit")
        return (int(value) % (1 << 8 * argument.size)).to_bytes(argument.size, "little")
    if isinstance(value, float):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if argument.size not in formats:
            raise TypeError(f"{where} takes {argument.size} bytes, not a float{_BY_VALUE}")
        return struct.pack(formats[argument.size], value)
    if isinstance(value, np.generic):
        packed = value.tobytes()
    elif isinstance(value, bytes | bytearray | ctypes.Structure | ctypes.Array):
        packed = bytes(value)
    else:
        raise TypeError(f"{where} cannot be passed as {type(value).__name__}")
    if len(packed) != argument.size:
        raise TypeError(f"{where} takes {argument.size} bytes, got {len(packed)}")
    return packed


def packed(kernel: Kernel, args: Sequence[Any]) -> tuple[bytearray, list[tuple[int, int]]]:
    """The argument buffer of a launch, and the first byte and the bytes of each array in ``args``.

    args: as `Module.launch` takes them. Raises TypeError with every argument that does not fit.
    """
    explicit = [argument for argument in kernel.arguments if not argument.hidden]
    if len(explicit) != len(args):
        names = ", ".join(argument.name or argument.kind for argument in explicit)
        raise TypeError(f"{kernel.name} takes {len(explicit)} arguments ({names}), got {len(args)}")
    buffer = bytearray(max((argument.offset + argument.size for argument in explicit), default=0))
    spans, reasons = [], []
    for number, (value, argument) in enumerate(zip(args, explicit, strict=True)):
        where = f"{kernel.name}: argument {number} ({argument.name or argument.kind})"
        if value is None:
            value = 0
        try:
            if isinstance(value, np.ndarray) and _is_struct(argument):
                if value.dtype != np.uint8:
                    raise TypeError(f"{where} is a struct, got {value.dtype}{_BY_VALUE}")
                value = value.tobytes()
            elif isinstance(value, np.ndarray) or hasattr(value, "data_ptr"):
                value, first, length = _span(value)
                spans.append((first, length))
            part = _pack(value, argument, where)
        except TypeError as error:
            reasons.append(str(error))
        else:
            buffer[argument.offset : argument.offset + argument.size] = part
    if reasons:
        raise TypeError("; ".join(reasons))
    return buffer, spans


class Module:
    """A loaded code object. Owner: the caller, who closes it (a context manager); thread-safe."""

    def __init__(self, code_object: bytes | str | Path) -> None:
        """Load an ELF code object or an uncompressed offload bundle: its bytes or its file.

        Raises EmulatorError when it is damaged or not for gfx942, OSError for an unreadable file.
        """
        if isinstance(code_object, bytes):
            self.image = code_object
        else:
            self.image = Path(code_object).read_bytes()
        self.kernels = kernels(self.image)
        self._handle = ctypes.c_void_p()
        error = native.functions().hipModuleLoadData(ctypes.byref(self._handle), self.image)
        native.check(error, "hipModuleLoadData")

    def __enter__(self) -> "Module":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unload it; further launches fail."""
        if self._handle:
            native.functions().hipModuleUnload(self._handle)
            self._handle = ctypes.c_void_p()

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name. Raises KeyError naming those there are."""
        return named(self.kernels, name)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        dynamic_lds: int = 0,
        fills: Sequence[npt.NDArray[Any] | Tensor] = (),
        record: int | None = None,
    ) -> Report:
        """Run a kernel and return what it did.

        grid: workgroups, block: work-items, one to three numbers each. args: one per explicit
        argument: numpy arrays and CPU tensors (any strides; their byte spans are what the kernel
        may access), None for a null pointer, integers, floats, numpy scalars, or bytes, arrays of
        uint8 and ctypes structures for structs by value. fills: arrays that the launch must store
        to in full, whatever they held before; what a grid too small leaves out has the old values
        else, and nobody notices. record: a workgroup (linear id) whose instruction streams the
        report keeps. Raises LaunchFailed when the checkers found something, an array of
        ``fills`` has elements that were not stored to, or the launch cannot run, TypeError with
        every argument that does not fit.
        """
        buffer, spans = packed(self.kernel(name), args)
        with _registered(spans):
            report = self.launch_packed(
                name, grid, block, buffer, dynamic_lds=dynamic_lds, record=record
            )
        missing = [text for number, array in enumerate(fills) if (text := _missing(array, number))]
        if missing:
            lines = (f"{name}: not filled by a grid of {tuple(grid)}: {text}" for text in missing)
            raise native.LaunchFailed("\n".join(lines), [])
        return report

    def launch_packed(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        buffer: bytes | bytearray,
        *,
        dynamic_lds: int = 0,
        record: int | None = None,
    ) -> Report:
        """Run a kernel on an argument buffer that the caller has packed, and return what it did.

        For kernels whose metadata does not tell one argument from another. What the buffer points
        to must be registered (:func:`registered`) until this returns. Grid, block, ``record`` and
        what it raises are those of `launch`.
        """
        with nullcontext() if record is None else recording.recording(record):
            report = self._run(name, _dimensions(grid), _dimensions(block), buffer, dynamic_lds)
            return report if record is None else replace(report, recording=recording.recorded())

    def _run(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        buffer: bytes | bytearray,
        dynamic_lds: int,
    ) -> Report:
        hip = native.functions()
        function = ctypes.c_void_p()
        error = hip.hipModuleGetFunction(ctypes.byref(function), self._handle, name.encode())
        native.check(error, "hipModuleGetFunction")
        data = (ctypes.c_char * max(len(buffer), 1)).from_buffer_copy(bytes(buffer) or b"\0")
        size = ctypes.c_size_t(len(buffer))
        extra = (ctypes.c_void_p * 5)(
            _PENDING_BUFFER,
            ctypes.addressof(data),
            _PENDING_SIZE,
            ctypes.addressof(size),
            _PENDING_END,
        )
        error = hip.hipModuleLaunchKernel(function, *grid, *block, dynamic_lds, None, None, extra)
        report = last_launch()
        if error or report is None:
            text = (
                hip.lae_last_report().decode(errors="replace").strip()
                or hip.hipGetErrorName(error).decode()
            )
            found = [] if report is None else report.to_dict()["findings"]
            raise native.LaunchFailed(text, found)
        return report


def _dimensions(sizes: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3:
        raise TypeError(f"one to three dimensions, got {len(sizes)}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


@contextmanager
def _registered(spans: list[tuple[int, int]]) -> Iterator[None]:
    hip = native.functions()
    done = []
    try:
        for first, length in spans:
            if length:
                native.check(hip.hipHostRegister(first, length, 0), "hipHostRegister")
                done.append(first)
        yield
    finally:
        for first in done:
            hip.hipHostUnregister(first)


def registered(*arrays: npt.NDArray[Any] | Tensor) -> Any:
    """Context manager: the byte spans of arrays are accessible to kernels and snippets."""
    return _registered([_span(array)[1:] for array in arrays])


def disassemble(code_object: bytes) -> dict[str, Any]:
    """Instructions, lines and kernels of a code object, as ``lae_disassemble`` documents them.

    Raises EmulatorError when it is damaged or not for gfx942.
    """
    native_json = native.functions().lae_disassemble(code_object, len(code_object))
    return dict(native.json_of(native_json))
