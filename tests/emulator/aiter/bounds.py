"""Our dense kernel beside AITER's of the same rounding, whatever the open constants are.

Nobody has measured the open constants of the cycle model, so a ranking that holds at their values
alone says little: here it is at each of their bounds, one at a time, and at all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from liteattention_benchmark.model import Case, record
from liteattention_emulator.recording import Recording
from liteattention_emulator.timing import replay, table
from liteattention_rocm.contract import Rounding

from .cases import prepare
from .prefill import Prefill
from .published import ROUNDINGS


@dataclass(frozen=True)
class Ratio:
    """clk per matrix instruction 32x32x8 of ours and AITER's, with the same constants.

    at: which bound, "the values" where no constant is at one.
    """

    rounding: str
    at: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def settings() -> Iterator[tuple[str, dict[str, float]]]:
    """The values; every open constant at either bound; all at their lower, all at their upper."""
    yield "the values", {}
    bounds = {c.name: (c.low, c.high) for c in table() if c.open}
    for name, pair in bounds.items():
        for value in pair:
            yield f"{name} {value:g}", {name: value}
    yield "all low", {name: low for name, (low, _) in bounds.items()}
    yield "all high", {name: high for name, (_, high) in bounds.items()}


def theirs(root: Path, rounding: Rounding, keys: int = 1536) -> Recording:
    """The first workgroup of AITER's kernel, 256 rows of q."""
    file = root / f"fmha_v3_fwd/MI300/fwd_hd128_bf16_{rounding}.co"
    with prepare(file, Prefill(((256, keys),), 1, 1)) as ready:
        recording = ready.run(record=0).recording
    assert recording is not None
    return recording


def ratios(root: Path, rounding: Rounding) -> list[Ratio]:
    """In the order of ``settings``."""
    ours, aiter = record(Case((1, 24, 4096, 128), "dense", rounding))[0], theirs(root, rounding)
    found = []
    for at, constants in settings():
        both = [replay(recording, constants).per_matrix for recording in (ours, aiter)]
        assert both[0] is not None and both[1] is not None
        found.append(Ratio(rounding, at, both[0], both[1]))
    return found


def lines(root: Path) -> list[str]:
    """A table of the values, the two settings of all constants, and the worst bound."""
    rows = ["| rounding | constants | ours | AITER's | ratio |", "|---|---|---:|---:|---:|"]
    for rounding in ROUNDINGS:
        found = ratios(root, rounding)
        worst = max(found[1:-2], key=lambda each: each.ratio)
        for each in (found[0], worst, *found[-2:]):
            name = each.at if each is not worst else f"worst of one: {each.at}"
            rows.append(
                f"| {each.rounding.upper()} | {name} | {each.ours:.2f} | {each.theirs:.2f} "
                f"| {each.ratio:.3f} |"
            )
    return rows
