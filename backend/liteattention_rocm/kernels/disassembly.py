"""What llvm-objdump shows of a code object: instructions, loops, and the mix of a loop.

Loops are the strongly connected parts of the control-flow graph, not address ranges: compilers
place rarely taken blocks of a loop elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

OBJDUMP = "llvm-objdump-19"
DEBIAN_PACKAGE = "llvm-19"

#: Instruction classes in the order in which reports list them.
CLASSES = (
    "VALU",
    "MFMA",
    "trans",
    "SALU",
    "branch",
    "waitcnt",
    "nop",
    "barrier",
    "ds",
    "vmem",
    "LDS-DMA",
    "scratch",
    "smem",
)

_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)(_|$)")
_HEADING = re.compile(r"^[0-9a-f]+ <(?P<name>[^>]+)>:$")
_LINE = re.compile(
    r"^\s+(?P<text>\S.*?)\s*// (?P<address>[0-9A-F]+): [0-9A-F ]+(?:<(?P<target>[^>]+)>)?\s*$"
)


class ToolMissing(RuntimeError):
    """A build tool is not installed; the message names the Debian package that brings it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: byte address, text, and the address it may jump to."""

    address: int
    text: str
    target: int | None

    @property
    def mnemonic(self) -> str:
        """The operation without its operands."""
        return self.text.split()[0]

    @property
    def kind(self) -> str:
        """Its class, one of :data:`CLASSES`."""
        name = self.mnemonic
        exact = {"s_waitcnt": "waitcnt", "s_nop": "nop", "s_barrier": "barrier"}
        if name in exact:
            return exact[name]
        if name.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc")):
            return "branch"
        if name.startswith(("s_load", "s_buffer_load")):
            return "smem"
        if name.startswith("s_"):
            return "SALU"
        if name.startswith("v_mfma"):
            return "MFMA"
        if name.startswith("v_"):
            return "trans" if _TRANSCENDENTAL.match(name) else "VALU"
        if name.startswith("ds_"):
            return "ds"
        if name.startswith("scratch_"):
            return "scratch"
        return "LDS-DMA" if "_lds_" in name or self.text.endswith(" lds") else "vmem"


def disassemble(path: Path) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel of the code object at ``path``.

    Raises:
        ToolMissing: llvm-objdump is not installed.
        subprocess.CalledProcessError: it does not understand the file.
    """
    tool = shutil.which(OBJDUMP)
    if tool is None:
        raise ToolMissing(f"{OBJDUMP} is not installed (Debian: apt-get install {DEBIAN_PACKAGE})")
    text = subprocess.run(
        [tool, "-d", "--triple=amdgcn-amd-amdhsa", "--mcpu=gfx942", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return parse(text)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Read llvm-objdump's output."""
    functions: dict[str, list[Instruction]] = {}
    starts: dict[str, int] = {}
    current: list[Instruction] = []
    name = ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            name = heading["name"]
            current = functions.setdefault(name, [])
        elif found := _LINE.match(line):
            address = int(found["address"], 16)
            starts.setdefault(name, address)
            target = None
            if found["target"] and found["text"].startswith(("s_branch", "s_cbranch")):
                symbol, _, offset = found["target"].partition("+")
                target = starts.get(symbol, 0) + int(offset or "0", 16)
            current.append(Instruction(address, found["text"], target))
    return {name: _reachable(code) for name, code in functions.items() if code}


def _successors(code: list[Instruction]) -> list[list[int]]:
    at = {instruction.address: i for i, instruction in enumerate(code)}
    result = []
    for i, instruction in enumerate(code):
        following = []
        if instruction.mnemonic not in ("s_branch", "s_endpgm") and i + 1 < len(code):
            following.append(i + 1)
        if instruction.target is not None and instruction.target in at:
            following.append(at[instruction.target])
        result.append(following)
    return result


def _reachable(code: list[Instruction]) -> list[Instruction]:
    """Drop what follows the end: the padding that instruction prefetch may run into."""
    graph = _successors(code)
    seen = {0}
    work = [0]
    while work:
        for following in graph[work.pop()]:
            if following not in seen:
                seen.add(following)
                work.append(following)
    return [code[i] for i in sorted(seen)]


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Return the outermost loops of a kernel, longest first (Tarjan's algorithm, iterative)."""
    graph = _successors(code)
    order = [-1] * len(code)
    low = [0] * len(code)
    on_stack = [False] * len(code)
    stack: list[int] = []
    found: list[list[int]] = []
    counter = 0
    for root in range(len(code)):
        if order[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, edge = work.pop()
            if edge == 0:
                order[node] = low[node] = counter
                counter += 1
                stack.append(node)
                on_stack[node] = True
            elif on_stack[graph[node][edge - 1]]:
                low[node] = min(low[node], low[graph[node][edge - 1]])
            descended = False
            for i in range(edge, len(graph[node])):
                child = graph[node][i]
                if order[child] < 0:
                    work += [(node, i + 1), (child, 0)]
                    descended = True
                    break
                if on_stack[child]:
                    low[node] = min(low[node], low[child])
            if descended:
                continue
            if low[node] == order[node]:
                part = []
                while True:
                    member = stack.pop()
                    on_stack[member] = False
                    part.append(member)
                    if member == node:
                        break
                if len(part) > 1 or node in graph[node]:
                    found.append(sorted(part))
    return [[code[i] for i in part] for part in sorted(found, key=len, reverse=True)]


def hot_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the loop with the most matrix instructions (else the longest), or all of the code."""
    candidates = loops(code)
    if not candidates:
        return code
    return max(candidates, key=lambda loop: (sum(i.kind == "MFMA" for i in loop), len(loop)))


def mix(code: list[Instruction]) -> dict[str, int]:
    """Count instructions by class, every class of :data:`CLASSES` present."""
    counts = Counter(instruction.kind for instruction in code)
    return {kind: counts[kind] for kind in CLASSES}
