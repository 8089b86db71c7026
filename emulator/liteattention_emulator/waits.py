"""Which loads can be in flight at every instruction, on all paths, without running the code.

gfx942 counts outstanding vector memory operations (vmcnt) and LDS, scalar and flat ones (lgkmcnt);
``s_waitcnt`` waits until at most so many are left. vmcnt and the LDS part of lgkmcnt count in
order of issue. Scalar operations return in any order, only lgkmcnt(0) retires them; flat ones are
in no order, only zero of both retires them. This module follows the outstanding operations along
the control flow. For each it keeps how many later ones of its counter there are at least; where
paths meet, their states are joined, as compilers do that place waits. So it may see an operation
outstanding that no single path leaves so, never the reverse. From the states before each
instruction follow

- ``early``: instructions that touch a register before the load that writes it was waited for,
- ``open``: the memory operations not yet retired where order matters: at barriers, at accesses to
  LDS (copies to LDS by vector memory are not ordered with the LDS's own operations), and at
  ``s_endpgm`` none, since it waits for everything.

A wait can be removed without harm when neither grows.

Order at a barrier b matters to an operation on the LDS only if an access that conflicts with it can
run in the stretch between b and the next barrier; one that is still outstanding there is judged
anew. Two accesses conflict when they may touch a common byte and one writes it, but for two equal
atomic operations without result. All waves of a workgroup pass equally many barriers (the emulator
reports those that do not), so two waves are in one stretch when as many barriers lie behind them,
or, what is the same, before them. An access cannot be in the stretch behind b when on all its paths
fewer barriers lie behind it than on any path to b, or fewer before it than on any path from b.
Which bytes an access may touch is not derived from the code: all of them, unless ``analyse`` is
told otherwise.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cfg import Graph, graph
from .listing import VECTOR_MASK, Instruction, load, register_names

MAX_VM, MAX_LGKM = 63, 15
"""Largest values of the two counters; the field of s_waitcnt that does not wait."""

State = tuple[dict[int, int], dict[int, int], frozenset[int], frozenset[int]]
"""Outstanding on some path: of vmcnt and of the LDS, operation -> later ones of the same counter on
every path; scalar loads; flat operations. Operations are named by byte offset."""


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

    Raises BadImage or OSError as ``listing.load`` does.
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


Extents = Mapping[int, tuple[int, int]]
"""LDS bytes that instructions may touch, by offset: the first, and the one behind the last."""


def analyse(code: Graph, extents: Extents | None = None) -> Waits:
    """Follow all paths of a kernel.

    ``extents`` says which LDS bytes its instructions touch; those that are not in it touch none.
    None: any may touch any.
    """
    before: dict[int, State] = {code.entry: ({}, {}, frozenset(), frozenset())}
    pending = {code.entry}
    while pending:
        index = min(pending)  # in the order of the code: few rounds
        pending.discard(index)
        following = after(before[index], code.instructions[index])
        for successor in code.next[index]:
            merged = _join(before.get(successor), following)
            if merged != before.get(successor):
                before[successor] = merged
                pending.add(successor)
    by_offset = {code.instructions[i].offset: code.instructions[i] for i in code.next}
    stretches = _Stretches(code, extents)
    early: set[tuple[int, int]] = set()
    left: dict[int, frozenset[int]] = {}
    for index, state in before.items():
        inst = code.instructions[index]
        touched = inst.reads | inst.writes
        for number, queue in enumerate(state):
            for at in queue:
                # Of two loads in one queue the later one lands later.
                ordered = number < 2 and by_offset[at].unit == inst.unit and inst.format != "flat"
                if by_offset[at].writes & (inst.reads if ordered else touched):
                    early.add((inst.offset, at))
        if inst.unit in ("barrier", "ds") or "lds" in inst.flags:
            matter = {
                at
                for queue in state
                for at in queue
                if _matters(inst, by_offset[at]) and stretches.conflict(index, by_offset[at])
            }
            if matter:
                left[inst.offset] = frozenset(matter)
    return Waits(frozenset(early), left)


def after(state: State, inst: Instruction) -> State:
    """The outstanding operations behind an instruction."""
    vm, lds, scalar, flat = state
    none: frozenset[int] = frozenset()
    if inst.name == "s_waitcnt":
        vmcnt, lgkmcnt = counters(inst)
        # One that were left would have its `later` ones left as well: more than the count.
        vm = {at: later for at, later in vm.items() if later < vmcnt}
        lds = {at: later for at, later in lds.items() if later < lgkmcnt}
        return vm, lds, scalar if lgkmcnt else none, flat if vmcnt or lgkmcnt else none
    # A full counter holds up the next operation until the oldest has returned.
    if inst.format == "flat":
        flat |= {inst.offset}
    elif inst.unit == "vmem" and inst.reads & VECTOR_MASK | inst.writes:
        vm = _issued(vm, inst.offset, MAX_VM)
    elif inst.unit == "ds":
        lds = _issued(lds, inst.offset, MAX_LGKM)
    elif inst.unit == "smem" and inst.writes:
        scalar |= {inst.offset}
    return vm, lds, scalar, flat


def _issued(queue: dict[int, int], offset: int, most: int) -> dict[int, int]:
    return {at: n + 1 for at, n in queue.items() if n + 1 < most} | {offset: 0}


def _join(a: State | None, b: State) -> State:
    if a is None:
        return b
    vm, lds = (
        {at: min(x.get(at, MAX_VM), y.get(at, MAX_VM)) for at in x.keys() | y.keys()}
        for x, y in ((a[0], b[0]), (a[1], b[1]))
    )
    return vm, lds, a[2] | b[2], a[3] | b[3]


def _matters(inst: Instruction, outstanding: Instruction) -> bool:
    """Whether an outstanding operation may have to be done before this instruction."""
    copy = "lds" in outstanding.flags
    if inst.unit == "barrier":  # other waves may read what it writes, or overwrite what it reads
        return copy or outstanding.unit == "ds" or not outstanding.writes & VECTOR_MASK
    if inst.unit == "ds":
        return copy
    return outstanding.unit == "ds"


_CROSSBAR = ("ds_swizzle", "ds_permute", "ds_bpermute", "ds_nop")  # no memory of the LDS


def _on_lds(inst: Instruction) -> bool:
    return "lds" in inst.flags or (inst.unit == "ds" and not inst.name.startswith(_CROSSBAR))


class _Stretches:
    """Which accesses to the LDS can conflict with an outstanding one; see the module's text."""

    def __init__(self, code: Graph, extents: Extents | None) -> None:
        self._code, self._extents = code, extents
        self._accesses = [i for i in code.next if _on_lds(code.instructions[i])]
        before: dict[int, list[int]] = {i: [] for i in code.next}
        for index, following in code.next.items():
            for successor in following:
                before[successor].append(index)
        ends = [i for i, following in code.next.items() if not following]
        # barriers on the way here from the start, and from here to an end; own one left out
        self._behind = self._counts(code.next, [code.entry])
        self._ahead = self._counts(before, ends)

    def conflict(self, index: int, outstanding: Instruction) -> bool:
        """Whether one that is outstanding at this barrier or LDS access has to be done before."""
        inst = self._code.instructions[index]
        if not _on_lds(outstanding):
            return inst.unit == "barrier" and outstanding.unit != "ds"  # it is not about the LDS
        if inst.unit != "barrier":
            return self._overlap(inst, outstanding)
        return any(
            self._overlap(self._code.instructions[other], outstanding)
            and not _order_free(self._code.instructions[other], outstanding)
            and self._behind[other][1] >= self._behind[index][0] + 1
            and self._ahead[other][1] >= self._ahead[index][0]
            for other in self._accesses
        )

    def _overlap(self, a: Instruction, b: Instruction) -> bool:
        if self._extents is None:
            return True
        low, high = self._extents.get(a.offset, (0, 0))
        other_low, other_high = self._extents.get(b.offset, (0, 0))
        return max(low, other_low) < min(high, other_high)

    def _counts(
        self, forward: Mapping[int, Iterable[int]], first: list[int]
    ) -> dict[int, tuple[float, float]]:
        """Fewest and most barriers on any path from ``first`` to each instruction, without its own.

        The most are infinite behind a loop that has a barrier.
        """
        barrier = {i: self._code.instructions[i].unit == "barrier" for i in forward}
        fewest = {i: math.inf for i in forward} | {i: 0.0 for i in first}
        most = {i: -math.inf for i in forward} | {i: 0.0 for i in first}
        limit = sum(barrier.values())  # more are not on a path without a loop
        pending = set(first)
        while pending:
            index = pending.pop()
            low, high = fewest[index] + barrier[index], most[index] + barrier[index]
            high = math.inf if high > limit else high
            for successor in forward[index]:
                if low < fewest[successor] or high > most[successor]:
                    fewest[successor] = min(low, fewest[successor])
                    most[successor] = max(high, most[successor])
                    pending.add(successor)
        return {i: (fewest[i], most[i]) for i in forward}


def _order_free(a: Instruction, b: Instruction) -> bool:
    """Whether two accesses to the same LDS bytes may come in any order."""
    names = a.name, b.name
    if all(name.startswith("ds_read") for name in names):
        return True
    plain = names[0].startswith(("ds_read", "ds_write", "ds_wr")) or "lds" in a.flags
    return names[0] == names[1] and not plain and a.dst[0] is None and b.dst[0] is None
