"""Reads what a gfx942 code object says about its kernels, without LLVM.

A code object is an ELF file with a note named ``AMDGPU`` of type 32: a MessagePack map with one
entry per kernel (LLVM's AMDGPU usage guide, "Code Object V3 and Above Metadata").
"""

from __future__ import annotations

import io
import re
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

from liteattention_rocm.engines.gfx942.manifest import Kernel, KernelArgument

_NOTE_TYPE = 32


class NotACodeObject(ValueError):
    """The bytes are no AMD GPU code object, or one that is cut off."""


def _notes(elf: bytes) -> tuple[int, list[bytes]]:
    """The ABI version of an ELF file, and its AMDGPU metadata notes."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise NotACodeObject("not a little-endian 64-bit ELF file")
    try:
        file = ELFFile(io.BytesIO(elf))
        found = [
            note["n_descdata"]
            for section in file.iter_sections()
            if isinstance(section, NoteSection)
            for note in section.iter_notes()
            if (note["n_name"], note["n_type"]) == ("AMDGPU", _NOTE_TYPE)
        ]
        return file.header["e_ident"]["EI_ABIVERSION"], found
    except (ELFError, ConstructError, UnicodeError) as error:
        raise NotACodeObject(f"the code object is cut off or damaged: {error}") from error


def decode(elf: bytes) -> dict[str, Any]:
    """Return the metadata map of a code object.

    Raises:
        NotACodeObject: the bytes are something else, or are cut off.
    """
    _, notes = _notes(elf)
    if not notes:
        raise NotACodeObject("no AMDGPU metadata note: not a GPU code object")
    try:
        value = msgpack.unpackb(notes[0])
    except (ValueError, msgpack.UnpackException) as error:
        raise NotACodeObject(f"the metadata note is no MessagePack: {error}") from error
    if not isinstance(value, dict):
        raise NotACodeObject("the metadata note is no map")
    return value


def code_object_version(elf: bytes) -> int:
    """Return the code-object version (5 for the objects that the package ships).

    Raises:
        NotACodeObject: as :func:`decode`.
    """
    return _notes(elf)[0] + 2  # EI_ABIVERSION counts from version 2


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
