"""Snippets of memory instructions on the emulator, and numpy's idea of what they do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from liteattention_emulator import native, snippet

from . import toolchain

U32 = np.uint32
EVERY = (1 << 64) - 1
SOME = 0x8001_F00F_1234_FFF1
"""A mask with active and inactive lanes in every quad, row and half."""


@pytest.fixture(autouse=True)
def checked() -> None:
    """All checks and counters on."""
    for name, value in {"check": "on", "count": "on", "threads": "1"}.items():
        native.set_option(name, value)


@contextmanager
def registered(*arrays: np.ndarray[Any, Any]) -> Iterator[None]:
    """Let the emulated device access these arrays."""
    functions = native.functions()
    for array in arrays:
        native.check(functions.hipHostRegister(array.ctypes.data, array.nbytes, 0), "register")
    yield
    for array in arrays:
        native.check(functions.hipHostUnregister(array.ctypes.data), "unregister")


def state(mask: int = EVERY, waves: int = 1, **sizes: int) -> snippet.State:
    """A state with recognisable vector registers and EXEC = mask."""
    out = snippet.State(waves=waves, **sizes)
    rng = np.random.default_rng(7)
    out.vector[:, :32] = rng.integers(0, 1 << 32, (waves, 32, 64), dtype=np.uint64)
    for wave in range(waves):
        out.set_s64(snippet.EXEC, mask, wave)
    return out


def machine_code(code: str) -> bytes:
    """Of a snippet, with s_endpgm."""
    return toolchain.machine_code(code + "\ns_endpgm\n")


def run(code: str, at: snippet.State, *memory: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Run with access to these arrays and expect nothing found."""
    with registered(*memory):
        report = snippet.run(machine_code(code), at)
    assert not report["findings"], report["findings"]
    return report


def kinds(code: str, at: snippet.State) -> list[str]:
    """The kinds of findings of a snippet, in the order of its instructions."""
    found = snippet.run(machine_code(code), at)["findings"]
    return [finding["kind"] for finding in sorted(found, key=lambda f: f["offset"])]


def active(mask: int) -> np.ndarray[Any, Any]:
    """bool [64]: the lanes of a mask."""
    return np.array([mask >> lane & 1 for lane in range(64)], bool)


def set_address(at: snippet.State, register: int, address: np.ndarray[Any, Any]) -> None:
    """Put 64 addresses of 64 bits into a pair of vector registers."""
    at.v(register)[:] = address & 0xFFFFFFFF
    at.v(register + 1)[:] = address >> np.uint64(32)


def set_buffer(
    at: snippet.State,
    register: int,
    base: int,
    records: int,
    stride: int = 0,
    *,
    swizzle: bool = False,
    index_stride: int = 0,
    add_tid: bool = False,
) -> None:
    """A buffer resource: index_stride 0..3 for 8, 16, 32, 64 records."""
    words = at.scalar[0, register : register + 4]
    words[0] = base & 0xFFFFFFFF
    words[1] = base >> 32 | stride << 16 | int(swizzle) << 31
    words[2] = records
    words[3] = (0x20000 if not add_tid else 0) | index_stride << 21 | int(add_tid) << 23


def gather(memory: np.ndarray[Any, Any], address: np.ndarray[Any, Any], size: int) -> Any:
    """uint8 [64, size]: the bytes of each lane, zero where they lie outside of memory."""
    at = address.astype(np.int64)[:, None] + np.arange(size)
    inside = (at[:, -1:] < memory.size) & (at[:, :1] >= 0)
    return np.where(inside, memory[np.clip(at, 0, memory.size - 1)], 0).astype(np.uint8)


def loaded(raw: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """uint32 [registers, 64] that a load of a kind (see LOADS) makes of its bytes."""
    if raw.shape[1] >= 4:
        return np.ascontiguousarray(raw).view(U32).T
    base = kind.removesuffix("_hi").removesuffix("_d16")
    dtype = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}[base]
    wide = np.ascontiguousarray(raw).view(dtype)[:, 0].astype(np.int32).view(U32)
    if kind.endswith("_d16"):
        wide = wide & U32(0xFFFF)  # SRAM ECC: the other half is written too, as zero
    if kind.endswith("_hi"):
        wide = wide << U32(16)
    return wide[None]


# kind -> bytes; the names by which each family of instructions knows it
LOADS = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
LOADS |= {f"{kind}_d16{half}": LOADS[kind] for kind in ("u8", "i8", "u16") for half in ("", "_hi")}
STORES = {"b8": 1, "b16": 2, "b8_d16_hi": 1, "b16_d16_hi": 2, "b32": 4, "b64": 8, "b96": 12}
STORES |= {"b128": 16}
_VMEM = {"u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort", "b32": "dword"}
_VMEM |= {"b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4", "b8": "byte", "b16": "short"}


def vmem(kind: str) -> str:
    """What buffer, global, flat and scratch instructions call a kind."""
    base, _, half = kind.partition("_")
    name = "short" if half and base == "u16" else _VMEM[base]
    return f"{name}_{half}" if half else name


def span(first: int, size: int) -> str:
    """Assembly of enough registers for a number of bytes."""
    count = max(1, size // 4)
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def scatter(
    memory: np.ndarray[Any, Any],
    address: np.ndarray[Any, Any],
    rows: np.ndarray[Any, Any],
    kind: str,
    lanes: np.ndarray[Any, Any],
) -> None:
    """Store registers uint32 [registers, 64] into memory, lane after lane."""
    size = STORES[kind]
    raw = np.ascontiguousarray(rows.T).view(np.uint8)
    skip = 2 if kind.endswith("_hi") else 0
    for lane in np.flatnonzero(lanes):
        at = int(address[lane])
        if at >= 0 and at + size <= memory.size:
            memory[at : at + size] = raw[lane, skip : skip + size]
