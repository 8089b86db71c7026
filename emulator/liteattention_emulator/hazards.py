"""Missing wait states in gfx942 machine code, found without running it.

The chip does not check a number of dependencies: between the two instructions must lie a given
number of wait states (issued instructions, ``s_nop n`` counting n + 1). LLVM inserts them for code
that it schedules, but not around inline assembly. RULES says what needs how many; the sources are
LLVM's hazard recognizer for gfx940 (GCNHazardRecognizer.cpp, probed instruction by instruction) and
AMD's "Instinct MI300 Instruction Set Architecture" manual, section 4.5.

Every instruction that can start a hazard is followed along all paths of the control flow, loops
included, for as long as its longest rule lasts (at most 19 wait states).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from .cfg import successors
from .listing import (
    EXEC,
    M0,
    SCALAR_MASK,
    VCC,
    VECTOR_MASK,
    Instruction,
    Listing,
    Operand,
    load,
    register_names,
    registers,
)

MEMORY_UNITS = ("vmem", "ds")
_HWREG = 704
"""Register sets continue with the hardware registers of s_getreg and s_setreg."""
_EXEC = registers(EXEC, 2)
_VCC = registers(VCC, 2)
_M0 = registers(M0, 1)

Select = Callable[[Instruction], int]


@dataclass(frozen=True, slots=True)
class Rule:
    """``wait`` wait states between a producer and a consumer that share a register.

    ``producer`` and ``consumer`` give the registers of an instruction that count for the rule, an
    empty set for instructions of another kind. ``relation`` is "overlap" (any register shared),
    "equal" (same first register and same number: an MFMA's D taken as C whole), "shifted" (shared,
    but not equal), "same opcode" or "other opcode" (any shared, of equal or unequal mnemonics) or
    "behind DGEMM" (any shared, and a double-precision MFMA issued in between).
    ``per_pass`` adds the producer's number of MFMA passes.
    """

    name: str
    producer: Select
    consumer: Select
    wait: int
    source: str
    relation: str = "overlap"
    per_pass: bool = False
    heir: Select | None = None
    """Registers that a later instruction takes over from the producer; None: ``producer`` itself.

    A matrix instruction's result waits for all earlier ones: they leave the matrix core in order.
    """

    def needed(self, producer: Instruction) -> int:
        """Wait states after this producer."""
        return self.wait + (producer.passes if self.per_pass else 0)


@dataclass(frozen=True, slots=True)
class Hazard:
    """A consumer that follows its producer too early on some path.

    ``offset`` and ``producer_offset`` count bytes from the start of the text section.
    """

    rule: str
    kernel: str
    offset: int
    text: str
    producer_offset: int
    producer_text: str
    registers: str
    needed: int
    found: int
    line: str = ""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return (
            f"{self.kernel}+text 0x{self.offset:x}{where}: {self.text}: {self.found} of "
            f"{self.needed} wait states after 0x{self.producer_offset:x} {self.producer_text} "
            f"[{self.rule}: {self.registers}]"
        )


def _vectors(operands: Iterable[Operand | None]) -> int:
    mask = 0
    for operand in operands:
        if operand is not None and operand.kind == "v":
            mask |= operand.mask
    return mask


# Kinds of matrix instructions.
def _dgemm(inst: Instruction) -> bool:
    return inst.unit == "mfma" and inst.name.endswith("f64")


def _xdl(inst: Instruction) -> bool:
    # fp32 inputs run on the non-XDL path; xf32 does not.
    return inst.unit == "mfma" and not inst.name.endswith(("_f32", "f64"))


def _sgemm(inst: Instruction) -> bool:
    return inst.unit == "mfma" and inst.name.endswith("_f32")


def _lds_dma(inst: Instruction) -> bool:
    return inst.unit == "vmem" and "lds" in inst.flags


def _sparse(inst: Instruction) -> bool:
    return inst.name.startswith("v_smfmac")


def _d_any(inst: Instruction) -> int:
    return _vectors(inst.dst) if inst.unit == "mfma" else 0


# Producers and consumers: registers that an instruction has in a role.
def _d(kind: Callable[[Instruction], bool]) -> Select:
    return lambda inst: _vectors(inst.dst) if kind(inst) else 0


def _d_16(inst: Instruction) -> int:
    return _vectors(inst.dst) if _dgemm(inst) and "_16x" in inst.name else 0


def _d_4(inst: Instruction) -> int:
    return _vectors(inst.dst) if _dgemm(inst) and "_4x" in inst.name else 0


def _d_two_pass(inst: Instruction) -> int:
    return _vectors(inst.dst) if inst.unit == "mfma" and inst.passes == 2 else 0


def _c(inst: Instruction) -> int:
    if inst.unit != "mfma":
        return 0
    return _vectors(inst.dst[:1] if _sparse(inst) else inst.src[2:3])


def _c_of(kind: Callable[[Instruction], bool]) -> Select:
    return lambda inst: _c(inst) if kind(inst) else 0


def _c_not_xdl(inst: Instruction) -> int:
    return 0 if _xdl(inst) else _c(inst)


def _ab(inst: Instruction) -> int:
    if inst.unit != "mfma":
        return 0
    return _vectors(inst.src if _sparse(inst) else inst.src[:2])


def _mfma_reads(inst: Instruction) -> int:
    return _ab(inst) | _c(inst)


def _plain_valu(inst: Instruction) -> bool:
    return inst.unit in ("valu", "trans")


def _valu_reads(inst: Instruction) -> int:
    return inst.reads & VECTOR_MASK if _plain_valu(inst) else 0


def _valu_writes(inst: Instruction) -> int:
    return inst.writes & VECTOR_MASK if _plain_valu(inst) else 0


def _any_valu_writes(inst: Instruction) -> int:
    return inst.writes & VECTOR_MASK if inst.is_valu else 0


def _memory_reads(inst: Instruction) -> int:
    return inst.reads & VECTOR_MASK if inst.unit in MEMORY_UNITS else 0


def _memory_writes(inst: Instruction) -> int:
    return inst.writes & VECTOR_MASK if inst.unit in MEMORY_UNITS else 0


def _other_reads(inst: Instruction) -> int:
    return _valu_reads(inst) | _memory_reads(inst)


def _other_writes(inst: Instruction) -> int:
    return _valu_writes(inst) | _memory_writes(inst)


def _trans_writes(inst: Instruction) -> int:
    return inst.writes & VECTOR_MASK if inst.unit == "trans" else 0


# LLVM counts LDS-DMA among the VALU instructions for these two, and so do we.
def _non_trans_reads(inst: Instruction) -> int:
    reader = inst.unit in ("valu", "mfma") or _lds_dma(inst)
    return inst.reads & VECTOR_MASK if reader else 0


def _partial_writes(inst: Instruction) -> int:
    # LLVM 19 counts packed instructions too: it takes op_sel_hi of their first source, which has
    # the same bit, for a destination select. They write whole registers and are left out here.
    # v_cvt_sr_* choose a byte by op_sel, which the records do not keep: taken as partial always.
    partial = "dst_sel" in inst.flags or inst.name.startswith("v_cvt_sr_")
    return inst.writes & VECTOR_MASK if inst.is_valu and partial else 0


def _any_valu_reads(inst: Instruction) -> int:
    return inst.reads & VECTOR_MASK if inst.is_valu or _lds_dma(inst) else 0


def _valu_scalar_writes(inst: Instruction) -> int:
    return inst.writes & SCALAR_MASK if inst.is_valu else 0


def _valu_scalar_reads(inst: Instruction) -> int:
    return inst.reads & SCALAR_MASK & ~_EXEC if inst.is_valu else 0


def _vmem_scalar_reads(inst: Instruction) -> int:
    return inst.reads & SCALAR_MASK if inst.unit == "vmem" else 0


def _valu_vcc_writes(inst: Instruction) -> int:
    return inst.writes & _VCC if inst.is_valu else 0


def _div_fmas_reads(inst: Instruction) -> int:
    return inst.reads & _VCC if inst.name.startswith("v_div_fmas") else 0


def _valu_exec_writes(inst: Instruction) -> int:
    return inst.writes & _EXEC if inst.is_valu else 0


def _valu_flag_writes(inst: Instruction) -> int:
    return inst.writes & (_EXEC | _VCC) if inst.is_valu else 0


def _valu_zero_flag_reads(inst: Instruction) -> int:
    mask = 0
    for operand in inst.src if inst.is_valu else ():
        if operand is not None and operand.kind == "x":
            mask |= {251: _VCC, 252: _EXEC}.get(operand.index, 0)
    return mask


def _lane_access_exec(inst: Instruction) -> int:
    lane = ("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")
    return _EXEC if inst.name in lane else 0


def _lane_select(inst: Instruction) -> int:
    if inst.name not in ("v_readlane_b32", "v_writelane_b32"):
        return 0
    select = inst.src[1]
    return select.mask if select is not None and select.kind == "s" else 0


def _lane_source(inst: Instruction) -> int:
    if inst.name not in ("v_readlane_b32", "v_readfirstlane_b32"):
        return 0
    return _vectors(inst.src[:1])


def _dpp_reads(inst: Instruction) -> int:
    return inst.reads & VECTOR_MASK if "dpp" in inst.flags else 0


def _dpp_exec(inst: Instruction) -> int:
    return _EXEC if "dpp" in inst.flags else 0


def _mfma_exec(inst: Instruction) -> int:
    return _EXEC if inst.unit == "mfma" else 0


def _salu_m0_writes(inst: Instruction) -> int:
    return inst.writes & _M0 if inst.unit == "salu" else 0


def _m0_users(inst: Instruction) -> int:
    # Implicit uses only: reading m0 as an ordinary scalar source needs no wait.
    explicit = any(s is not None and s.kind == "s" and s.mask & _M0 for s in inst.src)
    if inst.name.startswith(("s_movrel", "v_movrel", "v_interp", "s_sendmsg", "s_ttracedata")):
        return _M0
    return inst.reads & _M0 if inst.unit in MEMORY_UNITS and not explicit else 0


def _wide_store_data(inst: Instruction) -> int:
    data = inst.src[1]
    if inst.unit != "vmem" or data is None or data.kind != "v" or data.count <= 2:
        return 0
    # A buffer store with an SGPR offset takes a cycle longer to issue, which covers it.
    offset = inst.src[4]
    if inst.format in ("mubuf", "mtbuf") and offset is not None and offset.kind == "s":
        return 0
    return data.mask


def _dot(inst: Instruction) -> bool:
    return inst.name.startswith("v_dot")


def _dot_writes(inst: Instruction) -> int:
    return inst.writes & VECTOR_MASK if _dot(inst) else 0


def _valu_writes_not_dot(inst: Instruction) -> int:
    return 0 if _dot(inst) else _valu_writes(inst)


def _dot_ab(inst: Instruction) -> int:
    return _vectors(inst.src[:2]) if _dot(inst) else 0


def _hwreg_writes(inst: Instruction) -> int:
    return registers(_HWREG + (inst.imm & 63), 1) if inst.name.startswith("s_setreg") else 0


def _hwreg_reads(inst: Instruction) -> int:
    return registers(_HWREG + (inst.imm & 63), 1) if inst.name == "s_getreg_b32" else 0


LLVM = "LLVM GCNHazardRecognizer"
ISA = "MI300 ISA 4.5"
BOTH = f"{LLVM}, {ISA}"

RULES: tuple[Rule, ...] = (
    # Matrix results. XDL: fp16, bf16, fp8, int8, xf32; the fp32 ones are ready a pass earlier.
    Rule("MFMA D -> read", _d(_xdl), _other_reads, 3, BOTH, "overlap", True, _d_any),
    Rule("MFMA D -> write", _d(_xdl), _other_writes, 3, BOTH, "overlap", True, _d_any),
    Rule("MFMA D -> MFMA A/B", _d(_xdl), _ab, 3, BOTH, "overlap", True, _d_any),
    Rule("MFMA D -> MFMA C shifted", _d(_xdl), _c, 1, BOTH, "shifted", True, _d_any),
    Rule("2-pass MFMA D -> MFMA C", _d_two_pass, _c, 2, BOTH, "equal", False, _d_any),
    Rule("MFMA C -> write", _c_of(_xdl), _other_writes, -1, BOTH, "overlap", True),
    Rule("fp32 MFMA D -> read", _d(_sgemm), _other_reads, 2, BOTH, "overlap", True, _d_any),
    Rule("fp32 MFMA D -> write", _d(_sgemm), _other_writes, 2, BOTH, "overlap", True, _d_any),
    Rule("fp32 MFMA D -> MFMA A/B", _d(_sgemm), _ab, 2, BOTH, "overlap", True, _d_any),
    Rule("fp32 MFMA D -> C shifted", _d(_sgemm), _c_not_xdl, 0, BOTH, "shifted", True, _d_any),
    Rule("f64 16x16x4 D -> VALU read", _d_16, _valu_reads, 11, LLVM, heir=_d_any),
    Rule("f64 16x16x4 D -> memory read", _d_16, _memory_reads, 18, LLVM, heir=_d_any),
    Rule("f64 16x16x4 D -> write", _d_16, _other_writes, 11, LLVM, heir=_d_any),
    Rule("f64 16x16x4 D -> MFMA A/B", _d_16, _ab, 11, LLVM, heir=_d_any),
    Rule("f64 16x16x4 D -> C shifted", _d_16, _c_not_xdl, 9, LLVM, "shifted", heir=_d_any),
    Rule("f64 4x4x4 D -> VALU read", _d_4, _valu_reads, 6, LLVM, heir=_d_any),
    Rule("f64 4x4x4 D -> memory read", _d_4, _memory_reads, 9, LLVM, heir=_d_any),
    Rule("f64 4x4x4 D -> write", _d_4, _other_writes, 6, LLVM, heir=_d_any),
    Rule("f64 4x4x4 D -> MFMA A/B", _d_4, _ab, 6, LLVM, heir=_d_any),
    Rule("f64 4x4x4 D -> C", _d_4, _c_not_xdl, 4, LLVM, heir=_d_any),
    Rule("VALU, f64 MFMA -> memory", _valu_writes, _memory_reads, 2, LLVM, "behind DGEMM"),
    # Vector results.
    Rule("VALU -> MFMA", _valu_writes_not_dot, _mfma_reads, 2, BOTH),
    Rule("trans -> VALU", _trans_writes, _non_trans_reads, 1, BOTH),
    Rule("part of a register -> VALU", _partial_writes, _any_valu_reads, 1, BOTH),
    Rule("VALU -> readlane", _any_valu_writes, _lane_source, 1, BOTH),
    Rule("VALU -> DPP", _any_valu_writes, _dpp_reads, 2, BOTH),
    Rule("store data -> VALU write", _wide_store_data, _any_valu_writes, 2, BOTH),
    Rule("dot -> read", _dot_writes, _other_reads, 3, LLVM, "other opcode"),
    Rule("dot -> write", _dot_writes, _other_writes, 3, LLVM, "other opcode"),
    Rule("dot -> same dot A/B", _dot_writes, _dot_ab, 3, LLVM, "same opcode"),
    # Scalar registers written by vector instructions.
    Rule("VALU SGPR -> VALU", _valu_scalar_writes, _valu_scalar_reads, 2, BOTH),
    Rule("VALU SGPR -> VMEM", _valu_scalar_writes, _vmem_scalar_reads, 5, BOTH),
    Rule("VALU SGPR -> lane select", _valu_scalar_writes, _lane_select, 4, BOTH),
    Rule("VALU VCC -> v_div_fmas", _valu_vcc_writes, _div_fmas_reads, 4, BOTH),
    Rule("VALU EXEC -> DPP", _valu_exec_writes, _dpp_exec, 5, BOTH),
    Rule("VALU EXEC -> readlane", _valu_exec_writes, _lane_access_exec, 4, LLVM),
    Rule("VALU EXEC -> MFMA", _valu_exec_writes, _mfma_exec, 4, LLVM),
    Rule("VALU VCC/EXEC -> vccz/execz", _valu_flag_writes, _valu_zero_flag_reads, 5, ISA),
    # Scalar state.
    Rule("m0 -> LDS-DMA, GDS, message", _salu_m0_writes, _m0_users, 1, BOTH),
    Rule("s_setreg -> s_getreg", _hwreg_writes, _hwreg_reads, 2, BOTH),
    Rule("s_setreg -> s_setreg", _hwreg_writes, _hwreg_writes, 2, BOTH),
)


LONGEST = 19
"""Wait states that the longest rule needs: after an MFMA of 16 passes."""


def check(code_object: Path | str | bytes) -> list[Hazard]:
    """All hazards of a code object (path of the ELF file, or its bytes), in address order.

    An instruction whose operands the decoder does not know cannot be checked; it is reported as a
    hazard of its own ("unknown instruction"). Raises BadImage or OSError as ``listing.load`` does.
    """
    return check_listing(load(code_object))


def check_listing(listing: Listing) -> list[Hazard]:
    """All hazards of decoded code; see ``check``."""
    return Checker(listing).all()


class Checker:
    """The hazards of one listing, all or those around an instruction. Owner: the caller."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._consumers = [_roles(inst, "consumer") for inst in listing.instructions]
        self._following = [
            successors(listing.instructions, inst.index) for inst in listing.instructions
        ]

    def with_instruction(self, listing: Listing, index: int) -> "Checker":
        """A checker of the listing in which one instruction, no branch, is another."""
        out = copy(self)
        out._listing = listing
        out._consumers = self._consumers.copy()
        out._consumers[index] = _roles(listing.instructions[index], "consumer")
        return out

    def all(self) -> list[Hazard]:
        """All hazards, in address order."""
        return self._from(range(len(self._listing.instructions)))

    def around(self, index: int) -> list[Hazard]:
        """Hazards whose paths can touch an instruction (and some others near it)."""
        before: dict[int, list[int]] = {}
        for at, following in enumerate(self._following):
            for after in following:
                before.setdefault(after, []).append(at)
        near, edge = {index}, {index}
        for _ in range(LONGEST):  # each instruction is a wait state at least
            edge = {at for after in edge for at in before.get(after, ())} - near
            near |= edge
        return self._from(sorted(near))

    def _from(self, producers: Iterable[int]) -> list[Hazard]:
        found: dict[tuple[str, int, int], Hazard] = {}
        listing = self._listing
        for inst in (listing.instructions[index] for index in producers):
            owner = listing.owner(inst.index)
            if not owner:
                continue  # padding behind the last kernel
            line = listing.line
            if not inst.known:
                found["unknown", inst.offset, 0] = Hazard(
                    "unknown instruction", owner, inst.offset, inst.text, inst.offset, inst.text,
                    "operands not decoded", 0, 0, line(inst.offset),
                )  # fmt: skip
                continue
            for number, mask in _roles(inst, "producer").items():
                rule = RULES[number]
                for consumer, distance, shared in self._walk(inst, rule, number, mask):
                    key = (rule.name, inst.offset, consumer.offset)
                    if key in found and found[key].found <= distance:
                        continue
                    found[key] = Hazard(
                        rule.name, owner, consumer.offset, consumer.text, inst.offset, inst.text,
                        register_names(shared), rule.needed(inst), distance, line(consumer.offset),
                    )  # fmt: skip
        return sorted(found.values(), key=lambda h: (h.offset, h.producer_offset, h.rule))

    def _walk(
        self, producer: Instruction, rule: Rule, number: int, mask: int
    ) -> Iterator[tuple[Instruction, int, int]]:
        """Consumers that come too early: (instruction, wait states before it, registers shared).

        Paths are followed in the order of their wait states, so an instruction is looked at when
        it is nearest. A later producer of the same kind takes over the registers that it writes.
        """
        needed = rule.needed(producer)
        behind = rule.relation == "behind DGEMM"
        # (wait states so far, instruction, registers still in hazard, double MFMA passed)
        pending = [(0, after, mask, False) for after in self._following[producer.index]]
        seen: dict[tuple[int, bool], int] = {}
        while pending:
            distance, at, live, passed = heapq.heappop(pending)
            if distance >= needed:
                continue
            live &= ~seen.get((at, passed), 0)
            if not live:
                continue
            seen[at, passed] = seen.get((at, passed), 0) | live
            inst = self._listing.instructions[at]
            wanted = self._consumers[at].get(number, 0)
            shared = live & wanted
            if shared and _related(rule, producer, inst, mask, wanted) and (passed or not behind):
                yield inst, distance, shared
            live &= ~(rule.heir or rule.producer)(inst)
            for after in self._following[at]:
                heapq.heappush(
                    pending, (distance + inst.wait_states, after, live, passed or _dgemm(inst))
                )


def _roles(inst: Instruction, side: str) -> dict[int, int]:
    """Rule number -> registers, for the rules in which an instruction plays a part."""
    out = {}
    for number, rule in enumerate(RULES):
        mask = (rule.producer if side == "producer" else rule.consumer)(inst)
        if mask:
            out[number] = mask
    return out


def _related(
    rule: Rule, producer: Instruction, consumer: Instruction, produced: int, wanted: int
) -> bool:
    match rule.relation:
        case "equal":
            return produced == wanted
        case "shifted":
            return produced != wanted
        case "same opcode":
            return producer.name == consumer.name
        case "other opcode":
            return producer.name != consumer.name
    return True
