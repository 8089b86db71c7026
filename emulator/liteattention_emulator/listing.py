"""A code object's machine code as Python records: operands, registers read and written, kernels.

The C++ decoder names the registers of every instruction (``emulator/src/isa/listing.h``); this
module adds what the ELF image says: where the text section lies and which kernels begin where.
"""

import struct
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import native

SCALAR = 512
"""Number of s0 in register sets: vector registers are 0..511 (AGPRs from 256)."""
VCC = SCALAR + 106
M0 = SCALAR + 124
EXEC = SCALAR + 126
SCC = SCALAR + 128
VECTOR_MASK = (1 << SCALAR) - 1
SCALAR_MASK = ((1 << 128) - 1) << SCALAR


class BadImage(ValueError):
    """The bytes are no gfx942 code object that can be listed; the text says why."""


def registers(first: int, count: int) -> int:
    """Set of ``count`` registers from ``first``, as a bit mask."""
    return ((1 << count) - 1) << first


def register_names(mask: int) -> str:
    """``"v3, a0, s4, vcc_lo"`` for a register set; at most six, then how many more."""
    names = []
    while mask:
        low = mask & -mask
        names.append(_register_name(low.bit_length() - 1))
        mask ^= low
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _register_name(number: int) -> str:
    if number < 256:
        return f"v{number}"
    if number < SCALAR:
        return f"a{number - 256}"
    scalar = number - SCALAR
    special = {102: "flat_scratch_lo", 103: "flat_scratch_hi", 106: "vcc_lo", 107: "vcc_hi"}
    special |= {124: "m0", 126: "exec_lo", 127: "exec_hi", 128: "scc"}
    if scalar in special:
        return special[scalar]
    if scalar > 128:
        return f"hwreg({scalar - 192})"
    return f"ttmp{scalar - 108}" if scalar >= 108 else f"s{scalar}"


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand; ``kind`` is v(ector), s(calar), c(onstant) or x (a special source).

    ``index`` is the first register (vector 0..511, scalar 0..127) or the special's encoding,
    ``count`` the registers covered, ``value`` a constant's bits.
    """

    kind: str
    index: int = 0
    count: int = 0
    value: int = 0

    @property
    def mask(self) -> int:
        """The operand's registers as a set; 0 for constants and specials."""
        if self.kind == "v":
            return registers(self.index, self.count)
        return registers(SCALAR + self.index, self.count) if self.kind == "s" else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One decoded instruction; the fields' meanings stand in ``emulator/src/isa/listing.h``."""

    index: int
    offset: int
    bytes: int
    name: str
    text: str
    known: bool
    format: str
    unit: str
    target: int
    imm: int
    passes: int
    dst: tuple[Operand | None, ...]
    src: tuple[Operand | None, ...]
    reads: int
    writes: int
    flags: frozenset[str]

    @property
    def is_valu(self) -> bool:
        """Issued to the vector ALU, matrix instructions included."""
        return self.unit in ("valu", "trans", "mfma")

    @property
    def wait_states(self) -> int:
        """Issue slots it takes in hazard tables: one, ``s_nop n`` n + 1."""
        return (self.imm & 15) + 1 if self.name == "s_nop" else 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A function symbol of the text section: a kernel, or a function that one calls."""

    name: str
    first: int
    """Index of its first instruction."""
    end: int
    """Index behind its last instruction."""
    kernel: bool


@dataclass(frozen=True)
class Listing:
    """All instructions of one code object. Owner: the caller; immutable."""

    image: bytes
    text_at: int
    """Byte offset of the text section in the image."""
    text_bytes: int
    instructions: list[Instruction]
    entries: list[Entry]
    lines: dict[int, str]
    """Byte offset in the text section -> "file:line"; only offsets where a line begins."""

    @cached_property
    def index_of(self) -> dict[int, int]:
        """Byte offset in the text section -> index of the instruction there."""
        return {inst.offset: inst.index for inst in self.instructions}

    @property
    def kernels(self) -> list[Entry]:
        """The entries that are kernels, in address order."""
        return [entry for entry in self.entries if entry.kernel]

    def kernel(self, name: str) -> Entry:
        """The kernel of that name. Raises KeyError naming those there are."""
        for entry in self.kernels:
            if entry.name == name:
                return entry
        raise KeyError(f"no kernel {name}; there are {[entry.name for entry in self.kernels]}")

    def only(self, name: str) -> "Listing":
        """The listing of one kernel alone; offsets and indices count from its first instruction."""
        kernel = self.kernel(name)
        first, end = (self._offset(index) for index in (kernel.first, kernel.end))
        return _one(self.image, self.text_at + first, end - first, name)

    def with_image(self, image: bytes) -> "Listing":
        """What a listing made by ``only`` becomes when bytes of the image change."""
        at, end = self.text_at, self.text_at + self.text_bytes
        changed = [
            inst
            for inst in self.instructions
            if image[at + inst.offset : at + inst.offset + inst.bytes]
            != self.image[at + inst.offset : at + inst.offset + inst.bytes]
        ]
        if len(changed) == 1:  # as long as its encoding is
            inst = changed[0]
            found = decode(image[at + inst.offset : at + inst.offset + inst.bytes])
            if len(found) == 1 and found[0].target < 0:
                instructions = self.instructions.copy()
                instructions[inst.index] = replace(found[0], index=inst.index, offset=inst.offset)
                return Listing(image, at, end - at, instructions, self.entries, {})
        return _one(image, at, end - at, self.entries[0].name)

    def _offset(self, index: int) -> int:
        if index < len(self.instructions):
            return self.instructions[index].offset
        return self.text_bytes

    def owner(self, index: int) -> str:
        """Name of the function that an instruction belongs to, "" for padding."""
        for entry in self.entries:
            if entry.first <= index < entry.end:
                return entry.name
        return ""

    def line(self, offset: int) -> str:
        """``"file:line"`` of the instruction at a byte offset, "" where it is not known."""
        at = max((start for start in self.lines if start <= offset), default=None)
        return "" if at is None else self.lines[at]


def load(code_object: Path | str | bytes) -> Listing:
    """Decode a code object (path of the ELF file, or its bytes).

    Raises BadImage when it is no 64-bit AMDGPU ELF image with a text section, OSError when the
    file cannot be read.
    """
    image = code_object if isinstance(code_object, bytes) else Path(code_object).read_bytes()
    text, symbols = _sections(image)
    offset, size, address = text
    rows, lines = _decode(image, image[offset : offset + size])
    instructions = parse(rows)
    index_of = {inst.offset: inst.index for inst in instructions}
    kernels = {name[:-3] for name, _, _, kind in symbols if name.endswith(".kd") and kind == 1}
    entries = []
    for name, value, length, kind in symbols:
        if kind != 2 or value - address not in index_of:
            continue
        first = index_of[value - address]
        end = index_of.get(value - address + length, len(instructions))
        entries.append(Entry(name, first, end, name in kernels))
    entries.sort(key=lambda entry: (entry.first, entry.name))
    return Listing(image, offset, size, instructions, entries, lines)


def _one(image: bytes, at: int, size: int, name: str) -> Listing:
    instructions = decode(image[at : at + size])
    entry = Entry(name, 0, len(instructions), True)
    return Listing(image, at, size, instructions, [entry], {})


def decode(text: bytes) -> list[Instruction]:
    """The instructions of bare machine code."""
    return parse(native.json_of(native.functions().lae_decode(text, len(text))))


def _decode(image: bytes, text: bytes) -> tuple[list[dict[str, Any]], dict[int, str]]:
    functions = native.functions()
    try:
        found = native.json_of(functions.lae_disassemble(image, len(image)))
    except native.EmulatorError:  # an object file that is not linked: machine code, nothing more
        return native.json_of(functions.lae_decode(text, len(text))), {}
    return found["instructions"], {offset: line for offset, line in found["lines"]}


def parse(rows: list[dict[str, Any]]) -> list[Instruction]:
    """Instruction records from the decoder's (``instructions_json`` in listing.h)."""
    out = []
    for index, row in enumerate(rows):
        out.append(
            Instruction(
                index,
                row["offset"],
                row["bytes"],
                row["name"],
                row["text"],
                row["known"],
                row["format"],
                row["unit"],
                row["target"],
                row["imm"],
                row["passes"],
                tuple(_operand(field) for field in row["dst"]),
                tuple(_operand(field) for field in row["src"]),
                _mask(row["reads"]),
                _mask(row["writes"]),
                frozenset(row["flags"]),
            )
        )
    return out


def _operand(field: list[str | int] | None) -> Operand | None:
    if field is None:
        return None
    kind = str(field[0])
    if kind == "c":
        return Operand(kind, value=int(field[1]))
    return Operand(kind, int(field[1]), int(field[2]) if len(field) > 2 else 0)


def _mask(pairs: list[list[int]]) -> int:
    mask = 0
    for first, count in pairs:
        mask |= registers(first, count)
    return mask


Symbol = tuple[str, int, int, int]


def _sections(image: bytes) -> tuple[tuple[int, int, int], list[Symbol]]:
    """(file offset, size, address) of .text, and all symbols as (name, value, size, type)."""
    if image[:5] != b"\x7fELF\x02":
        raise BadImage("not a 64-bit ELF image (an offload bundle must be unpacked first)")
    if struct.unpack_from("<H", image, 18)[0] != 224:
        raise BadImage("not an AMDGPU ELF image")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<3H", image, 58)
    try:
        headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + size * i) for i in range(count)]
        at = headers[names][4]
        text = None
        symbols: list[Symbol] = []
        for name, kind, _, address, offset, length, link, _, _, _ in headers:
            if _string(image, at + name) == ".text" and kind == 1:
                text = (offset, length, address)
            if kind == 2 or (kind == 11 and not symbols):  # SHT_SYMTAB, else SHT_DYNSYM
                symbols = [
                    (_string(image, headers[link][4] + entry[0]), entry[4], entry[5], entry[1] & 15)
                    for entry in struct.iter_unpack("<IBBHQQ", image[offset : offset + length])
                ]
    except (struct.error, IndexError, ValueError) as error:
        raise BadImage(f"damaged ELF image: {error}") from error
    if text is None:
        raise BadImage("no text section")
    return text, symbols


def _string(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()
