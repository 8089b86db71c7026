"""Whether the results of a case are right: against float64, and against expected bits."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..contract import Engine, TileGeometry
from ..engines import get
from .cases import Case, Results, Run

EXPECTED = Path(__file__).with_name("expected.json")
FORMAT = 1

_DTYPE = torch.bfloat16
# Half a unit in the last place of bf16, relative, and the smallest step below its normal range.
_HALF_ULP = 2.0**-8
_TINY = 2.0**-133
#: fp32 scores and sums round, relative to the weight.
_FP32 = 4e-6
_LSE = 1e-5


@dataclass
class Verdict:
    """What was found of a case.

    ``wrong`` has every reason why results are no good. ``other_bits`` names results whose bits are
    not the expected ones, ``bits`` has all SHA-256. ``worst`` is the largest error of an output,
    as a share of what the arithmetic allows.
    """

    wrong: list[str] = field(default_factory=list)
    other_bits: list[str] = field(default_factory=list)
    bits: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0


def judge(
    case: Case, engine: Engine, device: torch.device, expected: dict[str, str] | None
) -> Verdict:
    """Run a case in bf16 and compare it with float64 and, if there are any, expected bits.

    Raises:
        Refused: the engine does not take it.
    """
    tile = engine.geometry(128)
    results = case.run(Run(engine, device, _DTYPE, tile))
    exact, weights = _exact(case, tile, False), _exact(case, tile, True)
    verdict = Verdict(bits=digests(results))
    for name, got in results.items():
        if name.startswith("out"):
            error = (got.double() - exact[name]).abs()
            before = (_HALF_ULP + _FP32) * weights[name]
            share = error / (before + _HALF_ULP * (exact[name].abs() + before) + _TINY)
            verdict.worst = max(verdict.worst, float(share.nan_to_num(torch.inf).max()))
            if not (share <= 1.0).all():
                bad = int((~(share <= 1.0)).sum())
                verdict.wrong.append(f"{bad} of {got.numel()} numbers of {name} are wrong")
        elif name.startswith("lse"):
            if not torch.allclose(got.double(), exact[name].double(), rtol=0.0, atol=_LSE):
                verdict.wrong.append(f"{name} is further than {_LSE} from float64")
        elif not torch.equal(got.double(), exact[name].double()):
            verdict.wrong.append(f"{name} is not the exact one")
    if expected is not None:
        names = expected.keys() | verdict.bits.keys()
        verdict.other_bits = sorted(n for n in names if expected.get(n) != verdict.bits.get(n))
    return verdict


def digests(results: Results) -> dict[str, str]:
    """Return SHA-256 of the bytes of results, without the LSE.

    The last bits of an LSE depend on which maximum a kernel subtracted.
    """
    return {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in results.items()
        if not name.startswith("lse")
    }


@functools.cache
def _exact(case: Case, tile: TileGeometry, absolute: bool) -> Results:
    return case.run(Run(get("reference"), torch.device("cpu"), torch.float64, tile, absolute))


def read_expected() -> dict[str, dict[str, str]]:
    """Return the expected SHA-256 by case and result.

    Raises:
        OSError, ValueError: the file is missing or not of this format.
    """
    document: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise ValueError(f"{EXPECTED.name} is of format {document.get('format')}, not {FORMAT}")
    cases: dict[str, dict[str, str]] = document["cases"]
    return cases
