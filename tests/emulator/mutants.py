"""Broken copies of a kernel, tried one after the other, and what was noticed of them."""

from __future__ import annotations

from collections.abc import Sequence

from liteattention_emulator import listing, mutate

from . import attention_cases
from .attention_cases import ORDERS, Case, Trial

# No exception for these: synchronisation, wait states and addresses.
ALWAYS = {
    "wait deleted", "wait weakened by one", "barrier deleted", "wait state removed",
    "LDS offset shifted", "m0 shifted by 4", "m0 write dropped",
}  # fmt: skip


class Bench:
    """A kernel, its mutations and its trial. Owner: one test, which leaves it."""

    def __init__(self, name: str, image: bytes, cases: Sequence[Case], *orders: str) -> None:
        self.name, self.kernel = name, mutate.Kernel(listing.load(image), name)
        self.trial = Trial(image, name, cases, orders or ORDERS)

    def __enter__(self) -> Bench:
        assert self.kernel.hazards == set() and self.kernel.waits.early == frozenset()
        return self

    def __exit__(self, *error: object) -> None:
        self.trial.close()

    def judge(self, mutations: Sequence[mutate.Mutation]) -> list[mutate.Verdict]:
        return [mutate.judge(self.kernel, m, self.trial, self.trial.reference) for m in mutations]


def shipped(name: str) -> Bench:
    """A kernel of :mod:`.attention_cases`."""
    file, cases = attention_cases.cases(name)
    return Bench(name, attention_cases.code_object(file), cases)


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
