"""Which loads can be in flight at every instruction, on all paths, without running the code.

gfx942 counts outstanding vector memory operations (vmcnt) and LDS, scalar and flat ones (lgkmcnt);
``s_waitcnt`` waits until at most so many are left. vmcnt and the LDS part of lgkmcnt count in
order of issue; scalar and flat operations return in any order, only zero retires them. This module
follows the queues of outstanding operations along the control flow: the states that are possible
before each instruction. From them follow

- ``early``: instructions that touch a register before the load that writes it was waited for,
- ``open``: the memory operations not yet retired where order matters: at barriers, at accesses to
  LDS (copies to LDS by vector memory are not ordered with the LDS's own operations), and at
  ``s_endpgm`` none, since it waits for everything.

A wait can be removed without harm when neither grows.
"""

from dataclasses import dataclass
from pathlib import Path

from .cfg import Graph, graph
from .listing import VECTOR_MASK, Instruction, load, register_names

MAX_VM, MAX_LGKM = 63, 15
"""Largest values of the two counters; the field of s_waitcnt that does not wait."""

State = tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]
"""Outstanding operations: vmcnt's and the LDS's, oldest first, and those without an order."""

_EMPTY: State = ((), (), frozenset())


class TooManyStates(RuntimeError):
    """The code has more combinations of outstanding operations than are worth following."""


@dataclass(frozen=True)
class Waits:
    """Result of ``analyse``: instructions are named by byte offset in the text section."""

    early: frozenset[tuple[int, int]]
    """(instruction that touches a register too early, load that is still to write it)."""
    open: dict[int, frozenset[int]]
    """Barrier or LDS access -> operations that may be outstanding there and matter to its order."""

    def weaker_than(self, other: "Waits") -> bool:
        """Whether anything can go wrong here that cannot in ``other``."""
        none: frozenset[int] = frozenset()
        return not self.early <= other.early or any(
            not left <= other.open.get(at, none) for at, left in self.open.items()
        )


@dataclass(frozen=True, slots=True)
class EarlyUse:
    """An instruction that touches a register on some path before a load has written it.

    ``offset`` and ``load_offset`` count bytes from the start of the text section.
    """

    kernel: str
    offset: int
    text: str
    load_offset: int
    load_text: str
    registers: str
    line: str = ""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return (
            f"{self.kernel}+text 0x{self.offset:x}{where}: {self.text}: not waited for "
            f"0x{self.load_offset:x} {self.load_text} [{self.registers}]"
        )


def check(code_object: Path | str | bytes) -> list[EarlyUse]:
    """All uses of registers that a load is still to write, in every kernel of a code object.

    Raises BadImage or OSError as ``listing.load`` does, TooManyStates as ``analyse`` does.
    """
    listed = load(code_object)
    out = []
    for kernel in listed.kernels:
        for offset, load_offset in sorted(analyse(graph(listed, kernel.name)).early):
            use, early = (listed.instructions[listed.index_of[at]] for at in (offset, load_offset))
            shared = register_names((use.reads | use.writes) & early.writes)
            line = listed.line(offset)
            out.append(
                EarlyUse(kernel.name, offset, use.text, load_offset, early.text, shared, line)
            )
    return out


def counters(inst: Instruction) -> tuple[int, int]:
    """(vmcnt, lgkmcnt) that an ``s_waitcnt`` waits for."""
    return inst.imm & 15 | (inst.imm >> 14 & 3) << 4, inst.imm >> 8 & 15


def with_counters(imm: int, vmcnt: int, lgkmcnt: int) -> int:
    """The immediate of an ``s_waitcnt`` with other counts; expcnt stays as in ``imm``."""
    return imm & 0x70 | vmcnt & 15 | (vmcnt >> 4 & 3) << 14 | (lgkmcnt & 15) << 8


def after(state: State, inst: Instruction) -> State:
    """The outstanding operations behind an instruction."""
    vm, lds, loose = state
    if inst.name == "s_waitcnt":
        vmcnt, lgkmcnt = counters(inst)
        vm = vm[len(vm) - vmcnt :] if len(vm) > vmcnt else vm
        lds = lds[len(lds) - lgkmcnt :] if len(lds) > lgkmcnt else lds
        return vm, lds, frozenset() if lgkmcnt == 0 else loose
    # A full counter holds up the next operation until the oldest has returned.
    if inst.unit == "vmem" and inst.reads & VECTOR_MASK | inst.writes:
        vm = (*vm, inst.offset)[-MAX_VM:]
        if inst.format == "flat":
            loose |= {inst.offset}
    elif inst.unit == "ds":
        lds = (*lds, inst.offset)[-MAX_LGKM:]
    elif inst.unit == "smem" and inst.writes:
        loose |= {inst.offset}
    return vm, lds, loose


def analyse(code: Graph, limit: int = 200_000) -> Waits:
    """Follow all paths of a kernel.

    Raises TooManyStates when more than ``limit`` pairs of instruction and state come up.
    """
    by_offset = {code.instructions[i].offset: code.instructions[i] for i in code.next}
    seen: dict[int, set[State]] = {index: set() for index in code.next}
    early: set[tuple[int, int]] = set()
    left: dict[int, set[int]] = {}
    written: dict[State, int] = {}  # registers that a state's operations are still to write
    visited = 0
    pending = [(code.entry, _EMPTY)]
    while pending:
        index, state = pending.pop()
        if state in seen[index]:
            continue
        seen[index].add(state)
        visited += 1
        if visited > limit:
            raise TooManyStates(f"more than {limit} states of outstanding operations")
        inst = code.instructions[index]
        touched = inst.reads | inst.writes
        if state not in written:
            written[state] = 0
            for at in (at for queue in state for at in queue):
                written[state] |= by_offset[at].writes
        for number, queue in enumerate(state if written[state] & touched else ()):
            for at in queue:
                before = by_offset[at]
                # Of two loads in one queue the later one lands later.
                mine = inst.reads if number < 2 and before.unit == inst.unit else touched
                if before.writes & mine:
                    early.add((inst.offset, at))
        if inst.unit in ("barrier", "ds") or "lds" in inst.flags:
            matter = {at for queue in state for at in queue if _matters(inst, by_offset[at])}
            if matter:
                left.setdefault(inst.offset, set()).update(matter)
        following = after(state, inst)
        pending += [(successor, following) for successor in code.next[index]]
    return Waits(frozenset(early), {at: frozenset(which) for at, which in left.items()})


def _matters(inst: Instruction, outstanding: Instruction) -> bool:
    """Whether an outstanding operation may have to be done before this instruction."""
    copy = "lds" in outstanding.flags
    if inst.unit == "barrier":  # other waves may read what it writes, or overwrite what it reads
        return copy or outstanding.unit == "ds" or not outstanding.writes & VECTOR_MASK
    if inst.unit == "ds":
        return copy
    return outstanding.unit == "ds"
