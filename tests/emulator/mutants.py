"""Broken copies of a kernel, tried one after the other, and what was noticed of them."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence

from elftools.elf.elffile import ELFFile

from liteattention_emulator import listing, mutate

from . import attention_cases
from .attention_cases import ORDERS, Case, Trial

# No exception for these: synchronisation, wait states and addresses.
ALWAYS = {
    "wait deleted", "wait weakened by one", "barrier deleted", "wait state removed",
    "LDS offset shifted", "m0 shifted by 4", "m0 write dropped",
}  # fmt: skip


def alone(image: bytes, kernel: str) -> bytes:
    """The code object, with the section headers and symbols of this kernel alone.

    What loads it then decodes no other kernel, of which there may be dozens, for each mutant.
    """
    elf, out = ELFFile(io.BytesIO(image)), bytearray(image)
    for table in (elf.get_section_by_name(name) for name in (".symtab", ".dynsym")):
        for number, symbol in enumerate(table.iter_symbols() if table else ()):
            if symbol.name.endswith(".kd") and symbol.name != f"{kernel}.kd":
                at = table["sh_offset"] + number * table["sh_entsize"]
                struct.pack_into("<I", out, at, 0)  # no name
            elif symbol.name == kernel:
                begin, size = symbol["st_value"], symbol["st_size"]
    text = elf.get_section_by_name(".text")
    at = elf["e_shoff"] + elf.get_section_index(".text") * elf["e_shentsize"]
    # address, place in the file and size, behind name, kind and flags
    struct.pack_into("<3Q", out, at + 16, begin, text["sh_offset"] + begin - text["sh_addr"], size)
    return bytes(out)


class Bench:
    """A kernel, its mutations and its trial. Owner: one test, which leaves it."""

    def __init__(self, name: str, image: bytes, cases: Sequence[Case], *orders: str) -> None:
        image = alone(image, name)
        self.name, self.kernel = name, mutate.Kernel(listing.load(image), name)
        self.trial = Trial(image, name, cases, orders or ORDERS)

    def __enter__(self) -> Bench:
        assert self.kernel.hazards == set() and self.kernel.waits.early == frozenset()
        return self

    def __exit__(self, *error: object) -> None:
        unharmed = error != (None, None, None) or self.trial.unharmed(self.kernel.listing.image)
        self.trial.close()
        assert unharmed, f"a mutant of {self.name} has changed the inputs of a case"

    def judge(self, mutations: Sequence[mutate.Mutation]) -> list[mutate.Verdict]:
        """What is noticed of each. One launch suffices where the static check of waits notices."""
        verdicts = []
        for mutation in mutations:
            waits = mutation.kind in ("wait deleted", "wait weakened by one")
            run = self.trial.begin if waits else self.trial
            verdict = mutate.judge(self.kernel, mutation, run, self.trial.reference)
            if waits and not verdict.flagged:
                verdict = mutate.judge(self.kernel, mutation, self.trial, self.trial.reference)
            verdicts.append(verdict)
        return verdicts


def shipped(name: str, *orders: str) -> Bench:
    """A kernel of :mod:`.attention_cases`."""
    file, cases = attention_cases.cases(name)
    return Bench(name, attention_cases.code_object(file), cases, *orders)


def summary(name: str, verdicts: Sequence[mutate.Verdict]) -> str:
    lines = [f"{name}: {mutate.noticed(verdicts):.1%} of the mutants not redundant are noticed"]
    lines.append(mutate.table(verdicts))
    for verdict in verdicts:
        mutation = verdict.mutation
        place = f"{mutation.kind} at +0x{mutation.offset:x}: {mutation.before} -> {mutation.after}"
        if verdict.redundant:
            lines.append(f"redundant: {place}: {verdict.redundant}")
        elif verdict.survived:
            lines.append(f"survived: {place}")
    return "\n".join(lines)


def expect_noticed(
    kernel: mutate.Kernel, verdicts: Sequence[mutate.Verdict], share: float, between_halves: int = 0
) -> None:
    """At least this share of the mutants that are not redundant, and all of :data:`ALWAYS`.

    But for the waits at ``between_halves`` barriers: reads of one half of an LDS buffer may be in
    flight there while the other half is copied to. Both are read and copied to in turn, so the
    bytes of the two instructions do not tell the halves apart, and no argument shows the wait to
    be redundant; no run can show that it is needed.
    """
    survivors = [v for v in verdicts if v.survived and v.mutation.kind in ALWAYS]
    at_barriers = set()
    for verdict in survivors:
        assert verdict.mutation.kind.startswith("wait "), verdict
        index = kernel.index_of(verdict.mutation.offset)
        following = kernel.listing.instructions[index + 1]
        assert following.name == "s_barrier", verdict
        at_barriers.add(following.offset)
    assert len(at_barriers) <= between_halves, survivors
    assert mutate.noticed(verdicts) >= share
