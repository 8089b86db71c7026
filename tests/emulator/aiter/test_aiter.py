"""Machine code that nobody here wrote or saw compiled: aiter's attention kernels, unmodified."""

from pathlib import Path

import pytest
import torch

from liteattention_rocm.contract import Rounding
from tests.oracle.attention import exact_rows

from . import bounds, clocks, launch
from .cases import FLAWS, Case, decode_cases, prefill_cases, prepare, run
from .decode import Decode
from .prefill import Prefill

FOLDER = launch.folder()
REASON = f"{launch.VARIABLE} names no folder with aiter's code objects (its hsa/gfx942)"
pytestmark = [pytest.mark.aiter, pytest.mark.skipif(FOLDER is None, reason=REASON)]
ROOT = FOLDER or Path()


@pytest.mark.parametrize("case", [*prefill_cases(), *decode_cases()], ids=str)
def test_kernels_run_as_they_are(case: Case) -> None:
    result = run(ROOT, case)
    assert result.unexplained(case.flaw) == []
    assert bool(result.findings) == bool(case.flaw)
    assert result.stray == 0
    assert result.comparison.of_bound <= 1
    assert result.comparison.lse <= 1e-5


@pytest.mark.parametrize("part", ["MI300", "MI308"])
def test_causal_fp8_kernels_scale_every_second_tile_twice(part: str) -> None:
    """Scores of the second tile of a workgroup have the scales of Q and K in them twice."""
    file = ROOT / f"fmha_v3_fwd/{part}/fwd_hd128_fp8_causal.co"
    with prepare(file, Prefill(((512, 512),), 1, 1, twice=True)) as ready:
        ready.run()
        request, (q_scale, k_scale) = ready.requests[0], ready.tensors[-3:-1]
        assert request.lse is not None
        ours = request.lse[0].double()
        once, twice = (
            exact_rows(request.q * by, request.k, request.v, causal=True, scale=ready.scale).lse[0]
            for by in (1.0, float(q_scale) * float(k_scale))
        )
    torch.testing.assert_close(ours[:256], once[:256], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[256:], twice[256:], atol=1e-5, rtol=0)
    assert (once - twice)[256:].abs().min() > 1e-3


def test_kernels_do_not_take_any_shape() -> None:
    dense = ROOT / "fmha_v3_fwd/MI300/fwd_hd128_bf16_rtz.co"
    with pytest.raises(ValueError, match="requests that are alike"):
        prepare(dense, Prefill(((1, 2), (3, 4)), 1, 1))
    with pytest.raises(ValueError, match=r"takes \[1\] rows of q per request, not \[2\]"):
        prepare(ROOT / "pa/pa_bf16_noquant_gqa8_1tg_4w.co", Decode(((2, 4),), 8))
    planned = ROOT / "pa/pa_bf16_pertokenFp8_gqa16_1tg_4w_qlen16_msk1_ps.co"
    with pytest.raises(ValueError, match="as many rows of q of every request"):
        prepare(planned, Decode(((1, 4), (2, 4)), 8))


@pytest.mark.parametrize(("rounding", "most"), [("rtne", 0.9), ("rtna", 0.93), ("rtz", 1.0)])
def test_ours_is_ahead_whatever_the_open_constants_are(rounding: Rounding, most: float) -> None:
    found = bounds.ratios(ROOT, rounding)
    assert len(found) > 20
    assert [each for each in found if each.ratio > most] == []


def test_every_flaw_is_met() -> None:
    assert {case.flaw for case in decode_cases()} == {"", *FLAWS}


@pytest.mark.parametrize("kernel", clocks.MEASURED)
def test_the_cycle_model_agrees_with_measured_kernels(kernel: str) -> None:
    measured, off = clocks.MEASURED[kernel]
    assert clocks.modelled(ROOT, kernel).per_matrix == pytest.approx(measured, rel=off)
