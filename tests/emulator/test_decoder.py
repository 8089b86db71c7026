"""The decoder against LLVM's disassembler: mnemonics, sizes and register operands."""

import re
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import liteattention_emulator
from liteattention_emulator import native
from liteattention_rocm.engines.gfx942 import manifest
from tests import ROOT

from .toolchain import assembled, machine_code, run

CODE_OBJECTS = sorted(manifest.DIRECTORY.glob("*.co"))

# Format -> (bits of the first word, position of the opcode).
FORMATS = {
    "sop1": (0b101111101 << 23, 8),
    "sop2": (0b10 << 30, 23),
    "sopk": (0b1011 << 28, 23),
    "sopc": (0b101111110 << 23, 16),
    "sopp": (0b101111111 << 23, 16),
    "smem": (0b110000 << 26, 18),
    "vop1": (0b0111111 << 25, 9),
    "vop2": (0, 25),
    "vopc": (0b0111110 << 25, 17),
    "vop3": (0b110100 << 26, 16),
    "vop3p": (0b110100111 << 23, 16),
    "ds": (0b110110 << 26, 17),
    "mubuf": (0b111000 << 26, 18),
    "flat": (0b110111 << 26, 18),
    "scratch": (0b110111 << 26 | 1 << 14, 18),
    "global": (0b110111 << 26 | 2 << 14, 18),
}
OPCODE_BITS = {"sop1": 8, "sop2": 7, "sopk": 5, "sopc": 7, "sopp": 7, "smem": 8, "vop1": 8}
OPCODE_BITS |= {"vop2": 6, "vopc": 8, "vop3": 10, "vop3p": 7, "ds": 8, "mubuf": 7}
OPCODE_BITS |= {"flat": 7, "scratch": 7, "global": 7}

REGISTER = re.compile(
    r"\b(?:(v|s|a|ttmp)(\d+)\b|(v|s|a|ttmp)\[(\d+):(\d+)\]|"
    r"(vcc|exec|flat_scratch|xnack_mask)(_lo|_hi)?\b|(m0)\b)"
)
# Cache hints: nothing to do here, wherever they point.
ADDRESS_IGNORED = {"s_dcache_discard", "s_dcache_discard_x2"}
SPECIAL = {"flat_scratch": 102, "xnack_mask": 104, "vcc": 106, "exec": 126}


def llvm_registers(operands: str) -> Counter[tuple[str, int, int]]:
    """(file, first, count) of the registers in a line of assembly."""
    found: Counter[tuple[str, int, int]] = Counter()
    for one, number, many, first, last, special, half, m0 in REGISTER.findall(operands):
        if m0:
            found["s", 124, 1] += 1
        elif special:
            found["s", SPECIAL[special] + (half == "_hi"), 1 if half else 2] += 1
        else:
            file, begin = one or many, int(number or first)
            count = 1 if one else int(last) - begin + 1
            offset = {"a": 256, "ttmp": 108}.get(file, 0)
            found["v" if file in "va" else "s", begin + offset, count] += 1
    return found


def our_registers(inst: dict) -> Counter[tuple[str, int, int]]:
    operands = [*inst["dst"], *inst["src"]]
    if inst["format"] == "mubuf" and inst["dst"][0] and inst["src"][1]:
        operands = operands[2:]  # LLVM lists the register of a returning atomic once
    if inst["name"] == "v_swap_b32":
        operands = [operands[0], operands[2]]  # both are written, the source is listed once
    if inst["name"].startswith("v_div_fmas"):
        operands = operands[:5]  # VCC is implied
    return Counter(tuple(o) for o in operands if o and o[0] in "vs")


def llvm_listing(object_file: bytes, tmp_path: Path) -> dict[int, tuple[str, str]]:
    """Byte offset in .text -> (mnemonic, operands)."""
    path = tmp_path / "object.o"
    path.write_bytes(object_file)
    text = run("llvm-objdump", "-d", "--mcpu=gfx942", "--no-show-raw-insn", str(path)).decode()
    out = {}
    line = re.compile(r"^\t([a-z_0-9.]+)(?: (.*?))?\s*// ([0-9A-F]+):")
    rows = [match for match in map(line.match, text.splitlines()) if match]
    base = int(rows[0][3], 16)
    for match in rows:
        out[int(match[3], 16) - base] = (match[1], match[2] or "")
    return out


def bare(mnemonic: str) -> str:
    """Without the suffixes of encodings, which the operands tell anyway."""
    return re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", mnemonic)


def differences(ours: dict, theirs: tuple[str, str]) -> str:
    mnemonic, operands = theirs
    if ours["name"] != bare(mnemonic):
        return "mnemonic"
    if (
        ours["known"]
        and bare(mnemonic) not in ADDRESS_IGNORED
        and our_registers(ours) != llvm_registers(operands)
    ):
        return "registers"
    return ""


@pytest.mark.llvm
@pytest.mark.parametrize("path", CODE_OBJECTS, ids=lambda path: path.stem)
def test_shipped_code_objects(path: Path, tmp_path: Path) -> None:
    image = path.read_bytes()
    theirs = llvm_listing(image, tmp_path)
    ours = {i["offset"]: i for i in liteattention_emulator.disassemble(image)["instructions"]}
    assert len(theirs) > 50
    wrong = []
    for offset, row in theirs.items():
        problem = "size" if offset not in ours else differences(ours[offset], row)
        if problem:
            wrong.append((hex(offset), problem, row, ours.get(offset, {}).get("text")))
    assert not wrong[:10]


def encodings() -> list[tuple[str, int, str]]:
    """(format, opcode, mnemonic) of everything that gfx942 has."""
    text = (ROOT / "emulator" / "src" / "isa" / "encodings.def").read_text()
    runs = re.findall(r"^ENCODINGS\((\w+), (\d+),([^)]*)\)", text, re.M)
    return [
        (name, opcode, mnemonic)
        for name, first, mnemonics in runs
        if name in FORMATS
        for opcode, mnemonic in enumerate(re.findall(r"\w+", mnemonics), int(first))
    ]


# Fields (word, first bit, bits) that an opcode may not use and that must then be zero.
FIELDS = {
    "ds": [(0, 0, 16), (0, 25, 1), (1, 0, 8), (1, 8, 8), (1, 16, 8), (1, 24, 8)],
    "vop3": [(0, 8, 3), (0, 11, 4), (0, 15, 1), (1, 0, 9), (1, 9, 9), (1, 18, 9), (1, 27, 5)],
    "vop3p": [(0, 8, 3), (0, 11, 4), (0, 15, 1), (1, 18, 9), (1, 27, 5)],
    "flat": [(0, 12, 2), (0, 16, 2), (0, 25, 1), (1, 8, 8), (1, 23, 1), (1, 24, 8)],
    "mubuf": [(0, 12, 2), (0, 15, 3), (1, 0, 8), (1, 23, 1)],
    "smem": [(0, 6, 7), (0, 14, 4), (1, 0, 32)],
    "sop1": [(0, 0, 8), (0, 16, 7)],
    "sopp": [(0, 0, 16)],
}
FIELDS["scratch"] = FIELDS["global"] = FIELDS["flat"]
PREFIX_BITS = {"sop1": 9, "sopc": 9, "sopp": 9, "sop2": 2, "sopk": 4, "vop1": 7, "vop2": 1}
PREFIX_BITS |= {"vopc": 7, "vop3p": 9}


def random_words(format_name: str, opcode: int, random: Random) -> tuple[int, int]:
    fixed, position = FORMATS[format_name]
    prefix = PREFIX_BITS.get(format_name, 6)
    taken = ((1 << OPCODE_BITS[format_name]) - 1) << position | ((1 << prefix) - 1) << 32 - prefix
    words = [random.getrandbits(32), random.getrandbits(32)]
    for word, first, bits in FIELDS.get(format_name, ()):
        if random.random() < 0.5:
            words[word] &= ~(((1 << bits) - 1) << first)
    if format_name in ("flat", "scratch", "global"):
        taken |= 3 << 14
        if format_name == "flat" or random.random() < 0.5:
            words[1] |= 0x7F << 16  # no saddr
    if format_name == "ds":
        taken |= 1 << 16  # there is no GDS
    return words[0] & ~taken | fixed | opcode << position, words[1]


def is_valid(ours: dict, operands: str) -> bool:
    """Registers that exist: LLVM lists others too, as it pleases."""
    tuples = [o for o in (*ours["dst"], *ours["src"]) if o and o[0] == "s" and o[2] > 1]
    aligned = all(first % min(count, 4) == 0 and first + count <= 128 for _, first, count in tuples)
    no_destination = operands.startswith("src_")
    return aligned and not no_destination and not re.search("null|Invalid", operands)


@pytest.mark.llvm
def test_random_encodings(tmp_path: Path) -> None:
    """Every opcode with random fields, wherever LLVM takes the result for an instruction."""
    random = Random(1)
    slots = []
    for format_name, opcode, mnemonic in encodings():
        slots += [(mnemonic, random_words(format_name, opcode, random)) for _ in range(12)]
    # A slot is 16 bytes, so that whatever an encoding swallows, the next begins where it should.
    nop = 0xBF800000
    words = [word for _, pair in slots for word in (*pair, nop, nop)]
    theirs = llvm_listing(assembled(".long " + ",".join(map(hex, words)) + "\n"), tmp_path)
    text = b"".join(word.to_bytes(4, "little") for word in words)
    decoded = native.json_of(native.functions().lae_decode(text, len(text)))
    ours = {inst["offset"]: inst for inst in decoded}
    starts = sorted(theirs)
    compared: Counter[str] = Counter()
    wrong = []
    for index, (mnemonic, pair) in enumerate(slots):
        at = 16 * index
        row = theirs.get(at)
        if row is None or row[0].startswith(".") or not is_valid(ours[at], row[1]):
            continue
        compared[mnemonic] += 1
        problem = differences(ours[at], row)
        following = bisect_right(starts, at)
        if not problem and following < len(starts) and starts[following] - at != ours[at]["bytes"]:
            problem = f"{starts[following] - at} bytes, not {ours[at]['bytes']}"
        if problem:
            code = f"{pair[0]:08x} {pair[1]:08x}"
            wrong.append((problem, " ".join(row), ours[at]["text"], code))
    assert len(compared) > 1000
    assert not wrong[:20], f"{len(wrong)} of {compared.total()} differ"


def test_invalid_words_stay_one_instruction() -> None:
    text = machine_code("v_mov_b32 v1, v2") + b"\xff\xff\xff\xff" * 2
    decoded = native.json_of(native.functions().lae_decode(text, len(text)))
    assert [inst["name"] for inst in decoded] == ["v_mov_b32", "(invalid)", "(invalid)"]
    assert not decoded[1]["known"]
