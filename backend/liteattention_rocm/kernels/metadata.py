"""Reads what a gfx942 code object says about its kernels, without LLVM.

A code object is an ELF file with a note named ``AMDGPU`` of type 32: a MessagePack map with one
entry per kernel (LLVM's AMDGPU usage guide, "Code Object V3 and Above Metadata"). Only what such
notes use is decoded: maps, arrays, strings, integers, booleans, nil.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from . import Kernel, KernelArgument

_NOTE_TYPE = 32
_SHT_NOTE = 7


class NotACodeObject(ValueError):
    """The bytes are no AMD GPU code object, or one that is cut off."""


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """Decode the MessagePack value at ``at``; return it and where the next one begins."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag < 0x90:
        return _map(data, at, tag & 0x0F)
    if tag < 0xA0:
        return _array(data, at, tag & 0x0F)
    if tag < 0xC0:
        return _string(data, at, tag & 0x1F)
    constants: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
    if tag in constants:
        return constants[tag], at
    numbers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    numbers |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if tag in numbers:
        (value,) = struct.unpack_from(numbers[tag], data, at)
        return value, at + struct.calcsize(numbers[tag])
    sized: dict[int, tuple[str, Callable[[bytes, int, int], tuple[Any, int]]]] = {}
    sized |= {0xD9: (">B", _string), 0xDA: (">H", _string), 0xDB: (">I", _string)}
    sized |= {0xDC: (">H", _array), 0xDD: (">I", _array)}
    sized |= {0xDE: (">H", _map), 0xDF: (">I", _map)}
    if tag in sized:
        width, read = sized[tag]
        (count,) = struct.unpack_from(width, data, at)
        return read(data, at + struct.calcsize(width), count)
    raise NotACodeObject(f"metadata note has an unknown MessagePack tag {tag:#x}")


def _string(data: bytes, at: int, length: int) -> tuple[str, int]:
    if at + length > len(data):
        raise NotACodeObject("metadata note ends inside a string")
    return data[at : at + length].decode(), at + length


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(count):
        value, at = _unpack(data, at)
        values.append(value)
    return values, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    values = {}
    for _ in range(count):
        key, at = _unpack(data, at)
        values[key], at = _unpack(data, at)
    return values, at


def _note(elf: bytes) -> bytes:
    """Return the contents of the AMDGPU metadata note."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise NotACodeObject("not a little-endian 64-bit ELF file")
    (sections,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    for index in range(count):
        header = struct.unpack_from("<IIQQQQIIQQ", elf, sections + index * size)
        if header[1] != _SHT_NOTE:
            continue
        at, end = header[4], header[4] + header[5]
        while at + 12 <= end:
            name_size, body_size, kind = struct.unpack_from("<III", elf, at)
            body = at + 12 + -(-name_size // 4) * 4
            name = elf[at + 12 : at + 12 + name_size].rstrip(b"\0")
            if name == b"AMDGPU" and kind == _NOTE_TYPE:
                return elf[body : body + body_size]
            at = body + -(-body_size // 4) * 4
    raise NotACodeObject("no AMDGPU metadata note: not a GPU code object")


def decode(elf: bytes) -> dict[str, Any]:
    """Return the metadata map of a code object.

    Raises:
        NotACodeObject: the bytes are something else, or are cut off.
    """
    try:
        value, _ = _unpack(_note(elf), 0)
    except (IndexError, struct.error) as error:
        raise NotACodeObject(f"the code object is cut off: {error}") from error
    if not isinstance(value, dict):
        raise NotACodeObject("the metadata note is no map")
    return value


def code_object_version(elf: bytes) -> int:
    """Return the code-object version (5 for the objects that the package ships)."""
    return elf[8] + 2  # EI_ABIVERSION counts from version 2


def target(elf: bytes) -> str:
    """Return the processor of the code object, such as ``gfx942``."""
    return str(decode(elf).get("amdhsa.target", "")).rpartition("-")[2].partition(":")[0]


def variant(name: str) -> dict[str, int | str]:
    """Return head dimension and rounding from a kernel's name, as far as it states them."""
    found: dict[str, int | str] = {}
    if match := re.search(r"_d(\d+)(?=_|$)", name):
        found["head_dim"] = int(match[1])
    if match := re.search(r"_(rtne|rtna|rtz)$", name):
        found["rounding"] = match[1]
    return found


def kernels(elf: bytes) -> tuple[Kernel, ...]:
    """Return the kernels of a code object in the order of its metadata."""
    found = []
    for entry in decode(elf)["amdhsa.kernels"]:
        arguments = tuple(
            KernelArgument(a[".offset"], a[".size"], a[".value_kind"])
            for a in entry.get(".args", [])
        )
        found.append(
            Kernel(
                name=entry[".name"],
                variant=variant(entry[".name"]),
                vgprs=entry[".vgpr_count"],
                agprs=entry.get(".agpr_count", 0),
                sgprs=entry[".sgpr_count"],
                vgpr_spills=entry.get(".vgpr_spill_count", 0),
                sgpr_spills=entry.get(".sgpr_spill_count", 0),
                scratch_bytes=entry[".private_segment_fixed_size"],
                lds_bytes=entry[".group_segment_fixed_size"],
                max_workgroup=entry[".max_flat_workgroup_size"],
                kernarg_bytes=entry[".kernarg_segment_size"],
                kernarg=arguments,
            )
        )
    return tuple(found)
