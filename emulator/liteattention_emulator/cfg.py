"""Control flow of a kernel's machine code: blocks, dominators, natural loops.

Used by the wait-state checker, the mutation test and the kernel report. Loops are natural loops
(Aho, Lam, Sethi, Ullman, "Compilers", 9.6): a back edge's head dominates its tail, the body is what
reaches the tail without passing the head; loops with one head are one loop.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from .listing import Instruction, Listing


def successors(instructions: list[Instruction], index: int) -> tuple[int, ...]:
    """Indices of the instructions that may run next.

    A conditional branch has two, ``s_endpgm`` and the end of the section none. ``s_setpc_b64`` has
    the target of the ``s_getpc_b64, s_add_u32, s_addc_u32`` that compilers emit before it,
    ``s_swappc_b64`` the called function and the instruction behind it; an indirect jump whose
    target cannot be seen has none.
    """
    inst = instructions[index]
    name = inst.name
    following = (index + 1,) if index + 1 < len(instructions) else ()
    if name == "s_branch":
        return (inst.target,) if inst.target >= 0 else ()
    if name.startswith(("s_cbranch_", "s_call_")):
        return following if inst.target < 0 else tuple(dict.fromkeys((*following, inst.target)))
    if name.startswith("s_endpgm") or name == "(invalid)":
        return ()
    if name in ("s_setpc_b64", "s_swappc_b64"):
        target = _long_target(instructions, index)
        called = () if target is None else (target,)
        return (*following, *called) if name == "s_swappc_b64" else called
    return following


def _long_target(instructions: list[Instruction], index: int) -> int | None:
    source = instructions[index].src[0]
    if source is None:
        return None
    added = 0
    for back in range(index - 1, max(index - 12, -1), -1):
        inst = instructions[back]
        operand = inst.dst[0]
        if operand is None or not operand.mask & source.mask:
            continue
        if inst.name == "s_add_u32":
            value = next((src.value for src in inst.src if src is not None and src.kind == "c"), 0)
            added = value - (1 << 32) if value >= 1 << 31 else value
        elif inst.name == "s_getpc_b64":
            offset = inst.offset + inst.bytes + added
            return next((i.index for i in instructions if i.offset == offset), None)
        elif inst.name != "s_addc_u32":
            return None
    return None


@dataclass(frozen=True)
class Block:
    """Instructions ``first`` to ``end`` (exclusive) that run one after the other."""

    index: int
    first: int
    end: int
    successors: tuple[int, ...]
    predecessors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: its head block and all blocks of its body, those of inner loops included."""

    head: int
    blocks: frozenset[int]
    depth: int
    """1 for an outermost loop."""
    parent: int | None
    """Position of the smallest loop around it in ``Graph.loops``."""


class Graph:
    """Control flow of one kernel from its first instruction. Owner: the caller; immutable.

    ``blocks`` are in address order and cover exactly what the kernel can reach; ``loops`` are in
    the order of their heads, outer before inner.
    """

    def __init__(self, instructions: list[Instruction], entry: int) -> None:
        self.instructions = instructions
        self.entry = entry
        self.next: dict[int, tuple[int, ...]] = {}
        pending = [entry]
        while pending:
            index = pending.pop()
            if index not in self.next:
                self.next[index] = successors(instructions, index)
                pending += self.next[index]
        self.blocks, self.block_of = self._split()
        self.dominator = self._dominators()
        self.loops = self._loops()

    def _split(self) -> tuple[list[Block], dict[int, int]]:
        leaders = {self.entry}
        for index, after in self.next.items():
            if after != (index + 1,):
                leaders.update(after)
                leaders.add(index + 1)
        block_of: dict[int, int] = {}
        ranges: list[list[int]] = []
        previous = -2
        for index in sorted(self.next):
            if index in leaders or index != previous + 1:
                ranges.append([index, index])
            ranges[-1][1] = index + 1
            block_of[index] = len(ranges) - 1
            previous = index
        before: list[list[int]] = [[] for _ in ranges]
        following = [tuple(block_of[i] for i in self.next[end - 1]) for _, end in ranges]
        for block, targets in enumerate(following):
            for target in targets:
                before[target].append(block)
        blocks = [
            Block(index, first, end, following[index], tuple(before[index]))
            for index, (first, end) in enumerate(ranges)
        ]
        return blocks, block_of

    @cached_property
    def order(self) -> list[int]:
        """Blocks in reverse post-order from the entry."""
        seen = {self.block_of[self.entry]}
        out: list[int] = []
        stack = [(self.block_of[self.entry], 0)]
        while stack:
            block, at = stack.pop()
            following = self.blocks[block].successors
            if at == len(following):
                out.append(block)
                continue
            stack.append((block, at + 1))
            if following[at] not in seen:
                seen.add(following[at])
                stack.append((following[at], 0))
        return out[::-1]

    def _dominators(self) -> dict[int, int]:
        # Cooper, Harvey, Kennedy: "A Simple, Fast Dominance Algorithm".
        rank = {block: i for i, block in enumerate(self.order)}
        entry = self.order[0]
        immediate = {entry: entry}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                found = None
                for before in self.blocks[block].predecessors:
                    if before not in immediate:
                        continue
                    if found is None:
                        found = before
                        continue
                    a, b = before, found
                    while a != b:
                        while rank[a] > rank[b]:
                            a = immediate[a]
                        while rank[b] > rank[a]:
                            b = immediate[b]
                    found = a
                assert found is not None  # a reachable block has a predecessor done before it
                if immediate.get(block) != found:
                    immediate[block] = found
                    changed = True
        return immediate

    def dominates(self, a: int, b: int) -> bool:
        """Whether every path from the entry to block ``b`` passes block ``a``."""
        while b != a and b != self.dominator[b]:
            b = self.dominator[b]
        return a == b

    def _loops(self) -> list[Loop]:
        bodies: dict[int, set[int]] = {}
        for block in self.blocks:
            for head in block.successors:
                if not self.dominates(head, block.index):
                    continue
                body = bodies.setdefault(head, {head})
                pending = [block.index]
                while pending:
                    at = pending.pop()
                    if at not in body:
                        body.add(at)
                        pending += self.blocks[at].predecessors
        heads = sorted(bodies, key=lambda head: (self.blocks[head].first, -len(bodies[head])))
        loops = []
        for head in heads:
            around = [i for i, outer in enumerate(heads) if outer != head and head in bodies[outer]]
            parent = min(around, key=lambda i: len(bodies[heads[i]]), default=None)
            loops.append(Loop(head, frozenset(bodies[head]), len(around) + 1, parent))
        return loops

    def body(self, loop: Loop) -> list[Instruction]:
        """A loop's instructions in address order, inner loops included."""
        return [
            self.instructions[i]
            for block in sorted(loop.blocks)
            for i in range(self.blocks[block].first, self.blocks[block].end)
        ]

    def mix(self, loop: Loop) -> Counter[str]:
        """Instructions of a loop by unit ("valu", "trans", "mfma", ...), each counted once."""
        return Counter(inst.unit for inst in self.body(loop))

    def hot_loops(self) -> list[Loop]:
        """The loops with MFMA whose inner loops have none, most MFMA first.

        Code that groups of waves do not share has one for each group. Without MFMA the loop with
        the most instructions; none for code without a loop.
        """
        matrix = [loop for loop in self.loops if self.mix(loop)["mfma"]]
        inner = [loop for loop in matrix if not any(other.blocks < loop.blocks for other in matrix)]
        if inner:
            return sorted(inner, key=lambda loop: -self.mix(loop)["mfma"])
        return sorted(self.loops, key=lambda loop: -len(self.body(loop)))[:1]

    def hot_loop(self) -> Loop | None:
        """The first of them, or None."""
        return next(iter(self.hot_loops()), None)


def graph(listing: Listing, kernel: str) -> Graph:
    """Control flow of a kernel of a code object. Raises KeyError for a name it lacks."""
    return Graph(listing.instructions, listing.kernel(kernel).first)
