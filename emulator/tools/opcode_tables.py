"""Write `src/isa/encodings.def`: which opcode number is which instruction, for every gfx942 format.

    python emulator/tools/opcode_tables.py > emulator/src/isa/encodings.def

Nothing is typed in by hand: for each encoding format every opcode number is put into an otherwise
plain instruction word and given to LLVM's disassembler (llvm-mc-19); what it prints is the name.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap

from liteattention_emulator import llvm

V, S = 4, 4  # every register operand is v4 / s4: aligned for each operand width


def words() -> list[tuple[str, int, list[list[int]]]]:
    """Yield (format, opcode, candidate instruction words): the first that disassembles counts."""
    out: list[tuple[str, int, list[list[int]]]] = []
    src_v = 256 + V
    for op in range(128):
        if op < 96:  # above are the prefixes of the other scalar formats
            out.append(("sop2", op, [[0b10 << 30 | op << 23 | S << 16 | S << 8 | S]]))
        out.append(("sopc", op, [[0b101111110 << 23 | op << 16 | S << 8 | S]]))
        out.append(("sopp", op, [[0b101111111 << 23 | op << 16]]))
    for op in range(29):
        # s_setreg / s_getreg take a hardware register, s_setreg_imm32 a literal
        out.append(
            (
                "sopk",
                op,
                [[0b1011 << 28 | op << 23 | d << 16 | i, 0] for d in (S, 0) for i in (4, 0xF801)],
            )
        )
    for op in range(256):
        out.append(
            ("sop1", op, [[0b101111101 << 23 | d << 16 | op << 8 | s]
                          for d in (S, 0) for s in (S, 0)])
        )  # fmt: skip
        smem = 0b110000 << 26 | op << 18 | 1 << 17
        plain = 0b110000 << 26 | op << 18  # cache control and clocks, without address
        out.append(("smem", op, [[smem | S << 6 | S // 2, 0], [plain | S << 6, 0], [plain, 0]]))
        vop1 = 0b0111111 << 25 | op << 9
        out.append(("vop1", op, [[vop1 | V << 17 | src_v], [vop1 | V << 17 | S], [vop1]]))
        out.append(("vopc", op, [[0b0111110 << 25 | op << 17 | V << 9 | src_v]]))
        ds = 0b110110 << 26 | op << 17
        out.append(
            ("ds", op, [[ds | off, a | d0 << 8 | d1 << 16 | vd << 24] for a in (V, 0)
                        for off in (0, 0x10) for vd in (V, 0) for d0 in (V, 0) for d1 in (V, 0)])
        )  # fmt: skip
    for op in range(62):
        out.append(("vop2", op, [[op << 25 | V << 17 | V << 9 | src_v, 0x1234]]))
    for op in range(0x380):  # above is the prefix of vop3p
        base = 0b110100 << 26 | op << 16 | V
        sources = [(a, b, c) for a in (src_v, S) for b in (src_v, S, 0) for c in (src_v, S, 0)]
        out.append(
            ("vop3", op, [[base | sd << 8, a | b << 9 | c << 18]
                          for a, b, c in sources for sd in (0, S)] + [[base - V, 0]])
        )  # fmt: skip
    for op in range(128):
        base = 0b110100111 << 23 | op << 16 | V
        sources = [(src_v, src_v, src_v), (src_v, src_v, 0), (src_v, 0, 0)]
        out.append(
            ("vop3p", op, [[base | hi << 14, a | b << 9 | c << 18 | lo << 27]
                           for hi in (1, 0) for lo in (3, 0) for a, b, c in sources])
        )  # fmt: skip
        mubuf = 0b111000 << 26 | op << 18
        buffer = [mubuf | 1 << 12, V | V << 8 | S // 4 << 16 | S << 24]
        out.append(("mubuf", op, [buffer, [mubuf, 0]]))
        if op < 16:
            mtbuf = 0b111010 << 26 | op << 15 | 1 << 19 | 1 << 12
            out.append(("mtbuf", op, [[mtbuf, V | V << 8 | S // 4 << 16 | S << 24]]))
        for name, segment in (("flat", 0), ("scratch", 1), ("global", 2)):
            flat = 0b110111 << 26 | op << 18 | segment << 14
            sve = [0, 1 << 13] if name == "scratch" else [0]
            sa = [0x7F, S, 0]
            out.append(
                (name, op, [[flat | s, V | d << 8 | a << 16 | vd << 24]
                            for s in sve for a in sa for vd in (V, 0) for d in (V, 0)])
            )  # fmt: skip
    return out


def disassemble(encodings: list[list[int]]) -> dict[str, str]:
    """Return hex bytes -> text for those encodings that are instructions."""
    try:
        tool = llvm.find("llvm-mc")
    except llvm.ToolMissing as error:
        sys.exit(str(error))
    lines = []
    for words_ in encodings:
        data = b"".join(w.to_bytes(4, "little") for w in words_)
        lines.append(" ".join(f"0x{b:02x}" for b in data))
    run = subprocess.run(
        [tool, "--disassemble", "--triple=amdgcn", "--mcpu=gfx942", "--show-encoding"],
        input="\n".join(lines), capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = {}
    for line in run.stdout.splitlines():
        match = re.match(r"\s+(\S.*?)\s*; encoding: \[(.*)\]", line)
        if match:
            found[match[2].replace("0x", "").replace(",", "")] = match[1]
    return found


def main() -> None:
    """Print the table."""
    table = words()
    flat = [c for _, _, candidates in table for c in candidates]
    texts = disassemble(flat)
    found: dict[str, dict[int, str]] = {}
    for name, op, candidates in table:
        for c in candidates:
            length = 1 if name in ("sop1", "sop2", "sopc", "sopp", "vop1", "vopc") else len(c)
            for n in {length, len(c), 1} if name in ("sopk", "vop2") else {length}:
                key = b"".join(w.to_bytes(4, "little") for w in c[:n]).hex()
                if key in texts:
                    text = texts[key]
                    break
            else:
                continue
            mnemonic = re.sub(r"_(e32|e64|sdwa|dpp)$", "", text.split()[0])
            found.setdefault(name, {})[op] = mnemonic
            break
    print("// Made by emulator/tools/opcode_tables.py from LLVM's disassembler; do not edit.")
    print("// ENCODINGS(format, opcode, mnemonics of it and of those after it, without suffixes)")
    for name, mnemonics in found.items():
        for first in sorted(mnemonics):
            if first - 1 in mnemonics:
                continue
            run = itertools.takewhile(mnemonics.__contains__, itertools.count(first))
            lines = textwrap.wrap(" ".join(mnemonics[op] for op in run), 92)
            quoted = "".join(f'\n    "{line} "' for line in lines).removesuffix(' "')
            print(f'ENCODINGS({name}, {first},{quoted}")')


if __name__ == "__main__":
    main()
