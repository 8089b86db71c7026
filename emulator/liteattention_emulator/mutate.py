"""Broken copies of a kernel's machine code, one change each, to test whether checkers notice.

A mutation patches a few bytes of a code object and keeps its size. ``mutations`` makes those that
stand for the bugs a hand-written or miscompiled kernel has: a wait or barrier left out or too weak,
a wait state too few, an LDS address off by one element, a bound off by one, a forgotten m0.
``judge`` tries one: does the static check of wait states, the static check of waits, the emulator
or the comparison of results notice; if none, can it be shown that it changes nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import cfg, hazards, waits
from .listing import M0, SCALAR, SCC, Instruction, Listing, registers

S_NOP = 0xBF800000
_MINUS_ONE = 193  # inline constant -1


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: ``before`` becomes ``after`` by writing ``patch``, (offset, bytes) pairs.

    Offsets are bytes from the kernel's first instruction.
    """

    kind: str
    offset: int
    before: str
    after: str
    patch: tuple[tuple[int, bytes], ...]

    def apply(self, listing: Listing) -> bytes:
        """The code object with this change; ``listing`` is the kernel's (``Listing.only``)."""
        image = bytearray(listing.image)
        for offset, data in self.patch:
            at = listing.text_at + offset
            image[at : at + len(data)] = data
        return bytes(image)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running a mutant showed: kinds of the emulator's findings, and whether results held.

    ``failed`` is the text of a launch that could not run to its end; ``traffic`` the bytes that
    all launches read from and wrote to memory and the LDS; ``extents`` the LDS bytes that each
    instruction, by its offset in the kernel, touched in any of them (``Report.lds_extents``).
    """

    findings: tuple[str, ...] = ()
    right: bool = True
    failed: str = ""
    traffic: tuple[int, ...] = ()
    extents: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``flagged`` names the checks that noticed; ``redundant`` argues why none could."""

    mutation: Mutation
    flagged: tuple[str, ...]
    redundant: str = ""

    @property
    def survived(self) -> bool:
        """Neither noticed nor shown to change nothing."""
        return not self.flagged and not self.redundant


class Kernel:
    """A kernel to mutate and what is known of the code as it is. Immutable; owner: the caller."""

    def __init__(self, listing: Listing, name: str) -> None:
        self.listing = listing.only(name)
        self.graph = cfg.Graph(self.listing.instructions, 0)
        self.checker = hazards.Checker(self.listing)
        self.hazards = {str(hazard) for hazard in self.checker.all()}
        self.waits = waits.analyse(self.graph)

    def index_of(self, offset: int) -> int:
        """Index of the instruction at this offset."""
        return self.listing.index_of[offset]

    def loop(self) -> list[Instruction]:
        """Instructions of the hot loops, by address; of the whole kernel when it has no loop."""
        hot = self.graph.hot_loops()
        if not hot:
            return [self.listing.instructions[index] for index in sorted(self.graph.next)]
        found = {inst.index: inst for loop in hot for inst in self.graph.body(loop)}
        return [found[index] for index in sorted(found)]


def mutations(kernel: Kernel, where: Iterable[Instruction]) -> list[Mutation]:
    """All mutations of these instructions of a kernel, in address order."""
    made = [
        mutation
        for inst in where
        for make in _MAKERS
        for mutation in make(kernel, inst)
        if not _same(kernel.listing, mutation)
    ]
    unique = {(mutation.kind, mutation.patch): mutation for mutation in made}
    return sorted(unique.values(), key=lambda mutation: (mutation.offset, mutation.kind))


def judge(
    kernel: Kernel, mutation: Mutation, run: Callable[[bytes], Outcome], reference: Outcome
) -> Verdict:
    """Try one mutation on all checks.

    ``run`` executes a code object and looks at its results; ``reference`` is what it said about
    the kernel as it is. Wait states are judged by the rules alone: a run takes no notice of them.
    """
    image = mutation.apply(kernel.listing)
    mutant = kernel.listing.with_image(image)
    flagged = []
    if any(str(hazard) not in kernel.hazards for hazard in _hazards(kernel, mutation, mutant)):
        flagged.append("wait states")
    left = kernel.waits
    if mutation.kind in _WAITS:
        left = waits.analyse(cfg.Graph(mutant.instructions, 0))
        if not left.early <= kernel.waits.early:
            flagged.append("waits")
    outcome = reference if mutation.kind == _WAIT_STATE else run(image)
    flagged += sorted(set(outcome.findings))
    if outcome.failed:
        flagged.append("launch failed")
    if not outcome.right:
        flagged.append("results")
    ran = outcome.right and not (outcome.findings or outcome.failed)
    if ran and outcome.traffic != reference.traffic:
        flagged.append("bytes moved")
    argument = "" if flagged else _redundant(kernel, mutation, left, mutant, reference)
    if not flagged and mutation.kind in _EXTENTS and outcome.traffic == reference.traffic:
        argument = "stops no lane in any run: as many bytes are read and written with either"
    return Verdict(mutation, tuple(flagged), argument)


def _hazards(kernel: Kernel, mutation: Mutation, mutant: Listing) -> list[hazards.Hazard]:
    old, new = kernel.listing.instructions, mutant.instructions
    changed = [index for index, inst in enumerate(old) if inst is not new[index]]
    if len(changed) == 1 and len(old) == len(new):
        return kernel.checker.with_instruction(mutant, changed[0]).around(changed[0])
    return hazards.check_listing(mutant)


_EXTENTS = ("buffer extent unlimited", "buffer extent halved")
_WAITS = ("wait deleted", "wait weakened by one")
_WAIT_STATE = "wait state removed"


def _redundant(
    kernel: Kernel, mutation: Mutation, left: waits.Waits, mutant: Listing, reference: Outcome
) -> str:
    if mutation.kind in _WAITS:
        done = "on every path, what it waits for is done, or waited for again before it matters"
        if not left.weaker_than(kernel.waits):
            return done
        extents = reference.extents
        left = waits.analyse(cfg.Graph(mutant.instructions, 0), extents)
        if extents and not left.weaker_than(waits.analyse(kernel.graph, extents)):
            return (
                f"{done}; what else is in flight there touches other bytes of the LDS in all runs"
            )
    if mutation.kind == "bound off by one":
        return _twice_subtracted(kernel, mutation)
    if mutation.kind == _WAIT_STATE:
        # judge() found no hazard: no rule reaches across it on any path.
        return "no two instructions around it, on any path, need this many wait states"
    return ""


def _twice_subtracted(kernel: Kernel, mutation: Mutation) -> str:
    """Why >= may be > in a division by an estimated reciprocal, which subtracts the divisor twice.

    Compilers estimate q from below, r = n - q d, and then twice do: if r >= d, then r -= d, q += 1.
    With > in the first of the two, r = d is left to the second, which does the same. The second
    is for an estimate that is 2 too small. The reciprocal of 2^32 / d is at most 3 too small (one
    Newton step from an fp32 reciprocal, 2^-42 relative, and two truncations), q so by less than
    1 + 3 n / 2^32: by 1 at most for n < 2^30, more than there are workgroups or threads in a
    launch. Then r < d before the second, and both comparisons are false.
    """
    block = kernel.graph.blocks[kernel.graph.block_of[kernel.index_of(mutation.offset)]]
    code = kernel.listing.instructions[block.first : block.end]
    compares = [inst for inst in code if inst.name == "s_cmp_ge_u32"]
    for first, second in itertools.pairwise(compares):
        divisor, rest = first.src[1], first.src[0]
        if mutation.offset not in (first.offset, second.offset) or rest is None:
            continue
        if divisor is None or second.src[1] != divisor:
            continue
        between = code[first.index - code[0].index + 1 : second.index - code[0].index]
        chosen = [inst for inst in between if inst.name == "s_cselect_b32"]
        subtracted = [
            inst.dst[0]
            for inst in code
            if inst.index < first.index
            and inst.name in ("s_sub_i32", "s_sub_u32")
            and inst.src[:2] == first.src[:2]
        ]
        reciprocal = any(inst.name == "v_rcp_iflag_f32" for inst in code)
        if reciprocal and any(
            inst.dst[0] == second.src[0] and inst.src[0] in subtracted and inst.src[1] == rest
            for inst in chosen
        ):
            return "one of the two corrections of a division; the other covers equality"
    return ""


def table(verdicts: Sequence[Verdict]) -> str:
    """Text table: per kind of mutation how many, noticed by which check, redundant, survived."""
    checks = sorted({name for verdict in verdicts for name in verdict.flagged})
    rows = [["mutation", "count", "noticed", *checks, "redundant", "survived"]]
    kinds = list(dict.fromkeys(verdict.mutation.kind for verdict in verdicts))
    for kind in [*kinds, "all"]:
        group = [v for v in verdicts if kind in (v.mutation.kind, "all")]
        by_check = [sum(name in v.flagged for v in group) for name in checks]
        numbers = [len(group), sum(bool(v.flagged) for v in group), *by_check]
        numbers += [sum(bool(v.redundant) for v in group), sum(v.survived for v in group)]
        rows.append([kind, *(str(number) for number in numbers)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def noticed(verdicts: Sequence[Verdict]) -> float:
    """Share of the mutants not shown redundant that some check noticed; 1 when there are none."""
    counted = [verdict for verdict in verdicts if not verdict.redundant]
    return sum(bool(v.flagged) for v in counted) / len(counted) if counted else 1.0


# Makers: mutations of one instruction.
Maker = Callable[[Kernel, Instruction], Iterator[Mutation]]


def _word(value: int) -> bytes:
    return (value & 0xFFFFFFFF).to_bytes(4, "little")


def _code(kernel: Kernel, inst: Instruction) -> int:
    at = kernel.listing.text_at + inst.offset
    return int.from_bytes(kernel.listing.image[at : at + inst.bytes], "little")


def _same(listing: Listing, mutation: Mutation) -> bool:
    return mutation.apply(listing) == listing.image


def _changed(kind: str, inst: Instruction, after: str, data: bytes) -> Mutation:
    return Mutation(kind, inst.offset, inst.text, after, ((inst.offset, data),))


def _nothing(kind: str, inst: Instruction) -> Mutation:
    return _changed(kind, inst, "nothing", _word(S_NOP) * (inst.bytes // 4))


def _wait(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    if inst.name != "s_waitcnt":
        return
    yield _nothing("wait deleted", inst)
    vmcnt, lgkmcnt = waits.counters(inst)
    weaker = []
    if vmcnt < waits.MAX_VM:
        weaker.append((vmcnt + 1, lgkmcnt))
    if lgkmcnt < waits.MAX_LGKM:
        weaker.append((vmcnt, lgkmcnt + 1))
    for counts in weaker:
        imm = waits.with_counters(inst.imm, *counts)
        after = f"vmcnt({counts[0]}) lgkmcnt({counts[1]})"
        code = _code(kernel, inst) & 0xFFFF0000 | imm & 0xFFFF
        yield _changed("wait weakened by one", inst, after, _word(code))


def _barrier(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    if inst.unit == "barrier":
        yield _nothing("barrier deleted", inst)


def _wait_state(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    kind = _WAIT_STATE
    if inst.name != "s_nop":
        return
    if inst.imm > 0:
        yield _changed(kind, inst, f"s_nop {inst.imm - 1}", _word(_code(kernel, inst) - 1))
        return
    # One slot cannot be taken out in place: it changes places with the instruction behind it.
    block = kernel.graph.blocks[kernel.graph.block_of[inst.index]]
    if inst.index + 1 < block.end:
        following = kernel.listing.instructions[inst.index + 1]
        if following.unit not in ("branch", "barrier") and following.name != "s_nop":
            code = _code(kernel, following).to_bytes(following.bytes, "little")
            yield _changed(kind, inst, f"behind {following.text}", code + _word(S_NOP))


_TWO_OFFSETS = ("ds_read2", "ds_write2", "ds_wrxchg2")
_NO_LDS = ("ds_swizzle", "ds_permute", "ds_bpermute", "ds_nop")


def _lds_offset(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    if inst.unit != "ds" or inst.name.startswith(_NO_LDS):
        return
    code, kind = _code(kernel, inst), "LDS offset shifted"
    if inst.name.startswith(_TWO_OFFSETS):
        shifted = [code + 1 if code & 255 < 255 else code - 1]
        shifted.append(code + 256 if code >> 8 & 255 < 255 else code - 256)
    else:
        operand = inst.dst[0] or inst.src[1]
        step = 4 * (operand.count if operand is not None else 1)
        step = 16 if step == 12 else step
        shifted = [code + step if (code & 0xFFFF) + step < 65536 else code - step]
    for new in shifted:
        after = f"offset0 {new & 255}, offset1 {new >> 8 & 255}"
        yield _changed(kind, inst, after, new.to_bytes(inst.bytes, "little"))


def _m0(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    if inst.unit != "salu" or not inst.writes & registers(M0, 1):
        return
    yield _nothing("m0 write dropped", inst)
    source = inst.src[0]
    if source is None:
        return
    if any(given is not None and given.kind == "c" for given in inst.src[:2]):
        yield from _larger_constant(kernel, inst, "m0 shifted by 4")
        return
    block = kernel.graph.blocks[kernel.graph.block_of[inst.index]]
    for index in range(inst.index - 1, block.first - 1, -1):
        before = kernel.listing.instructions[index]
        if before.writes & source.mask:
            yield from _larger_constant(kernel, before, "m0 shifted by 4")
            break
    if inst.name == "s_mov_b32" and source.kind == "s" and _scc_free(kernel, inst):
        data = _word(0x81000000 | 132 << 8 | (M0 - SCALAR) << 16 | source.index)
        yield _changed("m0 shifted by 4", inst, f"s_add_i32 m0, s{source.index}, 4", data)


def _scc_free(kernel: Kernel, inst: Instruction) -> bool:
    """Whether SCC can be overwritten here: nobody reads it before it is written again."""
    pending, seen = list(kernel.graph.next[inst.index]), set()
    while pending:
        index = pending.pop()
        after = kernel.listing.instructions[index]
        if after.reads >> SCC & 1:
            return False
        if index not in seen and not after.writes >> SCC & 1:
            pending += kernel.graph.next[index]
        seen.add(index)
    return True


def _larger_constant(kernel: Kernel, inst: Instruction, kind: str) -> Iterator[Mutation]:
    """A scalar instruction with its constant source 4 larger (of two, the second)."""
    if inst.format not in ("sop1", "sop2"):
        return
    code = _code(kernel, inst)
    for number in (1, 0):
        source = inst.src[number]
        if source is None or source.kind != "c":
            continue
        encoded = code >> 8 * number & 255
        if encoded == 255:
            value = (code >> 32) + 4
            data = _word(code) + _word(value)
        elif 128 <= encoded <= 188:
            data = _word(code + (4 << 8 * number))
        else:
            return
        yield _changed(kind, inst, "constant + 4", data)
        return


def _compare(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    kind, code = "bound off by one", _code(kernel, inst)
    if inst.format in ("sopc", "sopk") and inst.name.startswith(("s_cmp_", "s_cmpk_")):
        # eq lg gt ge lt le: the neighbour differs by equality
        new = code ^ (1 << (16 if inst.format == "sopc" else 23))
    elif inst.name.startswith("v_cmp") and inst.name.endswith(("i32", "u32", "i64", "u64")):
        test = inst.name.split("_")[2]
        flip = {"lt": 2, "le": 2, "gt": 2, "ge": 2, "eq": 7, "ne": 7}.get(test, 0)
        new = code ^ flip << (17 if inst.format == "vopc" else 16)
    else:
        return
    yield _changed(kind, inst, "its neighbour by equality", new.to_bytes(inst.bytes, "little"))


_SWAPPED = {"s_min_i32": 2, "s_min_u32": 2, "s_max_i32": -2, "s_max_u32": -2}


def _limit(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    if inst.name in _SWAPPED:
        new = _code(kernel, inst) + (_SWAPPED[inst.name] << 23)
        data = new.to_bytes(inst.bytes, "little")
        yield _changed("bound reversed", inst, "minimum and maximum swapped", data)


def _extent(kernel: Kernel, inst: Instruction) -> Iterator[Mutation]:
    """A buffer descriptor's extent: without limit, and a constant one also halved."""
    descriptor = inst.src[3]
    if inst.format != "mubuf" or descriptor is None or descriptor.count != 4:
        return
    extent = descriptor.index + 2
    for before in _writers(kernel, inst, registers(SCALAR + extent, 1)):
        target = before.dst[0]
        if before.unit != "salu" or target is None or target.count != 1:
            continue
        nops = _word(S_NOP) * (before.bytes // 4 - 1)
        data = _word(0xBE800000 | extent << 16 | _MINUS_ONE)
        yield _changed("buffer extent unlimited", before, "0xffffffff", data + nops)
        source = before.src[0]
        value = before.imm if before.name == "s_movk_i32" else 0
        if before.name == "s_mov_b32" and source is not None and source.kind == "c":
            value = source.value
        if 0 < value < 1 << 16:
            data = _word(0xB0000000 | extent << 16 | value // 2)
            yield _changed("buffer extent halved", before, f"{value // 2} bytes", data + nops)


def _writers(kernel: Kernel, inst: Instruction, mask: int) -> list[Instruction]:
    """Instructions whose value of these registers can arrive at ``inst``."""
    graph, out = kernel.graph, []
    before: dict[int, list[int]] = {}
    for index, following in graph.next.items():
        for successor in following:
            before.setdefault(successor, []).append(index)
    pending, seen = list(before.get(inst.index, [])), set()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        if kernel.listing.instructions[index].writes & mask:
            out.append(kernel.listing.instructions[index])
        else:
            pending += before.get(index, [])
    return out


_MAKERS: tuple[Maker, ...] = (
    _wait,
    _barrier,
    _wait_state,
    _lds_offset,
    _m0,
    _compare,
    _limit,
    _extent,
)
